"""Sequences that a teacher reads together, each after a prefix whose keys and values are known.

The views of a rollout agree up to the removed field, and the prompts of a batch begin alike. The teacher has no backward pass, so the
keys and values of a prefix can be kept. The rest of several sequences is read end to end in one forward pass without padding, in which
a token attends to the prefix and to the earlier tokens of its own sequence. Exact up to floating-point order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firedistill.models.attention import attends_by_position, causal_attention, own_attention
from firedistill.models.states import trunk_states, unwrap


@dataclass
class Prefix:
    """Tokens that were read, with the keys and values `[1, groups, tokens, size]` of each layer."""

    ids: list[int]
    layers: list[tuple[Tensor, Tensor]]


class NotPacked(Exception):
    """A model that cannot read several sequences in one forward pass."""


class Reading:
    """A prompt with a response, to be read after what is known of the prompt.

    Args:
        prompt, response: token ids.
        known: begins like the prompt.
        keep: of how many tokens the keys and values are kept.

    Attributes:
        start: how many tokens are known. The last one of the prompt is read in any case: its state predicts the response.
        rest: the token ids that are read.
        kept, states: after reading, the first `keep` tokens, and the states `[T, H]` that predict the response.
    """

    states: Tensor

    def __init__(self, prompt: list[int], response: list[int], known: Prefix | None = None, keep: int = 0):
        self.prompt, self.response, self.known = prompt, response, known
        self.start = 0 if known is None else min(common_prefix(known.ids, prompt), len(prompt) - 1)
        self.rest = (prompt + response)[self.start :]
        self.kept = Prefix((prompt + response)[:keep], [])


class Packed:
    """Readings that share a forward pass. The attention of every layer calls `attention`.

    Attributes:
        layers: how many have called it.
    """

    def __init__(self, readings: Sequence[Reading]):
        self.readings, self.layers = readings, 0

    def attention(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """`[1, T, heads, size]` for the tokens of all sequences, end to end; shapes as in `models.attention.attention`."""
        sizes = [len(reading.rest) for reading in self.readings]
        found = []
        for reading, queries, *new in zip(self.readings, *(x.split(sizes, dim=2) for x in (query, key, value)), strict=True):
            if reading.known is not None and reading.start:
                known = [x[:, :, : reading.start] for x in reading.known.layers[self.layers]]
                new = [torch.cat(parts, dim=2) for parts in zip(known, new, strict=True)]
            if count := len(reading.kept.ids):
                reading.kept.layers.append((new[0][:, :, :count].clone(), new[1][:, :, :count].clone()))
            found.append(causal_attention(module, queries, new[0], new[1], scaling))
        self.layers += 1
        return torch.cat(found, dim=1)


def read(model: nn.Module, readings: Sequence[Reading], most_tokens: int) -> int:
    """Read the sequences in forward passes of at most `most_tokens` tokens, or of one sequence; sets their `states` and `kept`.

    Returns:
        The number of tokens that went through the model.

    Raises:
        NotPacked: attention layers of the model do not call `Packed.attention`.
    """
    causal_lm = unwrap(model)
    device = next(causal_lm.parameters()).device
    for batch in passes(readings, most_tokens):
        packed = Packed(batch)
        ids = torch.tensor([[token for reading in batch for token in reading.rest]], device=device)
        positions = torch.cat([torch.arange(r.start, r.start + len(r.rest)) for r in batch]).unsqueeze(0).to(device)
        # transformers passes a mask of four dimensions on as it is, and builds one of all tokens by all tokens where it gets none.
        unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        with own_attention(model):
            states = trunk_states(
                causal_lm, input_ids=ids, attention_mask=unread, position_ids=positions, use_cache=False, packed=packed
            )[0]
        if packed.layers != causal_lm.config.get_text_config().num_hidden_layers:
            raise NotPacked(f"{type(causal_lm).__name__} does not pass arguments on to the attention of every layer")
        for reading, part in zip(batch, states.split([len(reading.rest) for reading in batch]), strict=True):
            reading.states = part[len(reading.prompt) - 1 - reading.start :][: len(reading.response)]
    return sum(len(reading.rest) for reading in readings)


def passes(readings: Sequence[Reading], most_tokens: int) -> Iterator[list[Reading]]:
    """The readings in their order, in lists of at most `most_tokens` tokens, or of one reading."""
    batch: list[Reading] = []
    for reading in readings:
        if batch and sum(len(other.rest) for other in (*batch, reading)) > most_tokens:
            yield batch
            batch = []
        batch.append(reading)
    if batch:
        yield batch


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def shares_prefixes(wanted: bool | None, model: nn.Module, device: torch.device) -> bool:
    """Whether a teacher reads shared prefixes once: as set, by default on CPUs; and only where `read` gives what plain passes give.

    See `attends_by_position` for what this excludes.
    """
    return (device.type == "cpu" if wanted is None else wanted) and attends_by_position(model)
