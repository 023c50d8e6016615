"""A base model spread over two processes (gloo) against a whole one, and what happens when the processes are unequal or one is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
import transformers
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import sharded_worker
from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.cli.main import is_lost_process
from firedistill.models.errors import ModelError
from firedistill.models.sharding import Lockstep, distributed_config
from firedistill.run.checkpoints import CheckpointError
from firedistill.run.log import read_jsonl
from killable import without_times
from test_distributed import launch, torchrun, wait_for
from test_vllm import Server
from tiny import ToyTask, byte_tokenizer, random_model, run_config, save_checkpoint

two_processes = pytest.mark.skipif(
    not torch.distributed.is_available()
    or os.name == "nt"
    or not hasattr(transformers.Trainer, "_sync_replicated_trainable_parameters"),
    reason="needs torch.distributed with gloo, and transformers 5.19",
)
METHODS = ["warmstart", "demopsd", "fire", "full_context", "hard_gradient_excision", "no_attribution", "no_projection"]
METHODS += ["on_policy_sft", "scope", "srpo", "top_d", "tropd", "veto"]
METHODS += ["negative_advantage", "rlcsd", "routing", "sdpg"]
# What the second process has is all right, not to be trained on, cannot be judged, or twice as long.
UNEQUAL = ["fire:right", "fire:nothing", "fire:failing", "fire:long"]
# The prefixes of TrOPD are drawn by every process for itself.
COMPARED = [method for method in METHODS if method != "tropd"] + UNEQUAL


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory) -> tuple[Path, Path]:
    """All runs by one process, and by two; with tied and untied heads, with and without gradient checkpointing."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = folder / "one", folder / "two"
    untied = save_checkpoint(folder / "untied", tied=False)

    def job(kind: str, runs: Path) -> list:
        method = kind.partition(":")[0]
        number = METHODS.index(method)
        changes = {"gradient_checkpointing": number % 3 == 0}
        if method == "top_d":  # whose updates depend on the order of the prompts in the step
            changes |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2 if runs == two else 4}
        return [kind, untied if number % 2 else checkpoint, str(runs / kind), changes]

    for kind in [*COMPARED, "fire:half"]:
        kind, model, run, changes = job(kind, one)
        sharded_worker.main(kind, model, run, **changes)
    for kind in COMPARED:
        kind, model, run, changes = job(kind, one.with_name("nudged"))
        sharded_worker.main(kind, nudged(model), run, **changes)
    shutil.copytree(one / "fire:half", two / "fire:continued")
    kinds = [*METHODS, *(f"{method}:whole" for method in METHODS), *UNEQUAL]
    kinds += ["fire:sampled", "fire:stopped", "fire:generated", "fire:half", "fire:continued"]
    launch("sharded_worker.py", json.dumps([job(kind, two) for kind in kinds]))
    shutil.copytree(two / "fire:half", one / "fire:continued")
    kind, model, run, changes = job("fire:continued", one)
    sharded_worker.main(kind, model, run, **changes)
    return one, two


def nudged(checkpoint: str) -> str:
    """A copy of a checkpoint in which every weight is the next larger number of float32."""
    folder = Path(checkpoint + "-nudged")
    if not folder.exists():
        shutil.copytree(checkpoint, folder)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        for weight in model.parameters():
            weight.data = weight.data.nextafter(torch.tensor(torch.inf))
        model.save_pretrained(folder)
    return str(folder)


def results(run: Path, rank: int = 0) -> dict:
    return torch.load(run / f"rank{rank}.pt", weights_only=True)


def joined(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).norm() / one.norm().clamp_min(1e-30))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(run / "metrics.jsonl")]


