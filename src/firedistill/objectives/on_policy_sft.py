"""On-Policy SFT (arXiv 2602.13407): maximum likelihood on the student's own correct answers.

Policy-gradient training for short correct answers without KL term, group normalization and length reward: sample at temperature 1,
keep the correct responses within the length budget, raise their likelihood. It uses neither teacher nor feedback.

    L = - 1/(B G) sum_{i kept} 1/L_max sum_t log p(y_it),   L_max = the longest kept response of the step

All B*G sampled responses are in the divisor, kept or not, and every kept token weighs the same. The length budget is `max_new_tokens`.
The temperature is 1, the nucleus that of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, token_log_probs
from firedistill.objectives.distributions import entropy
from firedistill.objectives.registry import register
from firedistill.rollout import Rollout, Sampling


@register("on_policy_sft")
@dataclass
class OnPolicySFT(Objective):
    """Supervised fine-tuning on the verified responses of the current student."""

    uses_teacher: ClassVar[bool] = False

    group_size: int = setting(4, "Responses sampled per prompt.")
    temperature: float = setting(
        1.0, "Sampling temperature, 0 for greedy; any other than 1 makes the data off-policy.", at_least=0
    )

    def sampling(self, sampling: Sampling) -> Sampling:
        return replace(sampling, temperature=self.temperature)

    def trains(self, rollout: Rollout) -> bool:
        return rollout.verdict.correct

    def prepare(self, step: Step) -> tuple[list[float], Metrics]:
        """L_max for every rollout."""
        longest = step.max_over_processes(max((len(rollout.response_ids) for rollout in step.rollouts), default=0))
        return [longest] * len(step.rollouts), Metrics()

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, token_ids = Metrics(), batch.token_ids()

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            nll = -token_log_probs(student_logits, token_ids[chunk])
            metrics.mean(nll=nll.detach(), entropy=entropy(student_logits.detach()))
            return nll

        longest_kept = batch.per_token(batch.prepared)
        return batch.token_loss(1 / (longest_kept * batch.responses), token_loss), metrics
