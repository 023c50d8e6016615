"""Execution of a plan: every run is a process of its own, and the suite can be killed and continued at any point.

    runs/lab/
      plan.json                 the runs and their settings
      runs/<id>/                run directories, as `firedistill train` writes them
      logs/<id>.log             what the run printed, attempt after attempt
      state/<id>.json           the current or the last attempt
      state/<id>.lock           locked by the suite process that manages the run
      state/<id>.trainer.lock   locked by the run's own process

A run is done when its process has ended and has written `finished.json` into the run directory, the last file that it writes. Its exit
status does not matter then: a library may fail while the interpreter exits.

Both locks are `flock` locks: the operating system releases them when their holder dies. A run's process inherits its lock and keeps
it when the suite process is killed, so a run directory never has two trainers. Where a file system does not share `flock` between
hosts, a heartbeat protects the run: its suite process touches `state/<id>.json`. Lock files are never removed, because a lock on a
removed file excludes nobody.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

from filelock import FileLock

from firedistill.files import naming
from firedistill.run.checkpoints import newest_checkpoint, step_of
from firedistill.run.directory import finished_step, is_run, make_folder
from firedistill.run.log import iterate_jsonl, last_row
from firedistill.run.signals import ALWAYS, REQUESTS
from firedistill.suites.plan import Plan, PlannedRun, coerced_record, merge, read_plan, with_warm_starts, write_json
from firedistill.terminal import visible

HOST = socket.gethostname()
# Seconds between heartbeats, and without one after which a process on another host counts as dead.
HEARTBEAT, GONE_AFTER = 10, 600
# Seconds that a run has to stop before it is killed.
PATIENCE = 60
# The exit codes of a run that was asked to stop: killed by a signal, or exited after one.
STOPPED = {code for number in REQUESTS for code in (-number, 128 + number)}
# Errors of `flock` for a lock that another process holds; some network file systems report EACCES.
HELD = (BlockingIOError, PermissionError)
STATES = ["done", "running", "failed", "waiting", "to do"]

Otherwise = TypeVar("Otherwise")


@dataclass
class RunState:
    """Where a run stands.

    Attributes:
        name: one of `STATES`; "waiting" is for its warm start.
        step: the last step in its log.
        accuracy: of the last evaluation, if there was one.
        seconds, steps: wall time of the last or current attempt, and the steps made in it.
        note: why it failed, what it waits for, or which process runs it.
    """

    name: str
    step: int = 0
    accuracy: float | None = None
    seconds: float = 0.0
    steps: int = 0
    note: str = ""


class SuiteFolder:
    """A suite on disk."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.plan_path = self.folder / "plan.json"

    @property
    def plan(self) -> Plan:
        if not self.plan_path.is_file():
            raise ValueError(f"{self.folder} is not a suite: it has no plan.json; start one with: firedistill suite NAME")
        return read_plan(self.plan_path)

    def refuse_other_content(self) -> None:
        """Raise ValueError if the folder is a file or a run directory."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder; name another --output_dir for the suite")
        if (self.folder / "config.yaml").is_file():
            raise ValueError(f"{self.folder} holds a run; name another --output_dir for the suite")

    def widen(self, plan: Plan) -> Plan:
        """Write the plan, or add its runs to the existing one.

        Raises:
            ValueError: the folder is a run directory, holds another suite, is a file, or cannot be made.
        """
        self.refuse_other_content()
        for folder in (self.folder, self.folder / "state", self.folder / "logs"):
            make_folder(folder)
        with FileLock(self.folder / "state" / "plan.lock"):
            if self.plan_path.is_file():
                plan = merge(self.plan, plan, self.folder)
            write_json(self.plan_path, asdict(plan))
        return plan

    def run_folder(self, run: PlannedRun | str) -> Path:
        return self.folder / "runs" / (run if isinstance(run, str) else run.id)

    def log_path(self, run: PlannedRun) -> Path:
        return self.folder / "logs" / f"{run.id}.log"

    def checkpoint(self, run: PlannedRun) -> Path | None:
        """The checkpoint from which the run continues, if it has begun and not ended."""
        folder = self.run_folder(run)
        return newest_checkpoint(folder) if is_run(folder) and not complete(folder, run.max_steps) else None

    def state_path(self, run: PlannedRun, kind: str = "json") -> Path:
        """The run's `json`, `lock` or `trainer.lock`."""
        return self.folder / "state" / f"{run.id}.{kind}"

    def record(self, run: PlannedRun) -> dict[str, Any]:
        """What is stored about the current or last attempt, and `heartbeat`, when it was last touched; empty if it is damaged."""
        path = self.state_path(run)
        try:
            return {"heartbeat": path.stat().st_mtime} | coerced_record(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    def states(self, plan: Plan) -> dict[str, RunState]:
        """The state of every run by its id."""
        states: dict[str, RunState] = {}
        for run in plan.runs:  # warm starts come first
            states[run.id] = self.state(run, states.get(run.needs or ""))
        return states

    def state(self, run: PlannedRun, warm_start: RunState | None = None, managed: bool = False) -> RunState:
        """The state of a run.

        Args:
            warm_start: state of the run that it needs.
            managed: the caller holds the run's lock.
        """
        record, folder = self.record(run), self.run_folder(run)
        recorded, seconds, steps = record.get("state"), record.get("seconds", 0.0), record.get("steps", 0)
        if recorded == "done":
            return RunState("done", run.max_steps, record.get("accuracy"), seconds, steps)
        step, accuracy = last_step(folder), last_accuracy(folder)
        if self.has_trainer(run, record) or (not managed and is_locked(self.state_path(run, "lock"))):
            seconds, steps = time.time() - record.get("since", time.time()), max(step - record.get("from_step", 0), 0)
            note = f"process {record['pid']} on {record['host']}" if record.get("pid") else "starting"
            return RunState("running", step, accuracy, seconds, steps, note)
        if complete(folder, run.max_steps):
            # The suite process was killed before it could record the end. The run's log has the time without evaluations.
            seconds = number((last_row(folder / "metrics.jsonl") or {}).get("cumulative_train_seconds"), 0.0)
            return RunState("done", step, accuracy, seconds, step)
        if recorded == "failed":
            return RunState("failed", step, accuracy, seconds, steps, record.get("error", ""))
        if warm_start is not None and warm_start.name != "done":
            note = f"{run.needs} failed" if warm_start.name == "failed" else f"needs {run.needs}"
            return RunState("waiting", step, accuracy, note=note)
        return RunState("to do", step, accuracy)

    def has_trainer(self, run: PlannedRun, record: Mapping[str, Any]) -> bool:
        """Whether the run's process is alive: it holds its lock, or it is on another host and has a recent heartbeat."""
        if is_locked(self.state_path(run, "trainer.lock")):
            return True  # recorded or not: the suite process may have been killed in between
        recent = time.time() - record.get("heartbeat", 0) < GONE_AFTER
        return record.get("state") == "running" and record["host"] != HOST and recent


def lock(path: Path) -> IO[bytes] | None:
    """Lock a file until it is closed; None if another process holds the lock.

    Raises:
        OSError: the file cannot be written, or its file system does not support locks.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, HELD):
            return None
        raise OSError(f"{path} cannot be locked ({error}); the file system must support flock") from error
    return file


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, HELD)
    return False


def last_step(folder: Path) -> int:
    row = last_row(folder / "metrics.jsonl")
    return row["step"] if row else 0


def last_accuracy(folder: Path) -> float | None:
    measured = None
    for row in iterate_jsonl(folder / "evals.jsonl"):
        if number(row.get("n"), 0) > 0:
            measured = number(row.get("accuracy"), None)
    return measured


def number(value: Any, otherwise: Otherwise) -> float | Otherwise:
    """The value if it is a finite number that a float can hold."""
    is_number = isinstance(value, int | float) and abs(value) < 1e300
    return float(value) if is_number else otherwise


def complete(folder: Path, max_steps: int) -> bool:
    """Whether a run has reached its end, which its process records last of all."""
    step = finished_step(folder)
    return step is not None and step >= max_steps


# ---- Running ---------------------------------------------------------------------------------------------------------------


def run_arguments(suite: SuiteFolder, run: PlannedRun, checkpoint: Path | None) -> list[str]:
    """Arguments of `firedistill` for a run: from its last checkpoint if it has one, from the beginning otherwise.

    Those of a run that has ended neither continue nor replace it.

    Args:
        checkpoint: `suite.checkpoint(run)`.
    """
    folder = suite.run_folder(run)
    settings = dict(run.settings)
    if run.needs is not None:
        settings["initial_adapter"] = str(suite.run_folder(run.needs).resolve() / "adapter")
    arguments = [run.command, run.recipe]
    for name, value in (settings | {"output_dir": str(folder)}).items():
        arguments.append(f"--{name}={json.dumps(value) if isinstance(value, dict | list | bool) else value}")
    if is_run(folder) and not complete(folder, run.max_steps):
        arguments.append("--resume" if checkpoint else "--overwrite")
    return arguments


def run_command(suite: SuiteFolder, run: PlannedRun, checkpoint: Path | None) -> list[str]:
    return [sys.executable, "-P", "-m", "firedistill", *run_arguments(suite, run, checkpoint)]


@dataclass
class Runner:
    """Executes runs of a suite, several at a time, each watched by a thread.

    Args:
        runs: the runs that this process is responsible for, in order.
        slots: environment variables to add, for each of the runs that may be active at the same time.
        retry_failed: run failed runs again, once.
        command: the command of a run; tests replace it.
        on_event: called with one line per event.
        on_poll: called with the states of all runs.
        pause: seconds between polls.

    Attributes:
        tried: ids of the runs that this process has started.
        stops: 1 once the active runs are to stop, 2 once they are to be killed.
        troubles: what has been reported and is not repeated.
    """

    suite: SuiteFolder
    plan: Plan
    runs: Sequence[PlannedRun]
    slots: Sequence[Mapping[str, str]] = ({},)
    retry_failed: bool = False
    command: Callable[[SuiteFolder, PlannedRun, Path | None], list[str]] = run_command
    on_event: Callable[[str], None] = print
    on_poll: Callable[[dict[str, RunState]], None] = lambda states: None
    pause: float = 0.5
    tried: set[str] = field(default_factory=set)
    stops: int = 0
    troubles: set[str] = field(default_factory=set)

    def work(self) -> dict[str, RunState]:
        """Run until this process has nothing left to do; returns the states of all runs.

        A file that cannot be written, on a full disk for instance, stops no run that is active.

        Raises:
            KeyboardInterrupt: on one of `REQUESTS`, after the active runs have stopped; they can be continued.
            OSError: the files of the suite cannot be read or locked, and no run is active.
        """
        free = list(self.slots)
        active: dict[Future[None], Mapping[str, str]] = {}
        with self.counted_signals(), ThreadPoolExecutor(len(self.slots)) as pool:
            try:
                while not self.stops:
                    for attempt in [attempt for attempt in active if attempt.done()]:
                        free.append(active.pop(attempt))
                        attempt.result()  # raises what its thread raised
                    try:
                        states = self.suite.states(self.plan)
                        here = {run.id for run in self.runs if self.is_here(run, states[run.id])}
                        for run in sorted(self.runs, key=lambda run: run.id not in here):  # these have slots already
                            candidate = run.id in here or self.is_open(run, states[run.id])
                            if free and candidate and (held := lock(self.suite.state_path(run, "lock"))):
                                own = self.suite.record(run).get("slot") if run.id in here else None
                                slot = next((each for each in free if each == own), free[0])
                                free.remove(slot)
                                active[pool.submit(self.attempt, run, held, slot)] = slot
                    except OSError as error:
                        if not active:
                            raise
                        self.trouble(f"waiting for the runs that are active, since no other can start: {error}")
                    else:
                        if not active and not self.has_more(states):
                            return states
                        self.on_poll(states)
                    time.sleep(self.pause)
                raise KeyboardInterrupt
            except BaseException:
                self.stops = max(self.stops, 1)
                wait(active, PATIENCE)
                self.stops = 2
                raise

    @contextmanager
    def counted_signals(self) -> Iterator[None]:
        """Set `stops` on `REQUESTS`, except signals that are ignored, as SIGHUP under nohup.

        The runs are killed on Ctrl-C or SIGTERM after one of the two; not on a SIGTERM within a second, since launchers repeat signals.
        """
        received: list[float] = []  # when the signals of `ALWAYS` were

        def count(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            second = bool(received) and number in ALWAYS and (number == signal.SIGINT or now > received[0] + 1.0)
            self.stops = 2 if second else max(self.stops, 1)
            if number in ALWAYS:
                received.append(now)

        numbers = [number for number in REQUESTS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def is_open(self, run: PlannedRun, state: RunState) -> bool:
        """Whether this process should start the run."""
        wanted = state.name == "to do" or (state.name == "failed" and self.retry_failed)
        return wanted and run.id not in self.tried and not self.stops

    def is_here(self, run: PlannedRun, state: RunState) -> bool:
        """Whether a process of this host executes the run. If the run is not locked, the suite process was killed."""
        return state.name == "running" and self.suite.record(run).get("host") == HOST

    def has_more(self, states: Mapping[str, RunState]) -> bool:
        """Whether a run is open, or waits for a warm start that another process runs."""
        needed = [run.needs for run in self.runs if run.needs and states[run.id].name == "waiting"]
        return any(self.is_open(run, states[run.id]) for run in self.runs) or any(
            states[name].name == "running" for name in needed
        )

    def attempt(self, run: PlannedRun, held: IO[bytes], environment: Mapping[str, str]) -> None:
        """Start a run, or find one that lost its suite process, and record how it ends; `held` is the run's lock."""
        path = self.suite.state_path(run, "trainer.lock")
        try:
            with held:
                # Another process may have had the run until it was locked.
                state = self.suite.state(run, managed=True)
                if self.is_here(run, state):
                    self.on_event(f"{run.id}: still running, {state.note}; waiting for it")
                    record = self.suite.record(run)
                    self.watch(run, record.get("pid"), lambda: not is_locked(path))
                    event = self.finish(run, record, None)
                elif self.is_open(run, state) and (trainer_lock := lock(path)):
                    self.tried.add(run.id)
                    with trainer_lock:
                        process, record = self.start(run, trainer_lock, environment)
                        self.watch(run, process.pid, lambda: process.poll() is not None)
                        if process.returncode is not None:  # helper processes that it left behind have the lock, too
                            fcntl.flock(trainer_lock, fcntl.LOCK_UN)
                    event = self.finish(run, record, process.returncode)
                else:
                    return
        except OSError as error:
            self.tried.add(run.id)
            event = f"not started ({error}); the same command tries again"
        self.on_event(f"{run.id}: {event}")

    def store(self, run: PlannedRun, record: Mapping[str, Any]) -> None:
        """Write the run's state. If that fails, the run continues: its lock and its run directory tell where it stands."""
        try:
            write_json(self.suite.state_path(run), record)
        except OSError as error:
            self.trouble(f"{run.id}: its state cannot be written ({error}); the run is not affected")

    def trouble(self, text: str) -> None:
        """Report something once."""
        if text not in self.troubles:
            self.troubles.add(text)
            self.on_event(text)

    def start(
        self, run: PlannedRun, trainer_lock: IO[bytes], environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen, dict[str, Any]]:
        """Start a run's process.

        Raises:
            OSError: it could not be started.
        """
        checkpoint = self.suite.checkpoint(run)
        command = self.command(self.suite, run, checkpoint)
        step = step_of(checkpoint) if checkpoint else 0  # the log may reach further; the run repeats those steps
        record = {
            "state": "running",
            "host": HOST,
            "pid": None,
            "since": time.time(),
            "from_step": step,
            "slot": dict(environment),
        }
        self.store(run, record)  # before there is a process: hosts may share files without locks
        path = self.suite.log_path(run)
        with naming(path), path.open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(f"$ {shlex.join(command)}\n")
        with path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment),
                pass_fds=[trainer_lock.fileno()],
            )
        record["pid"] = process.pid
        self.store(run, record)
        where = "".join(f", {name}={value}" for name, value in environment.items())
        self.on_event(f"{run.id}: {f'continued after step {step}' if checkpoint else 'started'}{where}")
        return process, record

    def watch(self, run: PlannedRun, pid: int | None, ended: Callable[[], bool]) -> None:
        """Wait for the end of a run's process, with heartbeats; pass on the requests to stop it and to kill it, if `pid` is known."""
        heartbeat = time.monotonic()
        for stops, number in ((1, signal.SIGTERM), (2, signal.SIGKILL)):
            while not ended() and self.stops < stops:
                if time.monotonic() - heartbeat > HEARTBEAT:
                    heartbeat = time.monotonic()
                    with suppress(OSError):
                        self.suite.state_path(run).touch()
                time.sleep(self.pause)
            if pid is not None and not ended():
                with suppress(OSError):
                    os.kill(pid, number)

    def finish(self, run: PlannedRun, record: Mapping[str, Any], code: int | None) -> str:
        """Record how an attempt ended, and say it; `code` is the exit code, None if it is unknown."""
        folder = self.suite.run_folder(run)
        step, accuracy = last_step(folder), last_accuracy(folder)
        seconds = max(time.time() - record.get("since", time.time()), 0.0)
        result = {name: record[name] for name in ("host", "since") if name in record} | {
            "exit_code": code,
            "seconds": seconds,
            "steps": max(step - record.get("from_step", 0), 0),
            "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
            "accuracy": accuracy,
        }
        exit_status = "" if code is None else f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        if complete(folder, run.max_steps):
            result["state"] = "done"
            event = f"done in {duration(seconds)}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")
            event += f"; {exit_status} after its end" if code else ""
        elif code is None or code in STOPPED or self.stops:
            result["state"] = "to do"
            event = f"stopped after step {step}; to be continued"
        else:
            error = exit_status
            if code == 0:
                error += f" after step {step} of {run.max_steps}, but the run has not reached its end"
            if line := last_line(self.suite.log_path(run)):
                error += f": {line}"
            result |= {"state": "failed", "error": error}
            event = f"failed, {error} (log: {self.suite.log_path(run)})"
        self.store(run, result)
        return event


