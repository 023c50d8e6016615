"""Procedural tasks of the `reasoning-gym` package: `load_task("gym:chain_sum")`.

Needs `pip install firedistill[gym]`. Problems are generated, so there are no files and no hub.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import pickle
import re
import selectors
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from firedistill.tasks.answers import lenient_numeric_correct, numeric_equal, read_numeric
from firedistill.tasks.sources import DataError, text_field
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, Verdict

DEFAULT_COUNT = 1000  # of examples, where the caller names none: generated problems have no end
SEEDS_PER_SPLIT = 2**30
FIRST_SEED = {"train": 0, "eval": SEEDS_PER_SPLIT}
MAX_COUNT = SEEDS_PER_SPLIT // 2
MAX_ANSWER_CHARACTERS = 20_000
SCORING_SECONDS = 5.0
NONSENSE = "zebra zebra"

_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?")
# Some scorers hand the answer to `eval` or to sympy's parser, which is `eval` too.
_EVALUATES = re.compile(r"\beval\(|\bparse_expr\(|\bsympify\(")
_HARMLESS_CALLS = frozenset(
    ["sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt", "Abs"]
)
_OPERATORS = frozenset("+-*/%,([{=<>:|&^~")
_TOKEN = re.compile(r"[^\W\d]\w*|\d+|\S")


class GymTask(Task):
    """One dataset of reasoning-gym.

    A row (one item of the dataset): {"question": "State the final answer to the following arithmetic problem: 4 - 1 - 7 =",
    "answer": "-4", "metadata": {"source_dataset": "chain_sum", "source_index": 0, "num_terms": 3, ...}}

    Item k of a dataset with seed s depends on s + k (in a few datasets on both), so `"train"` and `"eval"` draw their seeds
    from two disjoint ranges. Where a dataset has few distinct problems, the same text can still turn up in both.

    Args:
        dataset: a name that reasoning-gym knows.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such dataset; lists close matches.
    """

    type_name = "reasoning"
    answer_type = "text"
    checker_mode = "task-scorer"
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
        self._evaluates_answers = bool(_EVALUATES.search(inspect.getsource(sys.modules[known[dataset][0].__module__])))
        self._scorer: Any = None
        self._isolated_scorer: _IsolatedScorer | None = None

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """`n` generated problems (1,000 when None), determined by `split` and `seed`; `data_dir` is not used.

        Raises:
            ValueError: the split is neither `"train"` nor `"eval"`, `n` is out of range, or the dataset cannot be generated.
        """
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
        answer = row.get("answer")  # None where many answers are right and only the scorer knows
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
        """Right when the dataset's own scorer gives full marks, or when a plain numeric gold is equalled as a number.

        A scorer that raises, or needs more than `SCORING_SECONDS` for an answer that it evaluates, has not accepted the answer.
        """
        text = _answer_text(response, several_lines="\n" in example.answer)
        if _PLAIN_NUMBER.fullmatch(example.answer) is None:
            correct = text is not None and self._scores_full(text, example)
            return Verdict(correct, text, example.answer, text is not None, correct)
        number = read_numeric(response, example.answer)
        correct = (number.value is not None and numeric_equal(number.value, example.answer)) or (
            text is not None and self._scores_full(text, example)
        )
        return Verdict(
            correct=correct,
            submitted=text if number.value is None else number.value,
            expected=example.answer,
            well_formed=number.well_formed,
            lenient_correct=correct or lenient_numeric_correct(response, example.answer),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scorer": None, "_isolated_scorer": None}  # a process stays with its owner

    def _create(self, size: int, seed: int) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self.dataset, size=size, seed=seed)
        except Exception as error:  # each dataset checks its configuration in its own way
            raise ValueError(f"reasoning-gym cannot generate {self.dataset!r}: {type(error).__name__}: {error}") from error

    def _scores_full(self, answer: str, example: Example) -> bool:
        if example.answer and answer.casefold() == example.answer.casefold():
            return answer == example.answer or self._mark(answer, example) >= 1.0
        # Some scorers accept anything (game_of_life_halting in release 0.1.25). Full marks for nonsense are worth nothing.
        return self._mark(answer, example) >= 1.0 and self._mark(NONSENSE, example) < 1.0

    def _mark(self, answer: str, example: Example) -> float:
        """The dataset's own mark; 0.0 when the scorer fails, or when the answer is not fit to be handed to it."""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        entry = dict(example.metadata)
        if self._evaluates_answers:
            if self._isolated_scorer is None:
                self._isolated_scorer = _IsolatedScorer(self.dataset)
            return self._isolated_scorer.score(answer, entry) if _harmless(answer) else 0.0
        try:
            if self._scorer is None:
                self._scorer = self._create(size=1, seed=0)
            return float(self._scorer.score_answer(answer, entry))
        except Exception:  # scorers raise all kinds of things on text that they do not expect
            return 0.0


