"""Exact resumption: every method, killed anywhere, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.cli import main as cli
from firedistill.config import effect
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.objectives import Metrics, Objective, batches, registered_objectives
from firedistill.recipes import build_config
from firedistill.run import checkpoints, signals
from firedistill.run.checkpoints import CheckpointError, load_state, newest_checkpoint, save_state
from firedistill.run.identity import choose, differences, to_plain, tokenizer_fingerprint
from firedistill.run.log import read_jsonl
from killable import RandomTask, killable_config, same_runs, train
from test_trainer import DIFFERENT_METHODS, METHODS
from tiny import adapter_weights, byte_tokenizer, random_model, save_checkpoint


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """An untouched run of four steps with a checkpoint after the second and the fourth."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(model, run, "fire", 4)
    return run


@pytest.fixture
def copy(whole, tmp_path):
    """The same run in a folder of its own, ready to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


class At(TrainerCallback):
    """Does something at the end of a step, once its row has been written."""

    def __init__(self, step: int, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def die():
    raise ConnectionResetError("gone")


def interrupted(
    model: str, run: Path, step: int, action, method: str = "fire", steps: int = 4, **changes
) -> SelfDistillTrainer:
    """A run to which something happens at the end of a step."""
    trainer = SelfDistillTrainer(args=killable_config(model, run, method, steps, **changes), task=RandomTask())
    trainer.callback_handler.callbacks.insert(-1, At(step, action))  # before the stop request is checked
    trainer.train()
    return trainer


@pytest.mark.parametrize("method", ["fire", "top_d"])
def test_an_interrupted_step_leaves_nothing_behind(method, model, tmp_path, monkeypatch):
    """The same trainer trains again with the teacher of the checkpoint. `top_d` is interrupted while the teacher's reading is kept."""
    shared = {"share_prefixes": True}  # a GPU reads in batches and keeps nothing
    train(model, tmp_path / "whole", method, 4, **shared)
    trainer = SelfDistillTrainer(args=killable_config(model, tmp_path / "run", method, 4, **shared), task=RandomTask())
    place, name = (trainer.objective, "loss") if method == "fire" else (batches, "sampled_log_probs")
    function, interrupted_at = getattr(place, name), []

    def interrupts(*args):
        if trainer.state.global_step == 3 and not interrupted_at and (method == "fire" or trainer.teacher.caches):
            interrupted_at.append(3)
            raise KeyboardInterrupt
        return function(*args)

    monkeypatch.setattr(place, name, interrupts)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert bool(trainer.teacher.caches) == (method == "top_d")
    trainer.train()
    assert interrupted_at and same_runs(tmp_path / "whole", tmp_path / "run") == []


