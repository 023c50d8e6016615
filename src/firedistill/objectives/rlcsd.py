"""RLCSD (Pan et al., arXiv 2606.11709): the gap under a right hint minus the gap under wrong ones modulates a group advantage.

A teacher that sees a solution also writes differently: shorter, surer. What a right and a wrong hint in the same wording have in common
cancels in their difference, and what is left says which tokens carry the solution.

    e_t = log q(y_t | right hint) - log( 1/K sum_k q(y_t | wrong hint k) )                              (eq. 7)
    A = (R - mean) / (std + 1e-6) within the group;   r_t = lambda tanh(e_t / tau);   m_t = 1[ |r_t| > delta ]
    A~_t = max(0, A + r_t) where A > 0, min(0, A + r_t) where A < 0                  the verifier keeps the direction
    J_i = mean over m = 0 of clip(A) + eta * mean over m = 1 of clip(A~)             an empty side is left out (eq. 15)
    L = - 1/(B G) sum_i J_i

The right hint is the gold solution if the example has one with its working, else another correct response of the group, else the gold
answer line; the wrong hints are up to K other wrong responses of the group. In groups without both kinds of responses A is 0. A
response for which a hint is missing, or whose teacher prompt cannot be built or is longer than the teacher's positions, is trained
with A alone. Here the teacher is the EMA (theirs: a copy taken every 10 steps), the hint is one feedback field, and the group has 4
responses (theirs: 8). With one update per batch the ratio is 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from firedistill.config import TeacherKind
from firedistill.metrics import Metrics
from firedistill.models.states import positions
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, token_log_probs
from firedistill.objectives.distributions import entropy
from firedistill.objectives.registry import register
from firedistill.objectives.srpo import verdict_advantages
from firedistill.objectives.top_d import clipped_surrogate
from firedistill.rollout import Rollout
from firedistill.tasks import FeedbackField
from firedistill.tasks.guard import TaskFault

logger = logging.getLogger(__name__)


def contrast(right: Tensor, wrong: Sequence[Tensor]) -> Tensor:
    """`log q(y | right) - log mean_k q(y | wrong_k)` of log-probabilities `[T]`; `[T]`."""
    return right - (torch.logsumexp(torch.stack(list(wrong)), dim=0) - math.log(len(wrong)))


def modulated(advantage: float, gap: Tensor, strength: float, temperature: float, threshold: float) -> tuple[Tensor, Tensor]:
    """The advantage of every token, and whether it is a modulated one; `[T]`, `[T]` bool.

    Args:
        advantage: A of the response, not 0.
        gap: `[T]`, e_t.
    """
    shift = strength * torch.tanh(gap / temperature)
    mask = shift.abs() > threshold
    shifted = (advantage + shift).clamp(min=0.0) if advantage > 0 else (advantage + shift).clamp(max=0.0)
    return torch.where(mask, shifted, torch.full_like(shift, advantage)), mask


def two_path_weights(mask: Tensor, eta: float) -> Tensor:
    """The weight of every token: the mean over the unmodulated ones plus `eta` times the mean over the modulated ones; `[T]`."""
    count = int(mask.sum())
    weights = torch.full(mask.shape, 1.0 / max(len(mask) - count, 1), dtype=torch.float64)
    weights[mask] = eta / max(count, 1)
    return weights


@dataclass(frozen=True)
class Prepared:
    """Advantages and weights of the tokens of a response; `[T]` each."""

    advantages: Tensor
    weights: Tensor


@register("rlcsd")
@dataclass
class RLCSD(Objective):
    """A group-relative policy gradient whose tokens are modulated by right-hint minus wrong-hint."""

    reads_feedback: ClassVar[bool] = False

    group_size: int = setting(4, "Responses sampled per prompt.")
    wrong_hints: int = setting(4, "Largest number of the group's wrong responses that serve as wrong hints.", at_least=1)
    strength: float = setting(0.5, "Largest modulation of the advantage.", at_least=0)
    temperature: float = setting(
        0.02, "Scale of the gap in nats: the modulation is strength * tanh(gap / temperature).", above=0
    )
    threshold: float = setting(0.02, "Smallest modulation that counts.", at_least=0)
    eta: float = setting(1.0, "Weight of the modulated tokens' mean.", at_least=0)
    clip: float = setting(0.2, "PPO clipping epsilon.", at_least=0)

    def check_teacher(self, kind: TeacherKind, feedback: bool) -> None:
        if not feedback:
            raise ValueError(
                "method rlcsd shows the teacher hints, and teacher_feedback false shows it none: leave teacher_feedback out"
            )

    def needs_teacher(self, rollout: Rollout) -> bool:
        return False  # the hints are built from the group in `prepare`

    def hints(self, rollout: Rollout, group: Sequence[Rollout]) -> list[str] | None:
        """The right hint and the wrong ones for a response; None if one kind is missing."""
        others = [other for other in group if other is not rollout]
        right = [other.response.text for other in others if other.verdict.correct]
        wrong = [other.response.text for other in others if not other.verdict.correct][: self.wrong_hints]
        gold = rollout.example.solution
        if gold is not None and ("\n" in gold or not right):  # an answer line alone is not in the wording of responses
            right = [gold]
        return [right[0], *wrong] if right and wrong else None

    def prepare(self, step: Step) -> tuple[list[Prepared], Metrics]:
        metrics = Metrics()
        advantages = verdict_advantages(step.rollouts)
        gaps = self.gaps(step, [rollout for rollout, a in zip(step.rollouts, advantages, strict=True) if a])
        prepared = []
        for rollout, advantage in zip(step.rollouts, advantages, strict=True):
            length = len(rollout.response_ids)
            of_tokens, mask = torch.full((length,), advantage, dtype=torch.float64), torch.zeros(length, dtype=torch.bool)
            if rollout in gaps:
                of_tokens, mask = modulated(advantage, gaps[rollout], self.strength, self.temperature, self.threshold)
                metrics.mean(rlcsd_gap=gaps[rollout].abs())
            metrics.mean(rlcsd_modulated=mask, rlcsd_advantage=abs(advantage))
            prepared.append(Prepared(of_tokens, two_path_weights(mask, self.eta)))
        return prepared, metrics

    def gaps(self, step: Step, rollouts: Sequence[Rollout]) -> dict[Rollout, Tensor]:
        """e_t of the responses that have hints; `[T]` float64 on the CPU."""
        groups: dict[int, list[Rollout]] = {}
        for rollout in step.rollouts:
            groups.setdefault(rollout.prompt_index, []).append(rollout)
        most = positions(step.teacher.model) or math.inf
        hinted, owners = [], []
        for rollout in rollouts:
            texts = self.hints(rollout, groups[rollout.prompt_index]) or []
            variants = [replace(rollout, feedback=(FeedbackField("hint", f"Reference solution: {text}"),)) for text in texts]
            try:
                fits = all(step.teacher.view_tokens(variant, "full") <= most for variant in variants)
            except TaskFault as fault:
                logger.warning("%s is trained without hints: %s", rollout.example.uid, fault)
                continue
            if variants and fits:
                hinted += variants
                owners.append((rollout, len(variants)))
        found = map(Tensor.double, step.teacher_log_probs(hinted))
        return {rollout: contrast(next(found), [next(found) for _ in range(count - 1)]) for rollout, count in owners}

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        metrics, token_ids = Metrics(), batch.token_ids()
        advantages = batch.per_token([prepared.advantages for prepared in batch.prepared])
        weights = batch.per_token([prepared.weights for prepared in batch.prepared])

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            log_probs = token_log_probs(student_logits, token_ids[chunk])
            metrics.mean(entropy=entropy(student_logits.detach()))
            return clipped_surrogate(log_probs, log_probs.detach(), advantages[chunk], self.clip)

        return batch.token_loss(weights / batch.responses, token_loss), metrics
