"""The adapter merged into copies of the projections for the duration of a call; the base weights are never written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners import lora
from torch import Tensor, nn
from transformers import PreTrainedModel

from firedistill.models import kernels
from firedistill.models.attention import NAME, multiplies_bfloat16
from firedistill.models.blocks import PROJECTIONS, is_known
from firedistill.models.states import is_hooked, modules_within
from firedistill.rollouts.layers import FusedLayer


def mergeable_layers(model: nn.Module) -> list[tuple[nn.Module, str, lora.Linear]]:
    """The adapted projections for which `W + s B A` is one plain matrix: parent module, name within it, layer.

    Other layers stay unmerged: quantized or sharded weights, variants such as DoRA, adapters with a bias, disabled adapters, adapted
    layers within another one.
    """
    return [
        (parent, name, layer)
        for parent, name, layer in modules_within(model, lora.LoraLayer)
        if type(layer) is lora.Linear and _is_mergeable(layer)
    ]


def _is_mergeable(layer: lora.Linear) -> bool:
    base, adapters = _base(layer), _active(layer)
    return (
        type(base) is nn.Linear
        and type(base.weight.data) is Tensor
        and base.weight.is_floating_point()
        and bool(adapters)
        and not (layer.disable_adapters or layer.merged)
        and not any(name in layer.lora_variant or layer.lora_bias[name] for name in adapters)
        and not (is_hooked(layer) or is_hooked(base))
    )


def _base(layer: lora.Linear) -> nn.Linear:
    """The adapted layer; peft declares only that it is some module."""
    return cast(nn.Linear, layer.base_layer)


def _active(layer: lora.Linear) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def merged_bytes(model: nn.Module) -> int:
    """Bytes of the copies of the adapted projections."""
    return sum(_base(layer).weight.nbytes for _, _, layer in mergeable_layers(model))


@contextmanager
@torch.no_grad()
def merged_adapter(
    model: PreTrainedModel | PeftModel, copies: dict[nn.Module, nn.Module] | None = None, fuse_layers: bool = False
) -> Iterator[None]:
    """Run `model` with its adapter merged, from the present values of base and adapter.

    Each adapted layer is replaced by a plain one with `W + s B A`, computed in float32 and rounded once to the type of `W`. The same
    layers are restored afterwards, also after an exception. Gradients do not flow through the copies. Where the CPU's matrix kernels
    have their own block layout, the copies and a copy of the output projection use it.

    Args:
        copies: where to keep the plain layers, by the layer that they stand for, or by the first of several. A later call with the same
            mapping writes the present values into the same tensors, except where they are in the CPU's own layout.
        fuse_layers: replace decoder layers as a whole (`layers.py`) where all of their projections can be merged.
    """
    kept = {} if copies is None else copies
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        merged: dict[nn.Module, nn.Module] = {}  # the plain layer with the rows of each adapter
        mergeable = mergeable_layers(model)
        whole = fusable_layers(model, mergeable) if fuse_layers else []
        for _, _, layer in whole:
            for adapters in projections(layer):
                merged |= dict.fromkeys(adapters, merged_linear(adapters, kept))
        # Within layers that will be fused, too, so that nothing is rounded for their adapters (`models/adapter.py`)
        for parent, name, adapter in mergeable:
            if adapter not in merged:
                merged[adapter] = merged_linear([adapter], kept)
            replaced.append((parent, name, adapter))
            replace_child(parent, name, merged[adapter])
        for parent, name, layer in whole:
            replaced.append((parent, name, layer))
            replace_child(parent, name, FusedLayer(layer))
        head = model.get_output_embeddings() if replaced else None
        if type(head) is nn.Linear and can_pack(head.weight) and not is_hooked(head):
            kept[head] = PackedLinear(head.weight, head.bias)
            for parent, name in [(p, name) for p in model.modules() for name, module in p.named_children() if module is head]:
                replaced.append((parent, name, head))
                replace_child(parent, name, kept[head])
        yield
    finally:
        for parent, name, layer in replaced:
            replace_child(parent, name, layer)


def replace_child(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one that a parent has under this name."""
    vars(parent)["_modules"][name] = module  # assigning the attribute takes several times as long


