"""LoRA products in the data type of the base model, over float32 factors.

peft converts the input of every adapted layer to float32, and multiplies, scales and adds in float32. With a bfloat16 base, this is
most of the elementwise traffic of a forward pass and a large part of what is kept for the backward pass. `compute_in_base_dtype`
makes it

    out = s (x A^T) B^T
    out += x W^T          (one fused operator)

- The factors stay float32. A forward pass rounds all of them to the base's type in one operator; gradients reach the float32 factors.
- The product with the base comes last. Nothing of the last layer of a block is saved after it, so that recomputing a block
  (activation checkpointing) ends before the largest product of that layer.
- In the families of `blocks.py`, layers that read the same input (q, k, v; gate, up) share one product with the stacked A, one with
  the block-diagonal B, and one saved input.
- peft's own arithmetic runs wherever inputs and factors have the same type (a float32 base), and for everything but plain LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from firedistill.models import blocks
from firedistill.models.attention import NAME
from firedistill.models.states import is_hooked, unwrap


def compute_in_base_dtype(model: PeftModel) -> PeftModel:
    """Let the LoRA layers of `model` compute in the type of their inputs, in place; a second call changes nothing.

    The parameters keep their names, shapes and types, and so does what is saved.
    """
    found = []
    for parent in model.modules():
        layers = {name: m for name, m in parent.named_children() if isinstance(m, LoraLayer) and "forward" not in vars(m)}
        if layers:
            found.append(Block(parent, layers))
    if found:
        trunk = unwrap(model).base_model
        trunk.register_forward_pre_hook(partial(_round_all, found))
        trunk.register_forward_hook(partial(_forget_all, found), always_call=True)
    return model


class Lora(NamedTuple):
    """A layer whose one active adapter adds `s dropout(x) A^T B^T` and nothing else.

    Attributes:
        first, second: A `[r, in]` and B `[out, r]`, float32.
        scale: s.
        dropout: None where nothing is dropped.
    """

    base: nn.Module
    first: Tensor
    second: Tensor
    scale: float
    dropout: nn.Module | None

    @staticmethod
    def of(layer: Any) -> Lora | None:
        """None if the layer computes something else."""
        names = layer.active_adapters
        if len(names) != 1 or layer.disable_adapters or layer.merged:
            return None
        name = names[0]
        if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name]:
            return None
        first, second, dropout = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_dropout[name]
        if first.dtype != torch.float32 or second.dtype != torch.float32:
            return None
        drops = layer.training and not isinstance(dropout, nn.Identity)
        return Lora(layer.base_layer, first, second, layer.scaling[name], dropout if drops else None)


class Stack(NamedTuple):
    """Layers that read the same tensor as one product, rounded to its type; R is the sum of their ranks.

    Attributes:
        first: A of each, stacked, `[R, in]`.
        second: B of each on the block diagonal, `[out, R]`.
        bias: `[out]` of the base; None where it has none.
    """

    layers: list[Lora]
    first: Tensor
    second: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """What the layers compute of `x` `[..., in]`, side by side, `[..., out]`."""
        rows, (base, _, _, scale, dropout) = x.reshape(-1, x.shape[-1]), self.layers[0]
        read = rows if dropout is None else dropout(rows)
        factors = [factor for layer in self.layers for factor in (layer.first, layer.second)]
        sums = blocks.apply(_LowRank, read, self.bias, self.first, self.second, scale, *factors)
        if _is_frozen_linear(base):
            sums = blocks.apply(_AddProducts, sums, rows, *(layer.base.weight for layer in self.layers))
        else:
            sums = base(rows) + sums
        return sums.view(*x.shape[:-1], -1)


class Block:
    """A module that has LoRA layers, such as the attention or the MLP of a decoder layer.

    Args:
        parent: the module.
        layers: by their names within it.

    Attributes:
        dtype: of the present pass of the whole trunk. None outside of one, as when the backward pass recomputes a layer; factors are
            rounded when they are used then.
        alone: in such a pass, the layers that are products of their own.
        together: in such a pass, the products of an attention or an MLP that `blocks.py` computes.
    """

    def __init__(self, parent: Any, layers: dict[str, Any]):
        self.parent, self.layers = parent, layers
        self.function: Callable[..., Any] | None = None
        self.groups: Sequence[Sequence[str]] = ()
        for kind, part, function in (("Attention", "self_attn", blocks.attend), ("MLP", "mlp", blocks.gated)):
            if blocks.is_known(parent, kind) and set(layers) == {name for names in blocks.PROJECTIONS[part] for name in names}:
                self.function, self.groups = function, blocks.PROJECTIONS[part]
                parent.forward = self.forward
        for name, layer in layers.items():
            layer.forward = partial(self.forward_alone, name)
        self.forget()

    def forget(self) -> None:
        """End a pass of the trunk."""
        self.dtype: torch.dtype | None = None
        self.alone: dict[str, Stack] = {}
        self.together: list[Stack] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the `forward` of the module does."""
        x: Tensor = args[0] if args else kwargs["x" if self.function is blocks.gated else "hidden_states"]
        together = self.together
        if self.dtype != x.dtype:
            products = self.products(x.dtype, x.device)
            together = _rounded(x.dtype, list(products.values())) if self.is_together(products) else []
        if not together:
            return type(self.parent).forward(self.parent, *args, **kwargs)
        return cast(Any, self.function)(self.parent, *together, *args, **kwargs)

    def forward_alone(self, name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the `forward` of the layer of this name does."""
        layer, stack = self.layers[name], self.alone.get(name)
        if args or kwargs:
            return type(layer).forward(layer, x, *args, **kwargs)
        if stack is None or self.dtype != x.dtype:
            found = Lora.of(layer) if _has_two_bytes(x.dtype, x.device) else None
            if found is None:
                return type(layer).forward(layer, x)
            (stack,) = _rounded(x.dtype, [[found]])
        return stack(x)

    def products(self, dtype: torch.dtype, device: torch.device) -> dict[Sequence[str], list[Lora]]:
        """The layers that add a product to inputs of this type, by their names; those of one product together."""
        if not _has_two_bytes(dtype, device):
            return {}
        modules, found = vars(self.parent)["_modules"], {}
        for name, layer in self.layers.items():
            # Sampling puts merged layers in their stead (`rollouts/merging.py`).
            if modules[name] is layer and (lora := Lora.of(layer)) is not None:
                found[name] = lora
        if self.groups and len(found) == len(self.layers) and not any(map(is_hooked, self.layers.values())):
            groups = {names: [found[name] for name in names] for names in self.groups}
            if self.parent.config._attn_implementation in ("sdpa", NAME) and all(map(_is_one_product, groups.values())):
                return groups
        return {(name,): [lora] for name, lora in found.items()}

    def is_together(self, products: dict[Sequence[str], list[Lora]]) -> bool:
        return bool(products) and tuple(products) == tuple(self.groups)


def _has_two_bytes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this module computes inputs of this type."""
    return dtype.itemsize == 2 and not torch.is_autocast_enabled(device.type)


def _is_frozen_linear(base: nn.Module) -> bool:
    if type(base) is not nn.Linear or is_hooked(base):
        return False
    return not (base.weight.requires_grad or base.bias is not None and base.bias.requires_grad)


def _is_one_product(layers: list[Lora]) -> bool:
    return (
        len({layer.scale for layer in layers}) == 1
        and all(layer.dropout is None and _is_frozen_linear(layer.base) for layer in layers)
        and len({layer.base.bias is None for layer in layers}) == 1
    )


def _round_all(of_model: list[Block], trunk: Any, inputs: Any) -> None:
    weight = trunk.get_input_embeddings().weight
    of_blocks = [block.products(weight.dtype, weight.device) for block in of_model]
    together = [layers for products in of_blocks for layers in products.values()]
    stacks = iter(_rounded(weight.dtype, together) if together else [])
    for block, products in zip(of_model, of_blocks, strict=True):
        of_block = {names: next(stacks) for names in products}
        block.dtype = weight.dtype
        if block.is_together(products):
            block.together = list(of_block.values())
        else:
            block.alone = {names[0]: stack for names, stack in of_block.items()}


def _forget_all(of_model: list[Block], trunk: Any, inputs: Any, output: Any) -> None:
    for block in of_model:
        block.forget()


@torch.no_grad()
def _rounded(dtype: torch.dtype, products: Sequence[list[Lora]]) -> list[Stack]:
    """The stack of the layers of each product; one operator rounds all factors."""
    shapes: list[tuple[int, int]] = []
    for layers in products:
        rank = sum(len(layer.first) for layer in layers)
        shapes += [(rank, layers[0].first.shape[1]), (sum(len(layer.second) for layer in layers), rank)]
    sizes = [rows * columns for rows, columns in shapes]
    parts = torch.zeros(sum(sizes), dtype=dtype, device=products[0][0].first.device).split(sizes)
    stacks = iter([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
    found, targets, sources = [], [], []
    for layers in products:
        first, second = next(stacks), next(stacks)
        found.append(Stack(layers, first, second, _bias(layers)))
        targets += _parts(first, second, [layer.second.shape for layer in layers])
        for layer in layers:
            sources += [layer.first, layer.second]
    torch._foreach_copy_(targets, sources)
    return found


def _bias(layers: list[Lora]) -> Tensor | None:
    biases: list[Any] = [layer.base.bias for layer in layers if _is_frozen_linear(layer.base)]
    if not biases or biases[0] is None:
        return None
    return torch.cat(biases) if len(biases) > 1 else biases[0]


def _parts(first: Tensor, second: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of the part of each layer: of A `[r, in]`, and of B `[out, r]`, whose shapes are given."""
    if len(shapes) == 1:
        return [first, second]
    found, row, column = [], 0, 0
    for rows, columns in shapes:
        found += [first[column : column + columns], second[row : row + rows, column : column + columns]]
        row, column = row + rows, column + columns
    return found


class _LowRank(torch.autograd.Function):
    """`s (rows A^T) B^T + bias` `[M, out]` by the rounded factors of a `Stack`, with gradients for A and B before rounding."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, scale: float, *factors: Tensor
    ) -> Tensor:
        low = rows @ first.t()
        ctx.save_for_backward(rows, low, first, second)
        ctx.scale, ctx.shapes = scale, [factor.shape for factor in factors[1::2]]
        # With beta 0, the values of the first argument are not read.
        start, beta = (second.t()[:1], 0) if bias is None else (bias, 1)
        return torch.addmm(start, low, second.t(), beta=beta, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, low, first, second = ctx.saved_tensors
        of_low = torch.addmm(low, gradient, second, beta=0, alpha=ctx.scale)
        of_second = torch.addmm(second, gradient.t(), low, beta=0, alpha=ctx.scale)
        of_factors = [part.float() for part in _parts((of_low.t() @ rows).float(), of_second, ctx.shapes)]
        return of_low @ first if ctx.needs_input_grad[0] else None, None, None, None, None, *of_factors


class _AddProducts(torch.autograd.Function):
    """`sums + [rows W_1^T, rows W_2^T, ...]` side by side, in place, for frozen weights.

    The weights are not among what a backward pass saves, so that recomputing a block ends before this product.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        ctx.mark_dirty(sums)
        for part, weight in zip(_split(sums, weights), weights, strict=True):
            part.addmm_(rows, weight.t())
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_rows = None
        if ctx.needs_input_grad[1]:
            for part, weight in zip(_split(gradient, ctx.weights), ctx.weights, strict=True):
                of_rows = part @ weight if of_rows is None else of_rows.addmm_(part, weight)
        return gradient, of_rows, *(None for _ in ctx.weights)


def _split(tensor: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensor.split([len(weight) for weight in weights], 1) if len(weights) > 1 else [tensor]
