"""Rollouts by vLLM: what is handed over, what is refused, and servers that fail. The real engine runs where vLLM is installed.

`make test-vllm` makes an environment with vLLM and runs these tests in it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerBase,
)

from firedistill import Example, Verdict, load_task
from firedistill.models import LORA_TARGET_MODULES
from firedistill.models.errors import ModelError
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.models.states import score_responses, unwrap
from firedistill.ops import Head
from firedistill.prompts import PromptEncoder, student_messages
from firedistill.rollout import Response, Rollout, Sampling
from firedistill.rollouts import load, orphans, padding, server, vllm, weights
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.padding import HeadPadding, PaddingError, cache_bytes_per_token, padding_in, padding_on_cpu
from firedistill.rollouts.remote import VERSIONS, RolloutError, check_requests, prompt_seed
from firedistill.rollouts.sampler import fitting_prompts
from firedistill.rollouts.server import VLLMServerEngine
from firedistill.rollouts.vllm import SETTINGS, VLLMEngine, environment_of_engine
from firedistill.rollouts.weights import AdapterError, base_checkpoint, check_adapter, version_of, write_adapter, write_merged
from firedistill.run.log import read_jsonl
from firedistill.step import engine_gap
from tiny import ToyTask, byte_tokenizer, random_model, run_config, run_trainer

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=12)
PROMPTS = [list(range(10, 20)), list(range(30, 37)), [5, 6, 7] * 4]
needs_vllm = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with heads of 32 numbers, the smallest size that vLLM supports on CPUs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=263,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.25,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, temperature=0.3, top_k=7, do_sample=True)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def student(folder: str, seed: int = 1, **lora) -> PeftModel:
    """The model with an adapter that changes its answers."""
    model, _ = load_model_and_tokenizer(folder, dtype="float32")
    torch.manual_seed(0)
    peft = add_lora(model, **{"r": 4, "alpha": 8, **lora})
    change(peft, seed)
    return peft


@torch.no_grad()
def change(model: PeftModel, seed: int, size: float = 0.2) -> None:
    """Other values of the adapter's B factors."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def model(folder):
    return student(folder)


# ---- Weights -----------------------------------------------------------------------------------------------------------------


def test_a_version_is_named_by_its_contents(folder):
    one, other = student(folder), student(folder)
    assert version_of(one) == version_of(other)
    with torch.no_grad():
        next(p for name, p in other.named_parameters() if "lora_A" in name)[0, 0] += 1e-6
    assert version_of(one) != version_of(other)


def test_an_adapter_is_what_plain_peft_loads(model, folder, tmp_path):
    write_adapter(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), tmp_path / "adapter")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert not model.peft_config["default"].inference_mode, "the student is still trained"


def test_merged_projections_have_the_names_of_the_checkpoint(model, folder, tmp_path):
    write_merged(model, tmp_path / "merged")
    merged, base = load_file(tmp_path / "merged" / "model.safetensors"), load_file(Path(folder) / "model.safetensors")
    assert len(merged) == 14 and merged.keys() <= base.keys()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    plain.load_state_dict(merged, strict=False)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_projections_that_vllm_joins_with_an_adapted_one_are_transferred(folder, tmp_path):
    write_merged(student(folder, target_modules=["q_proj", "gate_proj"]), tmp_path / "merged")
    merged, plain = load_file(tmp_path / "merged" / "model.safetensors"), load_file(Path(folder) / "model.safetensors")
    assert len(merged) == 14
    for name, weight in merged.items():
        assert torch.equal(weight, plain[name]) != any(target in name for target in ("q_proj", "gate_proj"))


def test_the_base_is_the_checkpoint_it_was_loaded_from_or_a_copy(model, folder, tmp_path):
    assert base_checkpoint(model, tmp_path) == folder
    own = add_lora(LlamaForCausalLM.from_pretrained(folder), r=4, alpha=8)
    with torch.no_grad():
        own.get_base_model().model.norm.weight.mul_(2)
    copy = AutoModelForCausalLM.from_pretrained(base_checkpoint(own, tmp_path))
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad(), own.disable_adapter():
        torch.testing.assert_close(copy(ids).logits, own(ids).logits)


def test_adapters_that_vllm_cannot_run_are_refused(folder):
    base, _ = load_model_and_tokenizer(folder, dtype="float32")
    from peft import LoraConfig, get_peft_model

    for options, named in [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "a bias"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "lm_head"]}, "tied to the embeddings"),
    ]:
        adapted = get_peft_model(base, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))
        with pytest.raises(AdapterError, match=f"{named}.*use --rollouts hf"):
            check_adapter(adapted)
        base = adapted.unload()


def test_scratch_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARED_MEMORY", tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = f"firedistill-rollouts-{socket.gethostname()}-{weights.pid_namespace()}-"
    stale, alive = tmp_path / f"{here}{ended.pid}-x", tmp_path / f"{here}{os.getppid()}-x"
    other = tmp_path / "firedistill-notes"
    for path in (stale, alive, other):
        path.mkdir()
    mine = weights.scratch_folder(1000)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, other.name, mine.name}


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [(socket, "gethostname", "another-host"), (weights, "pid_namespace", 1)],
    ids=["host", "container"],
)
def test_scratch_folders_of_other_hosts_and_containers_stay(module, name, value, tmp_path, monkeypatch):
    """A process of another one is none of this one's, whatever its id."""
    monkeypatch.setattr(weights, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(weights.psutil, "pid_exists", lambda pid: False)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, name, lambda: value)
        theirs = weights.scratch_folder(1000)
    mine = [weights.scratch_folder(1000) for _ in range(2)]
    assert set(tmp_path.iterdir()) == {theirs, mine[1]}


def test_scratch_folders_are_in_memory_where_they_fit(tmp_path, monkeypatch):
    """A container's /dev/shm has 64 MB by default."""
    in_memory, elsewhere = tmp_path / "shm", tmp_path / "tmp"
    for place in (in_memory, elsewhere):
        place.mkdir()
    monkeypatch.setattr(weights, "SHARED_MEMORY", in_memory)
    monkeypatch.setattr(weights.tempfile, "gettempdir", lambda: str(elsewhere))
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    assert weights.scratch_folder(2**20).parent == in_memory and weights.scratch_folder(2**30).parent == elsewhere
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert weights.scratch_folder(2**20).parent == elsewhere, "the other processes write as much"


