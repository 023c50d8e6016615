"""How the cost of a FIRE step grows with the number of fields B, where nothing can be left out.

All responses are wrong and every token violates the radius, so that every view counts everywhere. All fields have the same length;
the prompts of the teacher grow with their number, and so does the step of Full Context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, PrescribedSteps, StepSizes, prepared_steps

TITLE = "A whole FIRE step against the number of feedback fields, every token over the radius"

# By name: the method, and whether prefixes are shared.
VARIANTS = {
    "full context": ("full_context", True),
    "fire": ("fire", True),
    "fire, one pass per view": ("fire", False),
}


@dataclass
class Sizes:
    prompt: int = 150
    field_words: int = 90
    fields: tuple[int, ...] = (1, 2, 4, 8)
    responses: tuple[int, ...] = (200,)
    model: ModelSizes = field(default_factory=ModelSizes)
    repeats: int = 3
    memory: bool = True


SIZES = {
    "full": Sizes(),
    "quick": Sizes(80, 40, (1, 4), (40, 40), ModelSizes(4, 256, 8192), repeats=2, memory=False),
}


def sweeps(sizes: Sizes) -> dict:
    return {"fields": {}}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for count in sizes.fields:
        step_sizes = StepSizes(sizes.prompt, (sizes.field_words,) * count, sizes.responses)
        steps = PrescribedSteps(step_sizes, sizes.model, options)
        steps.set_over(1.0, of_tokens=True)

        def facts(variant: str, steps: PrescribedSteps = steps) -> dict[str, float]:
            return steps.facts()

        yield from harness.rows(
            {"fields": count},
            {name: partial(steps.step, *variant) for name, variant in VARIANTS.items()},
            options.repeats or sizes.repeats,
            warm_up=False,  # choosing the step scale was one
            details=facts,
        )
        if sizes.memory:
            yield from harness.memory_rows({"fields": count}, prepared_steps, VARIANTS, step_sizes, sizes.model, options)
