"""Attention of whole sequences on a CPU: tiles by matrix products, compared with the attention of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from firedistill.benchmarks import harness
from firedistill.models.attention import causal_attention

TITLE = "Attention in bfloat16 on a CPU"
CPU_ONLY = True
CASE = ("heads", "groups", "size", "sequences", "queries", "keys")


@dataclass
class Sizes:
    heads: tuple[tuple[int, int, int], ...] = ((9, 3, 64), (12, 2, 128))  # heads, groups, size: SmolLM2-135M, Qwen2.5-1.5B
    sequences: tuple[tuple[int, int, int], ...] = ((1, 500, 500), (8, 164, 164), (1, 200, 500))  # number, queries, keys
    calls: int = 20  # per measurement
    repeats: int = 5


SIZES = {"full": Sizes(), "quick": Sizes(((4, 2, 16),), ((2, 33, 33), (1, 20, 50)), calls=2)}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for shape, lengths, backward in product(sizes.heads, sizes.sequences, (False, True)):
        case = dict(zip(CASE, (*shape, *lengths), strict=True))
        problem = Problem(**case, dtype=getattr(torch, options.dtype), backward=backward, calls=sizes.calls)
        sides: dict[str, Callable[[], Any]] = {"torch": partial(problem, by_torch), "tiles": partial(problem, by_tiles)}
        passes = "forward and backward" if backward else "forward"
        yield from harness.rows({**case, "passes": passes}, sides, options.repeats or sizes.repeats)


class Problem:
    """Causal attention of the last `queries` of `keys` tokens, called `calls` times."""

    def __init__(
        self,
        heads: int,
        groups: int,
        size: int,
        sequences: int,
        queries: int,
        keys: int,
        dtype: torch.dtype,
        backward: bool,
        calls: int,
    ):
        draw = torch.Generator().manual_seed(0)
        shapes = [(queries, heads), (keys, groups), (keys, groups), (queries, heads)]
        *parts, self.gradient = (torch.randn(sequences, *shape, size, generator=draw).to(dtype) for shape in shapes)
        self.query, self.key, self.value = self.parts = [tensor.transpose(1, 2).requires_grad_(backward) for tensor in parts]
        self.layer, self.calls = nn.Module(), calls
        self.layer.num_key_value_groups, self.layer.is_causal = heads // groups, True  # type: ignore[assignment]
        self.mask = None if queries == keys else torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]

    def __call__(self, attention: Callable[[Problem], Tensor]) -> None:
        for _ in range(self.calls):
            found = attention(self)
            if found.requires_grad:
                torch.autograd.grad(found, self.parts, self.gradient)


def by_torch(problem: Problem) -> Tensor:
    return sdpa_attention_forward(problem.layer, problem.query, problem.key, problem.value, problem.mask)[0]


def by_tiles(problem: Problem) -> Tensor:
    return causal_attention(problem.layer, problem.query, problem.key, problem.value, None)