# ---- Heads of a size that vLLM does not support on CPUs ----------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("kind", "padded"), [("qwen2", 32), ("llama", 20)])
def test_a_model_with_padded_heads_computes_the_same(kind, tied, padded, tmp_path):
    """The base model, with the adapter, and with merged projections; heads of 8 numbers. The biases are not zero."""
    base = random_model(kind, tied)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    padding, ids = HeadPadding(8, padded), torch.randint(3, 263, (2, 500))
    with torch.no_grad():
        plain = base(ids).logits
    model = add_lora(base, r=4, alpha=8)
    change(model, seed=1)
    folder = base_checkpoint(model, tmp_path, padding)
    copy = AutoModelForCausalLM.from_pretrained(folder)
    assert copy.config.head_dim == padded and padding_in(folder, base.config) == padding
    write_merged(model, tmp_path / "merged", padding)
    write_adapter(model, tmp_path / "adapter", padding)
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, plain, rtol=1e-4, atol=1e-4)
        adapted = model(ids).logits
        assert float((adapted - plain).abs().max()) > 0.1
        torch.testing.assert_close(
            PeftModel.from_pretrained(copy, tmp_path / "adapter")(ids).logits, adapted, rtol=1e-4, atol=1e-4
        )
        merged = AutoModelForCausalLM.from_pretrained(folder)
        found = merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"), strict=False)
        assert not found.unexpected_keys
        torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-4)


def test_heads_are_padded_to_the_next_size_where_that_is_possible(folder):
    assert padding_on_cpu(random_model().config) == HeadPadding(8, 32)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert padding_on_cpu(config) is None and padding_in("", config) is None and padding_in("a/hub-id", config) is None
    for changes in (
        {"num_attention_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"hidden_size": 2048, "head_dim": 1024},
        {"head_dim": 4},
    ):
        with pytest.raises(PaddingError, match="heads of .* are not supported by vLLM on CPUs .* use --rollouts hf"):
            padding_on_cpu(LlamaConfig(**config.to_dict() | {"head_dim": None} | changes))
    with pytest.raises(PaddingError, match="mamba has no attention heads.* use --rollouts hf"):
        padding_on_cpu(MambaConfig())
    assert cache_bytes_per_token(MambaConfig(), torch.float32) == 0


def test_what_cannot_be_padded_is_an_error_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["padding", str(tmp_path / "none"), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        padding.main()
    assert "there is no model" in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- Requests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "limit", "message"),
    [
        ([1], Sampling(temperature=0.005), 5, "temperature is 0.005: vLLM supports 0"),
        ([1], Sampling(temperature=2.5), 5, "temperature is 2.5"),
        ([], GREEDY, 5, "a prompt has no tokens"),
        ([1] * 95, GREEDY, 6, "95 tokens with up to 6 new ones exceeds the engine's context of 100"),
        ([1, 263], GREEDY, 5, "outside of the vocabulary of 263"),
        ([-1], GREEDY, 5, "outside of the vocabulary"),
    ],
)
def test_requests_that_vllm_would_change_are_refused(prompt, sampling, limit, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        check_requests([[1, 2], prompt], sampling, [5, limit], 100, 263)
    check_requests([[1] * 95, [262, 0]], Sampling(temperature=2.0), [5, 0], 100, 263)


def test_every_prompt_of_every_call_has_its_own_seed():
    seeds = [prompt_seed(seed, index) for seed in range(50) for index in range(50)]
    assert len(set(seeds)) == 2500 and 0 <= min(seeds) <= max(seeds) < 2**31 and prompt_seed(3, 4) == prompt_seed(3, 4)


@pytest.mark.parametrize(("visible", "inherited"), [("4,5", "5"), ("4", "1"), ("", "1"), (None, "1"), ("GPU-a,GPU-b", "GPU-b")])
def test_the_engine_sees_the_gpu_of_its_process(visible, inherited, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with environment_of_engine(torch.device("cuda", 1)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == inherited
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_the_engine_inherits_nothing_of_the_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    before = dict(os.environ)
    with environment_of_engine(torch.device("cpu")):
        assert "RANK" not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ and os.environ["MINE"] == "1"
        assert "PYTORCH_ALLOC_CONF" not in os.environ, "sleep mode cannot use it"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
        os.environ["LD_PRELOAD"] = "x.so"
        torch.rand(5)
    assert dict(os.environ) == before and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))


@pytest.mark.parametrize("threads, bound", [(2, "3,5"), (1, "nobind")], ids=["all cores", "some cores"])
def test_the_engine_has_the_threads_of_the_trainer(threads, bound, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with environment_of_engine(torch.device("cpu")):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_CPU_OMP_THREADS_BIND"]) == (str(threads), bound)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with environment_of_engine(torch.device("cpu")):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def on_a_gpu(monkeypatch, dtype):
    """Let engines find vLLM, and the student on a second GPU, with a base model in this type."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.32.0")
    monkeypatch.setattr(LlamaForCausalLM, "dtype", dtype)
    monkeypatch.setattr(PeftModel, "device", torch.device("cuda", 1), raising=False)


def test_on_a_gpu_the_engine_starts_and_wakes_beside_the_student(model, monkeypatch):
    """vLLM starts only if the share that it is given is free, and cannot use what PyTorch keeps in the trainer's process."""
    done: list = []

    class LLM:
        def __init__(self, **options):
            assert options["enable_sleep_mode"]
            done.append(("start", options["gpu_memory_utilization"], options["kv_cache_memory_bytes"]))

        def sleep(self, level):
            done.append(("sleep", level))

        def wake_up(self):
            done.append("wake up")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
    on_a_gpu(monkeypatch, torch.bfloat16)
    for name, function in {
        "empty_cache": lambda: done.append("release"),
        "current_stream": lambda device: None,
        "Event": lambda enable_timing: SimpleNamespace(record=lambda stream: None),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(vllm, "unused_memory", lambda device: 1e9)
    engine = VLLMEngine(model, byte_tokenizer(), context=100, sequences=8)
    engine._wake()
    engine._sleep()
    engine._wake()
    engine.close()
    cache = 2 * 2 * 2 * 32 * 2 * 8 * 256  # keys and values of 8 sequences of 100 tokens, in blocks of 128 and with one to spare
    assert engine.weights == "lora" and done == ["release", ("start", 1e-3, cache), ("sleep", 1), "release", "wake up"]


@pytest.mark.parametrize(("unused", "given"), [(2e6, 0.6), (0.0, "one response")])
def test_the_cache_of_vllm_leaves_room_for_the_rest(unused, given, model, tmp_path, monkeypatch, caplog):
    on_a_gpu(monkeypatch, torch.bfloat16)
    weights = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    monkeypatch.setattr(vllm, "unused_memory", lambda device: weights + unused)
    engine = VLLMEngine(model, byte_tokenizer(), context=100, sequences=64)
    engine.scratch = tmp_path
    one = 2 * 2 * 2 * 32 * 2 * 256
    assert engine._options()["kv_cache_memory_bytes"] == (one if given == "one response" else int(given * unused)) < 64 * one
    assert "64 responses of max_context_tokens would take 0.0 GB, so some of them wait" in caplog.text


def test_a_base_in_float32_on_a_gpu_is_merged(model, monkeypatch):
    on_a_gpu(monkeypatch, torch.float32)
    assert VLLMEngine(model, byte_tokenizer(), context=100).weights == "merged"
    with pytest.raises(AdapterError, match="half precision on a GPU, this one is in float32: use --vllm_weights merged"):
        VLLMEngine(model, byte_tokenizer(), context=100, weights="lora")


def test_the_largest_rank_of_the_adapter_is_requested(folder, tmp_path, monkeypatch):
    adapted = student(folder)
    adapted.peft_config["default"].rank_pattern = {"q_proj": 20}
    on_a_gpu(monkeypatch, torch.bfloat16)
    engine = VLLMEngine(adapted, byte_tokenizer(), context=100)
    engine.scratch = tmp_path
    monkeypatch.setattr(vllm, "unused_memory", lambda device: 1e9)
    assert engine._options()["max_lora_rank"] == 32


def test_the_trainer_does_not_end_with_its_parent_as_its_engine_does(monkeypatch):
    started = []
    monkeypatch.setattr(
        orphans.threading, "Thread", lambda args, **options: SimpleNamespace(start=lambda: started.append(args))
    )
    orphans.end_with_parent()
    with environment_of_engine(torch.device("cpu")):
        orphans.end_with_parent()
    assert not started, "vLLM loads its plugins in the trainer, too"
    monkeypatch.setenv(orphans.STARTED_BY_TRAINER, "1")
    orphans.end_with_parent()
    monkeypatch.setattr(orphans.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    orphans.end_with_parent()
    assert started == [(os.getppid(),), (7,)], "not the process that has adopted an orphan"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "11"}, "{home}/.cache/vllm/rank-11"),  # hosts may share the home folder
        ({}, "{home}/.cache/vllm/rank-3"),
        ({"VLLM_CACHE_ROOT": "/own"}, "/own"),
    ],
)
def test_engines_that_start_together_compile_into_separate_folders(environment, expected, monkeypatch):
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_RANK": "3", **environment}.items():
        monkeypatch.setenv(name, value)
    with environment_of_engine(torch.device("cuda", 3)):
        assert os.environ["VLLM_CACHE_ROOT"] == expected.format(home=Path.home()) and "LOCAL_RANK" not in os.environ


