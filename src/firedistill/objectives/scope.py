"""SCOPE (arXiv 2604.10688): correct answers reinforce themselves, wrong ones follow the teacher, each weighted by perplexity.

Correct responses need no teacher; those that are unlikely under the student weigh more. Wrong responses are distilled on their sampled
tokens; those that are likely under the teacher weigh more. Both weights are a softmax within the responses to one prompt.

    w_i = softmax(-s_i / tau) over the correct ones,  s_i = 1/M_i sum_t log p_old(y_it)
    w_i = softmax(+u_i / tau) over the wrong ones,    u_i = 1/M_i sum_t log q(y_it)
    J = 1/B sum_prompts [ sum_correct w_i (- sum_t ratio_it) + sum_wrong w_i sum_t ratio_it sg[log p_it - log q_it] ]

`ratio = p / p_old` is 1 in value with one update per batch. Token sums, not means; the weights of a non-empty subset add up to 1. The
teacher is the EMA with feedback on the wrong response, where the original has a larger model without. The released code of the original
differs from its paper (weights of mean 1, token means, the student's weight reversed); the paper is followed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from firedistill.metrics import Metrics
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, token_log_probs
from firedistill.objectives.distributions import entropy
from firedistill.objectives.registry import register
from firedistill.rollout import Rollout


def perplexity_weights(mean_logp: Tensor, prompt_index: Tensor, correct: Tensor, temperature: float = 1.0) -> Tensor:
    """Weights that sum to 1 over the correct, and over the wrong, responses to each prompt; `[N]`, detached.

    Args:
        mean_logp: `[N]` token means of log-probabilities: the student's for correct responses, the teacher's for wrong ones.
        prompt_index: `[N]` integers that name the prompt.
        correct: `[N]` bool.
        temperature: tau; large is uniform.
    """
    correct = correct.bool()
    scores = torch.where(correct, -mean_logp, mean_logp).detach() / temperature
    weights = torch.empty_like(scores)
    for prompt in prompt_index.unique():
        for outcome in (correct, ~correct):
            subset = (prompt_index == prompt) & outcome
            weights[subset] = torch.softmax(scores[subset], dim=0)
    return weights


@dataclass(frozen=True)
class Prepared:
    """The weight of a response, and for wrong ones `log q(y_t)` `[T]`."""

    weight: float
    teacher_log_probs: Tensor | None


@register("scope")
@dataclass
class SCOPE(Objective):
    """Perplexity-weighted self-reinforcement and sampled-token distillation."""

    group_size: int = setting(4, "Responses sampled per prompt.")
    weight_temperature: float = setting(1.0, "Temperature of the weights within a group; large is uniform.", above=0)

    def needs_teacher(self, rollout: Rollout) -> bool:
        return not rollout.verdict.correct

    def prepare(self, step: Step) -> tuple[list[Prepared], Metrics]:
        metrics = Metrics()
        wrong = [rollout for rollout in step.rollouts if not rollout.verdict.correct]
        teacher = dict(zip(wrong, step.teacher_log_probs(wrong), strict=True))
        # A correct response without a correct sibling has weight 1 whatever its likelihood.
        of_correct = Counter(rollout.prompt_index for rollout in step.rollouts if rollout.verdict.correct)
        siblings = [r for r in step.rollouts if r.verdict.correct and of_correct[r.prompt_index] > 1]
        student = dict(zip(siblings, step.student_log_probs(siblings), strict=True))
        if not step.rollouts:
            return [], metrics
        scored = student | teacher
        mean_logp = torch.stack([scored[r].mean() if r in scored else torch.zeros(()) for r in step.rollouts])
        weights = perplexity_weights(
            mean_logp,
            torch.tensor([r.prompt_index for r in step.rollouts]),
            torch.tensor([r.verdict.correct for r in step.rollouts]),
            self.weight_temperature,
        )
        correct_first = sorted(
            zip(step.rollouts, weights, mean_logp, strict=True), key=lambda entry: not entry[0].verdict.correct
        )
        for rollout, weight, logp in correct_first:
            branch = "student" if rollout.verdict.correct else "teacher"
            metrics.maximum(**{f"scope_{branch}_weight_max": weight})
            if rollout in scored:
                metrics.mean(**{f"scope_{branch}_perplexity": (-logp).exp()})
        return [Prepared(w, teacher.get(r)) for r, w in zip(step.rollouts, weights.tolist(), strict=True)], metrics

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, correct, wrong = Metrics(), batch.correct, batch.wrong
        correct_ids, wrong_ids = correct.token_ids(), wrong.token_ids()
        teacher_log_probs = wrong.per_token([prepared.teacher_log_probs for prepared in wrong.prepared])

        def reinforce(student_logits: Tensor, chunk: slice) -> Tensor:
            log_probs = token_log_probs(student_logits, correct_ids[chunk])
            metrics.mean(nll=-log_probs.detach(), entropy=entropy(student_logits.detach()))
            return -(log_probs - log_probs.detach()).exp()

        def distill(student_logits: Tensor, chunk: slice) -> Tensor:
            log_probs = token_log_probs(student_logits, wrong_ids[chunk])
            gap = log_probs.detach() - teacher_log_probs[chunk]
            metrics.mean(scope_log_ratio=gap, entropy=entropy(student_logits.detach()))
            return (log_probs - log_probs.detach()).exp() * gap

        def weights(part: MicroBatch) -> Tensor:
            return part.per_token([prepared.weight for prepared in part.prepared]) / batch.prompts

        return correct.token_loss(weights(correct), reinforce) + wrong.token_loss(weights(wrong), distill), metrics