@two_processes
@pytest.mark.slow
class TestTwoProcesses:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_sharded_base_gives_what_a_whole_one_gives(self, method, runs):
        """To the bit: the same products of the same weights, and the same sums over the processes."""
        sharded, whole = (results(runs[1] / kind) for kind in (method, f"{method}:whole"))
        for part in ("weights", "teacher"):
            assert all(torch.equal(sharded[part][name], value) for name, value in whole[part].items())
        for found, expected in zip(sharded["gradients"], whole["gradients"], strict=True):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert losses(runs[1] / method) == losses(runs[1] / f"{method}:whole")
        assert results(runs[1] / method, 1)["held"] < 0.6 * whole["held"]

    @pytest.mark.parametrize("kind", COMPARED)
    def test_two_shards_give_what_one_process_gives(self, kind, runs):
        """Up to rounding: they differ less than from one process whose base weights differ in their last bit."""
        one, two, second = results(runs[0] / kind), results(runs[1] / kind), results(runs[1] / kind, 1)
        rounded = results(runs[0].with_name("nudged") / kind)
        for part in ("weights", "teacher"):
            assert (
                difference(joined(one[part]), joined(two[part])) < difference(joined(one[part]), joined(rounded[part])) < 1e-6
            )
            assert all(torch.equal(two[part][name], value) for name, value in second[part].items())
        for step, grads in enumerate(zip(one["gradients"], two["gradients"], rounded["gradients"], strict=True)):
            expected, found, nearby = map(joined, grads)
            # The first update begins with equal weights, later ones with what AdamW made of the rounding. TOP-D has eight in a step.
            bound = 5e-7 if step == 0 and kind != "top_d" else 3e-6
            apart, rounding = difference(expected, found), difference(expected, nearby)
            assert apart < rounding < 1e-5 and apart < bound
        assert losses(runs[1] / kind) == pytest.approx(losses(runs[0] / kind), rel=1e-6, abs=2e-6)
        assert one["given"]["base_model"] == two["given"]["base_model"]
        rows = read_jsonl(runs[1] / kind / "metrics.jsonl")
        assert all(row["memory_mb_rank0"] > 0 and row["memory_mb_rank1"] > 0 and not row["skipped_update"] for row in rows)

    def test_a_stopped_run_resumes_to_the_bit(self, runs):
        """A signal to one process stops both after the same step. Their responses are sampled, of different lengths."""
        for rank in (0, 1):
            stopped, straight = (results(runs[1] / f"fire:{how}", rank) for how in ("stopped", "sampled"))
            assert all(torch.equal(stopped["weights"][name], value) for name, value in straight["weights"].items())
        for name in ("metrics.jsonl", "evals.jsonl"):
            stopped, straight = (read_jsonl(runs[1] / f"fire:{how}" / name) for how in ("stopped", "sampled"))
            assert [without_memory(row) for row in stopped] == [without_memory(row) for row in straight]

    @pytest.mark.parametrize("processes", [1, 2])
    def test_a_run_continues_on_another_number_of_shards(self, processes, runs):
        run = runs[processes - 1] / "fire:continued"
        assert difference(joined(results(runs[0] / "fire")["weights"]), joined(results(run)["weights"])) < 1e-6
        assert losses(run) == pytest.approx(losses(runs[0] / "fire"), rel=1e-6)

    def test_another_number_of_shards_is_another_run(self, runs, checkpoint):
        run = runs[1] / "fire:half"
        config = SelfDistillConfig(
            **yaml.safe_load((run / "config.yaml").read_text()) | {"fsdp_size": None, "ddp_backend": None}
        )
        with pytest.raises(CheckpointError, match="fsdp_size was 2, is None; world_size was 2, is 1"):
            SelfDistillTrainer(args=config, task=ToyTask()).checkpoint_to_resume("auto")

    def test_generate_of_transformers_keeps_step_too(self, runs):
        rows = read_jsonl(runs[1] / "fire:generated" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3]

    def test_the_adapter_loads_without_shards(self, runs):
        run = runs[1] / "fire"
        base = AutoModelForCausalLM.from_pretrained(yaml.safe_load((run / "config.yaml").read_text())["model"])
        model = PeftModel.from_pretrained(base, run / "adapter")
        found = {name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name}
        for name, value in results(run)["weights"].items():
            assert torch.equal(found[name.replace(".default", "")], value)


