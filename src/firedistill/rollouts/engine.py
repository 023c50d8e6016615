"""What a rollout is, and what an engine that samples them must offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from firedistill.feedback import FeedbackField
from firedistill.tasks.task import Example, Verdict


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


@dataclass(eq=False)
class Rollout:
    """A prompt, the student's response to it, and what the verifier and the feedback say about it."""

    example: Example
    prompt_ids: list[int]
    response: Response
    verdict: Verdict
    feedback: tuple[FeedbackField, ...] = ()
    view_ids: dict[object, list[int]] = field(default_factory=dict)

    @property
    def response_ids(self) -> list[int]:
        return self.response.token_ids


class RolloutEngine(Protocol):
    """Samples one response per prompt."""

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seed: int, progress: Callable[[int], None] | None = None
    ) -> list[Response]:
        """Responses in the order of `prompts` (token ids). `progress` is told the number of prompts done so far."""
        ...
