"""Kill runs repeatedly, continue them each time, and compare the results with runs that are not killed.

    python tests/kill_test.py --kind fire --kills 20
    python tests/kill_test.py --kind top_d --every             # at every single file operation, one after the other
    python tests/kill_test.py --campaign 1000 --workers 2      # all kinds: methods, warm start, command line, suite, two ranks

Kills are SIGKILL, half of them after a random time, half of them at a random file operation (open, rename, remove, make) inside the
run directory: between the files of a checkpoint, between writing and renaming, while old checkpoints are removed. Of a suite and of
two ranks, the parent, a child or all processes are killed. Adapter, teacher, optimizer, schedule, random state, logs (without times),
rollouts, attributions and the names of all files have to be identical. The model is tiny, so a run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from attempts import KINDS, PROCESSES, differences, make_inputs, members, place_of, quietly, start_server
from killable import on_file_operations

PATIENCE = 120
"""Seconds after which an attempt counts as a hang, and ranks without a launcher as left behind."""

LOCK = threading.Lock()
"""For starting processes and reading their exit status, since multiprocessing reads that of the others when it starts one."""


@dataclass
class Outcome:
    """What became of the runs of one kind.

    Attributes:
        kills: kills that hit a process.
        places: how many of them by what was being written: a path in the run directory without numbers.
        attempts, runs: processes started, and runs finished in them.
        differences: for each run that is not as the untouched one, what differs.
    """

    kind: str
    seed: int
    kills: int = 0
    attempts: int = 0
    runs: int = 0
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.kind:22} {self.kills:5} kills {self.attempts:5} attempts {self.runs:5} runs {len(self.differences):5} differ"
            f"{self.seconds:6.0f} s"
        )


def attempt(kind: str, given: str, run: str, again: bool, kill_at: int | None) -> int:
    """Run to the end, and write the number of file operations to `<run>.operations`."""
    os.setsid()  # this process and its children are a group

    def kill(number: int, path: str) -> None:
        if number == kill_at:
            Path(f"{run}.place").write_text(place_of(path.removeprefix(run)))
            os.kill(os.getpid(), signal.SIGKILL)

    counted = on_file_operations(Path(run), kill)
    status = KINDS[kind](Path(given), Path(run), again)
    Path(f"{run}.operations").write_text(str(counted[0]))
    return status


class Killer:
    """Runs of one kind under kills, compared with an untouched one.

    Args:
        folder: for the runs; created.
        given: the inputs that `make_inputs` wrote.
        tell: called with a line per kill.

    Raises:
        RuntimeError: the untouched run failed.
    """

    def __init__(self, folder: Path, given: Path, kind: str, seed: int = 0, tell: Callable[[str], None] = lambda line: None):
        folder.mkdir()
        self.folder, self.given, self.kind, self.tell = folder, given, kind, tell
        self.draw, self.outcome = random.Random(f"{kind} {seed}"), Outcome(kind, seed)
        self.whole, started = self.prepared("whole"), time.perf_counter()
        process = self.start(self.whole)
        if status := wait(process, PATIENCE):
            raise RuntimeError(f"the untouched run of {kind} ended with status {status}: {end_of_log(self.whole)}")
        if status is None:
            end(members([process.pid]))
            raise RuntimeError(f"the untouched run of {kind} hangs: {end_of_log(self.whole)}")
        self.seconds = time.perf_counter() - started
        self.operations = int(beside(self.whole, "operations").read_text())
        tell(f"{kind}: an untouched run takes {self.seconds:.1f} s and {self.operations} file operations")

    def prepared(self, name: str) -> Path:
        """A run directory before the first attempt: empty, or with another run that is to be replaced."""
        run = self.folder / name
        shutil.copytree(self.given / "other", run) if self.kind == "overwrite" else run.mkdir()
        return run

    def start(self, run: Path, again: bool = False, kill_at: int | None = None):
        with LOCK:
            arguments = (beside(run, "log"), attempt, self.kind, str(self.given), str(run), again, kill_at)
            process = PROCESSES.Process(target=quietly, args=arguments)
            process.start()
        return process

    def kill(self, kills: int, every: bool = False) -> Outcome:
        """Finish runs until there have been `kills` kills; or kill one run at each of its file operations, and finish it."""
        started, outcome = time.perf_counter(), self.outcome
        while outcome.kills < (self.operations if every else kills):
            run = self.prepared(f"killed{outcome.runs}")
            found = self.finish(run, kills, outcome.kills + 1 if every else None) or differences(self.kind, self.whole, run)
            outcome.runs += 1
            if found:
                outcome.differences.append(f"{run}: {'; '.join(found)}")
                self.tell(f"{self.kind}: {outcome.differences[-1]}")
            else:
                shutil.rmtree(run)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def finish(self, run: Path, kills: int, kill_at: int | None) -> list[str]:
        """Attempt a run until it is finished; returns what must not happen.

        Args:
            kill_at: kill the first attempt at this file operation, and no other; None to kill at random.
        """
        outcome, groups, orphans = self.outcome, [], []
        while True:
            operation = delay = None
            if kill_at is not None:
                operation = None if groups else kill_at
            elif outcome.kills < kills and self.draw.random() < 0.5:
                operation = self.draw.randint(1, self.operations)
            elif outcome.kills < kills:
                delay = self.draw.uniform(0, self.seconds)
            outcome.attempts += 1
            process = self.start(run, bool(groups), operation)
            groups.append(process.pid)
            if delay is not None and wait(process, delay) is None:
                processes = members([process.pid])
                end(self.draw.choice([processes, processes[:1], processes[-1:]]))
                beside(run, "place").write_text("after a random time")
            status, hit = wait(process, PATIENCE), self.count_kill(run)
            if status is None:
                end(members(groups))
                return [f"hangs: {end_of_log(run)}"]
            if status == 0:
                end(members(groups))
                return []
            if not hit and not orphans and "is training in" not in end_of_log(run):  # an orphan may have ended since
                return [f"exit status {status}: {end_of_log(run)}"]
            # A suite waits for the runs that another one has left; ranks that have lost their launcher end by themselves.
            orphans = members(groups)
            if self.kind == "ranks" and (not hit or self.draw.random() < 0.5) and not wait_for_the_end(groups):
                end(members(groups))
                return ["ranks outlive their launcher"]

    def count_kill(self, run: Path) -> bool:
        """Whether the last attempt was killed, or a process of it."""
        place = beside(run, "place")
        if not place.exists():
            return False
        self.outcome.kills += 1
        self.outcome.places[place.read_text()] += 1
        left = ", ".join(sorted(str(path.relative_to(run)) for path in run.rglob("*checkpoint-*") if path.is_dir()))
        self.tell(f"{self.kind}: kill {self.outcome.kills} {place.read_text()}: {left}")
        place.unlink()
        return True


def wait(process, seconds: float) -> int | None:
    """The exit status of a process, None if it is alive after that time."""
    deadline = time.monotonic() + seconds
    while True:
        with LOCK:
            status = process.exitcode
        if status is not None or time.monotonic() > deadline:
            return status
        time.sleep(0.005)


def end(processes: Iterable[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_the_end(groups: Iterable[int]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while members(groups):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def beside(run: Path, name: str) -> Path:
    return run.with_name(f"{run.name}.{name}")


def end_of_log(run: Path) -> str:
    return beside(run, "log").read_text(encoding="utf-8", errors="replace")[-1500:]


def campaign(
    kinds: Sequence[str],
    kills: int,
    *,
    steps: int = 4,
    seed: int = 0,
    workers: int = 1,
    every: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Kill runs of several kinds, several kinds at a time. The folder of the runs stays if one of them differs.

    Args:
        kills: for each kind.
        tell: called with a line per kill.
        done: called with the outcome of each kind.
    """
    folder, outcomes, waiting = Path(tempfile.mkdtemp(prefix="kills-")), [], list(kinds)
    start_server()
    given = make_inputs(folder / "given", steps)

    def work() -> None:
        while waiting:
            kind = waiting.pop(0)
            try:
                outcome = Killer(folder / kind, given, kind, seed, tell).kill(kills, every)
            except RuntimeError as error:
                outcome = Outcome(kind, seed, differences=[str(error)])
            outcomes.append(outcome)
            done(outcome)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    if not any(outcome.differences for outcome in outcomes):
        shutil.rmtree(folder)
    return outcomes


