"""Keys and values of what the teacher has read, so that prefixes that several views share are read once.

The views of a rollout agree up to the removed field. The teacher has no backward pass, so the keys and values of a shared prefix can be
kept: the cache is cropped where the next view departs and extended from there. Exact up to floating-point order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from firedistill.models.states import trunk_states, unwrap

# Layers whose cache can be cropped at any position.
CROPPABLE_LAYERS = {"full_attention", "sliding_attention"}


class PrefixCache:
    """Reads sequences one after the other and keeps keys and values up to where the next one departs.

    Args:
        model: a causal language model for which `can_share_prefixes` holds.
        similar: a cache whose beginning is copied as far as `prompt` agrees with it (the members of a group share their prompt).
        prompt: token ids of the first prompt to be read.

    Attributes:
        ids: the tokens that the cache holds.
        first: the first sequence that was read.
        tokens: number of tokens that went through the model.
    """

    def __init__(self, model: nn.Module, similar: PrefixCache | None = None, prompt: Sequence[int] = ()):
        self.causal_lm = unwrap(model)
        self.cache = DynamicCache()
        self.ids: list[int] = []
        self.first: list[int] = []
        self.tokens = 0
        if similar is not None:
            length = common_prefix(similar.ids, prompt)
            self.ids = similar.ids[:length]
            layers: Sequence[Any] = similar.cache.layers  # plain keys and values: `can_share_prefixes`
            for index, layer in enumerate(layers):
                self.cache.update(layer.keys[..., :length, :], layer.values[..., :length, :], index)

    def read(self, prompt: list[int], response: list[int]) -> Tensor:
        """`[T, H]` states that predict the response tokens."""
        ids = prompt + response
        shared = min(common_prefix(self.ids, ids), len(prompt) - 1)
        if shared < len(self.ids):
            self.cache.crop(shared - len(self.ids))  # a negative number is the tokens to remove
        rest = torch.tensor([ids[shared:]], device=next(self.causal_lm.parameters()).device)
        states = trunk_states(self.causal_lm, input_ids=rest, past_key_values=self.cache, use_cache=True)
        self.ids, self.first = ids, self.first or ids
        self.tokens += rest.shape[1]
        start = len(prompt) - 1 - shared
        return states[0, start : start + len(response)]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, and free the memory of the others."""
        if length >= len(self.ids):
            return
        self.cache.crop(length - len(self.ids))  # a negative number is the tokens to remove
        layers: Sequence[Any] = self.cache.layers
        for layer in layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        self.ids = self.ids[:length]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def can_share_prefixes(model: nn.Module) -> bool:
    """Whether every layer keeps plain keys and values (recurrent and linear-attention layers do not)."""
    layers = getattr(unwrap(model).config.get_text_config(), "layer_types", None) or ["full_attention"]
    return set(layers) <= CROPPABLE_LAYERS
