"""What an objective is: how it samples, which rollouts it trains on, what it computes over a step, and its loss on a micro-batch.

The trainer asks in this order, once per optimizer step: `sampling` and `sample`; `trains` and `needs_teacher` of every rollout;
`prepare` with all of them, for coefficients that span a group or the step; `updates`; and `loss` for every micro-batch. A method
overrides what it needs, in most cases `loss` alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import random
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from firedistill.models.states import ResponseStates
from firedistill.objectives.distributions import log_softmax
from firedistill.ops.head import Head, TokenLoss, chunked_token_loss, chunks
from firedistill.prompts import View
from firedistill.rollouts.engine import Prompt, Rollout, Sampling
from firedistill.rollouts.sampler import Sampler

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
class StepBatch:
    """All rollouts of a step that train (on this process), before any gradient: what `prepare` may ask about them.

    The members of a group, the responses to one prompt, are always on one process. What `prepare` finds out it writes into
    `rollout.coefficients`, as numbers or as `[T]` tensors, where `TrainingBatch.coefficients` reads it.

    Attributes:
        rollouts: in the order in which they were sampled.
        prompts: prompts of the step over all processes, those included that were left out.
        progress: `k / (K - 1)` for step k = 0, 1, ... of K; 0 in a run of one step.
        seed: of this step and process, not the one that the rollouts were sampled with; the same in a resumed run.
        student: `student(rollouts)` scores them under the live student, without gradient.
        teacher: `teacher(rollouts, views)` scores them under the EMA teacher; `loss` need not score the same view again.
        head, teacher_head: turn states into logits.
        total, largest: a number's sum and its maximum over all processes; every process must ask alike.
        averages: diagnostics go here.
    """

    rollouts: Sequence[Rollout]
    prompts: int
    progress: float
    seed: int
    student: Callable[[Sequence[Rollout]], ResponseStates]
    teacher: Callable[[Sequence[Rollout], Sequence[View]], list[ResponseStates]]
    head: Head
    teacher_head: Head
    total: Callable[[float], float] = float
    largest: Callable[[float], float] = float
    averages: Averages = field(default_factory=Averages)

    def student_log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """`log p(y_t)` of the sampled tokens, one `[T]` tensor per rollout, frozen."""
        return sampled_log_probs(self.head, self.student(rollouts), rollouts)

    def teacher_log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """`log q(y_t)` under the teacher that sees all feedback, one `[T]` tensor per rollout, frozen."""
        (full,) = self.teacher(rollouts, ["full"])
        return sampled_log_probs(self.teacher_head, full, rollouts)


@dataclass
class TrainingBatch:
    """The trained rollouts of one micro-batch with what an objective may ask about them.

    Attributes:
        rollouts: in the order of `student`.
        student: live hidden states at the response positions, with gradient.
        head: the student's head.
        teacher_head: the EMA teacher's (the same projection unless the head is trained).
        teacher: `teacher(rows, views)` scores the responses of these rows under each view, without gradient, and returns one
            `ResponseStates` per view. Nothing is scored that is not asked for; `teacher(rows, views, lengths)` reads only so many
            tokens of each response.
        responses: N, the responses to all prompts of the update over all micro-batches and processes, those included that were
            left out of training.
        prompts: the prompts they answer.
        progress: as in `StepBatch`.
        step_scale: `s = max(1, a_k / a_0)` of the step being built.
        log_prob_floor: floor on normalised teacher log-probabilities, or None.
        saved: `saved(rows, views)` is told of views that a plain implementation would have scored; they are counted.
        averages: diagnostics go here.
    """

    rollouts: Sequence[Rollout]
    student: ResponseStates
    head: Head
    teacher_head: Head
    teacher: Callable[..., list[ResponseStates]]
    responses: int = 1
    prompts: int = 1
    progress: float = 0.0
    step_scale: float = 1.0
    log_prob_floor: float | None = None
    saved: Callable[[Sequence[int], Sequence[View]], None] = lambda rows, views: None
    averages: Averages = field(default_factory=Averages)

    def rows(self, condition: Callable[[Rollout], bool] = lambda rollout: True) -> list[int]:
        """Indices of the rollouts that meet a condition; of all of them if none is given."""
        return [row for row, rollout in enumerate(self.rollouts) if condition(rollout)]

    def token_ids(self, rows: Sequence[int]) -> Tensor:
        """Sampled tokens of these rollouts, end to end; `[M]`."""
        ids = [token for row in rows for token in self.rollouts[row].response_ids]
        return torch.tensor(ids, dtype=torch.long, device=self.student.hidden.device)

    def coefficients(self, name: str, rows: Sequence[int]) -> Tensor:
        """What `prepare` wrote under this name, end to end; `[M]`. A number counts for every token of its rollout."""
        dtype = torch.promote_types(self.student.hidden.dtype, torch.float32)
        parts = [
            torch.as_tensor(self.rollouts[row].coefficients[name], dtype=dtype).expand(len(self.rollouts[row].response_ids))
            for row in rows
        ]
        return torch.cat(parts or [torch.empty(0, dtype=dtype)]).to(self.student.hidden.device)

    def token_loss(self, rows: Sequence[int], token_weights: Tensor, token_loss: TokenLoss) -> Tensor:
        """`sum_it w_it loss_it` over the tokens of these rollouts.

        Args:
            token_weights: `[M]`, detached.
            token_loss: `token_loss(student_logits [C, V], chunk)` gives the losses `[C]` of the tokens in the slice `chunk` of M.
        """
        return chunked_token_loss(self.head, self.student.select(rows).hidden, token_weights, token_loss)

    def token_mean_loss(self, rows: Sequence[int], token_loss: TokenLoss) -> Tensor:
        """`1/N sum_i 1/M_i sum_t loss_it` over these rollouts (eq. fire_objective)."""
        return self.token_loss(rows, self.student.select(rows).token_weights() / self.responses, token_loss)

    def no_loss(self) -> Tensor:
        """Zero, with a gradient of zero."""
        return self.student.hidden[:0].float().sum()

    @torch.no_grad()
    def map_tokens(self, rows: Sequence[int], function: Callable[[Tensor, Chunk], Tensor]) -> list[Tensor]:
        """`function(student_logits, chunk)` `[..., C]` over all tokens of these rollouts, without gradient; one tensor per rollout."""
        return map_tokens(self.head, self.student.select(rows), function)


@torch.no_grad()
def map_tokens(head: Head, states: ResponseStates, function: Callable[[Tensor, Chunk], Tensor]) -> list[Tensor]:
    """`function(logits [C, V], chunk)` `[..., C]` over all tokens, logits only in chunks; one `[..., T]` tensor per response."""
    if not states.lengths:
        return []
    hidden = states.hidden.detach()
    parts = [function(head(hidden[chunk]), chunk) for chunk in chunks(hidden, head)]
    return (
        list(torch.cat(parts, dim=-1).split(states.lengths, dim=-1)) if parts else [hidden.new_empty(0)] * len(states.lengths)
    )


def sampled_log_probs(head: Head, states: ResponseStates, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Log-probabilities of the sampled tokens at temperature 1 over the whole vocabulary; one `[T]` CPU tensor per rollout."""
    ids = torch.tensor([token for r in rollouts for token in r.response_ids], dtype=torch.long, device=states.hidden.device)
    return [
        log_probs.cpu() for log_probs in map_tokens(head, states, lambda logits, chunk: token_log_probs(logits, ids[chunk]))
    ]