def fusable_layers(
    model: nn.Module, mergeable: Sequence[tuple[nn.Module, str, lora.Linear]] | None = None
) -> list[tuple[nn.Module, str, nn.Module]]:
    """The decoder layers that `FusedLayer` can replace: parent module, name within it, layer.

    Args:
        mergeable: what `mergeable_layers` returns, where it is known.
    """
    adapters = {adapter for _, _, adapter in (mergeable_layers(model) if mergeable is None else mergeable)}
    return [
        (parent, name, layer)
        for parent, name, layer in modules_within(model, lora.LoraLayer)
        if is_known(layer, "DecoderLayer") and _is_fusable(layer, adapters)
    ]


def _is_fusable(layer: nn.Module, mergeable: set[lora.Linear]) -> bool:
    config: Any = cast(Any, layer).self_attn.config
    return (
        config._attn_implementation in ("sdpa", NAME)
        and not any(is_hooked(module) for module in (layer, *(inner for _, _, inner in modules_within(layer, lora.LoraLayer))))
        and all(
            mergeable.issuperset(adapters)
            and len({(_base(adapter).bias is None, _base(adapter).weight.dtype) for adapter in adapters}) == 1
            for adapters in projections(layer)
        )
    )


def projections(layer: Any) -> list[list[lora.Linear]]:
    """The projections of a decoder layer; those of the same states together."""
    return [[getattr(getattr(layer, part), name) for name in names] for part, groups in PROJECTIONS.items() for names in groups]


def merged_linear(adapters: Sequence[lora.Linear], kept: dict[nn.Module, nn.Module]) -> nn.Module:
    """One plain layer with the rows of all of these; the one in `kept` for them where it fits."""
    weights, copy = [_base(adapter).weight for adapter in adapters], kept.get(adapters[0])
    bias = None if _base(adapters[0]).bias is None else torch.cat([_base(adapter).bias for adapter in adapters])
    rows = [len(weight) for weight in weights]
    shape, device = (sum(rows), weights[0].shape[1]), weights[0].device
    if type(copy) is nn.Linear and copy.weight.shape == shape and copy.weight.device == device:
        merged = copy.weight.data
        if bias is not None:
            copy.bias.copy_(bias)
    else:
        copy, merged = None, weights[0].data.new_empty(shape)
    for part, adapter in zip(merged.split(rows), adapters, strict=True):
        merge_into(part, adapter)
    if copy is None:
        kept[adapters[0]] = copy = _linear(merged, bias)
    return copy


@torch.no_grad()
def merged_weight(layer: lora.Linear) -> Tensor:
    """`W + s B A` in the type of W."""
    found = torch.empty_like(_base(layer).weight.data, memory_format=torch.contiguous_format)
    merge_into(found, layer)
    return found


def merge_into(found: Tensor, layer: lora.Linear) -> None:
    """Write `W + s B A` to a tensor of the shape and type of W; it is rounded once."""
    base, names = _base(layer).weight.data, _active(layer)
    factors: list[Any] = [(layer.lora_B[name].weight, layer.lora_A[name].weight, layer.scaling[name]) for name in names]
    second, first, scale = factors[0]
    if len(factors) == 1 and kernels.takes_product(base, second, first):
        kernels.add_product(base, second, first, scale, found)
        return
    total = base.to(torch.promote_types(base.dtype, torch.float32), copy=True)
    for second, first, scale in factors:
        total.addmm_(second.to(total.dtype), first.to(total.dtype), alpha=scale)
    found.copy_(total)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    if can_pack(weight):
        return PackedLinear(weight, bias)
    rows, columns = weight.shape
    plain = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = cast(nn.Parameter, None if bias is None else nn.Parameter(bias, requires_grad=False))  # torch declares one
    return plain.eval()


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels that `torch.compile` uses on the CPU exist for this weight."""
    return (
        weight.device.type == "cpu"
        and type(weight.data) is Tensor
        and weight.dtype == torch.bfloat16
        and multiplies_bfloat16()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight has the block layout of the CPU's bfloat16 kernels.

    `nn.Linear` converts to that layout for every product. The results are the same.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.packed, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias
        self.training = False

    def forward(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")
