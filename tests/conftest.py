"""Shared test set-up."""

from __future__ import annotations

import torch

torch.set_num_threads(2)