class _IsolatedScorer:
    """Runs a scorer that evaluates text in a process of its own: `9**9**9**9` cannot be interrupted in any other way."""

    SOURCE = """
import json, pickle, struct, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
except (ImportError, ValueError, OSError):
    pass
replies = sys.stdout
sys.stdout = sys.stderr
import reasoning_gym
dataset = reasoning_gym.create_dataset(sys.argv[1], size=1, seed=0)
while header := sys.stdin.buffer.read(4):
    answer, entry = pickle.loads(sys.stdin.buffer.read(struct.unpack("<I", header)[0]))
    try:
        score = float(dataset.score_answer(answer, entry))
    except BaseException:
        score = 0.0
    print(json.dumps(score), file=replies, flush=True)
"""
    STARTING_SECONDS = 120.0

    def __init__(self, dataset: str):
        self.dataset = dataset
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        """The scorer's mark; 0.0 when it fails or runs out of time."""
        with self.lock:
            return self._score(answer, entry)

    def _score(self, answer: str, entry: Mapping[str, Any]) -> float:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.SOURCE, self.dataset],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            # Importing the package takes long. An answer whose mark nobody needs waits for that, so that the time limit of the
            # real one need not allow for it.
            self._ask(self.process, "", entry, self.STARTING_SECONDS)
        return self._ask(self.process, answer, entry, SCORING_SECONDS) if self.process is not None else 0.0

    def _ask(self, process: subprocess.Popen[bytes], answer: str, entry: Mapping[str, Any], seconds: float) -> float:
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        message = pickle.dumps((answer, dict(entry)))
        try:
            process.stdin.write(struct.pack("<I", len(message)) + message)
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                line = process.stdout.readline() if selector.select(seconds) else b""
            return float(json.loads(line))
        except (OSError, ValueError):
            self.close()
            return 0.0

    def close(self) -> None:
        """Ends the process; the next answer starts a new one."""
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        self.close()


def _dataset_classes() -> Mapping[str, tuple[type, type]]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("tasks named gym:<dataset> need reasoning-gym: pip install firedistill[gym]") from error
    return DATASETS


def _offset(name: str, seed: int) -> int:
    """Where in a split's range of seeds a user's seed begins."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{seed}".encode(), digest_size=8).digest(), "little") % MAX_COUNT


def _harmless(answer: str) -> bool:
    """Whether a text may be evaluated: it names no attribute, and calls nothing but elementary functions."""
    if "__" in answer or "\\" in answer:
        return False
    previous = "("
    for token in _TOKEN.findall(answer):
        if token == "(" and not (previous in _OPERATORS or previous in _HARMLESS_CALLS or previous.isdecimal()):
            return False
        if previous == "." and not token.isdecimal():
            return False
        previous = token
    return True


def _answer_text(response: str, several_lines: bool) -> str | None:
    """What follows the last `####`: to the end of its line, or of the response where the gold has several lines."""
    _, marker, rest = response.rpartition("####")
    rest = rest.strip()
    if not marker or not rest:
        return None
    return rest if several_lines else rest.split("\n")[0].strip()


def _last_line(response: str) -> str | None:
    lines = [line.strip() for line in response.split("\n") if line.strip()]
    return lines[-1] if lines else None