def test_on_a_cpu_the_engine_is_given_no_share_of_a_gpu(model, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.32.0")
    engine = VLLMEngine(model, byte_tokenizer(), context=100)
    engine.scratch = tmp_path
    assert not {"gpu_memory_utilization", "enable_sleep_mode"} & engine._options().keys()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm")
def test_vllm_knows_every_setting():
    from vllm import envs

    assert SETTINGS.keys() <= envs.environment_variables.keys()


def test_without_vllm_the_extra_is_named(model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'firedistill\[vllm\]'"):
        VLLMEngine(model, byte_tokenizer(), context=100)


# ---- Servers -----------------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers like a vLLM server; the tokens of a response depend on the prompt and the adapter's contents.

    Attributes:
        adapters: contents of the registered adapters, by name.
        requests: number of requests by path.
        completions: the bodies of the requests for completions.
        longest: tokens at which it ends every response.
        change: applied to every choice that it answers with.
        faults: statuses, bytes, or None for a cut connection, that the next requests for completions get.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.adapters: dict[str, bytes] = {}
        self.requests, self.faults, self.wrong_model, self.refuses_adapters = Counter(), [], False, ""
        self.longest, self.change = 1000, dict
        self.completions: list[dict] = []
        self.context, self.version, self.models = 4096, "0.32.0", None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def restart(self) -> None:
        self.adapters.clear()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments):
        pass

    def answer(self, status: int, content) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        models = {"data": self.server.models or [{"id": "base", "max_model_len": self.server.context}]}
        self.answer(200, {"version": self.server.version} if self.path == "/version" else models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests[self.path] += 1
        if self.path == "/v1/load_lora_adapter":
            if self.server.refuses_adapters:
                return self.answer(500, {"error": {"message": self.server.refuses_adapters}})
            if body["lora_name"] in self.server.adapters:
                return self.answer(400, {"message": "has already been loaded"})
            self.server.adapters[body["lora_name"]] = (Path(body["lora_path"]) / "adapter_model.safetensors").read_bytes()
            return self.answer(200, "Success")
        if self.path == "/v1/unload_lora_adapter":
            self.server.adapters.pop(body["lora_name"])
            return self.answer(200, "Success")
        self.server.completions.append(body)
        if self.server.faults:
            status = self.server.faults.pop(0)
            if status is None:
                return self.connection.close()
            if isinstance(status, bytes):
                return self.wfile.write(status)
            return self.answer(status, {"message": "fault"})
        if body["model"] not in self.server.adapters:
            return self.answer(404, {"message": f"The model {body['model']} does not exist."})
        ids = answer_of(body["prompt"], self.server.adapters[body["model"]])[: min(body["max_tokens"], self.server.longest)]
        name = "another" if self.server.wrong_model else body["model"]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
        self.answer(200, {"model": name, "choices": [self.server.change(choice)]})


def answer_of(prompt: list[int], adapter: bytes) -> list[int]:
    return [40 + (sum(prompt) + sum(adapter[-64:])) % 100, 41, 2]


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(server, "RETRY_AFTER", 0.01)
    started = [Server(), Server()]
    yield started
    for one in started:
        one.stop()


def engine_for(model, servers, tmp_path, **options) -> VLLMServerEngine:
    urls = [one.url + "/" for one in servers]
    return VLLMServerEngine(
        model, byte_tokenizer(), urls, tmp_path / "adapters", **{"context": 100, "patience": 2.0, **options}
    )


def expected(model, tmp_path, name: str) -> list[list[int]]:
    write_adapter(model, tmp_path / name)
    return [answer_of(prompt, (tmp_path / name / "adapter_model.safetensors").read_bytes()) for prompt in PROMPTS]


def test_servers_share_the_prompts(model, servers, tmp_path):
    engine, told = engine_for(model, servers, tmp_path), []
    responses = engine.generate(PROMPTS, GREEDY, seed=0, progress=told.append)
    assert [response.token_ids for response in responses] == expected(model, tmp_path, "x")
    assert all(response.finished and response.log_probs == [-0.5] * 3 for response in responses)
    assert [one.requests["/v1/completions"] for one in servers] == [2, 1] and told[-1] == 3
    assert set(engine.take_metrics().seconds) == {"seconds_export", "seconds_load", "seconds_sampling"}


def test_servers_get_the_settings_of_the_call(model, servers, tmp_path):
    engine = engine_for(model, servers[:1], tmp_path)
    engine.generate(PROMPTS[:2], Sampling(0.7, 0.9, 6, 12, 1.1), seed=3, limits=[5, 4])
    engine.generate(PROMPTS[:1], Sampling(0.0, 0.9, 6, 12, 1.0), seed=3)
    sampled, other, greedy = sorted(servers[0].completions, key=lambda body: -body["temperature"] - body["max_tokens"] / 100)
    common = {"stop_token_ids": sorted(engine.stop_ids), "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    common |= {"skip_special_tokens": False, "model": sampled["model"]}
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "repetition_penalty": 1.1}
    common["min_p"] = 0.0
    assert sampled.pop("seed") != other.pop("seed") and greedy.pop("seed") is not None
    for body in (sampled, other, greedy):
        body["stop_token_ids"].sort()
    assert sampled == {**common, **settings, "max_tokens": 5, "prompt": PROMPTS[0]}
    assert other == {**common, **settings, "max_tokens": 4, "prompt": PROMPTS[1]}
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    assert greedy == {**common, **plain, "max_tokens": 6, "prompt": PROMPTS[0]}


def test_processes_with_few_prompts_use_all_servers(model, folder, servers, tmp_path, monkeypatch):
    args = run_config(folder, tmp_path / "run", rollouts=",".join(one.url for one in servers))
    for process in (0, 1):
        monkeypatch.setattr(type(args), "process_index", process, raising=False)
        engine, _ = load.load_engines(model, byte_tokenizer(), args, {})
        engine.generate(PROMPTS[:1], GREEDY, seed=0)
    assert [one.requests["/v1/completions"] for one in servers] == [1, 1]


def test_a_hundred_versions_leave_two_and_never_serve_an_old_one(folder, servers, tmp_path):
    model = student(folder)
    engine = engine_for(model, servers, tmp_path)
    for seed in range(100):
        change(model, seed)
        found = [response.token_ids for response in engine.generate(PROMPTS, GREEDY, seed=0)]
        assert found == expected(model, tmp_path, str(seed))
    assert all(len(one.adapters) == 2 for one in servers) and len(list((tmp_path / "adapters").iterdir())) == 2
    engine.close()
    assert not any(one.adapters for one in servers) and not (tmp_path / "adapters").exists()


def test_equal_weights_are_handed_over_once(model, servers, tmp_path):
    engine = engine_for(model, servers, tmp_path)
    for seed in range(3):
        engine.generate(PROMPTS, GREEDY, seed)
    assert [one.requests["/v1/load_lora_adapter"] for one in servers] == [1, 1]


def test_two_runs_on_one_server_have_names_of_their_own(model, servers, tmp_path):
    engines = [engine_for(model, servers, tmp_path / name) for name in ("a", "b")]
    for engine in engines:
        engine.generate(PROMPTS, GREEDY, seed=0)
    assert len(servers[0].adapters) == 2
    engines[0].close()
    engines[1].generate(PROMPTS, GREEDY, seed=0)
    assert len(servers[0].adapters) == 1


CUT = b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"model"'


@pytest.mark.parametrize(
    "faults",
    [
        [503, 500],
        [429, 408, 425],
        [None, None, 500],
        [404],
        [CUT, CUT],
        [CUT.replace(b"200 OK", b"503 Service Unavailable")],
        [b"no status line\r\n\r\n"],
    ],
)
def test_a_server_that_fails_for_a_while_is_retried(faults, model, servers, tmp_path):
    servers[0].faults = list(faults)
    responses = engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0)
    assert [response.token_ids for response in responses] == expected(model, tmp_path, "x") and not servers[0].faults


def test_a_request_that_hangs_does_not_keep_the_caller():
    """Neither an error of another request nor Ctrl-C waits for it; the results that are there are in order."""
    hang, begun = threading.Event(), []

    def call(item):
        begun.append(item)
        if item == 2:
            hang.wait(60)
        if item == 3:
            raise RolloutError("refused")
        return 10 * item

    others = threading.enumerate()
    found, start = server.mapped(call, [0, 1, 2, 3, 4, 5], threads=2), time.monotonic()
    assert [next(found), next(found)] == [0, 10]
    found.close()  # as by an exception in the caller
    assert time.monotonic() - start < 30 and all(thread.daemon for thread in threading.enumerate() if thread not in others)
    hang.set()
    with pytest.raises(RolloutError, match="refused"):
        list(server.mapped(call, [3, 0], threads=1))
    assert list(server.mapped(call, [], threads=4)) == [] and list(server.mapped(call, [4, 0, 1], threads=9)) == [40, 0, 10]


def test_a_server_that_restarts_gets_the_adapter_again(model, servers, tmp_path):
    engine = engine_for(model, servers, tmp_path)
    engine.generate(PROMPTS, GREEDY, seed=0)
    servers[0].restart()
    responses = engine.generate(PROMPTS, GREEDY, seed=1)
    assert [response.token_ids for response in responses] == expected(model, tmp_path, "x")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([503] * 999, "has not answered for 0 s"),
        ([CUT] * 999, r"has not answered for 0 s \(IncompleteRead\(8 bytes read, 92 more expected\)\)"),
        ([400], "refuses a request"),
        ([404] * 4, "has lost the adapter .* twice"),
    ],
)
def test_a_server_that_stays_broken_is_an_error(faults, message, model, servers, tmp_path):
    servers[0].faults = faults
    with pytest.raises(RolloutError, match=message):
        engine_for(model, servers, tmp_path, patience=0.2).generate(PROMPTS, GREEDY, seed=0)


