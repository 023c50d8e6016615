"""Sizes of the models and of the parts, and the least work that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Work = list[tuple[float, float]]
"""Operations and bytes of each phase."""

AS_IN_TRAINING = "as in training"  # the variant of a part that training uses


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def in_layers(self) -> int:
        """Parameters of the matrices of all layers."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.key_value_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def in_head(self) -> int:
        return self.hidden * self.vocabulary

    def forward(self, lengths: Sequence[int]) -> float:
        """Operations of a causal forward pass over sequences of these lengths, up to the last hidden states."""
        attention = 2 * self.layers * self.hidden * sum(length * length for length in lengths)
        return 2.0 * self.in_layers * sum(lengths) + attention

    def decoding(self, batch: int, first: int, last: int) -> Work:
        """Sampling with caches that grow from `first` to `last` tokens; every step reads the weights and the cache once."""
        cache = 2 * self.layers * self.key_value_heads * self.head_size * 2.0
        steps, parameters = last - first, self.in_layers + self.in_head
        mean = (first + last) / 2
        operations = 2 * parameters * batch + 4 * self.layers * self.hidden * mean * batch
        return [(steps * operations, steps * (2.0 * parameters + batch * mean * cache))]


QWEN = {
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151_936),
    "3b": Shape(2048, 11008, 36, 16, 2, 151_936),
    "14b": Shape(5120, 13824, 48, 40, 8, 152_064),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts; the defaults are those of a GPU."""

    shapes: Mapping[str, Shape]
    prompts: int = 8
    prompt: int = 300  # tokens of a student prompt
    fields: tuple[int, ...] = (90,) * 4  # words of the feedback fields: a teacher's prompt has about 700 tokens
    response: int = 384
    warm_up_steps: int = 4
    steps: int = 5
    repeats: int = 5
    copied: int = 2**33  # bytes, at most; twice as many are held
    matrix: int = 8192
    operators: int = 1000
    turns: int = 10  # of all layers, in the graph of an operation of one token
    checked: tuple[tuple[int, int, int], ...] = ((97, 151_936, 1536), (130, 32_771, 1024))  # M, V, H
    head_tokens: int = 8 * 384
    chunks: tuple[int, ...] = (2**25, 2**26, 2**27, 2**28)  # logits per chunk
    over: tuple[float, ...] = (0.0, 0.1, 1.0)  # shares of the tokens over the radius
    compiler: str = "inductor"
    batches: tuple[int, ...] = (1, 8, 32)
    long_prompt: int = 4000  # of one case of decoding
    new_tokens: tuple[int, int] = (16, 80)  # the time between them is that of the tokens beyond the first ones
    decoding_repeats: int = 3
    scored: tuple[int, ...] = (1, 4, 8)  # responses
    per_forward: tuple[int, ...] = (8192, 32_768, 131_072)  # padded tokens
    micro_batches: tuple[int, ...] = (2, 8)
    long_responses: tuple[int, ...] = (1024, 4096)
    lab_steps: int = 6
    profiled_tokens: int = 32  # enough for the engine to merge the adapter


FULL = Sizes(QWEN)
TINY = Sizes(
    {name: Shape(64, 96, 2, 4, 2, 600) for name in QWEN},
    prompts=4,
    prompt=40,
    fields=(5, 9),
    response=6,
    warm_up_steps=1,
    steps=1,
    repeats=1,
    copied=2**16,
    matrix=32,
    operators=10,
    turns=2,
    checked=((9, 101, 16),),
    head_tokens=12,
    chunks=(2**11, 2**12),
    over=(0.0, 0.5),
    compiler="aot_eager",
    batches=(1, 3),
    long_prompt=60,
    new_tokens=(2, 4),
    decoding_repeats=1,
    scored=(2,),
    per_forward=(64, 1024),
    micro_batches=(2,),
    long_responses=(8, 12),
    lab_steps=2,
    profiled_tokens=2,
)


@dataclass(frozen=True)
class Setting:
    """Where and how large.

    Attributes:
        folder: for the files that a part writes beside its record.
        tests: the folder of the test suite; None where it is not at hand.
        changes: of the sizes.
    """

    device: str
    tiny: bool
    folder: Path
    tests: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        return replace(TINY if self.tiny else FULL, **self.changes)

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"
