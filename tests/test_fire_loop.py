"""The example without a Trainer computes what the Trainer computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from firedistill.cli import main as cli
from firedistill.run.log import read_jsonl

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "fire_loop.py"


def test_the_loop_gives_the_losses_of_the_trainer(tmp_path):
    spec = importlib.util.spec_from_file_location("fire_loop", EXAMPLE)
    fire_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fire_loop)
    options = {"max_steps": 4, "eval_size": 0, "attribution_examples": 0, "output_dir": tmp_path / "run"}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    assert cli.main(["train", "lab", *arguments, "--preflight", "skip"]) == 0
    logged = [row["loss"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    losses = fire_loop.train(4)
    assert len(set(losses)) == 4
    # The same operations on the same numbers; memory addresses may change how a product rounds.
    assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(losses, logged, strict=True)), (losses, logged)


def test_the_loop_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 130