def test_a_completion_may_take_a_second_per_token_longer(model, servers, tmp_path, monkeypatch):
    asked, sent = [], server.request_json

    def request_json(address, path, body, timeout):
        if address != servers[0].url:  # a thread of another test's engine
            return sent(address, path, body, timeout)
        asked.append((path, timeout))
        if path == "/v1/completions":
            raise TimeoutError("timed out")
        return sent(address, path, body, timeout)

    monkeypatch.setattr(server, "request_json", request_json)
    with pytest.raises(RolloutError, match=r"has not answered for 7 s \(timed out\)"):
        engine_for(model, servers[:1], tmp_path, patience=2.0).generate(PROMPTS[:1], replace(GREEDY, max_new_tokens=5), seed=0)
    assert dict(asked) == {"/v1/models": 2.0, "/version": 2.0, "/v1/load_lora_adapter": 2.0, "/v1/completions": 7.0}
    assert asked.count(("/v1/completions", 7.0)) == 1, "a server that is silent for so long is not asked again"


def test_an_adapter_that_a_server_cannot_load_is_an_error_at_once(model, servers, tmp_path):
    servers[0].refuses_adapters = "Call to add_lora method failed: LoRA rank 32 is greater than max_lora_rank 16."
    with pytest.raises(RolloutError, match="refuses the adapter .* LoRA rank 32 .* a --max-lora-rank of at least lora_r"):
        engine_for(model, servers, tmp_path, patience=1.0).generate(PROMPTS, GREEDY, seed=0)
    assert servers[0].requests["/v1/load_lora_adapter"] == 1


