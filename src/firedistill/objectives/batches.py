"""What a method can read: the rollouts of a step before any gradient, and those of one micro-batch with the student's states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from firedistill.memory import BatchLimit
from firedistill.metrics import Metrics
from firedistill.models.sharding import gather
from firedistill.models.states import ResponseStates, inference_mode, score_responses
from firedistill.objectives.distributions import log_softmax
from firedistill.ops.head import Head, TokenLoss, chunked_token_loss, chunks
from firedistill.rollout import Rollout
from firedistill.teacher import Teacher


@dataclass
class Step:
    """The trained rollouts of a step (on this process) before any gradient: what `Objective.prepare` reads.

    The members of a group, the responses to one prompt, are on one process.

    Attributes:
        rollouts: in the order in which they were sampled.
        prompts: prompts of the step over all processes, including those that were left out.
        progress: `k / (K - 1)` for step k = 0, 1, ... of K; 0 in a run of one step.
        seed: of this step and process, for random draws of the method; the same in a resumed run.
        model, head: the live student.
        teacher: the run's teacher.
        metrics: the seconds that scoring took.
    """

    rollouts: Sequence[Rollout]
    prompts: int
    progress: float
    seed: int
    model: nn.Module
    head: Head
    teacher: Teacher
    metrics: Metrics = field(default_factory=Metrics)

    def student_log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """`log p(y_t)` of the sampled tokens under the live student, frozen; one `[T]` CPU tensor per rollout."""
        found: list[Tensor] = []
        for part in in_parts(rollouts):
            with self.metrics.timed("seconds_score", self.teacher.device):
                states = frozen_states(self.model, part, self.teacher.limit)
            found += sampled_log_probs(self.head, states, part)
            del states  # before the next part is read
        return found

    def teacher_log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """`log q(y_t)` of the sampled tokens under the teacher that sees all feedback; one `[T]` CPU tensor per rollout."""
        head, teacher = self.teacher.head, self.teacher
        return [v for part in in_parts(rollouts) for v in sampled_log_probs(head, teacher.full(part, keep=False), part)]

    def sum_over_processes(self, value: float) -> float:
        """The sum over all processes; every process must call it."""
        return sum(gather(self.model, [value]))

    def max_over_processes(self, value: float) -> float:
        """The maximum over all processes; every process must call it."""
        return max(gather(self.model, [value]))


@dataclass
class MicroBatch:
    """Trained rollouts that share a forward and backward pass: what `Objective.loss` reads.

    M is the number of response tokens of the micro-batch, T that of one response, C that of one chunk, V the vocabulary.

    Attributes:
        rollouts: in the order of `student`.
        prepared: what `Objective.prepare` returned for each of them.
        student: live hidden states at the response positions, with gradient.
        head: the student's head.
        teacher: the run's teacher.
        responses: N, the responses to all prompts of the update over all micro-batches and processes, including those that were
            left out of training.
        prompts: the prompts that they answer.
        progress: as in `Step`.
        step_scale: `s = max(1, a_k / a_0)` of the step, or the option `step_scale`.
        log_prob_floor: floor on normalized teacher log-probabilities, or None.
    """

    rollouts: Sequence[Rollout]
    prepared: Sequence[Any]
    student: ResponseStates
    head: Head
    teacher: Teacher
    responses: int = 1
    prompts: int = 1
    progress: float = 0.0
    step_scale: float = 1.0
    log_prob_floor: float | None = None

    @property
    def correct(self) -> MicroBatch:
        """The part with correct responses."""
        return self.select([i for i, rollout in enumerate(self.rollouts) if rollout.verdict.correct])

    @property
    def wrong(self) -> MicroBatch:
        """The part with wrong responses."""
        return self.select([i for i, rollout in enumerate(self.rollouts) if not rollout.verdict.correct])

    def select(self, indices: Sequence[int]) -> MicroBatch:
        """The part with these rollouts, in this order."""
        rollouts, prepared = [self.rollouts[i] for i in indices], [self.prepared[i] for i in indices]
        return replace(self, rollouts=rollouts, prepared=prepared, student=self.student.select(indices))

    def token_ids(self) -> Tensor:
        """Sampled tokens, end to end; `[M]` int64."""
        ids = [token for rollout in self.rollouts for token in rollout.response_ids]
        return torch.tensor(ids, dtype=torch.long, device=self.student.hidden.device)

    def per_token(self, values: Sequence[float | Tensor]) -> Tensor:
        """One value per rollout, a number (repeated for each of its tokens) or a `[T]` tensor, end to end; `[M]`, at least float32."""
        return self.student.per_token(values)

    def token_loss(self, token_weights: Tensor, token_loss: TokenLoss) -> Tensor:
        """`sum_it w_it loss_it` over all tokens.

        Args:
            token_weights: `[M]`, detached.
            token_loss: `token_loss(student_logits [C, V], chunk)` returns the losses `[C]` of the tokens in the slice `chunk` of M.
        """
        return chunked_token_loss(self.head, self.student.hidden, token_weights, token_loss)

    def token_mean_loss(self, token_loss: TokenLoss) -> Tensor:
        """`1/N sum_i 1/M_i sum_t loss_it` (eq. fire_objective)."""
        return self.token_loss(self.student.token_weights() / self.responses, token_loss)


@torch.no_grad()
def map_tokens(
    head: Head, states: ResponseStates, function: Callable[[Tensor, slice], Tensor], distributions: int = 1
) -> list[Tensor]:
    """`function(logits [C, V], chunk)` `[..., C]` over all tokens, logits only in chunks; one `[..., T]` tensor per response.

    Args:
        distributions: tensors `[C, V]` that the function holds at once; chunks are smaller with more of them.
    """
    if not states.lengths:
        return []
    hidden = states.hidden.detach()
    parts = [function(head(hidden[chunk]), chunk) for chunk in chunks(hidden, head, distributions)]
    return (
        list(torch.cat(parts, dim=-1).split(states.lengths, dim=-1)) if parts else [hidden.new_empty(0)] * len(states.lengths)
    )


TOKENS_HELD = 2**16
"""Tokens whose hidden states are held at once where a value per token is all that is kept: 0.7 GB at width 5,120 in half precision."""


def in_parts(rollouts: Sequence[Rollout], tokens: int = TOKENS_HELD) -> Iterator[Sequence[Rollout]]:
    """The rollouts in turn, in parts whose prompts (the student's) and responses have at most so many tokens, or of one rollout."""
    start, held = 0, 0
    for end, rollout in enumerate(rollouts):
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        if end > start and held + length > tokens:
            yield rollouts[start:end]
            start, held = end, 0
        held += length
    if start < len(rollouts):
        yield rollouts[start:]


def frozen_states(model: nn.Module, rollouts: Sequence[Rollout], limit: BatchLimit) -> ResponseStates:
    """Hidden states of the responses under the weights that the model has now, in evaluation mode, without gradient.

    Args:
        limit: padded tokens per forward pass, made smaller where memory runs out.

    Raises:
        OutOfMemory: a single response does not fit.
    """
    prompts, responses = [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts]
    longest = max((len(r.prompt_ids) + len(r.response_ids) for r in rollouts), default=0)
    with inference_mode(model):
        for attempt in limit.attempts(longest * len(rollouts)):
            with attempt:
                states = score_responses(model, prompts, responses, max_tokens=limit.size)
    return states


def sampled_log_probs(head: Head, states: ResponseStates, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Log-probabilities of the sampled tokens under `head`, at its temperature, over the whole vocabulary.

    Returns:
        One `[T]` CPU tensor per rollout: float32, or float64 for a float64 head.
    """
    ids = torch.tensor([token for r in rollouts for token in r.response_ids], dtype=torch.long, device=states.hidden.device)

    def log_probs(logits: Tensor, chunk: slice) -> Tensor:
        return token_log_probs(logits, ids[chunk])

    return [values.cpu() for values in map_tokens(head, states, log_probs)]


def token_log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """`log softmax(z)(y)` per position, differentiable; `[..., V]` logits and `[...]` token ids to `[...]`."""
    return log_softmax(logits).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
