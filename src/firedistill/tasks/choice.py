"""Multiple-choice tasks: AQuA-RAT, ARC-Challenge, WinoGrande, WiC, MMLU-Pro (paper, appendix "Per-dataset Templates")."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from string import ascii_uppercase
from typing import Any

from firedistill.tasks.answers.choices import choice_answer, lenient_choice_correct
from firedistill.tasks.sources import (
    PARQUET_EXPORT,
    DataError,
    Rows,
    integer_field,
    label_error,
    mapping_field,
    optional_text,
    text_field,
    text_list_field,
)
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, Verdict

CHOICE_INSTRUCTION = (
    "Reason step by step about the options. Then, on a new final line, write `Answer: ` followed by the single option letter "
    "only (for example `Answer: B`). Write nothing after that line."
)

# A line that only states the option, as AQuA-RAT spells it: `ANSWER:E`, `The answer is (B).`, `Correct answer - A`.
_CLOSING_STATEMENT = re.compile(
    r"(?:so |hence |therefore )?,? ?(?:the )?(?:correct )?(?:answer|ans|option)(?: is)? ?[-:=.]? ?(?:option )?\(?[A-E]\)?\.?",
    re.IGNORECASE,
)


class ChoiceTask(Task):
    """A task whose answers are option letters after `Answer:`. A subclass defines only `example`; see `choice_example`."""

    type_name = "multiple_choice"
    answer_type = "choice-label"
    checker_mode = "exact-match"
    final_marker = "Answer:"
    format_instruction = CHOICE_INSTRUCTION

    def verify(self, example: Example, response: str) -> Verdict:
        """Correct if the response chooses the gold letter."""
        answer = choice_answer(response, example.labels, example.options)
        return Verdict(
            correct=answer.value == example.answer,
            submitted=answer.value,
            expected=example.answer,
            well_formed=answer.well_formed,
            lenient_correct=lenient_choice_correct(response, example.labels, example.options, example.answer),
        )


def choice_example(
    uid: str, stem: str, options: Sequence[str], answer: str, *, working: str | None = None, category: str | None = None
) -> Example:
    """An example with options lettered by position: the stem, a blank line, `Choices:`, then `A. first option` and so on.

    Args:
        stem: the text before the options.
        answer: the letter of the correct option.
        working: gold reasoning without its closing statement. Without it, the solution is only the final-answer line.
    """
    labels = tuple(ascii_uppercase[: len(options)])
    lettered = "\n".join(f"{label}. {option}" for label, option in zip(labels, options, strict=True))
    return Example(
        uid=uid,
        question=f"{stem}\n\nChoices:\n{lettered}",
        answer=answer,
        labels=labels,
        options=tuple(options),
        solution=f"{working}\nAnswer: {answer}" if working else f"Answer: {answer}",
        category=category,
    )


class AquaRat(ChoiceTask):
    """Algebra word problems with five options and rationales (Ling et al., 2017).

    A row: {"question": "The edge of a cube is 7a cm. Find its surface?", "options": ["A)24a8", "B)24a4", "C)24a1", "D)24a2",
    "E)294a2"], "rationale": "6a2 = 6 * 7a * 7a = 294a2", "correct": "E"}

    The solution is the rationale, with a closing statement of the letter replaced by the final-answer line.
    """

    name = "aqua_rat"
    hub_id = "deepmind/aqua_rat"
    hub_config = "raw"
    eval_split = "validation"
    other_splits = ("test",)

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        options = _options(text_list_field(row, "options"), "options")
        options = [_without_letter(option, letter) for option, letter in zip(options, ascii_uppercase, strict=False)]
        answer = _letter(row, "correct", len(options))
        working = _without_closing_statement(optional_text(row, "rationale") or "")
        return choice_example(uid, text_field(row, "question"), options, answer, working=working)


class ArcChallenge(ChoiceTask):
    """Grade-school science questions that simple methods fail on (Clark et al., 2018).

    A row: {"id": "Mercury_SC_415702", "question": "George wants to warm his hands quickly by rubbing them. Which skin surface
    will produce the most heat?", "choices": {"text": ["dry palms", "wet palms", "palms covered with oil", "palms covered
    with lotion"], "label": ["A", "B", "C", "D"]}, "answerKey": "A"}

    Some rows label their options 1 to 4. All options, and the key, are lettered by position.
    """

    name = "arc_challenge"
    hub_id = "allenai/ai2_arc"
    hub_config = "ARC-Challenge"
    folder = "ai2_arc"
    eval_split = "validation"
    other_splits = ("test",)

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        choices = mapping_field(row, "choices")
        options = _options(text_list_field(choices, "text", of="choices"), "choices.text")
        published = text_list_field(choices, "label", of="choices")
        if len(published) != len(options):
            raise DataError(
                f"field 'choices': expected as many labels as texts, found {len(published)} and {len(options)}; "
                "complete the shorter list"
            )
        key = text_field(row, "answerKey")
        if key not in published:
            raise label_error("answerKey", key, published)
        return choice_example(uid, text_field(row, "question"), options, ascii_uppercase[published.index(key)])


class WinoGrande(ChoiceTask):
    """Sentences with a blank that one of two nouns fills (Sakaguchi et al., 2021).

    A row: {"sentence": "Sarah was a much better surgeon than Maria so _ always got the easier cases.", "option1": "Sarah",
    "option2": "Maria", "answer": "2"}

    The hub configuration is `winogrande_debiased`, as in the paper; set `hub_config` on the task for another. Local files may be
    of any configuration, so a uid identifies a row only together with its data. The published `test` split has no labels and is
    not available.
    """

    name = "winogrande"
    hub_id = "allenai/winogrande"
    hub_config = "winogrande_debiased"
    eval_split = "validation"

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        answer = text_field(row, "answer")
        if answer not in ("1", "2"):
            raise label_error("answer", answer, ("1", "2"))
        stem = (
            "Choose the option that best fills the blank in the sentence. "
            "Resolve the reference using commonsense reasoning.\n\n"
            f"Sentence:\n{text_field(row, 'sentence')}"
        )
        return choice_example(uid, stem, [text_field(row, "option1"), text_field(row, "option2")], "AB"[int(answer) - 1])


class WiC(ChoiceTask):
    """Does a word mean the same in two sentences? (Pilehvar and Camacho-Collados, 2019; in SuperGLUE)

    A row: {"word": "place", "sentence1": "Do you want to come over to my place later?", "sentence2": "A political system with
    no place for the less prominent groups.", "start1": 31, "start2": 27, "end1": 36, "end2": 32, "idx": 0, "label": 0}

    A is label 0 (different meaning), B is label 1 (same meaning). The published `test` split has no labels and is not available.
    """

    name = "wic"
    hub_id = "aps/super_glue"
    hub_config = "wic"
    hub_revision = PARQUET_EXPORT
    folder = "super_glue_wic"
    eval_split = "validation"

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        label = integer_field(row, "label")
        if label not in (0, 1):
            raise label_error("label", label, ("0", "1"))
        stem = (
            f"Consider the word '{text_field(row, 'word')}' in the two sentences below. "
            "Determine whether it has the same meaning in both sentences.\n\n"
            f"Sentence 1:\n{text_field(row, 'sentence1')}\n\nSentence 2:\n{text_field(row, 'sentence2')}"
        )
        return choice_example(uid, stem, ["Different meaning", "Same meaning"], "AB"[label])


class MMLUPro(ChoiceTask):
    """University questions with up to ten options, in six categories (Wang et al., 2024).

    A row: {"question_id": 2804, "question": "Which of the following would most likely provide examples of mitotic cell
    divisions?", "options": ["cross section of muscle tissue", "longitudinal section of a shoot tip", ...], "answer": "B",
    "answer_index": 1, "cot_content": "", "category": "biology", "src": "ori_mmlu-high_school_biology"}

    There is no training split: `test` is divided, and rows with the same question stay together. Examples alternate between the
    categories, so that the first n are balanced. The published `validation` split (worked examples for prompting) is available by
    name.
    """

    name = "mmlu_pro"
    hub_id = "TIGER-Lab/MMLU-Pro"
    train_split = eval_split = "test"
    other_splits = ("validation",)
    division_seed = 31337
    categories: tuple[str, ...] = ("biology", "chemistry", "computer science", "economics", "engineering", "physics")

    def usable(self, row: Mapping[str, Any]) -> bool:
        return text_field(row, "category") in self.categories

    def division_key(self, row: Mapping[str, Any]) -> str:
        return " ".join(text_field(row, "question").lower().split())

    def ordered(self, rows: Rows, indices: Sequence[int], seed: int) -> list[int]:
        shuffled = super().ordered(rows, indices, seed)
        queues = [[index for index in shuffled if rows[index]["category"].strip() == category] for category in self.categories]
        return [index for turn in zip_longest(*queues) for index in turn if index is not None]

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        options = text_list_field(row, "options")
        while options and options[-1].upper() in ("N/A", ""):  # padding; N/A before the end may be a real option
            options.pop()
        options = _options(options, "options")
        if optional_text(row, "answer") is not None:  # if letter and index differ, the letter is correct
            answer = _letter(row, "answer", len(options))
        else:
            answer = _letter_of_index(row, "answer_index", len(options))
        working = (optional_text(row, "cot_content") or "").removeprefix("A: ").strip()
        category = text_field(row, "category")
        return choice_example(uid, text_field(row, "question"), options, answer, working=working, category=category)


def _options(options: list[str], name: str) -> list[str]:
    if not 2 <= len(options) <= len(ascii_uppercase):
        raise DataError(f"field {name!r}: expected 2 to 26 options, found {len(options)}; complete the list or remove the row")
    return options


def _letter(row: Mapping[str, Any], name: str, count: int) -> str:
    letter = text_field(row, name).upper()
    labels = ascii_uppercase[:count]
    if len(letter) != 1 or letter not in labels:
        raise label_error(name, letter, labels)
    return letter


def _letter_of_index(row: Mapping[str, Any], name: str, count: int) -> str:
    index = integer_field(row, name)
    if not 0 <= index < count:
        raise label_error(name, index, [str(position) for position in range(count)])
    return ascii_uppercase[index]


def _without_letter(option: str, letter: str) -> str:
    """`A)21` as `21`, and the doubled prefix of some published options, `A)A)12`, as `12`."""
    while option.startswith(f"{letter})"):
        option = option[2:].lstrip()
    return option


def _without_closing_statement(rationale: str) -> str:
    body, _, last = rationale.rpartition("\n")
    return body.rstrip() if _CLOSING_STATEMENT.fullmatch(" ".join(last.split())) else rationale