def test_an_address_that_is_not_that_of_a_vllm_server_is_named(model, servers, tmp_path, monkeypatch):
    def refuses(address, path, *arguments, **options):
        raise server.Refusal(401, "Unauthorized")

    monkeypatch.setattr(server, "request_json", refuses)
    with pytest.raises(RolloutError, match=rf"{servers[0].url} refuses /v1/models \(401: Unauthorized\): expected the address"):
        engine_for(model, servers[:1], tmp_path).generate(PROMPTS, GREEDY, seed=0)


def test_nothing_is_left_of_the_adapters_of_an_engine_that_is_closed(model, servers, tmp_path):
    engine = engine_for(model, servers, tmp_path)
    engine.generate(PROMPTS, GREEDY, seed=0)
    engine.close()
    assert not (tmp_path / "adapters").exists()


def test_a_server_that_is_gone_is_an_error(model, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "RETRY_AFTER", 0.01)
    gone = Server()
    gone.stop()
    with pytest.raises(RolloutError, match="has not answered for 0 s .*refused"):
        engine_for(model, [gone], tmp_path, patience=0.1).generate(PROMPTS, GREEDY, seed=0)


def test_a_server_that_goes_before_it_has_the_adapter_gets_it_later(model, servers, tmp_path, monkeypatch):
    engine = engine_for(model, servers[:1], tmp_path, patience=0.1)
    engine._check_servers()
    gone = Server()
    gone.stop()
    urls, engine.servers = engine.servers, [gone.url]
    with pytest.raises(RolloutError, match="has not answered"):
        engine.generate(PROMPTS, GREEDY, seed=0)
    engine.servers = urls
    found = engine.generate(PROMPTS, GREEDY, seed=0)
    assert [response.token_ids for response in found] == expected(model, tmp_path, "x")
    engine.close()
    assert not (tmp_path / "adapters").exists()


def test_an_answer_of_another_model_is_never_used(model, servers, tmp_path):
    servers[1].wrong_model = True
    with pytest.raises(RolloutError, match="answered with the model 'another'; expected 'firedistill-"):
        engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0)


def test_a_response_that_a_server_cuts_is_never_used(model, servers, tmp_path):
    servers[0].longest = 2
    with pytest.raises(RolloutError, match="ended a response after 2 of 8 tokens without a stop token"):
        engine_for(model, servers, tmp_path).generate(PROMPTS, Sampling(0.0, 1.0, 8), seed=0)
    found = engine_for(model, servers[:1], tmp_path).generate(PROMPTS, Sampling(0.0, 1.0, 2), seed=0)
    assert [len(response.token_ids) for response in found] == [2] * 3, "the limit of the request"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda choice: {"logprobs": choice["logprobs"]}, "answers without token ids or log-probabilities"),
        (lambda choice: {"token_ids": choice["token_ids"]}, "answers without token ids or log-probabilities"),
        (
            lambda choice: choice | {"logprobs": {"token_logprobs": [-0.5]}},
            "answered with 2 tokens and 1 log-probabilities, limit 2",
        ),
        (
            lambda choice: {"token_ids": [5] * 3, "logprobs": {"token_logprobs": [-0.5] * 3}},
            "answered with 3 tokens and 3 log-probabilities, limit 2",
        ),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_never_used(change, complaint, model, servers, tmp_path):
    servers[0].change = change
    with pytest.raises(RolloutError, match=complaint):
        engine_for(model, servers[:1], tmp_path).generate(PROMPTS, Sampling(0.0, 1.0, 2), seed=0)


def test_a_server_of_another_checkpoint_is_refused(model, servers, tmp_path):
    (tmp_path / "served").mkdir()
    for size in (2, "wide"):
        (tmp_path / "served" / "config.json").write_text(json.dumps({"head_dim": size}))
        servers[0].models = [{"root": str(tmp_path / "served")}]
        with pytest.raises(
            RolloutError, match=f"another model than the student: .*config.json has head_dim {size!r}; expected"
        ):
            engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0)
    servers[0].models = [{"root": None}]
    assert engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_layer_keeps_its_rank_and_scaling_where_vllm_has_one_for_all(rslora, tmp_path):
    patterns = {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}}
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=rslora, **patterns)
    model = get_peft_model(random_model(), config)
    change(model, 0)
    write_adapter(model, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["rank_pattern"], written["alpha_pattern"]) == (8, {}, {})
    scaling = written["lora_alpha"] / (math.sqrt(written["r"]) if written["use_rslora"] else written["r"])
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, lora.Linear)}
    assert len(layers) == 6 and len({layer.scaling["default"] for layer in layers.values()}) == 4
    for name, layer in layers.items():
        product = scaling * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
        torch.testing.assert_close(product, layer.get_delta_weight("default"))
    assert config.rank_pattern == patterns["rank_pattern"] and not model.peft_config["default"].inference_mode


