"""Measurements in parts, for machines that are lent by the minute.

A child process makes one part after the other. Each part has a JSON file of its own, which is complete at any time: rows are added
as they are measured. A part that fails, hangs or ends its process is recorded with its error and passed over. A part is started only
if the rest of the budget is expected to hold it; the next call with the same folder makes the missing ones.

This module imports no library that takes long, so that a command can start the child first.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firedistill.files import write_text

DONE, SKIPPED, FAILED, INTERRUPTED, RUNNING = ("done", "skipped", "failed", "interrupted", "running")
SETTLED = (DONE, SKIPPED, FAILED)  # what a call leaves alone unless the part is named
SMALLEST_LIMIT = 60.0
LOG = "log.txt"

Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One part of a benchmark.

    Attributes:
        name: of the part and of its file.
        title: what it answers.
        seconds: expected cost, without the start of a process. Three times as long is the limit (at least one
            minute); for a part that is named, it is the rest of the budget.
        alone: it changes the state of its process, so that it gets one of its own.
    """

    name: str
    title: str
    seconds: float
    alone: bool = False


class Skipped(Exception):
    """A part cannot be measured on this machine; the message says why."""


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def read(folder: Path, name: str) -> Record | None:
    """The record of a part; None if there is none.

    Raises:
        ValueError: the file is not a record.
    """
    path = path_of(folder, name)
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): remove it, and the part is measured again") from error
    if not isinstance(record, dict) or not isinstance(record.get("rows"), list) or "state" not in record:
        raise ValueError(f"{path} is not the record of a part: remove it, or use another folder")
    return record


def write(folder: Path, record: Record) -> None:
    write_text(path_of(folder, record["part"]), json.dumps(record, indent=2) + "\n")


# ---- The command's process ---------------------------------------------------------------------------------------------------


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    budget: float,
    measure: Callable[..., Any],
    arguments: tuple,
    names: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> list[Part]:
    """Measure the parts that are missing, in their order, as far as the budget reaches.

    Args:
        parts: all parts, the most valuable per second first.
        folder: for the records, and for what the child process prints (`log.txt`).
        budget: seconds for this call.
        measure: a function at module level, which the child imports; see `measured`.
        arguments: of `measure`, after the name of the part.
        names: measure these parts only, also if they have been measured, and as long as the budget lasts: the usual limit of a part is
            three times what it takes on an H200. A part that the budget interrupts keeps its earlier measurements.
        say: called with one line per part that was started.

    Returns:
        The parts that are still missing, with the seconds that the next call expects of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end, worker, missing = time.monotonic() + budget, Worker(measure, arguments, folder), []
    try:
        for part in parts:
            before = read(folder, part.name)
            if (part.name not in names) if names else (before is not None and before["state"] in SETTLED):
                continue
            left = end - time.monotonic()
            expected = part.seconds
            if before is not None and before["state"] in (INTERRUPTED, DONE):
                expected = max(expected, (1.2 if before["state"] == INTERRUPTED else 1.0) * before["seconds"])
            if expected > left:
                missing.append(replace(part, seconds=expected))
                continue
            if part.alone:
                worker.end()
            limit = left if names else max(SMALLEST_LIMIT, 3 * part.seconds)
            started = time.monotonic()
            write(folder, {"part": part.name, "title": part.title, "state": RUNNING, "rows": []})
            ending = worker.run(part, min(limit, left))
            seconds = time.monotonic() - started
            record = read(folder, part.name)
            assert record is not None  # written above
            if ending is not None:
                cut = ending == TOO_LONG and left <= limit
                error = f"the budget ended after {seconds:.0f} s" if cut else f"{ending} ({seconds:.0f} s); see {LOG}"
                record |= {"state": INTERRUPTED if cut else FAILED, "error": error, "seconds": seconds}
                write(folder, record)
            if record["state"] == INTERRUPTED:
                if before is not None and before["state"] == DONE:
                    write(folder, before)
                missing.append(replace(part, seconds=max(part.seconds, 1.2 * seconds)))
            if part.alone or record["state"] == FAILED:
                worker.end()  # an error of the device stays with its process
            say(f"{part.name}: {summary(record)}")
    finally:
        worker.end()
    return missing


def summary(record: Record) -> str:
    found = f"{len(record['rows'])} measurements in {record.get('seconds', 0):.0f} s"
    return found if record["state"] == DONE else f"{record['state']}: {record['error']} ({len(record['rows'])} measurements)"


TOO_LONG = "it took too long and was ended"


class Worker:
    """The child process, started when a part needs it."""

    def __init__(self, measure: Callable[..., Any], arguments: tuple, folder: Path):
        self.job = measure, arguments, folder
        self.process: Any = None
        self.connection: Any = None
        self.busy = False

    def run(self, part: Part, limit: float) -> str | None:
        """Measure a part; what happened to the process if it did not survive, None otherwise."""
        context = multiprocessing.get_context("spawn")
        if self.process is None:
            self.connection, other = context.Pipe()
            self.process = context.Process(target=serve, args=(other, *self.job))
            self.process.start()
            other.close()
        self.busy = True
        try:
            self.connection.send(part)
            if self.connection.poll(limit):
                self.connection.recv()
                self.busy = False
                return None
            ending = TOO_LONG
        except (EOFError, OSError):
            self.process.join(10)
            ending = f"its process ended with exit code {self.process.exitcode}"
        self.end()
        return ending

    def end(self) -> None:
        """Let the process end, or end it with those that it has started if it is busy."""
        if self.process is None:
            return
        self.connection.close()
        if not self.busy:
            self.process.join(10)
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own
        self.process.kill()
        self.process.join()
        self.process.close()
        self.process = None


# ---- The child process -------------------------------------------------------------------------------------------------------


def serve(connection: Any, measure: Callable[..., Any], arguments: tuple, folder: Path) -> None:
    """Measure the parts that are asked for, until the connection closes."""
    with suppress(OSError):
        os.setsid()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    with suppress(EOFError, OSError):
        while True:
            part = connection.recv()
            print(f"== {part.name}", flush=True)
            measured(part, folder, measure, arguments)
            sys.stdout.flush()
            connection.send(None)


def end_with(parent: int) -> None:
    """End this process and those that it has started when the command's process has been killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpid(), signal.SIGKILL)


def measured(part: Part, folder: Path, measure: Callable[..., Any], arguments: tuple) -> Record:
    """Measure a part in this process and write its record after every row.

    Args:
        measure: called as `measure(part.name, *arguments)`; returns what the record says about the machine and the settings, and an
            iterable of rows. May raise `Skipped`.
    """
    started = time.perf_counter()
    record: Record = {"part": part.name, "title": part.title, "state": RUNNING, "rows": []}
    try:
        facts: Mapping[str, Any]
        found: Iterable[Mapping[str, Any]]
        facts, found = measure(part.name, *arguments)
        record |= facts
        for row in found:
            record["rows"].append(row)
            write(folder, record)
        record["state"] = DONE
    except Skipped as reason:
        record |= {"state": SKIPPED, "error": str(reason)}
    except Exception as error:  # whatever the device or a library raises: the other parts are measured
        traceback.print_exc()
        text = " ".join(str(error).split())
        record |= {"state": FAILED, "error": f"{type(error).__name__}: {text[:500]}"}
    record["seconds"] = time.perf_counter() - started
    write(folder, record)
    return record
