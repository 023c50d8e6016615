"""What the package costs, measured: each claim with both sides in one process, behind `firedistill bench` and `benchmarks/*.py`."""

from __future__ import annotations

import importlib
from types import ModuleType

# A benchmark is a module with TITLE (one line), SIZES ({"full": ..., "quick": ...}), `sweeps(sizes)` (see `harness.plot`) and
# `run(sizes, options)`, which yields the rows of its table; see `harness.rows`.
BENCHMARKS = {
    "fire_head": "firedistill.benchmarks.fire_head",
    "teacher_views": "firedistill.benchmarks.teacher_views",
    "step": "firedistill.benchmarks.step",
    "fields": "firedistill.benchmarks.fields",
}


def load_benchmark(name: str) -> ModuleType:
    """
    Raises:
        ValueError: no such benchmark.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known are {', '.join(BENCHMARKS)}")
    return importlib.import_module(BENCHMARKS[name])
