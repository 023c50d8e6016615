"""What a rollout is, and what an engine that samples them must offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from firedistill.tasks.types import Example, FeedbackField, Verdict


@dataclass(frozen=True)
class Sampling:
    """The sampling law, exactly as configured: nothing of the checkpoint's own generation settings is mixed in.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass; 1 is off.
        top_k: 0 is off.
        repetition_penalty: 1 is off.
        max_new_tokens: tokens sampled at most, end-of-sequence included.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    max_new_tokens: int = 384
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        token_ids: verbatim as sampled, end-of-sequence token included when it was sampled.
        text: decoded without special tokens.
        finished: an end-of-sequence token was sampled.
    """

    token_ids: list[int]
    text: str
    finished: bool


@dataclass(frozen=True)
class Prompt:
    """An example with its tokenised student prompt.

    Attributes:
        index: names the prompt within its step, over all processes.
    """

    example: Example
    token_ids: list[int]
    index: int = 0


@dataclass(eq=False)
class Rollout:
    """A prompt, the student's response to it, and what the verifier and the feedback say about it.

    Attributes:
        prompt_index: the same for the responses of one group.
        prefix_length: leading response tokens that the teacher wrote.
        draft_tokens: tokens that the teacher generated for that prefix.
        coefficients: what the objective computed for this rollout, numbers or `[T]` tensors.
        view_ids: the teacher's prompts that were tokenised so far.
        teacher_states: `[T, H]` hidden states of the EMA teacher that are kept within a step, by view.
    """

    example: Example
    prompt_ids: list[int]
    response: Response
    verdict: Verdict
    feedback: tuple[FeedbackField, ...] = ()
    prompt_index: int = 0
    prefix_length: int = 0
    draft_tokens: int = 0
    coefficients: dict[str, float | Tensor] = field(default_factory=dict)
    view_ids: dict[object, list[int]] = field(default_factory=dict)
    teacher_states: dict[object, Tensor] = field(default_factory=dict)

    @property
    def response_ids(self) -> list[int]:
        return self.response.token_ids

    @property
    def generated_tokens(self) -> int:
        """Tokens that were sampled for this rollout, by student or teacher; none counts twice."""
        return len(self.response_ids) - self.prefix_length + self.draft_tokens


class RolloutEngine(Protocol):
    """Samples one response per prompt."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Response]:
        """Responses in the order of `prompts` (token ids).

        `progress` is told the number of prompts done so far. `limits` holds each response's largest number of tokens where that is
        below `sampling.max_new_tokens`.
        """
        ...
