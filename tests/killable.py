"""A run of a tiny model that can be killed anywhere, and the comparison of two run directories."""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.run.log import read_jsonl
from tiny import ToyTask, run_config

OF_THE_PROCESS = {"failed_checkpoints", "failed_writes", "failed_tracker_calls"}
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


class RandomTask(ToyTask):
    """Verdicts and feedback draw from every global random generator, so that resuming has to restore all of them."""

    def verify(self, example, response):
        right = (len(response) + int(random.random() < 0.3) + int(numpy.random.rand() < 0.3)) % 2 == 0
        return super().verify(example, response if right == (len(response) % 2 == 0) else response + ".")

    def feedback(self, example, response, verdict):
        outcome, hint = super().feedback(example, response, verdict)
        return outcome, type(hint)("hint", hint.text + "?" * int(torch.randint(3, ()).item()))


def killable_config(model: str, run: Path, method: str, steps: int = 6, **changes) -> SelfDistillConfig:
    """Checkpoints after every second step, evaluations after every third; dropout draws from the global random state."""
    settings = {"task": "killable:RandomTask", "method": method, "max_steps": steps, "lora_r": 4, "lora_dropout": 0.1}
    settings |= {"eval_size": 3, "eval_steps": 3, "per_device_train_batch_size": 2}
    return run_config(model, run, **settings | changes)


def train(model: str, run: Path, method: str, steps: int = 6, **changes) -> SelfDistillTrainer:
    """Train to the end, resuming what is in the run directory."""
    trainer = SelfDistillTrainer(args=killable_config(model, run, method, steps, **changes), task=RandomTask())
    trainer.train()
    return trainer


def on_file_operations(folder: Path, act: Callable[[int, str], None]) -> memoryview:
    """From now on, call `act` with number and path of each file operation (open, rename, remove, make) inside `folder`.

    Returns:
        The number of operations so far, as one element; those of processes that this one forks count as well.
    """
    counted, inside = memoryview(mmap.mmap(-1, 8)).cast("q"), str(folder.resolve())

    def hook(event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and isinstance(arguments[0], str | os.PathLike):
            path = str(arguments[0])
            if path == inside or path.startswith(inside + os.sep):
                counted[0] += 1
                act(counted[0], path)

    sys.addaudithook(hook)
    return counted


def same_runs(first: Path, second: Path) -> list[str]:
    """What differs between two finished run directories, except for times and counters of failures around the run."""
    found = []
    for name in ("metrics.jsonl", "evals.jsonl"):
        rows = [[without_times(row) for row in read_jsonl(run / name)] for run in (first, second)]
        if json.dumps(rows[0]) != json.dumps(rows[1]):
            found.append(f"{name}: {[(a, b) for a, b in zip(*rows, strict=False) if json.dumps(a) != json.dumps(b)][:1]}")
    names = [{path.name for path in run.glob("checkpoint-*")} for run in (first, second)]
    if names[0] != names[1]:
        found.append(f"checkpoints {names}")
    for folder in (*sorted(names[0] & names[1]), "adapter"):
        for path in sorted((first / folder).glob("*.safetensors")):
            a, b = load_file(path), load_file(second / folder / path.name)
            if a.keys() != b.keys() or any(a[key].numpy().tobytes() != b[key].numpy().tobytes() for key in a):
                found.append(f"{folder}/{path.name}")
    rollouts = [{path.name: pq.read_table(path).to_pylist() for path in run.glob("rollouts/*")} for run in (first, second)]
    if rollouts[0] != rollouts[1]:
        found.append("rollouts")
    return found


def without_times(row: dict) -> dict:
    return {name: value for name, value in row.items() if "seconds" not in name and name not in OF_THE_PROCESS}
