"""Runs programs that models wrote. They are taken for hostile.

`run_program` starts `sandbox_stage.py` in an interpreter of its own, which isolates itself from the machine, runs the tests there in
one process each, and reports what each returned or raised, as plain data. Expected values stay here: `matches` compares outside of the
reach of the program. docs/code-tasks.md lists what is contained at which level.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

logger = logging.getLogger(__name__)

STAGE = Path(__file__).with_name("sandbox_stage.py")
LEVELS = ("namespaces", "filter", "limits")
LEVEL_VARIABLE = "FIREDISTILL_SANDBOX"
DESCRIPTIONS = {
    "namespaces": "own namespaces (no network, no other processes, a file system with the standard library only), "
    "system-call filter, limits",
    "filter": "system-call filter and Landlock (no network, no files but the standard library, read-only), limits; "
    "no namespaces",
    "limits": "limits of time, memory and processes only: programs can read your files and use the network",
}
MARGIN = 2.0  # seconds that the stage has for starting and for ending its processes


def processors(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """How many processors this process has: those it may run on, at most the quotas of its control groups (`docker run --cpus`)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (groups / ("cpu" if controllers else "") / part for part in (group, *group.parents)):
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)  # version 1 or 2
            with suppress(OSError, ValueError):  # there is no such file, or its quota is "max"
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                if int(quota) > 0:
                    count = min(count, math.ceil(int(quota) / int(period)))
    return count


AT_ONCE = max(1, processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # programs that run at the same time
_slots = threading.BoundedSemaphore(AT_ONCE)


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        cpu_seconds: whole seconds of processor time of each process.
        seconds: wall-clock time of one test.
        total_seconds: wall-clock time after which no further test of a program starts.
        memory_bytes: address space of each process.
        processes: processes and threads.
        file_bytes: the size of a file; at the level "namespaces" of all files of a test together.
        files: open files.
        output_bytes: how much of stdout and stderr is kept.
        result_bytes: the largest result of a test, as JSON.
    """

    cpu_seconds: int = 2
    seconds: float = 3.0
    total_seconds: float = 4.5
    memory_bytes: int = 512 << 20
    processes: int = 16
    file_bytes: int = 16 << 20
    files: int = 64
    output_bytes: int = 4096
    result_bytes: int = 1 << 18


@dataclass(frozen=True)
class Snippet:
    """Python text that runs after a program and sees its names.

    Attributes:
        kind: "eval" returns the value of an expression, "exec" True if the statements raise nothing.
        text: the expression or the statements.
    """

    kind: Literal["eval", "exec"]
    text: str


@dataclass(frozen=True)
class Raised:
    """An exception. All texts are the program's own.

    Attributes:
        type: the name of its class.
        text: its message.
        line: the last line of the program that it passed, from 1; None if unknown.
    """

    type: str
    text: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    Attributes:
        status: "returned", "raised", "time" (over a time limit), "memory", "died" (the process ended without a result), "large" (the
            result is over `Limits.result_bytes`), "unreadable" (it is not of the expected form), or "not run".
        value: what it returned, built of None, truth values, numbers, texts, bytes, lists, tuples, sets and dicts; `Other` in place of
            an object of any other type.
        error: what it raised.
        signal: the signal that ended the process.
        output: the beginning of what it printed.
    """

    status: Literal["returned", "raised", "time", "memory", "died", "large", "unreadable", "not run"]
    value: Any = None
    error: Raised | None = None
    signal: int | None = None
    output: str = ""


@dataclass(frozen=True)
class Other:
    """An object that is not plain data; it equals nothing that a test expects."""

    shown: str


@dataclass(frozen=True)
class Report:
    """What a program did.

    Attributes:
        load: the run of the program alone; its tests run only if it returned.
        outcomes: one per test.
        defined: names of the functions and classes of the program.
        remarks: about its style, with line numbers.
    """

    load: Outcome
    outcomes: tuple[Outcome, ...]
    defined: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def cut_short(self) -> bool:
        """Whether tests could not start within the total time, although none hangs."""
        ran = [outcome for outcome in self.outcomes if outcome.status != "not run"]
        return self.load.status == "returned" and len(ran) < len(self.outcomes) and (not ran or ran[-1].status != "time")


class SandboxError(RuntimeError):
    """The sandbox itself failed, so that nothing is known about the program."""


# ---- Isolation of this machine ----------------------------------------------------------------------------------------------


def sandbox_level() -> str:
    """The strongest level of isolation that works here, tried once; a log line names it.

    The environment variable FIREDISTILL_SANDBOX names another one.

    Raises:
        ValueError: only "limits" works and the variable does not ask for it, or it asks for a level that does not work.
    """
    return _level(os.environ.get(LEVEL_VARIABLE, ""))


@functools.lru_cache(maxsize=8)
def _level(wanted: str) -> str:
    if wanted and wanted not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} is {wanted!r}; expected one of {', '.join(LEVELS)}")
    if os.name != "posix":
        raise ValueError("programs run on Linux, or on other Unix systems at the level limits; this system has no fork")
    reasons, imports_fail = [], False
    for level in (wanted,) if wanted else LEVELS[:2]:
        try:
            program = f"import {', '.join(_importable()['modules'])}"
            load = _run(program, "", (), Limits(cpu_seconds=20, seconds=30, total_seconds=30), level).load
        except SandboxError as error:
            reasons.append(f"{level}: {error}")
            continue
        if load.status != "returned":
            imports_fail |= load.status == "raised"
            how = f"{load.error.type}: {load.error.text}" if load.error else load.status
            reasons.append(f"{level}: a program that imports the standard library failed ({how})")
            continue
        logger.warning("sandbox for programs: %s, %s", level, DESCRIPTIONS[level])
        return level
    advice = "" if wanted else f". {LEVEL_VARIABLE}=limits runs programs with {DESCRIPTIONS['limits']}"
    if imports_fail and os.geteuid() == 0 and (private := _private_folder()):
        advice = f". Programs of root run as another user, who may not enter {private}, where Python is: `chmod o+x {private}`"
        advice += ", or install Python in another folder (with uv: UV_PYTHON_INSTALL_DIR=/opt/python)"
    raise ValueError(f"programs of models cannot be isolated on this machine ({'; '.join(reasons)}){advice}")


