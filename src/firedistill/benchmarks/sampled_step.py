"""Whole steps of Full Context and FIRE with their own sampling, against a step of trl's `SDPOTrainer` with its own.

As in `sdpo`, but each side samples its responses, every one to the full length: the end of a turn does not stop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, PrescribedSteps, StepSizes
from firedistill.benchmarks.sdpo import TrlSteps, after_one_step
from firedistill.metrics import Metrics
from firedistill.rollout import Sampling
from firedistill.rollouts.hf import HFRolloutEngine

TITLE = "A step with its own sampling, against trl's SDPOTrainer with full logits"
NEEDS = "trl"
METHODS = ("full_context", "fire")


@dataclass
class Sizes:
    step: StepSizes = StepSizes(100, (66, 83, 94, 87), (64,) * 8, micro_batch=8, checkpointing=True)
    new_tokens: tuple[int, ...] = (64, 200)  # each a case, replaces the lengths in `step`
    over: float = 0.11  # share of tokens over the radius
    model: ModelSizes = ModelSizes()
    repeats: int = 3
    memory: bool = True


SIZES = {
    "full": Sizes(),
    "quick": Sizes(
        StepSizes(80, (30, 50, 70, 90), (20,) * 2, micro_batch=2, checkpointing=True), (20,), model=ModelSizes(4, 256, 8192)
    ),
}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for tokens in sizes.new_tokens:
        step = replace(sizes.step, responses=(tokens,) * len(sizes.step.responses))
        case, problem = {"tokens": tokens}, (step, sizes.model, options)
        trl, ours = TrlSteps(*problem, sample=True), SampledSteps(sizes.over, *problem)
        sides: dict[str, Callable[[], Any]] = {"trl": trl} | {name: partial(ours, name) for name in METHODS}
        yield from harness.rows(case, sides, options.repeats or sizes.repeats, details=ours.facts)
        trl.stop()
        if sizes.memory:  # each side in its own process: it could use what another one has freed
            yield from harness.memory_rows(case, after_one_step, "trl", partial(TrlSteps, sample=True), *problem)
            for name in METHODS:
                yield from harness.memory_rows(case, after_one_step, name, partial(one_method, name, sizes.over), *problem)


def one_method(name: str, *arguments: Any) -> Callable[[], Metrics]:
    return partial(SampledSteps(*arguments), name)


class SampledSteps:
    """The steps of `PrescribedSteps` on responses that are sampled first, always the same ones.

    Args:
        over: share of tokens over the radius, which sets the step scale.
    """

    def __init__(self, over: float, sizes: StepSizes, model_sizes: ModelSizes, options: harness.Options):
        self.steps, self.sampling = PrescribedSteps(sizes, model_sizes, options), Sampling(1.0, 1.0, max(sizes.responses))
        self.engine = HFRolloutEngine(self.steps.model, self.steps.tokenizer, len(sizes.responses))
        self.engine.stop_ids.clear()  # the decoder has the same list
        self.sample()
        self.steps.set_over(over, of_tokens=True)

    def __call__(self, method: str) -> Metrics:
        self.sample()
        return self.steps.step(method)

    def sample(self) -> None:
        rollouts = self.steps.rollouts
        responses = self.engine.generate([rollout.prompt_ids for rollout in rollouts], self.sampling, seed=0)
        self.steps.rollouts = [replace(r, response=response) for r, response in zip(rollouts, responses, strict=True)]

    def facts(self, returned: Metrics | int) -> dict[str, float]:
        """Of either side; trl's steps return the tokens that the teacher has read."""
        return {"teacher_tokens": returned} if isinstance(returned, int) else self.steps.facts(returned)
