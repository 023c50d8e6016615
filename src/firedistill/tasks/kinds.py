"""How an answer is read, by the name that `--answer` gives it. Each kind is a task without data: a subclass defines only `example`."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import unicodedata
from collections.abc import Hashable
from decimal import Decimal
from typing import Any

from firedistill.tasks.answers.numbers import count_normalized, exact_values, numeric_gold
from firedistill.tasks.answers.text import ANSWER_MARKER, BLANK, INVISIBLE, boxed_latex
from firedistill.tasks.choice import ChoiceTask
from firedistill.tasks.isolated import IsolatedScorer
from firedistill.tasks.numeric import NumericTask
from firedistill.tasks.reading import BadRow
from firedistill.tasks.sources import DataError, kind_of
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, Verdict

FINAL_LINE = "Then, on a new final line, write `Answer: ` followed by the answer only. Write nothing after that line."
MARKERS_IN_JSON = 8  # `Answer:` may be part of a text of the answer
MAX_ANSWER_CHARACTERS = 20_000
_PAIRS = {mark: mark for mark in "*_`\"'"}  # markdown and quotation marks, with those that may close them
_PAIRS |= {"“": "”", "‘": "’", "„": "“”", "‚": "‘’", "«": "»", "»": "«", "‹": "›", "›": "‹", "「": "」", "『": "』"}
_NOT_COMPARED = {**dict.fromkeys(INVISIBLE), ord("。"): "."}
_MARKS = re.compile(r"([*_`\"])\1*+|[\u201c\u201d]")
_SUPERSCRIPTS = re.compile(r"[\u00b2\u00b3\u00b9\u2070-\u207f]+")
_BEFORE_JSON = re.compile(r"(?:```(?:json\b|[A-Za-z]+(?=[ \t\r]*\n))?|[\s*_`])*+", re.IGNORECASE)
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_DELIMITER = re.compile(r"(?<!\\)(?:\$\$?|\\[()\[\]])")  # of a formula in LaTeX
_MAGNITUDE = re.compile(r"\d\s*[KkMB]\b")  # neither $1.5M nor $1.5 M is 1.5; the M of a response may be a unit


class ExactTask(Task):
    """A task whose answers are texts after `Answer:`. Case, repeated blanks, quotation marks around the answer, markdown and a final
    full stop do not count. `Example.metadata["accepted"]` may list other accepted answers."""

    type_name = "short_answer"
    answer_type = "text"
    checker_mode = "exact-match"
    final_marker = "Answer:"
    format_instruction = f"Reason step by step. {FINAL_LINE}"

    def verify(self, example: Example, response: str) -> Verdict:
        submitted = final_line(response)
        correct = submitted is not None and accepts(example, submitted)
        lines = [line for line in response.splitlines() if line.strip()]
        lenient = correct or (bool(lines) and accepts(example, lines[-1]))
        return Verdict(correct, submitted, example.answer, submitted is not None, lenient)


class RegexTask(ExactTask):
    """A task whose answers a regular expression finds in the response: the first group of its last match, or all of it.

    Args:
        pattern: in Python's syntax; `.` also matches a line feed only if the pattern says so by `(?s)`.
    """

    answer_type = "regex"
    final_marker = ""
    format_instruction = ""

    def __init__(self, pattern: str):
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise DataError(f"answer is 'regex:{pattern}': not a regular expression ({error})") from error

    def verify(self, example: Example, response: str) -> Verdict:
        found = None
        for found in self.pattern.finditer(response):  # noqa: B007 - the last match
            pass
        group = 1 if self.pattern.groups else 0
        submitted = None if found is None or found[group] is None else unmarked(found[group], response[: found.start(group)])
        correct = submitted is not None and accepts(example, submitted)
        return Verdict(correct, submitted, example.answer, submitted is not None, correct)


class JsonTask(Task):
    """A task whose answers are JSON values after `Answer:`, equal if they hold the same values: the order of keys, keys whose value is
    null, blanks, and the notation of a number do not count."""

    type_name = "structured_output"
    answer_type = "json"
    checker_mode = "json-equality"
    final_marker = "Answer:"
    format_instruction = (
        "Reason step by step. Then, on a new final line, write `Answer: ` followed by the answer as JSON in one line. "
        "Write nothing after that line."
    )

    def verify(self, example: Example, response: str) -> Verdict:
        ends = [match.end() for match in ANSWER_MARKER.finditer(response)][-MARKERS_IN_JSON:]
        rests = (stated_json(response[end:]) or canonical_json(fenced(response[end:])) for end in reversed(ends))
        submitted = next((value for value in rests if value is not None), None)
        gold = without_nulls(example.answer)
        correct = without_nulls(submitted) == gold
        lenient = correct or without_nulls(canonical_json(fenced(response))) == gold
        return Verdict(correct, submitted, example.answer, submitted is not None, lenient)


class MathTask(Task):
    """A task whose answers are mathematical expressions, compared by the library math-verify (`pip install 'firedistill[math]'`).

    The library computes with what it reads (`10^{10^{10}}`) and evaluates answers that are not LaTeX. It therefore sees LaTeX only, in
    a process of its own with limits on time and memory.

    Raises:
        ImportError: math-verify is not installed.
    """

    type_name = "math"
    answer_type = "expression"
    checker_mode = "symbolic-equivalence"
    final_marker = "Answer:"
    format_instruction = (
        "Reason step by step. Then, on a new final line, write `Answer: ` followed by the final answer in \\boxed{}, "
        "for example `Answer: \\boxed{\\frac{1}{2}}`. Write nothing after that line."
    )

    COMPARISON = r"""
