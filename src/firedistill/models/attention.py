"""Attention in the shapes of this package: one new token per sequence, and sequences in bfloat16 on a CPU.

On CPUs, the attention of PyTorch multiplies bfloat16 at a fraction of the rate of its matrix products. `TiledAttention` computes tiles
of the scores by matrix products with bfloat16 inputs and float32 results, takes the softmax in float32, and computes the tiles again in
the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from firedistill.models import kernels
from firedistill.models.states import unwrap

NAME = "firedistill"

# How models call the cache of keys and values in their arguments and outputs; `transformers` 5.24 has renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

SCORES = 2**20  # of a tile at most: 4 MiB in float32
ROWS = 64  # queries of a tile per head
HIDDEN = -1e30  # score of a key that is not visible; finite, so that a padded query which sees no key has no NaN


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, as `transformers` calls it. It computes what `transformers` does with PyTorch's (`sdpa`).

    Args:
        query: `[B, heads, T, size]`.
        key, value: `[B, groups, W, size]`.
        attention_mask: `[B, 1, T, W]`, true where a key is visible, or numbers to add to the scores; None for all keys if T = 1, and
            for causal attention otherwise.

    Returns:
        `[B, T, heads, size]`, and None for the attention weights.
    """
    plain = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "cache"))
    # See `teacher/prefix_cache.py`; a layer that makes a mask of its own, as Doge's, is not packed.
    if (packed := kwargs.pop("packed", None)) is not None and plain and (attention_mask is None or attention_mask.numel() == 1):
        return packed.attention(module, query, key, value, scaling), None
    plain = plain and (attention_mask is None or attention_mask.shape[1] == 1)
    if plain and query.shape[2] == 1:
        if attention_mask is not None and has_kernel(query, key, value, attention_mask):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return kernels.one_query_attention(query, key, value, attention_mask, scale), None
        return grouped_attention(query, key, value, attention_mask, scaling), None
    causal = getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    known = causal and query.shape[2] == key.shape[2] if attention_mask is None else attention_mask.dtype == torch.bool
    if plain and known and is_tiled(query):
        return tiled_attention(query, key, value, attention_mask, scaling), None
    if plain and known and attention_mask is None and repeats_keys(query, key):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return found.transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def causal_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of the last T of W tokens to all before them; shapes as in `attention`."""
    length, width = query.shape[2], key.shape[2]
    if is_tiled(query):
        return tiled_attention(query, key, value, None, scaling)
    mask = None
    if 1 < length < width:
        mask = torch.ones(length, width, dtype=torch.bool, device=query.device).tril_(width - length)[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)[0]


def is_tiled(query: Tensor) -> bool:
    """Whether the device and type of the queries are those of `TiledAttention`."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and multiplies_bfloat16()


def repeats_keys(query: Tensor, key: Tensor) -> bool:
    """Whether no fused kernel of PyTorch may take these heads, which share keys, so that it would store all attention scores."""
    return query.device.type == "cuda" and query.dtype == torch.float32 and key.shape[1] < query.shape[1]


