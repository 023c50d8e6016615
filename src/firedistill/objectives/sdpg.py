"""SDPG (Liu et al., arXiv 2606.04036): group advantages, exact self-distillation of the better responses, and a reference KL.

The verifier's group advantage says which responses are better, the teacher with feedback says how at every token of the better ones,
and the distance to the policy of the start keeps both from running away.

    L = L_out + beta_k L_opd + alpha L_ref                                    each a mean over the tokens of the step
    L_out = - min(w A, clip(w, 1 - eps, 1 + eps) A),   A = (R - mean) / (std + 1e-6) within the group
    L_opd = KL(p || q) over the vocabulary, where A > 0, else 0
    L_ref = 1/2 (log p(y) - log p_ref(y))^2                                   (their URKL)
    beta_k = beta min(1, x / warmup) min(1, (1 - x) / decay)                  x = k / (K - 1), from 0 to 1

The teacher is the EMA with feedback on the response (theirs: the present policy with the answer). The reference is the student at the
first step; checkpoints hold it. Their schedule warms up over 50 and decays over 100 of 400 steps. With one update per batch w is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.models.states import unwrap
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, frozen_states, in_parts, sampled_log_probs, token_log_probs
from firedistill.objectives.distributions import entropy, reverse_kl
from firedistill.objectives.registry import register
from firedistill.objectives.srpo import verdict_advantages
from firedistill.objectives.top_d import clipped_surrogate
from firedistill.ops.head import Head
from firedistill.rollout import Rollout
from firedistill.teacher.ema import EMAWeights


@dataclass(frozen=True)
class Prepared:
    """Tokens of the step over all processes, the advantage of the response, and `log p_ref(y_t)` `[T]`."""

    step_tokens: float
    advantage: float
    reference: Tensor


@register("sdpg")
@dataclass
class SDPG(Objective):
    """Policy gradient, distillation of responses with a positive advantage, and a penalty for leaving the reference."""

    group_size: int = setting(4, "Responses sampled per prompt.")
    beta: float = setting(0.001, "Weight of the self-distillation.", at_least=0, below=math.inf)
    alpha: float = setting(0.001, "Weight of the reference KL.", at_least=0, below=math.inf)
    warmup: float = setting(
        0.125, "Share of the steps over which the self-distillation is faded in; 0: at once.", at_least=0, at_most=1
    )
    decay: float = setting(0.25, "Share of the steps over which it is faded out; 0: not at all.", at_least=0, at_most=1)
    clip: float = setting(0.2, "PPO clipping epsilon.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reference: EMAWeights | None = None
        self.stored: Mapping[str, Tensor] = {}

    def distillation_weight(self, progress: float) -> float:
        """beta_k at this share of training."""
        faded_in = min(1.0, progress / self.warmup) if self.warmup else 1.0
        return self.beta * faded_in * (min(1.0, (1 - progress) / self.decay) if self.decay else 1.0)

    def needs_teacher(self, rollout: Rollout) -> bool:
        return rollout.verdict.correct

    def reference_log_probs(self, step: Step) -> list[Tensor]:
        """`log p_ref(y_t)`; one `[T]` CPU tensor per rollout."""
        if self.reference is None:
            self.reference = EMAWeights(step.model, 1.0)  # a copy of the student, which is never updated
            if self.stored and self.stored.keys() != self.reference.shadow.keys():
                raise ValueError(
                    "the checkpoint's reference policy belongs to another adapter; start from the beginning (--overwrite)"
                )
            for name, tensor in self.stored.items():
                self.reference.shadow[name].copy_(tensor)
        causal_lm = unwrap(step.model)
        head = Head.of(causal_lm, step.head.temperature, self.reference.values_for(causal_lm.get_output_embeddings()))
        with step.metrics.timed("seconds_score", step.teacher.device), self.reference.applied():
            limit, parts = step.teacher.limit, in_parts(step.rollouts)
            return [v for part in parts for v in sampled_log_probs(head, frozen_states(step.model, part, limit), part)]

    def prepare(self, step: Step) -> tuple[list[Prepared], Metrics]:
        metrics, reference = Metrics(), self.reference_log_probs(step)
        tokens = step.sum_over_processes(sum(len(rollout.response_ids) for rollout in step.rollouts))
        advantages = verdict_advantages(step.rollouts)
        for advantage in advantages:
            metrics.mean(sdpg_advantage=abs(advantage))
        return [Prepared(tokens, a, of_one) for a, of_one in zip(advantages, reference, strict=True)], metrics

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, token_ids, beta = Metrics(), batch.token_ids(), self.distillation_weight(batch.progress)
        weights = 1 / batch.per_token([prepared.step_tokens for prepared in batch.prepared])
        advantages = batch.per_token([prepared.advantage for prepared in batch.prepared])
        reference = batch.per_token([prepared.reference for prepared in batch.prepared])

        def policy_gradient(student_logits: Tensor, chunk: slice) -> Tensor:
            log_probs = token_log_probs(student_logits, token_ids[chunk])
            distance = 0.5 * (log_probs - reference[chunk]).square()
            metrics.mean(entropy=entropy(student_logits.detach()), sdpg_reference=distance.detach(), sdpg_beta=beta)
            return clipped_surrogate(log_probs, log_probs.detach(), advantages[chunk], self.clip) + self.alpha * distance

        loss = batch.token_loss(weights, policy_gradient)
        rows = [i for i, prepared in enumerate(batch.prepared) if prepared.advantage > 0]
        if beta == 0 or not rows:
            return loss, metrics
        better = batch.select(rows)
        full, head = batch.teacher.full(better.rollouts, keep=False), batch.teacher.head

        def distill(student_logits: Tensor, chunk: slice) -> Tensor:
            kl = reverse_kl(student_logits, head(full.hidden[chunk]))
            metrics.mean(kl=kl.detach())
            return kl

        step_tokens = better.per_token([prepared.step_tokens for prepared in better.prepared])
        return loss + better.token_loss(beta / step_tokens, distill), metrics

    def state(self) -> dict[str, Any]:
        return {"reference": dict(self.reference.shadow if self.reference is not None else self.stored)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.stored = state.get("reference", {})