TWO_RUNS = """
import sys
from pathlib import Path
import pytest
from killable import train
from test_resume import die, interrupted
model, folder = sys.argv[1], Path(sys.argv[2])
more = {"use_cpu": "cpu" in sys.argv, "model_dtype": "bfloat16", "deterministic": True}
train(model, folder / "whole", "fire", 4, **more)
with pytest.raises(ConnectionResetError):
    interrupted(model, folder / "killed", 3, die, **more)
train(model, folder / "killed", "fire", 4, **more)
"""


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_deterministic_run_in_bfloat16_resumes_to_the_bit(device, model, tmp_path):
    """In a process of its own, whose libraries start in their deterministic mode."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", TWO_RUNS, model, tmp_path, device], env=env, check=True)
    assert same_runs(tmp_path / "whole", tmp_path / "killed") == []
    assert [row["step"] for row in read_jsonl(tmp_path / "killed" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_all_methods_are_resumed():
    assert set(METHODS) <= set(registered_objectives()) and len(METHODS) == 16


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in DIFFERENT_METHODS else pytest.mark.slow) for m in METHODS])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(method, model, tmp_path):
    train(model, tmp_path / "whole", method, 3)
    with pytest.raises(ConnectionResetError):
        interrupted(model, tmp_path / "killed", 3, die, method, 3)
    assert [row["step"] for row in read_jsonl(tmp_path / "killed" / "metrics.jsonl")] == [1, 2, 3]
    assert newest_checkpoint(tmp_path / "killed").name == "checkpoint-2"
    resumed = train(model, tmp_path / "killed", method, 3)
    assert resumed.resumed_from == tmp_path / "killed" / "checkpoint-2"
    assert same_runs(tmp_path / "whole", tmp_path / "killed") == []


def test_the_same_seed_gives_the_same_bits_and_another_does_not(whole, model, tmp_path):
    train(model, tmp_path / "again", "fire", 4)
    assert same_runs(whole, tmp_path / "again") == []
    train(model, tmp_path / "other", "fire", 4, seed=1)
    assert {"checkpoint-4/teacher.safetensors", "rollouts"} <= set(same_runs(whole, tmp_path / "other"))


def test_a_checkpoint_holds_no_pickle_and_everything_else(whole):
    names = {path.name for path in (whole / "checkpoint-4").iterdir()}
    assert {
        "adapter_model.safetensors",
        "teacher.safetensors",
        "optimizer.safetensors",
        "scheduler.json",
        "random_state.safetensors",
        "firedistill_counters.json",
        "method.json",
        "trainer_state.json",
        "checkpoint.json",
    } <= names
    assert not [path for path in whole.rglob("*") if path.suffix in {".pt", ".pth", ".bin", ".pkl"}]
    assert not list(whole.glob(".*")), "nothing unfinished is left behind"
    manifest = json.loads((whole / "checkpoint-4" / "checkpoint.json").read_text())
    assert manifest["step"] == 4 and manifest["settings"]["learning_rate"] == 1e-2
    assert manifest["given"]["train_data"].startswith("12:") and manifest["machine"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "no list", "list of nothing"])
def test_an_incomplete_checkpoint_is_never_used(damage, whole, copy, model, caplog):
    newest = copy / "checkpoint-4"
    (copy / ".unfinished-checkpoint-3").mkdir()
    victim = newest / "teacher.safetensors"
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(content[:-1])
    elif damage == "changed":
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "no list":
        (newest / "checkpoint.json").unlink()
    else:
        (newest / "checkpoint.json").write_text('{"files": []}')
    resumed = train(model, copy, "fire", 4)
    assert resumed.resumed_from.name == "checkpoint-2" and "checkpoint-4 is" in caplog.text
    assert not list(copy.glob(".*")), "leftovers of a kill are removed"
    assert same_runs(whole, copy) == []
    victim.write_bytes(b"")
    with pytest.raises(CheckpointError, match="teacher.safetensors is not what was written"):
        resumed.checkpoint_to_resume(str(newest))


def test_deepspeed_and_its_checkpoints_belong_together(copy, model, monkeypatch):
    trainer = SelfDistillTrainer(args=killable_config(model, copy, "fire", 4), task=RandomTask())
    other = SelfDistillTrainer(args=killable_config(model, copy, "fire", 4, learning_rate=0.5), task=RandomTask())
    (copy / "checkpoint-4" / "latest").write_text("global_step4")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-4 was written with DeepSpeed, .*resume it with DeepSpeed \(this run is without"
    ):
        trainer.checkpoint_to_resume("auto", ["deepspeed"])
    monkeypatch.setattr(SelfDistillTrainer, "sharded", True)
    assert trainer.checkpoint_to_resume("auto") == copy / "checkpoint-4"
    with pytest.raises(CheckpointError, match=r"learning_rate was 0.01, is 0.5. DeepSpeed restores this from its checkpoint"):
        other.checkpoint_to_resume("auto", ["learning_rate"])
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2 was written without DeepSpeed, .*resume it without DeepSpeed \(this run is with\)"
    ):
        trainer.checkpoint_to_resume(copy / "checkpoint-2", ["deepspeed"])


def test_damaged_checkpoints_alone_are_not_silently_replaced(copy, model):
    for folder in copy.glob("checkpoint-*"):
        (folder / "teacher.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="no complete checkpoint to resume from .found: checkpoint-2, checkpoint-4.; --overwrite"
    ):
        train(model, copy, "fire", 4)
    assert len(read_jsonl(copy / "metrics.jsonl")) == 4


def test_a_training_state_that_cannot_be_read_is_not_taken_for_a_new_start(whole, copy, model, monkeypatch):
    """Trainer counts from step 0 where a failing disk hides its state, with the weights of the checkpoint."""
    found = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: not str(path).endswith("trainer_state.json") and found(path))
    shutil.rmtree(copy / "checkpoint-4")
    with pytest.raises(
        CheckpointError, match="checkpoint-2/trainer_state.json was not read, or is of step 0, not of 2: try again"
    ):
        train(model, copy, "fire", 4)
    monkeypatch.undo()
    train(model, copy, "fire", 4)
    assert same_runs(whole, copy) == []


def test_every_file_of_a_checkpoint_can_be_the_last_one_written(whole, tmp_path, monkeypatch):
    """A kill between any two files leaves nothing that is mistaken for a checkpoint."""
    shutil.copytree(whole / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    files = [path for path in sorted((whole / "checkpoint-4").rglob("*")) if path.is_file()]
    for written in range(len(files)):  # all but the last: as if the folder had been moved to its place too early
        half = tmp_path / "run" / "checkpoint-4"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        for path in files[:written]:
            shutil.copy(path, half)
        assert newest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    shutil.copy(files[-1], half)
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-4"


def test_old_checkpoints_go_only_when_the_new_one_is_complete(model, tmp_path, monkeypatch):
    run, there = tmp_path / "run", []
    real = checkpoints.seal

    def seal(folder, content):
        there.append(sorted(path.name for path in run.glob("checkpoint-*")))
        real(folder, content)

    monkeypatch.setattr(checkpoints, "seal", seal)
    train(model, run, "fire", 3, save_steps=1, save_total_limit=1, eval_size=0)
    assert there == [[], ["checkpoint-1"], ["checkpoint-2"]]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]


# ---- Another run -----------------------------------------------------------------------------------------------------------


def test_a_changed_setting_is_refused_by_name_unless_allowed(copy, model, caplog):
    shutil.rmtree(copy / "checkpoint-4")
    changes = {"learning_rate": 5e-3, "weight_decay": 0.5, "max_steps": 6}

    def trainer():
        return SelfDistillTrainer(args=killable_config(model, copy, "fire", **changes), task=RandomTask())

    with pytest.raises(CheckpointError) as refused:
        trainer().train()
    told = str(refused.value)
    assert "learning_rate was 0.01, is 0.005; weight_decay was 0.01, is 0.5" in told.replace("max_steps was 4, is 6; ", "")
    assert "max_steps was 4, is 6" in told and "--allow_changes" in told and "--overwrite" in told
    with pytest.raises(CheckpointError, match="weight_decay was") as refused:
        trainer().train(allow_changes=["learning_rate", "max_steps"])
    assert "learning_rate was" not in str(refused.value)
    with pytest.raises(CheckpointError, match="allow_changes learning_rat: .* did you mean learning_rate"):
        trainer().train(allow_changes=["learning_rat"])
    assert [row["step"] for row in read_jsonl(copy / "metrics.jsonl")] == [1, 2, 3, 4], "nothing was touched so far"
    new = SelfDistillTrainer(args=killable_config(model, copy.with_name("new"), "fire"), task=RandomTask())
    with pytest.raises(CheckpointError, match="allow_changes learning_rat: .* did you mean learning_rate"):
        new.train(allow_changes=["learning_rat"])  # also without a checkpoint
    t = trainer()
    t.train(allow_changes=list(changes))
    rows = read_jsonl(copy / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and "allowed change: learning_rate" in caplog.text
    assert rows[1]["learning_rate"] == 1e-2 and all(0 < row["learning_rate"] <= 5e-3 for row in rows[2:])
    assert {group["weight_decay"] for group in t.optimizer.param_groups} == {0.5, 0.0} or {
        group["weight_decay"] for group in t.optimizer.param_groups
    } == {0.5}


def test_other_data_and_another_base_model_are_other_runs(copy, model, tmp_path):
    args = killable_config(model, copy, "fire", 4)
    task = RandomTask()
    with pytest.raises(CheckpointError, match="train_data was '12:.*', is '11:"):
        SelfDistillTrainer(args=args, task=task, train_examples=task.examples("train", 11)).train()
    other = save_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="base_model was"):
        train(other, copy, "fire", 4)


def test_another_chat_template_or_vocabulary_is_another_run(copy, model, tmp_path):
    shutil.rmtree(copy / "checkpoint-4")
    other = Path(shutil.copytree(model, tmp_path / "model"))
    (other / "chat_template.jinja").write_text("Be brief. " + (other / "chat_template.jinja").read_text())
    with pytest.raises(CheckpointError, match="tokenizer was '.*', is '.*--allow_changes tokenizer"):
        train(str(other), copy, "fire", 4)
    more = byte_tokenizer()
    more.add_tokens(["xyz"])
    assert tokenizer_fingerprint(more) != tokenizer_fingerprint(byte_tokenizer()) == tokenizer_fingerprint(byte_tokenizer())
    trainer = SelfDistillTrainer(args=killable_config(str(other), copy, "fire", 4), task=RandomTask())
    for allowed in (["tokenizer"], "tokenizer"):
        assert trainer.checkpoint_to_resume("auto", allowed) == copy / "checkpoint-2"
    manifest = json.loads((copy / "checkpoint-2" / "checkpoint.json").read_text())
    del manifest["given"]["tokenizer"]  # of a run from before it was stored
    (copy / "checkpoint-2" / "checkpoint.json").write_text(json.dumps(manifest))
    assert trainer.checkpoint_to_resume("auto") == copy / "checkpoint-2"


def test_an_adapter_that_scales_its_factors_otherwise_is_refused(model, tmp_path, capsys):
    """The settings of the run hold rank and alpha alone, and not those of an initial adapter."""
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 64}, "use_rslora": True}
    adapted = get_peft_model(
        random_model(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], **patterns)
    )
    adapted.save_pretrained(tmp_path / "initial")
    run, initial = tmp_path / "run", {"initial_adapter": str(tmp_path / "initial"), "lora_target_modules": ["q_proj", "v_proj"]}
    config = killable_config(model, run, "fire", 1, save_steps=1, eval_size=0, lora_alpha=8)
    SelfDistillTrainer(adapted, config, RandomTask(), processing_class=byte_tokenizer()).train()
    told = "use_rslora was True, is False; rank_pattern was {'q_proj': 2}, is {}; alpha_pattern was {'v_proj': 64}, is {}"
    command = ["train", str(run), "--model", model, "--max_steps", "2", "--allow_changes", "max_steps"]
    assert firedistill(command) == 2 and told in capsys.readouterr().err
    assert firedistill([*command, "--initial_adapter", str(run / "checkpoint-1")]) == 0
    saved = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert {name: saved[name] for name in patterns} == patterns
    train(model, tmp_path / "other", "fire", 2, lora_dropout=0.0, **initial)
    with pytest.raises(CheckpointError, match="lora_alpha was 8, is 32.*use_rslora was True, is False.*initial_adapter"):
        train(model, tmp_path / "other", "fire", 2, lora_dropout=0.0, lora_target_modules=["q_proj", "v_proj"])


def test_settings_without_effect_on_the_result_may_differ(copy, model, tmp_path):
    shutil.rmtree(copy / "checkpoint-4")
    moved = tmp_path / "moved"
    shutil.move(copy, moved)
    elsewhere = shutil.copytree(model, tmp_path / "same-model")
    t = train(str(elsewhere), moved, "fire", 4, save_steps=1, save_total_limit=7, log_rollouts=False, eval_batch_size=1)
    assert t.resumed_from == moved / "checkpoint-2"
    assert sorted(path.name for path in moved.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_settings_that_affect_the_result_or_its_rounding_are_compared():
    config = SelfDistillConfig(use_cpu=True)
    settings = to_plain(config.resolved())
    found = differences({"settings": settings}, {"settings": dict.fromkeys(settings, "other")}, config)
    assert found["seed"] == "seed was 0, is 'other'"
    assert settings.keys() - found.keys() == {
        *(
            "model",
            "model_revision",
            "teacher",
            "initial_adapter",
            "judge",
            "data_dir",
            "output_dir",
            "project",
            "report_to",
            "use_cpu",
        ),
        "task_timeout",
        *(
            "eval_steps",
            "eval_batch_size",
            "save_steps",
            "save_total_limit",
            "stop_within",
            "eval_samples",
            "eval_also",
            "policy_kl_every",
            "log_rollouts",
            "attribution_examples",
            "dp_replicate_size",
            "rollout_servers",
        ),
        *("gradient_checkpointing", "merge_adapter", "model_dtype"),  # which these settings leave open
    }
    decided = {**settings, "gradient_checkpointing": True, "merge_adapter": True}
    otherwise = {**decided, "gradient_checkpointing": False, "merge_adapter": False, "rollouts": "auto"}
    found = differences({"settings": decided}, {"settings": otherwise}, config)
    assert found.keys() == {"gradient_checkpointing", "merge_adapter"}
    earlier = {
        name: value for name, value in settings.items() if name != "lora_dtype"
    }  # a run from before there was the option
    assert differences({"settings": earlier}, {"settings": settings}, config) == {
        "lora_dtype": "lora_dtype was 'float32', is 'base'"
    }
    in_float32 = {"model_dtype": "float32"}
    assert not differences({"settings": earlier | in_float32}, {"settings": settings | in_float32}, config)
    effects = {
        name: effect(name) for name in ("model", "rollout_batch_size", "eval_steps", "run_name", "ddp_timeout", "unheard_of")
    }
    assert list(effects.values()) == ["place", "rounding", "none", "none", "none", "result"]


def test_resumption_by_path_goes_back_and_drops_what_came_later(whole, copy, model):
    t = SelfDistillTrainer(args=killable_config(model, copy, "fire", 4), task=RandomTask())
    t.train(resume_from_checkpoint=copy / "checkpoint-2")
    assert same_runs(whole, copy) == []
    with pytest.raises(CheckpointError, match=f"there is no checkpoint {Path.home()}/none"):
        t.checkpoint_to_resume("~/none")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        t.checkpoint_to_resume(str(copy / "checkpoint-9"))
    with pytest.raises(CheckpointError, match=r"holds a run of its own, and .* resume the one that is there \(--resume\), or"):
        t.checkpoint_to_resume(str(whole / "checkpoint-2"))
    for checkpoint in copy.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="it has no checkpoint yet, so delete the folder, or choose another --output_dir"):
        t.checkpoint_to_resume(str(whole / "checkpoint-2"))
    with pytest.raises(TypeError, match="resume_from_checkpoint is a int: expected True, False, None, 'auto' or the path"):
        t.train(resume_from_checkpoint=3)


def test_a_renamed_checkpoint_and_one_beyond_the_end_are_refused(copy, model):
    t = SelfDistillTrainer(args=killable_config(model, copy, "fire", 3), task=RandomTask())
    with pytest.raises(CheckpointError, match=r"checkpoint-4 is beyond max_steps \(3\): raise max_steps, or start from"):
        t.checkpoint_to_resume(str(copy / "checkpoint-4"), allow_changes=["max_steps"])
    (copy / "checkpoint-4").rename(copy / "checkpoint-3")
    with pytest.raises(CheckpointError, match="checkpoint-3 was renamed: it holds step 4"):
        t.checkpoint_to_resume("auto")


def test_a_finished_run_is_left_as_it_is_and_a_new_start_replaces_it(whole, copy, model):
    assert train(model, copy, "fire", 4).state.global_step == 4
    assert same_runs(whole, copy) == []
    t = SelfDistillTrainer(args=killable_config(model, copy, "fire", 1, save_steps=5, eval_size=0), task=RandomTask())
    t.train(resume_from_checkpoint=False)
    assert [row["step"] for row in read_jsonl(copy / "metrics.jsonl")] == [1]
    assert [path.name for path in copy.glob("checkpoint-*")] == ["checkpoint-1"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        choose(True, copy / "nowhere")


def test_a_finished_run_without_its_checkpoints_is_not_trained_again(copy, model):
    for folder in copy.glob("checkpoint-*"):
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="has ended after step 4 and has no checkpoint to resume from: --overwrite"):
        train(model, copy, "fire", 4)
    assert len(read_jsonl(copy / "metrics.jsonl")) == 4


def test_a_trainer_starts_from_the_beginning_once(model, tmp_path):
    """Weights, optimizer and teacher would be those of the end; resuming replaces them all."""
    t = train(model, tmp_path / "run", "fire", 1, eval_size=0)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(ValueError, match="this trainer has trained already"):
        t.train(resume_from_checkpoint=False)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == rows, "the run stays"
    assert t.train().global_step == 1
    t = SelfDistillTrainer(
        args=killable_config(model, tmp_path / "broken", "fire", 4), task=RandomTask(), callbacks=[At(1, die)]
    )
    with pytest.raises(ConnectionResetError):
        t.train()
    with pytest.raises(ValueError, match="this trainer has trained already"):
        t.train()


class Ending(TrainerCallback):
    """Ends the run at an event of a step."""

    def __init__(self, event: str, step: int):
        self.step = step
        setattr(self, event, self.end)

    def end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


@pytest.mark.parametrize(("event", "step"), [("on_step_end", 1), ("on_evaluate", 3), ("on_log", 1)])
def test_a_run_that_a_callback_ends_is_complete_and_can_be_resumed(event, step, model, tmp_path):
    run = tmp_path / "run"
    t = SelfDistillTrainer(args=killable_config(model, run, "fire", 4), task=RandomTask())
    t.add_callback(Ending(event, step))
    t.train()
    assert newest_checkpoint(run).name == f"checkpoint-{step}" and (run / "adapter").is_dir()
    assert [row["step"] for row in read_jsonl(run / "evals.jsonl")] == [0, step]
    assert json.loads((run / "finished.json").read_text()) == {"step": step} and not t.evaluation_due
    assert train(model, run, "fire", 4).state.global_step == 4
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("method", "event"), [("fire", "on_step_begin"), ("fire", "on_substep_end"), ("top_d", "on_optimizer_step")]
)
def test_a_run_that_a_callback_ends_within_a_step_completes_the_step(method, event, model, tmp_path):
    run = tmp_path / "run"
    changes = {"gradient_accumulation_steps": 2, "eval_steps": 1}
    t = SelfDistillTrainer(args=killable_config(model, run, method, 4, **changes), task=RandomTask())
    t.add_callback(Ending(event, 2))
    t.train()
    assert newest_checkpoint(run).name == "checkpoint-3" and json.loads((run / "finished.json").read_text()) == {"step": 3}
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]
    again = SelfDistillTrainer(args=killable_config(model, run, method, 4, **changes), task=RandomTask())
    again.train()
    whole = SelfDistillTrainer(args=killable_config(model, tmp_path / "whole", method, 4, **changes), task=RandomTask())
    whole.train()
    for name, value in adapter_weights(whole).items():
        assert torch.equal(value, adapter_weights(again)[name]), name


def attributions(run):
    return {path.name: json.loads(path.read_text())["examples"] for path in (run / "attribution").glob("*.json")}


def test_saved_attributions_leave_the_run_as_it_is(whole, copy, model, tmp_path):
    """The task draws from the global random generators, for these answers too."""
    train(model, tmp_path / "new", "fire", 4, attribution_examples=2)
    assert same_runs(whole, tmp_path / "new") == []
    saved = attributions(tmp_path / "new")
    assert list(sorted(saved)) == ["step_000000.json", "step_000004.json"]
    for examples in saved.values():
        assert len(examples) == 2 and not any(example["correct"] for example in examples)
        assert all(len(row) == len(example["tokens"]) for example in examples for row in example["alpha"] + [example["rho"]])
    shutil.rmtree(copy / "checkpoint-4")
    train(model, copy, "fire", 4, attribution_examples=2)
    assert same_runs(whole, copy) == [] and list(attributions(copy)) == ["step_000004.json"], "it began without them"
    assert attributions(copy)["step_000004.json"] == saved["step_000004.json"]


def test_a_failing_attribution_does_not_stop_the_run(model, tmp_path, caplog):
    class Silent(RandomTask):
        def feedback(self, example, response, verdict):
            raise RuntimeError("nothing to say")

    args = killable_config(model, tmp_path / "run", "fire", 1, attribution_examples=2, eval_size=0)
    t = SelfDistillTrainer(args=args, task=Silent())
    t.train()
    assert t.state.global_step == 1 and not (tmp_path / "run" / "attribution").exists()
    assert "nothing to say" in caplog.text and "left out of the attribution" in caplog.text


def test_another_number_of_threads_is_said_once(copy, model, caplog):
    shutil.rmtree(copy / "checkpoint-4")
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with caplog.at_level(logging.WARNING):
            t = SelfDistillTrainer(args=killable_config(model, copy, "fire", 4), task=RandomTask())
            t.train(resume_from_checkpoint=t.checkpoint_to_resume(None))  # as the command line does
    finally:
        torch.set_num_threads(before)
    assert f"threads {before}, now {before + 1}" in caplog.text and caplog.text.count("only within rounding") == 1
    assert [row["step"] for row in read_jsonl(copy / "metrics.jsonl")] == [1, 2, 3, 4]


# ---- Signals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 3), (signal.SIGINT, 1), (signal.SIGTERM, 4)])
def test_a_signal_ends_the_step_with_a_checkpoint_and_the_rest_follows(number, step, whole, model, tmp_path, capfd):
    """Step 3 and the last one, 4, require an evaluation, which the resumed run makes first."""
    handler = signal.getsignal(number)
    t = interrupted(model, tmp_path / "run", step, lambda: os.kill(os.getpid(), number))
    assert t.stop.signal == number and t.state.global_step == step and not t.ended
    assert newest_checkpoint(tmp_path / "run").name == f"checkpoint-{step}" and not (tmp_path / "run" / "adapter").exists()
    told = capfd.readouterr().err
    assert "finishing this step" in told and ("Ctrl-C again" in told) == (number == signal.SIGINT)
    assert signal.getsignal(number) == handler, "the handlers are restored"
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "evals.jsonl")] == ([0, 3] if step == 4 else [0])
    assert not (tmp_path / "run" / "finished.json").exists()
    assert train(model, tmp_path / "run", "fire", 4).ended
    assert json.loads((tmp_path / "run" / "finished.json").read_text()) == {"step": 4}
    for path in [tmp_path / "run" / "checkpoint-3", tmp_path / "run" / "checkpoint-1"]:
        shutil.rmtree(path, ignore_errors=True)
    if step == 3:
        shutil.rmtree(shutil.copytree(whole, tmp_path / "expected") / "checkpoint-2")
        shutil.rmtree(tmp_path / "run" / "checkpoint-2", ignore_errors=True)
        assert same_runs(tmp_path / "expected", tmp_path / "run") == []
    else:
        assert same_runs(whole, tmp_path / "run") == []


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="these signals exist on POSIX")
@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_closed_terminal_and_the_warning_of_a_batch_system_leave_a_checkpoint(name, model, tmp_path):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        t = interrupted(model, tmp_path / "run", 1, lambda: os.kill(os.getpid(), number))
        assert t.stop.name == name and newest_checkpoint(tmp_path / "run").name == "checkpoint-1"
        assert signal.getsignal(number) is signal.SIG_DFL, "the handlers are restored"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("step", "call"), [(2, "verify"), (3, "verify"), (2, "feedback"), (3, "evaluation"), (4, "evaluation")]
)
def test_a_stop_that_takes_too_long_drops_what_is_not_finished(step, call, whole, model, tmp_path, caplog, monkeypatch):
    """Evaluations follow steps 3 and 4; the state of the last whole step is saved."""
    t = SelfDistillTrainer(args=killable_config(model, tmp_path / "run", "fire", 4, stop_within=0.1), task=RandomTask())

    def hanging(name, real):
        def method(self, *arguments):
            result = real(self, *arguments)
            if t.state.global_step == step and (name == call or (name, call) == ("verify", "evaluation")):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return result

        return method

    for name in ("verify", "feedback"):
        monkeypatch.setattr(RandomTask, name, hanging(name, getattr(RandomTask, name)))
    with caplog.at_level(logging.WARNING):
        assert t.train().global_step == step and not t.ended
    monkeypatch.undo()
    assert f"the work after step {step} did not end within stop_within (0.1 s) and is discarded" in caplog.text
    assert (
        newest_checkpoint(tmp_path / "run").name == f"checkpoint-{step}" and not (tmp_path / "run" / "finished.json").exists()
    )
    train(model, tmp_path / "run", "fire", 4)
    if step == 3:
        shutil.rmtree(shutil.copytree(whole, tmp_path / "expected") / "checkpoint-2")
        shutil.rmtree(tmp_path / "run" / "checkpoint-2", ignore_errors=True)
        shutil.rmtree(tmp_path / "run" / "checkpoint-3", ignore_errors=True)
        assert same_runs(tmp_path / "expected", tmp_path / "run") == []
    else:
        assert same_runs(whole, tmp_path / "run") == []


def test_a_stop_within_an_update_keeps_the_last_checkpoint(model, tmp_path, caplog, monkeypatch):
    t = SelfDistillTrainer(args=killable_config(model, tmp_path / "run", "fire", 4, stop_within=0.1), task=RandomTask())

    def hang() -> None:
        if t.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    update = t.teacher.update
    monkeypatch.setattr(t.teacher, "update", lambda: (update(), hang()))
    with caplog.at_level(logging.WARNING):
        t.train()
    assert "step 4 took longer than stop_within (0.1 s) to end: dropped; checkpoint-2 remains" in caplog.text


def test_a_second_signal_ends_at_once(model, tmp_path):
    t = SelfDistillTrainer(args=killable_config(model, tmp_path / "run", "fire", 4), task=RandomTask())
    with t.stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # launchers repeat a signal of the terminal
        t.stop._recorded -= 2
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_reaches_another_process_first_is_no_second_one(model, tmp_path, monkeypatch):
    t = SelfDistillTrainer(args=killable_config(model, tmp_path / "run", "fire", 4), task=RandomTask())
    monkeypatch.setattr(signals, "gather_object", lambda own: [*own, signal.SIGTERM])
    with t.stop:
        assert t.stop._requested() and t.stop.signal == signal.SIGTERM
        later = time.monotonic() + 60  # while this process writes the checkpoint
        monkeypatch.setattr(signals.time, "monotonic", lambda: later)
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(signals.time, "monotonic", lambda: later + 60)
        with pytest.raises(KeyboardInterrupt):  # the second one here
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_limit_of_a_stop_is_that_of_the_step_and_not_of_its_checkpoint(model, tmp_path, monkeypatch):
    settings = {"save_strategy": "no", "stop_within": 1.0, "eval_size": 0}
    t = SelfDistillTrainer(args=killable_config(model, tmp_path / "run", "fire", 4, **settings), task=RandomTask())
    save, calls = t._save_checkpoint, []

    def slow(*args):
        calls.append(args)
        time.sleep(1.5)
        save(*args)

    monkeypatch.setattr(t, "_save_checkpoint", slow)
    t.callback_handler.callbacks.insert(-1, At(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    t.train()
    assert len(calls) == 1 and t.state.global_step == 2 and (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.mark.parametrize("stopping", [False, True])
def test_a_process_whose_launcher_has_ended_stops_once(stopping, model, tmp_path, monkeypatch, caplog):
    t = SelfDistillTrainer(args=killable_config(model, tmp_path / "run", "fire", 4), task=RandomTask())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    t.stop._launcher = -1
    with t.stop:
        if stopping:
            os.kill(os.getpid(), signal.SIGINT)
        for thread in threading.enumerate():
            if thread.name == "launcher watch":
                thread.join(30)
                assert not thread.is_alive()
    assert t.stop.signal == (signal.SIGINT if stopping else signal.SIGTERM)
    assert ("has ended" in caplog.text) != stopping


def test_a_process_of_a_launcher_reports_its_error_before_it_ends():
    program = """if True:
        import os, signal, time
        from firedistill.run import signals
        signals.TO_REPORT = 0.5
        try:
            with signals.StopRequest(None):
                raise RuntimeError("the other process has ended")
        except RuntimeError as error:
            os.kill(os.getpid(), signal.SIGTERM)
            print(error, flush=True)
        time.sleep(60)
    """
    for launcher, told in (({"TORCHELASTIC_RUN_ID": "none"}, "the other process has ended\n"), ({}, "")):
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | launcher, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (-signal.SIGTERM, told), done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="POSIX")
def test_an_ignored_signal_stays_ignored(model, tmp_path):
    """As under nohup, and for a task with a handler of its own."""
    seen = []
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:

        def both():
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)

        t = interrupted(model, tmp_path / "run", 1, both)
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert t.state.global_step == 4 and t.stop.signal is None and seen == [signal.SIGUSR1]


def test_a_second_control_c_stops_at_once(model, tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted(model, tmp_path / "run", 3, twice)
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-2"


# ---- States that cannot be continued -----------------------------------------------------------------------------------------


def spoil(trainer: SelfDistillTrainer, where: str) -> None:
    """Infinity in one number of the adapter or of the optimizer's state."""
    parameter = next(p for p in trainer.model.parameters() if p.requires_grad)
    values = parameter.data if where == "adapter" else trainer.optimizer.state[parameter]["exp_avg_sq"]
    values.view(-1)[0] = float("inf")


