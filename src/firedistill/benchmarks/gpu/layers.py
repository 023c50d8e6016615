"""Operations of a layer that reads one token per sequence: `models/kernels.py`, PyTorch, and what `torch.compile` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from firedistill.benchmarks import harness
from firedistill.benchmarks.gpu.kernels import captured
from firedistill.benchmarks.gpu.sizes import Setting, Shape, Work
from firedistill.benchmarks.gpu.timing import Variant, repeated, row_of, timed
from firedistill.models import kernels
from firedistill.models.attention import grouped_attention
from firedistill.rollouts.fixed import FixedLayer
from firedistill.rollouts.layers import rotated


class LayerInputs:
    """What the operations of one layer read: random, except for the mask, which hides a quarter of the columns on the left."""

    def __init__(self, shape: Shape, batch: int, columns: int, device: str):
        def random(*size: int) -> Tensor:
            return torch.randn(*size, device=device).bfloat16()

        heads, groups, size = shape.heads, shape.key_value_heads, shape.head_size
        self.projected, self.gates = random(batch, 1, heads + 2 * groups, size), random(batch, 1, 2 * shape.intermediate)
        self.query = self.projected[:, :, :heads].transpose(1, 2)
        self.keys, self.values = random(batch, groups, columns, size), random(batch, groups, columns, size)
        self.cos, self.sin = random(batch, 1, size), random(batch, 1, size)
        self.column = torch.full((1,), columns - 1, device=device)
        self.cache = FixedLayer(self.keys, self.values, self.column)
        self.visible = (torch.arange(columns, device=device) >= columns // 4).expand(batch, 1, 1, columns).contiguous()
        self.added = torch.zeros_like(self.visible, dtype=torch.bfloat16).masked_fill_(
            ~self.visible, torch.finfo(torch.bfloat16).min
        )


def by_products(query: Tensor, keys: Tensor, values: Tensor, added: Tensor, scale: float) -> Tensor:
    """`grouped_attention` written as two products and a softmax."""
    together = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    scores = (together @ keys.transpose(2, 3)).float() * scale + added
    return (scores.softmax(-1).to(values.dtype) @ values).flatten(1, 2).unsqueeze(1)


def rotate_and_attend(x: LayerInputs) -> Tensor:
    groups = x.keys.shape[1]
    both, values = x.projected.split((x.projected.shape[2] - groups, groups), 2)
    both = rotated(both, x.cos, x.sin).transpose(1, 2)
    keys, values = x.cache.update(both[:, -groups:], values.transpose(1, 2))
    return grouped_attention(both[:, :-groups], keys, values, x.added, keys.shape[-1] ** -0.5)


def silu_product(gates: Tensor) -> Tensor:
    gate, up = gates.chunk(2, -1)
    return F.silu(gate) * up


def operations(setting: Setting, x: LayerInputs) -> dict[str, Callable[[LayerInputs], Tensor]]:
    """By name; the first of each kind is the one to compare with."""
    scale = x.keys.shape[-1] ** -0.5
    compiled = {f: torch.compile(f, backend=setting.sizes.compiler, dynamic=False) for f in (by_products, silu_product)}
    # Attention alone comes first: the rotation writes to the cache that it reads.
    found: dict[str, Callable[[LayerInputs], Tensor]] = {
        "attention, PyTorch": lambda x: grouped_attention(x.query, x.keys, x.values, x.added, scale),
        "attention, torch.compile": lambda x: compiled[by_products](x.query, x.keys, x.values, x.added, scale),
    }
    if setting.is_gpu and torch.backends.cudnn.is_available():

        def by_cudnn(x: LayerInputs) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return grouped_attention(x.query, x.keys, x.values, x.added, scale)

        found["attention, cuDNN"] = by_cudnn
    has_kernels = kernels.takes_heads(x.keys)
    if has_kernels:
        found["attention, kernel"] = lambda x: kernels.one_query_attention(x.query, x.keys, x.values, x.visible, scale)
    found |= {
        "rotation and attention, PyTorch": rotate_and_attend,
        "gates, PyTorch": lambda x: silu_product(x.gates),
        "gates, torch.compile": lambda x: compiled[silu_product](x.gates),
    }
    if has_kernels:
        found |= {
            "rotation and attention, kernel": lambda x: kernels.new_token_attention(
                x.projected, x.cos, x.sin, x.keys, x.values, x.column, x.visible, scale
            ),
            "gates, kernel": lambda x: kernels.silu_product(x.gates),
        }
    return found


@torch.no_grad()
def one_token_layers(setting: Setting) -> Iterator[harness.Row]:
    """Seconds of one layer, from a graph of many. The layers of a model have their own tensors: caches do not fit into the device's."""
    sizes, shape = setting.sizes, setting.sizes.shapes["1.5b"]
    read = sizes.prompt + sizes.response
    for batch, columns in [*((batch, read) for batch in sizes.batches), (sizes.batches[1], sizes.long_prompt + sizes.response)]:
        layers = [LayerInputs(shape, batch, columns, setting.device) for _ in range(shape.layers)]
        cache: Work = [(0.0, 2.0 * layers[0].keys[..., columns // 4 :, :].nbytes)]
        variants, expected = {}, dict[str, Tensor]()
        for name, operation in operations(setting, layers[0]).items():
            try:
                found = operation(layers[0]).float()
            except Exception as error:  # of a compiler, or because there is no kernel for these shapes
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                yield row_of({"batch": batch, "columns": columns}, name, details={"error": reason})
                continue
            difference = (found - expected.setdefault(name.partition(",")[0], found)).abs().max()
            run: Callable[[], Any] = partial(repeated, partial(in_turn, operation, layers), sizes.turns)
            run = captured(run).replay if setting.is_gpu else run
            work, facts = cache if "attention" in name else None, {"difference": float(difference)}
            variants[name] = Variant(run, work, facts, parts=sizes.turns * len(layers))
        yield from timed({"batch": batch, "columns": columns}, variants, sizes.repeats)


def in_turn(operation: Callable[[LayerInputs], Tensor], layers: list[LayerInputs]) -> None:
    for layer in layers:
        operation(layer)
