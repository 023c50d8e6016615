"""Disks that are full and trackers that fail: the run continues, and nothing that was computed is lost."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from firedistill import SelfDistillTrainer
from firedistill.files import naming, written_at_once, written_whole
from firedistill.run import resume
from firedistill.run.checkpoints import checkpoint_folder, newest_checkpoint, seal
from firedistill.run.directory import finished_step, mark_finished
from firedistill.run.log import RunLog, read_jsonl
from firedistill.run.signals import StopOverdue
from firedistill.run.trackers import guard_trackers, name_in_trackers
from tiny import ToyTask, rows_of, run_config, run_trainer


def trainer(checkpoint, folder, **changes) -> SelfDistillTrainer:
    return run_trainer(checkpoint, folder, **{"eval_size": 0, "save_steps": 100, **changes})


class Between(TrainerCallback):
    """Does one thing at the end of a step and another at the end of a later one."""

    def __init__(self, actions):
        self.actions = actions

    def on_step_end(self, args, state, control, **kwargs):
        self.actions.get(state.global_step, lambda: None)()


class NewestCheckpoint(TrainerCallback):
    """The names of the newest complete checkpoint after every attempt to write one."""

    def __init__(self, run):
        self.run, self.names = run, []

    def on_save(self, args, state, control, **kwargs):
        self.names.append(newest_checkpoint(self.run).name)


@pytest.mark.parametrize("name", ["checkpoint.json", "weights", "finished.json"])
def test_what_the_system_cannot_read_does_not_count_as_damaged(name, tmp_path, monkeypatch):
    """It may be complete: resuming from an earlier checkpoint would remove a later one, and `inspect` would show another model."""
    for step in (1, 2):
        folder = checkpoint_folder(tmp_path, step)
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        seal(folder, {})
    place = tmp_path if name == "finished.json" else checkpoint_folder(tmp_path, 2)
    unreadable, opened = place / name, io.open

    def failing(file, *arguments, **options):
        if file == unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(file, *arguments, **options)

    mark_finished(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2) and finished_step(tmp_path) == 2
    monkeypatch.setattr(io, "open", failing)
    with pytest.raises(OSError, match=f"Input/output error: '{unreadable}'"):
        newest_checkpoint(tmp_path)
        finished_step(tmp_path)


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_tried_again(checkpoint, tmp_path, caplog):
    """The system refuses files beyond a size, as a full disk does."""
    t = trainer(checkpoint, tmp_path / "run", save_steps=1, save_total_limit=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    t.add_callback(Between({2: lambda: limit(12_000), 4: lambda: limit(before[0])}))
    seen = NewestCheckpoint(tmp_path / "run")
    t.add_callback(seen)
    try:
        rows = rows_of(t)
    finally:
        limit(before[0])
    assert seen.names == ["checkpoint-1", "checkpoint-1", "checkpoint-1", "checkpoint-4"], (
        "the earlier one stays until a new one is complete"
    )
    assert [row.get("failed_checkpoints", 0) for row in rows] == [0, 0, 1, 2]
    assert "checkpoint-2 could not be written" in caplog.text and "Make room" in caplog.text
    assert not list((tmp_path / "run").glob(".unfinished*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_rows_wait_for_a_disk_that_is_full(checkpoint, tmp_path, caplog):
    t = trainer(checkpoint, tmp_path / "run", save_steps=2)
    rows, aside = tmp_path / "run" / "metrics.jsonl", tmp_path / "aside"

    def fill():
        rows.rename(aside)
        rows.symlink_to("/dev/full")

    def empty():
        rows.unlink()
        aside.rename(rows)

    t.add_callback(Between({1: fill, 3: empty}))
    t.train()
    found = read_jsonl(rows)
    assert [row["step"] for row in found] == [1, 2, 3, 4], "none was lost"
    assert "rows of metrics.jsonl wait until they can be written" in caplog.text and found[-1]["failed_writes"] == 2
    assert found[-1]["failed_checkpoints"] == 1, "a checkpoint needs its rows"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


def test_half_a_row_never_spoils_the_next(tmp_path):
    log = RunLog(tmp_path)
    log.metrics({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, limits[1]))
    try:
        log.metrics({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n' and log.failed_writes == 1
    log.metrics({"step": 3})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


class FullFor:
    """A trainer's `write_adapter` that finds the disk full `times` times, except in temporary folders."""

    def __init__(self, trainer: SelfDistillTrainer, times: int, number: int = errno.ENOSPC):
        self.write, self.times, self.number = trainer.write_adapter, times, number
        self.run = Path(trainer.args.run_dir)

    def __call__(self, target: Path) -> None:
        if self.run in target.parents and self.times:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))
        self.write(target)


