"""From hidden states to token losses without ever holding the logits of a batch.

`Head` turns last hidden states into float32 logits. `chunked_token_loss` walks over the response tokens in chunks of bounded size:
project, compute the objective, differentiate inside the chunk, keep only the gradient of the hidden states. Peak memory is that of
one chunk, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

# Logits per chunk and distribution. On a CPU 8 MiB in float32, which stays near the caches; on a GPU 256 MiB, which keeps it busy.
CHUNK_ELEMENTS = 2**21
CHUNK_ELEMENTS_GPU = 2**26


class Head(nn.Module):
    """The language-model head with everything that a model does to its logits.

    Args:
        projection: the output embedding (a linear layer, possibly quantised or wrapped by an adapter).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        scale: logits are multiplied by it (Cohere's `logit_scale`; the inverse of Granite's `logits_scaling`).
        temperature: logits are divided by it before any distribution is formed (`score_temperature`).
        override: parameters that replace the projection's own (the EMA teacher of a trained head).
    """

    def __init__(
        self,
        projection: nn.Module,
        *,
        softcap: float | None = None,
        scale: float = 1.0,
        temperature: float = 1.0,
        override: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.projection = projection
        self.softcap, self.scale, self.temperature = softcap, scale, temperature
        self.override = dict(override or {})

    @classmethod
    def of(cls, causal_lm: nn.Module, temperature: float = 1.0, override: Mapping[str, Tensor] | None = None) -> Head:
        """The head of a `transformers` causal language model."""
        config = causal_lm.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        if getattr(config, "logits_scaling", None):
            scale = 1.0 / config.logits_scaling
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(causal_lm.get_output_embeddings(), softcap=softcap, scale=scale, temperature=temperature, override=override)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H]` hidden states to `[..., V]` float32 logits (float64 for a float64 head)."""
        logits = (
            torch.func.functional_call(self.projection, self.override, (hidden,)) if self.override else self.projection(hidden)
        )
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1.0 else logits

    @property
    def vocabulary_size(self) -> int:
        return self.projection.weight.shape[0]


TokenLoss = Callable[[Tensor, slice], Tensor]


def chunks(hidden: Tensor, head: Head) -> list[slice]:
    """Slices over the rows of `hidden` `[M, H]` whose logits have a bounded number of elements (at least one row each)."""
    tokens = hidden.shape[0]
    size = max(1, (CHUNK_ELEMENTS_GPU if hidden.is_cuda else CHUNK_ELEMENTS) // head.vocabulary_size)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def chunked_token_loss(head: Head, hidden: Tensor, token_weights: Tensor, token_loss: TokenLoss) -> Tensor:
    """`sum_t w_t * loss_t`, with the exact gradient for the hidden states and for a trained head.

    Args:
        head: projects hidden states to logits.
        hidden: `[M, H]` last hidden states of the student at the positions that predict the M response tokens.
        token_weights: `[M]`, detached.
        token_loss: called as `token_loss(student_logits [C, V], rows)` for the slice `rows` of the M tokens; returns `[C]`,
            differentiable in the logits. It is called exactly once per chunk, in order.

    Returns:
        A scalar in the dtype of the logits.
    """
    trained = [p for p in head.projection.parameters() if p.requires_grad]
    return _ChunkedTokenLoss.apply(hidden, head, token_weights, token_loss, *trained)


class _ChunkedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Head, token_weights: Tensor, token_loss: TokenLoss, *trained: Tensor) -> Tensor:
        hidden_gradient = torch.zeros_like(hidden)
        head_gradients = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for rows in chunks(hidden, head):
            with torch.enable_grad():
                chunk = hidden[rows].detach().requires_grad_()
                value = (token_weights[rows] * token_loss(head(chunk), rows)).sum()
            gradients = torch.autograd.grad(value, [chunk, *trained])
            hidden_gradient[rows] = gradients[0]
            for accumulated, gradient in zip(head_gradients, gradients[1:], strict=True):
                accumulated += gradient
            total += value.detach()
        ctx.save_for_backward(hidden_gradient, *(g.to(p.dtype) for g, p in zip(head_gradients, trained, strict=True)))
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        hidden_gradient, *head_gradients = ctx.saved_tensors
        scaled = [grad_output.to(g.dtype) * g for g in head_gradients]
        return grad_output.to(hidden_gradient.dtype) * hidden_gradient, None, None, None, *scaled
