"""Decoder layers in fewer operations against those of transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from firedistill.models.attention import CACHE
from firedistill.models.lora import add_lora
from firedistill.rollout import Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.layers import FusedLayer, rotated
from firedistill.rollouts.merging import fusable_layers, mergeable_layers, merged_adapter
from test_adapter import Operators
from tiny import byte_tokenizer

SIZES = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # of all heads together: not the hidden size
    "initializer_range": 0.25,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, num_hidden_layers=2),
    "llama with biases": LlamaConfig(**SIZES, num_hidden_layers=2, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=None),
    "mistral, window": MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=8),
    "qwen2": Qwen2Config(**(SIZES | {"head_dim": 8}), num_hidden_layers=2),
    "qwen3": Qwen3Config(**SIZES, num_hidden_layers=2),
}
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15, 16, 17, 18, 19], [10, 11], [40] * 30]
SAMPLING = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=24)


def adapted(config, dtype: torch.dtype = torch.float32, seed: int = 0, **options):
    """A model whose adapter, biases and norms all change what it computes."""
    torch.manual_seed(seed)
    model = add_lora(AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).to(dtype), **options).eval()
    model.get_base_model().generation_config.eos_token_id = None
    return with_values(model)


@torch.no_grad()
def with_values(model):
    """Draw factors B, biases and norms, whose first values change nothing."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith("bias"):
            parameter.normal_(std=0.3)
        elif "norm" in name:
            parameter.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_layer_computes_what_the_layer_does(family):
    """Prompts with padding, read at once and then token by token."""
    model = adapted(FAMILIES[family])
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(263, (3, 12), generator=generator), torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = mask[2, :1] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def states(fuse):
        with torch.no_grad(), merged_adapter(model, fuse_layers=fuse):
            assert sum(type(module) is FusedLayer for module in model.modules()) == (2 if fuse else 0)
            assert mergeable_layers(model) == [], "every projection is merged"
            read = model(ids[:, :9], attention_mask=mask[:, :9], position_ids=positions[:, :9], use_cache=True)
            logits = [read.logits]
            for end in (10, 11, 12):
                step = slice(end - 1, end)
                of_step = {"attention_mask": mask[:, :end], "position_ids": positions[:, step]}
                logits.append(model(ids[:, step], **of_step, **{CACHE: read[CACHE]}, use_cache=True).logits)
        return torch.cat(logits, 1)[mask.bool()]

    torch.testing.assert_close(states(True), states(False), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert (states(True) - model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]).abs().max() < 1e-3


