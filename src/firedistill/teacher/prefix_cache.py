"""One response under several teacher prompts: the views of a rollout agree up to the removed field, and what agrees is read once.

The teacher has no backward pass, so the keys and values of a shared prefix can be kept. Views are scored in the order of their
shared prefixes, longest first: full, then without the last field, and so on; each one cuts the cache where it departs and extends
it. That visits the token-id tree of the views depth first with a single cache per rollout. A rollout that begins like an earlier one,
as the members of a group do, starts with a copy of what that one has read. Exact up to floating-point order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from firedistill.models.states import ResponseStates, score_responses, unwrap

# Layers whose cache can be cut at any position.
CUTTABLE_LAYERS = {"full_attention", "sliding_attention"}


class ViewScorer:
    """Scores responses under teacher views and remembers, until `forget`, what it has read of each rollout.

    Args:
        model: the causal language model, with the teacher's weights applied by the caller.
        share_prefixes: keep keys and values per rollout. Row by row, which suits a CPU; a GPU is better served by large batches,
            which are used otherwise.
        max_tokens: padded tokens per forward pass of the batched path.

    Attributes:
        tokens: tokens that went through the model so far.
    """

    def __init__(self, model: nn.Module, share_prefixes: bool, max_tokens: int | None = None):
        self.model, self.max_tokens = model, max_tokens
        self.share_prefixes = share_prefixes and cache_can_be_cut(model)
        self.tokens = 0
        self.readers: dict[int, PrefixReader] = {}

    @torch.no_grad()
    def score(
        self, keys: Sequence[int], prompts: Sequence[Sequence[list[int]]], responses: Sequence[list[int]]
    ) -> list[ResponseStates]:
        """States of the responses under each view; without gradient.

        Args:
            keys: identify the rollouts between calls.
            prompts: `prompts[view][row]`, token ids.
            responses: token ids per row.
        """
        rows = range(len(responses))
        if not self.share_prefixes:
            states = score_responses(
                self.model, [ids for view in prompts for ids in view], [*responses] * len(prompts), max_tokens=self.max_tokens
            )
            self.tokens += sum(len(ids) for view in prompts for ids in view) + len(prompts) * sum(map(len, responses))
            return [states.select(range(v * len(rows), (v + 1) * len(rows))) for v in range(len(prompts))]
        hidden: list[dict[int, Tensor]] = [{} for _ in prompts]
        for row in rows:
            if keys[row] not in self.readers:
                self.readers[keys[row]] = self._new_reader(prompts[0][row])
            reader = self.readers[keys[row]]
            for view in sorted(range(len(prompts)), key=lambda v: -common_prefix(reader.first, prompts[v][row])):  # noqa: B023
                hidden[view][row] = reader.read(prompts[view][row], responses[row])
            self.tokens += reader.take_count()
        lengths = [len(response) for response in responses]
        empty = torch.empty(
            0, unwrap(self.model).config.get_text_config().hidden_size, device=next(self.model.parameters()).device
        )
        return [
            ResponseStates(torch.cat([states[row] for row in rows]) if states else empty, list(lengths)) for states in hidden
        ]

    def _new_reader(self, prompt: list[int]) -> PrefixReader:
        """A reader that knows already what another one has read of this prompt."""
        reader = PrefixReader(self.model)
        if self.readers:
            nearest = max(self.readers.values(), key=lambda other: common_prefix(other.ids, prompt))
            reader.copy(nearest, common_prefix(nearest.ids, prompt))
        return reader

    def forget(self) -> None:
        """Free the keys and values; to be called before the teacher's weights change."""
        self.readers.clear()


class PrefixReader:
    """Reads sequences one after the other and keeps keys and values up to where the next one departs."""

    def __init__(self, model: nn.Module):
        self.causal_lm = unwrap(model)
        self.cache = DynamicCache()
        self.ids: list[int] = []
        self.first: list[int] = []
        self._count = 0

    def copy(self, other: PrefixReader, length: int) -> None:
        """Take over the first tokens of what another reader has read."""
        self.ids = other.ids[:length]
        layers: Sequence[Any] = other.cache.layers  # all of them with plain keys and values: `cache_can_be_cut`
        for index, layer in enumerate(layers):
            self.cache.update(layer.keys[..., :length, :], layer.values[..., :length, :], index)

    def read(self, prompt: list[int], response: list[int]) -> Tensor:
        """`[T, H]` states that predict the response tokens."""
        ids = prompt + response
        shared = min(common_prefix(self.ids, ids), len(prompt) - 1)
        if shared < len(self.ids):
            self.cache.crop(shared - len(self.ids))  # a negative number is the tokens to remove
        rest = torch.tensor([ids[shared:]], device=next(self.causal_lm.parameters()).device)
        states = self.causal_lm.base_model(input_ids=rest, past_key_values=self.cache, use_cache=True).last_hidden_state
        self.ids, self.first = ids, self.first or ids
        self._count += rest.shape[1]
        start = len(prompt) - 1 - shared
        return states[0, start : start + len(response)]

    def take_count(self) -> int:
        """Tokens read since the last call."""
        count, self._count = self._count, 0
        return count


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def cache_can_be_cut(model: nn.Module) -> bool:
    """Whether every layer keeps plain keys and values (recurrent and linear-attention layers do not)."""
    layers = getattr(unwrap(model).config.get_text_config(), "layer_types", None) or ["full_attention"]
    return set(layers) <= CUTTABLE_LAYERS
