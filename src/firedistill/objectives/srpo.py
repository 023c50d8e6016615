"""SRPO (arXiv 2604.02288): correct answers by group-relative policy gradient, wrong ones by entropy-weighted self-distillation.

Distilling an answer that is already right forces a choice between equally good paths; a policy gradient does not. A policy gradient
punishes a wrong answer bluntly; distillation corrects it token by token. So each goes to the branch that suits it, and among the
distilled tokens those at which the teacher is sure weigh more.

    A_i = (r_i - mean_group r) / (std_group r + 1e-6)                                   r = 1 if correct, else 0
    l_G = - min(ratio A_i, clip(ratio, 1 - eps, 1 + eps) A_i)                           correct responses
    l_S = w_it KL(p || q),   w_it = exp(-beta H(q_it)) / mean of the same               wrong responses
    L = (sum l_G + sum l_S) / number of tokens of both                                  over the whole step

Feedback can always be built here, so that no wrong answer falls back to the policy gradient; the divergence is the full-vocabulary
reverse KL of Full Context where the original has a truncated Jensen-Shannon divergence; the clip is symmetric. Ratios are capped; with
one update per batch all of them are 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, map_tokens, token_log_probs
from firedistill.objectives.distributions import entropy, reverse_kl
from firedistill.objectives.registry import register
from firedistill.objectives.top_d import clipped_surrogate
from firedistill.rollout import Rollout

Deviation = Literal["population", "sample", "none"]


def group_advantages(rewards: Tensor, prompt_index: Tensor, deviation: Deviation = "population") -> Tensor:
    """`(r - mean) / (std + 1e-6)` within the responses to each prompt, 0 where all rewards are equal; `[N]`.

    Args:
        rewards: `[N]`.
        prompt_index: `[N]` integers that name the prompt.
        deviation: divide by the population's standard deviation, the sample's, or by nothing.
    """
    advantages = torch.zeros_like(rewards)
    for prompt in prompt_index.unique():
        group = prompt_index == prompt
        members = rewards[group]
        if (members == members[0]).all():  # their mean may differ from them by a rounding error
            continue
        centred = members - members.mean()
        if deviation != "none":
            centred = centred / (members.std(correction=int(deviation == "sample")) + 1e-6)
        advantages[group] = centred
    return advantages


def verdict_advantages(rollouts: Sequence[Rollout], deviation: Deviation = "population") -> list[float]:
    """`group_advantages` of rollouts; the reward is 1 for a correct response, else 0."""
    rewards = torch.tensor([float(rollout.verdict.correct) for rollout in rollouts], dtype=torch.float64)
    prompt_index = torch.tensor([rollout.prompt_index for rollout in rollouts])
    return group_advantages(rewards, prompt_index, deviation).tolist()


def entropy_weights(teacher_logits: Tensor, mask: Tensor, beta: float) -> Tensor:
    """`exp(-beta H(q))` divided by its mean over the mask; `[N, T]`, detached, 0 outside the mask.

    Args:
        teacher_logits: `[N, T, V]`.
        mask: `[N, T]`, true at the tokens that are distilled.
        beta: 0 gives equal weights.
    """
    return weights_from_entropies(entropy(teacher_logits.detach()), mask, beta)


def weights_from_entropies(entropies: Tensor, mask: Tensor, beta: float) -> Tensor:
    """`entropy_weights` for entropies in nats of the shape of `mask`."""
    mask = mask.bool()
    scores = (-beta * entropies).masked_fill(~mask, -torch.inf)
    return (
        (torch.softmax(scores.flatten(), dim=0) * mask.sum()).reshape(mask.shape) if mask.any() else torch.zeros_like(entropies)
    )


@dataclass(frozen=True)
class Prepared:
    """What the loss of a response needs from the whole step.

    Attributes:
        step_tokens: response tokens of the step over all processes.
        advantage: of a correct response within its group.
        entropy_weights, teacher_states: of a wrong response, `[T]` and the full teacher's `[T, H]`.
    """

    step_tokens: float
    advantage: float
    entropy_weights: Tensor | None
    teacher_states: Tensor | None


@register("srpo")
@dataclass
class SRPO(Objective):
    """Group-relative policy gradient on correct responses, entropy-weighted reverse KL on wrong ones."""

    logits_held: ClassVar[int] = 13

    group_size: int = setting(4, "Responses sampled per prompt.")
    beta: float = setting(1.0, "Entropy coefficient of the token weights.", at_least=0, below=math.inf)
    clip: float = setting(0.2, "PPO clipping epsilon.", at_least=0)
    ratio_cap: float = setting(2.0, "Largest importance ratio; below 1 it would cut off every gradient.", at_least=1)
    deviation: Deviation = setting("population", "Divisor of the advantages: population or sample standard deviation, or none.")

    def needs_teacher(self, rollout: Rollout) -> bool:
        return not rollout.verdict.correct

    def prepare(self, step: Step) -> tuple[list[Prepared], Metrics]:
        metrics = Metrics()
        tokens = step.sum_over_processes(sum(len(rollout.response_ids) for rollout in step.rollouts))
        wrong = [rollout for rollout in step.rollouts if not rollout.verdict.correct]
        full = step.teacher.full(wrong, keep=False)
        entropies = map_tokens(step.teacher.head, full, lambda logits, chunk: entropy(logits))
        # A factor common to all tokens leaves the weights as they are; without it they cannot underflow together.
        lowest = -step.max_over_processes(max((-float(h.min()) for h in entropies), default=-math.inf))
        raw = [torch.exp(-self.beta * (h.double() - lowest)).cpu() for h in entropies]
        total, count = step.sum_over_processes(float(sum(w.sum() for w in raw))), step.sum_over_processes(sum(map(len, raw)))
        weights = {rollout: w * count / total for rollout, w in zip(wrong, raw, strict=True)}
        for rollout, h in zip(wrong, entropies, strict=True):
            metrics.mean(srpo_entropy_weight=weights[rollout], srpo_teacher_entropy=h)
            metrics.maximum(srpo_entropy_weight_max=weights[rollout])
        advantages = verdict_advantages(step.rollouts, self.deviation)
        for advantage in advantages:
            metrics.mean(srpo_advantage=abs(advantage))
        states = dict(zip(wrong, full.hidden.split(full.lengths), strict=True))
        return [
            Prepared(tokens, advantage, weights.get(rollout), states.get(rollout))
            for rollout, advantage in zip(step.rollouts, advantages, strict=True)
        ], metrics

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, correct, wrong, head = Metrics(), batch.correct, batch.wrong, batch.teacher.head
        correct_ids = correct.token_ids()
        advantages = correct.per_token([prepared.advantage for prepared in correct.prepared])
        entropy_weights = wrong.per_token([prepared.entropy_weights for prepared in wrong.prepared])
        full = torch.cat([prepared.teacher_states for prepared in wrong.prepared] or [wrong.student.hidden[:0]])

        def policy_gradient(student_logits: Tensor, chunk: slice) -> Tensor:
            log_probs = token_log_probs(student_logits, correct_ids[chunk])
            metrics.mean(entropy=entropy(student_logits.detach()))
            return clipped_surrogate(log_probs, log_probs.detach(), advantages[chunk], self.clip, self.ratio_cap)

        def distill(student_logits: Tensor, chunk: slice) -> Tensor:
            kl = reverse_kl(student_logits, head(full[chunk]))
            metrics.mean(kl=kl.detach(), entropy=entropy(student_logits.detach()))
            return kl

        def weights(part: MicroBatch) -> Tensor:
            return 1 / part.per_token([prepared.step_tokens for prepared in part.prepared])

        loss = correct.token_loss(weights(correct), policy_gradient) + wrong.token_loss(
            weights(wrong) * entropy_weights, distill
        )
        return loss, metrics
