"""Generated tasks of the `reasoning-gym` package: `load_task("gym:chain_sum")`. Needs `pip install firedistill[gym]`."""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import operator
import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from firedistill.tasks.answers.numbers import HASH_MARKER, lenient_numeric_correct, numeric_equal, read_numeric
from firedistill.tasks.isolated import IsolatedScorer
from firedistill.tasks.kinds import unmarked
from firedistill.tasks.sources import DataError, refuse_data, text_field
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, Verdict

DEFAULT_COUNT = 1000  # examples, if the caller gives no number
SEEDS_PER_SPLIT = 2**30
FIRST_SEED = {"train": 0, "eval": SEEDS_PER_SPLIT}
MAX_COUNT = SEEDS_PER_SPLIT // 2
MAX_ANSWER_CHARACTERS = 20_000
NONSENSE = "zebra zebra"

# The program of an `IsolatedScorer`: `9**9**9**9` cannot be interrupted in any other way.
_SCORER = """
import reasoning_gym
dataset = reasoning_gym.create_dataset(sys.argv[1], size=1, seed=0)
def score(answer, entry):
    return dataset.score_answer(answer, entry)
"""
_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?")
# Some scorers pass the answer to `eval` or to sympy's parser, which calls `eval`.
_EVALUATES = re.compile(r"\beval\(|\bparse_expr\(|\bsympify\(")
_FUNCTIONS = frozenset(
    re.findall(r"\w+", "sin cos tan sec csc cot asin acos atan acot sinh cosh tanh asinh acosh atanh exp log ln sqrt abs Abs")
)
_NAMES = _FUNCTIONS | {"pi"}  # beside single letters
_OPERATORS = frozenset("+-*/%,([{=<>:|&^~∧∨→↔¬")
_HARMFUL = re.compile(r"__|:\s*=|[\\#;@\r]")  # a comment or a line break may stand between a name and its parenthesis
_QUOTE = re.compile("['\"]")
_TOKEN = re.compile(r"0[xX][0-9a-fA-F]+|[^\W\d]\w*|\d+|\S")
_PUZZLES = frozenset(["countdown", "puzzle24"])  # whose scorers accept other numbers and values nearby
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_COMPLEX = re.compile(r"[\s0-9().+\-eEijIJ]*")  # the scorer of complex numbers also reads nani
_WITHOUT_END = frozenset(["coin_flip", "rubiks_cube"])  # whose scorers can take all memory
_NOT_FINITE = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)  # compares as equal in some scorers


