"""Shared test set-up."""

from __future__ import annotations

import os

import torch

# The tensors of the tests are tiny: on a busy machine, two threads that wait for each other make a test fifty times slower.
torch.set_num_threads(1)

# Without a GPU, Triton kernels run in Triton's interpreter. Its own functions ask for that when Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
