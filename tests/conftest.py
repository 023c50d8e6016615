"""Shared test set-up."""

from __future__ import annotations

import gc
import os

import pytest
import torch

# The tensors of the tests are tiny: on a busy machine, two threads spend their time waiting for each other.
torch.set_num_threads(1)

if not torch.cuda.is_available():  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Exempt imported libraries from garbage collection. Each training run starts a full one, which takes longer than the run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def exempt_imports():
    """Exempt what the tests of a module have imported as well, such as the compiler of PyTorch."""
    yield
    pytest_collection_finish()


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
