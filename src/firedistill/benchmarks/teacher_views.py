"""Teacher views: common prefixes read once, compared with one forward pass per view.

Requested as FIRE does: the full view first, then those without a field. On a GPU, where training reads padded batches, they are a third
variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import BATCHES, ONE_BY_ONE, SHARED, ModelSizes, PrescribedSteps, StepSizes
from firedistill.rollout import Rollout
from firedistill.teacher import Teacher

TITLE = "Teacher views: shared prefixes against one forward pass per view"


@dataclass
class Sizes:
    prompt: int = 150  # tokens of a student prompt
    # Words of the feedback fields in their order: shared prefixes save most if the last fields are short.
    orders: tuple[tuple[int, ...], ...] = ((60, 100, 145, 190), (124, 124, 124, 123), (190, 145, 100, 60))
    responses: tuple[int, ...] = (300,)  # tokens of the response, each a case
    model: ModelSizes = ModelSizes()
    repeats: int = 5


SIZES = {
    "full": Sizes(),
    "quick": Sizes(orders=((60, 100, 145, 190),), responses=(200,), model=ModelSizes(4, 256, 8192), repeats=3),
}


def read_views(teacher: Teacher, rollout: Rollout) -> int:
    """Read all views of a rollout; returns the tokens that went through the model."""
    teacher.full([rollout])
    teacher.states([rollout], range(len(rollout.feedback)))
    teacher.forget()
    return teacher.take_metrics().totals["teacher_tokens"]


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for fields, response in product(sizes.orders, sizes.responses):
        steps = PrescribedSteps(StepSizes(sizes.prompt, fields, (response,)), sizes.model, options)
        (rollout,) = steps.rollouts_with_feedback()
        readings = [ONE_BY_ONE, SHARED] if options.device == "cpu" else [ONE_BY_ONE, SHARED, BATCHES]
        variants = {reading: partial(read_views, steps.teachers[reading], rollout) for reading in readings}
        case = {"fields": " ".join(map(str, fields)), "response": response}
        repeats = options.repeats or sizes.repeats
        yield from harness.rows(case, variants, repeats, details=lambda tokens: {"tokens_read": tokens})
