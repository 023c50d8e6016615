"""Runs as a report sees them: read from disk, grouped by what they have in common, with the curves of each group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from firedistill.report.collapse import Event, collapses
from firedistill.run.log import read_jsonl

# Title, colour (readable on white and on black), and whether its line is broken; in the order of the paper's tables.
METHODS = {
    "supervised": ("Warm start", "#888888", True),
    "full_context": ("Full Context", "#3b7ddd", False),
    "on_policy_sft": ("On-Policy SFT", "#9c6b3f", False),
    "veto": ("Veto", "#9b5fd6", False),
    "top_d": ("TOP-D", "#129c8b", False),
    "tropd": ("TrOPD", "#c99a06", False),
    "srpo": ("SRPO", "#4a9e3d", False),
    "demopsd": ("DemoPSD", "#d9559f", False),
    "scope": ("SCOPE", "#16a3cf", False),
    "no_attribution": ("No Attribution", "#f08a3c", True),
    "no_projection": ("No Projection", "#b3544f", True),
    "hard_gradient_excision": ("Hard Gradient Excision", "#8b8f3a", True),
    "fire": ("FIRE", "#e5391f", False),
}
OTHER_COLOURS = ["#5a5fc7", "#b07aa1", "#76a35b", "#a8763e", "#2f9fb0", "#d1605e", "#7d8a99"]
TASKS = {
    "gsm8k": "GSM8K",
    "asdiv": "ASDiv",
    "aqua_rat": "AQuA-RAT",
    "arc_challenge": "ARC-Challenge",
    "winogrande": "WinoGrande",
    "wic": "WiC",
    "mmlu_pro": "MMLU-Pro",
}
# Settings that may differ between the runs that are averaged: the seed, and what changes where, how fast or how often, not what.
INDIFFERENT = {
    "seed",
    "output_dir",
    "data_dir",
    "run_name",
    "report_to",
    "logging_steps",
    "log_rollouts",
    "attribution_examples",
    "save_steps",
    "save_total_limit",
    "do_eval",
    "eval_steps",
    "eval_batch_size",
    "rollout_batch_size",
    "score_tokens_per_forward",
    "share_prefixes",
    "gradient_checkpointing",
    "use_cpu",
    "hub_token",
}
GRID = 100


@dataclass
class Run:
    """A run directory."""

    folder: Path
    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    variant: str | None = None

    @property
    def method(self) -> str:
        return str(self.config.get("method", "fire"))

    @property
    def setting(self) -> tuple[str, str]:
        return str(self.config.get("model")), str(self.config.get("task"))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def learning_rate(self) -> float:
        return float(self.config.get("learning_rate", math.nan))

    @property
    def max_steps(self) -> int:
        return int(self.config.get("max_steps", 0))

    @cached_property
    def compared_settings(self) -> dict[str, Any]:
        """What makes runs of a method different experiments: numbers as numbers, empty values left out."""
        settings = {
            key: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
            for key, value in self.config.items()
            if key not in INDIFFERENT and value not in (None, {}, [])
        }
        # How the prompts of a step are cut into micro-batches changes memory, not the result.
        sizes = [settings.pop(key, 1) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")]
        return settings | {"prompts_per_step": sizes[0] * sizes[1]}

    @property
    def step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def finished(self) -> bool:
        """All steps, and the evaluation after the last one unless the run makes none."""
        evaluated = not self.evaluations or self.evaluations[-1]["step"] >= self.max_steps
        return self.step >= self.max_steps and evaluated

    @property
    def final(self) -> dict[str, Any] | None:
        """The evaluation after the last step of a finished run."""
        return self.evaluations[-1] if self.finished and self.evaluations else None

    @cached_property
    def events(self) -> list[Event]:
        return collapses(self.metrics, self.evaluations, float(self.config.get("max_grad_norm") or 1.0))


@dataclass
class Curve:
    """A mean over runs with its spread; where one run has a value, low and high are equal to it."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass
class Group:
    """Runs that differ in nothing but their seed.

    Attributes:
        label: the method's title, with what sets this group apart from others of the method.
        factor: its learning rate over that of the comparison; 1 for the groups that are compared.
    """

    method: str
    label: str
    runs: list[Run]
    colour: str
    broken: bool
    learning_rate: float
    factor: float = 1.0
    apart: str = ""

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    def finals(self, key: str = "accuracy") -> list[float]:
        """The value after the last step, of every finished run."""
        return [run.final[key] for run in self.runs if run.final is not None and math.isfinite(run.final.get(key, math.nan))]


