"""A decoding loop over a model's forward pass with a key-value cache.

It is faster than `generate` because a prompt that occurs several times is read once; the cache has room to grow, where `generate`
copies all of it for every token; only the largest scores are sorted; and a finished response leaves the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMixin

from firedistill.rollout import Sampling
from firedistill.rollouts.sampling import choose_tokens, penalise_repetition

FORWARD_ARGUMENTS = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


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
        and _is_plain(DynamicCache(config=model.config.get_text_config(decoder=True)))
    )


def _is_plain(cache: DynamicCache) -> bool:
    return bool(cache.layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def decode(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    limits: Sequence[int],
    uniforms: Tensor,
    stop_ids: Sequence[int],
    pad_id: int,
) -> list[list[int]]:
    """Sample one response per prompt, all in one batch.

    Args:
        model: a causal language model for which `can_decode` holds, in evaluation mode.
        limits: largest number of tokens of each response, at least 1.
        uniforms: `[B, max(limits)]` float64 numbers in [0, 1): row b decides the draws of response b, independently of the batch.
        stop_ids: tokens that end a response and belong to it.
        pad_id: left padding of shorter prompts; it is masked.

    Returns:
        The token ids of the responses, stop token included.
    """
    different = list(dict.fromkeys(map(tuple, prompts)))
    batch = _Batch(model, different, max(limits), pad_id, remember=sampling.repetition_penalty != 1)
    scores = batch.read_prompts()
    place = {prompt: index for index, prompt in enumerate(different)}
    expansion = [place[tuple(prompt)] for prompt in prompts]
    batch.select(expansion)
    scores = scores[expansion]

    uniforms = uniforms.to(model.device)
    rows = list(range(len(prompts)))  # the response that each row of the batch belongs to
    responses: list[list[int]] = [[] for _ in prompts]
    for step in range(max(limits)):
        if batch.seen is not None:
            scores = penalise_repetition(scores, batch.seen, sampling.repetition_penalty)
        tokens = choose_tokens(scores, sampling, uniforms[rows, step])
        unfinished = []
        for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            responses[row].append(token)
            if token not in stop_ids and len(responses[row]) < limits[row]:
                unfinished.append(index)
        if not unfinished:
            break
        if len(unfinished) < len(rows):
            # Copying the cache once costs less than a step, so a finished response leaves at once.
            rows = [rows[index] for index in unfinished]
            batch.select(unfinished)
            tokens = tokens[unfinished]
        scores = batch.read(tokens)
    return responses


class _Batch:
    """What the model has read so far: `length` columns, of which `mask` `[B, longest]` leaves out the padding on the left.

    `seen` is `[B, V]`, true for the tokens read; None without `remember`.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], room: int, pad_id: int, remember: bool):
        width = max(map(len, prompts))
        self.model, self.cache, self.length = model, roomy_cache(model), 0
        self.prompt_ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=model.device)
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * (len(p) + room) for p in prompts], device=model.device)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.remember = remember
        self.seen: Tensor | None = None

    def read_prompts(self) -> Tensor:
        """Logits `[B, V]` of the first token."""
        scores = self._forward(self.prompt_ids)
        if self.remember:
            # One more column takes the padding, whose token may also occur in prompts.
            vocabulary = scores.shape[-1]
            ids = self.prompt_ids.masked_fill(self.mask[:, : self.length] == 0, vocabulary)
            self.seen = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device).scatter_(-1, ids, True)[
                :, :-1
            ]
        return scores

    def read(self, tokens: Tensor) -> Tensor:
        """Logits `[B, V]` after `tokens` `[B]`."""
        if self.seen is not None:
            self.seen.scatter_(-1, tokens.unsqueeze(-1), True)
        return self._forward(tokens.unsqueeze(-1))

    def _forward(self, ids: Tensor) -> Tensor:
        start, self.length = self.length, self.length + ids.shape[-1]
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask[:, : self.length],
            position_ids=self.positions[:, start : self.length],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def select(self, rows: list[int]) -> None:
        """Continue with these rows only; a row may occur several times."""
        if rows == list(range(len(self.mask))):
            return
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask, self.positions = self.mask[index], self.positions[index]
        self.seen = None if self.seen is None else self.seen[index]


class RoomyLayer(DynamicLayer):
    """Keys and values `[B, heads, length, size]` as views of larger buffers, so that a token is written in place."""

    ROOM = 128

    keys: Tensor  # from the first `update` on
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [states.new_empty(0) for states in (key_states, value_states)]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > (self.buffers[0].shape[-2] if start else 0):
            self.buffers = [
                torch.cat([old, new.new_empty(*new.shape[:-2], end - start + self.ROOM, new.shape[-1])], -2)
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


def roomy_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache; layers with a sliding window keep the class that `transformers` gives them."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
