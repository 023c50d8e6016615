"""Attention and MLP of a decoder layer over projections that read the same states in one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from firedistill.models import kernels
from firedistill.models.attention import CACHE
from firedistill.models.states import is_hooked

# Of `transformers`; their layers differ in biases and in norms of queries and keys only.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")

SILU = type(ACT2FN["silu"])

# Projections that read the same states, in the order in which a layer uses them
PROJECTIONS = {
    "self_attn": (("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    "mlp": (("gate_proj", "up_proj"), ("down_proj",)),
}


def is_known(module: nn.Module, kind: str) -> bool:
    """Whether a module is the `DecoderLayer`, the `Attention` or the `MLP` of one of the `FAMILIES`."""
    found = type(module)
    return found.__module__.startswith("transformers.") and found.__name__ in {family + kind for family in FAMILIES}


def attend(
    module: Any,
    to_heads: Callable[[Tensor], Tensor],
    from_heads: Callable[[Tensor], Tensor],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What the `forward` of the attention of one of the `FAMILIES` returns.

    Args:
        module: the attention.
        to_heads: `[B, T, H]` to queries, keys and values of all heads, `[B, T, (heads + 2 groups) size]`.
        from_heads: its output projection.

    The others are as `transformers` gives them to the module.
    """
    projected = to_heads(hidden_states).unflatten(-1, (-1, module.head_dim))
    groups = projected.shape[2] // (module.num_key_value_groups + 2)
    sizes = projected.shape[2] - 2 * groups, groups, groups
    if hasattr(module, "q_norm"):
        query, key, value = projected.split(sizes, 2)
        projected = torch.cat([module.q_norm(query), module.k_norm(key), value], 2)
    turned = apply(Rotation, projected, *position_embeddings, projected.shape[2] - groups)
    query, key, value = turned.transpose(1, 2).split(sizes, 1)
    if (cache := kwargs.pop(CACHE, None)) is not None:
        key, value = cache.update(key, value, module.layer_idx)
    dropout = module.attention_dropout if module.training else 0.0
    attention = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    found, _ = attention(module, query, key, value, attention_mask, scaling=module.scaling, dropout=dropout, **kwargs)
    return from_heads(found.flatten(2)), None


def gated(module: Any, to_gates: Callable[[Tensor], Tensor], from_gates: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What the `forward` of the MLP of one of the `FAMILIES` returns.

    Args:
        module: the MLP.
        to_gates: `[B, T, H]` to gates and their factors, `[B, T, 2 I]`.
        from_gates: its output projection.
    """
    gates = to_gates(x)
    if type(module.act_fn) is SILU and not is_hooked(module.act_fn):
        return from_gates(apply(SiluProduct, gates))
    gate, up = gates.chunk(2, -1)
    return from_gates(module.act_fn(gate) * up)


def apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """The result of an autograd function; without gradients, without what `Function.apply` adds to it on the host."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_Unused(), *inputs)


class _Unused:
    """The context of a function whose backward pass never runs."""

    save_for_backward = mark_dirty = staticmethod(lambda *tensors: None)


class Rotation(torch.autograd.Function):
    """Rotary embedding of the first heads of states `[B, T, heads, size]`; the others stay. A backward pass needs the angles only.

    Inputs: states, cosine and sine of the angles, `[B or 1, T, size]`, and how many heads are turned.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        return rotated(states, cos, sin, turned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotated(gradient, cos, sin, ctx.turned, back=True), None, None, None


def rotated(states: Tensor, cos: Tensor, sin: Tensor, turned: int, back: bool = False) -> Tensor:
    """Turns the pairs of coordinates i and i + size / 2 of the first heads, or turns them back.

    PyTorch's operators round as `transformers` does; the kernel on GPUs rounds once.
    """
    if kernels.takes_heads(states):
        return kernels.rotate(states, cos, sin, turned, back)
    found = states.new_empty(states.shape)
    (part, rest), (of_part, of_rest) = (x.split((turned, x.shape[2] - turned), 2) for x in (states, found))
    (first, second), (below, above) = part.chunk(2, -1), sin.unsqueeze(2).chunk(2, -1)
    torch.mul(part, cos.unsqueeze(2), out=of_part)
    of_first, of_second = of_part.chunk(2, -1)
    if back:  # by the transposed matrix
        of_first.add_(second * above)
        of_second.sub_(first * below)
    else:
        of_first.sub_(second * below)
        of_second.add_(first * above)
    of_rest.copy_(rest)
    return found


class SiluProduct(torch.autograd.Function):
    """`silu(gate) * up` of `[gate, up]` `[..., 2 I]`. Keeps its input for the backward pass, and no `silu(gate)`."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor) -> Tensor:
        ctx.save_for_backward(gates)
        if kernels.takes_states(gates):
            return kernels.silu_product(gates)
        gate, up = gates.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gates,) = ctx.saved_tensors
        if kernels.takes_states(gates):
            return kernels.silu_product_backward(gradient, gates)
        (gate, up), found = gates.chunk(2, -1), torch.empty_like(gates)
        of_gate, of_up = found.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        torch.mul(gradient, F.silu(gate), out=of_up)
        return found
