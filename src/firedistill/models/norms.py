"""Root-mean-square norms of a model in one kernel of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firedistill.models.states import is_hooked


def fuse_norms(model: nn.Module) -> int:
    """Replace the root-mean-square norms of a model by `nn.RMSNorm` with the same parameters, wherever both compute the same.

    On a GPU, `nn.RMSNorm` is one kernel where the modules of `transformers` start seven. In bfloat16, its result is rounded once
    instead of twice. Names in the state dict do not change. A norm whose weight has another type than the states stays: both round it
    in other places.

    Returns:
        How many norms the model has that are fused.
    """
    # Of the input embedding, and so of the states
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and (fused := fused_norm(norm, dtype)) is not None:
                setattr(parent, name, fused)
    return sum(type(module) is nn.RMSNorm for module in model.modules())


def fused_norm(norm: nn.Module, dtype: torch.dtype | None) -> nn.RMSNorm | None:
    """An `nn.RMSNorm` that shares the weight of `norm`; None where it would not compute the same for states of this type, and for
    sharded weights."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    hooked = is_hooked(norm)
    if not isinstance(weight, nn.Parameter) or type(weight.data) is not Tensor or weight.dim() != 1 or weight.is_meta:
        return None
    if weight.dtype != dtype or type(norm) is nn.RMSNorm or not isinstance(eps, float) or hooked or len(norm.state_dict()) != 1:
        return None
    # Values of about the square root of `eps` and larger ones: both show another formula.
    scales = torch.tensor([[eps**0.5], [1.0], [30.0]], device=weight.device)
    values = scales * torch.linspace(-2.0, 2.5, len(weight), device=weight.device).cos()
    factors = weight.detach().float()
    with torch.no_grad():
        expected = torch.func.functional_call(norm, {"weight": factors}, (values,))
        if not torch.allclose(F.rms_norm(values, weight.shape, factors, eps), expected, rtol=1e-4, atol=1e-6):
            return None
    fused = nn.RMSNorm(len(weight), eps, device="meta")
    fused.weight = weight
    return fused.train(norm.training)
