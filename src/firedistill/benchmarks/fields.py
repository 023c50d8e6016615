"""The cost of a FIRE step against the number of feedback fields B, in the worst case.

All responses are wrong and every token violates the radius, so that every view is needed everywhere. All fields have the same length;
the teacher's prompts grow with their number, and so does the Full Context step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ONE_BY_ONE, ModelSizes, PrescribedSteps, StepSizes
from firedistill.metrics import Metrics

TITLE = "A whole FIRE step against the number of feedback fields, every token over the radius"


@dataclass
class Sizes:
    prompt: int = 150
    field_words: int = 90
    fields: tuple[int, ...] = (1, 2, 4, 8)
    responses: tuple[int, ...] = (200,)
    model: ModelSizes = ModelSizes()
    repeats: int = 3
    memory: bool = True


SIZES = {
    "full": Sizes(),
    "quick": Sizes(80, 40, (1, 4), (40, 40), ModelSizes(4, 256, 8192), repeats=2, memory=False),
}


def sweeps(sizes: Sizes) -> dict[str, dict]:
    return {"fields": {}}


def variants_of(steps: PrescribedSteps) -> dict[str, Callable[[], Metrics]]:
    steps.set_over(1.0, of_tokens=True)  # also a warm-up
    return {
        "full context": partial(steps.step, "full_context"),
        "fire": partial(steps.step, "fire"),
        "fire, one pass per view": partial(steps.step, "fire", ONE_BY_ONE),
    }


def prepared(*sizes_and_options) -> dict[str, Callable[[], Metrics]]:
    return variants_of(PrescribedSteps(*sizes_and_options))


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for count in sizes.fields:
        case, step_sizes = {"fields": count}, StepSizes(sizes.prompt, (sizes.field_words,) * count, sizes.responses)
        steps = PrescribedSteps(step_sizes, sizes.model, options)
        repeats = options.repeats or sizes.repeats
        yield from harness.rows(case, variants_of(steps), repeats, warm_up=False, details=steps.facts)
        if sizes.memory:
            yield from harness.memory_rows(case, prepared, step_sizes, sizes.model, options)
