"""What a GPU would do differently, as far as a CPU can show it: decisions by memory, waits, types, launchers, determinism."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from firedistill import SelfDistillConfig, SelfDistillTrainer, setup
from firedistill.checks import chosen_for_the_device
from firedistill.memory import free_memory, held_memory, total_memory, unused_memory
from firedistill.models import loading
from firedistill.models.errors import ModelError
from firedistill.models.loading import load_model_and_tokenizer, weight_bytes
from firedistill.models.lora import add_lora
from firedistill.models.states import ResponseStates
from firedistill.objectives import MicroBatch, load_objective
from firedistill.ops import Head, fire_head
from firedistill.ops.fire_head import fire_head_loss, first_pass
from firedistill.ops.head import chunked_token_loss
from firedistill.rollout import Response, Rollout, Sampling
from firedistill.rollouts.merging import merged_bytes
from firedistill.rollouts.sampling import CANDIDATES, choose_tokens, draw
from firedistill.run.checkpoints import random_state, restore_random_state
from firedistill.tasks import Example, FeedbackField, Verdict
from firedistill.teacher.ema import EMAWeights
from tiny import ToyTask, adapter_weights, byte_tokenizer, random_model, run_config, run_trainer

GPU = torch.device("cuda")


# ---- Memory ------------------------------------------------------------------------------------------------------------------


def test_the_cache_of_the_allocator_counts_as_unused(monkeypatch):
    for name, value in {"mem_get_info": (70, 100), "memory_reserved": 25, "memory_allocated": 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert unused_memory(GPU) == 75 and free_memory(GPU) == 95


def test_the_processes_of_a_host_share_its_memory(monkeypatch):
    whole = unused_memory(torch.device("cpu"))
    total = total_memory()
    assert whole < total < 1e15
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert total_memory() == total / 8
    assert unused_memory(torch.device("cpu")) == pytest.approx(whole / 8, rel=0.2)


def test_a_mapped_file_counts_once_as_memory_that_may_be_used(tmp_path, monkeypatch):
    """Its pages are resident in this process and available to every process; only memory that no file backs is added."""
    monkeypatch.setattr("firedistill.memory.unused_memory", lambda device: 0)
    cpu, size = torch.device("cpu"), 64 << 20
    (tmp_path / "weights").write_bytes(bytes(size))
    free, held = free_memory(cpu), held_memory(cpu)
    weights = torch.from_file(str(tmp_path / "weights"), shared=True, size=size // 4)
    assert float(weights.sum()) == 0, "every page is read"
    assert held_memory(cpu) - held > 0.9 * size and abs(free_memory(cpu) - free) < 0.1 * size
    own = torch.ones(size // 4)
    assert free_memory(cpu) - free > 0.9 * own.nbytes


def open_settings(**changes) -> SimpleNamespace:
    return SimpleNamespace(
        **{"device": GPU, "rollouts": "hf", "merge_adapter": None, "gradient_checkpointing": None, **changes}
    )


@pytest.mark.parametrize(("spare", "merges"), [(0.9, False), (1.1, True)])
def test_merging_is_decided_by_the_unused_memory(spare, merges, monkeypatch):
    """Twice the copies must be unused, beyond the model that still has to move to the device."""
    model = add_lora(random_model())
    unused = sum(p.nbytes for p in model.parameters()) + spare * 2 * merged_bytes(model)
    monkeypatch.setattr(setup, "unused_memory", lambda device: unused)
    args = open_settings(activation_checkpointing=True)
    decided = setup.decide_for_device(args, model)
    assert args.merge_adapter is merges and decided["merge_adapter"].startswith(f"{str(merges).lower()}: copies take 0.0 GB")
    assert decided["merge_adapter"].endswith("; sampling fuses 2 layers") is merges
    by_vllm = setup.decide_for_device(open_settings(activation_checkpointing=True, rollouts="vllm"), model)
    assert "fuses" not in by_vllm["merge_adapter"]
    args = open_settings(merge_adapter=not merges, activation_checkpointing=True)
    assert setup.decide_for_device(args, model) == {} and args.merge_adapter is not merges, "what is set is not decided"


@pytest.mark.parametrize(("unused", "recomputes"), [(1e6, True), (1e12, False)])
def test_activations_are_recomputed_where_they_do_not_fit(unused, recomputes, monkeypatch, tmp_path):
    args, model = run_config("unused", tmp_path, gradient_checkpointing=None), add_lora(random_model())
    monkeypatch.setattr(SelfDistillConfig, "device", GPU)
    monkeypatch.setattr(setup, "unused_memory", lambda device: unused)
    decided = setup.decide_for_device(args, model)
    assert args.gradient_checkpointing is args.activation_checkpointing is recomputes
    assert "without it a step adds up to" in decided["gradient_checkpointing"]


def test_activations_of_a_model_that_cannot_recompute_them_are_kept(monkeypatch, tmp_path):
    args, model = run_config("unused", tmp_path, gradient_checkpointing=None), add_lora(random_model())
    monkeypatch.setattr(type(model.get_base_model()), "supports_gradient_checkpointing", False)
    decided = setup.decide_for_device(args, model)
    assert (
        args.activation_checkpointing is False and "Qwen2ForCausalLM does not support it" in decided["gradient_checkpointing"]
    )


@pytest.mark.parametrize(("fsdp_size", "tokens"), [(None, 32_768), (1, 32_768), (2, 8192)])
def test_a_base_that_is_spread_is_scored_in_batches_that_need_not_become_smaller(fsdp_size, tokens, monkeypatch, tmp_path):
    args, explicit = (run_config("unused", tmp_path, fsdp_size=fsdp_size, score_tokens_per_forward=n) for n in (None, 100))
    assert args.tokens_per_forward == 8192
    monkeypatch.setattr(SelfDistillConfig, "device", GPU)
    assert args.tokens_per_forward == tokens and explicit.tokens_per_forward == 100


def test_decisions_on_a_cpu(checkpoint, tmp_path):
    found = setup.load_setup(run_config(checkpoint, tmp_path / "run", gradient_checkpointing=None), task=ToyTask())
    assert found.args.gradient_checkpointing is True and found.args.merge_adapter is True
    assert found.decided == {
        "merge_adapter": "true: the default for cpu",
        "gradient_checkpointing": "true: the default for cpu",
    }


@pytest.mark.parametrize(
    ("device", "dtype", "named", "own"),
    [
        ("cpu", torch.bfloat16, None, True),
        ("cuda", torch.float32, None, True),
        ("cuda", torch.bfloat16, None, False),
        ("cuda", torch.float32, "sdpa", False),
    ],
)
def test_where_the_packages_own_attention_is_the_default(device, dtype, named, own):
    args = SimpleNamespace(device=torch.device(device), attn_implementation=named)
    assert setup.prefers_own_attention(args, add_lora(random_model(dtype=dtype))) is own


def test_attention_on_a_gpu_does_without_cudnn(monkeypatch):
    """cuDNN plans every new shape on the host. The switch is one of the process."""
    args, model = open_settings(merge_adapter=False, activation_checkpointing=True), add_lora(random_model())
    monkeypatch.setattr(setup, "unused_memory", lambda device: 1e12)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for device, enabled in (("cpu", True), ("cuda", False)):
            torch.backends.cuda.enable_cudnn_sdp(True)
            setup.decide_for_device(SimpleNamespace(**{**vars(args), "device": torch.device(device)}), model)
            assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_preflight_names_what_attention_does_without(checkpoint, tmp_path, monkeypatch):
    found = setup.load_setup(run_config(checkpoint, tmp_path / "run"), task=ToyTask())
    assert "cuDNN" not in chosen_for_the_device(found)["attn_implementation"]
    monkeypatch.setattr(SelfDistillConfig, "device", GPU)
    assert chosen_for_the_device(found)["attn_implementation"].endswith(", without cuDNN's kernels")


def test_a_resumed_run_keeps_the_decisions_of_its_checkpoint(checkpoint, tmp_path, monkeypatch):
    first = run_trainer(checkpoint, tmp_path / "run", max_steps=2)
    first.train()

    def otherwise(args, model, teacher):
        args.merge_adapter = False if args.merge_adapter is None else args.merge_adapter
        return {"merge_adapter": "false: less memory is unused"}

    monkeypatch.setattr("firedistill.setup.decide_for_device", otherwise)
    second = run_trainer(checkpoint, tmp_path / "run", max_steps=2)
    assert second.rollout_engine.merge_adapter is False
    assert second.checkpoint_to_resume(None) is not None
    assert second.args.merge_adapter is True and second.rollout_engine.merge_adapter is second.eval_engine.merge_adapter is None
    for folder in (copy := Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))).glob("checkpoint-*"):
        shutil.rmtree(folder)
    (copy / "finished.json").unlink()
    third = run_trainer(checkpoint, copy, max_steps=2)
    assert third.checkpoint_to_resume(None) is None, "before the first checkpoint, the decisions are made again"
    monkeypatch.setattr("firedistill.setup.decide_for_device", lambda *_: {})
    explicit = run_trainer(checkpoint, tmp_path / "run", max_steps=2, merge_adapter=False)
    with pytest.raises(ValueError, match="merge_adapter was True, is False"):
        explicit.checkpoint_to_resume(None)


@pytest.mark.parametrize(
    ("multiplies", "share", "changes", "expected"),
    [
        (True, 100, {}, "bfloat16"),
        (False, 4.1, {}, "float32"),
        (False, 3.9, {}, "bfloat16"),
        (False, 100, {"quantization": "nf4"}, "bfloat16"),
        (False, 100, {"quantization": "auto"}, "float32"),
        (True, 100, {"device": GPU}, "bfloat16"),
        (False, 4.1, {"device": GPU}, "float32"),
        (False, 3.9, {"device": GPU}, "bfloat16"),
        (False, 100, {"model_dtype": "bfloat16"}, "bfloat16"),
        (True, 100, {"model_dtype": "float32"}, "float32"),
    ],
)
def test_float32_where_a_device_does_not_multiply_bfloat16(multiplies, share, changes, expected, checkpoint, monkeypatch):
    size = weight_bytes(checkpoint, "float32")
    monkeypatch.setattr("firedistill.models.attention.multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or multiplies)
    on_gpu = changes.get("device") == GPU
    monkeypatch.setattr(setup, "total_memory", lambda: 0 if on_gpu else share * size)
    monkeypatch.setattr(setup, "unused_memory", lambda device: share * size if device == GPU else 0)
    given = {"device": torch.device("cpu"), "model_dtype": "auto", "model_revision": None, "quantization": None}
    args = open_settings(**given | changes)
    decided = setup.decide_dtype(args, checkpoint)
    assert args.model_dtype == expected
    assert [text.partition(":")[0] for text in decided.values()] == ([] if "model_dtype" in changes else [expected])


def test_a_run_on_the_cpu_leaves_the_gpu_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: pytest.fail("makes a CUDA context"))
    state = random_state()
    assert state["cuda"] is None
    restore_random_state(state | {"cuda": torch.zeros(16, dtype=torch.uint8)})


def test_the_type_of_a_model_that_is_given(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        config = run_config("unused", tmp_path / str(dtype), model_dtype="auto")
        found = setup.load_setup(config, model=random_model(dtype=dtype), tokenizer=byte_tokenizer(), task=ToyTask())
        assert f"torch.{found.args.model_dtype}" == str(dtype) and "model_dtype" not in found.decided


@pytest.mark.parametrize(("share", "expected"), [(1.4, "nf4"), (1.6, None)])
def test_four_bits_where_sixteen_do_not_fit(share, expected, checkpoint, monkeypatch):
    size = weight_bytes(checkpoint, "bfloat16")
    assert size == 2 * sum(p.numel() for p in random_model().parameters())
    monkeypatch.setattr(setup, "unused_memory", lambda device: share * size)
    args = SelfDistillConfig(quantization="auto", model_dtype="bfloat16", use_cpu=True)
    assert "1.5 times the weights" in setup.decide_quantization(args, checkpoint)["quantization"]
    assert args.quantization == expected


def test_processes_with_different_memory_decide_alike(checkpoint, monkeypatch, tmp_path):
    """By the smallest: another process has no unused memory, or a GPU that does not multiply bfloat16."""
    args = run_config(
        "unused", tmp_path, gradient_checkpointing=None, quantization="auto", model_dtype="auto", merge_adapter=None
    )
    monkeypatch.setattr(SelfDistillConfig, "device", GPU)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(setup, "unused_memory", lambda device: 1e12)
    monkeypatch.setattr(setup, "gather_object", lambda own: [*own, False if own == [True] else 0.0])
    decided = setup.decide_dtype(args, checkpoint) | setup.decide_quantization(args, checkpoint)
    decided |= setup.decide_for_device(args, add_lora(random_model()))
    assert (args.quantization, args.merge_adapter, args.gradient_checkpointing) == ("nf4", False, True)
    assert "the cuda device does not multiply bfloat16" in decided["model_dtype"]
    assert all(text.count("0.0 GB") for text in decided.values()), "the text has the memory that has decided"


def test_weights_are_read_to_their_device(checkpoint, monkeypatch, tmp_path):
    options, original = [], loading.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        loading.AutoModelForCausalLM, "from_pretrained", lambda *a, **given: options.append(given) or original(*a, **given)
    )
    model, _ = load_model_and_tokenizer(checkpoint, device=torch.device("cpu"), attn_implementation="eager")
    assert options[0]["device_map"] == {"": torch.device("cpu")} and model.config._attn_implementation == "eager"
    assert not any(hasattr(module, "_hf_hook") for module in model.modules()), "hooks would keep the adapter from merging"
    setup.load_setup(run_config(checkpoint, tmp_path / "run", attn_implementation="eager"), task=ToyTask())
    assert "device_map" not in options[1] and options[1]["attn_implementation"] == "eager"


# ---- Types, launchers, compilers -------------------------------------------------------------------------------------------------


def test_float16_is_refused(checkpoint, tmp_path):
    reason = "float16 is not offered: most logit gradients are below its range"
    with pytest.raises(ValueError, match=f"model_dtype is 'float16': expected 'auto' or 'bfloat16' or 'float32'.*{reason}"):
        SelfDistillConfig(model_dtype="float16")
    with pytest.raises(ModelError, match="unknown dtype 'float16'"):
        load_model_and_tokenizer(checkpoint, dtype="float16")
    config = run_config(checkpoint, tmp_path / "run")
    with pytest.raises(ValueError, match="the model is in float16.*load it in bfloat16 or float32"):
        setup.load_setup(config, model=random_model(dtype=torch.float16), tokenizer=byte_tokenizer(), task=ToyTask())


def test_a_model_without_a_head_is_refused(checkpoint, tmp_path):
    config = run_config(checkpoint, tmp_path / "run")
    with pytest.raises(
        ValueError, match="the model is a Qwen2Model, without a language-model head: load it by AutoModelForCausalLM"
    ):
        setup.load_setup(config, model=random_model().model, tokenizer=byte_tokenizer(), task=ToyTask())


def test_a_model_on_several_devices_is_refused(tmp_path, checkpoint):
    """As `from_pretrained` of transformers spreads it by `device_map="auto"`."""
    config, model = run_config(checkpoint, tmp_path / "run"), random_model()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": 0}
    with pytest.raises(ValueError, match=r"on several devices \(0, 1\): load it onto one.*fsdp_size"):
        setup.load_setup(config, model=model, tokenizer=byte_tokenizer(), task=ToyTask())
    model.hf_device_map = {"": 0}
    setup.load_setup(config, model=model, tokenizer=byte_tokenizer(), task=ToyTask())


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "--mixed_precision no"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend no"),
    ],
)
def test_what_a_launcher_switches_on_is_refused(name, value, fix, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} is {value!r}: it would apply to a part of the step only.*{fix}"):
        SelfDistillConfig(use_cpu=True)
    monkeypatch.setenv(name, "no")
    SelfDistillConfig(use_cpu=True)


@pytest.mark.parametrize(
    "setting", [{"torch_compile": True}, {"torch_compile_backend": "inductor"}, {"torch_compile_mode": "default"}], ids=str
)
def test_compiling_is_refused_by_name_and_tf32_stays_off(setting):
    (name,) = setting
    before = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(ValueError, match=f"{name} is .*Not supported"):
        SelfDistillConfig(**setting)
    assert torch.backends.cuda.matmul.allow_tf32 == before


# ---- Determinism and rounding ------------------------------------------------------------------------------------------------------


@pytest.fixture
def restored_algorithms(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_deterministic_algorithms_on_request(checkpoint, tmp_path, restored_algorithms, monkeypatch):
    """Every operation of a run has one, and on a CPU the result is the same."""
    plain = run_trainer(checkpoint, tmp_path / "plain", max_steps=2)
    plain.train()
    assert not torch.are_deterministic_algorithms_enabled()
    trainer = run_trainer(checkpoint, tmp_path / "deterministic", max_steps=2, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    trainer.train()
    for name, weights in adapter_weights(plain).items():
        assert torch.equal(adapter_weights(trainer)[name], weights)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with pytest.raises(ValueError, match="full_determinism is True: expected False .Use deterministic"):
        SelfDistillConfig(full_determinism=True)


class Operations(TorchDispatchMode):
    """Names and types of the operations inside the block."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found.append((function.overloadpacket.__name__, result.dtype))
        return result


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_p=1.0), Sampling(top_p=1.0, top_k=5)], ids=["top-p", "all", "top-k"]
)
def test_draws_add_integers_only(sampling):
    """PyTorch has no deterministic cumulative sum of floating-point numbers on GPUs."""
    scores, uniforms = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)), torch.rand(4, dtype=torch.float64)
    with Operations() as operations:
        tokens = choose_tokens(scores, sampling, uniforms)
    assert {dtype for name, dtype in operations.found if name.startswith("cumsum")} == {torch.int64}
    assert torch.equal(draw(scores, sampling, uniforms, 500), tokens) and CANDIDATES < 500


