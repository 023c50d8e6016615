"""Teacher-forced forward passes: prompt and response token ids to last hidden states at the response positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass
class ResponseStates:
    """Hidden states that predict the tokens of several responses, end to end without padding.

    Attributes:
        hidden: `[M, H]`, M the total number of response tokens; row t predicts response token t.
        lengths: tokens per response; they sum to M.
    """

    hidden: Tensor
    lengths: list[int]

    def select(self, rows: Sequence[int]) -> ResponseStates:
        """The states of some responses, in the given order."""
        lengths = [self.lengths[row] for row in rows]
        if not rows or list(rows) == list(range(rows[0], rows[0] + len(rows))):  # without a copy
            start = sum(self.lengths[: rows[0]]) if rows else 0
            return ResponseStates(self.hidden[start : start + sum(lengths)], lengths)
        parts = self.hidden.split(self.lengths)
        return ResponseStates(torch.cat([parts[row] for row in rows]), lengths)

    def token_weights(self) -> Tensor:
        """`1 / M_i` at every token of response i; `[M]` float32 (float64 for float64 states)."""
        return self.per_token([1.0 / max(length, 1) for length in self.lengths])

    def per_token(self, values: Sequence[float | Tensor]) -> Tensor:
        """One value per response, a number (repeated for each of its tokens) or a `[T]` tensor, end to end; `[M]`, at least float32."""
        dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        parts = [torch.as_tensor(value, dtype=dtype).expand(n) for value, n in zip(values, self.lengths, strict=True)]
        # Made on the host, which does not wait for the device then.
        return torch.cat(parts or [torch.empty(0, dtype=dtype)]).to(self.hidden.device, non_blocking=True)

    @staticmethod
    def concatenate(states: Sequence[ResponseStates]) -> ResponseStates:
        return ResponseStates(torch.cat([s.hidden for s in states]), [n for s in states for n in s.lengths])


def score_responses(
    model: nn.Module, prompts: Sequence[list[int]], responses: Sequence[list[int]], *, max_tokens: int | None = None
) -> ResponseStates:
    """Last hidden states at the response positions of `prompt ++ response`, in the order given.

    Sequences are padded on the right, which causal attention does not see, so neither a mask nor position ids are needed. With
    `max_tokens`, sequences of similar length share forward passes of at most that many padded tokens (one sequence at least).
    Without it there is a single forward pass, as distributed wrappers need it for the student.

    Args:
        model: a causal language model with or without adapter and distributed wrapper.
        prompts, responses: token ids; every prompt has at least one token.
    """
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]) + len(responses[row]))
    device = next(model.parameters()).device
    hidden: dict[int, Tensor] = {}
    for rows in forward_batches([len(prompts[row]) + len(responses[row]) for row in order], max_tokens):
        batch = [order[row] for row in rows]
        width = max(len(prompts[row]) + len(responses[row]) for row in batch)
        padded = [prompts[row] + responses[row] + [0] * (width - len(prompts[row]) - len(responses[row])) for row in batch]
        states = last_hidden_states(model, torch.tensor(padded).to(device, non_blocking=True))
        for position, row in enumerate(batch):
            start = len(prompts[row]) - 1
            hidden[row] = states[position, start : start + len(responses[row])]
    lengths = [len(response) for response in responses]
    if not hidden:
        width = unwrap(model).config.get_text_config().hidden_size
        return ResponseStates(torch.empty(0, width, device=device), lengths)
    return ResponseStates(torch.cat([hidden[row] for row in range(len(prompts))]), lengths)


def forward_batches(lengths: Sequence[int], max_tokens: int | None) -> list[range]:
    """Consecutive rows (sorted by length) whose padded size stays within `max_tokens`."""
    batches, start = [], 0
    for row, length in enumerate(lengths):
        if max_tokens is not None and row > start and (row - start + 1) * length > max_tokens:
            batches.append(range(start, row))
            start = row
    return [*batches, range(start, len(lengths))] if lengths else []


def last_hidden_states(model: nn.Module, input_ids: Tensor) -> Tensor:
    """`[B, T, H]` states after the final norm, before the head; goes through the model's distributed wrapper if it has one."""
    causal_lm, inner = unwrap(model), getattr(model, "module", None)
    if not isinstance(inner, nn.Module):
        return trunk_states(causal_lm, input_ids=input_ids, use_cache=False)

    def forward(input_ids: Tensor) -> Tensor:
        states = trunk_states(causal_lm, input_ids=input_ids, use_cache=False)
        # The wrapper takes parameters that its result does not depend on for unused, and a trained head comes after it.
        head = [p for p in causal_lm.get_output_embeddings().parameters() if p.requires_grad]
        return states + 0.0 * sum(p.sum() for p in head).to(states.dtype) if head else states

    original, inner.forward = inner.forward, forward  # a wrapper (DDP) synchronizes gradients if it is called itself
    try:
        return model(input_ids=input_ids)
    finally:
        inner.forward = original