@two_processes
@pytest.mark.slow
@pytest.mark.skipif("dp_replicate_size" not in DistributedConfig.__dataclass_fields__, reason="needs transformers 5.23")
def test_replicas_of_shards(checkpoint, tmp_path):
    """Four processes, of which two hold a base model together."""
    sizes = {"fsdp_size": 2, "dp_replicate_size": 2}
    jobs = [["fire", checkpoint, str(tmp_path / "fire"), sizes], ["fire:whole", checkpoint, str(tmp_path / "whole"), {}]]
    launch("sharded_worker.py", json.dumps(jobs), processes=4)
    whole = results(tmp_path / "whole")
    for rank in range(4):
        replicated = results(tmp_path / "fire", rank)
        assert difference(joined(whole["weights"]), joined(replicated["weights"])) < 1e-6
        assert replicated["held"] < 0.6 * whole["held"]


@two_processes
@pytest.mark.slow
def test_a_sharded_base_in_bfloat16_gives_what_a_whole_one_gives(checkpoint, tmp_path):
    methods = ["fire", "full_context", "srpo", "warmstart"]
    changes = {"model_dtype": "bfloat16", "gradient_checkpointing": True}
    kinds = [method + how for method in methods for how in ("", ":whole")]
    launch("sharded_worker.py", json.dumps([[kind, checkpoint, str(tmp_path / kind), changes] for kind in kinds]))
    for method in methods:
        runs = tmp_path / method, tmp_path / f"{method}:whole"
        sharded, whole = map(results, runs)
        for part in ("weights", "teacher"):
            assert all(torch.equal(sharded[part][name], value) for name, value in whole[part].items())
        assert losses(runs[0]) == losses(runs[1]) and sharded["held"] < 0.6 * whole["held"]


