"""Benchmarks: what each part of a training step costs, next to a naive implementation of the same part.

A benchmark is a module with

- `TITLE`, one line, and `SIZES`, its sizes under the keys `full` and `quick`;
- `run(sizes, options)`, which yields the rows of its table (see `harness.rows`);
- optionally `sweeps(sizes)`, which quantities its figure varies (see `harness.plot`), and `NEEDS`, a package that it compares with.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

BENCHMARKS = ("fire_head", "attention", "teacher_views", "step", "fields", "rollouts", "sdpo", "sampled_step", "long_answers")


def missing_package(benchmark: ModuleType) -> str | None:
    """The package that a benchmark compares with, if it is not installed."""
    needed = getattr(benchmark, "NEEDS", None)
    return needed if needed and importlib.util.find_spec(needed) is None else None


def load_benchmark(name: str) -> ModuleType:
    """The module of a benchmark.

    Raises:
        ValueError: no benchmark has this name.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known are {', '.join(BENCHMARKS)}")
    return importlib.import_module(f"{__name__}.{name}")
