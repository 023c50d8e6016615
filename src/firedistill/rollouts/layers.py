"""Decoder layers in fewer operations than their modules in `transformers` start.

A layer that reads one token per sequence is a chain of small operations. On an H200, the smallest of them takes 1.2 µs, and the
products of a layer 39 µs (batch 8, shapes of Qwen2.5 1.5B, `docs/performance/h200/candidates/decoding-kernels.txt`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from firedistill.models import kernels
from firedistill.models.attention import CACHE, attention, has_kernel
from firedistill.models.blocks import SiluProduct, apply
from firedistill.rollouts.fixed import FixedLayer


class FusedLayer(nn.Module):
    """What a decoder layer of one of the `FAMILIES` (`models/blocks.py`) computes, without gradients.

    Projections of the same states are one product, queries and keys are rotated together, and the last product of each half is added
    in place. Sums that `transformers` rounds to the type of the states before the next operation are rounded once.

    Args:
        layer: the layer, with whose norms it computes. In place of each of its projections it has the plain layer that computes all
            projections of the same states, whose rows are in the order of `PROJECTIONS`.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.training = False
        self.to_heads, self.from_heads = layer.self_attn.q_proj, layer.self_attn.o_proj
        self.to_gates, self.from_gates = layer.mlp.gate_proj, layer.mlp.down_proj
        self.attention_norm, self.gate_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm, self.key_norm = (getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm"))
        config = layer.self_attn.config
        self.activation, self.is_silu = layer.mlp.act_fn, config.hidden_act in ("silu", "swish")
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.index, self.size, self.scaling = layer.self_attn.layer_idx, layer.self_attn.head_dim, layer.self_attn.scaling
        self.is_causal, self.num_key_value_groups = True, self.heads // self.groups  # PyTorch's attention reads them

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """The states `[B, T, H]` after the layer; they overwrite those before it. Arguments as `transformers` gives them to a layer."""
        cache = kwargs.get(CACHE)
        cached = None if cache is None else cache.layers[self.index]
        projected = self.to_heads(normalized(hidden_states, self.attention_norm)).unflatten(-1, (-1, self.size))
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = projected.split((self.heads, self.groups, self.groups), 2)
            projected = torch.cat([self.query_norm(query), self.key_norm(key), value], 2)
        if (
            isinstance(cached, FixedLayer)
            and attention_mask is not None
            and has_kernel(projected.transpose(1, 2)[:, : self.heads], cached.keys, cached.values, attention_mask)
        ):
            room = cached.keys, cached.values, cached.column
            found = kernels.new_token_attention(projected, *position_embeddings, *room, attention_mask, self.scaling)
        else:
            both, value = projected.split((self.heads + self.groups, self.groups), 2)
            if kernels.takes_heads(both):
                both = kernels.rotate(both, *position_embeddings, both.shape[2])
            else:
                both = rotated(both, *position_embeddings)
            query, key = both.transpose(1, 2).split((self.heads, self.groups), 1)
            value = value.transpose(1, 2)
            if cache is not None:
                key, value = cache.update(key, value, self.index)
            found, _ = attention(self, query, key, value, attention_mask, self.scaling)
        hidden_states = add_product(hidden_states, found.flatten(2), self.from_heads)
        gates = self.to_gates(normalized(hidden_states, self.gate_norm))
        if self.is_silu:
            products = apply(SiluProduct, gates)
        else:
            gate, up = gates.chunk(2, -1)
            products = self.activation(gate) * up
        return add_product(hidden_states, products, self.from_gates)


def normalized(states: Tensor, norm: nn.Module) -> Tensor:
    """`norm(states)`."""
    if type(norm) is nn.RMSNorm and norm.eps is not None and norm.weight is not None and kernels.takes_states(states):
        return kernels.normalized(states, norm.weight, norm.eps)
    return norm(states)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `states` `[B, T, heads, size]`, which turns the pairs of coordinates i and i + size / 2.

    It has fewer operations and roundings than PyTorch's operators in `models/blocks.py`, which round as `transformers` does.

    Args:
        cos, sin: of the angles, `[B or 1, T, size]`.
    """
    half = states.shape[-1] // 2
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    found = states * cos
    found[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-1)
    found[..., half:].addcmul_(states[..., :half], sin[..., half:])
    return found


def add_product(sums: Tensor, states: Tensor, layer: nn.Module) -> Tensor:
    """`sums + layer(states)` in place."""
    if type(layer) is nn.Linear and layer.bias is None:
        sums.view(-1, sums.shape[-1]).addmm_(states.flatten(0, -2), layer.weight.t())  # a view raises where it would copy
        return sums
    return sums.add_(layer(states))