@dataclass
class Setting:
    """A model on a task, with the groups that are compared and those at other learning rates."""

    model: str
    task: str
    groups: list[Group]

    @property
    def title(self) -> str:
        return f"{short_model(self.model)}, {task_title(self.task)}"

    @property
    def compared(self) -> list[Group]:
        return [group for group in self.groups if group.factor == 1]

    def sweep(self, group: Group) -> list[Group]:
        """A group and those that differ from it in the learning rate only, by rate."""
        same = [other for other in self.groups if (other.method, other.apart) == (group.method, group.apart)]
        return sorted(same, key=lambda other: other.learning_rate)


@dataclass
class Study:
    """Everything that a report is about.

    Attributes:
        notes: what a reader must know: runs that go on, that have not begun, that are left out.
    """

    title: str
    settings: list[Setting]
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        return [run for setting in self.settings for group in setting.groups for run in group.runs]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(setting.model for setting in self.settings))

    def of_model(self, model: str) -> list[Setting]:
        return [setting for setting in self.settings if setting.model == model]


def short_model(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model


def task_title(task: str) -> str:
    return TASKS.get(task, task)


# ---- Reading ---------------------------------------------------------------------------------------------------------------


def read_study(paths: Sequence[str | Path]) -> Study:
    """Run directories and suites as one study.

    Raises:
        ValueError: a path is neither, or there is no run with a step.
    """
    runs: list[Run] = []
    notes: list[str] = []
    titles: list[str] = []
    for path in map(Path, paths):
        if (path / "plan.json").is_file():
            found, title, told = read_suite_runs(path)
            runs, notes = runs + found, notes + told
            titles.append(title)
        else:
            runs.append(read_run(path))
    unique = {run.folder.resolve(): run for run in runs}
    runs = list(unique.values())
    for run in runs:
        if not run.metrics:
            notes.append(f"{run.name} has not made a step yet.")
        elif not run.finished:
            notes.append(f"{run.name} is not finished: step {run.step} of {run.max_steps}.")
    runs = [run for run in runs if run.metrics]
    if not runs:
        raise ValueError(f"no run in {', '.join(map(str, paths))} has made a step yet")
    settings: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings.setdefault(run.setting, []).append(run)
    study = Study("; ".join(dict.fromkeys(titles)) or "Runs", [], notes)
    study.settings = [Setting(*key, grouped(members, notes)) for key, members in settings.items()]
    return study


def read_suite_runs(folder: Path) -> tuple[list[Run], str, list[str]]:
    """The training runs of a suite that have begun, its title, and where it stands."""
    from firedistill.suites.run import SuiteFolder, summary

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
    """
    Raises:
        ValueError: the folder is no run directory.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise ValueError(f"{folder} is not a run directory (it has no config.yaml), and no suite (no plan.json)")
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{config} must hold a mapping of settings, not {type(settings).__name__}")
    evaluations = [row for row in read_jsonl(folder / "evals.jsonl") if row.get("n")]
    return Run(folder, name or folder.resolve().name, settings, read_jsonl(folder / "metrics.jsonl"), evaluations, variant)


# ---- Grouping --------------------------------------------------------------------------------------------------------------


def grouped(runs: Sequence[Run], notes: list[str]) -> list[Group]:
    """The groups of one setting, in the order of the paper's tables; what is left out is added to the notes."""
    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    reference = reference_rate(runs)
    groups: list[Group] = []
    for method, members in by_method.items():
        differing = differing_settings(members)
        parts: dict[str, list[Run]] = {}
        for run in members:
            parts.setdefault(repr([run.compared_settings.get(key) for key in differing]), []).append(run)
        for part in parts.values():
            groups.append(group_of(method, part, differing, reference, notes))
    order = list(METHODS)
    rank = {method: order.index(method) if method in order else -1 for method in by_method}
    groups.sort(key=lambda group: (rank[group.method], group.method, group.apart, group.learning_rate))
    tell_apart(groups)
    return groups


def tell_apart(groups: Sequence[Group]) -> None:
    """The first compared group of a method of the paper has the method's line; all others have broken ones of other colours."""
    named: set[str] = set()
    spare = 0
    for group in sorted(groups, key=lambda group: group.factor != 1):
        if group.method in METHODS and group.method not in named:
            named.add(group.method)
            continue
        group.colour, group.broken = OTHER_COLOURS[spare % len(OTHER_COLOURS)], True
        spare += 1


def group_of(method: str, runs: list[Run], differing: Sequence[str], reference: float, notes: list[str]) -> Group:
    first = runs[0]
    title, colour, broken = METHODS.get(method, (method, OTHER_COLOURS[0], True))
    factor = 1.0 if math.isclose(first.learning_rate, reference) else first.learning_rate / reference
    apart = [key for key in differing if key not in ("learning_rate", "nominal_learning_rate")]
    if "nominal_learning_rate" in differing and "learning_rate" not in differing:
        apart.append("nominal_learning_rate")
    words = ", ".join(f"{key} {short_value(first.compared_settings.get(key))}" for key in apart)
    label = title + (f", {factor:g}× rate" if factor != 1 else "") + (f" ({words})" if words else "")
    seeds: dict[int, Run] = {}
    for run in runs:
        if run.seed in seeds:
            notes.append(f"{run.name} is left out: {seeds[run.seed].name} has the same settings and the same seed.")
        seeds.setdefault(run.seed, run)
    ordered = [seeds[seed] for seed in sorted(seeds)]
    return Group(method, label, ordered, colour, broken, first.learning_rate, factor, words)


def short_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Names of the settings in which runs of one method differ, apart from those that make no difference."""
    settings = [run.compared_settings for run in runs]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    return [key for key in keys if len({repr(of_run.get(key)) for of_run in settings}) > 1]


def reference_rate(runs: Sequence[Run]) -> float:
    """The learning rate of the comparison: what the suite calls so, else the one that most methods have, else the first."""
    planned = [run.learning_rate for run in runs if run.variant == ""]
    methods = {(run.learning_rate, run.method) for run in runs if not planned or run.learning_rate in planned}
    counts = Counter(rate for rate, _ in methods)
    return max((run.learning_rate for run in runs if run.learning_rate in counts), key=lambda rate: counts[rate])


# ---- Curves ----------------------------------------------------------------------------------------------------------------


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is NaN for one value, both for none."""
    return fmean(values) if values else math.nan, stdev(values) if len(values) > 1 else math.nan


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and its neighbours, `width` (odd) values in all; shorter windows at the ends."""
    half = width // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def step_curve(runs: Sequence[Run], key: str, window: int = 1) -> Curve:
    """A column of `metrics.jsonl` over the steps that all runs have made: mean, lowest and highest run.

    With a window, each run is replaced by its running mean first.

    The range of the runs rather than a standard deviation: below a mean on a logarithmic axis, a deviation cannot be drawn. Steps at
    which no run has a finite value are left out.
    """
    rows = [[r for r in run.metrics if math.isfinite(r.get(key, math.nan))] for run in runs]
    values = [
        dict(zip([int(r["step"]) for r in of_run], running_mean([r[key] for r in of_run], window), strict=True))
        for of_run in rows
    ]
    curve = Curve([], [], [], [])
    for step in range(1, min(run.step for run in runs) + 1):
        here = [of_run[step] for of_run in values if step in of_run]
        if here:
            append(curve, step, fmean(here), min(here), max(here))
    return curve


def evaluation_curve(runs: Sequence[Run]) -> Curve:
    """Held-out accuracy over the steps at which all runs were evaluated: mean, and one sample standard deviation on both sides."""
    values = [{int(row["step"]): row["accuracy"] for row in run.evaluations} for run in runs]
    curve = Curve([], [], [], [])
    for step in sorted(set.intersection(*(set(of_run) for of_run in values))) if values else ():
        mean, deviation = mean_and_deviation([of_run[step] for of_run in values])
        append(curve, step, mean, mean - zero_if_nan(deviation), mean + zero_if_nan(deviation))
    return curve


def interpolated_curve(runs: Sequence[Run], key: str, points: int = GRID) -> Curve:
    """Held-out accuracy against a cumulative column of `evals.jsonl`, as the paper draws it.

    Each run's trajectory is linearly interpolated onto a shared grid over the range jointly covered by all runs; then mean, and one
    sample standard deviation on both sides. Runs with fewer than two evaluations have no trajectory and are left out.
    """
    trajectories = []
    for run in runs:
        pairs = {row[key]: row["accuracy"] for row in run.evaluations if math.isfinite(row.get(key, math.nan))}
        if len(pairs) > 1:
            trajectories.append(sorted(pairs.items()))
    curve = Curve([], [], [], [])
    if not trajectories:
        return curve
    start, end = max(t[0][0] for t in trajectories), min(t[-1][0] for t in trajectories)
    if not start < end:
        return curve
    for i in range(points):
        x = start + (end - start) * i / (points - 1) if i < points - 1 else end
        mean, deviation = mean_and_deviation([interpolate(trajectory, x) for trajectory in trajectories])
        append(curve, x, mean, mean - zero_if_nan(deviation), mean + zero_if_nan(deviation))
    return curve


def rate_curve(groups: Iterable[Group]) -> Curve:
    """Final accuracy against the learning rate: mean, and one sample standard deviation on both sides."""
    curve = Curve([], [], [], [])
    for group in groups:
        mean, deviation = mean_and_deviation(group.finals())
        if math.isfinite(mean):
            append(curve, group.learning_rate, mean, mean - zero_if_nan(deviation), mean + zero_if_nan(deviation))
    return curve


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Value at x of the broken line through the points, which are sorted and reach on both sides of x."""
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    raise ValueError(f"{x} is outside of {points[0][0]} to {points[-1][0]}")


def append(curve: Curve, x: float, mean: float, low: float, high: float) -> None:
    curve.x.append(x)
    curve.mean.append(mean)
    curve.low.append(low)
    curve.high.append(high)


def zero_if_nan(value: float) -> float:
    return 0.0 if math.isnan(value) else value


@dataclass(frozen=True)
class Chart:
    """A kind of curve that figures and page draw for every group of a setting.

    Attributes:
        source: "metrics" or "evals".
        x, y: columns of the source.
        unit: of x, what one of its units is in the column.
        percent: y is a share, drawn in percent.
        window: optimizer steps in the running mean that is drawn, for what is noise from one step to the next.
    """

    name: str
    title: str
    x_title: str
    y_title: str
    source: str
    x: str
    y: str
    logarithmic: bool = False
    unit: float = 1.0
    percent: bool = False
    window: int = 1

    def curve(self, runs: Sequence[Run]) -> Curve:
        """Mean and spread of several runs, in the units of the chart."""
        if self.source == "metrics":
            curve = step_curve(runs, self.y, self.window)
        else:
            curve = evaluation_curve(runs) if self.x == "step" else interpolated_curve(runs, self.x)
        x = [value / self.unit for value in curve.x]
        return Curve(x, *([self.factor * value for value in side] for side in (curve.mean, curve.low, curve.high)))

    def points(self, run: Run) -> tuple[list[float], list[float]]:
        """What one run measured, in the units of the chart."""
        rows = run.metrics if self.source == "metrics" else run.evaluations
        rows = [row for row in rows if math.isfinite(row.get(self.x, math.nan)) and math.isfinite(row.get(self.y, math.nan))]
        values = running_mean([row[self.y] for row in rows], self.window)
        return [row[self.x] / self.unit for row in rows], [self.factor * value for value in values]

    @property
    def factor(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def spread(self) -> str:
        return "lowest to highest run" if self.source == "metrics" else "± sample standard deviation"

    @property
    def averaged(self) -> str:
        """What mean and band are, in words."""
        smoothing = f"; running means of {self.window} steps" if self.window > 1 else ""
        return f"mean over seeds; band: {self.spread}{smoothing}"


CHARTS = [
    Chart(
        "gradient-norm",
        "Gradient norm before clipping",
        "optimizer step",
        "gradient norm",
        "metrics",
        "step",
        "grad_norm",
        logarithmic=True,
    ),
    Chart("generated-tokens", "Generated tokens per step", "optimizer step", "tokens", "metrics", "step", "generated_tokens"),
    Chart("response-length", "Response length", "optimizer step", "tokens per response", "metrics", "step", "response_length"),
    Chart(
        "sampled-answers",
        "Sampled answers right",
        "optimizer step",
        "right (%)",
        "metrics",
        "step",
        "correct_rate",
        percent=True,
        window=11,
    ),
    Chart(
        "entropy",
        "Entropy of the student's tokens",
        "optimizer step",
        "entropy (nats)",
        "metrics",
        "step",
        "entropy",
        logarithmic=True,
        window=11,
    ),
    Chart("accuracy", "Held-out accuracy", "optimizer step", "accuracy (%)", "evals", "step", "accuracy", percent=True),
    Chart(
        "tokens-accuracy",
        "Generated tokens and accuracy",
        "cumulative generated tokens (thousands)",
        "accuracy (%)",
        "evals",
        "cumulative_generated_tokens",
        "accuracy",
        unit=1e3,
        percent=True,
    ),
    Chart(
        "time-accuracy",
        "Training time and accuracy",
        "training time (minutes)",
        "accuracy (%)",
        "evals",
        "cumulative_train_seconds",
        "accuracy",
        unit=60.0,
        percent=True,
    ),
]