def token_log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """`log softmax(z)(y)` per position, differentiable; `[..., V]` logits and `[...]` token ids to `[...]`."""
    return log_softmax(logits).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def setting(default: Any, text: str) -> Any:
    """A field of an objective that recipes set under `method_settings`.

    Args:
        text: what it is, for `--help`.
    """
    return field(default=default, metadata={"help": text})


@dataclass
class Objective:
    """Base class of the methods: a dataclass whose fields, declared with `setting`, are the method's own settings.

    A method overrides `loss`, and what else it does differently: all rollouts trained, all with feedback, one response per prompt
    by the run's sampling law, one update per step.
    """

    name: ClassVar[str] = "objective"

    group_size: int = setting(1, "Responses sampled per prompt.")

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; at least one response per prompt is needed")

    def sampling(self, law: Sampling) -> Sampling:
        """The sampling law of the rollouts, given the run's."""
        return law

    def sample(self, sampler: Sampler, prompts: Sequence[Prompt], progress: float) -> list[Rollout]:
        """The rollouts of a step, the members of a group side by side."""
        return sampler.student([prompt for prompt in prompts for _ in range(self.group_size)])

    def trains(self, rollout: Rollout) -> bool:
        """Whether this rollout enters the loss at all. The divisors stay those of the full batch."""
        return True

    def needs_teacher(self, rollout: Rollout) -> bool:
        """Whether feedback is built for this rollout."""
        return True

    def prepare(self, batch: StepBatch) -> None:
        """Compute what spans more than a micro-batch: weights over a group, normalisers over the step, frozen log-probabilities."""

    def updates(self, prompts: Sequence[int], draw: random.Random) -> list[list[int]]:
        """Which prompts (by their index in the step) serve each optimizer update; the EMA follows every one of them.

        Args:
            prompts: all prompts of the step.
            draw: seeded by run and step, alike on every process.
        """
        return [list(prompts)]

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The micro-batch's share of the loss of its update: losses of all micro-batches and processes add up to it."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What the method carries from step to step, if anything: texts, numbers and tensors by name. Checkpoints hold it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave."""


_REGISTRY: dict[str, type[Objective]] = {}


def register(name: str) -> Callable[[type[Objective]], type[Objective]]:
    """Class decorator that makes an objective available to recipes under `name`."""

    def decorate(cls: type[Objective]) -> type[Objective]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def registered_objectives() -> dict[str, type[Objective]]:
    """All methods by name."""
    return dict(sorted(_REGISTRY.items()))


def objective_class(name: str) -> type[Objective]:
    """The objective registered under `name`, or named by dotted path (`my_package.my_module:MyObjective`).

    Raises:
        ValueError: no such method.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"method {name!r} could not be loaded: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, Objective)):
            raise ValueError(f"method {name!r} is no subclass of firedistill.objectives.Objective")
        return cls
    if name not in _REGISTRY:
        raise ValueError(f"unknown method {name!r}; known are {', '.join(sorted(_REGISTRY))}, or a dotted path module:Class")
    return _REGISTRY[name]


def load_objective(name: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """A method with its settings; those not given keep their defaults.

    Raises:
        ValueError: no such method, no such setting, or a value that cannot be meant.
    """
    cls = objective_class(name)
    known = {f.name: f for f in dataclasses.fields(cls)}
    types = typing.get_type_hints(cls)
    values = {}
    for key, value in (settings or {}).items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"
            raise ValueError(f"method_settings: {name!r} has no setting {key!r}{hint}")
        values[key] = _as_setting(key, value, types[key])
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"method_settings of {name!r}: {error}") from error


def _as_setting(key: str, value: Any, kind: Any) -> Any:
    """A value of the setting's type. Numbers and truth values may come as text: from the command line, or as YAML reads 1e-3."""
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if kind is float and not math.isnan(number) or number.is_integer():
            return kind(number)
    elif kind not in (int, float, bool) and (not choices or value in choices):
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    raise ValueError(f"method_settings: {key} is {value!r}; expected {words.get(kind) or ' or '.join(map(repr, choices))}")
