"""Kill a run repeatedly, resume it each time, and compare the result with a run that is not killed.

    python tests/kill_test.py --method fire --kills 20
    python tests/kill_test.py --method top_d --every           # at every single file operation, one after the other

Kills are SIGKILL, half of them after a random time, half of them at a random file operation (open, rename, remove, make) inside the
run directory: between the files of a checkpoint, between writing and renaming, while old checkpoints are removed. Adapter,
teacher, optimizer, schedule, random state, logs (without times) and rollouts have to be bit-identical. The model is tiny, so a run
takes seconds; verdicts, feedback and dropout draw from the global random state.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from killable import count_file_operations, same_runs, train
from tiny import save_checkpoint

# Children fork from a server that has imported everything, so that an attempt costs its work and no more.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["killable"])
HERE = str(Path(__file__).parent)


@dataclass
class Outcome:
    """Kills that hit, attempts, finished runs, and what differed from the untouched run."""

    kills: int = 0
    attempts: int = 0
    runs: int = 0
    differences: tuple[str, ...] = ()


def attempt(model: str, run: str, method: str, steps: int, kill_at: int | None, operations: str) -> None:
    """One process: train to the end; write the number of its file operations to `operations`."""
    torch.set_num_threads(1)
    Path(run).mkdir(parents=True, exist_ok=True)
    with open(f"{run}.log", "a", encoding="utf-8") as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        counted = count_file_operations(Path(run), kill_at)
        train(model, Path(run), method, steps)
    Path(operations).write_text(str(counted[0]))


def start(*arguments) -> multiprocessing.Process:
    process = PROCESSES.Process(target=attempt, args=arguments)
    process.start()
    return process


def untouched(folder: Path, model: str, method: str, steps: int) -> tuple[float, int]:
    """Make the untouched run; return its seconds and file operations.

    Raises:
        RuntimeError: it failed.
    """
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE, path] if path else [HERE])  # for the server's imports
    warm = PROCESSES.Process(target=int)  # the server imports everything before its first child
    warm.start()
    warm.join()
    if path:
        os.environ["PYTHONPATH"] = path
    else:
        del os.environ["PYTHONPATH"]
    started = time.perf_counter()
    process = start(model, str(folder / "whole"), method, steps, None, str(folder / "operations"))
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"the untouched run failed: {(folder / 'whole.log').read_text()[-2000:]}")
    return time.perf_counter() - started, int((folder / "operations").read_text())


def kill_again_and_again(
    folder: Path, model: str, method: str, steps: int, kills: int, seed: int = 0, every: bool = False, tell=lambda line: None
) -> Outcome:
    """Finish runs under kills until there have been `kills` of them; stop at the first run that differs.

    Args:
        every: kill a new run at file operation 1, 2, 3, ... instead of at random.
    """
    seconds, operations = untouched(folder, model, method, steps)
    tell(f"untouched run: {seconds:.1f} s, {operations} file operations")
    draw, outcome = random.Random(seed), Outcome()
    while outcome.kills < (operations if every else kills):
        run = folder / f"killed{outcome.runs}"
        while True:
            outcome.attempts += 1
            if every:
                due = not run.exists()
                kill_at, delay = (outcome.kills + 1 if due else None), None
            elif outcome.kills >= kills:
                kill_at = delay = None
            elif draw.random() < 0.5:
                kill_at, delay = draw.randint(1, operations), None
            else:
                kill_at, delay = None, draw.uniform(0, seconds)
            process = start(model, str(run), method, steps, kill_at, str(folder / "operations"))
            process.join(delay)
            if process.is_alive():
                process.kill()
                process.join()
            if process.exitcode == 0:
                break
            if process.exitcode != -9:
                outcome.differences = (f"attempt failed: {Path(f'{run}.log').read_text()[-2000:]}",)
                return outcome
            outcome.kills += 1
            where = f"file operation {kill_at}" if kill_at else f"{delay:.2f} s"
            tell(f"kill {outcome.kills} at {where}: " + ", ".join(sorted(path.name for path in run.glob("*checkpoint-*"))))
        outcome.runs += 1
        if differences := same_runs(folder / "whole", run):
            outcome.differences = tuple(differences)
            return outcome
        shutil.rmtree(run)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fire")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="at every file operation, one after the other")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.perf_counter()
        model = save_checkpoint(folder / "base")
        outcome = kill_again_and_again(
            folder, model, options.method, options.steps, options.kills, options.seed, options.every, tell=print
        )
        print(
            f"{options.method}: {outcome.kills} kills in {outcome.attempts} attempts, {outcome.runs} runs finished, "
            f"{time.perf_counter() - started:.0f} s: " + ("; ".join(outcome.differences) or "bit-identical")
        )
    return bool(outcome.differences)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
