"""Curves of runs and groups, and the charts that the figures and the page draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import stdev

import numpy as np
import pandas as pd
from numpy import ndarray

from firedistill.report.groups import Group
from firedistill.report.intervals import NORMAL_95, estimate, evaluated_intervals
from firedistill.report.log import METRICS, NAMED
from firedistill.report.read import Run, running_mean, shown

# Longer curves are thinned: MOST_POINTS // 4 equal stretches, the lowest and highest point of each.
MOST_POINTS = 2000
THINNED = "long curves show the lowest and highest values of stretches of equal length"


@dataclass
class Curve:
    """A mean over runs with its band; low and high equal it where neither several runs nor the evaluation give one.

    Attributes:
        of: number of points before the curve was thinned out.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    of: int = 0

    def __post_init__(self) -> None:
        self.of = self.of or len(self.x)

    @property
    def thinned(self) -> bool:
        return self.of > len(self.x)

    @classmethod
    def average(cls, frame: pd.DataFrame, extremes: bool = False) -> Curve:
        """Average a frame with a row per x and a column per run.

        Args:
            extremes: the band reaches from the lowest to the highest run instead of one sample standard deviation to either side.
        """
        mean, deviation = frame.mean(axis=1), frame.std(axis=1).fillna(0)
        low, high = (frame.min(axis=1), frame.max(axis=1)) if extremes else (mean - deviation, mean + deviation)
        return cls.of_arrays(frame.index.to_numpy(), mean.to_numpy(), low.to_numpy(), high.to_numpy())

    @classmethod
    def of_arrays(cls, x: ndarray, mean: ndarray, low: ndarray, high: ndarray, most: int = MOST_POINTS) -> Curve:
        """A curve of at most `most` points."""
        kept = drawn(low, high, most)
        return cls(x[kept].tolist(), mean[kept].tolist(), low[kept].tolist(), high[kept].tolist(), of=len(x))

    def thinner(self, most: int) -> Curve:
        """The curve, thinned out to at most `most` points."""
        x, mean, low, high = (np.array(side) for side in (self.x, self.mean, self.low, self.high))
        return replace(Curve.of_arrays(x, mean, low, high, most), of=self.of)


