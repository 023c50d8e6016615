"""A task that is data: a file, a folder, a hub dataset, a list of rows. No class is needed.

    load_task("my.jsonl", columns={"question": "prompt"}, answer="numeric", feedback={"hint": "{hint}"})

Columns are found by name, answers are read by a kind of `kinds.py`, and templates make fields of feedback of further columns. What is
not said is guessed, and the guess is logged once.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from firedistill.tasks.cells import Template, cell, in_braces, known, names_in, shown
from firedistill.tasks.choice import ChoiceTask, choice_example
from firedistill.tasks.feedback import structured_feedback
from firedistill.tasks.kinds import KINDS, comparable, load_kind, read_gold, whole
from firedistill.tasks.numeric import NumericTask
from firedistill.tasks.options import marked_places, option_number, places, read_options
from firedistill.tasks.reading import (
    BadRow,
    folder_splits,
    hub_rows,
    hub_splits,
    is_data_file,
    open_rows,
    rows_of,
    with_class_names,
)
from firedistill.tasks.sources import DataError, Rows, kind_of
from firedistill.tasks.task import Task, digest, folded
from firedistill.tasks.types import Example, FeedbackField, Verdict
from firedistill.terminal import nearest, process_rank, shortened

logger = logging.getLogger(__name__)

# Names by which the columns of a role are known.
ROLES = {
    "question": ("question", "problem", "prompt", "instruction", "query", "messages", "input"),
    "answer": ("answer", "label", "target", "gold", "ground_truth", "expected", "answerKey", "correct_answer"),
    "options": ("options", "choices"),
    "solution": ("solution", "rationale", "working", "explanation"),
    "category": (),
}
STANDARD = ("verifier", "parser", "provenance", "format")  # the fields of `structured_feedback`
EVAL_SPLITS = ("eval", "validation", "valid", "val", "dev", "test")
SAMPLE = 1000  # rows from which columns and the kind of answers are guessed
MOST_NUMERIC, LEAST_NUMERIC = 0.9, 0.5  # shares of numbers among the answers: numeric from the one on, exact below the other
PROGRESS_SECONDS = 10.0

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(?::[\w.-]+)?")


@dataclass
class Scan:
    """What is known about the rows of one split.

    Attributes:
        rows: all of them.
        usable: indices of those that can be used.
        ranks: a hash of the question of each usable row; rows with equal ones stay together when a split is divided.
        problems: what is wrong with the others, by kind.
        repeated: rows that repeat an earlier one; they count as often as they occur.
    """

    rows: Rows
    usable: array[int] = field(default_factory=lambda: array("q"))
    ranks: list[bytes] = field(default_factory=list)
    problems: dict[str, Problem] = field(default_factory=dict)
    repeated: Problem | None = None


@dataclass
class Problem:
    """Rows with the same problem: how many, the places of the first ones, what the first one has, and what to do."""

    kind: str
    fix: str
    first: str = ""
    places: list[int] = field(default_factory=list)
    count: int = 0

    MOST = 5

    def add(self, place: int, found: str = "") -> None:
        if self.count == 0:
            self.first = found
        if self.count < self.MOST:
            self.places.append(place)
        self.count += 1

    def __str__(self) -> str:
        if self.count == 1:
            return f"row {self.places[0]}: {self.kind}{f' ({self.first})' if self.first else ''} -> {self.fix}"
        numbers = ", ".join(map(str, self.places)) + (", ..." if self.count > len(self.places) else "")
        first = f"; row {self.places[0]}: {self.first}" if self.first else ""
        return f"{self.count:,} rows: {self.kind} (rows {numbers}{first}) -> {self.fix}"


class TableTask(Task):
    """A task whose problems are rows with columns.

    Args:
        data: a file (`.jsonl`, `.jsonl.gz`, `.csv`, `.tsv`, `.parquet`), a folder with `<split>` files, a hub dataset (`owner/name`, or
            `owner/name:configuration`), a list of mappings, a `datasets.Dataset`, a mapping of splits to either of them, or a function
            that returns rows, called with "train" and "eval" if it has a parameter.
        columns: the column of each role, `question`, `answer`, `options`, `solution`, `category`. `a.b` is a key of nested data, a text
            with `{column}` in it a template, an empty text no column. Options may be several columns, separated by commas.
        answer: how answers are read: `numeric`, `choice`, `exact`, `regex:PATTERN`, `json` or `math`; guessed if None.
        feedback: fields of feedback by name, next to those of `structured_feedback`; a field of the same name is replaced, and left out
            if it is "". Each is a template, or a function of row, response and verdict that returns text or None, and may be async. A
            template whose columns are empty in a row gives no field.
        eval_data: the held-out problems: a file, the name of a split, or rows; by default a split that is called so, or a fifth of the
            problems by a fixed seed.
        bad_rows: "refuse" raises an error that names the rows that cannot be used, "skip" leaves them out and logs how many.
        format_instruction: tells the student how to write the answer; by default that of the kind.
        name: in uids and logs; by default that of the file, the dataset or the function.
        verify: a function of row and response that returns True, False, or a `Verdict`, and may be async; by default that of the kind.

    Raises:
        ValueError: an option has an invalid value. The data are read later, by `prepare` and `check`.
    """

    reads_data_dir = False

    def __init__(
        self,
        data: Any,
        *,
        columns: Mapping[str, str] | None = None,
        answer: str | None = None,
        feedback: Mapping[str, Any] | None = None,
        eval_data: Any = None,
        bad_rows: str = "refuse",
        format_instruction: str | None = None,
        name: str | None = None,
        verify: Callable[..., Any] | None = None,
    ):
        for option, mapping in {"columns": columns, "feedback": feedback}.items():
            if mapping is not None and not isinstance(mapping, Mapping):
                raise DataError(f"{option} is a {type(mapping).__name__}: expected a mapping, as in {option}={{name: column}}")
        if unknown := sorted(set(columns or {}) - ROLES.keys()):
            raise DataError(f"columns names {unknown[0]!r}: expected {', '.join(ROLES)}, each with the name of a column")
        if bad_rows not in ("refuse", "skip"):
            raise DataError(f"bad_rows is {bad_rows!r}: expected 'refuse' or 'skip'")
        for role, spec in (columns or {}).items():
            if not isinstance(spec, str):
                raise DataError(f"columns {role} is {spec!r}: expected the name of a column, a text")
        for field_name, value in (feedback or {}).items():
            if not isinstance(value, str) and not callable(value):
                raise DataError(f"feedback {field_name} is {value!r}: expected a text with columns in braces, or a function")
            if value == "" and field_name not in STANDARD and (hint := nearest(field_name, STANDARD)):
                raise DataError(f"feedback {field_name}= removes no field{hint}")
            if not isinstance(field_name, str) or field_name == "full" or not re.fullmatch(r"[\w.-]+", field_name):
                raise DataError(
                    f"feedback names a field {field_name!r}: expected letters, digits, '_', '-' and '.', and not 'full'"
                )
        if answer is not None and answer.partition(":")[0] not in KINDS:
            load_kind(answer)  # raises
        self.data, self.eval_data, self.answer, self.bad_rows = data, eval_data, answer, bad_rows
        self.columns, self.fields, self.own_instruction = dict(columns or {}), dict(feedback or {}), format_instruction
        # A task may change the working directory.
        self.source = Path(data).expanduser().resolve() if isinstance(data, str) else None
        self.name = name or name_of(data)
        self.verifier = verify
        self.kept_columns: tuple[str, ...] = ()  # what a judge asks about; examples hold them in `metadata["kept"]`
        if verify is not None and inspect.iscoroutinefunction(verify):
            self.verify = self._verify_async  # type: ignore[method-assign,assignment]
        if any(inspect.iscoroutinefunction(value) for value in self.fields.values()):
            self.feedback = self._feedback_async  # type: ignore[method-assign,assignment]
        self.guesses: list[str] = []
        self.gold_forms: set[str] = set()  # of choices: "label", "text" or both
        self._prepared = False
        self._scans: dict[str, Scan] = {}

    # ---- What the data are ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Find splits, columns and the kind of answers from the first rows; columns that the options name may come later.

        Raises:
            DataError: they cannot be found, or are ambiguous.
        """
        if self._prepared:
            return
        self._openers = self._find_splits()
        rows = self._open(self.train_split)
        sample = self._sample(rows)
        self.known_columns = list(dict.fromkeys(name for row in sample for name in names_in(row)))
        self.find_columns(self._named())
        where = rows.source
        self.roles: dict[str, Any] = {}
        for role in ROLES:
            if (spec := self._column_of(role, where)) is not None:
                self.roles[role] = spec
        for name, value in self.fields.items():
            if isinstance(value, str) and value in self.known_columns:
                raise DataError(
                    f"feedback {name}={value} is the same text in every row: write {name}={{{value}}} for the column"
                )
            if value == "" and name not in STANDARD:
                self.guesses.append(f"feedback {name}= removes no field: the standard ones are {', '.join(STANDARD)}")
        self.templates = {
            name: Template(value, self.known_columns, f"feedback {name!r}")
            for name, value in self.fields.items()
            if isinstance(value, str) and value
        }
        self.kind, self.base = self._find_kind(sample, where)
        if "options" in self.roles and self.verifier is None and not isinstance(self.kind, ChoiceTask):
            if spec := self.columns.get("options"):
                fix = "leave one of the two out, or read answers as choice"
                raise DataError(
                    f"{where}: columns options={spec}, but answers are read as {self.answer}, without options: {fix}"
                )
            column = self.roles.pop("options")
            self.guesses.remove(f"options = column {column!r}")
            self.guesses.append(f"column {column!r} is not shown, because answers are read as {self.answer}")
        self.type_name, self.answer_type, self.checker_mode = self.kind.type_name, self.kind.answer_type, self.kind.checker_mode
        self.final_marker, self.format_instruction = self.kind.final_marker, self.kind.format_instruction
        if self.verifier is not None:
            self.type_name, self.checker_mode = "task", "verifier"
            if self.answer is None:
                self.answer_type, self.final_marker, self.format_instruction = "text", "", ""
        if self.own_instruction is not None:
            self.format_instruction = self.own_instruction
        self._prepared = True
        if self.guesses and process_rank() == 0:
            logger.warning("%s: %s", where, "; ".join(self.guesses))

    def _named(self) -> list[str]:
        """The columns that the options name."""
        texts = [*self.columns.values(), *(value for value in self.fields.values() if isinstance(value, str))]
        plain = [(role, spec) for role, spec in self.columns.items() if "{" not in spec]
        split = [spec.split(",") if role == "options" and spec not in self.known_columns else [spec] for role, spec in plain]
        names = [name.strip() for parts in split for name in parts]
        return [*names, *(name for text in texts for name in in_braces(text))]

    def find_columns(self, names: Iterable[str]) -> None:
        """Look for columns that the first rows lack in the other ones, and add those that are found to `known_columns`."""
        rows, missing = self._open(self.train_split), set(names) - {"", *self.known_columns}
        for index in range(SAMPLE, len(rows)):
            if not missing:
                return
            with suppress(Exception):  # reported with all rows that cannot be used
                row = rows[index]
                found = missing.intersection(names_in(row)) if isinstance(row, Mapping) else set()
                self.known_columns += sorted(found)
                missing -= found

    def _find_splits(self) -> dict[str, Callable[[], Rows]]:
        """What opens each split; sets `train_split`, `eval_split` and `other_splits`."""
        data, found = self.data, dict[str, Callable[[], Rows]]()
        if isinstance(data, str):
            found = self._find_files(data)
        elif isinstance(data, Mapping):
            found = {str(name): partial(rows_of, rows, f"{self.name}, split {str(name)!r}") for name, rows in data.items()}
        elif callable(data):
            takes_split = bool(inspect.signature(data).parameters)
            names = ("train", "eval") if takes_split else ("all",)
            found = {name: partial(self._call_rows, data, *([name] if takes_split else [])) for name in names}
        else:
            found = {"all": partial(rows_of, data, self.name)}
        evaluation = self.eval_data
        if isinstance(evaluation, str) and evaluation not in found and not is_data_file(evaluation):
            splits = f"; the data have the splits {', '.join(found)}" if len(found) > 1 else ""
            raise DataError(
                f"eval_data is {evaluation!r}: expected a file (.jsonl, .csv, .parquet, ...) or the name of a split{splits}"
            )
        train = "train" if "train" in found else next(iter(found), "")
        if not found or ("train" not in found and len(found) > 1):
            raise DataError(
                f"{self.name} has the splits {', '.join(found) or 'none'}, and none is called 'train': rename one, or name a file"
            )
        if evaluation is None:
            self.eval_split = next((name for name in EVAL_SPLITS if name in found and name != train), train)
            if len(found) > 1 and not callable(data):
                others = ", ".join(name for name in found if name != train)
                self.guesses.append(
                    f"held-out problems are the split {self.eval_split!r} (--eval_data names another)"
                    if self.eval_split != train
                    else f"held-out problems are a fifth of the split {train!r}, not of {others} (--eval_data names another)"
                )
        elif isinstance(evaluation, str) and evaluation in found:
            self.eval_split = evaluation
        else:
            self.eval_split = "eval" if "eval" not in found else "eval_data"
            if isinstance(evaluation, str):
                if not Path(evaluation).expanduser().is_file():
                    raise DataError(f"eval_data: there is no file {evaluation}; correct the path")
                found[self.eval_split] = partial(open_rows, Path(evaluation).expanduser().resolve())
            else:
                found[self.eval_split] = partial(rows_of, evaluation, f"{self.name}, eval_data")
        self.train_split = train
        self.other_splits = tuple(name for name in found if name not in (train, self.eval_split))
        return found

    def _find_files(self, data: str) -> dict[str, Callable[[], Rows]]:
        path = self.source
        assert path is not None  # `data` is a text
        if path.is_dir():
            return {name: partial(open_rows, file) for name, file in folder_splits(path).items()}
        if is_data_file(data):
            if not path.is_file():
                raise DataError(f"task: there is no file {path}; correct the path")
            return {"all": partial(open_rows, path)}
        if path.exists() or not _HUB_NAME.fullmatch(data):
            raise DataError(
                f"{data}: expected .jsonl, .jsonl.gz, .csv, .tsv or .parquet, a folder of such files, or a hub dataset owner/name"
            )
        hub_id, _, config = data.partition(":")
        return {name: partial(hub_rows, hub_id, config or None, name) for name in hub_splits(hub_id, config or None)}

    def _call_rows(self, function: Callable[..., Any], *arguments: str) -> Rows:
        from firedistill.tasks.guard import explained

        with explained(f"{self.name}({', '.join(map(repr, arguments))})", pass_on=(DataError, OSError, ImportError)):
            rows = function(*arguments)
            if hasattr(rows, "column_names") and not isinstance(rows, Sized):  # a streaming dataset
                from datasets import Dataset

                rows = Dataset.from_list(list(rows), features=rows.features)
            return rows_of(rows if hasattr(rows, "column_names") else list(rows), self.name)  # a Dataset knows its types

    def _open(self, split: str) -> Rows:
        if split not in self._scans:
            self._scans[split] = Scan(with_class_names(self._openers[split]()))
        rows = self._scans[split].rows
        if not len(rows):
            part = f", split {split!r}," if len(self._openers) > 1 else ""
            raise DataError(f"{rows.source}{part} has no rows: add rows, or name other data")
        return rows

    def _sample(self, rows: Rows) -> list[Mapping[str, Any]]:
        found = []
        for index in range(min(len(rows), SAMPLE)):
            try:
                row = rows[index]
            except DataError:
                continue
            if isinstance(row, Mapping):
                found.append(row)
        if not found:
            raise DataError(f"{rows.source}: none of the first {min(len(rows), SAMPLE)} rows can be read; {self._reason(rows)}")
        return found

    @staticmethod
    def _reason(rows: Rows) -> str:
        try:
            return f"row 1 is {kind_of(rows[0])}, expected a mapping of columns to values"
        except DataError as error:
            return f"{rows.where(0)}: {error}"

    def _column_of(self, role: str, where: str) -> Any:
        """The column, the template or the columns of a role; None if it has none."""
        columns = self.known_columns
        required = role == "question" or (role == "answer" and self.verifier is None)
        if role in self.columns:
            spec = self.columns[role]
            option = f"{where}: columns {role}={spec}"
            if not spec:
                if required:
                    raise DataError(
                        f"{option}: a row needs its {role}: name a column by --columns {role}=COLUMN (columns: {', '.join(columns)})"
                    )
                return None
            if "{" in spec and spec not in columns:
                return Template(spec, columns, option)
            names = [spec] if spec in columns or role != "options" else [name.strip() for name in spec.split(",")]
            for name in names:
                known(name, columns, option)
            return names if len(names) > 1 else names[0]
        found = [name for name in ROLES[role] if name in columns and name not in self.columns.values()]
        if role == "answer" and not found:
            found = [name for name in ROLES["solution"] if name in columns][:1]
        if role == "solution" and (len(found) != 1 or found[0] == self.roles.get("answer")):
            return None
        if len(found) > 1:
            raise DataError(
                f"{where}: the {role} could be in the column {' or '.join(found)}: name it by --columns {role}={found[0]} (columns: "
                f"{', '.join(columns)})"
            )
        if found:
            self.guesses.append(f"{role} = column {found[0]!r}")
            return found[0]
        if required:
            close = difflib.get_close_matches(role, columns, n=1)
            hint = f" Did you mean --columns {role}={close[0]}?" if close else ""
            if len(columns) == 1 and "|" in columns[0]:
                hint = " Separate the cells of a row by commas, semicolons or tabs; '|' is not read."
            raise DataError(
                f"{where}: no column is known to hold the {role} ({', '.join(ROLES[role])}): name it by --columns {role}=COLUMN.{hint} "
                f"The columns are: {', '.join(columns)}"
            )
        return None

    def _find_kind(self, sample: Sequence[Mapping[str, Any]], where: str) -> tuple[Task, int | None]:
        """The kind of answers, and the number of the first option where the golds number them."""
        if self.answer is not None:
            kind, base = load_kind(self.answer)
            if isinstance(kind, NumericTask) and "answer" in self.roles:
                self._note_several(self._read_numbers(sample)[1])
            if isinstance(kind, ChoiceTask) and "options" not in self.roles:
                raise DataError(
                    f"{where}: answers are choices, and no column is known to hold the options (options, choices): name it by "
                    f"--columns options=COLUMN, or several by options=A,B,C,D (columns: {', '.join(self.known_columns)})"
                )
        elif self.verifier is not None:
            return load_kind("exact")
        elif "options" in self.roles:
            kind, base = load_kind("choice")
            self.guesses.append("answers are read as choice (there are options)")
        else:
            kind, base = load_kind(self._numeric_or_exact(sample, where))
        if isinstance(kind, ChoiceTask) and base is None:
            base = self._first_number(sample, where)
            self.gold_forms = self._gold_forms(sample)
        return kind, base

    def _gold_forms(self, sample: Sequence[Mapping[str, Any]]) -> set[str]:
        """Whether the golds are labels or texts of options, by those that can be one of the two only."""
        forms, open_ones = set[str](), False
        for row in sample:
            try:
                by_label, by_text = (places(self._value(row, "answer"), names) for names in self._options(row))
            except BadRow:
                continue
            if bool(by_label) != bool(by_text):
                forms.add("label" if by_label else "text")
            open_ones = open_ones or bool(by_label and by_text and by_label[0] != by_text[0])
        if forms == {"text"} and open_ones:
            self.guesses.append("answers are the texts of options, also those that are letters")
        return forms

    def _read_numbers(self, sample: Sequence[Mapping[str, Any]]) -> tuple[list[bool], list[str]]:
        """Whether each answer is a number, and those that are read as several."""
        numeric, kind, several = NumericTask(), list[bool](), list[str]()
        for row in sample:
            value = self._value(row, "answer")
            if value is None or value == "":
                continue
            try:
                kind.append(bool(gold := read_gold(numeric, value, "the answer")[0]))
                if ";" in gold and ";" not in str(value):
                    several.append(repr(shortened(str(value))))
            except BadRow:
                kind.append(False)
        return kind, several

    def _note_several(self, several: Sequence[str]) -> None:
        if several:
            self.guesses.append(f"several numbers, not a decimal comma, in {len(several):,} of them, the first {several[0]}")

    def _numeric_or_exact(self, sample: Sequence[Mapping[str, Any]], where: str) -> str:
        kind, several = self._read_numbers(sample)
        share = sum(kind) / max(len(kind), 1)
        counted = f"{sum(kind):,} of the first {len(kind):,} are numbers"
        if LEAST_NUMERIC <= share < MOST_NUMERIC:
            raise DataError(
                f"{where}: {counted}, the others are not: say how answers are read by --answer numeric, exact, json or math"
            )
        chosen = "numeric" if share >= MOST_NUMERIC else "exact"
        if chosen == "numeric":
            self._note_several(several)
        self.guesses.append(f"answers are read as {chosen} ({counted})")
        return chosen

    def _first_number(self, sample: Sequence[Mapping[str, Any]], where: str) -> int | None:
        """0 or 1 if the golds are numbers of options, None if they are letters or texts."""
        numbers, beyond = set(), False
        for row in sample:
            value = self._value(row, "answer")
            if (number := option_number(value)) is None:
                continue
            try:
                labels, options = self._options(row)
            except BadRow:
                continue
            if not places(value, labels) and not places(value, options):
                numbers.add(number)
                beyond = beyond or number == len(options)
        if not numbers:
            return None
        if (0 in numbers) == beyond:
            found = "0 and the number of options" if beyond else "neither 0 nor the number of options"
            raise DataError(
                f"{where}: answers are numbers of options, and {found} occur among the first {len(sample):,} rows: say what the first "
                "option is called by --answer choice:0 or --answer choice:1"
            )
        self.guesses.append(f"answers number the options from {1 if beyond else 0}")
        return 1 if beyond else 0

    # ---- Rows ----------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Read every row of the training and held-out data once.

        Raises:
            DataError: rows cannot be used and `bad_rows` is "refuse".
        """
        self.prepare()
        for split in dict.fromkeys((self.train_split, self.eval_split)):
            self.scan(split)

    def scan(self, split: str, refuse: bool = True) -> Scan:
        """Read every row of a published split, once.

        Raises:
            DataError: rows cannot be used, `bad_rows` is "refuse", and `refuse` is true.
        """
        self.prepare()
        rows = self._open(split)
        scan = self._scans[split]
        if not scan.ranks and not scan.problems:
            self._scan(scan)
            if self.bad_rows == "skip" and process_rank() == 0:
                for problem in scan.problems.values():
                    logger.warning("%s: left out %s", rows.source, problem)
            if scan.repeated is not None and process_rank() == 0:
                logger.warning("%s: %s", rows.source, scan.repeated)
        if scan.problems and self.bad_rows == "refuse" and refuse:
            count = sum(problem.count for problem in scan.problems.values())
            listed = "\n".join(map(str, scan.problems.values()))
            raise DataError(
                f"{rows.source}: {count:,} of {len(rows):,} rows cannot be used; correct them, or leave them out by --bad_rows skip\n"
                f"{listed}"
            )
        if not scan.usable:
            raise DataError(
                f"{rows.source}: none of the {len(rows):,} rows can be used\n" + "\n".join(map(str, scan.problems.values()))
            )
        return scan

    def _scan(self, scan: Scan) -> None:
        rows, first, shown_at = scan.rows, dict[bytes, tuple[int, bytes]](), time.monotonic()
        stems: list[bytes] = []  # a hash of the question without options, case and repeated blanks, of which one part gets all
        numbers = rows.numbers or range(1, len(rows) + 1)

        def problem(place: int, error: BadRow) -> None:
            found = scan.problems.setdefault(error.kind, Problem(error.kind, error.fix))
            found.add(numbers[place], error.found)

        for index in range(len(rows)):
            if time.monotonic() - shown_at > PROGRESS_SECONDS and process_rank() == 0:
                shown_at = time.monotonic()
                logger.warning("%s: %s of %s rows read", rows.source, f"{index:,}", f"{len(rows):,}")
            try:
                row = rows[index]
                if not isinstance(row, Mapping):
                    raise BadRow("not a mapping of columns to values", "write every row as one", kind_of(row))
                example = self.example(row, "")
            except BadRow as error:
                problem(index, error)
                continue
            except Exception as error:  # rows of Python objects may raise any
                found = shortened(f"{type(error).__name__}: {error}")
                problem(index, BadRow("it cannot be read", "correct it or remove the row", found))
                continue
            turns = [f"{turn['role']}: {turn['content']}" for turn in example.history]
            rank = digest(f"{self.division_seed}/" + "\n".join([example.question, *turns]))
            accepted = comparable(self.kind, example)
            gold = digest(repr(sorted(accepted) if isinstance(accepted, frozenset) else accepted))
            if rank not in first:
                first[rank] = (index, gold)
            elif first[rank][1] == gold or self.verifier is not None:
                text = "the same question and answer as an earlier row; each counts"
                scan.repeated = scan.repeated or Problem(text, "remove them if that is not meant")
                scan.repeated.add(numbers[index], f"as row {numbers[first[rank][0]]}")
            else:
                fix = "correct one of the two or remove both"
                problem(
                    index,
                    BadRow("the question of an earlier row with another answer", fix, f"see row {numbers[first[rank][0]]}"),
                )
                continue
            scan.usable.append(index)
            scan.ranks.append(rank)
            stems.append(digest("\n".join(map(folded, [self._question(row)[0], *turns]))))
        lowest: dict[bytes, bytes] = {}
        for stem, rank in zip(stems, scan.ranks, strict=True):
            lowest[stem] = min(rank, lowest.get(stem, rank))
        scan.ranks = [lowest[stem] for stem in stems]

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """See `Task.examples`; every row of the split is checked first."""
        if n is not None and n < 0:
            raise ValueError(f"n must be at least 0, or None for all examples; got {n}")
        if data_dir is not None:
            raise ValueError(
                f"data_dir is for the published datasets; {self.name} reads {self.source or 'what it was given'}: leave it out"
            )
        self.prepare()
        published, part = self.resolve_split(split)
        scan = self.scan(published)
        indices: Sequence[int] = scan.usable
        if part is not None:
            held_out = self.held_out(scan.ranks)
            indices = [i for i, rank in zip(scan.usable, scan.ranks, strict=True) if (rank in held_out) == (part == "eval")]
        ordered = self.ordered(scan.rows, indices, seed)
        return [self.example(scan.rows[index], f"{self.name}/{published}/{index}") for index in ordered[:n]]

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        """One row as an example.

        Raises:
            BadRow: it cannot be used.
        """
        self.prepare()
        question, history = self._question(row)
        metadata: dict[str, Any] = {}
        if self.verifier is not None or any(callable(value) for value in self.fields.values()):
            metadata["row"] = row
        if self.kept_columns:
            metadata["kept"] = {name: shown(cell(row, name)) for name in self.kept_columns}
        filled = [(name, template.fill(row)) for name, template in self.templates.items()]
        working = self._text(row, "solution")
        if isinstance(self.kind, ChoiceTask):
            labels, options = self._options(row)
            answer = self._label(row, labels, options)
            before, _, last = (working or "").rpartition("\n")
            if last.startswith(self.kind.final_marker):
                working = before.rstrip()
            example = choice_example("", question, options, answer, working=working)
            question, solution, letters = example.question, example.solution, example.labels
        else:
            options, letters, answer = [], (), ""
            if self.verifier is not None and self.answer is None:
                answer = shown(self._value(row, "answer")) or ""
            elif "answer" in self.roles:
                answer, before, accepted = read_gold(self.kind, *self._given(row, "answer"))
                working = working or before or None
                if accepted:
                    metadata["accepted"] = accepted
            solution = self._solution(working, answer) if self.verifier is None else working
            if self._has(row, "options"):  # for a verifier in Python, or a judge
                _, options = self._options(row)
                lettered = choice_example("", question, options, "")
                question, letters = lettered.question, lettered.labels
        return Example(
            uid=uid,
            question=question,
            answer=answer,
            labels=letters,
            options=tuple(options),
            solution=solution,
            category=self._text(row, "category"),
            metadata=metadata,
            history=history,
            feedback=tuple(FeedbackField(name, text) for name, text in filled if text is not None),
        )

    def _solution(self, working: str | None, answer: str) -> str | None:
        """Gold working that ends with the final-answer line."""
        shown_answer = f"\\boxed{{{answer}}}" if self.kind.answer_type == "expression" else answer
        line = f"{self.final_marker} {shown_answer}" if self.final_marker else None
        if working is None or line is None:
            return working or line
        last = working.rstrip().rpartition("\n")[2]
        return working if last.startswith(self.final_marker) else f"{working}\n{line}"

    def answer_cell(self, example: Example) -> str | None:
        """What stands in the answer column of an example's row."""
        split, _, index = example.uid.removeprefix(f"{self.name}/").rpartition("/")
        return shown(self._value(self._scans[split].rows[int(index)], "answer"))

    def _value(self, row: Mapping[str, Any], role: str) -> Any:
        spec = self.roles.get(role)
        if isinstance(spec, Template):
            return spec.fill(row)
        return None if spec is None else cell(row, spec)

    def has_question(self, row: Mapping[str, Any]) -> bool:
        """Whether the column, or the columns, of the question are filled in."""
        self.prepare()
        return self._has(row, "question")

    def _has(self, row: Mapping[str, Any], role: str) -> bool:
        """Whether a column of a role is filled in."""
        spec = self.roles.get(role)
        names = spec.names if isinstance(spec, Template) else spec if isinstance(spec, list) else [spec] if spec else []
        return any(shown(cell(row, name)) not in (None, "[]") for name in names)

    def _given(self, row: Mapping[str, Any], role: str) -> tuple[Any, str]:
        """The value of a role that a row needs, and what errors call it.

        Raises:
            BadRow: the row lacks the column.
        """
        spec = self.roles[role]
        if isinstance(spec, Template):
            if (empty := next((name for name in spec.names if shown(cell(row, name)) is None), None)) is not None:
                fix = "fill it in, remove the row, or leave the column out of the template"
                raise BadRow(f"column {empty!r} in the template of the {role} is empty", fix)
            return spec.fill(row), f"the {role}"
        names = spec if isinstance(spec, list) else [spec]
        subject = f"column {', '.join(names)!r}"
        if not any(name in row or name.split(".")[0] in row for name in names):
            fix = "add it or remove the row; if the whole file lacks it, rename a column: all files need the same ones"
            raise BadRow(f"{subject} is missing", fix, shortened(f"the row has {', '.join(map(str, row))}", 100))
        values = [cell(row, name) for name in names]
        return values if len(names) > 1 else values[0], subject

    def _text(self, row: Mapping[str, Any], role: str) -> str | None:
        value = self._value(row, role)
        if value is not None and not isinstance(value, str | int | float):
            raise BadRow(
                f"column {self.roles[role]!r} is not a text",
                f"name another by --columns {role}=COLUMN, or none by {role}=",
                kind_of(value),
            )
        return None if value is None else str(value).strip() or None

    def _question(self, row: Mapping[str, Any]) -> tuple[str, tuple[Mapping[str, str], ...]]:
        """The last message of the user, and the messages before it."""
        value, subject = self._given(row, "question")
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            turns = [self._turn(turn, subject) for turn in value]
            if not turns or turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
                role = turns[-1]["role"] if turns else "nothing"
                raise BadRow(
                    f"{subject} does not end with a message of the user",
                    "end the messages with the question",
                    f"it ends with {role}",
                )
            return turns[-1]["content"].strip(), tuple(turns[:-1])
        if value is None or (isinstance(value, str) and not value.strip()):
            raise BadRow(f"{subject} is empty", "fill it in or remove the row")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadRow(f"{subject} is not a text", "write a text, or a list of messages", kind_of(value))
        return str(value).strip(), ()

    @staticmethod
    def _turn(turn: Any, subject: str) -> dict[str, str]:
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, Mapping) else (None, None)
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
        ):
            content = "".join(part["text"] for part in content)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            fix = 'write {"role": "system", "user" or "assistant", "content": text}'
            raise BadRow(f"{subject} holds something else than messages", fix, kind_of(turn))
        return {"role": role, "content": content}

    def _options(self, row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The published labels of the options, A, B, ... if there are none, and their texts."""
        value, subject = self._given(row, "options")
        columns = isinstance(self.roles["options"], list)
        return read_options(value, subject, columns=columns, needed=self.verifier is None)

    def _label(self, row: Mapping[str, Any], labels: Sequence[str], options: Sequence[str]) -> str:
        """The letter of the gold option: its label, its text, or its number."""
        value, column = self._given(row, "answer")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        text = "" if value is None else str(whole(value)).strip()
        if not text:
            raise BadRow(f"{column} is empty", "fill it in or remove the row")
        by_label, by_text = places(value, labels), places(value, options)
        number = option_number(value)
        number = None if number is None or self.base is None or (by_text and "." in text) else number - self.base
        if not by_label and not by_text:
            by_label = marked_places(text, labels, options)
        fix = "say what the first option is called by --answer choice:0 or choice:1"
        if self.answer in ("choice:0", "choice:1"):
            by_text, by_label = [], by_label if number is None else []
        elif by_label and number is not None and by_label != [number]:
            raise BadRow(f"{column} is the label of one option and the number of another", fix, kind_of(value))
        if by_text and self.gold_forms == {"text"}:
            by_label = []
        if by_label and by_text and by_label != by_text and len(self.gold_forms) > 1:
            problem = f"{column} is the letter of one option and the text of another, and other rows have letters and texts"
            raise BadRow(problem, "write letters in all rows, or texts in all", kind_of(value))
        found = set(by_label) if by_label else {*by_text, *([number] if number is not None else [])}
        if len(found) > 1:
            raise BadRow(f"{column} is the text of one option and the number of another", fix, kind_of(value))
        if not found or not 0 <= min(found) < len(options):
            raise BadRow(f"{column} is none of the options", "write the letter or the text of one", kind_of(value))
        return ascii_uppercase[found.pop()]

    # ---- Judgement and feedback ----------------------------------------------------------------------------------------------

    def verify(self, example: Example, response: str) -> Verdict:
        if self.verifier is None:
            return self.kind.verify(example, response)
        return self._verdict(self.verifier(example.metadata["row"], response), example)

    async def _verify_async(self, example: Example, response: str) -> Verdict:
        assert self.verifier is not None  # it is a coroutine function
        return self._verdict(await self.verifier(example.metadata["row"], response), example)

    @staticmethod
    def _verdict(value: Any, example: Example) -> Any:
        """A verdict; other values than those of a truth are left to the guard, which names them."""
        from firedistill.tasks.guard import read_truth

        if isinstance(value, Verdict):
            return value
        correct = read_truth(value, f"{example.uid}: the result of verify")
        return Verdict(correct, None, example.answer, well_formed=True, lenient_correct=correct)

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        given = {name: value(example.metadata["row"], response, verdict) for name, value in self._functions()}
        return self._fields(example, response, verdict, given)

    async def _feedback_async(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        given = {}
        for name, value in self._functions():
            result = value(example.metadata["row"], response, verdict)
            given[name] = await result if inspect.isawaitable(result) else result
        return self._fields(example, response, verdict, given)

    def _functions(self) -> list[tuple[str, Callable[..., Any]]]:
        return [(name, value) for name, value in self.fields.items() if callable(value)]

    def _fields(self, example: Example, response: str, verdict: Verdict, given: Mapping[str, Any]) -> tuple[FeedbackField, ...]:
        """The standard fields, with those of the data and of functions in their place or after them."""
        fields = {found.name: found for found in structured_feedback(self, example, response, verdict)}
        texts = {**{found.name: found.text for found in example.feedback}, **given}
        for name in self.fields:
            if (text := texts.get(name)) is None or text is False or (isinstance(text, str) and not text.strip()):
                fields.pop(name, None)
            else:
                fields[name] = FeedbackField(name, text)
        return tuple(fields.values())


def name_of(data: Any) -> str:
    """The name of a task from that of its data."""
    if isinstance(data, str):
        name = Path(data).name
        for suffix in (".gz", ".jsonl", ".csv", ".tsv", ".parquet"):
            name = name.removesuffix(suffix)
        return name.partition(":")[0] or "data"
    return getattr(data, "__name__", "data")


def local_files(name: str) -> list[Path] | None:
    """The files that a name of data means, none if it means neither data nor a hub dataset; None for a hub dataset.

    Raises:
        DataError: see `folder_splits`.
    """
    path = Path(name).expanduser().resolve()
    if path.is_dir():
        return list(folder_splits(path).values())
    if is_data_file(name):
        return [path] if path.is_file() else []
    return None if _HUB_NAME.fullmatch(name) and not path.exists() else []


def names_data(name: str) -> bool:
    """Whether the name of a task is that of data: a file, a folder, or a hub dataset."""
    return is_data_file(name) or "/" in name or (name != "" and Path(name).exists())
