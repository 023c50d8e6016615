"""Working a plan off: each run a process of its own, its state on disk, so that the suite can be killed and continued at any point.

    runs/lab/
      plan.json          the runs and their settings
      runs/<id>/         run directories, as `firedistill train` leaves them
      logs/<id>.log      what the run printed, attempt after attempt
      state/<id>.json    how the last attempt ended
      state/<id>.lock    who is at it: process, host, process of the run

A run is taken by writing its lock while `state/taking.lock` is held, which the operating system frees when a process dies. A lock
whose processes are gone is stale, and the run is taken over.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from firedistill.run.checkpoints import newest_checkpoint, step_of
from firedistill.run.log import read_jsonl
from firedistill.suites.plan import Plan, PlannedRun, merge, read_plan, write_json, write_plan

# Seconds between signs of life in a lock, and without one after which a process on another host counts as gone.
SIGN_OF_LIFE, GONE_AFTER = 10, 600
# How a run ends that was asked to: killed by SIGINT or SIGTERM, or on its own after one of them.
STOPPED = {-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM}


@dataclass
class RunState:
    """Where a run stands.

    Attributes:
        name: "done", "running", "failed", "waiting" (for its warm start), or "to do".
        step: the last step in its log.
        accuracy: of the last evaluation, NaN if there is none.
        seconds, steps: wall time of the last attempt and the steps it made; of the running one, so far.
        note: why it failed, who runs it.
    """

    name: str
    step: int = 0
    accuracy: float = math.nan
    seconds: float = 0.0
    steps: int = 0
    note: str = ""


class SuiteFolder:
    """A suite on disk.

    Args:
        folder: where the plan and the runs are.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.plan_path = self.folder / "plan.json"

    @property
    def plan(self) -> Plan:
        if not self.plan_path.is_file():
            raise ValueError(f"{self.folder} holds no suite: it has no plan.json; start one with: firedistill suite NAME")
        return read_plan(self.plan_path)

    def widen(self, plan: Plan) -> Plan:
        """Write the plan, or add its runs to the one that is there.

        Raises:
            ValueError: the folder is a run's, or holds another suite.
        """
        if (self.folder / "config.yaml").is_file():
            raise ValueError(f"{self.folder} holds a run; name another --output_dir for the suite")
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        with self.taking():
            if self.plan_path.is_file():
                plan = merge(self.plan, plan, self.folder)
            write_plan(plan, self.plan_path)
        return plan

    def run_folder(self, run: PlannedRun | str) -> Path:
        return self.folder / "runs" / (run if isinstance(run, str) else run.id)

    def log_path(self, run: PlannedRun) -> Path:
        return self.folder / "logs" / f"{run.id}.log"

    def result_path(self, run: PlannedRun) -> Path:
        return self.folder / "state" / f"{run.id}.json"

    def lock_path(self, run: PlannedRun) -> Path:
        return self.folder / "state" / f"{run.id}.lock"

    def taking(self) -> FileLock:
        return FileLock(self.folder / "state" / "taking.lock")

    # ---- Where runs stand ----------------------------------------------------------------------------------------------------

    def state(self, run: PlannedRun, plan: Plan | None = None) -> RunState:
        """Where a run stands; with the plan, also whether it waits for a warm start."""
        result, holder = read_json(self.result_path(run)), self.holder(run)
        seconds, steps = result.get("seconds", 0.0), result.get("steps", 0)
        if holder is None and result.get("state") == "done":
            return RunState("done", run.max_steps, none_is_nan(result.get("accuracy")), seconds, steps)
        step, accuracy = last_step(self.run_folder(run)), last_accuracy(self.run_folder(run))
        if holder is not None:
            since, start = holder.get("since", time.time()), holder.get("from_step", 0)
            note = f"process {holder.get('child') or holder['pid']} on {holder['host']}"
            return RunState("running", step, accuracy, time.time() - since, max(step - start, 0), note)
        if complete(self.run_folder(run), run.max_steps):
            # Nobody lived to note how long it took; its own log knows, evaluations left out.
            seconds = read_jsonl(self.run_folder(run) / "metrics.jsonl")[-1].get("cumulative_train_seconds", 0.0)
            return RunState("done", step, accuracy, seconds, step)
        if result.get("state") == "failed":
            return RunState("failed", step, accuracy, seconds, steps, result.get("error", ""))
        if plan is not None and run.needs is not None:
            needed = self.state(plan.run(run.needs))
            if needed.name == "failed":
                return RunState("waiting", step, accuracy, note=f"{run.needs} failed")
            if needed.name != "done":
                return RunState("waiting", step, accuracy, note=f"needs {run.needs}")
        return RunState("to do", step, accuracy, seconds, steps)

    def states(self, plan: Plan) -> dict[str, RunState]:
        return {run.id: self.state(run, plan) for run in plan.runs}

    def holder(self, run: PlannedRun) -> dict[str, Any] | None:
        """The lock of a run whose processes are alive, or None."""
        lock = read_json(self.lock_path(run))
        if not lock:
            return None
        if lock["host"] != socket.gethostname():
            try:
                silent = time.time() - self.lock_path(run).stat().st_mtime
            except FileNotFoundError:
                return None
            return lock if silent < GONE_AFTER else None
        alive = is_alive(lock["pid"], lock.get("pid_started")) or is_alive(lock.get("child"), lock.get("child_started"))
        return lock if alive else None

    # ---- Taking runs ---------------------------------------------------------------------------------------------------------

    def take(self, run: PlannedRun, plan: Plan, retry_failed: bool) -> dict[str, Any] | None:
        """Lock a run for this process if it is to be run; its lock, or None.

        The lock names a child if a process of the run is still going whose suite process is gone: wait for it, start none.
        """
        lock = {"pid": os.getpid(), "pid_started": started(os.getpid()), "host": socket.gethostname()}
        with self.taking():
            known = self.holder(run)
            if known is not None:
                if known["host"] != lock["host"] or is_alive(known["pid"], known.get("pid_started")):
                    return None
                lock |= {name: known[name] for name in ("child", "child_started", "since", "from_step") if name in known}
            else:
                state = self.state(run, plan).name
                if not (state == "to do" or (state == "failed" and retry_failed)):
                    return None
            self.write_lock(run, lock)
        return lock

    def write_lock(self, run: PlannedRun, lock: Mapping[str, Any]) -> None:
        write_json(self.lock_path(run), lock)

    def release(self, run: PlannedRun, result: Mapping[str, Any] | None) -> None:
        """Write how the attempt ended (None: it was stopped, and is to be continued), then free the run."""
        with self.taking():
            if result is not None:
                write_json(self.result_path(run), result)
            elif read_json(self.result_path(run)).get("state") == "failed":
                self.result_path(run).unlink()  # a retry that was stopped: to do again
            self.lock_path(run).unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def last_step(folder: Path) -> int:
    rows = read_jsonl(folder / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


def last_accuracy(folder: Path) -> float:
    measured = [row["accuracy"] for row in read_jsonl(folder / "evals.jsonl") if row.get("n")]
    return measured[-1] if measured else math.nan


def none_is_nan(value: float | None) -> float:
    return math.nan if value is None else value


def complete(folder: Path, max_steps: int) -> bool:
    """Whether a run ended although nobody lived to write it down: its adapter is the last thing that it saves."""
    return (folder / "adapter" / "adapter_config.json").is_file() and last_step(folder) >= max_steps


def started(pid: int) -> str | None:
    """When a process started, in ticks since boot, where the system tells: numbers of processes are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def is_alive(pid: int | None, since: str | None) -> bool:
    """Whether the process that had this number then is still going; one that has ended but was not waited for is not."""
    if pid is None:
        return False
    if Path("/proc/self/stat").exists():
        return started(pid) is not None and since in (None, started(pid))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# ---- Running ---------------------------------------------------------------------------------------------------------------


def train_command(suite: SuiteFolder, run: PlannedRun) -> list[str]:
    """The command of a run: from its last checkpoint if it has one, from the beginning otherwise."""
    folder = suite.run_folder(run)
    command = [sys.executable, "-m", "firedistill.cli", run.command, run.recipe]
    settings = dict(run.settings)
    if run.needs is not None:
        settings["initial_adapter"] = str(suite.run_folder(run.needs).resolve() / "adapter")
    for name, value in (settings | {"output_dir": str(folder)}).items():
        command.append(f"--{name}={json.dumps(value) if isinstance(value, dict | list | bool) else value}")
    if (folder / "metrics.jsonl").exists():
        command.append("--resume" if newest_checkpoint(folder) else "--overwrite")
    return command


@dataclass
class Job:
    """An attempt at a run: a process that this one started, or one that an earlier suite process left behind (`child`)."""

    run: PlannedRun
    lock: dict[str, Any]
    process: subprocess.Popen | None = None

    def ended(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        return not is_alive(self.lock["child"], self.lock.get("child_started"))

    def signal(self, number: int) -> None:
        if not self.ended():
            os.kill(self.lock["child"], number)


@dataclass
class Runner:
    """Works off runs of a suite, several at a time.

    Args:
        suite: the suite on disk.
        plan: its plan.
        runs: what this process is to see to, in order.
        slots: one environment (names to values) per run that may go on at the same time.
        retry_failed: run failed runs again, once.
        command: the command of a run; tests put a stub here.
        told: called with one line for everything that happens.
        watch: called about once a second with this runner.
    """

    suite: SuiteFolder
    plan: Plan
    runs: Sequence[PlannedRun]
    slots: Sequence[Mapping[str, str]] = ({},)
    retry_failed: bool = False
    command: Callable[[SuiteFolder, PlannedRun], list[str]] = train_command
    told: Callable[[str], None] = print
    watch: Callable[[Runner], None] = lambda runner: None
    pause: float = 0.5
    jobs: dict[int, Job] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def work(self) -> dict[str, RunState]:
        """Run until nothing is left that this process can do; where the runs stand then.

        Raises:
            KeyboardInterrupt: on Ctrl-C or SIGTERM, after the runs have been stopped; they can be continued.
        """
        with terminated_like_control_c():
            try:
                sign = 0.0
                while True:
                    self.collect()
                    self.fill()
                    if not self.jobs and not self.worth_waiting():
                        break
                    if time.monotonic() - sign > SIGN_OF_LIFE:
                        sign = time.monotonic()
                        for job in self.jobs.values():
                            self.suite.write_lock(job.run, job.lock)
                    self.watch(self)
                    time.sleep(self.pause)
            except BaseException:
                self.stop()
                raise
        return self.suite.states(self.plan)

    def fill(self) -> None:
        """Give every free slot a run."""
        free = [slot for slot in range(len(self.slots)) if slot not in self.jobs]
        for run in self.runs if free else ():
            if run.id in self.tried:
                continue
            lock = self.suite.take(run, self.plan, self.retry_failed)
            if lock is None:
                continue
            slot = free.pop(0)
            self.jobs[slot] = self.start(run, lock, self.slots[slot])
            if not free:
                break

    def start(self, run: PlannedRun, lock: dict[str, Any], environment: Mapping[str, str]) -> Job:
        if lock.get("child") is not None:
            self.told(f"{run.id}: still going from before, process {lock['child']}; waiting for it")
            return Job(run, lock)
        self.tried.add(run.id)
        command = self.command(self.suite, run)
        log = self.suite.log_path(run)
        log.parent.mkdir(parents=True, exist_ok=True)
        where = "".join(f", {name}={value}" for name, value in environment.items())
        checkpoint = newest_checkpoint(self.suite.run_folder(run)) if "--resume" in command else None
        step = step_of(checkpoint) if checkpoint else 0  # the log may reach further: what came after is made again
        with log.open("a", encoding="utf-8") as out:
            out.write(f"$ {shlex.join(command)}\n")
            out.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment),
            )
        lock |= {"child": process.pid, "child_started": started(process.pid), "since": time.time(), "from_step": step}
        self.suite.write_lock(run, lock)
        self.told(f"{run.id}: {f'continued after step {step}' if checkpoint else 'started'}{where}")
        return Job(run, lock, process)

    def collect(self) -> None:
        """See to the runs that have ended."""
        for slot, job in list(self.jobs.items()):
            if not job.ended():
                continue
            del self.jobs[slot]
            run, folder = job.run, self.suite.run_folder(job.run)
            seconds, steps = time.time() - job.lock["since"], last_step(folder) - job.lock.get("from_step", 0)
            accuracy = last_accuracy(folder)
            took = {"seconds": seconds, "steps": max(steps, 0), "ended": time.strftime("%Y-%m-%d %H:%M:%S")}
            took["accuracy"] = None if math.isnan(accuracy) else accuracy
            code = job.process.returncode if job.process is not None else None
            if code == 0 or (code is None and complete(folder, run.max_steps)):
                self.suite.release(run, {"state": "done", "exit_code": code} | took)
                self.told(
                    f"{run.id}: done in {duration(seconds)}" + (f", accuracy {accuracy:.1%}" if accuracy == accuracy else "")
                )
            elif code is None:  # left behind, and ended before its time: continue it
                self.suite.release(run, None)
            elif code in STOPPED:
                self.suite.release(run, None)
                self.told(f"{run.id}: stopped by a signal after step {last_step(folder)}; the next call continues it")
            else:
                error = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
                if said := last_line(self.suite.log_path(run)):
                    error += f": {said}"
                self.suite.release(run, {"state": "failed", "exit_code": code, "error": error} | took)
                self.told(f"{run.id}: failed, {error} (log: {self.suite.log_path(run)})")

    def stop(self, patience: float = 60) -> None:
        """Ask the runs that go on to end, kill those that do not (or all of them on a second Ctrl-C), and free them."""
        for job in self.jobs.values():
            job.signal(signal.SIGTERM)
        try:
            deadline = time.monotonic() + patience
            while not all(job.ended() for job in self.jobs.values()) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for job in self.jobs.values():
                job.signal(signal.SIGKILL)
                self.suite.release(job.run, None)
            self.jobs.clear()

    def worth_waiting(self) -> bool:
        """Whether a warm start that others are at keeps runs of this process waiting."""
        for run in self.runs:
            if run.needs is None or run.id in self.tried:
                continue
            if self.suite.state(run, self.plan).name == "waiting":
                needed = self.plan.run(run.needs)
                if self.suite.state(needed).name == "running":
                    return True
        return False


@contextmanager
def terminated_like_control_c():
    """SIGTERM, as batch systems send it, and the end of a terminal stop like Ctrl-C; in the main thread, the one that gets signals."""

    def stop(number, frame):
        raise KeyboardInterrupt

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, stop)
    except ValueError:
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("$ ")), "")


# ---- Sharing the work, and how long it takes -------------------------------------------------------------------------------


def share(runs: Sequence[PlannedRun], index: int, of: int) -> list[PlannedRun]:
    """Every of-th run, from the index-th on: the part of one process of a batch array. Warm starts belong to all of them.

    Raises:
        ValueError: there is no such part.
    """
    if not 0 <= index < of:
        raise ValueError(f"--index is {index} --of {of}; expected 0 to {of - 1}")
    mine = [run for run in runs if run.command == "train"][index::of]
    needed = {run.needs for run in mine}
    return [run for run in runs if run.id in needed or run in mine]


def array_part(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Index and size of the SLURM array that this process is part of, or None.

    Raises:
        ValueError: a part of an array whose size is not told.
    """
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    if "SLURM_ARRAY_TASK_COUNT" not in environment:
        raise ValueError("SLURM_ARRAY_TASK_ID is set, SLURM_ARRAY_TASK_COUNT is not: say --index I --of N")
    index = int(environment["SLURM_ARRAY_TASK_ID"]) - int(environment.get("SLURM_ARRAY_TASK_MIN", 0))
    step = int(environment.get("SLURM_ARRAY_TASK_STEP", 1))
    return index // step, int(environment["SLURM_ARRAY_TASK_COUNT"])


def seconds_left(plan: Plan, states: Mapping[str, RunState]) -> float | None:
    """An estimate for the runs that are not done, failed ones left out: their steps times what a step has taken so far.

    A step costs what it cost in runs of the same recipe and method; else of the same recipe; else in any. It includes evaluations and
    the start of the program. Divided by the number of runs that go on now. None before anything has been measured.
    """
    spent: dict[tuple, list[float]] = {}
    for run in plan.runs:
        state = states[run.id]
        if state.steps > 0 and state.seconds > 0:
            for key in ((run.recipe, run.method), (run.recipe,), ()):
                seconds, steps = spent.get(key, (0.0, 0))
                spent[key] = [seconds + state.seconds, steps + state.steps]
    total, running = 0.0, 0
    for run in plan.runs:
        state = states[run.id]
        if state.name in ("done", "failed"):
            continue
        running += state.name == "running"
        known = next((spent[key] for key in ((run.recipe, run.method), (run.recipe,), ()) if key in spent), None)
        if known is None:
            return None
        total += max(run.max_steps - state.step, 0) * known[0] / known[1]
    return total / max(running, 1)


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
    counts = {name: sum(state.name == name for state in states.values()) for name in ORDER}
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    left = seconds_left(plan, states)
    if counts["running"] or counts["to do"] or counts["waiting"]:
        text += f"; about {duration(left)} left" if left is not None else "; time left not known yet"
    return text


ORDER = ["done", "running", "failed", "waiting", "to do"]
