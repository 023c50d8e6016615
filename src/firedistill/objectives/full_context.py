"""Full Context: plain feedback-based on-policy self-distillation (paper section "Feedback-Based On-Policy Self-Distillation").

Every response, correct or not, is distilled towards the EMA teacher that sees the full feedback, by reverse KL with a token mean
(eq. sdpo_objective). There is no routing and no radius. There is no floor under the teacher's probabilities either, unless
`attribution` or `projection` is set.

It is FIRE's incorrect branch on every response without attribution and projection, and shares its pass over the head. Each of the two
can be added, which is not in the paper: with `routing`, `no_projection`, `no_attribution` and `fire`, the four settings show what each
part of FIRE does with and without routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from firedistill.config import TeacherKind
from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, refuse_missing_fields, setting
from firedistill.objectives.batches import MicroBatch
from firedistill.objectives.registry import register
from firedistill.ops.fire_head import first_pass
from firedistill.prompts import View, field_groups
from firedistill.rollout import Rollout


@register("full_context")
@dataclass
class FullContext(Objective):
    """`KL(p || q_c)` on every rollout. The radius is reported, and applied by the projection only."""

    logits_held: ClassVar[int] = 0

    attribution: bool = setting(
        False, "Add FIRE's leave-one-field-out attribution, on correct responses too. Not in the paper."
    )
    projection: bool = setting(False, "Add FIRE's projection onto the radius, on correct responses too. Not in the paper.")

    def check_teacher(self, kind: TeacherKind, feedback: bool) -> None:
        if self.attribution:
            refuse_missing_fields(self.name, feedback, "leave method_settings.attribution out")

    def views(self, rollout: Rollout) -> list[View]:
        return ["full", *(view for _, view in field_groups(rollout.feedback) if self.attribution)]

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, token_ids, full = Metrics(), batch.token_ids(), batch.teacher.full(batch.rollouts, keep=self.attribution)
        first = first_pass(
            batch.head,
            batch.student.hidden,
            batch.student.token_weights() / batch.responses,
            token_ids=token_ids,
            correct=torch.zeros_like(token_ids, dtype=torch.bool),
            teacher_hidden=full.hidden,
            teacher_head=batch.teacher.head,
            step_scale=batch.step_scale,
            log_prob_floor=batch.log_prob_floor if self.attribution or self.projection else None,
            attribution=self.attribution,
            projection=self.projection,
        )
        output = first.attribute(batch.teacher.states_without_fields(batch.rollouts, full, first.over))
        metrics.mean(kl=output.kl, rho=output.rho, chi_active=output.chi > 0, entropy=output.entropy)
        if self.attribution:
            metrics.mean(alpha_full=output.alpha[0])
        if self.projection:
            metrics.mean(eta=output.eta, projected=output.eta < 1)
            metrics.maximum(max_bound_ratio=(output.gradient_norm / output.rho).where(output.rho > 0, 0.0))
        return output.loss, metrics
