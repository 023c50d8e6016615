"""Full Context: plain feedback-based on-policy self-distillation (paper section "Feedback-Based On-Policy Self-Distillation").

Every response, correct or not, is distilled towards the EMA teacher that sees the full feedback, by reverse KL with a token mean
(eq. sdpo_objective). There is no routing, no radius, and no floor under the teacher's probabilities.

It is FIRE's incorrect branch on every response without attribution and projection, and shares its pass over the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective
from firedistill.objectives.batches import MicroBatch
from firedistill.objectives.registry import register
from firedistill.ops.fire_head import first_pass


@register("full_context")
class FullContext(Objective):
    """`KL(p || q_c)` on every rollout. The radius is reported, never applied."""

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, token_ids = Metrics(), batch.token_ids()
        output = first_pass(
            batch.head,
            batch.student.hidden,
            batch.student.token_weights() / batch.responses,
            token_ids=token_ids,
            correct=torch.zeros_like(token_ids, dtype=torch.bool),
            teacher_hidden=batch.teacher.full(batch.rollouts, keep=False).hidden,
            teacher_head=batch.teacher.head,
            step_scale=batch.step_scale,
            attribution=False,
            projection=False,
        ).output()
        metrics.mean(kl=output.kl, rho=output.rho, chi_active=output.chi > 0, entropy=output.entropy)
        return output.loss, metrics
