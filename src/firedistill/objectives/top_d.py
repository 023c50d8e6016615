"""TOP-D (Xie et al., arXiv 2607.04751): PPO on dense rewards from a proximal teacher.

The log-ratio of teacher and student as a reward goes to minus infinity where the teacher rejects a token. TOP-D takes the ratio of a
proximal teacher, the mixture `alpha q + (1 - alpha) p_old`, which is bounded below. The rewards of the sampled tokens become
advantages, normalized over all tokens of the responses to one prompt, and serve several clipped updates with frozen log-probabilities.

    r_k = log(alpha q(y_k) / p_old(y_k) + 1 - alpha)
    R_k = r_k + mean of the later rewards of the same response (the last token: r_k)
    A_k = (R_k - mean) / (std + 1e-6)          over all tokens of the group
    J = 1 / sum_i L_i sum_ik min(w A, clip(w, 1 - eps, 1 + eps) A),   w = p / p_old;   loss = -J

No verifier reward enters. One step samples for all prompts, then makes one update per `minibatch_prompts` prompts, in random order,
each followed by the EMA. The teacher's scores are those of the start of the step, the learning rate is that of the step. Every group
is scaled to unit variance however small the gap between teacher and student is, so that even rounding noise becomes a full-size
advantage. The published results include a collapse; this implementation does not prevent it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, token_log_probs
from firedistill.objectives.distributions import entropy
from firedistill.objectives.registry import register


def proximal_rewards(teacher_logp: Tensor, old_logp: Tensor, alpha: float) -> Tensor:
    """`log(alpha q / p_old + 1 - alpha)`, at least `log(1 - alpha)`; `[N, T]`, detached.

    Args:
        teacher_logp, old_logp: `[N, T]` log-probabilities of the sampled tokens.
        alpha: the teacher's share of the proximal teacher, in [0, 1]; 1 gives the plain log-ratio.
    """
    log_ratio = (teacher_logp - old_logp).detach()
    near = torch.log1p(alpha * torch.expm1(log_ratio.clamp(max=1.0)))  # exact where teacher and student all but agree
    if alpha == 0:
        return torch.zeros_like(log_ratio)
    rest = math.log1p(-alpha) if alpha < 1 else -math.inf
    far = torch.logaddexp(math.log(alpha) + log_ratio, torch.full_like(log_ratio, rest))
    return torch.where((log_ratio.abs() < 1.0) & (alpha < 1), near, far)


def future_mean_returns(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each reward plus the mean of the later ones of its response, 0 outside the mask; `[N, T]`.

    Args:
        rewards: `[N, T]`.
        mask: `[N, T]`, true at response tokens.
    """
    mask = mask.to(rewards.dtype)
    rewards = torch.where(mask > 0, rewards, 0.0)

    def later(values: Tensor) -> Tensor:
        """The sum of all values after each position."""
        from_here = values.flip(-1).cumsum(-1).flip(-1)
        return torch.nn.functional.pad(from_here[..., 1:], (0, 1))

    return (rewards + later(rewards) / later(mask).clamp(min=1)) * mask


def pooled_advantages(returns: Tensor, mask: Tensor, prompt_index: Tensor) -> Tensor:
    """Returns normalized over all tokens of the responses to each prompt, 0 outside the mask; `[N, T]`.

    Args:
        returns: `[N, T]`.
        mask: `[N, T]`, true at response tokens.
        prompt_index: `[N]` integers that name the prompt.
    """
    mask = mask.bool()
    advantages = torch.zeros_like(returns)
    for prompt in prompt_index.unique():
        group = mask & (prompt_index == prompt).unsqueeze(-1)
        pooled = returns[group].double()  # equal returns must give a deviation of 0, not of a rounding error
        if pooled.numel():
            advantages[group] = ((pooled - pooled.mean()) / (pooled.std(correction=0) + 1e-6)).to(returns.dtype)
    return advantages


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, epsilon: float, ratio_cap: float | None = None
) -> Tensor:
    """PPO's token loss `-min(w A, clip(w, 1 - eps, 1 + eps) A)`, differentiable in `logp`; the shape of `logp`.

    Args:
        logp, old_logp: log-probabilities of the sampled tokens, live and frozen.
        advantages: of the same shape.
        epsilon: clipping range.
        ratio_cap: the ratio `w` is cut to it first.
    """
    ratio = (logp - old_logp.detach()).clamp(max=80.0).exp()  # an infinite ratio has a gradient of 0 * infinity where it is cut
    if ratio_cap is not None:
        # From PyTorch 2.14 on, `clamp` has no gradient at the cap itself.
        ratio = torch.where(ratio > ratio_cap, ratio_cap, ratio)
    advantages = advantages.detach()
    clipped, free = ratio.detach().clamp(1 - epsilon, 1 + epsilon) * advantages, ratio * advantages
    return -torch.where(clipped < free, clipped, free)