import logging
logging.disable(logging.CRITICAL)
from math_verify import LatexExtractionConfig, parse, verify
def read(text):
    return parse("\\boxed{" + text + "}", [LatexExtractionConfig()], "no_fallback", parsing_timeout=None)
def score(gold, answer):
    expected = read(gold)
    return bool(expected) and verify(expected, read(answer), timeout_seconds=None)
"""

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("answers of the kind math need the package math-verify: pip install 'firedistill[math]'")
        self.scorer = IsolatedScorer(self.COMPARISON, seconds=2.0)  # a verdict makes up to two comparisons
        self.scorer.start()

    def verify(self, example: Example, response: str) -> Verdict:
        line = final_line(response)
        submitted = None if line is None else expression(line)
        correct = self.equal(example.answer, submitted)
        other = undelimited(boxed_latex(response) or "") or expression(last_line(response))
        lenient = correct or (other != submitted and self.equal(example.answer, other))
        return Verdict(correct, submitted, example.answer, submitted is not None, lenient)

    def equal(self, gold: str, answer: str | None) -> bool:
        """Whether two expressions in LaTeX have the same value; False if either is too long, too costly or cannot be read."""
        if not answer or max(len(gold), len(answer)) > MAX_ANSWER_CHARACTERS:
            return False
        return answer == gold or self.scorer.score(gold, answer) == 1.0


KINDS: dict[str, type[Task]] = {
    "numeric": NumericTask,
    "choice": ChoiceTask,
    "exact": ExactTask,
    "regex": RegexTask,
    "json": JsonTask,
    "math": MathTask,
}


def load_kind(answer: str) -> tuple[Task, int | None]:
    """The kind that `--answer` names, `KIND` or `KIND:ARGUMENT`, and the position of the first option where choices are numbered.

    Raises:
        ValueError: there is no such kind, or its argument is missing or wrong.
        ImportError: the kind needs a package that is not installed.
    """
    name, colon, argument = answer.partition(":")
    if name not in KINDS:
        raise ValueError(f"answer is {answer!r}: expected {', '.join(KINDS)} (regex:PATTERN, choice:0 or choice:1)")
    if name == "regex":
        if not argument:
            raise ValueError("answer is 'regex': expected the pattern after a colon, for instance 'regex:Result: (.+)'")
        return RegexTask(argument), None
    if name == "choice" and colon:
        if argument not in ("0", "1"):
            raise ValueError(f"answer is {answer!r}: expected choice:0 or choice:1, the number of the first option")
        return ChoiceTask(), int(argument)
    if colon:
        raise ValueError(f"answer is {answer!r}: {name} has no argument")
    return KINDS[name](), None


# ---- Golds -------------------------------------------------------------------------------------------------------------------


def read_gold(kind: Task, value: Any, subject: str) -> tuple[str, str, tuple[str, ...]]:
    """The gold answer in a cell: normalized, the working before it (or an empty text), and other accepted answers.

    A list of one value stands for the value. For texts, a longer list holds accepted answers, the first of which is shown.

    Args:
        subject: names the cell in errors.

    Raises:
        BadRow: it is empty, or not an answer of this kind.
    """
    if isinstance(kind, JsonTask):
        if value is None:
            raise BadRow(f"{subject} is empty", "fill it in (the text 'null' stands for JSON's null) or remove the row")
        text = value if isinstance(value, str) else json.dumps(value)
        gold = canonical_json(text)
        if gold is None:
            raise BadRow(f"{subject} is not JSON", "write a JSON value; texts need quotation marks", kind_of(value))
        return gold, "", ()
    if isinstance(kind, ExactTask):
        value = [whole(item) for item in value] if isinstance(value, list) else whole(value)
    if isinstance(value, list) and value and (isinstance(kind, ExactTask) or len(value) == 1):
        texts = [_text(item, subject) for item in value]
        gold, working, _ = read_gold(kind, texts[0], subject)
        return gold, working, tuple(texts) if len(texts) > 1 else ()
    text = _text(value, subject)
    if isinstance(kind, NumericTask):
        if _INTEGER.fullmatch(text):
            return text, "", ()  # the common case, and what `numeric_gold` returns
        working, marker, final = text.rpartition("####")
        gold = numeric_gold(final.strip())
        if count_normalized(gold) == 0 or _MAGNITUDE.search(final):
            raise BadRow(f"{subject} is not a number", "correct it, or read answers as --answer exact", kind_of(value))
        return gold, working.strip(), ()
    if isinstance(kind, MathTask):
        inner = boxed_latex(text) if "\\boxed{" in text else None
        return (
            undelimited(inner or "") or expression(text) or text,
            text if inner and not text.startswith("\\boxed") else "",
            (),
        )
    return text, "", ()


def whole(value: Any) -> Any:
    """1.0 as 1: pandas makes floats of whole numbers where one of the column is missing."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any, subject: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"  # of a zero, `str` may give 0E-10
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if not isinstance(value, str | None):
        raise BadRow(f"{subject} is not one answer", "write a text or a number", kind_of(value))
    if value is None or not value.strip():
        raise BadRow(f"{subject} is empty", "fill it in or remove the row")
    return value.strip()


