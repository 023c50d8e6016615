"""Where a run went wrong: six rules on its curves, each a pure function of steps and values.

The rules are thresholds that can be checked by eye, not statistical tests:

- **length collapse**: the median response length over 5 steps falls below half of its median over the first 10 steps and stays
  there for at least 10 steps, or for at least 5 steps up to the end of the run;
- **runaway length**: more than half of the responses hit the token limit (median over 5 steps) for as long, although fewer than a
  quarter did in the first 10 steps;
- **gradient burst**: a gradient norm before clipping exceeds the clipping threshold and 10 times the median of the 20 norms before
  it (at least 5); **gradient not finite**: a gradient norm is infinite or NaN. Steps at most 5 apart count as one event;
- **accuracy drop**: from some evaluation on, every held-out accuracy is lower than the best one before by more than 5 points and
  more than two standard errors of the difference;
- **sampling drop**: the same for the share of correct sampled answers in blocks of 20 steps, with three standard errors. A policy
  can collapse while its greedy accuracy stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import pandas as pd

FIRST_STEPS, WINDOW, SUSTAINED, AT_LEAST = 10, 5, 10, 5
LENGTH_FACTOR, BURST_FACTOR, BURST_HISTORY = 0.5, 10.0, 20
ACCURACY_POINTS, ACCURACY_ERRORS = 0.05, 2.0
BLOCK, BLOCK_ERRORS = 20, 3.0


@dataclass(frozen=True)
class Event:
    """Something that went wrong.

    Attributes:
        rule: "length collapse", "runaway length", "gradient burst", "gradient not finite", "accuracy drop" or "sampling drop".
        key: the column that shows it.
        step: its first step.
        value: the value at that step; of a burst, the largest norm.
        text: what happened, in words with numbers.
    """

    rule: str
    key: str
    step: int
    value: float
    text: str


def sustained(holds: Sequence[bool]) -> int | None:
    """First position from which a condition holds for SUSTAINED values, or for AT_LEAST values up to the last; None without one."""
    position = 0
    for held, stretch in groupby(holds):
        end = position + len(list(stretch))
        if held and end - position >= (AT_LEAST if end == len(holds) else SUSTAINED):
            return position
        position = end
    return None


def trailing_medians(values: Sequence[float]) -> list[float]:
    """Median of each value and the WINDOW - 1 before it; NaN where there are fewer."""
    return pd.Series(values, dtype=float).rolling(WINDOW).median().tolist()


def length_collapse(steps: Sequence[int], lengths: Sequence[float]) -> Event | None:
    """Responses become short and stay short."""
    if len(lengths) < FIRST_STEPS + WINDOW:
        return None
    start, smooth = median(lengths[:FIRST_STEPS]), trailing_medians(lengths)
    at = sustained([value < LENGTH_FACTOR * start for value in smooth])
    if at is None:
        return None
    text = f"response length fell from {start:.0f} to {min(smooth[at:]):.0f} tokens"
    return Event("length collapse", "response_length", steps[at], lengths[at], text)


def runaway_length(steps: Sequence[int], truncated: Sequence[float]) -> Event | None:
    """Responses stop ending by themselves; `truncated` is the share of responses that hit the token limit."""
    if len(truncated) < FIRST_STEPS + WINDOW or median(truncated[:FIRST_STEPS]) >= 0.25:
        return None
    smooth = trailing_medians(truncated)
    at = sustained([value > 0.5 for value in smooth])
    if at is None:
        return None
    text = f"up to {max(smooth[at:]):.0%} of responses hit the token limit"
    return Event("runaway length", "truncated_rate", steps[at], truncated[at], text)


def gradient_bursts(steps: Sequence[int], norms: Sequence[float], threshold: float = 1.0) -> list[Event]:
    """Gradient norms far above those before them; `threshold` is the norm to which gradients are clipped."""
    found = pd.DataFrame({"step": steps, "norm": norms}, dtype=float)
    found = found[np.isfinite(found["norm"])]
    usual = found["norm"].rolling(BURST_HISTORY, min_periods=AT_LEAST).median().shift()
    found = found.assign(usual=usual)[found["norm"] > np.maximum(threshold, BURST_FACTOR * usual)]
    events = []
    for burst in episodes(found):
        first, peak = burst.iloc[0], burst["norm"].max()
        text = f"gradient norm {peak:.3g}, the median before it {first['usual']:.3g}{count(burst)}"
        events.append(Event("gradient burst", "grad_norm", int(first["step"]), float(peak), text))
    return events


def gradients_not_finite(steps: Sequence[int], norms: Sequence[float]) -> list[Event]:
    """Steps whose gradient was infinite or NaN."""
    found = pd.DataFrame({"step": steps, "norm": norms}, dtype=float)
    text = "the gradient was not finite"
    return [
        Event("gradient not finite", "grad_norm", int(episode["step"].iloc[0]), math.nan, text + count(episode))
        for episode in episodes(found[~np.isfinite(found["norm"])])
    ]


def episodes(found: pd.DataFrame) -> list[pd.DataFrame]:
    """Split rows wherever two steps in succession are more than WINDOW apart."""
    return [episode for _, episode in found.groupby((found["step"].diff() > WINDOW).cumsum())]


def count(episode: pd.DataFrame) -> str:
    return f"; {len(episode)} steps" if len(episode) > 1 else ""


def accuracy_drop(steps: Sequence[int], accuracies: Sequence[float], errors: Sequence[float]) -> Event | None:
    """Held-out accuracy falls and does not recover; `errors` are the standard errors of the accuracies."""
    fall = lasting_fall(accuracies, errors, ACCURACY_ERRORS)
    if fall is None:
        return None
    best, first = fall
    text = (
        f"accuracy {accuracies[best]:.1%} at step {steps[best]}, {accuracies[first]:.1%} at step {steps[first]}, "
        f"{accuracies[-1]:.1%} in the end"
    )
    return Event("accuracy drop", "accuracy", steps[first], accuracies[first], text)


def sampling_drop(steps: Sequence[int], rates: Sequence[float]) -> Event | None:
    """The share of correct sampled answers falls and does not recover.

    Compares blocks of BLOCK steps, the last of which ends with the last step. The standard error of a block is that of the mean of
    its steps, so that it holds whether the responses of a step answer one problem or several.
    """
    starts = range(len(rates) % BLOCK, len(rates), BLOCK)
    blocks = [rates[start : start + BLOCK] for start in starts]
    means, errors = [fmean(block) for block in blocks], [stdev(block) / math.sqrt(BLOCK) for block in blocks]
    fall = lasting_fall(means, errors, BLOCK_ERRORS)
    if fall is None:
        return None
    best, first = fall
    step, until = steps[starts[first]], steps[starts[best] + BLOCK - 1]
    text = (
        f"sampled answers right: {means[best]:.1%} in the {BLOCK} steps to {until}, {means[first]:.1%} in those from {step} on, "
        f"{means[-1]:.1%} in the last {BLOCK}"
    )
    return Event("sampling drop", "correct_rate", step, means[first], text)


def lasting_fall(values: Sequence[float], errors: Sequence[float], times: float) -> tuple[int, int] | None:
    """Positions of the best value and of the first one after it from which all are clearly lower; None without such a fall.

    Clearly lower means by more than ACCURACY_POINTS and by more than `times` standard errors of the difference.
    """

    def below(later: int, best: int) -> bool:
        return values[later] < values[best] - max(ACCURACY_POINTS, times * math.hypot(errors[later], errors[best]))

    for first in range(1, len(values)):
        best = max(range(first), key=lambda position: values[position])
        if all(below(later, best) for later in range(first, len(values))):
            return best, first
    return None


def collapses(
    metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], threshold: float = 1.0
) -> list[Event]:
    """All events of a run, by step.

    Args:
        metrics, evaluations: rows of `metrics.jsonl` and of `evals.jsonl`, with NaN for null.
        threshold: the norm to which gradients are clipped.
    """

    def column(key: str) -> tuple[list[int], list[float]]:
        # Rows without a finite value are left out, except for gradient norms, which have a rule of their own.
        rows = [row for row in metrics if key in row and (key == "grad_norm" or math.isfinite(row[key]))]
        return [int(row["step"]) for row in rows], [float(row[key]) for row in rows]

    measured = [row for row in evaluations if row.get("n") and math.isfinite(row["accuracy"])]
    events = [
        length_collapse(*column("response_length")),
        runaway_length(*column("truncated_rate")),
        accuracy_drop(*([row[key] for row in measured] for key in ("step", "accuracy", "stderr"))),
        sampling_drop(*column("correct_rate")),
        *gradient_bursts(*column("grad_norm"), threshold),
        *gradients_not_finite(*column("grad_norm")),
    ]
    return sorted((event for event in events if event is not None), key=lambda event: event.step)
