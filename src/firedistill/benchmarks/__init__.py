"""What the package costs, measured: each claim with both sides in one process, behind `firedistill bench` and `benchmarks/*.py`."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

# A benchmark is a module with TITLE (one line), SIZES ({"full": ..., "quick": ...}), `sweeps(sizes)` (see `harness.plot`) and
# `run(sizes, options)`, which yields the rows of its table; see `harness.rows`. NEEDS is a package that it compares with.
BENCHMARKS = {
    "fire_head": "firedistill.benchmarks.fire_head",
    "teacher_views": "firedistill.benchmarks.teacher_views",
    "step": "firedistill.benchmarks.step",
    "fields": "firedistill.benchmarks.fields",
    "rollouts": "firedistill.benchmarks.rollouts",
    "sdpo": "firedistill.benchmarks.sdpo",
}


def missing_package(benchmark: ModuleType) -> str | None:
    """The package that a benchmark compares with, if it is not installed."""
    needed = getattr(benchmark, "NEEDS", None)
    return needed if needed and importlib.util.find_spec(needed) is None else None


def load_benchmark(name: str) -> ModuleType:
    """
    Raises:
        ValueError: no such benchmark.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known are {', '.join(BENCHMARKS)}")
    return importlib.import_module(BENCHMARKS[name])
