"""Structured feedback about one response, in separable fields (paper, appendix "Feedback Field Construction").

The four fields state what is wrong (`verifier`), how the answer was read (`parser`), how the decision was made (`provenance`), and
whether the response keeps the format (`format`). Each field is one line, `title: key=value; key=value.`, worded as in the paper's
example box. Only `verifier` contains the gold answer.

All functions are pure and take time linear in the length of the response. Truncated text ends with a mark.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firedistill.tasks.answers.numbers import HASH_MARKER, count_numbers, find_numbers
from firedistill.tasks.types import Example, FeedbackField, Verdict

if TYPE_CHECKING:
    from firedistill.tasks.task import Task

MAX_LINE_CHARACTERS = 160
MAX_SNIPPETS = 3
MAX_SNIPPET_CHARACTERS = 60
MAX_PROMPT_CUES = 6
MAX_TAIL_NUMBERS = 4
MAX_NUMBER_CHARACTERS = 40
CUT_MARK = " [cut]"
NO_PARSE = "<no parse>"
NO_GOLD = "<any answer that the checker accepts>"

# A number, one to eight pairs of an operator and a number, and the result if one is stated: `6 × 7 = 40`. Every quantifier is bounded
# and possessive, and no match starts inside a number, so that a line of a million digits costs a million steps.
_NUMBER = r"[-−+]?+[$£€]?+\d{1,15}+(?:,\d{3}){0,5}+(?:\.\d{1,15}+)?+%?+"
_OPERATOR = r"\s{0,3}+(?:\\times|\\cdot|\\div|[-−+*/×·÷xX])\s{0,3}+"
_EXPRESSION = re.compile(rf"(?<![\w.,]){_NUMBER}(?:{_OPERATOR}{_NUMBER}){{1,8}}+(?:\s{{0,3}}+=\s{{0,3}}+{_NUMBER})?+", re.ASCII)


def structured_feedback(task: Task, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
    """The paper's context c = (b_1, b_2, b_3, b_4) for one response.

    Args:
        task: gives the names and the prompt that the fields quote.
        example: the problem.
        response: the student's text; may be empty.
        verdict: the verifier's judgement of this response.

    Returns:
        Four fields in native order, named `verifier`, `parser`, `provenance`, `format`.

    Source: paper, appendix "Feedback Field Construction"; the wording is that of its example box.
    """
    return (
        verifier_field(verdict),
        parser_field(task, example, response, verdict),
        provenance_field(task, example, response, verdict),
        format_field(task, response, verdict),
    )


def verifier_field(verdict: Verdict) -> FeedbackField:
    """b_1: whether the response is correct, its answer, the accepted answer, and the required change."""
    expected = _quote(verdict.expected or NO_GOLD)
    if verdict.correct:
        revision = ["keep the submitted final answer", "instruction=retain the final answer and the required output format"]
    else:
        revision = [
            f"replace the submitted final answer with {expected}",
            "instruction=revise the final answer and retain the required output format",
        ]
    items = [
        "source=reference_checker",
        f"status={'correct' if verdict.correct else 'incorrect'}",
        "decision=final",
        f"expected/accepted final answer={expected}",
        f"submitted normalized answer={_submitted(verdict)}",
        *revision,
    ]
    return FeedbackField("verifier", _line("Verifier feedback", items))


def parser_field(task: Task, example: Example, response: str, verdict: Verdict) -> FeedbackField:
    """b_2: how the final answer was extracted from the response."""
    last_line = _last_line(response)
    items = [
        "source=response_parser",
        f"task uid={_quote(example.uid)}",
        f"task type={task.type_name}",
        f"expected answer type={task.answer_type}",
        f"final marker={_marker(task)}",
        f"marker count={count_markers(task.final_marker, response)}",
        f"parse success={'no' if verdict.submitted is None else 'yes'}",
        f"extracted normalized final answer={_submitted(verdict)}",
        f"final line snapshot={quoted(last_line) if last_line else 'none'}",
    ]
    if not example.labels:  # the paper records nearby numbers for numerical tasks only
        items.append(f"numeric tokens near parsed span={_last_numbers(last_line)}")
    return FeedbackField("parser", _line("Parser diagnostics", items))


def provenance_field(task: Task, example: Example, response: str, verdict: Verdict) -> FeedbackField:
    """b_3: how the decision was made, and statistics of the response."""
    choices = [f"choice labels=[{', '.join(example.labels)}]"] if example.labels else []
    items = [
        "source=environment_audit",
        f"dataset adapter={task.name}",
        f"task type={task.type_name}",
        f"task fingerprint={_quote(task_fingerprint(task.name, example.uid))}",
        *choices,
        f"prompt numeric cues={_first_numbers(task.prompt(example))}",
        f"checker mode={task.checker_mode}",
        "normalization=task_adapter_final_answer",
        f"submitted normalized answer={_submitted(verdict)}",
        f"response chars={len(response)}",
        f"response nonempty lines={len(_nonempty_lines(response))}",
        f"response numeric-token count={count_numbers(response)}",
    ]
    return FeedbackField("provenance", _line("Context provenance", items))


def format_field(task: Task, response: str, verdict: Verdict) -> FeedbackField:
    """b_4: whether the response keeps the required format."""
    count, snippets = _expressions(response)
    items = [
        "source=format_checker",
        f"required final marker={_marker(task)}",
        f"final-line parse result={_submitted(verdict)}",
        f"format issues={', '.join(format_issues(task.final_marker, response)) or 'none'}",
        f"reasoning text before final line={'yes' if len(_nonempty_lines(response)) > 1 else 'no'}",
        f"arithmetic expression count={count}",
        f"arithmetic expression snippets={snippets}",
        "instruction=end with exactly one task-normal final-answer line and no text after it",
    ]
    return FeedbackField("format", _line("Response-format diagnostics", items))


def task_fingerprint(task_name: str, uid: str) -> str:
    """Eight hexadecimal digits that identify a problem, the same on every machine and in every run."""
    return hashlib.blake2b(f"{task_name}|{uid}".encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def format_issues(marker: str, response: str) -> list[str]:
    """Violations of the required format, in fixed order; none if the task has no marker."""
    if not marker:
        return []
    issues = []
    count = count_markers(marker, response)
    if count == 0:
        issues.append("missing_final_marker")
    if count > 1:
        issues.append("multiple_final_markers")
    last = _last_line(response)
    if not last.startswith(marker) or count_markers(marker, last) == 0:
        issues.append("final_line_not_canonical")
    return issues


def count_markers(marker: str, text: str) -> int:
    """How often a marker stands in a text; `#####` is a heading, not `####`."""
    if marker == "####":
        return len(HASH_MARKER.findall(text))
    return text.count(marker) if marker else 0


def _line(title: str, items: Sequence[str]) -> str:
    return f"{title}: {'; '.join(items)}."


def _quote(text: str) -> str:
    """`text` in backticks. Backticks inside become apostrophes, so that a response cannot close its own quotation."""
    return "`" + text.replace("`", "'") + "`"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - len(CUT_MARK)] + CUT_MARK


def quoted(text: str, limit: int = MAX_LINE_CHARACTERS) -> str:
    """A text on one line, in backticks, cut visibly."""
    return _quote(_cut(" ".join(text.split()), limit))


def _submitted(verdict: Verdict) -> str:
    return _quote(NO_PARSE) if verdict.submitted is None else quoted(verdict.submitted)


def _marker(task: Task) -> str:
    return _quote(task.final_marker) if task.final_marker else "none"


def _nonempty_lines(response: str) -> list[str]:
    lines = response.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [line.strip() for line in lines if line.strip()]


def _last_line(response: str) -> str:
    lines = _nonempty_lines(response)
    return lines[-1] if lines else ""


def _first_numbers(text: str) -> str:
    numbers = find_numbers(text)
    return _number_list([*numbers[:MAX_PROMPT_CUES], *(["..."] if len(numbers) > MAX_PROMPT_CUES else [])])


def _last_numbers(text: str) -> str:
    numbers = find_numbers(text)
    return _number_list([*(["..."] if len(numbers) > MAX_TAIL_NUMBERS else []), *numbers[-MAX_TAIL_NUMBERS:]])


def _number_list(numbers: Sequence[str]) -> str:
    return f"[{', '.join(_cut(number, MAX_NUMBER_CHARACTERS) for number in numbers)}]" if numbers else "none"


def _expressions(response: str) -> tuple[int, str]:
    """The number of arithmetic expressions in the response, and the first few of them, quoted."""
    expressions = _EXPRESSION.findall(response)
    snippets = [quoted(expression, MAX_SNIPPET_CHARACTERS) for expression in expressions[:MAX_SNIPPETS]]
    if len(expressions) > MAX_SNIPPETS:
        snippets.append("...")
    return len(expressions), " | ".join(snippets) or "none"