def test_the_distance_of_the_teacher_takes_as_many_operations_for_many_parameters():
    weights = EMAWeights(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(20))), 0.1)
    with Operations() as operations:
        assert weights.distance() == 0
    assert len([name for name, _ in operations.found if name != "detach"]) <= 3


class Watched(torch.nn.Linear):
    """Records, forward and backward, whether PyTorch may add partial sums in bfloat16."""

    def forward(self, states):
        seen = self.seen = getattr(self, "seen", [])
        allowed = torch.backends.cuda.matmul
        seen.append(allowed.allow_bf16_reduced_precision_reduction)
        result = super().forward(states)
        if result.requires_grad:
            result.register_hook(lambda gradient: seen.append(allowed.allow_bf16_reduced_precision_reduction))
        return result


def test_products_with_the_head_add_in_float32():
    layer = Watched(8, 20, bias=False).bfloat16().requires_grad_(False)
    hidden = torch.randn(6, 8).bfloat16().requires_grad_()
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    correct = torch.tensor([True, True, False, False, False, False])
    fire_head_loss(
        Head(layer),
        hidden,
        torch.ones(6),
        token_ids=torch.arange(6),
        correct=correct,
        teacher_hidden=torch.randn(4, 8).bfloat16(),
        loo_hidden=torch.randn(2, 4, 8).bfloat16(),
    ).loss.backward()
    chunked_token_loss(Head(layer), hidden, torch.ones(6), lambda logits, rows: logits.logsumexp(-1)).backward()
    assert len(layer.seen) >= 6 and not any(layer.seen)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == before


