"""Two processes on one machine (gloo) against one: the loss is over the prompts of all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firedistill.run_log import read_jsonl
from tiny import save_checkpoint

TESTS = Path(__file__).parent


def launch(kind: str, checkpoint: str, folder: Path, processes: int, batch: int) -> list[dict[str, torch.Tensor]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(TESTS / "distributed_worker.py"), kind, checkpoint, str(folder), str(batch)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs torch.distributed with gloo")
def test_two_ranks_equal_one_process_with_the_same_prompts(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "base")
    (alone,) = launch("warmstart", checkpoint, tmp_path / "one", 1, 4)
    first, second = launch("warmstart", checkpoint, tmp_path / "two", 2, 2)
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-5)
    one, two = (read_jsonl(tmp_path / folder / "metrics.jsonl") for folder in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


@pytest.mark.skipif(not torch.distributed.is_available() or os.name == "nt", reason="needs torch.distributed with gloo")
def test_fire_on_two_ranks_keeps_them_together(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "base")
    first, second = launch("fire", checkpoint, tmp_path / "run", 2, 2)
    for name, value in first.items():
        assert torch.equal(value, second[name])
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["skipped_update"] == 0 for row in rows)
    evaluations = read_jsonl(tmp_path / "run" / "evals.jsonl")
    assert [row["n"] for row in evaluations] == [5] * len(evaluations)
