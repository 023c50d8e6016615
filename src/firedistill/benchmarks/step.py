"""A whole FIRE step without sampling compared with a Full Context step on the same rollouts: all responses wrong.

The number of responses with tokens over the radius decides what FIRE reads more than Full Context; see `PrescribedSteps.set_over`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, PrescribedSteps, StepSizes

TITLE = "An optimizer step without sampling, all responses wrong"


@dataclass
class Sizes:
    step: StepSizes = StepSizes(150, (60, 100, 145, 190), tuple(range(200, 385, 20)), micro_batch=2)
    over: tuple[float, ...] = (0.1, 1.0)  # shares of the responses that have tokens over the radius
    model: ModelSizes = ModelSizes()
    repeats: int = 3


SIZES = {
    "full": Sizes(),
    "quick": Sizes(StepSizes(80, (30, 50, 70, 90), (40,) * 10, micro_batch=2), (0.1,), ModelSizes(4, 256, 8192)),
}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    steps = PrescribedSteps(sizes.step, sizes.model, options)
    variants = {"full context": partial(steps.step, "full_context"), "fire": partial(steps.step, "fire")}
    for over in sizes.over:
        steps.set_over(over)  # also a warm-up
        repeats = options.repeats or sizes.repeats
        yield from harness.rows({"responses over": over}, variants, repeats, warm_up=False, details=steps.facts)
