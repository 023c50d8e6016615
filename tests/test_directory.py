"""One trainer per run directory, and nothing deleted that a run did not write."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from firedistill.cli.main import main as cli
from firedistill.run import directory
from firedistill.run.directory import RunDirectoryError, RunLock, finished_step, mark_finished, remove_run
from firedistill.run.log import read_jsonl
from tiny import is_training, run_config, run_trainer

HOLDER = """
import sys, time
from firedistill.run.directory import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path / "run"`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_a_dead_one_is_not(holder, tmp_path):
    run = tmp_path / "run"
    assert is_training(run)
    with pytest.raises(RunDirectoryError, match=rf"process {holder.pid} on host .* is training in"), RunLock(run):
        pass
    assert is_training(run), "asking does not release it"
    holder.kill()
    holder.wait()
    assert not is_training(run)
    with RunLock(run) as lock:
        lock.check()
        with RunLock(run) as again:
            assert again is lock
        assert (run / ".lock").exists(), "the outer context still holds it"
    assert not (run / ".lock").exists()


def test_a_lock_is_kept_when_its_file_is_read_and_by_no_child(tmp_path):
    with RunLock(tmp_path) as lock:
        child = os.fork()
        if child == 0:
            with lock:
                pass
            time.sleep(60)
            os._exit(0)
        try:
            (tmp_path / ".lock").read_text()  # closing it releases the record lock
            lock._lock()  # what a heartbeat does
            assert subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], capture_output=True).returncode == 1
        finally:
            lock.__exit__()
        try:
            assert not is_training(tmp_path), "the child does not keep it"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def as_another_machine(run: Path) -> Path:
    """What a holder on another machine leaves in the lock file."""
    run.mkdir(exist_ok=True)
    (run / ".lock").write_text(json.dumps({"host": "far", "pid": 7, "machine": "another", "id": "x"}))
    return run / ".lock"


def test_a_heartbeat_on_another_machine_protects_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "HEARTBEAT", 0.1)
    monkeypatch.setattr(directory, "GONE_AFTER", 30.0)
    path, ended = as_another_machine(tmp_path), threading.Event()

    def beat():
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunDirectoryError, match="process 7 on host far is training"), RunLock(tmp_path):
            pass
    finally:
        ended.set()
        thread.join()
    os.utime(path, (time.time() - 31, time.time() - 31))
    with RunLock(tmp_path) as lock:
        lock.check()
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 30
        while path.stat().st_mtime <= 1:
            assert time.monotonic() < deadline, "a heartbeat of our own"
            time.sleep(0.05)


def test_where_files_cannot_be_locked_the_heartbeat_protects_a_run_on_the_same_machine(tmp_path, monkeypatch, caplog):
    """As on some network file systems."""

    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directory.fcntl, "lockf", no_locks)
    monkeypatch.setattr(directory, "HEARTBEAT", 0.05)
    monkeypatch.setattr(directory, "GONE_AFTER", 30.0)
    with RunLock(tmp_path):
        code = f"import tests_of_locks\ntests_of_locks.take({str(tmp_path)!r})"
        (tmp_path / "tests_of_locks.py").write_text(SECOND_HOLDER)
        second = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        time.sleep(0.3)
    assert second.stdout.endswith("is training\n"), second.stderr
    assert sum("its heartbeat alone protects the run" in message for message in caplog.messages) == 1, "and this is said once"


SECOND_HOLDER = """
import errno
from firedistill.run import directory

def take(folder):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    directory.fcntl.lockf = no_locks
    directory.HEARTBEAT, directory.GONE_AFTER = 0.4, 30.0
    try:
        with directory.RunLock(folder):
            print("took it over")
    except directory.RunDirectoryError as error:
        print(str(error).partition(" in ")[0])
"""


def test_a_folder_has_one_lock_whatever_its_name(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with RunLock("../run") as outer, RunLock(tmp_path / "run") as inner:
        assert inner is outer and outer.depth == 2


def test_overwriting_does_not_leave_a_checkpoint_to_resume_from(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("method: fire\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "checkpoint-3").mkdir()
    monkeypatch.setattr(directory, "discard", lambda folder: None)  # as of a folder that only another user may change
    with pytest.raises(RunDirectoryError, match="checkpoint-3 cannot be deleted"):
        remove_run(tmp_path)


def test_a_dead_holder_on_another_machine_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "HEARTBEAT", 0.1)
    monkeypatch.setattr(directory, "GONE_AFTER", 0.5)
    as_another_machine(tmp_path)
    with RunLock(tmp_path) as lock:
        lock.check()
        as_another_machine(tmp_path)
        with pytest.raises(RunDirectoryError, match="another process trains there"):
            lock.check()


def lab(run: Path, *arguments: str) -> list[str]:
    options = ["--max_steps", "2", "--warmup_steps", "1", "--attribution_examples", "0", "--eval_size", "0"]
    return ["train", "lab", "--output_dir", str(run), "--preflight", "skip", *options, *arguments]


def test_no_command_touches_a_run_that_is_training(holder, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    for arguments in ([], ["--overwrite"], ["--resume"], ["--method", "veto"]):
        assert cli(lab(run, *arguments)) == 2
        assert f"process {holder.pid} on host" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == [".lock", "metrics.jsonl"]


def test_a_run_ends_when_its_directory_is_replaced(checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path / "run", eval_size=0, save_strategy="no")
    trainer.on_progress = lambda phase, done, total: (
        (tmp_path / "run").exists() and (tmp_path / "run").rename(tmp_path / "away")
    )
    with pytest.raises(RunDirectoryError, match="was removed or replaced while the run was training"):
        trainer.train()
    assert not (tmp_path / "run" / "adapter").exists() and finished_step(tmp_path / "away") is None


def test_a_run_is_finished_only_at_its_end(checkpoint, tmp_path):
    run = tmp_path / "run"
    run_trainer(checkpoint, run, eval_size=0, max_steps=2).train()
    assert finished_step(run) == 2 and not list(run.glob(".*"))
    trainer = run_trainer(checkpoint, run, eval_size=0, max_steps=3)
    trainer.begin_run = lambda step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train(allow_changes=["max_steps"])
    assert finished_step(run) is None, "a run that continues has not finished"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": "2"}', "\x00"])
def test_a_damaged_mark_is_no_end(tmp_path, content):
    (tmp_path / "finished.json").write_text(content)
    assert finished_step(tmp_path) is None


# ---- Deleting ----------------------------------------------------------------------------------------------------------------


def a_run(folder: Path) -> Path:
    """One file of every kind that a run writes."""
    names = ["config.yaml", "evals.jsonl", "README.md", "curves.png", "adapter/adapter_config.json", "checkpoint-2/x"]
    names += ["rollouts/step_000001.parquet", "rollouts/step_000001-000100.parquet", "rollouts/.unfinished-step_000002.parquet"]
    names += ["rollouts/eval_000000.parquet", "attribution/step_000000.json", ".unfinished-checkpoint-4/x", "metrics.jsonl"]
    names += ["rollouts/sampled_000000.parquet"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    mark_finished(folder, 2)
    return folder


def test_only_what_a_run_wrote_is_deleted(tmp_path):
    run = a_run(tmp_path / "run")
    others = ["rollouts/step_000001.json", "rollouts/eval_1.parquet"]
    others += ["notes.txt", "rollouts/mine.parquet", "other-run/metrics.jsonl", "checkpoint-best/x", "attribution/paper.json"]
    for name in others:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    remove_run(run)
    assert sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()) == sorted(others)
    bare = a_run(tmp_path / "bare")
    remove_run(bare)
    assert not list(bare.iterdir())


def test_a_link_to_a_run_is_emptied_and_stays(tmp_path):
    a_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    remove_run(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("name", ["README.md", "adapter", "config.yaml", "finished.json", "checkpoint-2"])
def test_a_folder_that_is_not_a_run_keeps_its_files(tmp_path, name, capsys):
    (tmp_path / name).mkdir()
    for arguments in ([], ["--overwrite"]):
        assert cli(lab(tmp_path, *arguments)) == 2
        told = capsys.readouterr().err
        assert f"is not a run directory, and a run would replace its {name}" in told
        assert ("restore its metrics.jsonl" in told) is name.startswith("checkpoint")
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        remove_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_is_not_an_output_folder(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("mine", encoding="utf-8")
    for arguments in (lab(path), ["suite", "lab", "-o", str(path)], ["report", str(tmp_path), "-o", str(path)]):
        assert cli(arguments) == 2
        assert f"{path} is not a folder; " in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "mine"


def test_overwrite_keeps_other_runs_and_notes(tmp_path, capsys):
    runs = tmp_path / "runs"
    assert cli(lab(runs)) == 0
    a_run(runs / "other")
    (runs / "notes.txt").write_text("mine")
    assert cli(lab(runs, "--overwrite", "--seed", "1")) == 0
    assert (runs / "notes.txt").read_text() == "mine" and (runs / "other" / "metrics.jsonl").exists()
    assert [row["step"] for row in read_jsonl(runs / "metrics.jsonl")] == [1, 2] and finished_step(runs) == 2


def test_an_interrupted_removal_can_be_repeated(tmp_path, monkeypatch):
    run, removed, remove = a_run(tmp_path / "run"), [], directory.remove

    def fail_at_the_eighth(path):
        removed.append(path)
        if len(removed) == 8:
            raise OSError("no")
        remove(path)

    with monkeypatch.context() as patched:
        patched.setattr(directory, "remove", fail_at_the_eighth)
        with pytest.raises(OSError, match="no"):
            remove_run(run)
    remove_run(run)
    assert not list(run.iterdir())


def test_a_task_that_changes_the_working_directory_does_not_move_the_run(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = run_trainer(checkpoint, Path("run"), eval_size=0)
    (tmp_path / "elsewhere").mkdir()
    trainer.on_progress = lambda phase, done, total: os.chdir(tmp_path / "elsewhere")
    trainer.train()
    assert finished_step(tmp_path / "run") == trainer.args.max_steps and not list((tmp_path / "elsewhere").iterdir())
    assert run_config(checkpoint, Path("run")).output_dir == "run", "settings keep the path that was given"