class GymTask(Task):
    """One dataset of reasoning-gym.

    A row (an item of the dataset): {"question": "State the final answer to the following arithmetic problem: 4 - 1 - 7 =",
    "answer": "-4", "metadata": {"source_dataset": "chain_sum", "source_index": 0, "num_terms": 3, ...}}

    Item k of a dataset with seed s depends on s + k (on both in a few datasets), so `"train"` and `"eval"` draw their seeds from
    two disjoint ranges. A dataset with few distinct problems can still have the same text in both.

    Args:
        dataset: the name of a dataset of reasoning-gym.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: the dataset is unknown; lists close matches.
    """

    type_name = "reasoning"
    answer_type = "text"
    checker_mode = "task-scorer"
    reads_data_dir = False
    final_marker = "####"
    format_instruction = (
        "Work through the problem step by step. Then, on a new final line, write the final answer as `#### ` followed by the "
        "answer only (for example `#### 42`). Write nothing after that answer."
    )

    def __init__(self, dataset: str):
        self.dataset = dataset
        self.name = f"gym:{dataset}"
        known = _dataset_classes()
        if dataset not in known:
            close = difflib.get_close_matches(dataset, known, n=5, cutoff=0.5)
            hint = f"Close matches: {', '.join(close)}." if close else f"It has: {', '.join(sorted(known))}."
            raise ValueError(f"reasoning-gym has no dataset {dataset!r}. {hint}")
        self._evaluates_by = set(_EVALUATES.findall(inspect.getsource(sys.modules[known[dataset][0].__module__])))
        self._scorer: Any = None
        self._isolated_scorer = IsolatedScorer(_SCORER, dataset)

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """Generate `n` problems (1,000 if None), determined by `split` and `seed`.

        Raises:
            ValueError: the split is neither `"train"` nor `"eval"`, `n` is out of range, `data_dir` is given, or the dataset cannot be
                generated.
        """
        refuse_data(self.name, data_dir)
        if split not in FIRST_SEED:
            raise ValueError(f"{self.name} has no split {split!r}: it is generated, use 'train' or 'eval'")
        count = DEFAULT_COUNT if n is None else n
        if not 0 <= count <= MAX_COUNT:
            raise ValueError(f"n must be between 0 and {MAX_COUNT}; got {count}")
        if count == 0:
            return []
        first = FIRST_SEED[split] + _offset(self.name, seed)
        dataset = self._create(size=count, seed=first)
        return [self.example(dataset[index], uid=f"{self.name}/{split}/{first + index}") for index in range(count)]

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        answer = row.get("answer")  # None if many answers are correct and only the scorer can tell
        if answer is not None and not isinstance(answer, str):
            raise DataError(f"field 'answer': expected text or null, found {type(answer).__name__} {answer!r}")
        return Example(
            uid=uid,
            question=text_field(row, "question"),
            answer=(answer or "").strip(),
            solution=f"#### {answer.strip()}" if answer else None,
            metadata=dict(row),
        )

    def verify(self, example: Example, response: str) -> Verdict:
        """Correct if the dataset's own scorer gives full marks, or if the answer equals a plain numeric gold as a number.

        A scorer that raises, or that evaluates the answer for more than `isolated.SCORING_SECONDS`, does not accept the answer.
        """
        text = _answer_text(response, several_lines="\n" in example.answer)
        if _PLAIN_NUMBER.fullmatch(example.answer) is None:
            correct = text is not None and self._scores_full(text, example)
            return Verdict(correct, text, example.answer, text is not None, correct)
        number = read_numeric(response, example.answer)
        correct = numeric_equal(number.value, example.answer) or (text is not None and self._scores_full(text, example))
        return Verdict(
            correct=correct,
            submitted=text if number.value is None else number.value,
            expected=example.answer,
            well_formed=number.well_formed,
            lenient_correct=correct or lenient_numeric_correct(response, example.answer),
        )

    def _create(self, size: int, seed: int) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self.dataset, size=size, seed=seed)
        except Exception as error:  # datasets raise many unrelated types
            raise ValueError(f"reasoning-gym cannot generate {self.dataset!r}: {type(error).__name__}: {error}") from error

    def _scores_full(self, answer: str, example: Example) -> bool:
        if example.answer and answer.casefold() == example.answer.casefold():
            return answer == example.answer or self._mark(answer, example) >= 1.0
        # Some scorers accept anything (game_of_life_halting in release 0.1.25); their full marks do not count.
        return self._mark(answer, example) >= 1.0 and self._mark(NONSENSE, example) < 1.0

    def _mark(self, answer: str, example: Example) -> float:
        """The scorer's mark; 0.0 if it fails, or if the answer is unsafe to evaluate."""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(example.answer):
            return 0.0
        if self.dataset == "complex_arithmetic" and not _COMPLEX.fullmatch(answer):
            return 0.0
        entry = dict(example.metadata)
        try:
            if self.dataset in _PUZZLES:
                return float(_solves(answer, entry["metadata"]))
            if self._evaluates_by and not _harmless(answer, may_quote=self._evaluates_by == {"eval("}):
                return 0.0
            if self._evaluates_by or self.dataset in _WITHOUT_END:
                return self._isolated_scorer.score(answer, entry)
            if self._scorer is None:
                self._scorer = self._create(size=1, seed=0)
            return float(self._scorer.score_answer(answer, entry))
        except Exception:  # scorers raise many unrelated types on unexpected text
            return 0.0


def _dataset_classes() -> Mapping[str, tuple[type, type]]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("tasks named gym:<dataset> need reasoning-gym: pip install firedistill[gym]") from error
    return DATASETS


def _offset(name: str, seed: int) -> int:
    """The start of a user's seed within a split's range of seeds."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{seed}".encode(), digest_size=8).digest(), "little") % MAX_COUNT


def _harmless(answer: str, may_quote: bool) -> bool:
    """Whether a text is safe to evaluate: it has no names but single letters and elementary functions, calls these only, and has no
    attributes.

    Args:
        may_quote: whether it may be a literal with texts or brackets. Sympy evaluates texts, and makes parentheses of `0.[3]`.
    """
    if _HARMFUL.search(answer) or (not may_quote and "[" in answer):
        return False
    if _QUOTE.search(answer):
        return may_quote and _is_literal(answer)
    previous = "("
    for token in _TOKEN.findall(answer):
        if re.match(r"[^\W\d]", token) and not (token in _NAMES or (len(token) == 1 and token.isascii())):
            return False
        if token == "(" and not (previous in _OPERATORS or previous in _FUNCTIONS or previous.isdecimal()):
            return False
        if previous == "." and not token.isdecimal():
            return False
        previous = token
    return True


def _solves(answer: str, puzzle: Mapping[str, Any]) -> bool:
    """Whether a text is plain arithmetic that uses each of the given numbers once and equals the wanted one, 24 by default."""
    found = re.findall("[0-9]+", answer)
    if not re.fullmatch(r"[0-9\s()+*/-]+", answer) or sorted(found) != sorted(map(str, puzzle["numbers"])):
        return False
    try:
        return _value(ast.parse(answer.strip(), mode="eval").body) == puzzle.get("target", 24)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return False


def _value(node: ast.expr) -> Fraction:
    """The value of an expression of whole numbers; raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not plain arithmetic")


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _answer_text(response: str, several_lines: bool) -> str | None:
    """The text after the last `####` that has any: to the end of its line, or of the response if the gold has several lines."""
    end = len(response)
    for marker in reversed(list(HASH_MARKER.finditer(response))):
        rest, end = response[marker.end() : end], marker.start()
        if (text := rest if several_lines else rest.split("\n")[0]).strip():
            return unmarked(text, response[response.rfind("\n", 0, end) + 1 : end]) or None
    return None
