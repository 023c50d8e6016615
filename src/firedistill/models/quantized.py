"""Quantized base weights: gradients must pass through them as through the weights that they stand for."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from firedistill.models.errors import ModelError
from firedistill.models.states import inference_mode

# Relative difference above which gradients count as different. On a CPU, correct ones measured 0.0 and wrong ones 0.97 to 1.01; the
# margin is for kernels of other devices that round differently.
TOLERATED_DIFFERENCE = 0.25
# Change of normally distributed weights by quantization and back, relative to their norm. On a CPU, NF4 in blocks of 64 measured 0.09
# where it is right, and 0.21 to 0.32 where bitsandbytes 0.50.2 is wrong (64 rows of 32 to 2,000 columns).
TOLERATED_ROUNDING = 0.15


def prepare_quantized(model: nn.Module) -> None:
    """Make sure that weights in 4 bits can be trained through; in place.

    On processors with AVX512-BF16, bitsandbytes 0.50 repacks them for inference at the first forward pass in evaluation mode, which
    this function prevents. Gradients do not pass through repacked weights, and layers of some sizes cannot be repacked at all.

    Raises:
        ModelError: bitsandbytes restores weights of a layer's width wrongly on its device.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # torch declares tensors and modules only
    check_dequantization(model)


@torch.no_grad()
def check_dequantization(model: nn.Module) -> None:
    """Raise ModelError if random weights of the width of a layer in 4 bits are not what they were after quantization and back.

    bitsandbytes 0.50.2 is wrong on CPUs with AVX512 if the width is a multiple of 16 and not of 64, the size of its blocks.
    """
    kinds: dict[Any, None] = {}  # in the order of the layers
    for layer in cast(list[Any], quantized_layers(model)):
        if (state := getattr(getattr(layer, "weight", None), "quant_state", None)) is not None:
            kinds[layer.in_features, layer.weight.device, state.dtype, state.blocksize, state.quant_type] = None
    for columns, device, dtype, blocksize, quant_type in kinds:
        functional: Any = importlib.import_module("bitsandbytes.functional")
        weights = torch.randn(64, columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        packed = functional.quantize_4bit(weights, blocksize=blocksize, quant_type=quant_type)
        rounding = float((functional.dequantize_4bit(*packed) - weights).float().norm() / weights.float().norm())
        if not rounding < TOLERATED_ROUNDING:
            raise ModelError(
                f"bitsandbytes {version('bitsandbytes')} restores 4-bit weights with {columns} columns wrongly on {device} (they "
                f"change by {rounding:.0%}; {TOLERATED_ROUNDING:.0%} are allowed): leave quantization out, use another device, or "
                "install another version of bitsandbytes"
            )


def quantized_layers(model: nn.Module) -> list[nn.Module]:
    """The frozen linear layers that are not plain ones, without the adapters around them."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "in_features")
        and type(module) is not nn.Linear
        and not isinstance(module, BaseTunerLayer)
        and not any(p.requires_grad for p in module.parameters())
    ]


def gradient_difference(model: PeftModel, input_ids: Tensor) -> float:
    """How far the adapter's gradient, after an evaluation, is from its gradient through dequantized weights.

    Args:
        input_ids: `[1, T]`, a text.

    Returns:
        The norm of the difference, relative to the gradient through dequantized weights; infinite if a gradient is not finite.
    """
    with inference_mode(model):
        with ExitStack() as dequantized:
            for layer in quantized_layers(model):
                dequantized.enter_context(_dequantized(layer))
            expected = _gradient(model, input_ids)
        model(input_ids=input_ids)
        found = _gradient(model, input_ids)
    difference = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    return math.inf if math.isnan(difference) else difference


@torch.enable_grad()
def _gradient(model: PeftModel, input_ids: Tensor) -> Tensor:
    """The gradient of the mean loss of a text for the trainable parameters, end to end; `[P]` float32."""
    loss = model(input_ids=input_ids, labels=input_ids).loss
    # A short text does not reach every expert of a mixture.
    parts = torch.autograd.grad(
        loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True, materialize_grads=True
    )
    return torch.cat([part.float().flatten() for part in parts])


@contextmanager
def _dequantized(layer: Any) -> Iterator[None]:
    """Let a quantized layer compute with its dequantized weight."""
    previous = vars(layer).get("forward")  # accelerate sets one on some modules
    layer.forward = lambda states: _DequantizedLinear.apply(states, layer)
    try:
        yield
    finally:
        del layer.forward
        if previous is not None:
            layer.forward = previous


class _DequantizedLinear(torch.autograd.Function):
    """`x W^T + b` with a weight that is dequantized in each direction, so that one layer at a time is in memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        bias = layer.bias if layer.bias is None else layer.bias.to(states.dtype)
        return nn.functional.linear(states, dequantize_module_weight(layer).detach().to(states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ dequantize_module_weight(ctx.layer).detach().to(gradient.dtype), None