def drawn(low: ndarray, high: ndarray, most: int) -> ndarray:
    """The positions of a curve that are drawn: all, or those of the extremes of each stretch and of both ends."""
    if len(low) <= most:
        return np.arange(len(low))
    bounds = np.linspace(0, len(low), most // 4 + 1).astype(int)
    stretches = list(zip(bounds, bounds[1:], strict=False))
    lowest = [start + np.argmin(low[start:end]) for start, end in stretches]
    return np.unique([0, *lowest, *(start + np.argmax(high[start:end]) for start, end in stretches), len(low) - 1])


def step_curve(runs: Sequence[Run], key: str, window: int = 1) -> Curve:
    """A column of `metrics.jsonl` over the steps that all runs have completed: mean, lowest and highest run.

    With a window, each run is replaced by its running mean first, and the band of a single run is the 95 % interval of that mean. Steps
    at which no run has a finite value are left out.

    The band is the range of the runs because a standard deviation below the mean cannot be drawn on a logarithmic axis.
    """
    columns = [run.metrics.column(key) for run in runs]
    if len(runs) == 1 and window > 1:
        ((steps, values),) = columns
        return Curve.of_arrays(steps, running_mean(values, window), *running_interval(values, window))
    frame = pd.concat([series(steps, running_mean(values, window)) for steps, values in columns], axis=1).sort_index()
    return Curve.average(frame[frame.index <= min(run.step for run in runs)], extremes=True)


def running_interval(values: ndarray, width: int) -> tuple[ndarray, ndarray]:
    """The ends of the 95 % interval of the running mean (`width` odd) of values that vary independently, within the values."""
    if not len(values):
        return values, values
    mean, at = running_mean(values, width), np.arange(len(values))
    count = 1 + np.minimum(at, width // 2) + np.minimum(at[::-1], width // 2)  # values in each window
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        error = NORMAL_95 * np.sqrt(np.maximum(running_mean((values - mean) ** 2, width), 0) / (count - 1))
    error = np.where(np.isfinite(error), error, 0)
    return np.maximum(mean - error, values.min()), np.minimum(mean + error, values.max())


def evaluation_curve(runs: Sequence[Run], key: str = "accuracy") -> Curve:
    """A column of `evals.jsonl` over the steps at which all runs were evaluated: mean and sample standard deviation.

    The band of a single run is the 95 % interval of the evaluation, for shares of problems.
    """
    if len(runs) == 1:
        frame = trajectory(runs[0], key)
        return Curve.of_arrays(frame.index.to_numpy(), *frame.to_numpy().T)
    columns = [column for run in runs if len(column := series(*run.evaluations.column(key)))]
    if not columns:
        return Curve.average(pd.DataFrame())
    return Curve.average(pd.concat(columns, axis=1, join="inner").sort_index())


def trajectory(run: Run, key: str, by: str = "step") -> pd.DataFrame:
    """A column of `evals.jsonl` by another one: its values and the ends of their intervals, which are the values where unknown."""
    found, y = run.evaluations, run.evaluations[key]
    ends = [np.where(np.isfinite(side), side, y) for side in evaluated_intervals(found, key)]
    frame = pd.DataFrame({"mean": y, "low": ends[0], "high": ends[1]}, index=found[by])
    frame = frame[np.isfinite(frame.index) & np.isfinite(y)]
    return frame[~frame.index.duplicated(keep="last")].sort_index()


def interpolated_curve(runs: Sequence[Run], key: str, points: int = 100) -> Curve:
    """Held-out accuracy against a cumulative column of `evals.jsonl`, as the paper draws it: mean and sample standard deviation.

    Each run's trajectory is linearly interpolated onto a shared grid over the range jointly covered by all runs. Runs with fewer
    than two evaluations are left out. The band of a single run is the 95 % interval of the evaluation.
    """
    trajectories = [frame for run in runs if len(frame := trajectory(run, "accuracy", by=key)) > 1]
    if not trajectories:
        return Curve([], [], [], [])
    start, end = max(t.index[0] for t in trajectories), min(t.index[-1] for t in trajectories)
    grid = np.linspace(start, end, points) if start < end else np.empty(0)
    if len(trajectories) == 1:
        (frame,) = trajectories
        return Curve.of_arrays(grid, *(np.interp(grid, frame.index, frame[side]) for side in ("mean", "low", "high")))
    return Curve.average(pd.DataFrame({i: np.interp(grid, t.index, t["mean"]) for i, t in enumerate(trajectories)}, index=grid))


def series(x: ndarray, y: ndarray) -> pd.Series:
    """Values of y indexed by x; the last one where x repeats."""
    values = pd.Series(y, index=x, dtype=float)
    return values[~values.index.duplicated(keep="last")]


def rate_curve(groups: Iterable[Group]) -> Curve:
    """Final accuracy in percent against the learning rate: mean and sample standard deviation; of one run its interval."""
    points = []
    for group in groups:
        if found := estimate(group):
            error = stdev(found.values) if len(found.values) > 1 else None
            ends = (found.low, found.high) if error is None else (found.mean - error, found.mean + error)
            points.append((group.learning_rate, found.mean, *ends))
    x, mean, low, high = ([point[side] for point in points] for side in range(4))
    return Curve(x, mean, low, high)


@dataclass(frozen=True)
class Chart:
    """A kind of curve that figures and page draw for every group of a setting.

    Attributes:
        y, x: columns of `metrics.jsonl`, or of `evals.jsonl` where y is not among those of the former.
        x_unit: the x axis shows x divided by it.
        y_factor: the y axis shows y multiplied by it, 100 for percentages.
        window: optimizer steps in the running mean that is drawn, for columns that are noisy from step to step.
    """

    name: str
    title: str
    y_title: str
    y: str
    x_title: str = "optimizer step"
    x: str = "step"
    x_unit: float = 1.0
    logarithmic: bool = False
    y_factor: float = 1.0
    window: int = 1

    @property
    def over_steps(self) -> bool:
        """Whether the chart shows a column of `metrics.jsonl`."""
        return self.y in METRICS

    @property
    def evaluated(self) -> bool:
        """Whether every point is an evaluation; accuracy over tokens and time is interpolated."""
        return not self.over_steps and self.x == "step"

    @property
    def held_out(self) -> bool:
        """Whether the chart shows a share of held-out problems."""
        return not self.over_steps and self.y_factor == 100

    @property
    def unit(self) -> str:
        """Of y, as its title says."""
        return self.y_title[:-1].rpartition("(")[2] if self.y_title.endswith(")") else self.y_title

    @property
    def band_of_seeds(self) -> str:
        return "lowest to highest seed" if self.over_steps else "± sample standard deviation over seeds"

    @property
    def band_of_one(self) -> str:
        """What the band of a single run is; empty if it has none."""
        if self.window > 1:
            return f"95 % interval of the mean of {self.window} steps"
        return "95 % interval over problems" if self.held_out else ""

    def described(self, groups: Iterable[Group]) -> str:
        """What lines and bands show."""
        sizes = {len(group.runs) > 1 for group in groups}
        parts = [f"mean over seeds, band {self.band_of_seeds}"] if True in sizes else []
        if False in sizes and self.band_of_one:
            parts.append(f"{'single runs' if parts else 'one seed'}, band {self.band_of_one}")
        smoothing = [f"running means of {self.window} steps"] if self.window > 1 else []
        return "; ".join([*parts, *smoothing]) or "one seed"

    def caption(self, groups: Iterable[Group], curves: Iterable[Curve]) -> str:
        """What lines and bands show, and whether points are left out."""
        return self.described(groups) + (f"; {THINNED}" if any(curve.thinned for curve in curves) else "")

    def curve(self, runs: Sequence[Run]) -> Curve:
        """Mean and band of several runs, in the units of the chart."""
        if self.over_steps:
            curve = step_curve(runs, self.y, self.window)
        else:
            curve = evaluation_curve(runs, self.y) if self.x == "step" else interpolated_curve(runs, self.x)
        x = [value / self.x_unit for value in curve.x]
        mean, low, high = ([self.y_factor * value for value in side] for side in (curve.mean, curve.low, curve.high))
        return Curve(x, mean, low, high, of=curve.of)

    def measured(self, run: Run) -> bool:
        """Whether a run has values of y."""
        return len((run.metrics if self.over_steps else run.evaluations).column(self.y)[1]) > 0

    def points(self, run: Run, most: int = MOST_POINTS) -> Curve:
        """The values of one run, in the units of the chart; low and high equal them."""
        x, y = (run.metrics if self.over_steps else run.evaluations).column(self.y, by=self.x)
        y = self.y_factor * running_mean(y, self.window)
        return Curve.of_arrays(x / self.x_unit, y, y, y, most)


CHARTS = [
    Chart("gradient-norm", "Gradient norm before clipping", "gradient norm", "grad_norm", logarithmic=True),
    Chart("generated-tokens", "Generated tokens per step", "tokens", "generated_tokens"),
    Chart("response-length", "Response length", "tokens per response", "response_length"),
    Chart("sampled-answers", "Sampled answers right", "right (%)", "correct_rate", y_factor=100.0, window=11),
    Chart("entropy", "Entropy of the student's tokens", "entropy (nats)", "entropy", logarithmic=True, window=11),
    Chart("accuracy", "Held-out accuracy", "accuracy (%)", "accuracy", y_factor=100.0),
    Chart(
        "tokens-accuracy",
        "Generated tokens and accuracy",
        "accuracy (%)",
        "accuracy",
        "cumulative generated tokens (thousands)",
        "cumulative_generated_tokens",
        x_unit=1e3,
        y_factor=100.0,
    ),
    Chart(
        "time-accuracy",
        "Training time and accuracy",
        "accuracy (%)",
        "accuracy",
        "training time (minutes)",
        "cumulative_train_seconds",
        x_unit=60.0,
        y_factor=100.0,
    ),
]

# Drawn where a run has measured them (`policy_kl_every`, `policy_step_radius`, `eval_samples`).
MEASURES = [
    Chart("policy-kl", "Change of the policy by a step", "KL(before || after), nats per token", "policy_kl", logarithmic=True),
    Chart(
        "policy-kl-max",
        "Largest change of the policy at a token",
        "KL(before || after), nats",
        "policy_kl_max",
        logarithmic=True,
    ),
    Chart(
        "weight-step",
        "Relative step of the trained weights",
        "norm of the step / norm",
        "weight_step_relative",
        logarithmic=True,
    ),
    Chart("policy-step-share", "Share of the update that is kept", "share", "policy_step_share"),
    Chart("sampled-accuracy", "Held-out accuracy, sampled", "accuracy (%)", "sampled_accuracy", y_factor=100.0),
    Chart("sampled-entropy", "Entropy of held-out samples", "entropy (nats)", "sampled_entropy", logarithmic=True),
    Chart("distinct-answers", "Different answers to a held-out problem", "answers", "distinct_answers"),
    Chart("sampled-length", "Length of held-out samples", "tokens per response", "sampled_length"),
]


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts of these runs: those that every report has, the measures that a run has, its pass@k and its further tasks."""
    named = dict.fromkeys(name for run in runs for name in run.evaluations.columns if name.startswith(NAMED[1:]))
    charts = [*CHARTS, *MEASURES]
    for number, name in enumerate(sorted(name for name in named if not name.endswith("_stderr"))):
        what = name.removeprefix("also_")
        pass_at = f"Held-out problems solved by one of {name.removeprefix('pass_at_')} samples"
        title = f"Held-out accuracy on {shown(what)}" if name.startswith("also_") else shown(pass_at)
        charts.append(Chart(f"evaluation-{number}-{file_part(what)}", title, "accuracy (%)", name, y_factor=100.0))
    return [chart for chart in charts if chart in CHARTS or any(chart.measured(run) for run in runs)]


def file_part(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)[:40]
