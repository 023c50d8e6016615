"""From hidden states to token losses without holding the logits of a batch.

`Head` turns last hidden states into float32 logits. `chunked_token_loss` processes the response tokens in chunks of bounded size:
project, compute the loss, differentiate inside the chunk, keep only the gradient of the hidden states. Peak memory is that of one
chunk, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from firedistill.models.sharding import lockstep
from firedistill.models.states import inference_mode, last_hidden_states, unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Logits per chunk and distribution. On a CPU 16 MiB in float32: every projection reads the whole head, so smaller chunks cost more per
# token, while beyond 32 MiB the C library maps fresh memory for every tensor. On a GPU 256 MiB (not measured).
CHUNK_ELEMENTS = 2**22
CHUNK_ELEMENTS_GPU = 2**26


class Head(nn.Module):
    """The language-model head with all transformations that a model applies to its logits.

    Args:
        projection: the output embedding (a linear layer, possibly quantized or wrapped by an adapter).
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        scale: logits are multiplied by it (Cohere's `logit_scale`, Falcon H1's `lm_head_multiplier`; the inverse of Granite's
            `logits_scaling`).
        temperature: logits are divided by it (`score_temperature`).
        override: parameters that replace the projection's own (the EMA teacher of a trained head).
        rows: V, where the last rows of the projection stand for no token: models of a family fill up their vocabularies differently.
    """

    def __init__(
        self,
        projection: nn.Module,
        *,
        softcap: float | None = None,
        scale: float = 1.0,
        temperature: float = 1.0,
        override: Mapping[str, Tensor] | None = None,
        rows: int | None = None,
    ):
        super().__init__()
        self.projection = projection
        self.softcap, self.scale, self.temperature = softcap, scale, temperature
        self.override, self.rows = dict(override or {}), rows

    @classmethod
    def of(
        cls,
        causal_lm: PreTrainedModel,
        temperature: float = 1.0,
        override: Mapping[str, Tensor] | None = None,
        rows: int | None = None,
    ) -> Head:
        """The head of a `transformers` causal language model; `temperature`, `override` and `rows` as in the constructor."""
        config = causal_lm.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        if getattr(config, "logits_scaling", None):
            scale = 1.0 / config.logits_scaling
        softcap = getattr(config, "final_logit_softcapping", None)
        settings: dict[str, Any] = {"softcap": softcap, "scale": scale, "temperature": temperature, "rows": rows}
        if steps := lockstep(causal_lm):
            return cls.of_weight(**steps.head, **settings)
        return cls(causal_lm.get_output_embeddings(), override=override, **settings)

    @classmethod
    def of_weight(cls, weight: Tensor, bias: Tensor | None = None, **settings: Any) -> Head:
        """The head of an output embedding `[V, H]`, which may be part of a graph; `settings` as in the constructor."""
        vocabulary_size, width = weight.shape
        projection = nn.Linear(width, vocabulary_size, bias=bias is not None, device="meta")
        return cls(projection, override={"weight": weight} | ({} if bias is None else {"bias": bias}), **settings)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H]` hidden states to `[..., V]` float32 logits (float64 for a float64 head)."""
        return self.logits(self.project(hidden))

    def project(self, hidden: Tensor) -> Tensor:
        """The first half of `forward`: `[..., H]` hidden states to `[..., V]` products with the output embedding, in its dtype."""
        project = partial(torch.func.functional_call, self.projection, self.override) if self.override else self.projection
        return project(hidden) if self.rows is None else project(hidden)[..., : self.rows]

    def logits(self, projected: Tensor) -> Tensor:
        """The second half of `forward`, token by token, in float32 or float64."""
        logits = projected.to(torch.promote_types(projected.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1.0 else logits

    def logits_backward(self, projected: Tensor, gradient: Tensor) -> Tensor:
        """The gradient for the products with the output embedding, in their dtype, from that for their `logits`."""
        if self.temperature != 1.0:
            gradient = gradient / self.temperature
        if self.softcap is not None:
            capped = torch.tanh(projected.to(gradient.dtype) * self.scale / self.softcap)
            gradient = torch.ops.aten.tanh_backward(gradient * self.softcap, capped) / self.softcap
        if self.scale != 1.0:
            gradient = gradient * self.scale
        return gradient.to(projected.dtype)

    @property
    def vocabulary_size(self) -> int:
        return self.rows or cast(Tensor, self.projection.weight).shape[0]

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of the projection that take a gradient."""
        parameters = dict(self.projection.named_parameters()) | self.override
        return [parameter for parameter in parameters.values() if parameter.requires_grad]


@torch.no_grad()
def check_head(model: nn.Module, head: Head) -> None:
    """Refuse a model whose own logits differ from what `Head` computes from its hidden states.

    Raises:
        ValueError: the model transforms its logits in a way that `Head` does not know.
    """
    ids = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
    with inference_mode(model):
        expected = unwrap(model)(input_ids=ids, use_cache=False).logits.float() / head.temperature
        found = head(last_hidden_states(model, ids)).float()
    if not torch.allclose(expected, found, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"{type(unwrap(model)).__name__} transforms its logits in a way that firedistill does not reproduce "
            f"(largest difference {float((expected - found).abs().max()):.3g}); please report the model"
        )


@contextmanager
def float32_sums() -> Iterator[None]:
    """Let products in bfloat16 add their partial sums in float32 on a GPU; the gradient of the head sums over the vocabulary."""
    flags: Any = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction_split_k
    flags.allow_bf16_reduced_precision_reduction = (False, before[1])
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


TokenLoss = Callable[[Tensor, slice], Tensor]


def chunks(hidden: Tensor, head: Head, distributions: int = 1) -> list[slice]:
    """Slices over the rows of `hidden` `[M, H]` whose logits have a bounded number of elements (at least one row each).

    Args:
        distributions: how many the bound counts together.
    """
    tokens = hidden.shape[0]
    size = max(1, (CHUNK_ELEMENTS_GPU if hidden.is_cuda else CHUNK_ELEMENTS) // (head.vocabulary_size * distributions))
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

    Raises:
        ValueError: `token_loss` returns another shape.
    """
    trained = head.trained
    hidden_gradient = torch.zeros_like(hidden)
    head_gradients = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
    total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for rows in chunks(hidden, head):
        with torch.enable_grad(), float32_sums():
            chunk = hidden[rows].detach().requires_grad_()
            losses = token_loss(head(chunk), rows)
            if losses.shape != chunk.shape[:1]:  # it would broadcast
                shape = list(losses.shape)
                raise ValueError(f"token_loss returned the shape {shape} for {len(chunk)} tokens: expected one loss per token")
            value = (token_weights[rows] * losses).sum()
            gradients = torch.autograd.grad(value, [chunk, *trained])
        hidden_gradient[rows] = gradients[0]
        for accumulated, gradient in zip(head_gradients, gradients[1:], strict=True):
            accumulated += gradient
        total += value.detach()
    return with_gradients(total, [hidden, *trained], [hidden_gradient, *head_gradients])


def with_gradients(value: Tensor, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """The detached `value`, a scalar or `[...]`, as a function of `inputs` with these gradients; differentiable once.

    For `[...]`, every input and gradient is `[..., n]`, and a value depends on its own row only.
    """
    return _WithGradients.apply(value, [g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)], *inputs)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        factor = grad_output.unsqueeze(-1) if grad_output.dim() else grad_output
        return None, None, *(factor.to(gradient.dtype) * gradient for gradient in ctx.saved_tensors)
