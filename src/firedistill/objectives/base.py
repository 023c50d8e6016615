"""What a method is: how it samples, which rollouts it trains on, what it computes over a step, and its loss on a micro-batch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor

from firedistill.config import LIMITS, TeacherKind, beyond_limits
from firedistill.metrics import Metrics
from firedistill.objectives.batches import MicroBatch, Step
from firedistill.prompts import View
from firedistill.rollout import Prompt, Rollout, Sampling
from firedistill.rollouts.sampler import Sampler


def setting(default: Any, text: str, **limits: float) -> Any:
    """A field of an objective that recipes set under `method_settings`.

    Args:
        text: its description in `--help`.
        limits: bounds of a number, `above`, `at_least`, `below` and `at_most`; another number raises ValueError.

    Raises:
        TypeError: a limit of another name.
    """
    if unknown := limits.keys() - LIMITS:
        raise TypeError(f"setting has no limit {', '.join(sorted(unknown))}: expected {', '.join(LIMITS)}")
    return field(default=default, metadata={"help": text, "limits": limits})


def refuse_missing_fields(method: str, feedback: bool, instead: str) -> None:
    """Raise ValueError for attribution with a teacher that reads no feedback; it says what to do instead."""
    if not feedback:
        raise ValueError(
            f"method {method} attributes to fields of feedback, and teacher_feedback false shows the teacher none: {instead}"
        )


@dataclass
class Objective:
    """Base class of the methods: a dataclass whose fields, declared with `setting`, are the method's own settings.

    The trainer calls, once per optimizer step: `sampling` and `sample`; `trains` and `needs_teacher` for every rollout; `prepare`
    with all trained ones; `updates`; and `loss` for every micro-batch. A method overrides `loss`, and the others where it differs from
    the defaults: all rollouts trained, all with feedback, one response per prompt, one update per step.
    """

    name: ClassVar[str] = "objective"
    uses_teacher: ClassVar[bool] = True
    reads_feedback: ClassVar[bool] = True  # the teacher sees the task's fields, and not hints of the method's own
    logits_held: ClassVar[int] = 8  # float32 tensors `[C, V]` that a loss holds with a bfloat16 model; 0 if by `ops.fire_head`

    group_size: int = setting(1, "Responses sampled per prompt.", at_least=1)

    def __post_init__(self) -> None:
        shared = Objective.__dataclass_fields__  # a method that changes a default keeps the limits
        for declared in fields(self):
            limits = declared.metadata.get("limits") or shared.get(declared.name, declared).metadata.get("limits")
            if limits and (value := getattr(self, declared.name)) is not None and (expected := beyond_limits(value, limits)):
                raise ValueError(f"{declared.name} is {value}: expected {expected}")

    @property
    def responses_per_prompt(self) -> int:
        """How many rollouts `sample` returns for a prompt."""
        return self.group_size

    def check_teacher(self, kind: TeacherKind, feedback: bool) -> None:
        """Refuse a teacher that does not give what the method assumes.

        Args:
            kind: whose weights the teacher has; "adapter" and "model" are not in the student's modules and cannot sample.
            feedback: whether the teacher reads feedback.

        Raises:
            ValueError: says what the method needs.
        """
        if not self.uses_teacher and (kind != "ema" or not feedback):
            raise ValueError(f"method {self.name} uses no teacher: leave teacher and teacher_feedback out")

    def sampling(self, sampling: Sampling) -> Sampling:
        """The sampling parameters of the rollouts, given those of the run."""
        return sampling

    def sample(self, sampler: Sampler, prompts: Sequence[Prompt], progress: float) -> list[Rollout]:
        """The rollouts of a step, the members of a group side by side."""
        return sampler.student([prompt for prompt in prompts for _ in range(self.group_size)])

    def trains(self, rollout: Rollout) -> bool:
        """Whether this rollout enters the loss. The divisors stay those of the full batch."""
        return True

    def needs_teacher(self, rollout: Rollout) -> bool:
        """Whether the teacher scores this rollout, so that it needs feedback."""
        return self.uses_teacher

    def views(self, rollout: Rollout) -> list[View]:
        """The teacher views of a rollout that `prepare` and `loss` may read. Their prompts are built before the step; a rollout for
        which one cannot be built is left out. `teacher_tokens_saved` compares with scoring all of them.
        """
        return ["full"] if self.needs_teacher(rollout) else []

    def prepare(self, step: Step) -> tuple[list[Any], Metrics]:
        """Compute what spans more than a micro-batch: weights over a group, normalizers over the step, frozen log-probabilities.

        Returns:
            What `loss` finds in `MicroBatch.prepared`, one entry per rollout of `step.rollouts`, and diagnostics.
        """
        return [None] * len(step.rollouts), Metrics()

    def updates(self, prompts: Sequence[int], draw: random.Random) -> list[list[int]]:
        """Which prompts (by their index in the step) serve each optimizer update; the EMA follows every one of them.

        Args:
            prompts: all prompts of the step.
            draw: seeded by run and step, alike on every process.
        """
        return [list(prompts)]

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the loss of its update (a differentiable scalar), and diagnostics.

        The shares of all micro-batches and processes add up.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What the method carries from step to step, if anything: strings, numbers and tensors by name. Checkpoints store it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
