"""Run directories and suites, read from disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from firedistill.report.collapse import Event, collapses
from firedistill.run.log import read_jsonl


@dataclass
class Run:
    """A run directory.

    Attributes:
        config: the settings in `config.yaml`.
        metrics, evaluations: rows of `metrics.jsonl` and of `evals.jsonl`, null read as NaN.
        variant: the learning-rate variant that a suite gives the run, "" for the comparison; None outside of suites.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    variant: str | None = None

    def __post_init__(self) -> None:
        self.model, self.task = str(self.config.get("model")), str(self.config.get("task"))
        self.method = str(self.config.get("method", "fire"))
        self.seed = int(self.config.get("seed", 0))
        self.learning_rate = float(self.config.get("learning_rate", math.nan))
        self.max_steps = int(self.config.get("max_steps", 0))

    @property
    def step(self) -> int:
        """The last step in the log; 0 if there is none."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done, and the evaluation after the last one if the run evaluates."""
        evaluated = not self.evaluations or self.evaluations[-1]["step"] >= self.max_steps
        return self.step >= self.max_steps and evaluated

    @property
    def final(self) -> dict[str, Any] | None:
        """The evaluation after the last step of a finished run."""
        return self.evaluations[-1] if self.finished and self.evaluations else None

    @cached_property
    def events(self) -> list[Event]:
        return collapses(self.metrics, self.evaluations, float(self.config.get("max_grad_norm") or 1.0))


def column(rows: Sequence[Mapping[str, Any]], key: str, by: str = "step") -> tuple[list[float], list[float]]:
    """Two columns, `by` and `key`, without the rows in which either is missing or not finite."""
    kept = [row for row in rows if math.isfinite(row.get(key, math.nan)) and math.isfinite(row.get(by, math.nan))]
    return [row[by] for row in kept], [row[key] for row in kept]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over a centred window of `width` (odd) values; the window is shorter at the ends."""
    half = width // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def read_runs(paths: Sequence[str | Path]) -> tuple[list[Run], list[str], list[str]]:
    """Read run directories and suites.

    Returns:
        The runs that have completed a step, each folder once; the titles of the suites; and notes on what is incomplete.

    Raises:
        ValueError: a path is neither a run directory nor a suite, or no run has completed a step.
    """
    runs: dict[Path, Run] = {}
    titles: list[str] = []
    notes: list[str] = []
    for path in map(Path, paths):
        if (path / "plan.json").is_file():
            found, title, progress = read_suite(path)
            titles.append(title)
            notes += progress
        else:
            found = [read_run(path)]
        runs |= {run.folder.resolve(): run for run in found}
    for run in runs.values():
        if not run.metrics:
            notes.append(f"{run.name} has not completed a step yet.")
        elif not run.finished:
            notes.append(f"{run.name} is not finished: step {run.step} of {run.max_steps}.")
    started = [run for run in runs.values() if run.metrics]
    if not started:
        raise ValueError(f"no run in {', '.join(map(str, paths))} has completed a step yet")
    return started, titles, notes


def read_suite(folder: Path) -> tuple[list[Run], str, list[str]]:
    """The training runs of a suite that have a run directory, its title, and notes on its progress."""
    from firedistill.suites.run import SuiteFolder, summary  # needs flock, which Windows lacks

    suite = SuiteFolder(folder)
    plan = suite.plan
    states = suite.states(plan)
    runs = []
    for planned in plan.runs:
        place = suite.run_folder(planned)
        if planned.command == "train" and (place / "config.yaml").is_file():
            runs.append(read_run(place, planned.id, planned.variant))
    done = all(state.name == "done" for state in states.values())
    notes = [] if done else [f"Suite {plan.suite}: {summary(plan, states)}."]
    notes += [f"{name} has failed: {state.note}." for name, state in states.items() if state.name == "failed"]
    return runs, plan.title, notes


def read_run(folder: Path, name: str | None = None, variant: str | None = None) -> Run:
    """Read a run directory; the name defaults to the folder's.

    Raises:
        ValueError: the folder has no `config.yaml`, or that file is not a mapping in YAML.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise ValueError(f"{folder} is not a run directory (it has no config.yaml) and not a suite (it has no plan.json)")
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{config} must hold a mapping of settings, not {type(settings).__name__}")
    evaluations = [row for row in read_jsonl(folder / "evals.jsonl") if row.get("n")]
    return Run(folder, name or folder.resolve().name, settings, read_jsonl(folder / "metrics.jsonl"), evaluations, variant)