def last_line(path: Path) -> str:
    """The last line of a log that is neither empty nor a command, in visible characters."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 2**16, 0))
        lines = file.read().decode("utf-8", "replace").splitlines()
        return next((visible(line.strip()) for line in reversed(lines) if line.strip() and not line.startswith("$ ")), "")
    return ""


# ---- Shares of the runs, and the time left ---------------------------------------------------------------------------------


def share(runs: Sequence[PlannedRun], index: int, of: int) -> list[PlannedRun]:
    """Every `of`-th run from `index` on, with its warm start: the part of one task of a batch array.

    Raises:
        ValueError: the index is out of range.
    """
    if not 0 <= index < of:
        raise ValueError(f"--index is {index} --of {of}; expected 0 to {of - 1}")
    return with_warm_starts([run for run in runs if run.command == "train"][index::of], runs)


def array_part(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Index and size of the SLURM array that this process is part of, or None.

    Raises:
        ValueError: the size of the array is not set.
    """
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    if "SLURM_ARRAY_TASK_COUNT" not in environment:
        raise ValueError("SLURM_ARRAY_TASK_ID is set, but SLURM_ARRAY_TASK_COUNT is not: say --index I --of N")
    index = int(environment["SLURM_ARRAY_TASK_ID"]) - int(environment.get("SLURM_ARRAY_TASK_MIN", 0))
    step = int(environment.get("SLURM_ARRAY_TASK_STEP", 1))
    return index // step, int(environment["SLURM_ARRAY_TASK_COUNT"])