@pytest.mark.parametrize("models", [{"base": {}}, ["base"], "base"])
def test_a_server_of_something_else_is_refused(models, model, servers, tmp_path):
    servers[1].models = models
    with pytest.raises(RolloutError, match=f"{servers[1].url} lists no models at /v1/models: expected a vLLM server"):
        engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0)


def test_a_context_that_is_too_short_is_refused_at_once(model, servers, tmp_path):
    servers[0].context = 99
    with pytest.raises(RolloutError, match="--max-model-len 99; expected max_context_tokens, 100"):
        engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0)


def test_an_old_vllm_is_refused_and_a_new_one_is_named(model, servers, tmp_path, monkeypatch, caplog):
    servers[1].version = "0.9.2"
    with pytest.raises(ValueError, match=f"{servers[1].url} has vLLM 0.9.2: expected 0.32"):
        engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.31.2+cpu")
    with pytest.raises(ValueError, match="this environment has vLLM 0.31.2.cpu: expected 0.32; .* --rollouts hf"):
        VLLMEngine(model, byte_tokenizer(), context=100)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.33.0")
    VLLMEngine(model, byte_tokenizer(), context=100)
    assert "this environment has vLLM 0.33.0; 0.32 is tested" in caplog.text


def test_a_limit_of_zero_is_an_empty_response_without_a_request(model, servers, tmp_path):
    responses = engine_for(model, servers, tmp_path).generate(PROMPTS, GREEDY, seed=0, limits=[2, 0, 12])
    assert [len(response.token_ids) for response in responses] == [2, 0, 3]
    assert not responses[0].finished and sum(one.requests["/v1/completions"] for one in servers) == 2


# ---- In a run ----------------------------------------------------------------------------------------------------------------


def test_a_run_samples_by_a_server_and_reports_the_policy_gap(folder, servers, tmp_path):
    urls = ",".join(one.url for one in servers)
    trainer = run_trainer(folder, tmp_path / "run", rollouts=urls, max_steps=2, max_context_tokens=400, lora_r=4)
    assert trainer.args.rollouts == "server" and trainer.args.rollout_servers == urls.split(",")
    trainer.train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        assert {"rollout_kl", "seconds_export", "seconds_sampling"} <= row.keys()
    assert sum(one.requests["/v1/completions"] for one in servers) == 2 * 4 + 2 * 5, "two steps and two evaluations"
    assert not any(one.adapters for one in servers) and not (tmp_path / "run" / "rollout-adapters").exists()
    assert [row["n"] for row in read_jsonl(tmp_path / "run" / "evals.jsonl")] == [5, 5]


def test_a_run_may_be_evaluated_before_it_begins(folder, servers, tmp_path):
    urls = ",".join(one.url for one in servers)
    trainer = run_trainer(folder, tmp_path / "run", rollouts=urls, max_steps=1, max_context_tokens=400, lora_r=4)
    assert trainer.evaluate()["eval_n"] == 5 and (tmp_path / "run" / "rollout-adapters").exists()
    trainer.train()
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1 and not any(one.adapters for one in servers)


def test_the_gap_is_the_engines_log_probability_minus_the_students(model):
    ids, prompt = [40, 41, 42, 43], PROMPTS[0]
    states = score_responses(model, [prompt, prompt], [ids, ids[:2]])
    head = Head.of(unwrap(model))
    with torch.no_grad():
        own = head(states.hidden).log_softmax(-1).gather(-1, torch.tensor(ids + ids[:2])[:, None])[:, 0].tolist()
    verdict = Verdict(False, None, "")

    def rollout(tokens, log_probs):
        return Rollout(Example("x", "", ""), prompt, Response(tokens, "", True, log_probs), verdict)

    exact = [rollout(ids, own[:4]), rollout(ids[:2], None)]
    torch.testing.assert_close(engine_gap(states, exact, head), torch.zeros(4), atol=1e-5, rtol=0)
    shifted = [rollout(ids, [p + 0.5 for p in own[2:4]]), rollout(ids[:2], own[4:])]  # two tokens of a prefix were not sampled
    torch.testing.assert_close(engine_gap(states, shifted, head), torch.tensor([0.5, 0.5, 0.0, 0.0]), atol=1e-5, rtol=0)
    assert engine_gap(states, [rollout(ids, None), rollout(ids[:2], None)], head).numel() == 0


def test_prompts_that_exceed_the_positions_are_left_out(model, folder, tmp_path, caplog):
    args = run_config(folder, tmp_path, rollouts="http://127.0.0.1:9", max_context_tokens=4000)
    engine, _ = load.load_engines(model, byte_tokenizer(), args, {})
    task, sampling, encoder = ToyTask(), Sampling(max_new_tokens=engine.context - 20), PromptEncoder(byte_tokenizer())
    examples = task.examples("train", 2)
    assert engine.context == model.config.max_position_embeddings < 4000
    assert fitting_prompts(task, encoder, examples, sampling, args.budget, engine=engine) == ([], examples)
    assert len(fitting_prompts(task, encoder, examples, sampling, args.budget)[0]) == 2 and "the limit is 20" in caplog.text


