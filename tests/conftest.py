"""Shared test set-up."""

from __future__ import annotations

import os

import torch

# The tensors of the tests are tiny: on a busy machine, two threads spend their time waiting for each other.
torch.set_num_threads(1)

# Without a GPU, Triton kernels run in Triton's interpreter. Its own functions ask for that when Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
