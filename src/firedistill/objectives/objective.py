"""What an objective is: which rollouts it trains on, and its loss on a micro-batch of them."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firedistill.ops.fused_head import Head, TokenLoss, chunked_token_loss, chunks
from firedistill.prompts import View
from firedistill.rollouts.engine import Rollout
from firedistill.scoring.scorer import ResponseStates

if TYPE_CHECKING:
    from firedistill.config import SelfDistillConfig

Chunk = slice


class Averages:
    """Running means (over tokens or rollouts) and maxima of diagnostics; what `metrics.jsonl` reports of a step.

    Values stay on their device until they are asked for: a step waits for them once.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.maxima: dict[str, Tensor] = {}

    def add(self, **values: Tensor | float) -> None:
        """Every element of a tensor counts once."""
        for name, value in values.items():
            value = torch.as_tensor(value)
            if value.numel():
                self.totals[name] = self.totals.get(name, 0.0) + value.detach().float().sum()
                self.counts[name] += value.numel()

    def maximum(self, **values: Tensor) -> None:
        for name, value in values.items():
            if value.numel():
                largest = value.detach().float().max()
                self.maxima[name] = torch.maximum(largest, self.maxima[name]) if name in self.maxima else largest

    def on_host(self) -> Averages:
        """A copy of plain CPU numbers, to be sent between processes."""
        copy = Averages()
        copy.totals = {name: value.cpu() for name, value in self.totals.items()}
        copy.maxima = {name: value.cpu() for name, value in self.maxima.items()}
        copy.counts = self.counts
        return copy

    def merge(self, others: Iterable[Averages]) -> Averages:
        for other in others:
            for name, total in other.totals.items():
                self.totals[name] = self.totals.get(name, 0.0) + total
                self.counts[name] += other.counts[name]
            self.maximum(**other.maxima)
        return self

    def means(self) -> dict[str, float]:
        means = {name: float(total) / self.counts[name] for name, total in self.totals.items()}
        return means | {name: float(value) for name, value in self.maxima.items()}


@dataclass
class TrainingBatch:
    """The trained rollouts of one micro-batch with what an objective may ask about them.

    Attributes:
        rollouts: in the order of `student`.
        student: live hidden states at the response positions, with gradient.
        head: the student's head.
        teacher_head: the EMA teacher's (the same projection unless the head is trained).
        teacher: `teacher(rows, views)` scores the responses of these rows under each view, without gradient, and returns one
            `ResponseStates` per view. Nothing is scored that is not asked for.
        step_scale: `s = max(1, a_k / a_0)` of the step being built.
        log_prob_floor: floor on normalised teacher log-probabilities, or None.
        saved: `saved(rows, views)` is told of views that a plain implementation would have scored; they are counted.
        averages: diagnostics go here.
    """

    rollouts: Sequence[Rollout]
    student: ResponseStates
    head: Head
    teacher_head: Head
    teacher: Callable[[Sequence[int], Sequence[View]], list[ResponseStates]]
    saved: Callable[[Sequence[int], Sequence[View]], None] = lambda rows, views: None
    step_scale: float = 1.0
    log_prob_floor: float | None = None
    averages: Averages = field(default_factory=Averages)

    def rows(self, condition: Callable[[Rollout], bool]) -> list[int]:
        """Indices of the rollouts that meet a condition."""
        return [row for row, rollout in enumerate(self.rollouts) if condition(rollout)]

    def token_ids(self, rows: Sequence[int]) -> Tensor:
        """Sampled tokens of these rollouts, end to end; `[M]`."""
        ids = [token for row in rows for token in self.rollouts[row].response_ids]
        return torch.tensor(ids, dtype=torch.long, device=self.student.hidden.device)

    def token_mean_loss(self, rows: Sequence[int], token_loss: TokenLoss) -> Tensor:
        """`sum_i 1/M_i sum_t loss_it` over these rollouts: the inner part of eq. fire_objective, before the division by N."""
        states = self.student.select(rows)
        return chunked_token_loss(self.head, states.hidden, states.token_weights(), token_loss)

    def no_loss(self) -> Tensor:
        """Zero, with a gradient of zero."""
        return self.student.hidden[:0].float().sum()

    @torch.no_grad()
    def map_tokens(self, rows: Sequence[int], function: Callable[[Tensor, Chunk], Tensor]) -> list[Tensor]:
        """`function(student_logits, chunk)` `[..., C]` over all tokens of these rollouts, without gradient; one tensor per rollout."""
        states = self.student.select(rows)
        if not rows:
            return []
        parts = [function(self.head(states.hidden[chunk].detach()), chunk) for chunk in chunks(states.hidden, self.head)]
        return list(torch.cat(parts, dim=-1).split(states.lengths, dim=-1))


class Objective:
    """Base class of the methods. A method overrides `loss`; `trains` and `needs_teacher` where not all rollouts are alike."""

    name = "objective"

    def __init__(self, config: SelfDistillConfig):
        self.config = config

    def trains(self, rollout: Rollout) -> bool:
        """Whether this rollout enters the loss at all. The divisor N stays the number of prompts."""
        return True

    def needs_teacher(self, rollout: Rollout) -> bool:
        """Whether feedback is built for this rollout."""
        return True

    def loss(self, batch: TrainingBatch) -> Tensor:
        """`sum_i loss_i` over the rollouts of the micro-batch; the trainer divides by N over all micro-batches and ranks."""
        raise NotImplementedError


_REGISTRY: dict[str, type[Objective]] = {}


def register(name: str) -> Callable[[type[Objective]], type[Objective]]:
    """Class decorator that makes an objective available to recipes under `name`."""

    def decorate(cls: type[Objective]) -> type[Objective]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def load_objective(name: str, config: SelfDistillConfig) -> Objective:
    """The objective registered under `name`, or named by dotted path (`my_package.my_module:MyObjective`).

    Raises:
        ValueError: no such method.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)(config)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"method {name!r} could not be loaded: {error}") from error
    if name not in _REGISTRY:
        raise ValueError(f"unknown method {name!r}; known are {', '.join(sorted(_REGISTRY))}, or a dotted path module:Class")
    return _REGISTRY[name](config)
