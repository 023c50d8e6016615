"""Plain supervised fine-tuning on given responses: the warm start."""

from __future__ import annotations

from torch import Tensor

from firedistill.objectives.distributions import log_softmax
from firedistill.objectives.objective import Chunk, Objective, TrainingBatch, register
from firedistill.rollouts.engine import Rollout


@register("supervised")
class Supervised(Objective):
    """Token mean of the negative log-likelihood of every response; no teacher."""

    def needs_teacher(self, rollout: Rollout) -> bool:
        return False

    def loss(self, batch: TrainingBatch) -> Tensor:
        rows = list(range(len(batch.rollouts)))
        token_ids = batch.token_ids(rows)

        def token_loss(student_logits: Tensor, chunk: Chunk) -> Tensor:
            return -log_softmax(student_logits).gather(-1, token_ids[chunk].unsqueeze(-1)).squeeze(-1)

        return batch.token_mean_loss(rows, token_loss)
