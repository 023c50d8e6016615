"""Run directories and suites, read from disk. What cannot be read is left out and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from firedistill.coerce import coerce, read_yaml
from firedistill.report.collapse import Event, collapses
from firedistill.report.log import EVALUATIONS, METRICS, Log, read_log
from firedistill.run.directory import finished_step
from firedistill.terminal import shortened, visible

# Settings that the report computes with: their types, and the range of those that are required.
NUMBERS = {
    "learning_rate": float,
    "max_steps": int,
    "seed": int,
    "max_grad_norm": float | None,
    "per_device_train_batch_size": int,
    "gradient_accumulation_steps": int,
}
REQUIRED = {"learning_rate": (1e-30, 1e30), "max_steps": (1, 2**53)}


@dataclass
class Run:
    """A run directory.

    Attributes:
        config: the settings in `config.yaml`.
        metrics, evaluations: the columns of `metrics.jsonl` and of `evals.jsonl`.
        variant: the learning-rate variant that a suite gives the run, "" for the comparison; None outside of suites.
        shared: whether another run of its suite was active on the same machine at the same time.
        notes: what was left out of its files.
        answers: the share of right answers to each problem after the last step, by kind of answer, once they have been read.

    Raises:
        ValueError: a setting that the report computes with is missing or out of range.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    metrics: Log
    evaluations: Log
    variant: str | None = None
    notes: list[str] = field(default_factory=list)
    shared: bool = False
    answers: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = shown(self.name)
        self.model, self.task = shown(self.config.get("model")), shown(self.config.get("task"))
        self.method = shown(self.config.get("method", "fire"))
        self.config = self.config | {
            name: setting(self.config, name) for name in NUMBERS if name in {**REQUIRED, **self.config}
        }
        self.seed: int = self.config.get("seed", 0)
        self.learning_rate: float = self.config["learning_rate"]
        self.max_steps: int = self.config["max_steps"]
        with suppress(OSError):
            if (last := finished_step(self.folder)) is not None and last == self.step:
                self.max_steps = last  # a callback has ended it

    @property
    def step(self) -> int:
        """The last step in the log; 0 if there is none."""
        return self.metrics.last_step

    @property
    def finished(self) -> bool:
        """Whether all steps are done, and the evaluation after the last one if the run evaluates."""
        return self.step >= self.max_steps and (not len(self.evaluations) or self.evaluations.last_step >= self.max_steps)

    def final(self, key: str) -> float:
        """A value of the evaluation after the last step; NaN if the run is not finished or does not evaluate."""
        return float(self.evaluations[key][-1]) if self.finished and len(self.evaluations) else np.nan

    @property
    def initial(self) -> float:
        """The accuracy before the first step; NaN if it was not evaluated then."""
        found = self.evaluations
        return float(found["accuracy"][0]) if len(found) and not found["step"][0] else np.nan

    @cached_property
    def events(self) -> list[Event]:
        return collapses(self.metrics, self.evaluations, self.config.get("max_grad_norm") or 1.0)


