"""A decoding loop over a model's forward pass with a key-value cache.

It is faster than `generate` because a prompt that occurs several times is read once; the cache has room to grow, where `generate`
copies all of it for every token; keys and values that several heads share are read once (`attention.py`); only the largest scores are
sorted; and a finished response leaves the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMixin

from firedistill.models.attention import CACHE, kinds_of_layers, own_attention
from firedistill.rollout import Sampling
from firedistill.rollouts.sampling import NOT_FINITE_LOGITS, choose_tokens, penalize_repetition

FORWARD_ARGUMENTS = {"input_ids", "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}


def next_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """Float32 logits `[B, V]` after the tokens `ids` `[B, T]`, whose keys and values are added to the cache."""
    of_cache = {CACHE: cache, "use_cache": True}
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **of_cache)
    return output.logits[:, -1].float()


def can_decode(model: PreTrainedModel) -> bool:
    """Whether `decode` gives for this model what its own `generate` gives.

    False for encoder-decoders, for states other than keys and values (recurrent, linear attention), and for classes that prepare the
    inputs of a step themselves.
    """
    own_ways = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample", "generate")
    return (
        isinstance(model, PreTrainedModel)
        and isinstance(model, GenerationMixin)
        and not model.config.is_encoder_decoder
        and all(getattr(type(model), name, None) is getattr(GenerationMixin, name, None) for name in own_ways)
        and inspect.signature(model.forward).parameters.keys() >= FORWARD_ARGUMENTS
        and model.device.type in ("cpu", "cuda")
        and set()
        < set(kinds_of_layers(model.config.get_text_config(decoder=True)))
        <= {DynamicLayer, DynamicSlidingWindowLayer}
    )


def decode(batch: Batch, limits: Sequence[int], stop_ids: Sequence[int]) -> list[list[int]]:
    """Sample one response per row of the batch.

    Args:
        batch: a `GrowingBatch` or a `FixedBatch`.
        limits: largest number of tokens of each response, at least 1.
        stop_ids: tokens that end a response and belong to it.

    Returns:
        The token ids of the responses, stop token included.

    Raises:
        ValueError: the model's logits are not finite.
    """
    responses: list[list[int]] = [[] for _ in limits]
    rows = list(range(len(limits)))  # the response that each row of the batch belongs to
    while True:
        unfinished = []
        for index, (row, tokens) in enumerate(zip(rows, batch.next_tokens(), strict=True)):
            response = responses[row]
            for token in tokens:
                if len(response) == limits[row] or (response and response[-1] in stop_ids):
                    break
                if token < 0:
                    raise ValueError(NOT_FINITE_LOGITS)
                response.append(token)
            if len(response) < limits[row] and response[-1] not in stop_ids:
                unfinished.append(index)
        if not unfinished:
            return responses
        if batch.keep(unfinished):
            rows = [rows[index] for index in unfinished]


class Batch(Protocol):
    """Sequences that a model continues together."""

    def next_tokens(self) -> list[list[int]]:
        """The next tokens of every row, at least one each, and equally many. They may continue after the end of a response."""
        ...

    def keep(self, rows: list[int]) -> bool:
        """Drop all rows but these, if the batch can; returns whether it did."""
        ...


class Prompts:
    """Prompts of a batch, read by the model once each.

    Attributes:
        ids: `[D, W]`, the D different prompts with padding on the left.
        mask: `[D, W]`, 0 at the padding, otherwise 1.
        expansion: the prompt of each row of the batch.
    """

    def __init__(self, prompts: Sequence[list[int]], pad_id: int, device: torch.device):
        different = list(dict.fromkeys(map(tuple, prompts)))
        place = {prompt: index for index, prompt in enumerate(different)}
        self.expansion = [place[tuple(prompt)] for prompt in prompts]
        width = max(map(len, different))
        self.ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in different], device=device)
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in different], device=device)

    def seen(self, vocabulary: int) -> Tensor:
        """`[D, V]`, true for the tokens of each prompt."""
        # One more column takes the padding, whose token may also occur in prompts.
        ids = self.ids.masked_fill(self.mask == 0, vocabulary)
        seen = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
        return seen.scatter_(-1, ids, True)[:, :-1]


class GrowingBatch:
    """A batch with caches that grow, where every token is looked at, and a finished response leaves at once.

    Args:
        model: a causal language model for which `can_decode` holds, in evaluation mode.
        uniforms: `[B, max(limits)]` float64 numbers in [0, 1): row b decides the draws of response b, independently of the batch.
        pad_id: left padding of shorter prompts; it is masked.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[list[int]], sampling: Sampling, uniforms: Tensor, pad_id: int):
        self.model, self.sampling, self.uniforms = model, sampling, uniforms.to(model.device)
        self.steps = self.length = 0
        read = Prompts(prompts, pad_id, model.device)
        self.cache = roomy_cache(model, read.mask.shape[-1] + uniforms.shape[-1])
        room = read.mask.new_ones(len(read.mask), uniforms.shape[-1])
        self.mask = torch.cat([read.mask, room], -1)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.seen: Tensor | None = None  # `[B, V]`, true for the tokens read, where they have a penalty
        scores = self.forward(read.ids)
        if sampling.repetition_penalty != 1:
            self.seen = read.seen(scores.shape[-1])
        self.scores = scores[read.expansion]
        self.tokens: Tensor | None = None
        self.select(read.expansion)

    def next_tokens(self) -> list[list[int]]:
        if self.tokens is not None:
            if self.seen is not None:
                self.seen.scatter_(-1, self.tokens.unsqueeze(-1), True)
            self.scores = self.forward(self.tokens.unsqueeze(-1))
        scores = self.scores
        if self.seen is not None:
            scores = penalize_repetition(scores, self.seen, self.sampling.repetition_penalty)
        self.tokens = choose_tokens(scores, self.sampling, self.uniforms[:, self.steps])
        self.steps += 1
        return [[token] for token in self.tokens.tolist()]

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[B, V]` after the tokens `ids` `[B, T]`."""
        start, self.length = self.length, self.length + ids.shape[-1]
        with own_attention(self.model):
            return next_logits(self.model, ids, self.mask[:, : self.length], self.positions[:, start : self.length], self.cache)

    def keep(self, rows: list[int]) -> bool:
        # Copying the cache once costs less than a step, so a finished response leaves at once.
        self.uniforms = self.uniforms[rows]
        self.select(rows)
        return True

    def select(self, rows: list[int]) -> None:
        """Continue with these rows only; a row may occur several times."""
        if rows == list(range(len(self.mask))):
            return
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask, self.positions = self.mask[index], self.positions[index]
        self.seen = None if self.seen is None else self.seen[index]
        self.tokens = None if self.tokens is None else self.tokens[index]


class RoomyLayer(DynamicLayer):
    """Keys and values `[B, heads, length, size]` as views of larger buffers, so that a token is written in place.

    Args:
        longest: the length that is never exceeded.
    """

    ROOM = 128  # tokens by which the buffers grow

    keys: Tensor  # from the first `update` on
    values: Tensor

    def __init__(self, longest: int):
        super().__init__()
        self.longest = longest

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [states.new_empty(0) for states in (key_states, value_states)]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > (self.buffers[0].shape[-2] if start else 0):
            room = max(end, min(end + self.ROOM, self.longest))
            self.buffers = [
                torch.cat([old, new.new_empty(*new.shape[:-2], room - start, new.shape[-1])], -2)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            ]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        self.buffers = [buffer.index_select(0, indices) for buffer in self.buffers]
        self.keys, self.values = (buffer[..., :length, :] for buffer in self.buffers)


def roomy_cache(model: PreTrainedModel, longest: int) -> DynamicCache:
    """An empty cache for up to `longest` tokens; layers with a sliding window keep the class that `transformers` gives them."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [RoomyLayer(longest) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
