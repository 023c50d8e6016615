"""Let every file operation of a command fail once, and see what becomes of it.

    python tests/fault_test.py --kind train --errno ENOSPC
    python tests/fault_test.py --kind resume --errno EIO --places      # one operation for each place in the program
    python tests/fault_test.py --kind suite --errno short --every 10   # writes write half of their bytes
    python tests/fault_test.py --kind train:ENOSPC:24 resume:EIO:60    # several kinds, with an error and --every of their own

A library (`fault_io.c`, compiled with gcc) counts the file operations below a folder with inputs and outputs, and lets one of them
fail. Two outcomes are allowed: the command ends with status 0 and the result of an untouched one; or it ends with one line that names
the file, no traceback, and the same command without a fault then ends with that result. Rollouts and checkpoints may be missing if
the log says that they could not be written. Of a suite, only the operations of its own code are tried: its runs are those of other
kinds. A kind without a single fault has failed.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attempts import (
    KINDS,
    PROCESSES,
    differences,
    in_a_process,
    make_inputs,
    members,
    place_of,
    quietly,
    start_server,
)
from firedistill.cli import main as cli
from firedistill.files import UNFINISHED

ERRORS = ["ENOSPC", "EDQUOT", "EIO", "EACCES", "short"]

PATIENCE = 90
"""Seconds after which a command counts as a hang."""

LOST = re.compile(r"(\S+: )?(rollouts$|checkpoints \[|only one run has (rollouts|checkpoint-|attribution/|curves\.png))")
"""Differences that are allowed where the log says that something could not be written."""

DATE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?")


# ---- Commands ----------------------------------------------------------------------------------------------------------------


def no_preparation(work: Path) -> None:
    """Start without a run."""


def finished_run(work: Path) -> None:
    in_a_process(quietly, work.parent / "template.log", KINDS["command"], work / "given", work / "run", False)


def interrupted_run(work: Path) -> None:
    """A run that was killed before its last checkpoint."""
    finished_run(work)
    for name in ("checkpoint-3", "adapter"):
        shutil.rmtree(work / "run" / name)
    for name in ("README.md", "curves.png", "attribution/step_000003.json"):
        (work / "run" / name).unlink()


def another_run(work: Path) -> None:
    shutil.copytree(work / "given" / "other", work / "run")


def run_and_suite(work: Path) -> None:
    finished_run(work)
    in_a_process(quietly, work.parent / "template.log", KINDS["suite"], work / "given", work / "suite", False)


def attempted(kind: str, work: Path) -> int:
    return KINDS[kind](work / "given", work / "run", False)


COMMANDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], int]]] = {
    "train": (no_preparation, partial(attempted, "command")),
    "warmstart": (no_preparation, partial(attempted, "warmstart")),
    "resume": (interrupted_run, partial(attempted, "command")),
    "overwrite": (another_run, partial(attempted, "overwrite")),
    "suite": (no_preparation, partial(attempted, "suite")),
    "report": (
        run_and_suite,
        lambda work: cli.main(["report", str(work / "run"), str(work / "suite"), "-o", str(work / "report")]),
    ),
    "inspect": (finished_run, lambda work: cli.main(["inspect", str(work / "run"), "--save", "--count", "2"])),
    "eval": (finished_run, lambda work: cli.main(["eval", str(work / "run")])),
}
"""What is there before, and the command."""


@dataclass(frozen=True)
class Place:
    """A file operation: its number, its function, the file, and the lines of firedistill that led to it."""

    number: int
    function: str
    path: str
    lines: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, str, tuple[str, ...]]:
        return self.function, place_of(self.path), self.lines

    @property
    def is_of_a_suite(self) -> bool:
        """Whether the innermost command that led to it is `suite`, from whose process its runs fork."""
        commands = (line for line in self.lines if line.startswith(("suites/", "cli/suite.py", "cli/main.py")))
        return not next(commands, "cli/main.py").startswith("cli/main.py")

    def __str__(self) -> str:
        return f"{self.function} {place_of(self.path)} at {' < '.join(self.lines[:3]) or 'no line of firedistill'}"


def run(kind: str, work: str, number: int | None, error: int, places: str) -> int:
    """The command of a kind, whose operation `number` fails (0: none, but all are written to `places`; None: as it is)."""
    os.setsid()
    if number is None:
        return COMMANDS[kind][1](Path(work))

    def tell(count: int, function: bytes, path: bytes) -> None:
        lines, frame = [], sys._getframe()
        while frame := frame.f_back:
            if "/firedistill/" in (name := frame.f_code.co_filename):
                lines.append(f"{name.rpartition('/firedistill/')[2]}:{frame.f_lineno}")
        row = [count, function.decode(), os.fsdecode(path.removeprefix(os.fsencode(work))), lines]
        handle = os.open(places, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, json.dumps(row).encode() + b"\n")
        os.close(handle)

    library = ctypes.CDLL(None)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p)(tell)
    library.fault_begin(os.fsencode(work), ctypes.c_long(number), error, callback)
    try:
        return COMMANDS[kind][1](Path(work))
    finally:
        library.fault_end()


class Faults:
    """One command, again and again.

    Args:
        folder: with the inputs, `given`. The work of all kinds is in the same place below it, whose path the results name.
        error: the errno; 0 for short writes.
    """

    def __init__(self, folder: Path, kind: str, error: int):
        self.kind, self.error = kind, error
        self.work, self.template, self.whole = (folder / name for name in ("work", "template", "whole"))
        self.log, self.places_file = folder / "log", folder / "places"
        for path in (self.work, self.template, self.whole):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "given", self.work / "given")
        COMMANDS[kind][0](self.work)
        self.work.rename(self.template)
        status = self.attempt(0)
        if status != 0:
            raise RuntimeError(f"the untouched command ended with {status}: {self.text()}")
        self.output = self.text()
        self.places = [place for place in self.read_places() if kind != "suite" or place.is_of_a_suite]
        self.work.rename(self.whole)

    def attempt(self, number: int | None) -> int | None:
        """One run of the command, the first one in a new folder; its status, None for a hang."""
        if number is not None:
            shutil.rmtree(self.work, ignore_errors=True)
            shutil.copytree(self.template, self.work)
        for path in (self.log, self.places_file):
            path.unlink(missing_ok=True)
        arguments = (self.log, run, self.kind, str(self.work), number, self.error, str(self.places_file))
        process = PROCESSES.Process(target=quietly, args=arguments)
        process.start()
        process.join(PATIENCE)
        status = process.exitcode
        for pid in members([process.pid]):
            os.kill(pid, signal.SIGKILL)
        process.join()
        return status

    def text(self) -> str:
        """What the processes of a suite have printed, and the command."""
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in [*self.work.glob("run/logs/*"), self.log])

    def read_places(self) -> list[Place]:
        if not self.places_file.exists():
            return []
        rows = map(json.loads, self.places_file.read_text(encoding="utf-8").splitlines())
        return [Place(number, function, path, tuple(lines)) for number, function, path, lines in rows]

    def found(self, said: str) -> list[str]:
        """What differs from the untouched result.

        Args:
            said: the log of the attempts; what it names as lost may be missing.
        """
        if (self.whole / "run").is_dir() and self.kind not in ("report", "inspect", "eval"):
            found = differences(self.kind, self.whole / "run", self.work / "run")
            told = "could not be written" in said or "is missing" in said
            return [text for text in found if not (LOST.match(text) and told)]
        changed = different_files(self.whole, self.work)
        return changed + ["output"] * (self.text() != self.output)

    def judge(self, number: int) -> tuple[Place | None, str]:
        """The operation that failed, and what is wrong with the outcome; an empty text if nothing is."""
        status, said = self.attempt(number), self.text()
        place = next(iter(self.read_places()), None)
        if place is None:
            return None, ""
        if status is None:
            return place, "hangs"
        if "Traceback (most recent call last)" in said:
            return place, f"traceback, status {status}: {last_line(said)}"
        if status == 0:
            found = self.found(said)
            return place, f"status 0, but differs: {found[0][:200]}" if found else ""
        if "firedistill " not in last_line(said) and "failed: " not in said:
            return place, f"status {status} without a word: {last_line(said)}"
        path = Path(place.path.replace(UNFINISHED, ""))  # users know a folder by the name that it gets when it is complete
        if path.name not in said and str(path.parent) not in said:
            return place, f"status {status}, the file is not named: {last_line(said)}"
        again = self.attempt(None)
        if again != 0:
            return place, f"status {again} again without a fault: {last_line(self.text())}"
        found = self.found(said)
        return place, f"differs after the next attempt: {found[0][:200]}" if found else ""


def different_files(first: Path, second: Path) -> list[str]:
    """Files that only one of two folders has, or that differ in more than dates."""
    names = [{path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} for folder in (first, second)]
    content = {
        name: [DATE.sub(b"", (folder / name).read_bytes()) for folder in (first, second)] for name in names[0] & names[1]
    }
    return sorted(map(str, names[0] ^ names[1])) + sorted(str(name) for name, (one, other) in content.items() if one != other)


def last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def chosen(places: Iterable[Place], every: int, once: bool) -> list[int]:
    """The numbers of the operations to try: every `every`-th, and of each place in the program only one if `once`."""
    known, numbers = set(), []
    for place in places:
        if not (once and place.kind in known):
            known.add(place.kind)
            numbers.append(place.number)
    return numbers[::every]


def library(folder: Path) -> Path:
    """Compile the library that lets operations fail."""
    target = folder / "fault_io.so"
    source = Path(__file__).with_name("fault_io.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(target), str(source), "-ldl"], check=True)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "|".join(COMMANDS)
    parser.add_argument("--kind", nargs="+", default=["train"], metavar="KIND[:ERRNO[:EVERY]]", help=f"KIND is {names}; train")
    parser.add_argument("--errno", default="ENOSPC", choices=ERRORS)
    parser.add_argument("--every", type=int, default=1, help="only every Nth operation")
    parser.add_argument("--places", action="store_true", help="one operation for each file and place in the program")
    parser.add_argument("--only", type=int, nargs="+", help="these operations")
    parser.add_argument("--results", type=Path, help="append a line of JSON per kind to this file")
    options = parser.parse_args()
    cases = [(text.split(":") + [options.errno, str(options.every)][text.count(":") :]) for text in options.kind]
    for kind, error, _ in cases:
        if kind not in COMMANDS or error not in ERRORS:
            parser.error(f"{kind}:{error}: expected one of {names}, and one of {', '.join(ERRORS)}")
    folder, failed = Path(tempfile.mkdtemp(prefix="faults-")), False
    start_server(LD_PRELOAD=str(library(folder)))
    make_inputs(folder / "work" / "given", steps=3)
    (folder / "work" / "given").rename(folder / "given")
    for name, (kind, error, every) in zip(options.kind, cases, strict=True):
        started = time.perf_counter()
        faults = Faults(folder, kind, 0 if error == "short" else getattr(errno, error))
        numbers = options.only or chosen(faults.places, int(every), options.places)
        print(f"{kind}, {error}: {len(numbers)} of {len(faults.places)} operations", flush=True)
        tried, findings = 0, defaultdict(list)
        for number in numbers:
            place, wrong = faults.judge(number)
            if place is None:
                continue
            tried += 1
            if wrong:
                findings[place.lines[:1], re.sub(r"\d+|tmp\w+", "N", wrong)].append((place, wrong))
                print(f"  {number}: {place}: {wrong}", flush=True)
        seconds, count = time.perf_counter() - started, sum(map(len, findings.values()))
        failed |= count > 0 or not tried
        print(f"{kind}, {error}: {tried} faults, {count} findings, {seconds:.0f} s", flush=True)
        for found in sorted(findings.values(), key=len, reverse=True):
            place, wrong = found[0]
            operations = Counter(f"{place.function} {place_of(place.path)}" for place, _ in found)
            print(f"{len(found):5}x {wrong}\n       at {' < '.join(place.lines[:3])}: {', '.join(operations)}", flush=True)
        if options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": name, "tried": tried, "findings": count, "seconds": round(seconds, 1)}) + "\n")
    shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