def final_line(response: str) -> str | None:
    """What follows the last `Answer:` on its line; None if nothing does. One at the end of the response, without text, is left out."""
    markers, end = list(ANSWER_MARKER.finditer(response)), len(response)
    while len(markers) > 1 and not response[markers[-1].end() : end].strip(BLANK):
        end = markers.pop().start()
    if not markers:
        return None
    start = markers[-1].end()
    line = unmarked(response[start:end].split("\n")[0], response[:start])
    return line if line.strip("*") else None


def unmarked(text: str, before: str) -> str:
    """A text without the markdown and the quotation marks that open before it on its line: `Paris**` after `**Answer: `."""
    opened, text = _open_marks(before.rpartition("\n")[2]), text.strip()
    closed, bare = opened[::-1].replace("\u201c", "\u201d"), text.rstrip(" .")
    starts, ends = text.startswith(opened), bare.endswith(closed)
    if starts and (not ends or text.startswith(f"{opened} ")):  # **Answer:** Paris
        return text[len(opened) :].strip()
    return bare.removesuffix(closed).rstrip() if ends and not starts else text


def _open_marks(line: str) -> str:
    """The marks of a line that none closes. A mark after a letter or a digit opens nothing, nor does the star of a list."""
    opened: list[str] = []
    for run in _MARKS.finditer(line):
        mark, after = run[0].replace("\u201d", "\u201c"), line[run.end() : run.end() + 1]
        if opened and opened[-1] == mark:
            opened.pop()
        elif not line[max(run.start() - 1, 0) : run.start()].isalnum() and (len(mark) > 1 or not after.isspace()):
            opened.append(mark)
    return "".join(opened)