@pytest.mark.parametrize(
    ("where", "message"), [("adapter", "the adapter is not finite after step 3"), ("moments", "optimizer state")]
)
def test_a_state_that_is_not_finite_is_never_sealed(where, message, model, tmp_path):
    """The last good checkpoint stays, also where only one is kept."""
    config = killable_config(model, tmp_path / "run", "fire", 4, save_total_limit=1, eval_size=0)
    trainer = SelfDistillTrainer(args=config, task=RandomTask())
    actions = trainer.callback_handler.callbacks
    actions.insert(0, At(3, lambda: spoil(trainer, where)))  # before the row is written, as an update would do it
    with pytest.raises(ValueError, match=f"{message}.*Check learning_rate \\(0.01\\), weight_decay"):
        trainer.train()
    assert [path.name for path in sorted((tmp_path / "run").glob("checkpoint-*"))] == ["checkpoint-2"]
    assert not (tmp_path / "run" / "adapter").exists()
    train(model, tmp_path / "run", "fire", 4, save_total_limit=1, eval_size=0)


@pytest.mark.parametrize("limit", [None, 0, -1])
def test_no_limit_keeps_every_checkpoint(limit, model, tmp_path):
    train(model, tmp_path / "run", "fire", 4, save_total_limit=limit, eval_size=0, save_steps=1)
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 4


