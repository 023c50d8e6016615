"""Norms of transformers replaced by PyTorch's."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

from firedistill.models.norms import fuse_norms, fused_norm

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize("config, count", [(Qwen2Config, 5), (LlamaConfig, 5), (Qwen3Config, 9)])
def test_models_compute_the_same_with_fused_norms(config, count):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    ids = torch.arange(12).view(2, 6)

    def outcome():
        logits = model(ids).logits
        return [logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    expected, state = outcome(), {name: value.clone() for name, value in model.state_dict().items()}
    assert fuse_norms(model) == count
    assert fuse_norms(model) == count  # again
    # transformers computes these norms in float32 in any case
    for ours, theirs in zip(outcome(), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_rounding_in_bfloat16_is_at_most_that_of_two_roundings():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES), dtype=torch.bfloat16)
    norm, states = model.model.norm, torch.randn(64, 32).bfloat16()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    fused = fused_norm(norm, torch.bfloat16)
    exact = torch.nn.functional.rms_norm(states.double(), (32,), norm.weight.double(), norm.variance_epsilon)
    error, usual = ((found.double() - exact).norm() for found in (fused(states), norm(states)))
    assert fused.weight is norm.weight and fused(states).dtype == torch.bfloat16
    assert error <= usual


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("states", [torch.bfloat16, torch.float32])
def test_fused_norms_keep_the_type_of_the_states(states, weights):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES), dtype=states)
    model.model.norm.to(weights)
    values = torch.randn(3, 32).to(states)
    expected = model.model.norm(values)
    assert fuse_norms(model) == (5 if states == weights else 4)
    assert model.model.norm(values).dtype == expected.dtype
    assert torch.allclose(model.model.norm(values), expected, rtol=2**-7)


class OtherRMSNorm(nn.Module):
    """By the name a norm, by its formula another one."""

    def __init__(self, change: str):
        super().__init__()
        self.weight, self.variance_epsilon, self.change = nn.Parameter(torch.rand(16) + 0.5), 1e-6, change
        if change == "bias":
            self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, states):
        variance = states.square().mean(-1, keepdim=True)
        if self.change == "eps":
            variance = variance + 1e-3
        weight = 1 + self.weight if self.change == "one" else self.weight
        return weight * states * torch.rsqrt(variance + self.variance_epsilon)


@pytest.mark.parametrize("change, fused", [("nothing", True), ("eps", False), ("one", False), ("bias", False)])
def test_only_the_same_formula_is_replaced(change, fused):
    model = nn.Sequential(OtherRMSNorm(change))
    assert fuse_norms(model) == fused
    assert (type(model[0]) is nn.RMSNorm) is fused


def test_norms_of_gemma_stay():
    model = AutoModelForCausalLM.from_config(GemmaConfig(**SIZES))
    before = [type(module) for module in model.modules()]
    assert fuse_norms(model) == 0
    assert [type(module) for module in model.modules()] == before


def test_a_norm_with_a_hook_stays():
    model = nn.Sequential(OtherRMSNorm("nothing"))
    model[0].register_forward_hook(lambda module, arguments, output: output + 1)
    assert fuse_norms(model) == 0