@dataclass(frozen=True)
class Prepared:
    """Response tokens of the group, and per token of the response, `[T]`, log p_old and the advantage."""

    group_tokens: int
    old_log_probs: Tensor
    advantages: Tensor


@register("top_d")
@dataclass
class TopD(Objective):
    """Clipped policy gradient on the proximal teacher's token rewards."""

    group_size: int = setting(4, "Responses sampled per prompt.")
    alpha: float = setting(
        0.2, "Proximal coefficient: the teacher's share in the mixture that rewards compare with.", at_least=0, at_most=1
    )
    clip: float = setting(0.2, "PPO clipping epsilon.", at_least=0)
    epochs: int = setting(1, "Passes over the rollouts of a step.", at_least=1)
    minibatch_prompts: int = setting(1, "Prompts per update.", at_least=1)

    def prepare(self, step: Step) -> tuple[list[Prepared], Metrics]:
        metrics, rollouts = Metrics(), step.rollouts
        if not rollouts:
            return [], metrics
        old, teacher = step.student_log_probs(rollouts), step.teacher_log_probs(rollouts)
        lengths = torch.tensor([len(log_probs) for log_probs in old])
        prompt_index = torch.tensor([rollout.prompt_index for rollout in rollouts])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
        padded_old, padded_teacher = (pad_sequence(log_probs, batch_first=True) for log_probs in (old, teacher))
        rewards = proximal_rewards(padded_teacher, padded_old, self.alpha)
        returns = future_mean_returns(rewards, mask)
        advantages = pooled_advantages(returns, mask, prompt_index)
        for prompt in prompt_index.unique():
            pooled = returns[mask & (prompt_index == prompt).unsqueeze(-1)]
            metrics.mean(top_d_return_std=pooled.std(correction=0))
        metrics.mean(top_d_reward=rewards[mask], top_d_log_ratio=(padded_teacher - padded_old)[mask])
        return [
            Prepared(int(lengths[prompt_index == rollout.prompt_index].sum()), old[i], advantages[i, : lengths[i]])
            for i, rollout in enumerate(rollouts)
        ], metrics

    def updates(self, prompts: Sequence[int], draw: random.Random) -> list[list[int]]:
        plan = []
        for _ in range(self.epochs):
            order = draw.sample(list(prompts), len(prompts))
            plan += [order[i : i + self.minibatch_prompts] for i in range(0, len(order), self.minibatch_prompts)]
        return plan

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, token_ids = Metrics(), batch.token_ids()
        old = batch.per_token([prepared.old_log_probs for prepared in batch.prepared])
        advantages = batch.per_token([prepared.advantages for prepared in batch.prepared])
        group_tokens = batch.per_token([prepared.group_tokens for prepared in batch.prepared])

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            log_probs = token_log_probs(student_logits, token_ids[chunk])
            ratio = (log_probs.detach() - old[chunk]).exp()
            outside = torch.where(advantages[chunk] > 0, ratio > 1 + self.clip, ratio < 1 - self.clip)
            metrics.mean(top_d_ratio=ratio, top_d_clip_fraction=outside, entropy=entropy(student_logits.detach()))
            metrics.maximum(top_d_ratio_max=ratio)
            return clipped_surrogate(log_probs, old[chunk], advantages[chunk], self.clip)

        return batch.token_loss(1 / (group_tokens * batch.prompts), token_loss), metrics