# ---- States ----------------------------------------------------------------------------------------------------------------


def test_states_come_back_as_they_were(tmp_path):
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {}},
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "params": [0, 1], "foreach": None, "maximize": False}],
        "large": 2**70,
        "half": torch.randn(3).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    save_state(state, tmp_path, "optimizer")
    again = load_state(tmp_path, "optimizer")
    assert again["param_groups"] == state["param_groups"] and isinstance(again["param_groups"][0]["betas"], tuple)
    assert again["large"] == 2**70 and list(again["state"]) == [0, 1] and again["half"].dtype == torch.bfloat16
    assert torch.equal(again["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    with pytest.raises(TypeError, match="holds a set"):
        save_state({"a": {1}}, tmp_path, "other")
    for text in ("[", '{"tensor": "9"}', '{"code": 1}', '{"dict": 3}', '{"a": 1, "b": 2}', "[" * 100_000):
        (tmp_path / "optimizer.json").write_text(text)
        with pytest.raises(CheckpointError, match="optimizer.json cannot be read"):
            load_state(tmp_path, "optimizer")


class Momentum(Objective):
    """A method with a state that changes from step to step."""

    def __post_init__(self):
        super().__post_init__()
        self.seen = torch.zeros(())

    def needs_teacher(self, rollout):
        return False

    def loss(self, batch):
        self.seen += sum(batch.student.lengths)
        return (batch.student.hidden.float() ** 2).mean() * (1 + self.seen), Metrics()

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


def test_the_state_of_a_custom_method_is_restored(model, tmp_path):
    train(model, tmp_path / "whole", "test_resume:Momentum", 4)
    with pytest.raises(ConnectionResetError):
        interrupted(model, tmp_path / "killed", 3, die, "test_resume:Momentum")
    train(model, tmp_path / "killed", "test_resume:Momentum", 4)
    assert same_runs(tmp_path / "whole", tmp_path / "killed") == []


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def constant_then_cosine(optimizer):
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), cosine(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])


