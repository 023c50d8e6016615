"""What a rollout engine must offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from firedistill.rollout import Response, Sampling


class RolloutEngine(Protocol):
    """Samples one response per prompt with the weights that the model has at the time.

    An engine with an attribute `on_response` calls it as `on_response(index, response)` when the response to a prompt has ended and
    others have not, unless it is None. A call may come twice for a prompt; what `generate` returns counts.
    """

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Response]:
        """Responses in the order of `prompts` (token ids).

        Args:
            seed: with equal weights, the same seed gives the same responses; engines in other processes may differ by rounding.
            progress: called with the number of prompts that are done.
            limits: the largest number of tokens of each response, where it is below `sampling.max_new_tokens`.
        """
        ...