def test_chunks_are_larger_on_gpus():
    """Fewer, larger products; what is turned into distributions at once follows the cache of a CPU."""
    assert fire_head.CHUNK_ELEMENTS_GPU == 2**27 and fire_head.CHUNK_ELEMENTS == 2**23
    assert fire_head.default_chunk(151_936, gpu=True) == 883 and fire_head.default_chunk(151_936, gpu=False) == 220


def test_the_trainer_uses_what_was_decided(checkpoint, tmp_path):
    trainer: SelfDistillTrainer = run_trainer(checkpoint, tmp_path / "run", merge_adapter=False)
    assert trainer.rollout_engine.merge_adapter is trainer.eval_engine.merge_adapter is False
    assert trainer.rollout_engine.decoder is None, "on a CPU the loop looks at every token"


class Waits(TorchDispatchMode):
    """Counts the operations that tell the host how many elements a mask selects.

    Args:
        numbers: count also assignments of one number, which copy it to the device; a single row of a tensor cannot be told apart.
        reads: count also numbers that the host reads.
    """

    def __init__(self, numbers: bool = False, reads: bool = False):
        super().__init__()
        self.count, self.numbers, self.reads = 0, numbers, reads

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        selects = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        assigns = self.numbers and name == "index_put_" and args[2].dim() == 0
        self.count += name == "nonzero" or selects or assigns or self.reads and name == "_local_scalar_dense"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("attribution", [True, False])
