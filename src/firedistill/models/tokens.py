"""Which tokens end a response, and which token pads."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from datetime import date
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firedistill.models.errors import ModelError
from firedistill.tasks.guard import TaskFault, guarded

logger = logging.getLogger(__name__)

TEMPLATE_SECONDS = 10.0

# Some templates write the date of today, with which prompts would differ from day to day. This one is the date that the template of
# Llama 3.2 writes where it is told none.
TODAY = date(2024, 7, 26)
_ASKS_FOR_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

# Tokens that checkpoints reserve for padding or leave unused, best first.
_PAD_TOKENS = (
    "<|endoftext|> <pad> [PAD] <|pad|> <|finetune_right_pad_id|> <|fim_pad|> <|vision_pad|> <|reserved_special_token_0|> <unk>"
)

# Lowercase letters and digits, which every tokenizer of a language model knows
_PROBE = "the quick brown fox jumps over 13 lazy dogs, 267 times 49 + 58 = ?"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse the tokenizer of the model `name` if it has no chat template, or if text does not survive encoding.

    Without its vocabulary (a missing `tokenizer.json`), a tokenizer encodes every text to nothing or to unknown tokens.

    Raises:
        ModelError: says which.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {name} has no chat template. Training asks questions as chat messages, so use the "
            "instruct variant of the model, or set `chat_template` in its tokenizer_config.json"
        )
    decoded = cast(str, tokenizer.decode(tokenizer(_PROBE, add_special_tokens=False).input_ids))
    if lost := sorted(set(_PROBE) - set(decoded.lower()) - {" "}):
        raise ModelError(
            f"the tokenizer of {name} loses text: it decodes {_PROBE!r} to {decoded[:80]!r}, without {' '.join(lost)}. Check that its "
            "files (tokenizer.json, or the vocabulary that the tokenizer reads) are in the folder and complete"
        )


def set_stop_and_pad_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the end of a chat turn stop generation, and pad with a token that does not stop it; in place.

    Raises:
        ModelError: every special token stops generation.
    """
    stops = _ids(model.generation_config.eos_token_id) or _ids(model.config.eos_token_id)
    for token_id in (tokenizer.eos_token_id, end_of_turn_id(tokenizer)):
        if token_id is not None and token_id not in stops:
            stops.append(token_id)
    vocabulary = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    pad = tokenizer.pad_token_id
    if pad is None or pad in stops or pad >= vocabulary:
        replacement = _pad_token(tokenizer, stops, vocabulary)
        logger.info("pad token: %s instead of %s, because padding must not stop generation", replacement, tokenizer.pad_token)
        tokenizer.pad_token = replacement
    model.generation_config.eos_token_id = stops[0] if len(stops) == 1 else stops
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id


def stop_token_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the checkpoint's end-of-sequence tokens and the tokenizer's."""
    return sorted({*_ids(model.generation_config.eos_token_id), *_ids(tokenizer.eos_token_id)})


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, open_answer: bool) -> str:
    """A conversation under the tokenizer's chat template, with the opening of the assistant's turn if `open_answer`.

    A template that asks for the date of today is told TODAY, so that a run can be repeated on another day.

    Raises:
        TaskFault: the template raised, or took longer than `TEMPLATE_SECONDS`. A template is a program of the checkpoint's author.
    """

    def apply() -> str:
        own: dict[str, Any] = {}
        if "strftime_now" in str(
            tokenizer.chat_template
        ):  # newer versions of transformers pass no function of ours to a template
            dated = _ASKS_FOR_TODAY.sub(lambda call: call[1] + TODAY.strftime(call[2]) + call[1], tokenizer.get_chat_template())
            own = {"chat_template": dated}
        return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_answer, **own))

    return guarded("the chat template", apply, TEMPLATE_SECONDS)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an assistant's answer, or None."""
    marker = "firedistill"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    try:
        text = render(tokenizer, turns, open_answer=False)
    except TaskFault as fault:
        logger.info("no end of turn: %s", fault)
        return None
    special = _special_tokens(tokenizer).values()
    return next((i for i in tokenizer(text.rpartition(marker)[2], add_special_tokens=False).input_ids if i in special), None)


def _ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {token.content: i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special}


def _pad_token(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], vocabulary: int) -> str:
    """An existing special token that does not stop generation; a new one would change the embedding and break adapters."""
    usable = [token for token, i in _special_tokens(tokenizer).items() if i not in stops and i < vocabulary]
    if not usable:
        raise ModelError(
            "the tokenizer has no token for padding, because every special token of the vocabulary stops generation: give it another "
            f"special token with an id below {vocabulary} as pad_token"
        )
    # Padding is always masked, so any token works. One that the chat template writes is the last resort.
    template = str(tokenizer.chat_template)
    others = sorted(usable, key=lambda token: (token == tokenizer.bos_token, token in template))
    return next(token for token in [*_PAD_TOKENS.split(), *others] if token in usable)
