"""LoRA products in the data type of the base model, over float32 factors.

peft converts the input of every adapted layer to float32, and multiplies, scales and adds in float32. With a bfloat16 base, this is
most of the elementwise traffic of a forward pass and a large part of what is kept for the backward pass. `compute_in_base_dtype`
makes it

    out = s (x A^T) B^T
    out += x W^T          (one fused operator)

- The factors stay float32. A forward pass rounds all of them to the base's type in one operator; gradients reach the float32 factors.
- The product with a frozen `nn.Linear` comes last. Nothing of the last layer of a block is saved after it, so that recomputing a block
  (activation checkpointing) ends before the largest product of that layer.
- In the families of `blocks.py`, layers that read the same input (q, k, v; gate, up) share one product with the stacked A and one saved
  input, and write their outputs side by side.
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
from firedistill.models.states import is_hooked, trunk, unwrap


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
        without_head = trunk(unwrap(model))
        without_head.register_forward_pre_hook(partial(_round_all, found))
        without_head.register_forward_hook(partial(_forget_all, found), always_call=True)
    return model


def computes_in_base_dtype(model: PeftModel) -> bool:
    return any(isinstance(module, LoraLayer) and "forward" in vars(module) for module in model.modules())


class Lora(NamedTuple):
    """A layer whose one active adapter adds `s dropout(x) A^T B^T` and nothing else.

    Attributes:
        first, second: A `[r, in]` and B `[out, r]`, float32.
        scale: s.
        dropout: None where nothing is dropped.
        is_linear: whether the base is a frozen `nn.Linear` without hooks.
    """

    base: Any
    first: Tensor
    second: Tensor
    scale: float
    dropout: nn.Module | None
    is_linear: bool

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
        base, drops = layer.base_layer, layer.training and not isinstance(dropout, nn.Identity)
        return Lora(base, first, second, layer.scaling[name], dropout if drops else None, _is_frozen_linear(base))


class Stack(NamedTuple):
    """Layers that read the same tensor, with their factors in its type.

    Attributes:
        first: A of each, stacked, `[R, in]`; R is the sum of their ranks.
        second: B of each, `[out_i, r_i]`.
    """

    layers: list[Lora]
    first: Tensor
    second: list[Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """What the layers compute of `x` `[..., in]`, side by side, `[..., sum of out_i]`."""
        rows, bases = x.reshape(-1, x.shape[-1]), [layer.base for layer in self.layers]
        dropout, factors = self.layers[0].dropout, [factor for layer in self.layers for factor in (layer.first, layer.second)]
        read = rows if dropout is None else dropout(rows)
        if self.layers[0].is_linear:
            sums = blocks.apply(_LowRank, read, self, [base.bias for base in bases], *factors)
            sums = blocks.apply(_AddProducts, sums, rows, *(base.weight for base in bases))
        else:
            sums = bases[0](rows) + blocks.apply(_LowRank, read, self, [None], *factors)
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
            names = {name for names in blocks.PROJECTIONS[part] for name in names}
            if blocks.is_known(parent, kind) and set(layers) == names and _has_own_forward(parent):
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
            fits = self.function is blocks.gated or self.parent.config._attn_implementation in ("sdpa", NAME)
            if fits and all(map(_is_one_product, groups.values())):
                return groups
        return {(name,): [lora] for name, lora in found.items()}

    def is_together(self, products: dict[Sequence[str], list[Lora]]) -> bool:
        return bool(products) and tuple(products) == tuple(self.groups)


def _has_own_forward(parent: Any) -> bool:
    """Whether the module computes what its class says, perhaps through the block of an earlier adapter."""
    replaced = vars(parent).get("forward")
    return replaced is None or isinstance(getattr(replaced, "__self__", None), Block)


def _has_two_bytes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this module computes inputs of this type."""
    return dtype.itemsize == 2 and not torch.is_autocast_enabled(device.type)


def _is_frozen_linear(base: nn.Module) -> bool:
    if type(base) is not nn.Linear or is_hooked(base):
        return False
    return not (base.weight.requires_grad or base.bias is not None and base.bias.requires_grad)


