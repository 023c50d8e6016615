"""Shared test set-up."""

from __future__ import annotations

import torch

# The tensors of the tests are tiny: on a busy machine, two threads that wait for each other make a test fifty times slower.
torch.set_num_threads(1)
