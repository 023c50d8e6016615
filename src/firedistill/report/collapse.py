"""Where a run went wrong: six rules on its curves, each a pure function of steps and values.

The rules are thresholds that a reader can check by eye, not statistics:

- **length collapse**: the median response length of 5 steps falls below half of what it was in the first steps, and stays there for
  10 steps or to the end of the run (at least 5);
- **runaway length**: over half of the responses of 5 steps hit the token limit where fewer than a quarter did in the first
  steps, for as long;
- **gradient burst**: a gradient norm before clipping above the clipping threshold and above 10 times the median of the 20 norms
  before it (at least 5 of them); **gradient not finite**: one that is no number. What is at most 5 steps apart is one event;
- **accuracy drop**: from some evaluation on, all held-out accuracies stay below the best one before by more than 5 points and
  more than two standard errors of the difference;
- **sampling drop**: the same for the share of sampled answers that are right, in blocks of 20 steps, with three standard errors. A
  policy can fall apart behind a greedy accuracy that stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

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
        step: the first step of it.
        value: the value there.
        text: what happened, in words with numbers.
    """

    rule: str
    key: str
    step: int
    value: float
    text: str


def sustained(steps: Sequence[int], holds: Sequence[bool]) -> int | None:
    """Position from which a condition holds for SUSTAINED values, or to the end for AT_LEAST; None if it never does."""
    length = 0
    for position in range(len(steps) - 1, -1, -1):  # runs of True that end at the end need AT_LEAST, others SUSTAINED
        if not holds[position]:
            break
        length += 1
    to_end = len(steps) - length if length >= AT_LEAST else None
    length = 0
    for position, held in enumerate(holds):
        length = length + 1 if held else 0
        if length >= SUSTAINED:
            return position - SUSTAINED + 1
    return to_end


def trailing_medians(values: Sequence[float]) -> list[float]:
    """Median of each value and the WINDOW - 1 before it; NaN before there are as many."""
    return [
        median(values[position - WINDOW + 1 : position + 1]) if position + 1 >= WINDOW else math.nan
        for position in range(len(values))
    ]


def length_collapse(steps: Sequence[int], lengths: Sequence[float]) -> Event | None:
    """Responses that become short and stay short."""
    if len(lengths) < FIRST_STEPS + WINDOW:
        return None
    start = median(lengths[:FIRST_STEPS])
    smooth = trailing_medians(lengths)
    at = sustained(steps, [value < LENGTH_FACTOR * start for value in smooth])
    if at is None:
        return None
    low = min(value for value in smooth[at:] if math.isfinite(value))
    text = f"response length fell from {start:.0f} to {low:.0f} tokens"
    return Event("length collapse", "response_length", steps[at], lengths[at], text)


def runaway_length(steps: Sequence[int], truncated: Sequence[float]) -> Event | None:
    """Responses that no longer end."""
    if len(truncated) < FIRST_STEPS + WINDOW or median(truncated[:FIRST_STEPS]) >= 0.25:
        return None
    smooth = trailing_medians(truncated)
    at = sustained(steps, [value > 0.5 for value in smooth])
    if at is None:
        return None
    high = max(value for value in smooth[at:] if math.isfinite(value))
    return Event(
        "runaway length", "truncated_rate", steps[at], truncated[at], f"up to {high:.0%} of responses hit the token limit"
    )


def gradient_bursts(steps: Sequence[int], norms: Sequence[float], threshold: float = 1.0) -> list[Event]:
    """Gradient norms far above those before them; `threshold` is the norm to which gradients are clipped."""
    found: list[list[int]] = []
    history: list[float] = []
    usual: dict[int, float] = {}
    for position, norm in enumerate(norms):
        if not math.isfinite(norm):
            continue
        if len(history) >= AT_LEAST:
            usual[position] = median(history[-BURST_HISTORY:])
            if norm > max(threshold, BURST_FACTOR * usual[position]):
                together(found, position, steps)
        history.append(norm)
    events = []
    for burst in found:
        peak = max(norms[p] for p in burst)
        text = f"gradient norm {peak:.3g}, the median before it {usual[burst[0]]:.3g}"
        events.append(Event("gradient burst", "grad_norm", steps[burst[0]], peak, text + many(burst)))
    return events