def last_line(response: str) -> str:
    return next((line for line in reversed(response.split("\n")) if line.strip()), "")


def expression(line: str) -> str | None:
    """The expression in LaTeX that a line states: that in `\\boxed{}`, the formula at its beginning if no number follows, or the line.

    None if boxes differ, or there is nothing.
    """
    if "\\boxed{" in line:
        boxes = {undelimited(boxed_latex("\\boxed{" + rest) or "") for rest in line.split("\\boxed{")[1:]} - {""}
        return boxes.pop() if len(boxes) == 1 else None
    before, *formulas = _DELIMITER.split(line)
    alone = len(formulas) == 2 and not undelimited(before) and not re.search(r"[\d=]", formulas[1])
    return undelimited(formulas[0] if alone else line) or None


def undelimited(latex: str) -> str:
    """An expression without the dollars and the markdown around it and a full stop at its end."""
    return latex.lstrip(" $*_`").rstrip(" $*_`.")


def accepts(example: Example, text: str) -> bool:
    """Whether a text is an accepted answer, but for what does not count; see `plain`."""
    return plain(text) in {plain(answer) for answer in example.metadata.get("accepted", (example.answer,))}


def comparable(kind: Task, example: Example) -> Hashable:
    """What a kind compares an answer with, equal for golds that accept the same answers."""
    if isinstance(kind, ExactTask):
        return frozenset(map(plain, example.metadata.get("accepted", (example.answer,))))
    if isinstance(kind, NumericTask):
        return exact_values(example.answer)
    return without_nulls(example.answer) if isinstance(kind, JsonTask) else example.answer


def plain(text: str) -> str:
    """A text without what does not count in a comparison: case, repeated blanks, and quotes, markdown and a full stop around it.

    Quotes and markdown are around it in pairs. Powers stay powers: 10² is 10^2, not 102. Invisible characters do not count.
    """
    text = text if text.isascii() else text.translate(_NOT_COMPARED)
    line = " ".join(unicodedata.normalize("NFKC", _SUPERSCRIPTS.sub(r"^\g<0>", text)).casefold().split())
    start, end = 0, len(line)
    while start < end:
        if line[end - 1] in " .":
            end -= 1
        elif line[start] == " ":
            start += 1
        elif end - start > 1 and line[end - 1] in _PAIRS.get(line[start], ""):
            start, end = start + 1, end - 1
        else:
            break
    return line[start:end] or line


def fenced(text: str) -> str:
    """The content of the last block of code, or the text itself."""
    blocks = text.split("```")
    if len(blocks) < 3:
        return text
    first, _, rest = blocks[-2].partition("\n")
    return rest if first.strip().isalpha() or not first.strip() else blocks[-2]


def refuse_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are not JSON


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def canonical_json(text: str) -> str | None:
    """A JSON value in one spelling; None if the text is none."""
    try:
        return _one_spelling(_DECODER.decode(text.strip(" *_`\t\r\n")))
    except (ValueError, RecursionError, TypeError):
        return None


def stated_json(text: str) -> str | None:
    """The JSON value at the beginning of a text, in one spelling; None if there is none, or more than marks on its last line."""
    text = _BEFORE_JSON.sub("", text, count=1)
    try:
        value, end = _DECODER.raw_decode(text)
        return None if text[end:].split("\n")[0].strip(" *_`.\t\r") else _one_spelling(value)
    except (ValueError, RecursionError, TypeError):
        return None


def without_nulls(text: str | None) -> str | None:
    """A JSON value in one spelling, without keys whose value is null: in Parquet and `datasets`, all rows have the keys of all rows."""
    return text if text is None or "null" not in text else _one_spelling(json.loads(text, object_pairs_hook=_given))


def _given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value is not None}


def _one_spelling(value: Any) -> str:
    return json.dumps(_same_numbers(value), sort_keys=True, ensure_ascii=False, allow_nan=False)


def _same_numbers(value: Any) -> Any:
    """1.0 as 1."""
    if isinstance(value, dict):
        return {key: _same_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    return whole(value)
