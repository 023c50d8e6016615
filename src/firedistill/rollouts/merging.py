"""The adapter merged into copies of the projections for the length of a call; the base weights are never written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners import lora
from torch import Tensor, nn


def mergeable_layers(model: nn.Module) -> list[tuple[nn.Module, str, lora.Linear]]:
    """The adapted projections for which `W + s B A` is one plain matrix: parent module, name within it, layer.

    Others stay as they are: quantised or sharded weights, variants such as DoRA, adapters with a bias, disabled adapters.
    """
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is lora.Linear and _is_mergeable(layer)
    ]


def _is_mergeable(layer: lora.Linear) -> bool:
    base, adapters = layer.base_layer, _active(layer)
    return (
        type(base) is nn.Linear
        and type(base.weight.data) is Tensor
        and base.weight.is_floating_point()
        and bool(adapters)
        and not (layer.disable_adapters or layer.merged)
        and not any(name in layer.lora_variant or layer.lora_bias[name] for name in adapters)
        and not any(
            hasattr(module, "_hf_hook") or module._forward_hooks or module._forward_pre_hooks for module in (layer, base)
        )
    )


def _active(layer: lora.Linear) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def merged_bytes(model: nn.Module) -> int:
    """What the copies take: one more of every adapted projection."""
    return sum(layer.base_layer.weight.nbytes for _, _, layer in mergeable_layers(model))


@contextmanager
@torch.no_grad()
def merged_adapter(model: nn.Module) -> Iterator[None]:
    """Run `model` with its adapter merged, from the values that base and adapter have now.

    Each adapted layer is replaced by a plain one with `W + s B A`, computed in float32 and rounded once to the type of `W`, and the
    very same layers are put back, also after an exception. Gradients cannot flow through the copies.
    """
    layers = mergeable_layers(model)
    copies = {}
    try:
        for parent, name, layer in layers:
            if layer not in copies:  # a layer may have several parents
                copies[layer] = _merged(layer)
            setattr(parent, name, copies[layer])
        yield
    finally:
        for parent, name, layer in layers:
            setattr(parent, name, layer)


def _merged(layer: lora.Linear) -> nn.Linear:
    base = layer.base_layer
    weight = base.weight.float()
    for name in _active(layer):
        weight = weight + layer.get_delta_weight(name)
    plain = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.to(base.weight.dtype), requires_grad=False)
    plain.bias = base.bias
    return plain.eval()
