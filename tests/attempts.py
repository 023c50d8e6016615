"""Kinds of runs that the campaigns of `kill_test.py` and `fault_test.py` attempt, each in a process forked from a server.

A kind is a function of its inputs, the run directory, and whether there has been an attempt before; it returns the exit status.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn
from unittest.mock import patch

import matplotlib.pyplot  # noqa: F401 (an attempt forks from a process that has imported everything)
import psutil
import torch.distributed  # noqa: F401

import firedistill.cli.inspect  # noqa: F401
import firedistill.cli.report  # noqa: F401
import firedistill.cli.suite
import firedistill.cli.train  # noqa: F401
import firedistill.report.build  # noqa: F401
import firedistill.report.curves  # noqa: F401
from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.cli import main as cli
from firedistill.cli.names import method_names
from firedistill.recipes import build_config
from firedistill.suites import run as suite_run
from firedistill.terminal import quiet_libraries
from killable import killable_config, same_runs
from tiny import save_checkpoint

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["attempts"])

SUITE = """\
title: a toy
warmstart: warm.yaml
blocks:
  - recipes: [recipe.yaml]
    methods: [fire, full_context]
"""
METHODS = sorted(method_names() - {"supervised"})


def start_server(**environment: str) -> None:
    """Start the server from which attempts fork, with these environment variables; returns once it has imported everything."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    leaked = "ignore:resource_tracker:UserWarning"  # semaphores of processes that were killed
    changes = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": leaked, **environment}
    with patch.dict(os.environ, changes):
        in_a_process(int)