@two_processes
@pytest.mark.slow
def test_servers_sample_for_a_sharded_base(checkpoint, tmp_path):
    """Their answers depend on the prompt and the adapter, so equal runs had equal adapters at every step."""
    server = Server()
    server.context = 4096
    settings = {"rollouts": server.url}
    try:
        jobs = [[f"fire{how}", checkpoint, str(tmp_path / f"run{how}"), settings] for how in ("", ":whole")]
        launch("sharded_worker.py", json.dumps(jobs))
    finally:
        server.stop()
    sharded, whole = (results(tmp_path / f"run{how}") for how in ("", ":whole"))
    assert all(torch.equal(sharded["weights"][name], value) for name, value in whole["weights"].items())
    assert losses(tmp_path / "run") == losses(tmp_path / "run:whole") and not server.adapters
    assert results(tmp_path / "run", 1)["held"] < 0.6 * whole["held"]
    assert all("rollout_kl" in row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"))


def without_memory(row: dict) -> dict:
    return {name: value for name, value in without_times(row).items() if not name.startswith("memory")}


@two_processes
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_lost_process_ends_the_other_with_a_message(number, tmp_path):
    """One that was killed at once, one that does not answer after ddp_timeout; the checkpoint stays. With and without shards."""
    sizes, seconds, launchers, ranks = {"sharded": ["--fsdp_size", "2"], "whole": []}, 15, [], []
    for name, size in sizes.items():
        with open(tmp_path / f"{name}.log", "w") as log:
            launchers.append(torchrun(tmp_path / name, log, *size, "--ddp_timeout", str(seconds), steps=1000))
    for name, launcher in zip(sizes, launchers, strict=True):
        wait_for(lambda name=name: any((tmp_path / name).glob("checkpoint-*")))
        ranks.append(psutil.Process(launcher.pid).children())
        os.kill(ranks[-1][1].pid, number)
    for name, launcher, (first, second) in zip(sizes, launchers, ranks, strict=True):
        psutil.wait_procs([first], timeout=seconds + 30)
        assert not first.is_running(), name
        with contextlib.suppress(psutil.NoSuchProcess):
            second.kill()
        assert launcher.wait(60) != 0
        text = (tmp_path / f"{name}.log").read_text()
        assert "firedistill train: another process of this run has ended, or has not answered within ddp_timeout" in text, name
        assert list((tmp_path / name).glob("checkpoint-*"))


# ---- Settings that do not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"fsdp_size": 2}, "fsdp_size is 2, but there is one process: start with: torchrun .*--nproc_per_node 2"),
        ({"fsdp_size": 2, "quantization": "nf4"}, "quantization .nf4. cannot be combined with fsdp_size"),
        ({"fsdp_size": 2, "lora_target_modules": ["q_proj", "lm_head"]}, "lora_target_modules names lm_head"),
        ({"dp_replicate_size": 2}, "dp_replicate_size is the number of copies .* set fsdp_size too"),
    ],
)
def test_settings_are_refused_before_anything_is_loaded(changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr("firedistill.setup.load_model_and_tokenizer", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=message):
        SelfDistillTrainer(args=run_config("no-model", tmp_path, **changes), task=ToyTask())


def test_a_loaded_model_is_not_sharded_afterwards(tmp_path):
    with pytest.raises(ValueError, match="fsdp_size is 2, but the model is an object that is loaded already .*: pass its name"):
        SelfDistillTrainer(random_model(), run_config("", tmp_path, fsdp_size=2), ToyTask(), processing_class=byte_tokenizer())


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((3, None, 4), r"fsdp_size is 3: expected a divisor of the number of processes \(4\)"),
        ((8, None, 4), r"fsdp_size is 8: expected a divisor of the number of processes \(4\)"),
        ((2, 4, 4), r"dp_replicate_size is 4: expected 2, the 4 processes divided by fsdp_size \(2\)"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_are_refused(sizes, message):
    with pytest.raises(ModelError, match=message):
        distributed_config(*sizes)


@two_processes
def test_replicas_follow_from_the_number_of_processes():
    config = distributed_config(2, None, 4)
    assert (config.fsdp_size, config.dp_replicate_size) == (2, 2)


def test_an_old_transformers_is_named(monkeypatch):
    monkeypatch.delattr(transformers.Trainer, "_sync_replicated_trainable_parameters", raising=False)
    with pytest.raises(
        ModelError, match=f"fsdp_size needs transformers 5.19 or newer; {transformers.__version__} is installed"
    ):
        distributed_config(2, None, 2)


def test_a_transformers_without_replicas_is_named(monkeypatch):
    @dataclasses.dataclass
    class Old:
        fsdp_size: int

    monkeypatch.setattr("transformers.distributed.DistributedConfig", Old)
    monkeypatch.setattr(transformers.Trainer, "_sync_replicated_trainable_parameters", None, raising=False)
    assert distributed_config(2, None, 2) == Old(2)
    with pytest.raises(ModelError, match="needs transformers 5.23 or newer; .* set fsdp_size to 4"):
        distributed_config(2, 2, 4)


# ---- A failure in the middle -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch) -> Lockstep:
    """The lockstep of a single process, whose sums are its own numbers."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    return Lockstep(random_model())


def test_a_process_whose_pass_failed_does_not_continue(alone):
    with pytest.raises(IndexError):
        alone.model(input_ids=torch.tensor([[10**6]]))
    with pytest.raises(RuntimeError, match="a forward pass of the sharded model failed"):
        alone.wait()


def test_a_process_that_waits_for_nobody_makes_no_pass(alone):
    alone.model.register_forward_pre_hook(lambda *inputs: pytest.fail("a pass"))
    alone.wait()


@pytest.mark.parametrize(
    "error, lost",
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo/transport"), False),
    ],
)
def test_lost_processes_are_told_from_other_errors(error, lost):
    assert is_lost_process(error) is lost