def seconds_left(plan: Plan, states: Mapping[str, RunState]) -> float | None:
    """Estimated seconds until all runs but the failed ones are done; None if no step has been timed.

    A step is assumed to take as long as in runs of the same recipe and method, else of the same recipe, else of any. This includes
    start-up and evaluations. The sum is divided by the number of runs that are running.
    """
    timed = [(run, states[run.id]) for run in plan.runs if states[run.id].steps > 0 and states[run.id].seconds > 0]

    def seconds_per_step(run: PlannedRun) -> float:
        like = [state for other, state in timed if (other.recipe, other.method) == (run.recipe, run.method)]
        like = like or [state for other, state in timed if other.recipe == run.recipe] or [state for _, state in timed]
        return sum(state.seconds for state in like) / sum(state.steps for state in like)

    unfinished = [run for run in plan.runs if states[run.id].name not in ("done", "failed")]
    if unfinished and not timed:
        return None
    total = sum(max(run.max_steps - states[run.id].step, 0) * seconds_per_step(run) for run in unfinished)
    return total / max(sum(states[run.id].name == "running" for run in unfinished), 1)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 05 min`, `3 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def summary(plan: Plan, states: Mapping[str, RunState]) -> str:
    """`3 done, 1 running, 8 to do; about 12 min left`."""
    counts = {name: sum(state.name == name for state in states.values()) for name in STATES}
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    left = seconds_left(plan, states)
    if counts["running"] or counts["to do"] or counts["waiting"]:
        text += f"; about {duration(left)} left" if left is not None else "; time left not known yet"
    return text
