"""Student prompts, teacher prompts and teacher views, as token ids (paper, appendix "Prompt and Feedback Templates").

Text that comes from a model or a dataset is data: a special token that is spelled out in it (`<|im_end|>`) is tokenized as
ordinary characters and can neither end a turn nor open one.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, cast

from transformers import PreTrainedTokenizerBase

from firedistill.models.tokens import render
from firedistill.tasks.feedback import CUT_MARK
from firedistill.tasks.guard import TaskFault
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, FeedbackField

# A teacher view: all feedback, all but field j (its index) or but several fields, or none of it.
View = int | tuple[int, ...] | Literal["full", "none"]

Message = dict[str, str]

STUDENT_OPENING = "Solve the following task."

TEACHER_OPENING = (
    "You are the feedback-conditioned teacher in on-policy self-distillation. "
    "The earlier student attempt will appear as the assistant continuation. "
    "Use the structured feedback context to revise the continuation distribution for the same task. "
    "Preserve useful reasoning tokens and end with the task's normal final-answer line. "
    "Do not quote or describe the context."
)


def student_messages(task: Task, example: Example) -> list[Message]:
    """The messages before the question, and a user message: the opening, the format instruction, the dataset prompt."""
    parts = [STUDENT_OPENING, task.format_instruction, task.prompt(example)]
    return [*map(dict, example.history), {"role": "user", "content": "\n\n".join(part for part in parts if part)}]


def teacher_messages(task: Task, example: Example, feedback: Sequence[FeedbackField], view: View = "full") -> list[Message]:
    """The messages before the question, and a user message with the feedback blocks; the view decides which keep their text.

    A removed field leaves its header and an empty text, and the others keep their numbers, so that only the fields themselves
    change. The view "none" is the student's own prompt: the teacher without any feedback.
    """
    if view == "none":
        return student_messages(task, example)
    removed = () if view == "full" else (view,) if isinstance(view, int) else view
    if not all(0 <= j < len(feedback) for j in removed):
        raise ValueError(f"view {view!r} of feedback with {len(feedback)} fields; expected 'full', 'none' or indices of fields")
    blocks = [
        f"[Context block {number}]\n{'' if number - 1 in removed else field.text}"
        for number, field in enumerate(feedback, start=1)
    ]
    content = f"{TEACHER_OPENING}\n\nTask:\n{task.prompt(example)}\n\nStructured feedback context:\n" + "\n".join(blocks)
    return [*map(dict, example.history), {"role": "user", "content": content}]


def shown_prompt(task: Task, encoder: PromptEncoder, example: Example) -> str:
    """The student prompt as text, for people to read; in its place the reason if it cannot be built this time."""
    try:
        return encoder.render(student_messages(task, example))
    except TaskFault as fault:
        return f"[{fault}]"


@dataclass(frozen=True)
class TokenBudget:
    """Limits in tokens; a prompt over its limit leaves its example out, feedback over its limit is cut field by field."""

    prompt: int = 1280
    feedback: int = 768
    context: int = 2560


class PromptEncoder:
    """Messages to token ids under the tokenizer's chat template, with special tokens in their contents neutralised.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; firedistill trains instruct models: "
                "choose one, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        control = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        # Gemma has a token for two line feeds, which is text like any other.
        control |= {content for content in added if content in tokenizer.chat_template and not content.isspace()}
        tokens = "|".join(re.escape(content) for content in sorted(control) if len(content) > 1)
        self.control_token = re.compile(f"(?={tokens})" if tokens else "(?!)")  # where one begins; they may overlap

    def encode(self, messages: list[Message]) -> list[int]:
        """Token ids of the messages followed by the opening of the assistant's turn.

        Raises:
            TaskFault: the chat template raises, takes too long, or drops or repeats a message.
        """
        return self.encode_pieces([self.pieces(messages)])[0]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text on its own, its special tokens neutralised."""
        return self.encode_pieces([self._split_tokens([(True, text)])])[0]

    def pieces(self, messages: list[Message]) -> list[str]:
        """The texts that `encode` tokenizes, each on its own: one, unless a message spells out a special token.

        Raises:
            TaskFault: as `encode`.
        """
        if not any(self.control_token.search(message["content"]) for message in messages):
            return [self.render(messages)]
        return self._split_tokens(self._segments(messages))

    def encode_pieces(self, prompts: Sequence[list[str]]) -> list[list[int]]:
        """Token ids of prompts, given as their `pieces`. Fast tokenizers use several threads for several texts."""
        texts = [well_formed(piece) for pieces in prompts for piece in pieces]
        ids = iter(self.tokenizer(texts, add_special_tokens=False).input_ids if texts else [])
        return [[token for _ in pieces for token in next(ids)] for pieces in prompts]

    def decode(self, token_ids: list[int]) -> str:
        """A response's text, without special tokens."""
        return cast(str, self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def render(self, messages: list[Message]) -> str:
        """The conversation as text, followed by the opening of the assistant's turn.

        Raises:
            TaskFault: the chat template raises or takes too long.
        """
        return render(self.tokenizer, messages, open_answer=True)

    def _split_tokens(self, segments: Sequence[tuple[bool, str]]) -> list[str]:
        """The text of the segments, cut inside every control token that a content spells out.

        Tokenized on their own, the pieces hold no such token.
        """
        pieces, open_piece = [], ""
        for is_content, text in segments:
            start = 0
            for found in self.control_token.finditer(text) if is_content else ():
                end = found.start() + 1  # between the first character of the token and the rest
                pieces.append(open_piece + text[start:end])
                open_piece, start = "", end
            open_piece += text[start:]
        return [*pieces, open_piece]

    def _segments(self, messages: list[Message]) -> list[tuple[bool, str]]:
        """Template text and contents in turn, found by rendering marks in the contents' place."""
        marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
        rest = self.render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
        once = all(rest.count(mark) == 1 for mark in marks)
        segments = []
        for message, mark in zip(messages, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found or not once:
                raise TaskFault("the chat template drops or repeats a message, so special tokens in it cannot be neutralised")
            segments += [(False, before), (True, message["content"])]
        return [*segments, (False, rest)]


def well_formed(text: str) -> str:
    """Halves of surrogate pairs, which JSON and Python can hold and no tokenizer can read, become U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def field_groups(feedback: Sequence[FeedbackField]) -> list[tuple[str, View]]:
    """What attribution removes together: the name of each group, or of a field on its own, and the view without it."""
    members: dict[str, list[int]] = {}
    for j, field in enumerate(feedback):
        members.setdefault(field.group or field.name, []).append(j)
    return [(name, fields[0] if len(fields) == 1 else tuple(fields)) for name, fields in members.items()]


def grouped(feedback: Sequence[FeedbackField], groups: Mapping[str, str]) -> tuple[FeedbackField, ...]:
    """The feedback, where the first pattern that fits the name of a field (`test_*`) decides its group; others keep theirs."""
    return tuple(
        replace(field, group=next((groups[pattern] for pattern in groups if fnmatchcase(field.name, pattern)), field.group))
        for field in feedback
    )


def joined(feedback: Sequence[FeedbackField], most: int | None) -> tuple[FeedbackField, ...]:
    """The feedback with at most `most` fields or groups: of more, neighbouring ones are joined to groups of even sizes.

    A new group has the names of its first and last member, `test_5..test_8`.
    """
    groups = [name for name, _ in field_groups(feedback)]
    if most is None or len(groups) <= most:
        return tuple(feedback)
    ends = [len(groups) * k // most for k in range(most + 1)]
    names: dict[str, str] = {}
    for first, end in itertools.pairwise(ends):
        if end - first > 1:
            names |= dict.fromkeys(groups[first:end], f"{groups[first]}..{groups[end - 1]}")
    return tuple(replace(field, group=names.get(field.group or field.name, field.group)) for field in feedback)


def fit_feedback(
    feedback: Sequence[FeedbackField], encoder: PromptEncoder, budget: int
) -> tuple[tuple[FeedbackField, ...], list[str]]:
    """Feedback within a budget of tokens, and the names of the fields that were cut.

    Short fields keep all their text; the long ones share what is left evenly, and each ends with a visible mark.
    """
    sizes = [len(encoder.encode_text(field.text)) for field in feedback]
    if sum(sizes) <= budget:
        return tuple(feedback), []
    share = fair_share(sizes, budget)
    cut = [field.name for field, size in zip(feedback, sizes, strict=True) if size > share]
    return tuple(
        replace(field, text=_shortened(field.text, share, encoder)) if size > share else field
        for field, size in zip(feedback, sizes, strict=True)
    ), cut


def fair_share(sizes: Sequence[int], budget: int) -> int:
    """The largest limit per field with which all fields together stay within the budget."""
    left = budget
    for position, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - position)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)


def _shortened(text: str, size: int, encoder: PromptEncoder) -> str:
    """The longest beginning of `text` that, with the mark, has at most `size` tokens (a share below the mark leaves the mark)."""
    too_long = bisect.bisect_left(
        range(1, len(text) + 1), True, key=lambda end: len(encoder.encode_text(text[:end].rstrip() + CUT_MARK)) > size
    )
    return text[:too_long].rstrip() + CUT_MARK
