"""What is sampled: the sampling parameters, a prompt, a response, and a judged rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from firedistill.tasks.types import Example, FeedbackField, Verdict


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, exactly as configured: nothing of the checkpoint's own generation settings is mixed in.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass; 1 is off.
        top_k: 0 is off.
        repetition_penalty: 1 is off.
        max_new_tokens: the largest number of sampled tokens, end-of-sequence included.
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
        log_probs: log-probabilities of the last `len(log_probs)` tokens under the engine's model, at temperature 1 and without
            truncation; None from an engine that runs the student itself.
    """

    token_ids: list[int]
    text: str
    finished: bool
    log_probs: list[float] | None = None


@dataclass(frozen=True)
class Prompt:
    """An example with its tokenized student prompt.

    Attributes:
        index: names the prompt within its step, over all processes.
    """

    example: Example
    token_ids: list[int]
    index: int = 0


@dataclass(frozen=True, eq=False)
class Rollout:
    """A prompt, the response to it, the verdict, and the feedback about it.

    Attributes:
        feedback: empty where no teacher needs it.
        prompt_index: the same for the responses of one group.
        prefix_length: leading response tokens that the teacher wrote.
        draft_tokens: tokens that the teacher generated for that prefix.
    """

    example: Example
    prompt_ids: list[int]
    response: Response
    verdict: Verdict
    feedback: tuple[FeedbackField, ...] = ()
    prompt_index: int = 0
    prefix_length: int = 0
    draft_tokens: int = 0

    @property
    def response_ids(self) -> list[int]:
        return self.response.token_ids

    @property
    def generated_tokens(self) -> int:
        """Tokens that student or teacher sampled for this rollout; none counts twice."""
        return len(self.response_ids) - self.prefix_length + self.draft_tokens

    def without_example(self) -> Rollout:
        """What is sent to other processes, which have the examples themselves: metadata may hold what cannot be pickled."""
        return replace(self, example=cast(Any, None))
