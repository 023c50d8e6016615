"""LoRA products in the data type of the base model, over float32 factors.

peft converts the input of every adapted layer to float32, and multiplies, scales and adds in float32. With a bfloat16 base, this is
most of the elementwise traffic of a forward pass and a large part of what is kept for the backward pass. `compute_in_base_dtype`
makes it

    h = x A^T
    out = s h B^T
    out += x W^T          (one fused operator)

- The factors stay float32. A forward pass rounds all of them to the base's type in one operator; gradients reach the float32 factors.
- The product with the base comes last. Nothing of the last layer of a block is saved after it, so that recomputing a block
  (activation checkpointing) ends before the largest product of that layer.
- Layers that read the same input (q, k, v; gate, up) share one product `x [A_q; A_k; A_v]^T` and one saved input.
- peft's own arithmetic runs wherever inputs and factors have the same type (a float32 base), and for everything but plain LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from firedistill.models.states import unwrap

# Projections that read one tensor wherever a module has all of them
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def compute_in_base_dtype(model: PeftModel) -> PeftModel:
    """Let the LoRA layers of `model` compute in the type of their inputs, in place; a second call changes nothing.

    The parameters keep their names, shapes and types, and so does what is saved.
    """
    groups = []
    for parent in model.modules():
        layers = {name: m for name, m in parent.named_children() if isinstance(m, LoraLayer) and "forward" not in vars(m)}
        together = [{name: layers.pop(name) for name in names if name in layers} for names in SHARED_INPUTS]
        alone = [{name: layer} for name, layer in layers.items()]
        groups += [SharedInput(parent, members) for members in [*together, *alone] if members]
    if groups:
        trunk = unwrap(model).base_model
        trunk.register_forward_pre_hook(partial(_round_all, groups))
        trunk.register_forward_hook(partial(_forget_all, groups), always_call=True)
    return model


class SharedInput:
    """LoRA layers that read the same tensor.

    Args:
        parent: the module that has the layers.
        layers: by their names within it.

    Attributes:
        rounded: the stacked factors A, `[sum r, in]`, and the factors B, `[out, r]`, of the present pass of the whole trunk. None
            outside of one, as when the backward pass recomputes a layer; the layer rounds its factors by itself then.
        read: the input, its version, and `x A^T` `[M, r]` of each layer that has yet to use it.
    """

    def __init__(self, parent: nn.Module, layers: dict[str, Any]):
        self.parent, self.names, self.layers = parent, list(layers), list(layers.values())
        self.rounded: list[Tensor] | None = None
        self.read: tuple[Tensor, int, list[Tensor | None]] | None = None
        for index, layer in enumerate(self.layers):
            layer.forward = partial(self.forward, index)

    def forward(self, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the `forward` of the layer at this index does."""
        layer = self.layers[index]
        known = self.rounded is not None and self.rounded[0].dtype == x.dtype  # then `computes` has held for this pass
        if args or kwargs or not (known or self.computes(x.dtype, x.device)):
            return type(layer).forward(layer, x, *args, **kwargs)
        product, second = self.product(index, x)
        base, rows, scale = layer.base_layer, x.reshape(-1, x.shape[-1]), layer.scaling[layer.active_adapters[0]]
        if type(base) is not nn.Linear or base._forward_hooks or base._forward_pre_hooks:
            out = base(rows).addmm(product, second.t(), alpha=scale)
        else:  # with beta 0, the values of the first argument are not read
            start, beta = (base.weight.t()[:1], 0) if base.bias is None else (base.bias, 1)
            out = torch.addmm(start, product, second.t(), beta=beta, alpha=scale).addmm_(rows, base.weight.t())
        return out.view(*x.shape[:-1], -1)

    def is_in_place(self) -> bool:
        """Whether the model has these layers now, and not others in their stead (`rollouts/merging.py`)."""
        return all(getattr(self.parent, name) is layer for name, layer in zip(self.names, self.layers, strict=True))

    def computes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether inputs of this type go through the fused products."""
        return (
            dtype.itemsize == 2
            and not torch.is_autocast_enabled(device.type)
            and all(_is_plain(layer) for layer in self.layers)
            and all(factor.dtype == torch.float32 for factor in self.factors())
        )

    def factors(self) -> list[Tensor]:
        """A of each layer, then B of each layer."""
        pairs = [
            (layer.lora_A[name].weight, layer.lora_B[name].weight) for layer in self.layers for name in layer.active_adapters
        ]
        return [a for a, _ in pairs] + [b for _, b in pairs]

    def product(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x A^T` `[M, r]` and B `[out, r]` of a layer, in the type of `x`."""
        if self.rounded is None or self.rounded[0].dtype != x.dtype:
            (stacked, *seconds) = _rounded(x.dtype, [self])[0]
        else:
            (stacked, *seconds) = self.rounded
        layer, ranks, rows = self.layers[index], [second.shape[1] for second in seconds], x.reshape(-1, x.shape[-1])
        dropout = layer.lora_dropout[layer.active_adapters[0]]
        if layer.training and not isinstance(dropout, nn.Identity):  # each layer drops other elements
            return dropout(rows) @ stacked.split(ranks)[index].t(), seconds[index]
        if self.read is None or self.read[0] is not x or self.read[1] != x._version or self.read[2][index] is None:
            self.read = x, x._version, list((rows @ stacked.t()).split(ranks, dim=1))
        waiting = self.read[2]
        found, waiting[index] = waiting[index], None
        if all(other is None for other in waiting):
            self.read = None
        return cast(Tensor, found), seconds[index]


def _is_plain(layer: Any) -> bool:
    """Whether one active adapter adds `s x A^T B^T` and nothing else."""
    names = layer.active_adapters
    return (
        len(names) == 1
        and names[0] in layer.lora_A
        and names[0] not in layer.lora_variant
        and not (layer.disable_adapters or layer.merged or layer.lora_bias[names[0]])
    )


def _round_all(groups: list[SharedInput], trunk: Any, inputs: Any) -> None:
    weight = trunk.get_input_embeddings().weight
    active = [group for group in groups if group.is_in_place() and group.computes(weight.dtype, weight.device)]
    if active:
        for group, rounded in zip(active, _rounded(weight.dtype, active), strict=True):
            group.rounded = rounded


def _forget_all(groups: list[SharedInput], trunk: Any, inputs: Any, output: Any) -> None:
    for group in groups:
        group.rounded = group.read = None


def _rounded(dtype: torch.dtype, groups: Sequence[SharedInput]) -> list[list[Tensor]]:
    """Per group, the stacked factors A and each factor B in this type, as functions of the factors."""
    factors, shapes = [], []
    for group in groups:
        parts = group.factors()
        first, second = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        factors += parts
        shapes.append([torch.Size([sum(map(len, first)), first[0].shape[1]]), *(part.shape for part in second)])
    found = iter(_Round.apply(dtype, [shape for of_group in shapes for shape in of_group], *factors))
    return [[next(found) for _ in of_group] for of_group in shapes]


class _Round(torch.autograd.Function):
    """Tensors in another type and, end to end, in other shapes; one operator for all of them, and one for their gradients."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, shapes: list[torch.Size], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(_converted(tensors, dtype, shapes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_converted(gradients, torch.float32, ctx.shapes)


def _converted(tensors: Sequence[Tensor], dtype: torch.dtype, shapes: Sequence[torch.Size]) -> list[Tensor]:
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    torch._foreach_copy_(_views(flat, [tensor.shape for tensor in tensors]), list(tensors))
    return _views(flat, shapes)


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)]