@pytest.mark.parametrize("schedule", [cosine, constant_then_cosine])
def test_a_run_with_a_schedule_of_the_caller_resumes(schedule, model, tmp_path):
    def trainer(run: str, **changes) -> SelfDistillTrainer:
        torch.manual_seed(0)
        student, tokenizer = load_model_and_tokenizer(model, dtype="float32")
        student = add_lora(student, r=4)
        optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-2)
        config = killable_config(model, tmp_path / run, "fire", 4, **changes)
        optimizers = optimizer, schedule(optimizer)
        return SelfDistillTrainer(student, config, RandomTask(), processing_class=tokenizer, optimizers=optimizers)

    trainer("whole").train()
    first = trainer("run")
    first.callback_handler.callbacks.insert(-1, At(3, die))
    with pytest.raises(ConnectionResetError):
        first.train()
    trainer("run", max_grad_norm=0.9).train(allow_changes=["max_grad_norm"])
    rates = [[row["learning_rate"] for row in read_jsonl(tmp_path / run / "metrics.jsonl")] for run in ("whole", "run")]
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


def test_examples_of_the_caller_are_evaluated_and_attributed_where_that_is_wanted(model, tmp_path):
    held_out = RandomTask().examples("eval", 5, seed=3)

    def rows(run: str, **changes):
        config = killable_config(model, tmp_path / run, "fire", 2, **changes)
        SelfDistillTrainer(args=config, task=RandomTask(), eval_examples=held_out).train()
        return read_jsonl(tmp_path / run / "evals.jsonl")

    assert rows("none", eval_size=0) == [] and len(rows("some", attribution_examples=2)) == 2
    files = (tmp_path / "some" / "attribution").glob("*.json")
    records = [record for file in files for record in json.loads(file.read_text())["examples"]]
    assert records and {record["uid"] for record in records} <= {example.uid for example in held_out}