@pytest.mark.parametrize("at_fixed_addresses", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_sample_the_same_tokens(family, at_fixed_addresses):
    model, tokenizer = adapted(FAMILIES[family], torch.float64), byte_tokenizer()
    tokenizer.eos_token = None
    engines = [
        HFRolloutEngine(model, tokenizer, merge_adapter=True, fixed=at_fixed_addresses, fuse_layers=choice)
        for choice in (False, True)
    ]
    assert (engines[1].decoder is not None) == (at_fixed_addresses and family != "mistral, window")
    expected, found = (engine.generate(PROMPTS, SAMPLING, seed=3) for engine in engines)
    assert found == expected and len({len(response.token_ids) for response in found}) == 1


def test_rounding_in_bfloat16_is_no_larger():
    """Distance of the logits to those of the same weights in float64, root mean square over many tokens."""
    model = adapted(FAMILIES["qwen2"], torch.bfloat16)
    ids = torch.randint(263, (8, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()  # merging rounds nothing
        expected, logits = copy.deepcopy(model).double()(ids).logits, []
        for fuse in (True, False):
            with merged_adapter(model, fuse_layers=fuse):
                logits.append(model(ids).logits.double())
    fused, usual = ((found - expected).square().mean().sqrt() for found in logits)
    assert 0 < fused < 1.05 * usual


def test_rotation_by_an_angle():
    """Coordinates i and i + size / 2 as a complex number."""
    states, angles = torch.randn(2, 3, 5, 8).double(), torch.randn(2, 3, 4).double()
    both = torch.cat([angles, angles], -1)
    turned = torch.complex(states[..., :4], states[..., 4:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
    torch.testing.assert_close(rotated(states, both.cos(), both.sin()), torch.cat([turned.real, turned.imag], -1))


def test_fused_layers_follow_the_adapter_at_the_same_addresses():
    model, tokenizer = adapted(FAMILIES["qwen2"]), byte_tokenizer()
    engine = HFRolloutEngine(model, tokenizer, merge_adapter=True, fixed=True, fuse_layers=True)

    def addresses():
        copies = [tensor.data_ptr() for layer in engine.copies.values() for tensor in layer.parameters()]
        return copies, engine.decoder.addresses

    first, before = engine.generate(PROMPTS, SAMPLING, seed=1), addresses()
    assert len(engine.copies) == 2 * 4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.2)
    moved = engine.generate(PROMPTS, SAMPLING, seed=1)
    plain = HFRolloutEngine(model, tokenizer, merge_adapter=True, fuse_layers=False).generate(PROMPTS, SAMPLING, seed=1)
    assert addresses() == before and moved == plain and moved != first


# Of the mask, which GPUs convert once for all layers, and views
NOT_COUNTED = {"scalar_tensor", "where", "squeeze", "split"}


def operators_of_a_layer(fuse: bool) -> int:
    """Of a step of decoding at fixed addresses, without the two norms."""
    counts = []
    for layers in (1, 2):
        model = adapted(Qwen2Config(**(SIZES | {"head_dim": 8}), num_hidden_layers=layers))
        for module in model.modules():
            for name in ("input_layernorm", "post_attention_layernorm"):
                if hasattr(module, name):
                    setattr(module, name, nn.Identity())
        engine = HFRolloutEngine(model, byte_tokenizer(), merge_adapter=True, fixed=True, fuse_layers=fuse)
        engine.stop_ids.clear()
        engine.generate(PROMPTS[:2], SAMPLING, seed=0)
        with torch.no_grad(), merged_adapter(model, engine.copies, fuse), Operators() as operators:
            engine.decoder.advance(2, 10, SAMPLING)
        counts.append(operators.count)
    return sum(number for name, number in (counts[1] - counts[0]).items() if name not in NOT_COUNTED)


def test_operators_of_a_layer():
    assert operators_of_a_layer(True) == 12 and operators_of_a_layer(False) >= 24  # 24 with transformers 5.23, 26 with 5.16


def test_fusing_is_undone():
    model = adapted(FAMILIES["qwen3"])
    modules, tensors = dict(model.named_modules()), {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="half-way"), merged_adapter(model, fuse_layers=True):
        raise RuntimeError("half-way")
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(p, tensors[name]) for name, p in model.named_parameters())


class OtherLayer(LlamaDecoderLayer):
    """A user's own layer may compute something else."""


def partly_adapted():
    return adapted(FAMILIES["llama"], target_modules=["q_proj", "v_proj"])


def with_a_hook():
    model = adapted(FAMILIES["llama"])
    for layer in model.get_base_model().model.layers:
        layer.mlp.register_forward_hook(lambda module, arguments, output: None)
    return model


def with_eager_attention():
    model = adapted(FAMILIES["llama"])
    model.config._attn_implementation = "eager"
    return model


def with_another_class():
    model = adapted(FAMILIES["llama"])
    for layer in model.get_base_model().model.layers:
        layer.__class__ = OtherLayer
    return model


def of_another_family():
    return adapted(GemmaConfig(**SIZES, num_hidden_layers=2))


@pytest.mark.parametrize("make", [partly_adapted, with_a_hook, with_eager_attention, with_another_class, of_another_family])
def test_other_layers_are_left_alone(make):
    model = make()
    assert fusable_layers(model) == []
    with torch.no_grad():
        with merged_adapter(model, fuse_layers=True):
            found = model(torch.arange(5, 25)[None]).logits
        with merged_adapter(model):
            assert torch.equal(model(torch.arange(5, 25)[None]).logits, found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_on_a_gpu(family):
    """With float64 every draw is the same, from a graph as from caches that grow."""
    model, tokenizer = adapted(FAMILIES[family], torch.float64).cuda(), byte_tokenizer()
    tokenizer.eos_token = None
    usual = HFRolloutEngine(model, tokenizer, merge_adapter=True, fixed=False, fuse_layers=False)
    expected = usual.generate(PROMPTS, SAMPLING, seed=3)
    engine = HFRolloutEngine(model, tokenizer, merge_adapter=True)
    assert engine.fuse_layers and engine.generate(PROMPTS, SAMPLING, seed=3) == expected
    assert engine.generate(PROMPTS, SAMPLING, seed=3) == expected, "with the graphs of the first call"