def test_auto_takes_vllm_where_it_is_installed_and_fits(model, folder, tmp_path, monkeypatch, caplog):
    args = run_config(folder, tmp_path, rollouts="auto")
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: object())
    assert load.choose_engine(model, args) == "vllm"
    warm = run_config(folder, tmp_path, rollouts="auto", temperature=2.5)
    assert load.choose_engine(model, warm) == "hf" and "temperature is 2.5, and vLLM supports 0 and 0.01 to 2" in caplog.text
    warm.rollouts = "vllm"
    with pytest.raises(ValueError, match="temperature is 2.5: vLLM supports 0 .greedy. and 0.01 to 2; use --rollouts hf"):
        load.load_engines(model, byte_tokenizer(), warm, {})
    with monkeypatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "dtype", torch.bfloat16)
        patched.setattr(type(args), "device", torch.device("cuda"))  # where the model comes later
        patched.setattr(load, "has_bfloat16", lambda device: device.type != "cuda")
        patched.setattr(load, "free_memory", lambda device: 1e12)
        assert load.choose_engine(model, args) == "hf" and "does not emulate bfloat16" in caplog.text
        patched.setattr(load, "has_bfloat16", lambda device: True)
        copy = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        patched.setattr(load, "unused_memory", lambda device: 1e12 if device.type == "cpu" else 0.0)
        one = load.cache_bytes(model.config, torch.bfloat16, load.engine_context(model, args), 1)
        patched.setattr(load, "free_memory", lambda device: 2.3 * copy + one)  # the cache is given what is free
        assert load.choose_engine(model, args) == "vllm"
        patched.setattr(load, "unused_memory", lambda device: copy - 1)
        assert load.choose_engine(model, args) == "hf" and "while vLLM sleeps, its weights take" in caplog.text
    with monkeypatch.context() as patched:
        patched.setattr(load, "gather_object", lambda reasons: [*reasons, "vLLM is not installed there"])
        assert load.choose_engine(model, args) == "hf" and "not installed there" in caplog.text, "on another host"
    monkeypatch.setattr(load, "free_memory", lambda device: 1000)
    assert load.choose_engine(model, args) == "hf" and "0.0 GB are free" in caplog.text
    monkeypatch.setattr(load, "free_memory", lambda device: 1e12)
    assert load.choose_engine(model, args) == "vllm"
    caplog.clear()
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    assert load.choose_engine(model, args) == "hf" and "vLLM is not installed" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollouts": "vlm"}, "rollouts is 'vlm'.*expected hf, vllm, auto"),
        ({"rollouts": "server"}, "rollouts is 'server', with 0 rollout_servers"),
        ({"rollouts": "vllm", "quantization": "nf4"}, "exclude each other"),
        ({"vllm_weights": "x"}, "vllm_weights is 'x': expected 'lora' or 'merged'"),
        ({"vllm_weights": "lora"}, r"vllm_weights \(lora\) is for rollouts vllm, not hf: leave it out"),
    ],
)
def test_settings_that_contradict_each_other(settings, message, folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_config(folder, tmp_path, **settings)


# ---- The real engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(how, marks=pytest.mark.xdist_group(how)) for how in ("merged", "lora")])
def engine(request, folder):
    if getattr(request.config.option, "loadgroup", False):
        assert f"@{request.param} " in os.environ["PYTEST_CURRENT_TEST"], (
            "xdist sees no groups: every worker starts both engines"
        )
    parts = {"target_modules": ["q_proj", "v_proj", "gate_proj"]}  # of what vLLM joins to one tensor
    model = student(folder, **(parts if request.param == "merged" else {}))
    if request.param == "lora":
        patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}  # neither of which vLLM reads
        model = get_peft_model(model.unload(), LoraConfig(r=4, lora_alpha=8, target_modules=LORA_TARGET_MODULES, **patterns))
        change(model, 1)
    engine = VLLMEngine(model, byte_tokenizer(), context=200, sequences=8, weights=request.param)
    yield engine
    engine.close()


class TestRealEngine:
    pytestmark = needs_vllm

    def test_greedy_answers_equal_those_of_the_student(self, engine):
        """Weights in float32; thirty versions in a row, each with other answers."""
        ours, last = HFRolloutEngine(engine.model, byte_tokenizer()), None
        for seed in range(30):
            change(engine.model, seed)
            found, want = (e.generate(PROMPTS, GREEDY, seed=0) for e in (engine, ours))
            assert [r.token_ids for r in found] == [r.token_ids for r in want]
            assert [r.finished for r in found] == [r.finished for r in want] and found[0].text == want[0].text
            assert [r.token_ids for r in found] != last
            last = [r.token_ids for r in found]
        assert engine.starts == 1 and len(list(engine.scratch.iterdir())) <= 2
        assert len(engine.versions) <= 2

    def test_log_probabilities_are_those_of_the_student(self, engine):
        prompt = PROMPTS[0]
        (response,) = engine.generate([prompt], Sampling(0.8, 0.9, 12), seed=3)
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.log_probs), found, rtol=1e-3, atol=1e-3)

    def test_the_same_seed_gives_the_same_tokens_alone_and_together(self, engine):
        sampling = Sampling(1.0, 1.0, 12)
        first, again, other = (engine.generate(PROMPTS, sampling, seed) for seed in (5, 5, 6))
        assert [r.token_ids for r in first] == [r.token_ids for r in again] != [r.token_ids for r in other]
        assert engine.generate(PROMPTS[:1], sampling, 5)[0].token_ids == first[0].token_ids

    @pytest.mark.parametrize(
        "sampling",
        [Sampling(1.0, 1.0, 1), Sampling(0.7, 0.9, 1), Sampling(1.3, 1.0, 1, top_k=5), Sampling(1.0, 0.8, 1, 0, 1.5)],
    )
    def test_two_thousand_draws_follow_the_sampling_parameters(self, engine, sampling):
        """Chi-square at 1e-3 against the student's probabilities, whatever the checkpoint's generation settings are."""
        change(engine.model, 0, size=0.05)
        prompt, draws = PROMPTS[0], 2000
        found = Counter(
            r.token_ids[0] for start in range(0, draws, 250) for r in engine.generate([prompt] * 250, sampling, start)
        )
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt])).logits[0, -1].double()
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[prompt] = True
        penalized = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        probs = (torch.where(seen, penalized, logits) / sampling.temperature).softmax(-1)
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        kept = (before < sampling.top_p) & (torch.arange(len(probs)) < (sampling.top_k or len(probs)))
        probs = torch.zeros_like(probs).scatter(0, order[kept], probs[order[kept]])
        probs /= probs.sum()
        assert set(found) <= set(probs.nonzero()[:, 0].tolist()), "nothing outside of the nucleus"
        large = (probs * draws >= 5).nonzero()[:, 0].tolist()
        rest = 1 - float(probs[large].sum())
        pairs = [(found[token], float(probs[token]) * draws) for token in large]
        if rest * draws >= 5:
            pairs.append((draws - sum(count for count, _ in pairs), rest * draws))
        statistic = torch.tensor(sum((count - mean) ** 2 / mean for count, mean in pairs), dtype=torch.float64)
        freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
        assert float(torch.special.gammaincc(freedom, statistic / 2)) > 1e-3

    def test_the_random_state_is_left_alone(self, engine):
        state = torch.random.get_rng_state()
        engine.generate(PROMPTS, Sampling(1.0, 1.0, 5), 1)
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_signals_to_the_group_spare_the_engine_and_a_killed_one_is_an_error(self, engine):
        engine.generate(PROMPTS, GREEDY, 0)
        (process,) = engine.processes
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        assert len(engine.generate(PROMPTS, GREEDY, 0)) == 3
        process.kill()
        with pytest.raises(RolloutError, match="the vLLM engine failed .*resumes from its last checkpoint"):
            engine.generate(PROMPTS, GREEDY, 0)
        assert not Path(engine.scratch).exists()
        assert len(engine.generate(PROMPTS, GREEDY, 0)) == 3 and engine.starts == 2, "the next call starts a new one"

    def test_the_engine_ends_with_a_trainer_that_is_killed_and_not_with_the_trainers_parent(self, folder, tmp_path):
        script = tmp_path / "trainer.py"
        script.write_text(
            "import os, signal, sys, time, test_vllm\n"
            "if __name__ == '__main__':\n"
            "    reading, writing = os.pipe()\n"
            "    if os.fork():  # the parent, which ends once the engine has started\n"
            "        os.read(reading, 1)\n"
            "        os._exit(0)\n"
            "    engine = test_vllm.VLLMEngine(test_vllm.student(sys.argv[1]), test_vllm.byte_tokenizer(), context=200, sequences=8)\n"
            "    engine.generate(test_vllm.PROMPTS, test_vllm.GREEDY, 0)\n"
            "    os.write(writing, b'x')\n"
            "    time.sleep(3)\n"
            "    print(*[process.pid for process in engine.processes], flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, str(script), folder]
        told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=180)
        processes = [int(word) for word in told.stdout.split()]
        assert told.returncode == 0 and processes, "the trainer has ended with its parent"
        until = time.monotonic() + 30
        while any(map(psutil.pid_exists, processes)):
            assert time.monotonic() < until, "the engine outlives its trainer"
            time.sleep(0.1)

    def test_a_limit_of_zero(self, engine):
        responses = engine.generate(PROMPTS, GREEDY, 0, limits=[0, 3, 12])
        assert [len(r.token_ids) for r in responses[:2]] == [0, 3] and responses[0].log_probs is None
        assert VERSIONS == 2