def _private_folder() -> Path | None:
    """The outermost folder around the standard library that other users may not enter."""
    folders = reversed(Path(os.__file__).resolve().parents)
    return next((folder for folder in folders if not folder.stat().st_mode & 1), None)


# ---- Running ----------------------------------------------------------------------------------------------------------------


def run_program(program: str, tests: Sequence[Snippet], setup: str = "", limits: Limits | None = None) -> Report:
    """Run a program and its tests in the sandbox; at most as many at a time as there are processors for this one.

    May be called from several threads. The processes of a distributed run on one machine share its processors evenly.

    Args:
        program: Python text, of anyone.
        tests: each runs in a process of its own, in which the program runs first. They cannot influence each other.
        setup: runs before the program, in the same module.

    Raises:
        SandboxError: the sandbox failed.
        ValueError: this machine cannot isolate programs (`sandbox_level`).
    """
    level = sandbox_level()
    with _slots:
        return _run(program, setup, tests, limits or Limits(), level)


def _run(program: str, setup: str, tests: Sequence[Snippet], limits: Limits, level: str) -> Report:
    with tempfile.TemporaryDirectory(prefix="firedistill-sandbox-", ignore_cleanup_errors=True) as scratch:
        job = {
            "level": level,
            "limits": asdict(limits),
            "scratch": scratch,
            "libraries": _importable()["libraries"],
            "setup": setup,
            "program": program.encode("utf-8", "replace").decode("utf-8"),
            "tests": [asdict(test) for test in tests],
        }
        reports = _ask(json.dumps(job).encode(), scratch, limits.total_seconds + limits.seconds + MARGIN)
    results = [_parsed(report["result"]) for report in reports]
    for report, result in zip(reports, results, strict=True):
        if isinstance(error := result.get("error"), dict) and not report["isolated"]:  # the program has not run
            raise SandboxError(f"{error.get('text') or error.get('type')}")
    load, *ran = map(_outcome, reports, results)
    ran += [Outcome("not run")] * (len(tests) - len(ran))
    return Report(load, tuple(ran), _texts(results[0].get("defined")), _texts(results[0].get("remarks")))


