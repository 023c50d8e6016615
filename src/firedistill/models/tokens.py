"""Which tokens end a response, and which one pads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firedistill.models.errors import ModelError

logger = logging.getLogger(__name__)

# Tokens that checkpoints keep for padding or leave unused, best first.
_PAD_CANDIDATES = (
    "<|endoftext|>",
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
    "<|fim_pad|>",
    "<|vision_pad|>",
    "<|reserved_special_token_0|>",
    "<unk>",
)


def settle_stop_and_pad_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the end of a chat turn stop generation, and padding something that does not."""
    stops = _as_ids(model.generation_config.eos_token_id) or _as_ids(model.config.eos_token_id)
    for token_id in (tokenizer.eos_token_id, end_of_turn_id(tokenizer)):
        if token_id is not None and token_id not in stops:
            stops.append(token_id)
    rows = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    pad = tokenizer.pad_token_id
    if pad is None or pad in stops or pad >= rows:
        replacement = _quiet_token(tokenizer, stops, rows)
        logger.info("pad token: %s instead of %s, because padding must not stop generation", replacement, tokenizer.pad_token)
        tokenizer.pad_token = replacement
    model.generation_config.eos_token_id = stops[0] if len(stops) == 1 else stops
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.pad_token_id = tokenizer.pad_token_id


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an assistant's answer, if there is one."""
    marker = "firedistill"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    try:
        text = cast(str, tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # a template is a program of the checkpoint's author: it may raise anything
        logger.info("the chat template does not render a finished conversation: %s", error)
        return None
    tail = text.rpartition(marker)[2]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((i for i in tokenizer(tail, add_special_tokens=False).input_ids if i in special), None)


def _quiet_token(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], rows: int) -> str:
    """An existing token to pad with. None is added: that would change the embedding and break adapters.

    Raises:
        ModelError: every special token stops generation.
    """
    special = {token.content: i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special}
    usable = {token: i for token, i in special.items() if i not in stops and i < rows}
    for token in _PAD_CANDIDATES:
        if token in usable:
            return token
    # Which token it is hardly matters (it is always masked); one that the template writes is only the last resort.
    template = str(tokenizer.chat_template)
    usable_first = sorted(usable, key=lambda token: (token == tokenizer.bos_token, token in template))
    if not usable_first:
        raise ModelError("the tokenizer has no token for padding: every special token stops generation; set its pad_token")
    return usable_first[0]
