"""Attention of one new token per sequence, as decoding needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "firedistill_decoding"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention where the heads that share keys and values are the queries of one head: nothing is copied.

    More than one token per row, and masks or biases of single heads, take the way of `transformers`.

    Args:
        query: `[B, heads, 1, size]`.
        key, value: `[B, groups, W, size]`.
        attention_mask: `[B, 1, 1, W]`, true where a key is visible; None where all are.

    Returns:
        `[B, 1, heads, size]`, and None for the attention weights.
    """
    of_heads = attention_mask is not None and attention_mask.shape[1] > 1
    if query.shape[2] > 1 or of_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    heads, groups = query.shape[1], key.shape[1]
    together = query.unflatten(1, (groups, heads // groups)).squeeze(3)
    found = nn.functional.scaled_dot_product_attention(together, key, value, attn_mask=attention_mask, scale=scaling)
    return found.flatten(1, 2).unsqueeze(1), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def decoding_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model whose attention is PyTorch's (`sdpa`) compute it as `grouped_attention`; others keep their own."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
