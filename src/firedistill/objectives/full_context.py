"""Full Context: plain feedback-based on-policy self-distillation (paper section "Feedback-Based On-Policy Self-Distillation").

Every response, correct or not, is distilled towards the EMA teacher that sees the full feedback, by reverse KL with a token mean
(eq. sdpo_objective). No routing, no radius, and no floor under the teacher: there are no residuals.
"""

from __future__ import annotations

from torch import Tensor

from firedistill.objectives.distributions import entropy, fisher_radius, induced_gradient, reverse_kl
from firedistill.objectives.objective import Chunk, Objective, TrainingBatch, register


@register("full_context")
class FullContext(Objective):
    """`KL(p || q_c)` on every rollout. The radius is reported, never applied."""

    def loss(self, batch: TrainingBatch) -> Tensor:
        rows = batch.rows()
        (full,) = batch.teacher(rows, ["full"])

        def token_loss(student_logits: Tensor, chunk: Chunk) -> Tensor:
            target = batch.teacher_head(full.hidden[chunk])
            kl = reverse_kl(student_logits, target)
            rho = fisher_radius(student_logits, batch.step_scale)
            norm = induced_gradient(student_logits, target).square().sum(-1).sqrt()
            batch.averages.add(kl=kl.detach(), rho=rho, chi_active=norm > rho, entropy=entropy(student_logits.detach()))
            return kl

        return batch.token_mean_loss(rows, token_loss)