# ---- The command line ------------------------------------------------------------------------------------------------------


def firedistill(arguments: list[str]) -> int:
    """A task with random verdicts does not pass the preflight."""
    return cli.main([*arguments, "--preflight", "skip"])


def test_the_command_line_resumes_by_itself_and_refuses_another_run(copy, whole, capsys, tmp_path):
    shutil.rmtree(copy / "checkpoint-4")
    assert firedistill(["train", str(copy), "--learning_rate", "1e-3"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("firedistill train: ") and "learning_rate was 0.01, is 0.001" in told and len(told.splitlines()) == 1
    assert firedistill(["train", str(copy)]) == 0
    assert f"resuming after step 2, from {copy / 'checkpoint-2'}" in capsys.readouterr().out
    assert same_runs(whole, copy) == [], "although its settings name the folder where it was made"
    shutil.rmtree(copy / "checkpoint-4")
    assert firedistill(["train", str(copy), "--learning_rate", "1e-3", "--allow_changes", "learning_rate", "--resume"]) == 0
    assert firedistill(["train", str(copy), "--resume_from_checkpoint", str(copy / "checkpoint-7")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    settings = copy / "config.yaml"
    for value in ("true", "auto", "false"):  # in YAML, a truth
        settings.write_text(settings.read_text() + f"resume_from_checkpoint: {value}\n")
        assert firedistill(["train", str(copy), "--preflight", "only"]) == 0


def test_a_run_without_checkpoint_starts_again_only_with_the_same_settings(copy, whole, capsys):
    for folder in copy.glob("checkpoint-*"):
        shutil.rmtree(folder)
    assert firedistill(["train", str(copy), "--method_settings.group", "2"]) == 2
    assert "has no setting 'group'" in capsys.readouterr().err
    assert firedistill(["train", str(copy), "--learning_rate", "1e-3"]) == 2
    assert "already holds a run with other settings and no checkpoint (learning_rate was 0.01" in capsys.readouterr().err
    assert firedistill(["train", str(copy), "--learning_rate", "1e-3", "--resume_from_checkpoint", "auto"]) == 2
    assert "already holds a run with other settings" in capsys.readouterr().err
    (copy / "finished.json").unlink()
    config = build_config(SelfDistillConfig, str(copy), {"learning_rate": 1e-3, "output_dir": str(copy)})
    with pytest.raises(ValueError, match=r"already holds a run with other settings and no checkpoint \(learning_rate was 0.01"):
        SelfDistillTrainer(args=config).train()
    assert firedistill(["train", str(copy)]) == 0
    assert same_runs(whole, copy) == []


@pytest.mark.parametrize(("name", "step", "within"), [("finish_step", 1, 60), ("evaluate", 2, 0.5)])
def test_a_stopped_command_says_how_to_resume(name, step, within, model, tmp_path, capsys, monkeypatch):
    """After a step, and in the evaluation after the last one, which takes longer than `stop_within`."""
    killable_config(model, tmp_path / "run", "fire", 2, stop_within=within).save_yaml(tmp_path / "mine.yaml")
    real = getattr(SelfDistillTrainer, name)

    def stopped(self, *arguments, **options):
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60 if name == "evaluate" else 0)
        return real(self, *arguments, **options)

    monkeypatch.setattr(SelfDistillTrainer, name, stopped)
    assert firedistill(["train", str(tmp_path / "mine.yaml")]) == 128 + signal.SIGTERM
    told = capsys.readouterr().out
    assert f"stopped by SIGTERM after step {step}; resume with: firedistill train {tmp_path / 'run'}" in told
    assert "held-out accuracy" not in told and not (tmp_path / "run" / "adapter").exists()