def shown(text: Any) -> str:
    """A name as it is shown: visible characters, and not too many."""
    return shortened(visible(str(text)))


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting of `NUMBERS`; raises ValueError if it is none."""
    value = config.get(name)
    try:
        number = coerce(value, NUMBERS[name])
    except TypeError as error:
        raise ValueError(f"{name} in config.yaml is {shortened(repr(value))}: {error}") from error
    low, high = REQUIRED.get(name, (-1e15, 1e15))
    if number is not None and not low <= number <= high:
        raise ValueError(f"{name} in config.yaml is {shortened(repr(value))}: expected a number from {low:g} to {high:g}")
    return number


def running_mean(values: ndarray, width: int) -> ndarray:
    """Mean over a centred window of `width` (odd) values; the window is shorter at the ends."""
    if width == 1 or not len(values):
        return values
    half, window = width // 2, np.ones(width)
    sums, counts = (np.convolve(of, window)[half : half + len(values)] for of in (values, np.ones(len(values))))
    return sums / counts


def read_runs(paths: Sequence[str | Path]) -> tuple[list[Run], list[str], list[str]]:
    """Read run directories and suites.

    Returns:
        The runs that have completed a step, each folder once, those whose names repeat under the names of their folders; the titles
        of the suites; and notes on what is incomplete or left out.

    Raises:
        ValueError: no path is a run directory or a suite with a run that has completed a step.
        OSError: the only path cannot be read.
    """
    runs: dict[Path, Run] = {}
    titles: list[str] = []
    notes: list[str] = []
    for path in map(Path, paths):
        found: list[Run] = []
        try:
            if (path / "plan.json").is_file():
                found, title, progress = read_suite(path)
                titles.append(shown(title))
                notes += progress
            else:
                found = [read_run(path)]
            runs |= {run.folder.resolve(): run for run in found}
        except UNREADABLE as error:
            if len(paths) == 1:
                raise
            notes.append(left_out(path, error))
    names = Counter(run.name for run in runs.values())
    for run in runs.values():
        if names[run.name] > 1:  # the page finds a run by its name
            run.name = visible(str(run.folder))
        notes += [f"{run.name}, {note}." for note in run.notes]
        if not len(run.metrics):
            notes.append(f"{run.name} has not completed a step yet.")
        elif not run.finished and run.step >= run.max_steps:
            notes.append(f"{run.name} is not finished: the evaluation after its last step is missing.")
        elif not run.finished:
            notes.append(f"{run.name} is not finished: step {run.step} of {run.max_steps}.")
        elif run.max_steps != run.config["max_steps"]:
            notes.append(f"{run.name} was ended by a callback after step {run.max_steps} of {run.config['max_steps']}.")
        elif run.config.get("eval_size") and not len(run.evaluations):
            notes.append(f"{run.name} has no evaluation, and counts in no accuracy.")
    started = [run for run in runs.values() if len(run.metrics)]
    if not started:
        raise ValueError(f"there is nothing to report on. {' '.join(notes)}")
    return started, titles, notes


# What a folder of nonsense raises: unusable values and files, and links in a circle.
UNREADABLE = (ValueError, OSError, RuntimeError)


def left_out(what: Any, error: Exception) -> str:
    return f"{shown(what)} is left out: {shortened(visible(' '.join(str(error).split())), 400)}."


def read_suite(folder: Path) -> tuple[list[Run], str, list[str]]:
    """The training runs of a suite that have a run directory, its title, and notes on its progress and on runs that are left out.

    Raises:
        ValueError: the folder does not hold the plan of a suite.
    """
    from firedistill.suites.run import SuiteFolder, summary  # needs flock, which Windows lacks

    suite = SuiteFolder(folder)
    plan = suite.plan
    states = suite.states(plan)
    done = all(state.name == "done" for state in states.values())
    notes = [] if done else [f"Suite {shown(plan.suite)}: {summary(plan, states)}."]
    notes += [f"{shown(name)} has failed: {shown(state.note)}." for name, state in states.items() if state.name == "failed"]
    runs, shared = [], at_the_same_time({run.id: suite.record(run) for run in plan.runs})
    if shared:
        notes.append(
            f"Suite {shown(plan.suite)}: {len(shared)} runs shared their machine with others, so training times are not comparable."
        )
    for planned in plan.runs:
        place = suite.run_folder(planned)
        if planned.command == "train" and states[planned.id].name == "done" and not place.is_dir():
            notes.append(f"{shown(planned.id)} is left out: the suite has finished it, but its run directory is missing.")
        if planned.command == "train" and place.is_dir():
            try:
                runs.append(read_run(place, planned.id, planned.variant))
                runs[-1].shared = planned.id in shared
            except UNREADABLE as error:
                notes.append(left_out(planned.id, error))
    return runs, plan.title, notes


def at_the_same_time(records: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The runs whose last attempts overlapped with those of others on the same host.

    Args:
        records: what a suite has stored about each run.
    """
    intervals = sorted(
        (record["host"], record["since"], record["since"] + record["seconds"], name)
        for name, record in records.items()
        if {"host", "since", "seconds"} <= record.keys()
    )
    found: set[str] = set()
    latest: tuple[Any, ...] | None = None  # of those before, the one that ends last
    for interval in intervals:
        if latest is None or latest[0] != interval[0]:
            latest = interval
            continue
        if interval[1] < latest[2] - 1.0:
            found |= {latest[3], interval[3]}
        latest = max(latest, interval, key=lambda i: i[2])
    return found


def read_run(folder: Path, name: str | None = None, variant: str | None = None) -> Run:
    """Read a run directory; the name defaults to the folder's.

    Raises:
        ValueError: the folder has no `config.yaml`, or that file does not hold the settings of a run.
        OSError: a file cannot be read.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise ValueError(f"{folder} is not a run directory (it has no config.yaml) and not a suite (it has no plan.json)")
    try:
        settings = read_yaml(config)
    except ValueError as error:
        raise ValueError(f"{config} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{config} must hold a mapping of settings, not {type(settings).__name__}")
    notes: list[str] = []
    metrics = read_log(folder / "metrics.jsonl", METRICS, notes)
    if 0 < len(metrics) < metrics.last_step:
        notes.append(
            f"metrics.jsonl: rows of {len(metrics)} of {metrics.last_step} steps; curves, means and totals lack the others"
        )
    evaluations = read_log(folder / "evals.jsonl", EVALUATIONS, notes)
    return Run(folder, name or folder.resolve().name, settings, metrics, evaluations, variant, notes)
