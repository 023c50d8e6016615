"""A negative advantage on the student's own unlikely tokens (arXiv 2608.31046): no teacher, no verdict, no feedback.

The paper finds that on-policy distillation works largely by suppressing the tokens that the student found unlikely when it sampled
them, and that one fixed negative advantage on these tokens does as well as the teacher's log-ratios. A method with a teacher should do
better than this control.

    L = - E[ 1/|S| sum_{i in S} A_i log p(y_i) ]          S: the share of a response's tokens with the lowest log p
    A_i = a - delta/4 r_i,   r_i = 2 (H_i - H_min) / (H_max - H_min) - 1        over S (eq. 4); delta = 0: A_i = a

The defaults are the fixed control of its section 3.2: the lowest 20 %, a = -0.5. `advantage: -0.75` with `delta: 1` is the paper's own
method, On-Policy Self-Adaptation (eq. 5). Where all entropies in S are equal, r_i is 0. The mean is over all responses of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, map_tokens, token_log_probs
from firedistill.objectives.distributions import entropy
from firedistill.objectives.registry import register


def negative_advantages(
    log_probs: Tensor, entropies: Tensor, share: float, advantage: float, delta: float
) -> tuple[Tensor, Tensor]:
    """The indices `[|S|]` of the tokens of one response that are in S, and their advantages `[|S|]`, detached.

    Args:
        log_probs: `[T]`, of the sampled tokens.
        entropies: `[T]`, of the distributions they were sampled from, in nats.
        share: share of the tokens that S holds; their number is rounded up, 7 for 0.07 of 100.
        advantage: a.
        delta: how much more negative tokens of high entropy are.
    """
    log_probs, entropies = log_probs.detach(), entropies.detach()
    chosen = log_probs.argsort(stable=True)[: math.ceil(round(share * len(log_probs), 6))]
    relative = torch.zeros_like(log_probs[chosen])
    if len(chosen):
        low, high = entropies[chosen].min(), entropies[chosen].max()
        relative = 2 * (entropies[chosen] - low) / (high - low) - 1 if high > low else relative
    return chosen, advantage - delta / 4 * relative


@register("negative_advantage")
@dataclass
class NegativeAdvantage(Objective):
    """Suppress the least likely sampled tokens of every response."""

    uses_teacher: ClassVar[bool] = False
    logits_held: ClassVar[int] = 6

    share: float = setting(
        0.2, "Share of a response's tokens, those with the lowest log-probability, that are trained.", above=0, at_most=1
    )
    advantage: float = setting(-0.5, "Advantage of the trained tokens.", above=-math.inf, below=0)
    delta: float = setting(
        0.0, "1 makes the advantage more negative where the entropy is high; 0 keeps it fixed.", above=-math.inf, below=math.inf
    )

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, token_ids = Metrics(), batch.token_ids()

        def log_prob_and_entropy(logits: Tensor, chunk: slice) -> Tensor:
            return torch.stack([token_log_probs(logits, token_ids[chunk]), entropy(logits)])

        found = map_tokens(batch.head, batch.student, log_prob_and_entropy)
        weights = []
        for log_probs, entropies in found:
            chosen, advantages = negative_advantages(log_probs, entropies, self.share, self.advantage, self.delta)
            weights.append(torch.zeros_like(log_probs).index_copy(0, chosen, advantages / max(len(chosen), 1)))
            metrics.mean(entropy=entropies, negative_advantage=advantages, negative_log_prob=log_probs[chosen])

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            return -token_log_probs(student_logits, token_ids[chunk])

        return batch.token_loss(batch.per_token(weights) / batch.responses, token_loss), metrics