def trunk_states(causal_lm: PreTrainedModel, **inputs: Any) -> Tensor:
    """`[B, T, H]` states after the final norm for the inputs of a forward pass."""
    if not is_sharded(causal_lm):
        return trunk(causal_lm)(**inputs).last_hidden_state
    # Only the forward pass of the whole model gathers the weights of all layers. It projects a single token, given by its position:
    # if given as a number of tokens, the last layers of Gemma 4 leave out the others.
    states: list[Tensor] = []
    with trunk(causal_lm).register_forward_hook(lambda module, args, output: states.append(output.last_hidden_state)):
        causal_lm(**inputs, logits_to_keep=torch.tensor([0]))
    return states[0]


def trunk(causal_lm: PreTrainedModel) -> nn.Module:
    """The model without its head. The `base_model` of some classes (Llama 4) is the model itself."""
    return causal_lm.base_model if causal_lm.base_model is not causal_lm else cast(nn.Module, causal_lm.model)


def is_sharded(causal_lm: nn.Module) -> bool:
    """Whether `transformers` has spread the weights over processes while loading; see `firedistill.models.sharding`."""
    return getattr(causal_lm, "is_distributed_loading_by_transformers", False)


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The `transformers` model inside distributed wrappers and adapters."""
    inner: Any = model
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def modules_within(model: nn.Module, leaf: type | None = None) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module inside `model`, with its parent and its name there. A module that several parents have occurs as often.

    `nn.Module.modules` also builds the path of each.

    Args:
        leaf: modules of this type are not entered.
    """
    waiting, known = [model], {id(model)}
    for parent in waiting:
        for name, module in vars(parent)["_modules"].items():
            if module is not None:
                yield parent, name, module
                if id(module) not in known and not (leaf is not None and isinstance(module, leaf)):
                    known.add(id(module))
                    waiting.append(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether something is called around the module's `forward`: a hook of PyTorch or of accelerate."""
    own = vars(module)  # `hasattr` would search parameters, buffers and modules first
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return "_hf_hook" in own or any(own[kind] for kind in kinds)


def positions(model: nn.Module) -> int | None:
    """The most tokens that the model has positions for, or None if its configuration does not say."""
    return getattr(unwrap(model).config.get_text_config(), "max_position_embeddings", None)


@contextmanager
def inference_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; the training flags are restored."""
    modules = [model]
    for module in modules:  # a model with an adapter has thousands
        modules += [inner for inner in vars(module)["_modules"].values() if inner is not None]
    training = [vars(module) for module in modules if module.training]
    switch(training, False)
    try:
        with torch.no_grad():
            yield
    finally:
        switch(training, True)


def switch(attributes: Sequence[dict[str, Any]], training: bool) -> None:
    for of_module in attributes:
        of_module["training"] = training  # assigning the attribute takes several times as long