def gradients_not_finite(steps: Sequence[int], norms: Sequence[float]) -> list[Event]:
    """Steps whose gradient was infinite or not a number."""
    found: list[list[int]] = []
    for position, norm in enumerate(norms):
        if not math.isfinite(norm):
            together(found, position, steps)
    text = "the gradient was not finite"
    return [Event("gradient not finite", "grad_norm", steps[at[0]], math.nan, text + many(at)) for at in found]


def together(found: list[list[int]], position: int, steps: Sequence[int]) -> None:
    """Add a position to the last of the lists if it is near, else to a new one."""
    if found and steps[position] - steps[found[-1][-1]] <= WINDOW:
        found[-1].append(position)
    else:
        found.append([position])


def many(positions: Sequence[int]) -> str:
    return f"; {len(positions)} steps" if len(positions) > 1 else ""


def accuracy_drop(steps: Sequence[int], accuracies: Sequence[float], errors: Sequence[float]) -> Event | None:
    """Held-out accuracy that was there and is gone; `errors` are the standard errors of the accuracies."""
    found = lasting_fall(accuracies, errors, ACCURACY_ERRORS)
    if found is None:
        return None
    best, first = found
    text = (
        f"accuracy {accuracies[best]:.1%} at step {steps[best]}, {accuracies[first]:.1%} at step {steps[first]}, "
        f"{accuracies[-1]:.1%} in the end"
    )
    return Event("accuracy drop", "accuracy", steps[first], accuracies[first], text)


def sampling_drop(steps: Sequence[int], rates: Sequence[float]) -> Event | None:
    """Sampled answers that were right and no longer are.

    In blocks that end with the last step; the standard error of a block is that of the mean of its steps, so that it holds whether
    the responses of a step answer one problem or several.
    """
    starts = range(len(rates) % BLOCK, len(rates), BLOCK)
    blocks = [rates[start : start + BLOCK] for start in starts]
    means, errors = [fmean(block) for block in blocks], [stdev(block) / math.sqrt(BLOCK) for block in blocks]
    found = lasting_fall(means, errors, BLOCK_ERRORS)
    if found is None:
        return None
    best, first = found
    step, until = steps[starts[first]], steps[starts[best] + BLOCK - 1]
    text = (
        f"sampled answers right: {means[best]:.1%} in the {BLOCK} steps to {until}, {means[first]:.1%} in those from {step} on, "
        f"{means[-1]:.1%} in the last {BLOCK}"
    )
    return Event("sampling drop", "correct_rate", step, means[first], text)


def lasting_fall(values: Sequence[float], errors: Sequence[float], times: float) -> tuple[int, int] | None:
    """Positions of the best value and of the first after it from which on all are clearly lower than it; None if there is none."""

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
    """All events of a run, in the order of their steps."""

    def column(key: str) -> tuple[list[int], list[float]]:
        # A step without a value for the column is no step of the curve; a gradient norm that is not finite is one.
        rows = [row for row in metrics if key in row and (key == "grad_norm" or math.isfinite(row[key]))]
        return [int(row["step"]) for row in rows], [float(row[key]) for row in rows]

    measured = [row for row in evaluations if row.get("n") and math.isfinite(row["accuracy"])]
    drop = accuracy_drop(*([row[key] for row in measured] for key in ("step", "accuracy", "stderr")))
    single = [length_collapse(*column("response_length")), runaway_length(*column("truncated_rate")), drop]
    single.append(sampling_drop(*column("correct_rate")))
    events = [event for event in single if event is not None]
    events += gradient_bursts(*column("grad_norm"), threshold) + gradients_not_finite(*column("grad_norm"))
    return sorted(events, key=lambda event: event.step)
