"""Shared test set-up."""

from __future__ import annotations

import torch

# The tensors of the tests are tiny: on a busy machine, two threads spend their time waiting for each other.
torch.set_num_threads(1)
