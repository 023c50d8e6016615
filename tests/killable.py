"""A run of a tiny model that can be killed anywhere, and the comparison of two run directories.

    python tests/killable.py MODEL RUN METHOD [STEPS] [KILL_AT]

trains METHOD in RUN, resuming an earlier attempt. With KILL_AT, the process kills itself at that file operation (open, rename,
remove, make) inside the run directory; without it, the process prints the number of these operations.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.run.log import read_jsonl
from tiny import ToyTask

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
    settings = {
        "model": model,
        "task": "killable:RandomTask",
        "method": method,
        "model_dtype": "float32",
        "output_dir": str(run),
        "max_steps": steps,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "nominal_learning_rate": 1e-3,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "max_new_tokens": 9,
        "eval_size": 3,
        "eval_steps": 3,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    return SelfDistillConfig(**{**settings, **changes})


def train(model: str, run: Path, method: str, steps: int = 6, **changes) -> SelfDistillTrainer:
    """Train to the end, resuming what is in the run directory."""
    trainer = SelfDistillTrainer(args=killable_config(model, run, method, steps, **changes), task=RandomTask())
    trainer.train()
    return trainer


def count_file_operations(run: Path, kill_at: int | None = None) -> list[int]:
    """Count this process's file operations inside `run` from now on; SIGKILL at one of them."""
    counted, inside = [0], str(run.resolve())

    def hook(event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).startswith(inside):
            counted[0] += 1
            if counted[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return counted


def same_runs(first: Path, second: Path) -> list[str]:
    """What differs between two finished run directories, except for times."""
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
    return {name: value for name, value in row.items() if "seconds" not in name}


def main(model: str, run: str, method: str, steps: str = "6", kill_at: str = "0") -> None:
    torch.set_num_threads(1)
    Path(run).mkdir(parents=True, exist_ok=True)
    counted = count_file_operations(Path(run), int(kill_at) or None)
    train(model, Path(run), method, int(steps))
    print(counted[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
