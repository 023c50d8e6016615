"""A base model in 4 bits (bitsandbytes)."""

from __future__ import annotations

import pytest
import torch
from peft.utils.integrations import dequantize_module_weight

from firedistill.models.errors import ModelError
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.models.quantized import quantized_layers
from firedistill.models.states import score_responses, unwrap
from firedistill.rollout import Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.merging import fusable_layers, mergeable_layers
from firedistill.run.identity import model_fingerprint
from firedistill.run.log import read_jsonl
from killable import same_runs, train
from test_preflight import found
from test_resume import die, interrupted
from test_rollouts import GREEDY, PROMPTS, by_generate
from tiny import save_checkpoint

pytest.importorskip("bitsandbytes", reason="quantization nf4 needs bitsandbytes: pip install 'firedistill[quant]'")
LINEAR = 2 * 7  # layers of the tiny model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A model whose sizes are multiples of 64, the number of weights that share a scale."""
    return save_checkpoint(tmp_path_factory.mktemp("model") / "base", sizes=(64, 128))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def quantized(request, model):
    """The tiny model in 4 bits with an adapter that is not zero, and its tokenizer."""
    device = torch.device(request.param)
    base, tokenizer = load_model_and_tokenizer(model, dtype="float32", quantization="nf4", device=device)
    adapted = add_lora(base).to(device)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return adapted.eval(), tokenizer


@torch.no_grad()
def test_states_are_those_of_the_dequantized_weights(quantized, model):
    adapted, _ = quantized
    layers = quantized_layers(adapted)
    assert len(layers) == LINEAR
    plain = add_lora(load_model_and_tokenizer(model, dtype="float32")[0]).to(adapted.device).eval()
    weights = [dequantize_module_weight(layer) for layer in layers]
    bases = [module for name, module in plain.named_modules() if name.endswith("base_layer")]
    for base, weight in zip(bases, weights, strict=True):
        assert 0.08 < (base.weight - weight).norm() / base.weight.norm() < 0.11, "four bits"
        base.weight.copy_(weight)
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            parameter.copy_(adapted.get_parameter(name))
    states = [score_responses(m, PROMPTS[:3], PROMPTS[3:]).hidden for m in (adapted, plain)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


def test_sampling_runs_unmerged_and_equals_generate(quantized):
    adapted, tokenizer = quantized
    assert mergeable_layers(adapted) == fusable_layers(adapted) == []
    ours, theirs = HFRolloutEngine(adapted, tokenizer), by_generate(adapted, tokenizer)
    assert ours.causal_lm is unwrap(adapted)
    assert ours.generate(PROMPTS, GREEDY, seed=0) == theirs.generate(PROMPTS, GREEDY, seed=0)
    fixed = HFRolloutEngine(adapted, tokenizer, fixed=True)
    sampling = Sampling(max_new_tokens=20)
    assert fixed.generate(PROMPTS, sampling, seed=1) == ours.generate(PROMPTS, sampling, seed=1)


def test_a_killed_run_resumes_bit_for_bit_and_leaves_the_base_alone(model, tmp_path):
    whole = train(model, tmp_path / "whole", "fire", 3, quantization="nf4")
    with pytest.raises(ConnectionResetError):
        interrupted(model, tmp_path / "killed", 3, die, "fire", 3, quantization="nf4")
    resumed = train(model, tmp_path / "killed", "fire", 3, quantization="nf4")
    assert resumed.resumed_from == tmp_path / "killed" / "checkpoint-2"
    assert same_runs(tmp_path / "whole", tmp_path / "killed") == []
    assert all(row["skipped_update"] == 0 for row in read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    untouched = add_lora(load_model_and_tokenizer(model, dtype="float32", quantization="nf4")[0])
    assert model_fingerprint(whole.model) == model_fingerprint(untouched)


def test_a_teacher_in_four_bits(model, tmp_path):
    """The student is not quantized."""
    trainer = train(model, tmp_path / "run", "full_context", 2, teacher=model, teacher_quantization="nf4")
    assert len(quantized_layers(trainer.setup.teacher_model)) == LINEAR and quantized_layers(trainer.model) == []
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_training_is_right_after_an_evaluation(model, tmp_path):
    texts = found(model, tmp_path, quantization="nf4")
    assert any("gradient differs by" in text for text in texts["note"]) and not texts["error"]


def test_weights_that_are_restored_wrongly_are_refused(model, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    right = functional.dequantize_4bit
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *state: right(*state).roll(1))
    with pytest.raises(
        ModelError, match=r"restores 4-bit weights with \d+ columns wrongly on cpu \(they change by 1\d\d%; 15% are"
    ):
        load_model_and_tokenizer(model, dtype="float32", quantization="nf4")


def test_sizes_that_are_no_multiple_of_the_block_are_right_or_refused(checkpoint):
    """bitsandbytes 0.50.2 restores them wrongly on CPUs with AVX512."""
    try:
        quantized, _ = load_model_and_tokenizer(checkpoint, dtype="float32", quantization="nf4")
    except ModelError as error:
        assert "restores 4-bit weights with 32 columns wrongly on cpu" in str(error)
        return
    plain, _ = load_model_and_tokenizer(checkpoint, dtype="float32")
    for name, weight in [(n, p) for n, p in plain.named_parameters() if n.endswith("proj.weight")]:
        found = dequantize_module_weight(quantized.get_submodule(name.removesuffix(".weight")))
        assert (found - weight).norm() < 0.15 * weight.norm()