def tiled_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """`TiledAttention`, with tokens before heads: `[B, T, heads, size]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return TiledAttention.apply(query, key, value, mask, scale).transpose(1, 2)


def has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether the kernel of `kernels.py` computes attention of one query per head, without gradients."""
    return (
        kernels.takes_heads(key)
        and mask.dtype == torch.bool
        and not torch.is_grad_enabled()
        and query.dtype == key.dtype
        and key.shape == value.shape
        and query.shape[1] <= 32 * key.shape[1]  # what the kernel keeps on the chip grows with the heads per group
        and {tensor.stride(-1) for tensor in (query, key, value, mask)} == {1}
    )


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention of one query per head where the heads that share keys and values are the queries of one head: nothing is copied."""
    heads, groups = query.shape[1], key.shape[1]
    together = query.unflatten(1, (groups, heads // groups)).squeeze(3)
    found = nn.functional.scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scale)
    return found.flatten(1, 2).unsqueeze(1)


class TiledAttention(torch.autograd.Function):
    """`softmax(scale Q K^T) V` `[B, heads, T, size]` in tiles, for bfloat16 on a CPU.

    Inputs are those of `attention`. Without a mask, the queries are those of the last T of W tokens, and attention is causal. Both
    factors of a product are rounded to bfloat16; sums are in float32.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        count, heads, length, _ = query.shape
        found = query.new_empty(count, length, heads, value.shape[-1]).transpose(1, 2)
        keys, values = in_rows(key, torch.float32), in_rows(value)
        for tile in tiles(query, key, mask):
            weights = tile.weights(query, keys, mask, scale)
            tile.of_queries(found).copy_(
                torch.bmm(weights.to(values.dtype), tile.of_keys(values)).view_as(tile.of_queries(found))
            )
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mask = ctx.saved_tensors
        keys, values = in_rows(key, torch.float32), in_rows(value, torch.float32)
        to_query, to_keys, to_values = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        for tile in tiles(query, key, mask):
            weights = tile.weights(query, keys, mask, ctx.scale)
            asked, queries = (tile.rows(tensor, key.shape[1]) for tensor in (gradient, query))
            with bfloat16_products():
                to_weights = torch.bmm(asked, tile.of_keys(values).transpose(1, 2))
                to_scores = torch._softmax_backward_data(to_weights, weights, -1, torch.float32).mul_(ctx.scale)
                tile.of_queries(to_query).copy_(torch.bmm(to_scores, tile.of_keys(keys)).view_as(tile.of_queries(query)))
                tile.of_keys(to_values).baddbmm_(weights.transpose(1, 2), asked)
                tile.of_keys(to_keys).baddbmm_(to_scores.transpose(1, 2), queries)
        return to_query, to_keys.to(key.dtype), to_values.to(value.dtype), None, None


