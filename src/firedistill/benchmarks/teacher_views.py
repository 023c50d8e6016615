"""The views of the teacher: what they have in common read once, against one forward pass per view.

Asked for as FIRE does: the full view first, then those without a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, PrescribedSteps, StepSizes
from firedistill.teacher.prefix_cache import ViewScorer

TITLE = "Teacher views: shared prefixes against one forward pass per view"


@dataclass
class Sizes:
    """
    Attributes:
        prompt: tokens of a student prompt.
        orders: feedback fields in words, from the first to the last: prefixes save most where the last ones are short.
        responses: lengths in tokens; each is a case of its own.
    """

    prompt: int = 150
    orders: tuple[tuple[int, ...], ...] = ((60, 100, 145, 190), (124, 124, 124, 123), (190, 145, 100, 60))
    responses: tuple[int, ...] = (300,)
    model: ModelSizes = field(default_factory=ModelSizes)
    repeats: int = 5


SIZES = {
    "full": Sizes(),
    "quick": Sizes(orders=((60, 100, 145, 190),), responses=(200,), model=ModelSizes(4, 256, 8192), repeats=3),
}


def sweeps(sizes: Sizes) -> dict:
    return {}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for fields in sizes.orders:
        for response in sizes.responses:
            steps = PrescribedSteps(StepSizes(sizes.prompt, fields, (response,)), sizes.model, options)
            trainer, (rollout,) = steps.trainer, steps.rollouts()
            prompts = [[trainer.view_ids(rollout, view)] for view in ("full", *range(len(fields)))]
            scorers: dict[str, ViewScorer] = {}

            def score(variant: str, share: bool, trainer=trainer, rollout=rollout, prompts=prompts, scorers=scorers) -> None:
                scorer = scorers[variant] = ViewScorer(trainer.model, share_prefixes=share, max_tokens=1)
                with trainer.teacher.applied():
                    for views in (prompts[:1], prompts[1:]):
                        scorer.score([0], views, [rollout.response_ids])

            def details(variant: str, scorers: dict[str, ViewScorer] = scorers) -> dict[str, int]:
                return {"tokens_read": scorers[variant].tokens}

            variants = {
                "one pass per view": lambda score=score: score("one pass per view", False),
                "shared prefixes": lambda score=score: score("shared prefixes", True),
            }
            case = {"fields": " ".join(map(str, fields)), "response": response}
            yield from harness.rows(
                case,
                variants,
                options.repeats or sizes.repeats,
                details=details,
            )