def test_the_head_waits_once_per_chunk_and_not_per_block(attribution, monkeypatch):
    generator, counts = torch.Generator().manual_seed(0), []
    hidden, teacher = (torch.randn(12, 8, generator=generator) for _ in range(2))
    weight, correct = torch.randn(30, 8, generator=generator), torch.arange(12) < 4
    for rows in (12, 1):
        monkeypatch.setattr(fire_head, "BLOCK_ELEMENTS", rows * 30)
        settings = {
            "token_ids": torch.arange(12),
            "correct": correct,
            "teacher_hidden": teacher[:8],
            "attribution": attribution,
        }
        with Waits() as waits:
            fire_head_loss(weight, hidden, torch.ones(12), loo_hidden=teacher[None, :8] + 0.1, **settings)
        counts.append(waits.count)
    assert counts == [3, 3], "right tokens, wrong tokens, and those of the chunk over the radius"


@pytest.mark.parametrize("attribution", [True, False])
def test_nothing_waits_between_the_last_views_and_the_backward_pass(attribution):
    """Not even for how many tokens are over the radius: the host starts the backward pass while the device reads the views.

    The rows are not compiled here. In that case each block reads a number, which is not counted.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(12, 8, generator=generator) for _ in range(2))
    correct = torch.arange(12) < 4
    first = first_pass(
        torch.randn(30, 8, generator=generator),
        hidden,
        torch.ones(12),
        token_ids=torch.arange(12),
        correct=correct,
        teacher_hidden=teacher[:8],
        attribution=attribution,
    )
    assert (len(first.over) > 1) == attribution
    fields = (FeedbackField("a", "x"), FeedbackField("b", "y"))
    rollouts = [
        Rollout(
            Example("1", "q", "a"), [1], Response([5] * length, "", True), Verdict(right, None, "a"), () if right else fields
        )
        for length, right in ((4, True), (8, False))
    ]
    with Waits(numbers=True) as in_head:
        output = first.attribute(teacher[first.over].repeat(2, 1, 1))
    batch = MicroBatch(rollouts, [None, None], ResponseStates(hidden, [4, 8]), head=None, teacher=None)
    with Waits(numbers=True, reads=True) as in_metrics:
        metrics = load_objective("fire" if attribution else "no_attribution").metrics(batch, correct, output)
    assert in_head.count == in_metrics.count == 0
    row = metrics.row()
    assert row["chi_active"] == (len(first.over) if attribution else 3) / 8 and ("field_energy_b" in row) == attribution
