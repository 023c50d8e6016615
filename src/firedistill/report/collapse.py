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
  can collapse while its greedy accuracy stays the same. The first block has the 5 to 19 steps that are left over, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import pandas as pd
from numpy import ndarray

from firedistill.report.log import ABSENT, Log

FIRST_STEPS, WINDOW, SUSTAINED, AT_LEAST = 10, 5, 10, 5
LENGTH_FACTOR, BURST_FACTOR, BURST_HISTORY = 0.5, 10.0, 20
ACCURACY_POINTS, ACCURACY_ERRORS = 0.05, 2.0
BLOCK, BLOCK_ERRORS = 20, 3.0
# The rules that describe a lasting change; the others describe single steps.
COLLAPSES = ("length collapse", "runaway length", "accuracy drop", "sampling drop")
# Events of a rule that are listed one by one.
MOST_EVENTS = 20


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


def sustained(holds: ndarray) -> int | None:
    """First position from which a condition holds for SUSTAINED values, or for AT_LEAST values up to the last; None without one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], holds, [False]])))
    starts, ends = edges[::2], edges[1::2]
    lasting = starts[ends - starts >= np.where(ends == len(holds), AT_LEAST, SUSTAINED)]
    return int(lasting[0]) if len(lasting) else None


def trailing_medians(values: Sequence[float] | ndarray) -> ndarray:
    """Median of each value and the WINDOW - 1 before it; NaN where there are fewer."""
    return pd.Series(values, dtype=float).rolling(WINDOW).median().to_numpy()


def length_collapse(steps: Sequence[int] | ndarray, lengths: Sequence[float] | ndarray) -> Event | None:
    """Responses become short and stay short."""
    if len(lengths) < FIRST_STEPS + WINDOW:
        return None
    start, smooth = median(lengths[:FIRST_STEPS]), trailing_medians(lengths)
    at = sustained(smooth < LENGTH_FACTOR * start)
    if at is None:
        return None
    text = f"response length fell from {start:.0f} to {min(smooth[at:]):.0f} tokens"
    return Event("length collapse", "response_length", int(steps[at]), float(lengths[at]), text)


def runaway_length(steps: Sequence[int] | ndarray, truncated: Sequence[float] | ndarray) -> Event | None:
    """Responses stop ending by themselves; `truncated` is the share of responses that hit the token limit."""
    if len(truncated) < FIRST_STEPS + WINDOW or median(truncated[:FIRST_STEPS]) >= 0.25:
        return None
    smooth = trailing_medians(truncated)
    at = sustained(smooth > 0.5)
    if at is None:
        return None
    text = f"up to {max(smooth[at:]):.0%} of responses hit the token limit"
    return Event("runaway length", "truncated_rate", int(steps[at]), float(truncated[at]), text)


def gradient_bursts(steps: Sequence[int] | ndarray, norms: Sequence[float] | ndarray, threshold: float = 1.0) -> list[Event]:
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
    return shortened_list(events, found)


def gradients_not_finite(steps: Sequence[int] | ndarray, norms: Sequence[float] | ndarray) -> list[Event]:
    """Steps whose gradient was infinite or NaN."""
    found = pd.DataFrame({"step": steps, "norm": norms}, dtype=float)
    found = found[~np.isfinite(found["norm"])]
    text = "the gradient was not finite"
    events = [
        Event("gradient not finite", "grad_norm", int(episode["step"].iloc[0]), math.nan, text + count(episode))
        for episode in episodes(found)
    ]
    return shortened_list(events, found)


def first_rows(found: pd.DataFrame) -> ndarray:
    """The positions at which episodes begin: wherever two steps in succession are more than WINDOW apart."""
    return np.flatnonzero(np.append(True, np.diff(found["step"]) > WINDOW)) if len(found) else np.empty(0, dtype=int)


def episodes(found: pd.DataFrame) -> list[pd.DataFrame]:
    """The first MOST_EVENTS episodes."""
    bounds = [*first_rows(found)[: MOST_EVENTS + 1], len(found)]
    return [found.iloc[start:end] for start, end in zip(bounds[:MOST_EVENTS], bounds[1:], strict=False)]


def count(episode: pd.DataFrame) -> str:
    return f"; {len(episode)} steps" if len(episode) > 1 else ""


def shortened_list(events: list[Event], found: pd.DataFrame) -> list[Event]:
    """The events, of which the last one says how many more there are."""
    if more := len(first_rows(found)) - len(events):
        events[-1] = replace(events[-1], text=f"{events[-1].text}; {more:,} more up to step {found['step'].iloc[-1]:.0f}")
    return events


def accuracy_drop(
    steps: Sequence[int] | ndarray, accuracies: Sequence[float] | ndarray, errors: Sequence[float] | ndarray
) -> Event | None:
    """Held-out accuracy falls and does not recover; `errors` are the standard errors of the accuracies, NaN if unknown."""
    fall = lasting_fall(accuracies, errors, ACCURACY_ERRORS)
    if fall is None:
        return None
    best, first = fall
    text = (
        f"accuracy {accuracies[best]:.1%} at step {steps[best]}, {accuracies[first]:.1%} at step {steps[first]}, "
        f"{accuracies[-1]:.1%} in the end"
    )
    return Event("accuracy drop", "accuracy", int(steps[first]), float(accuracies[first]), text)


def sampling_drop(steps: Sequence[int] | ndarray, rates: Sequence[float] | ndarray) -> Event | None:
    """The share of correct sampled answers falls and does not recover.

    Compares blocks of BLOCK steps, the last of which ends with the last step; the first one may be shorter. The standard error of a
    block is that of the mean of its steps, so that it holds whether the responses of a step answer one problem or several.
    """
    values, rest = np.asarray(rates, dtype=float), len(rates) % BLOCK
    starts = [0, *range(rest, len(values), BLOCK)]
    blocks = np.split(values, starts[1:])
    if rest < AT_LEAST:
        del starts[0], blocks[0]
    means = np.array([block.mean() for block in blocks])
    errors = np.array([block.std(ddof=1) / math.sqrt(len(block)) for block in blocks])
    fall = lasting_fall(means, errors, BLOCK_ERRORS)
    if fall is None:
        return None
    best, first = fall
    step, until = steps[starts[first]], steps[starts[best] + len(blocks[best]) - 1]
    text = (
        f"sampled answers right: {means[best]:.1%} in the {len(blocks[best])} steps to {until}, "
        f"{means[first]:.1%} in those from {step} on, {means[-1]:.1%} in the last {len(blocks[-1])}"
    )
    return Event("sampling drop", "correct_rate", int(step), float(means[first]), text)


def lasting_fall(values: Sequence[float] | ndarray, errors: Sequence[float] | ndarray, times: float) -> tuple[int, int] | None:
    """Positions of the best value and of the first one after it from which all are clearly lower; None without such a fall.

    Clearly lower means by more than ACCURACY_POINTS and by more than `times` standard errors of the difference.
    """
    values, errors = np.asarray(values, dtype=float), np.asarray(errors, dtype=float)
    if not len(values):
        return None
    best = int(np.argmax(values))
    margin = np.fmax(ACCURACY_POINTS, times * np.hypot(errors, errors[best]))
    first = 1 + int(np.flatnonzero(~(values < values[best] - margin))[-1])
    return (best, first) if first < len(values) else None


def collapses(metrics: Log, evaluations: Log, threshold: float = 1.0) -> list[Event]:
    """All events of a run, by step; `threshold` is the norm to which gradients are clipped."""
    with_norm = metrics["grad_norm"] != ABSENT
    steps, norms = metrics["step"][with_norm].astype(int), metrics["grad_norm"][with_norm]
    measured = np.isfinite(evaluations["accuracy"])
    errors = evaluations["stderr"][measured]

    def column(key: str) -> tuple[ndarray, ndarray]:
        steps, values = metrics.column(key)
        return steps.astype(int), values

    events = [
        length_collapse(*column("response_length")),
        runaway_length(*column("truncated_rate")),
        accuracy_drop(
            evaluations["step"][measured].astype(int),
            evaluations["accuracy"][measured],
            np.where(np.isfinite(errors), errors, np.nan),
        ),
        sampling_drop(*column("correct_rate")),
        *gradient_bursts(steps, norms, threshold),
        *gradients_not_finite(steps, norms),
    ]
    return sorted((event for event in events if event is not None), key=lambda event: event.step)
