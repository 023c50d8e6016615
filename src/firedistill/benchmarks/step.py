"""A whole FIRE step without sampling against a Full Context step on the same rollouts: all responses wrong.

How many responses have tokens over the radius decides what FIRE reads more than Full Context does; see `PrescribedSteps.set_over`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, PrescribedSteps, StepSizes

TITLE = "An optimizer step without sampling, all responses wrong"


@dataclass
class Sizes:
    """
    Attributes:
        over: shares of the responses that have tokens over the radius.
    """

    step: StepSizes = field(
        default_factory=lambda: StepSizes(
            prompt=150, fields=(60, 100, 145, 190), responses=tuple(range(200, 385, 20)), micro_batch=2
        )
    )
    over: tuple[float, ...] = (0.1, 1.0)
    model: ModelSizes = field(default_factory=ModelSizes)
    repeats: int = 3


SIZES = {
    "full": Sizes(),
    "quick": Sizes(StepSizes(80, (30, 50, 70, 90), (40,) * 10, micro_batch=2), (0.1,), ModelSizes(4, 256, 8192)),
}


def sweeps(sizes: Sizes) -> dict:
    return {}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    steps = PrescribedSteps(sizes.step, sizes.model, options)
    for over in sizes.over:
        steps.set_over(over)
        yield from harness.rows(
            {"responses over": over},
            {"full context": lambda: steps.step("full_context"), "fire": lambda: steps.step("fire")},
            options.repeats or sizes.repeats,
            warm_up=False,  # choosing the step scale was one
            details=lambda variant: steps.facts(),
        )
