"""Plain supervised fine-tuning on given responses: the warm start."""

from __future__ import annotations

from torch import Tensor

from firedistill.objectives.base import Chunk, Objective, TrainingBatch, register, token_log_probs
from firedistill.rollouts.engine import Rollout


@register("supervised")
class Supervised(Objective):
    """Token mean of the negative log-likelihood of every response; no teacher."""

    def needs_teacher(self, rollout: Rollout) -> bool:
        return False

    def loss(self, batch: TrainingBatch) -> Tensor:
        rows = batch.rows()
        token_ids = batch.token_ids(rows)

        def token_loss(student_logits: Tensor, chunk: Chunk) -> Tensor:
            return -token_log_probs(student_logits, token_ids[chunk])

        return batch.token_mean_loss(rows, token_loss)