class Tile(NamedTuple):
    """Some queries of some sequences, and the keys that they read: at least all that any of them sees.

    Heads that share keys and values are further rows of one matrix; there is a matrix per sequence and group.

    Attributes:
        sequences, queries: indices of both.
        open: how many keys, from the first on, every query sees.
        width: how many keys, from the first on, are read.
    """

    sequences: slice
    queries: slice
    open: int
    width: int

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The part `[b, heads, t, size]` of the queries, or of what has their shape."""
        return tensor[self.sequences, :, self.queries]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The part of the keys or values as matrices `[b groups, width, size]`; a view."""
        return tensor[self.sequences].flatten(0, 1)[:, : self.width]

    def rows(self, tensor: Tensor, groups: int) -> Tensor:
        """The part `of_queries` in float32 as matrices `[b groups, heads / groups t, size]`."""
        part = in_rows(self.of_queries(tensor), torch.float32)
        return part.view(len(part) * groups, -1, part.shape[-1])

    def weights(self, query: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention weights `[b groups, heads / groups t, width]`, float32."""
        with bfloat16_products():
            scores = torch.bmm(self.rows(query, keys.shape[1]), self.of_keys(keys).transpose(1, 2)).mul_(scale)
        if self.open < self.width:
            count = self.queries.stop - self.queries.start
            part = scores.view(-1, query.shape[1], count, self.width)[..., self.open :]
            if mask is None:
                hidden = torch.ones(part.shape[-2:], dtype=torch.bool).triu_()
            else:
                hidden = ~mask[self.sequences if len(mask) > 1 else slice(None), :, self.queries, self.open : self.width]
            part.masked_fill_(hidden, HIDDEN)
        return scores.softmax(-1)


def tiles(query: Tensor, key: Tensor, mask: Tensor | None) -> Iterator[Tile]:
    """Tiles that cover all queries, of at most `SCORES` scores or of `ROWS` queries of one sequence.

    Their widths are multiples of `ROWS`, or all keys: oneDNN keeps code for each shape of a product in bfloat16.
    """
    count, heads, length, _ = query.shape
    together = max(1, SCORES // (heads * min(length, ROWS) * key.shape[2]))
    spans = []
    for start in range(0, length, ROWS):
        queries = slice(start, min(start + ROWS, length))
        past = key.shape[2] - length
        opened, width = (past + start + 1, past + queries.stop) if mask is None else visible(mask[:, 0, queries])
        spans.append((queries, opened, min(-(-width // ROWS) * ROWS, key.shape[2])))
    for start in range(0, count, together):
        yield from (Tile(slice(start, start + together), *span) for span in spans)


def visible(mask: Tensor) -> tuple[int, int]:
    """How many keys from the first on every query sees, and up to where any sees one, of a mask `[b, t, W]`."""
    bits = mask.view(torch.uint8)  # whose reductions are faster
    hidden_to_one, seen_by_one = bits.amin((0, 1)) == 0, bits.amax((0, 1)) == 1
    first_hidden, seen = hidden_to_one.nonzero()[:1].flatten().tolist(), seen_by_one.nonzero()[-1:].flatten().tolist()
    return (first_hidden or [mask.shape[-1]])[0], (seen or [0])[0] + 1


def in_rows(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor, contiguous, in this type."""
    return tensor.to(dtype or tensor.dtype, memory_format=torch.contiguous_format)


@cache
def multiplies_bfloat16() -> bool:
    """Whether PyTorch has kernels for products in bfloat16 on this CPU (AVX512, or Arm with bf16)."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16. GPUs of a compute capability below 8.0 do not; PyTorch emulates it there."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or multiplies_bfloat16()


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Let products of float32 matrices on a CPU round their factors to bfloat16; sums and results stay in float32."""
    settings = cast(Any, torch.backends.mkldnn).matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_own_attention(model: nn.Module) -> str:
    """Let a model whose attention is PyTorch's (`sdpa`) compute it as `attention` from now on; others keep their own.

    So do models that read the name of the attention in places of their own: those that do not look it up in the registry (Falcon),
    and those with sparse attention (DeepSeek V3.2), which hide the keys that a query does not select under known names only.

    Returns:
        The attention that it had.
    """
    causal_lm = unwrap(model)
    config = causal_lm.config.get_text_config(decoder=True)
    before = config._attn_implementation
    if before == "sdpa" and causal_lm._can_set_attn_implementation() and not any(map(_is_sparse, kinds_of_layers(config))):
        config._attn_implementation = NAME
    return before


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """`use_own_attention` while the context is open."""
    before = use_own_attention(model)
    try:
        yield
    finally:
        unwrap(model).config.get_text_config(decoder=True)._attn_implementation = before


def kinds_of_layers(config: PreTrainedConfig) -> list[type]:
    """What `transformers` caches of each layer; for keys and values alone a `DynamicLayer`."""
    return [type(layer) for layer in DynamicCache(config=config).layers]


def _is_sparse(kind: type) -> bool:
    """Whether keys and values are cached together with that by which attention selects them."""
    usual = kind in (DynamicLayer, DynamicSlidingWindowLayer) or issubclass(kind, LinearAttentionLayer)
    return issubclass(kind, DynamicLayer) and not usual


def attends_by_position(model: nn.Module) -> bool:
    """Whether every layer attends to all earlier tokens, by PyTorch's attention or this module's, whatever the length of the sequence.

    False for sliding windows, sparse attention, layers without keys and values, attention that is not looked up in the registry, and
    rotary frequencies that depend on the length.
    """
    causal_lm = unwrap(model)
    text: Any = causal_lm.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {of.get("rope_type") for of in (rope, *rope.values()) if isinstance(of, dict)}
    return (
        causal_lm._can_set_attn_implementation()
        and set(kinds_of_layers(text)) == {DynamicLayer}
        and text._attn_implementation in ("sdpa", NAME)
        and not kinds & {"dynamic", "longrope"}
    )
