"""DemoPSD (Li et al., arXiv 2607.02502): self-distillation with a tempered target where feedback changes the teacher much.

A teacher that sees the answer has information that the student lacks. Where its distribution is far from that of the same weights
without feedback, DemoPSD moves the target towards the latter: a normalized geometric mean whose share alpha_t grows with their
Jensen-Shannon divergence.

    d_t = JSD(s_t, q_t),   alpha_t = alpha_max tanh(beta d_t / 2),   log B_t = (1 - alpha_t) log q_t + alpha_t log s_t - log Z
    loss_t = KL(p_t || sg[B_t])

q is the EMA with feedback and s the EMA without. Feedback about the response replaces the original's correct sibling response, every
rollout has it, and all sums run over the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from firedistill.config import TeacherKind
from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch
from firedistill.objectives.distributions import entropy, finite_logits, jensen_shannon, log_softmax, reverse_kl
from firedistill.objectives.registry import register
from firedistill.prompts import View
from firedistill.rollout import Rollout


@torch.no_grad()
def demopsd_target(reference_logits: Tensor, teacher_logits: Tensor, alpha_max: float, beta: float) -> tuple[Tensor, Tensor]:
    """`log B` `[..., V]` and the reference's share `alpha` `[...]`, detached.

    Args:
        reference_logits: `[..., V]`, without feedback.
        teacher_logits: `[..., V]`, with feedback.
        alpha_max: the largest share of the reference.
        beta: how fast the share grows with the disagreement.
    """
    return tempered(reference_logits, teacher_logits, alpha_max, beta)[:2]


@torch.no_grad()
def tempered(reference_logits: Tensor, teacher_logits: Tensor, alpha_max: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """`demopsd_target`, and the Jensen-Shannon divergence `d` `[...]` that decides the share."""
    log_s, log_q = log_softmax(finite_logits(reference_logits)), log_softmax(finite_logits(teacher_logits))
    disagreement = jensen_shannon(log_s, log_q)
    alpha = alpha_max * torch.tanh(0.5 * beta * disagreement)
    share = alpha.unsqueeze(-1)
    return log_softmax((1 - share) * log_q + share * log_s), alpha, disagreement


@register("demopsd")
@dataclass
class DemoPSD(Objective):
    """Reverse KL to the tempered teacher, on every rollout."""

    logits_held: ClassVar[int] = 17

    alpha_max: float = setting(0.15, "Largest share of the reference in the target.", at_least=0, at_most=1)
    beta: float = setting(
        50.0, "Scale of the divergence d: the share is alpha_max tanh(beta d / 2).", at_least=0, below=math.inf
    )
    reference: Literal["ema", "student"] = setting(
        "ema", "Distribution without feedback: of the EMA teacher (ema) or the live student (student)."
    )

    def check_teacher(self, kind: TeacherKind, feedback: bool) -> None:
        if self.reference == "ema" and not feedback:
            raise ValueError(
                "method demopsd compares the teacher with feedback to itself without, and teacher_feedback false makes both the same: "
                "use --method_settings.reference student, or method full_context"
            )

    def views(self, rollout: Rollout) -> list[View]:
        return ["full", "none"] if self.reference == "ema" else ["full"]

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, head = Metrics(), batch.teacher.head
        full, *without = batch.teacher.states(batch.rollouts, ["full", "none"] if self.reference == "ema" else ["full"])

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            teacher_logits = head(full.hidden[chunk])
            reference_logits = head(without[0].hidden[chunk]) if without else student_logits.detach()
            log_target, alpha, disagreement = tempered(reference_logits, teacher_logits, self.alpha_max, self.beta)
            metrics.mean(
                demopsd_disagreement=disagreement,
                demopsd_alpha=alpha,
                kl=reverse_kl(student_logits.detach(), teacher_logits),
                entropy=entropy(student_logits.detach()),
            )
            return reverse_kl(student_logits, log_target)

        return batch.token_mean_loss(token_loss), metrics