def in_a_process(call: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a process of its own.

    Raises:
        RuntimeError: it failed; its traceback is on standard error.
    """
    process = PROCESSES.Process(target=call, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{call.__name__} ended with status {process.exitcode}")


def make_inputs(folder: Path, steps: int) -> Path:
    """Write a model, a recipe of `steps` steps, a suite, and another finished run (`other`) into `folder`, and return it."""
    quiet_libraries()
    model = save_checkpoint(folder / "base")
    # The task of killable_config draws its verdicts; the validation of the command line would refuse it.
    changes = {"task": "tiny:ToyTask", "attribution_examples": 1, "max_context_tokens": 2048}
    killable_config(model, folder, "fire", steps, **changes).save_yaml(folder / "recipe.yaml")
    killable_config(model, folder, "supervised", steps, **changes, lora_dropout=0.0).save_yaml(folder / "warm.yaml")
    (folder / "suite.yaml").write_text(SUITE)
    in_a_process(quietly, folder / "other.log", command, "train", folder, folder / "other", "--seed", "1")
    return folder


def command(name: str, given: Path, run: Path, *options: str) -> int:
    return cli.main([name, str(given / "recipe.yaml"), "--output_dir", str(run), *options])


def trained(method: str, given: Path, run: Path, again: bool) -> int:
    """Through the Python interface, with verdicts, feedback and dropout that draw from the global random state."""
    changes = {"method": method, "output_dir": str(run), "task": "killable:RandomTask"}
    SelfDistillTrainer(args=build_config(SelfDistillConfig, str(given / "recipe.yaml"), changes)).train()
    return 0


def warm_started(given: Path, run: Path, again: bool) -> int:
    return command("warmstart", given, run, "--save_steps", "2")


def commanded(given: Path, run: Path, again: bool) -> int:
    return command("train", given, run)


def overwritten(given: Path, run: Path, again: bool) -> int:
    """Replace another run. If that was interrupted, the new run may be resumable; if it is refused, replace again."""
    if again and command("train", given, run) == 0:
        return 0
    return command("train", given, run, "--overwrite")


def suite_of_runs(given: Path, run: Path, again: bool) -> int:
    """A warm start and two runs that need it, two at a time."""
    suite_run.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    firedistill.cli.suite.Runner = partial(suite_run.Runner, pause=0.1)
    return cli.main(["suite", str(given / "suite.yaml"), "-o", str(run), "--retry-failed", "--jobs", "2"])


def two_ranks(given: Path, run: Path, again: bool) -> int:
    """What torchrun does, without an interpreter per rank: start two ranks; when one fails, end the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = ["train", str(given / "recipe.yaml"), "--output_dir", str(run), "--ddp_backend", "gloo"]
    ranks = [
        Forked(["firedistill", *arguments], env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    failed_at = None
    while any(rank.poll() is None for rank in ranks):
        if failed_at is None and any(rank.returncode for rank in ranks):
            failed_at = time.monotonic()
            for rank in ranks:
                rank.send(signal.SIGTERM)
        elif failed_at is not None and time.monotonic() - failed_at > 20:
            for rank in ranks:
                rank.send(signal.SIGKILL)
        time.sleep(0.02)
    return int(any(rank.returncode for rank in ranks))


KINDS: dict[str, Callable[[Path, Path, bool], int]] = {
    **{method: partial(trained, method) for method in METHODS},
    "warmstart": warm_started,
    "command": commanded,
    "overwrite": overwritten,
    "suite": suite_of_runs,
    "ranks": two_ranks,
}


FORKING = threading.Lock()  # filelock refuses to let two threads fork at the same time


class Forked:
    """Stands in for `subprocess.Popen` with a command of firedistill, and forks instead of starting an interpreter."""

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        stdout: IO[str] | None = None,
        pass_fds: Sequence[int] = (),
        **others: Any,
    ):
        self.returncode: int | None = None
        sys.stdout.flush()
        with FORKING:
            self.pid = os.fork()
        if self.pid == 0:
            with ended_with_status():
                if stdout is not None:
                    redirect(stdout.fileno())
                for handle in map(int, os.listdir("/proc/self/fd")):
                    if handle > 2 and handle not in pass_fds:
                        with suppress(OSError):
                            os.close(handle)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.environ.clear()
                os.environ.update(env)
                first = next(position for position, word in enumerate(command) if word in cli.COMMANDS)
                sys.exit(cli.main(command[first:]))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def ended_with_status() -> Iterator[None]:
    """End this process after the block, as an interpreter does: with the status of SystemExit, or a traceback and 1."""
    status = 0
    try:
        yield
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)


def redirect(handle: int) -> None:
    """Let standard output and error of this process go to an open file."""
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def quietly(log: Path, call: Callable[..., int], *arguments: Any) -> NoReturn:
    """Call a function whose output goes to `log`, and end this process with the status that it returns."""
    with ended_with_status():
        redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        sys.exit(call(*arguments))


def members(groups: Iterable[int]) -> list[int]:
    """The live processes of process groups, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def place_of(path: str) -> str:
    """What a file of a run or of a suite is: its path there, without numbers and without the names of a suite's runs."""
    path = re.sub(r"\b(recipe|warmstart)-[a-z_]+(-seed\d+)?", "RUN", path)
    return re.sub(r"\d+", "N", re.sub(r"tmp\w+", "tmp", path)).strip("/") or "."


# ---- Comparison --------------------------------------------------------------------------------------------------------------


def differences(kind: str, first: Path, second: Path) -> list[str]:
    """What differs between two finished runs of a kind, except for times."""
    if kind != "suite":
        return same_runs(first, second) + same_files(first, second)
    names = [sorted(path.name for path in suite.glob("runs/*")) for suite in (first, second)]
    if names[0] != names[1]:
        return [f"runs {names}"]
    return [
        f"{name}: {text}"
        for name in names[0]
        for text in differences("", *(suite / "runs" / name for suite in (first, second)))
    ]


def same_files(first: Path, second: Path) -> list[str]:
    """Files that only one of two run directories has, and differing ones that hold no times.

    A run that is killed once it is finished leaves its lock, which the operating system has released; the next run takes the file.
    """
    names = [
        {str(path.relative_to(run)) for path in run.rglob("*") if not path.name.endswith(".lock")} for run in (first, second)
    ]
    texts = sorted(name for name in names[0] & names[1] if name.startswith("attribution/") or name.startswith("README"))
    found = [f"only one run has {name}" for name in sorted(names[0] ^ names[1])]
    return found + [
        name for name in texts if (first / name).is_file() and (first / name).read_bytes() != (second / name).read_bytes()
    ]
