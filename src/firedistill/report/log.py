"""The rows of a run as columns of numbers, read in one pass."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from firedistill.run.log import iterate_jsonl
from firedistill.terminal import shortened, visible

# The columns of `metrics.jsonl` and of `evals.jsonl` that reports show; of the latter also those whose names begin with one of NAMED:
# categories, pass@k and further tasks.
CUMULATIVE = ("cumulative_generated_tokens", "cumulative_train_seconds")
METRICS = (
    *("step", "loss", "grad_norm", "correct_rate", "entropy", "response_length", "truncated_rate", "generated_tokens"),
    *("prompts", "chi_active", "policy_kl", "policy_kl_max", "weight_step_relative", "policy_step_share", *CUMULATIVE),
)
EVALUATIONS = (
    *("step", "n", "accuracy", "stderr", "sampled_accuracy", "sampled_stderr", "sampled_entropy", "distinct_answers"),
    *("sampled_length", "eval_samples", *CUMULATIVE),
)
NAMED = ("accuracy_", "pass_at_", "also_")
MOST_NAMED = 100
ABSENT = -math.inf  # in place of a number that a row does not have; NaN is one that is undefined
# Magnitude from which a number counts as infinite: no drawing can show it, and no sum of it stays finite.
LARGEST = 1e100


class Log:
    """Rows of numbers as columns, sorted by step, every step once.

    Args:
        columns: float64 arrays of the same length by name, with `step` among them; ABSENT where a row has no number.
    """

    def __init__(self, columns: Mapping[str, ndarray]):
        self.columns = dict(columns)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], names: Iterable[str] = METRICS, notes: list[str] | None = None) -> Log:
        """The log of rows that have a whole number `step`.

        Of a step with several rows, the last row counts. Values that are not numbers are left out.

        Args:
            names: of the columns. If `accuracy` is among them, so are those that begin with one of NAMED.
            notes: receives what was left out, in words.
        """
        notes = [] if notes is None else notes
        columns = {name: array("d") for name in names}
        with_named, known, strange = "accuracy" in columns, set(columns), Counter[tuple[str, str]]()
        for count, row in enumerate(rows):
            if with_named and not row.keys() <= known:
                for name in row.keys() - known:
                    known.add(name)
                    if name.startswith(NAMED) and len(columns) < len(EVALUATIONS) + MOST_NAMED:
                        columns[name] = array("d", [ABSENT]) * count
                    elif name.startswith(NAMED):
                        strange["column", f"beyond the first {MOST_NAMED} of categories, pass@k and further tasks"] += 1
            for name, values in columns.items():
                value = row.get(name, ABSENT)
                if value.__class__ is not float:
                    if isinstance(value, int) and abs(value) <= LARGEST:
                        value = float(value)
                    else:
                        strange["value", f"{shortened(visible(name), 60)} is not a number"] += 1
                        value = ABSENT
                values.append(value)
        notes += [number_left_out(number, what, why) for (what, why), number in strange.items()]
        log = cls({name: np.array(values) for name, values in columns.items()})
        for numbers in log.columns.values():
            np.copyto(numbers, np.copysign(np.inf, numbers), where=np.abs(numbers) > LARGEST)
        return log.in_order(notes)

    def in_order(self, notes: list[str]) -> Log:
        """The last row of every step, by step."""
        steps = self["step"]
        if not (np.diff(steps) <= 0).any():
            return self
        order = np.argsort(steps, kind="stable")
        last = order[np.append(np.diff(steps[order]) > 0, True)]
        if repeated := len(steps) - len(last):
            notes.append(number_left_out(repeated, "row", "a later one has the same step"))
        if (np.diff(steps) < 0).any():
            notes.append("the rows are not in the order of their steps")
        return Log({name: values[last] for name, values in self.columns.items()})

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> ndarray:
        """A column, float64 [rows]."""
        return self.columns[name] if name in self.columns else np.full(len(self), ABSENT)

    @property
    def last_step(self) -> int:
        """0 without rows."""
        return int(self["step"][-1]) if len(self) else 0

    def column(self, name: str, by: str = "step") -> tuple[ndarray, ndarray]:
        """Two columns, `by` and `name`, without the rows in which either is missing or not finite."""
        x, y = self[by], self[name]
        kept = np.isfinite(x) & np.isfinite(y)
        return x[kept], y[kept]


def number_left_out(count: int, what: str, why: str) -> str:
    """`2 lines left out: not JSON`."""
    return f"{count:,} {what}{'s' * (count > 1)} left out: {why}"


def read_log(path: Path, names: Iterable[str], notes: list[str]) -> Log:
    """The log in a JSON Lines file; empty if there is no file. An evaluation that answered nothing is no row.

    Args:
        notes: receives what was left out, in words.

    Raises:
        OSError: the file cannot be read.
    """
    if path.exists() and not path.is_file():
        notes.append(f"{path.name} is left out: it is not a regular file")
    damaged, found = Counter[str](), list[str]()
    rows: Iterable[Mapping[str, Any]] = iterate_jsonl(path, damaged)
    if "n" in (names := tuple(names)):
        rows = (row for row in rows if row.get("n") not in (None, 0) and row["n"] == row["n"])
    log = Log.of(rows, names, found)
    found += [number_left_out(count, "line", reason) for reason, count in damaged.items()]
    notes += [f"{path.name}: {note}" for note in found]
    return log
