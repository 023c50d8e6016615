"""Veto (Jang et al., arXiv 2601.07155): forward KL to a product of experts, the teacher and the student itself.

Forward KL to a teacher is large on tokens that the teacher prefers and the student considers impossible. Veto's target is the teacher
times a tempered copy of the student, which suppresses such tokens early in training. The student's exponent beta decays linearly to
0, where the target is the plain teacher.

    Q_t(v) = q_t(v) p_t(v)^beta / Z,   loss_t = KL(sg[Q_t] || p_t),   beta_k = beta_start + (beta_end - beta_start) k / (K - 1)

The teacher is the EMA with feedback on the student's own response, every rollout is distilled, and the schedule ends exactly at
`beta_end`. While beta > 0 the loss is positive even for q = p: the target is sharper than the student. A beta below 0 would
reward disagreement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch
from firedistill.objectives.distributions import entropy, finite_logits, forward_kl, log_softmax
from firedistill.objectives.registry import register


def veto_target(student_logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """`log Q` of the product of experts `q p^beta`; `[..., V]`, detached.

    Args:
        student_logits, teacher_logits: `[..., V]`.
        beta: the student's exponent; 0 gives the teacher itself.
    """
    student, teacher = log_softmax(finite_logits(student_logits.detach())), log_softmax(finite_logits(teacher_logits.detach()))
    return log_softmax(teacher + beta * student) if beta else teacher


@register("veto")
@dataclass
class Veto(Objective):
    """Forward KL to the product of experts, on every rollout."""

    logits_held: ClassVar[int] = 15
    beta_start: float = setting(0.8, "The student's exponent in the target at the first step.", at_least=0, below=math.inf)
    beta_end: float = setting(0.0, "The same at the last step; linear in between.", at_least=0, below=math.inf)

    def beta(self, progress: float) -> float:
        return self.beta_start + (self.beta_end - self.beta_start) * progress

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, head, full = Metrics(), batch.teacher.head, batch.teacher.full(batch.rollouts, keep=False)
        beta = self.beta(batch.progress)

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            loss = forward_kl(student_logits, veto_target(student_logits, head(full.hidden[chunk]), beta))
            metrics.mean(kl=loss.detach(), entropy=entropy(student_logits.detach()), veto_beta=beta)
            return loss

        return batch.token_mean_loss(token_loss), metrics