def totals(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """The sums by kind, and of all."""
    sums: dict[str, Outcome] = {}
    for outcome in outcomes:
        for name in (outcome.kind, "all"):
            total = sums.setdefault(name, Outcome(name, outcome.seed))
            for part in ("kills", "attempts", "runs", "seconds"):
                setattr(total, part, getattr(total, part) + getattr(outcome, part))
            total.differences += outcome.differences
            total.places.update(outcome.places)
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)}; fire")
    parser.add_argument("--kills", type=int, default=20, help="for each kind")
    parser.add_argument("--campaign", type=int, metavar="KILLS", help="divide this number of kills over all kinds")
    parser.add_argument("--every", action="store_true", help="kill at every file operation, one after the other")
    parser.add_argument("--workers", type=int, default=1, help="number of kinds at the same time")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="append a line of JSON per kind to this file, and print its totals")
    options = parser.parse_args()
    kinds = options.kind or (list(KINDS) if options.campaign else ["fire"])
    kills = math.ceil(options.campaign / len(kinds)) if options.campaign else options.kills

    def done(outcome: Outcome) -> None:
        print("\n  ".join([str(outcome), *outcome.differences]), flush=True)
        if options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(outcome)) + "\n")

    outcomes = campaign(
        kinds,
        kills,
        steps=options.steps,
        seed=options.seed,
        workers=options.workers,
        every=options.every,
        tell=(lambda line: None) if options.campaign else partial(print, flush=True),
        done=done,
    )
    if options.results is not None:
        lines = options.results.read_text(encoding="utf-8").splitlines()
        outcomes = [Outcome(**row | {"places": Counter(row["places"])}) for row in map(json.loads, lines)]
    sums = totals(outcomes)
    print(*sums.values(), *(f"{count:6} {place}" for place, count in sums["all"].places.most_common()), sep="\n")
    return int(bool(sums["all"].differences))


if __name__ == "__main__":
    sys.exit(main())
