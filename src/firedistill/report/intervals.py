"""Intervals for shares of held-out problems: how an accuracy would vary with other problems of the same kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy import ndarray

from firedistill.report.groups import Group
from firedistill.report.log import NAMED, Log

NORMAL_95 = 1.959964
SHARES = ("accuracy", "sampled_accuracy", *NAMED)  # how the columns that are shares of problems begin


def wilson(shares: ndarray, counts: ndarray) -> tuple[ndarray, ndarray]:
    """The ends of the 95 % interval of Wilson (1927) for shares of `counts` problems; NaN where a share or a count is missing."""
    known = (shares >= 0) & (shares <= 1) & (counts >= 1) & np.isfinite(counts)
    p, n = np.where(known, shares, np.nan), np.where(known, counts, np.nan)
    shrink = 1 + NORMAL_95**2 / n
    centre = (p + NORMAL_95**2 / (2 * n)) / shrink
    half = NORMAL_95 / shrink * np.sqrt(p * (1 - p) / n + NORMAL_95**2 / (4 * n * n))
    # Rounding must not put an end below 0, or the share outside.
    return np.clip(centre - half, 0, p), np.clip(centre + half, p, 1)


def evaluated_intervals(evaluations: Log, key: str) -> tuple[ndarray, ndarray]:
    """The ends of the interval of a share in `evals.jsonl`, one per row; NaN where the log has no such share.

    A share that is a mean over samples has a smaller error than that of as many right or wrong answers. Where its standard error is
    known, the interval is that of the number of problems with the same error.
    """
    shares = np.where(np.isfinite(evaluations[key]) & key.startswith(SHARES), evaluations[key], np.nan)
    errors = evaluations["sampled_stderr" if key == "sampled_accuracy" else f"{key}_stderr"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        by_error = shares * (1 - shares) / errors**2
    usable = (errors > 0) & (errors < 1) & (by_error >= 1) & np.isfinite(by_error)
    # `n` counts the problems of the task itself, and an error of 0 does not tell how many a further task has.
    unknown = key.startswith("also_") & (errors == 0)
    return wilson(shares, np.where(usable, by_error, np.where(unknown, np.nan, evaluations["n"])))


@dataclass(frozen=True)
class Estimate:
    """The accuracy of a group after the last step, in percent.

    Attributes:
        low, high: of the 95 % interval over problems, the mean of those of the runs; the mean where it is unknown.
        values: one per finished run.
    """

    mean: float
    low: float
    high: float
    values: list[float]

    @property
    def text(self) -> str:
        """`92.5 % (95 % interval 88.0 to 95.4)`"""
        return f"{self.mean:.1f} %" + (f" (95 % interval {self.low:.1f} to {self.high:.1f})" if self.low < self.high else "")

    @property
    def seeds(self) -> str:
        """`3 seeds: 91.5, 92.5, 93.0`"""
        return f"{len(self.values)} seeds: {', '.join(f'{v:.1f}' for v in self.values)}" if len(self.values) > 1 else "one seed"


def estimate(group: Group, key: str = "accuracy") -> Estimate | None:
    """The final accuracy of the finished runs of a group; None without one."""
    runs = [run for run in group.finished if math.isfinite(run.final(key))]
    if not runs:
        return None
    values = [100 * run.final(key) for run in runs]
    ends = [[100 * float(side[-1]) for side in evaluated_intervals(run.evaluations, key)] for run in runs]
    known = [(low, high) for low, high in ends if math.isfinite(low)] or [(value, value) for value in values]
    mean = fmean(values)
    return Estimate(mean, min(mean, fmean(low for low, _ in known)), max(mean, fmean(high for _, high in known)), values)