def _is_one_product(layers: list[Lora]) -> bool:
    """Whether the layers read the same states and have one scale."""
    return len({layer.scale for layer in layers}) == 1 and all(layer.dropout is None and layer.is_linear for layer in layers)


def _round_all(of_model: list[Block], trunk: Any, inputs: Any) -> None:
    weight = trunk.get_input_embeddings().weight
    of_blocks = [block.products(weight.dtype, weight.device) for block in of_model]
    together = [layers for products in of_blocks for layers in products.values()]
    stacks = iter(_rounded(weight.dtype, together) if together else [])
    for block, products in zip(of_model, of_blocks, strict=True):
        of_block = {names: next(stacks) for names in products}
        block.forget()  # an interrupted pass does not
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
    shapes: list[tuple[int, ...]] = []
    for layers in products:
        shapes.append((sum(len(layer.first) for layer in layers), layers[0].first.shape[1]))
        shapes += [layer.second.shape for layer in layers]
    sizes = [rows * columns for rows, columns in shapes]
    parts = torch.empty(sum(sizes), dtype=dtype, device=products[0][0].first.device).split(sizes)
    views = iter([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
    found, targets, sources = [], [], []
    for layers in products:
        stack = Stack(layers, next(views), [next(views) for _ in layers])
        found.append(stack)
        # As contiguous as their sources, so that one kernel copies all on a GPU
        targets += [*_split(stack.first, [layer.first for layer in layers], 0), *stack.second]
        sources += [*(layer.first for layer in layers), *(layer.second for layer in layers)]
    torch._foreach_copy_(targets, sources)
    return found


def _split(tensor: Tensor, parts: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """Views of as many rows (`dim` 0) or columns (1) as each part has rows."""
    return tensor.split([len(part) for part in parts], dim) if len(parts) > 1 else [tensor]


class _LowRank(torch.autograd.Function):
    """`s (rows A^T) B^T + bias` of each layer of a `Stack`, side by side, with gradients for A and B before rounding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stack: Stack, biases: Sequence[Tensor | None], *factors: Tensor) -> Tensor:
        low = rows @ stack.first.t()
        ctx.save_for_backward(rows, low, stack.first, *stack.second)
        ctx.scale, ctx.first = stack.layers[0].scale, factors[::2]
        found = rows.new_empty(len(rows), sum(map(len, stack.second)))
        parts = zip(_split(found, stack.second, 1), _split(low, ctx.first, 1), stack.second, biases, strict=True)
        for part, of_low, second, bias in parts:
            if bias is None:
                part.addmm_(of_low, second.t(), beta=0, alpha=ctx.scale)
            else:
                torch.addmm(bias, of_low, second.t(), alpha=ctx.scale, out=part)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, low, first, *second = ctx.saved_tensors
        of_low, of_second = torch.empty_like(low), []
        gradients, lows, of_lows = _split(gradient, second, 1), _split(low, ctx.first, 1), _split(of_low, ctx.first, 1)
        for of_part, part, found, b in zip(gradients, lows, of_lows, second, strict=True):
            torch.addmm(part, of_part, b, beta=0, alpha=ctx.scale, out=found)
            of_second.append(torch.addmm(b, of_part.t(), part, beta=0, alpha=ctx.scale).float())
        of_first = _split((of_low.t() @ rows).float(), ctx.first, 0)
        of_factors = [factor for of_layer in zip(of_first, of_second, strict=True) for factor in of_layer]
        return of_low @ first if ctx.needs_input_grad[0] else None, None, None, *of_factors


class _AddProducts(torch.autograd.Function):
    """`sums + [rows W_1^T, rows W_2^T, ...]` side by side, in place, for frozen weights.

    The weights are not among what a backward pass saves, so that recomputing a block ends before this product.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        ctx.mark_dirty(sums)
        for part, weight in zip(_split(sums, weights, 1), weights, strict=True):
            part.addmm_(rows, weight.t())
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_rows = None
        if ctx.needs_input_grad[1]:
            for part, weight in zip(_split(gradient, ctx.weights, 1), ctx.weights, strict=True):
                of_rows = part @ weight if of_rows is None else of_rows.addmm_(part, weight)
        return gradient, of_rows, *(None for _ in ctx.weights)