def problems(name: str, count: int) -> tuple[PeftModel, PreTrainedTokenizerBase, list[list[int]]]:
    """A real model with a random adapter, its tokenizer, and prompts."""
    model, tokenizer = load_model_and_tokenizer(name, dtype="float32")
    model = add_lora(model, r=16, alpha=32)
    change(model, seed=3, size=0.02)
    encoder, task = PromptEncoder(tokenizer), load_task("arithmetic")
    return model, tokenizer, [encoder.encode(student_messages(task, example)) for example in task.examples("eval", count)]


class TestRealModels:
    pytestmark = needs_vllm

    @pytest.mark.parametrize(
        ("name", "how", "count"),
        [("lab", "merged", 48), ("lab", "lora", 48), ("smollm2", "merged", 48)],
    )
    def test_greedy_answers_equal_those_of_the_student(self, name, how, count):
        """All of the embedded model's, whose heads are padded, and 47 of 48 of SmolLM2's."""
        try:
            model, tokenizer, prompts = problems(name, count)
        except ModelError as error:
            pytest.skip(str(error))
        greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=48)
        engine = VLLMEngine(model, tokenizer, context=512, sequences=count, weights=how)
        try:
            found, want = (e.generate(prompts, greedy, seed=0) for e in (engine, HFRolloutEngine(model, tokenizer, count)))
        finally:
            engine.close()
        equal = sum(a.token_ids == b.token_ids for a, b in zip(found, want, strict=True))
        assert equal >= count - (name == "smollm2")


@contextmanager
def serving(folder: str, port: int, log) -> Iterator[None]:
    """A vLLM server on the CPU; it is killed at the end."""
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    command += ["--host=127.0.0.1", "--dtype=float32", "--enable-lora", "--max-lora-rank=16", "--max-cpu-loras=4"]
    command += ["--max-model-len=512", "--generation-config=vllm", "--enforce-eager", "--max-num-seqs=8"]
    command += ["--no-enable-chunked-prefill", f"--kv-cache-memory-bytes={2**27}"]
    environment = {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its processes would outlive it
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class TestRealServer:
    pytestmark = needs_vllm

    def test_the_embedded_model_with_padded_heads(self, tmp_path):
        command = [sys.executable, "-P", "-m", "firedistill.rollouts.padding", "lab", str(tmp_path / "lab")]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert told == f"wrote {tmp_path / 'lab'}: heads of 40 numbers in 64; give the server this path\n"
        model, tokenizer, prompts = problems("lab", 8)
        url = f"http://127.0.0.1:{(port := free_port())}"
        engine = VLLMServerEngine(model, tokenizer, [url], tmp_path / "adapters", context=512, patience=240)
        greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=48)
        with open(tmp_path / "server.log", "w") as log, serving(str(tmp_path / "lab"), port, log):
            found, want = (e.generate(prompts, greedy, seed=0) for e in (engine, HFRolloutEngine(model, tokenizer)))
        assert [r.token_ids for r in found] == [r.token_ids for r in want]

    def test_versions_in_a_row_and_a_server_that_is_killed_and_comes_back(self, folder, tmp_path):
        model = student(folder)
        ours = HFRolloutEngine(model, byte_tokenizer())
        url = f"http://127.0.0.1:{(port := free_port())}"
        engine = VLLMServerEngine(model, byte_tokenizer(), [url], tmp_path / "adapters", context=200, patience=240)
        with open(tmp_path / "server.log", "w") as log:
            for life in range(2):
                with serving(folder, port, log):  # the first request waits until it answers
                    for seed in range(5 * life, 5 * life + 5):
                        change(model, seed)
                        found, want = (e.generate(PROMPTS, GREEDY, seed=0) for e in (engine, ours))
                        assert [r.token_ids for r in found] == [r.token_ids for r in want]
                    assert len(found[0].log_probs or []) == len(found[0].token_ids)
                    again = [engine.generate(PROMPTS, Sampling(1.0, 1.0, 12), 3) for _ in range(2)]
                    assert [r.token_ids for r in again[0]] == [r.token_ids for r in again[1]]
            engine.patience = 3
            change(model, 99)
            with pytest.raises(RolloutError, match="has not answered for 3 s .*resumes from its last checkpoint"):
                engine.generate(PROMPTS, GREEDY, seed=0)
        engine.close()
        assert not (tmp_path / "adapters").exists()
