"""Full Context: plain feedback-based on-policy self-distillation (paper section "Feedback-Based On-Policy Self-Distillation").

Every response, correct or not, is distilled towards the EMA teacher that sees the full feedback, by reverse KL with a token mean
(eq. sdpo_objective). No routing, no radius, and no floor under the teacher: there are no residuals.

It is FIRE's incorrect branch on every response, without attribution and projection, and shares its fused pass over the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firedistill.objectives.base import Objective, TrainingBatch, register
from firedistill.ops.fire_head import fire_head_loss


@register("full_context")
class FullContext(Objective):
    """`KL(p || q_c)` on every rollout. The radius is reported, never applied."""

    def loss(self, batch: TrainingBatch) -> Tensor:
        rows = batch.rows()
        (full,) = batch.teacher(rows, ["full"])
        token_ids = batch.token_ids(rows)
        output = fire_head_loss(
            batch.head,
            batch.student.hidden,
            batch.student.token_weights() / batch.responses,
            token_ids=token_ids,
            correct=torch.zeros_like(token_ids, dtype=torch.bool),
            teacher_hidden=full.hidden,
            teacher_head=batch.teacher_head,
            step_scale=batch.step_scale,
            attribution=False,
            projection=False,
        )
        batch.averages.add(kl=output.kl, rho=output.rho, chi_active=output.chi > 0, entropy=output.entropy)
        return output.loss
