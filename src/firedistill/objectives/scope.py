"""SCOPE (arXiv 2604.10688): correct answers reinforce themselves, wrong ones follow the teacher, each weighted by perplexity.

Correct responses need no teacher; those that the student found unlikely get more of the weight. Wrong responses are distilled on their
sampled tokens; those that the teacher finds likely get more of it, since there the teacher can still find its way. Both weights are a
softmax within the responses to one prompt.

    w_i = softmax(-s_i / tau) over the correct ones,  s_i = 1/M_i sum_t log p_old(y_it)
    w_i = softmax(+u_i / tau) over the wrong ones,    u_i = 1/M_i sum_t log q(y_it)
    J = 1/B sum_prompts [ sum_correct w_i (- sum_t ratio_it) + sum_wrong w_i sum_t ratio_it sg[log p_it - log q_it] ]

`ratio = p / p_old` is 1 in value with one update per batch. Token sums, not means; the weights of a non-empty subset add up to 1. The
teacher is the EMA with feedback on the wrong response, where the original has a larger model without. The released code of the original
differs from its paper (weights of mean 1, token means, the student's weight reversed); the paper is followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from firedistill.objectives.base import Chunk, Objective, StepBatch, TrainingBatch, register, setting, token_log_probs
from firedistill.objectives.distributions import entropy
from firedistill.rollouts.engine import Rollout


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


@register("scope")
@dataclass
class SCOPE(Objective):
    """Perplexity-weighted self-reinforcement and sampled-token distillation."""

    group_size: int = setting(4, "Responses sampled per prompt.")
    weight_temperature: float = setting(1.0, "Temperature of the weights within a group; large is uniform.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight_temperature > 0:
            raise ValueError(f"weight_temperature is {self.weight_temperature}; it must be above 0")

    def needs_teacher(self, rollout: Rollout) -> bool:
        return not rollout.verdict.correct

    def prepare(self, batch: StepBatch) -> None:
        correct = [rollout for rollout in batch.rollouts if rollout.verdict.correct]
        wrong = [rollout for rollout in batch.rollouts if not rollout.verdict.correct]
        for rollout, log_probs in zip(wrong, batch.teacher_log_probs(wrong), strict=True):
            rollout.coefficients["teacher_log_probs"] = log_probs
        # A correct response without a correct sibling has weight 1 whatever its likelihood.
        by_prompt = [rollout.prompt_index for rollout in correct]
        siblings = [rollout for rollout in correct if by_prompt.count(rollout.prompt_index) > 1]
        student = dict(zip(map(id, siblings), batch.student_log_probs(siblings), strict=True))
        ordered = correct + wrong
        if not ordered:
            return
        mean_logp = torch.stack(
            [student[id(r)].mean() if id(r) in student else torch.zeros(()) for r in correct]
            + [cast(Tensor, r.coefficients["teacher_log_probs"]).mean() for r in wrong]
        )
        weights = perplexity_weights(
            mean_logp,
            torch.tensor([r.prompt_index for r in ordered]),
            torch.tensor([r.verdict.correct for r in ordered]),
            self.weight_temperature,
        )
        for rollout, weight, logp in zip(ordered, weights.tolist(), mean_logp.tolist(), strict=True):
            rollout.coefficients["weight"] = weight
            branch = "student" if rollout.verdict.correct else "teacher"
            batch.averages.maximum(**{f"scope_{branch}_weight_max": torch.tensor(weight)})
            if branch == "teacher" or id(rollout) in student:
                batch.averages.add(**{f"scope_{branch}_perplexity": torch.tensor(-logp).exp()})

    def loss(self, batch: TrainingBatch) -> Tensor:
        correct = batch.rows(lambda rollout: rollout.verdict.correct)
        wrong = batch.rows(lambda rollout: not rollout.verdict.correct)
        correct_ids, wrong_ids = batch.token_ids(correct), batch.token_ids(wrong)
        teacher_log_probs = batch.coefficients("teacher_log_probs", wrong)

        def reinforce(student_logits: Tensor, chunk: Chunk) -> Tensor:
            log_probs = token_log_probs(student_logits, correct_ids[chunk])
            batch.averages.add(nll=-log_probs.detach(), entropy=entropy(student_logits.detach()))
            return -(log_probs - log_probs.detach()).exp()

        def distill(student_logits: Tensor, chunk: Chunk) -> Tensor:
            log_probs = token_log_probs(student_logits, wrong_ids[chunk])
            gap = log_probs.detach() - teacher_log_probs[chunk]
            batch.averages.add(scope_log_ratio=gap, entropy=entropy(student_logits.detach()))
            return (log_probs - log_probs.detach()).exp() * gap

        return batch.token_loss(correct, batch.coefficients("weight", correct) / batch.prompts, reinforce) + batch.token_loss(
            wrong, batch.coefficients("weight", wrong) / batch.prompts, distill
        )
