"""Shared test set-up."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

# The tensors of the tests are tiny: on a busy machine, two threads spend their time waiting for each other.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Exempt imported libraries from garbage collection. Each training run starts a full one, which takes longer than the run."""
    gc.collect()
    gc.freeze()


# The modules whose tests look at figures, and at the memory estimate, of the commands that they run
DRAWN = {"test_report", "test_report_page", "test_run_log", "test_bench"}
ESTIMATED = {"test_footprint", "test_teachers", "test_bench", "test_devices", "test_preflight"}


@pytest.fixture(autouse=True)
def quick_commands(request):
    """Let commands draw nothing and estimate no memory in the tests of other modules: it takes three quarters of their time."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in DRAWN:
            patch.setattr("matplotlib.figure.Figure.savefig", empty_picture)
        if request.module.__name__ not in ESTIMATED:
            patch.setattr("firedistill.checks.memory_of_step", lambda *arguments: {"model": 1e6, "training": 1e6})
        yield


def empty_picture(figure, path, **options):
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" if Path(path).suffix == ".png" else b"<?xml version='1.0'?>")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """The folder of a tiny model with its tokenizer."""
    from tiny import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="session")
def model(checkpoint) -> str:
    """The same, for modules in which a checkpoint is one of a run."""
    return checkpoint