@functools.lru_cache(maxsize=1)
def _importable() -> dict[str, list[str]]:
    """What `importable` of sandbox_stage.py finds, outside of any sandbox, and in an interpreter without the packages of this one.

    Raises:
        SandboxError: it finds nothing in time.
    """
    return _ask(b"{}", "/", 120.0)


def _ask(job: bytes, scratch: str, seconds: float) -> Any:
    """The stage's answer to a job.

    Raises:
        SandboxError: it gives none in time.
    """
    # Python itself may need it. A relative folder would be one that others may write to.
    paths = [path for path in re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", "")) if path.startswith("/")]
    environment = {"LC_ALL": "C.UTF-8", "HOME": "/tmp", "PYTHONHASHSEED": "0"}  # sets have the same order in every run
    process = subprocess.Popen(
        [sys.executable, "-s", "-S", "-P", "-B", str(STAGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment | ({"LD_LIBRARY_PATH": ":".join(paths)} if paths else {}),
        cwd=scratch,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(job, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"it took longer than {seconds:g} s") from error
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    try:
        answer = json.loads(output)
    except ValueError as error:
        reason = errors.decode("utf-8", "replace").strip().split("\n")[-1][:500]
        raise SandboxError(reason or f"exit status {process.returncode}, no report") from error
    return answer


# ---- Reading what comes back: everything here may be forged -----------------------------------------------------------------


def _parsed(result: str) -> dict[str, Any]:
    try:
        value = json.loads(result)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _texts(items: Any) -> tuple[str, ...]:
    return tuple(item[:200] for item in items[:20] if isinstance(item, str)) if isinstance(items, list) else ()


def _outcome(report: dict[str, Any], parsed: dict[str, Any]) -> Outcome:
    """How a process ended, from its report and from the result in it, `parsed`."""
    output, ended_by = report["output"], report["signal"]
    if report["late"] or ended_by == getattr(signal, "SIGXCPU", None):
        return Outcome("time", output=output)
    if ended_by is not None:
        return Outcome("died", signal=ended_by, output=output)
    if report["lost"]:
        return Outcome("large", output=output)
    if not report["result"]:
        return Outcome("died", output=output)
    error = parsed.get("error")
    if isinstance(error, dict):
        kind, text, line = error.get("type"), error.get("text"), error.get("line")
        if kind == "MemoryError":
            return Outcome("memory", output=output)
        number = line if isinstance(line, int) and not isinstance(line, bool) and line > 0 else None
        return Outcome("raised", error=Raised(str(kind)[:100], str(text)[:500], number), output=output)
    try:
        return Outcome("returned", decode(parsed["value"]), output=output)
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError, AttributeError):
        return Outcome("unreadable", output=output)


def decode(value: Any) -> Any:
    """The value that `encode` of sandbox_stage.py wrote as JSON.

    Raises:
        KeyError, TypeError, ValueError, ...: it did not write this.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["t"], value["v"]
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item) for item in content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "other":
        return Other(str(content)[:600])
    raise ValueError(kind)


def matches(value: Any, expected: Any, *, lists_for_tuples: bool = False) -> bool:
    """Whether a test returned what it should: equality, and for two numbers of which one is a float a tolerance of 1e-9.

    Args:
        value, expected: plain data.
        lists_for_tuples: accept a tuple where a list is expected, since JSON has no tuples.
    """
    if isinstance(value, float | int) and isinstance(expected, float | int):
        if isinstance(value, float) or isinstance(expected, float):
            with suppress(OverflowError):  # an integer beyond the range of floats
                return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9) or (value != value and expected != expected)
        return value == expected
    if isinstance(expected, list | tuple):
        kinds = (list, tuple) if lists_for_tuples and isinstance(expected, list) else type(expected)
        if not isinstance(value, kinds) or len(value) != len(expected):
            return False
        return all(matches(a, b, lists_for_tuples=lists_for_tuples) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(matches(value[key], item, lists_for_tuples=lists_for_tuples) for key, item in expected.items())
    return type(value) is not Other and bool(value == expected)
