"""What a training step costs as responses get longer: time per token and peak memory of Full Context and FIRE.

One wrong response per micro-batch, with recomputed activations. The last case is a whole step of several long responses in one
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, PrescribedSteps, StepSizes
from firedistill.metrics import Metrics

TITLE = "A step without sampling against the length of the responses"
METHODS = ("full_context", "fire")


@dataclass
class Sizes:
    prompt: int = 100
    fields: tuple[int, ...] = (66, 83, 94, 87)
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    together: tuple[int, int] = (8, 8192)  # responses of one micro-batch, and their tokens
    over: float = 0.05  # share of tokens over the radius
    model: ModelSizes = ModelSizes(layers=2, width=128, vocabulary=4096)
    repeats: int = 1
    memory: bool = True


SIZES = {"full": Sizes(), "quick": Sizes(lengths=(512, 1024), together=(2, 512))}


def sweeps(sizes: Sizes) -> dict[str, Mapping[str, Any]]:
    return {"tokens": {"responses": 1}}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for responses, tokens in [*((1, length) for length in sizes.lengths), sizes.together]:
        case, problem = {"responses": responses, "tokens": tokens}, (sizes, responses, tokens, options)
        steps = prepared(*problem)
        variants = {method: partial(steps.step, method) for method in METHODS}
        repeats = options.repeats or sizes.repeats
        yield from harness.rows(case, variants, repeats, warm_up=False, details=steps.facts)
        if sizes.memory:
            yield from harness.memory_rows(case, one_step_each, *problem)


def prepared(sizes: Sizes, responses: int, tokens: int, options: harness.Options) -> PrescribedSteps:
    step = StepSizes(sizes.prompt, sizes.fields, (tokens,) * responses, micro_batch=responses, checkpointing=True)
    steps = PrescribedSteps(step, sizes.model, options)
    steps.set_over(sizes.over, of_tokens=True)
    return steps


def one_step_each(*problem: Any) -> dict[str, Callable[[], Metrics]]:
    steps = prepared(*problem)
    return {method: partial(steps.step, method) for method in METHODS}
