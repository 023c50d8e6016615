"""Plain supervised fine-tuning on given responses: the warm start."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective
from firedistill.objectives.batches import MicroBatch, token_log_probs
from firedistill.objectives.registry import register


@register("supervised")
class Supervised(Objective):
    """Token mean of the negative log-likelihood of every response; no teacher. For `firedistill warmstart` only."""

    uses_teacher: ClassVar[bool] = False
    logits_held: ClassVar[int] = 6

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        token_ids = batch.token_ids()

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            return -token_log_probs(student_logits, token_ids[chunk])

        return batch.token_mean_loss(token_loss), Metrics()