def copies(caplog) -> list[Path]:
    return [Path(name) for name in re.findall(r"A copy is in (\S+adapter)", caplog.text)]


def test_the_adapter_waits_for_a_disk_that_is_full_at_the_end(checkpoint, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(resume, "RETRY_AFTER", 0.01)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    t = trainer(checkpoint, tmp_path / "run")
    t.write_adapter = FullFor(t, times=3)
    t.train()
    assert finished_step(tmp_path / "run") == 4 and (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert "No space left on device" in caplog.text and "make room on the disk" in caplog.text
    (copy,) = copies(caplog)
    kept = [load_file(folder / "adapter_model.safetensors") for folder in (copy, tmp_path / "run" / "adapter")]
    assert kept[0].keys() == kept[1].keys() and all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_signal_or_another_error_ends_the_waiting(number, checkpoint, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    t = trainer(checkpoint, tmp_path / "run", save_steps=2)
    t.write_adapter = FullFor(t, times=10**9, number=number)
    if number == errno.ENOSPC:
        monkeypatch.setattr(t.stop, "wait", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(
        OSError, match="adapter of step 4 could not be written .* A copy is in .* resumes from its last checkpoint"
    ):
        t.train()
    assert finished_step(tmp_path / "run") is None and len(copies(caplog)) == 1
    again = trainer(checkpoint, tmp_path / "run", save_steps=2)
    again.train()
    assert finished_step(tmp_path / "run") == 4, "the same command completes the run"


@pytest.mark.parametrize("error", [SafetensorError, Exception])
def test_errors_of_writing_name_the_file(error, tmp_path):
    """Libraries in Rust have the system's error in their text only, and a write that fails names no file."""
    target = tmp_path / "adapter"
    for raised in (error("I/O error: no room (os error 28)"), OSError(errno.ENOSPC, "No space left on device")):
        for writing in (written_whole, written_at_once):
            with pytest.raises(OSError, match=r"No space left on device: '.*adapter'") as caught, writing(target):
                raise raised
            assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
    with pytest.raises(error, match="a bug"), written_whole(target):
        raise error("a bug")
    with pytest.raises(OSError, match="'other'"), written_whole(target):
        raise OSError(errno.EACCES, "Permission denied", "other")


def test_errors_of_reading_name_the_file(tmp_path):
    """The ways in which safetensors and PyTorch's storages say it; other errors stay as they are."""
    path = tmp_path / "teacher.safetensors"
    for error in (
        SafetensorError("Input/output error (os error 5)"),
        OSError("Input/output error (os error 5)"),  # without `errno`
        RuntimeError(f"unable to open file <{path}> in read-only mode: Input/output error (5)"),
    ):
        with pytest.raises(OSError, match=re.escape(f"[Errno 5] Input/output error: '{path}'")), naming(path):
            raise error
    with pytest.raises(RuntimeError, match="another"), naming(path):
        raise RuntimeError("another (5)")


def test_an_attribution_that_cannot_be_written_is_lost_and_logged(checkpoint, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "attribution").write_text("in the way")
    t = trainer(checkpoint, tmp_path / "run", attribution_examples=1)
    t.train()
    assert caplog.text.count("the attribution of step 4 is missing") == 1
    assert finished_step(tmp_path / "run") == 4


def test_an_upload_that_fails_is_told_and_ends_nothing(checkpoint, tmp_path, caplog, monkeypatch):
    """The repository is made before anything is trained, which needs the network."""
    uploads = []

    def upload(self, **arguments):
        uploads.append(arguments)
        raise ConnectionError("offline")

    monkeypatch.setattr(resume.HfApi, "upload_folder", upload)
    monkeypatch.setattr(resume.HfApi, "create_repo", lambda *arguments, **options: SimpleNamespace(repo_id="me/x"))
    t = trainer(checkpoint, tmp_path / "run", save_steps=2, push_to_hub=True, hub_token="hf_secret")
    t.train()
    assert finished_step(tmp_path / "run") == 4 and len(uploads) == 3, "two checkpoints and the adapter"
    later = f"later: hf upload me/x {tmp_path / 'run' / 'adapter'} '--include=adapter_*' '--include=tokenizer*'"
    assert later in caplog.text and "hf_secret" not in caplog.text
    assert not any("hf_secret" in path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_an_upload_on_request_holds_the_adapter_alone(checkpoint, tmp_path, monkeypatch):
    uploads = []

    def upload(self, folder_path, allow_patterns, **options):
        names = [path.name for path in Path(folder_path).iterdir()]
        uploads.append((set(filter_repo_objects(names, allow_patterns=allow_patterns)), options))

    monkeypatch.setattr(resume.HfApi, "upload_folder", upload)
    monkeypatch.setattr(resume.HfApi, "create_repo", lambda *arguments, **options: SimpleNamespace(repo_id="me/x"))
    t = trainer(checkpoint, tmp_path / "run")
    t.push_to_hub("mine", token="hf_secret")
    ((names, options),) = uploads
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not any(name.startswith(("training_args", "checkpoint", "config")) for name in names)
    assert (options["repo_id"], options["commit_message"], options["token"]) == ("me/x", "mine", "hf_secret")
    assert not (tmp_path / "run" / "README.md").exists(), "the run directory stays as it is"


def test_a_repository_that_cannot_be_made_is_one_clear_error(checkpoint, tmp_path, monkeypatch):
    def offline(*arguments, **options):
        raise RuntimeError("no network")

    monkeypatch.setattr(resume.HfApi, "create_repo", offline)
    with pytest.raises(ValueError, match="push_to_hub: the repository cannot be created .*no network"):
        trainer(checkpoint, tmp_path / "run", push_to_hub=True)


def test_rollouts_that_cannot_be_written_are_counted(tmp_path):
    log = RunLog(tmp_path)
    (tmp_path / "rollouts").write_text("in the way")
    log.rollouts(1, [{"step": 1}])
    assert log.failed_writes == 1


def test_a_run_continues_without_its_tracker(checkpoint, tmp_path, caplog):
    class Tracker(TrainerCallback):
        calls = 0

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.calls += 1
            if self.calls > 1:
                raise ConnectionError("the tracker is gone")

    Tracker.__module__ = "transformers.integrations.integration_utils"
    tracker = Tracker()
    config = run_config(checkpoint, tmp_path / "run", eval_size=0, save_strategy="no")
    rows = rows_of(SelfDistillTrainer(args=config, task=ToyTask(), callbacks=[tracker]))
    assert [row.get("failed_tracker_calls", 0) for row in rows] == [0, 0, 1, 2] and tracker.calls >= 4
    assert caplog.text.count("the tracker Tracker failed in on_log (ConnectionError: the tracker is gone)") == 1


class Tracking:
    """Stands for the packages wandb and trackio.

    Attributes:
        run: the run that is logged to.
        runs: all runs.
    """

    def __init__(self):
        self.run, self.runs, self.config = None, [], MagicMock()
        self.context_vars = SimpleNamespace(
            current_run=SimpleNamespace(get=lambda: self.run), current_space_id=SimpleNamespace(get=lambda: None)
        )

    def init(self, project, name, **options):
        known = [run for run in self.runs if run.name == name and options.get("resume") == "allow"]
        self.run = (
            known[0]
            if known
            else SimpleNamespace(name=name, project=project, steps=[], ended=[], summary={}, _label=MagicMock())
        )
        self.runs += [self.run] * (not known)

    def log(self, row):
        self.run.steps.append(row["train/global_step"])

    def finish(self, exit_code=None):
        self.run.ended.append(exit_code)
        self.run = None


@pytest.fixture(params=["wandb", "trackio"])
def tracking(request, monkeypatch):
    """The stub of a package, and the function that makes its callback in transformers."""
    stub = Tracking()
    monkeypatch.setitem(sys.modules, request.param, stub)
    for name in ("wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(ConfigError=ValueError))
    monkeypatch.setattr(integration_utils, f"is_{request.param}_available", lambda: True)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return stub, integration_utils.INTEGRATION_TO_CALLBACK[request.param]


def test_every_run_is_one_of_its_own_in_trackers(checkpoint, tmp_path, tracking):
    def run(folder, *callbacks):
        config = run_config(checkpoint, tmp_path / folder, max_steps=2, eval_size=0, save_steps=1, project="mine")
        t = SelfDistillTrainer(args=config, task=ToyTask(), callbacks=[callback(), *callbacks])
        t.train()
        t.evaluate(ToyTask().examples("eval", 1))  # not of the training
        assert package.run is None and not t.failures()["failed_tracker_calls"]
        return t.args.run_name

    def stop():
        raise StopOverdue

    package, callback = tracking
    first, other, stopped = run("a/seed0"), run("b/seed0"), run("c", Between({2: stop}))
    assert first != other and all(name.startswith("seed0-") for name in (first, other)) and stopped.startswith("c-")
    assert run("c") == stopped, "resumed"
    assert {(r.name, r.project) for r in package.runs} == {(name, "mine") for name in (first, other, stopped)}
    assert all(len(r.ended) in (1, 2) and set(r.ended) <= {0, None} for r in package.runs)
    for name in (first, other):
        (found,) = (r.steps for r in package.runs if r.name == name)
        assert sorted(set(found)) == [1, 2] and found == sorted(found)
    assert "WANDB_PROJECT" not in os.environ


def test_a_run_of_the_caller_is_left_open(tracking, monkeypatch):
    package, callback = tracking
    package.init("theirs", "theirs")
    (tracker,) = guard_trackers([callback()])
    monkeypatch.setattr(tracker.tracker, "setup", lambda *arguments, **options: None)
    tracker.on_train_begin(SimpleNamespace(project="mine"), SimpleNamespace(is_hyper_param_search=False), None)
    tracker.end(failed=False)
    assert package.run.name == "theirs" and not package.run.ended


def test_a_training_that_fails_is_a_failed_run_in_wandb(checkpoint, tmp_path, tracking):
    def fail():
        raise OSError("gone")

    package, callback = tracking
    config = run_config(checkpoint, tmp_path / "run", eval_size=0)
    t = SelfDistillTrainer(args=config, task=ToyTask(), callbacks=[callback(), Between({1: fail})])
    with pytest.raises(OSError, match="gone"):
        t.train()
    assert package.run is None and package.runs[0].ended == [1 if callback.__name__ == "WandbCallback" else None]


def test_the_name_of_a_run_in_trackers(tmp_path):
    run = tmp_path / "seed0"
    run.mkdir()
    assert name_in_trackers(run, "seed0", 3) == "seed0", "of an earlier version, which stored none"
    name = name_in_trackers(run, "seed0", 0)
    assert re.fullmatch("seed0-[0-9a-f]{6}", name) and name_in_trackers(run, "seed0", 3) == name
    assert name_in_trackers(run, "seed0", 0) != name, "--overwrite"
    assert name_in_trackers(run, "mine", 3) == name_in_trackers(run, "mine", 0) == name_in_trackers(run, "seed0", 3) == "mine"
