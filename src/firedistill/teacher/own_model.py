"""A teacher with weights of its own: another adapter on the student's base model, or another model with the same tokenizer."""

from __future__ import annotations

import copy
from typing import cast

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firedistill.models.errors import ModelError
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import load_adapter
from firedistill.models.states import unwrap


def adapter_teacher(student: PeftModel, folder: str) -> PeftModel:
    """The student's base model with another adapter, frozen. Both use the same tensors of the base.

    Raises:
        ModelError: the folder is not an adapter of this base model.
    """
    shared = {id(tensor): tensor for tensor in (*student.parameters(), *student.buffers())}
    base = cast(PreTrainedModel, copy.deepcopy(student, shared).unload())  # other modules around the same weights
    teacher = load_adapter(base, folder)
    freeze(teacher)
    return teacher


def model_teacher(
    name: str,
    student: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
    quantization: str | None = None,
    attn_implementation: str | None = None,
    device: torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Another model, frozen, and its tokenizer, whose chat template its prompts get.

    Args:
        name: as in `load_model_and_tokenizer`.
        student, tokenizer: for comparison.
        dtype, quantization, attn_implementation, device: as in `load_model_and_tokenizer`.

    Raises:
        ModelError: the model cannot be loaded, its tokenizer has other tokens, or its head has fewer rows than the student's.
    """
    model, its_tokenizer = load_model_and_tokenizer(
        name, dtype=dtype, quantization=quantization, attn_implementation=attn_implementation, device=device
    )
    ours, theirs = tokenizer.get_vocab(), its_tokenizer.get_vocab()
    if different := sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)):
        raise ModelError(
            f"teacher {name!r} has another tokenizer than the student: {len(different)} tokens have another id or none, such as "
            f"{', '.join(map(repr, different[:3]))}. A teacher scores the student's tokens: choose a model of the same family"
        )
    rows, its_rows = (vocabulary_size(causal_lm) for causal_lm in (unwrap(student), model))
    if its_rows < rows:
        raise ModelError(
            f"the head of teacher {name!r} has {its_rows} rows, the student's has {rows}: tokens without a row have no probability. "
            "Choose a teacher with at least as many"
        )
    freeze(model)
    return model, its_tokenizer


def freeze(model: nn.Module) -> None:
    """Evaluation mode, without trainable parameters."""
    model.eval()
    model.requires_grad_(False)


def vocabulary_size(causal_lm: PreTrainedModel) -> int:
    """Rows of the output embedding."""
    return cast(nn.Embedding, causal_lm.get_output_embeddings()).weight.shape[0]
