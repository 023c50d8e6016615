"""Rows of measurements: times, work and facts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from firedistill.benchmarks import harness
from firedistill.benchmarks.gpu.sizes import Work
from firedistill.memory import OutOfMemory, is_out_of_memory

DOES_NOT_FIT = "out of memory"


@dataclass(frozen=True)
class Variant:
    """A function to time.

    Attributes:
        work: its floor.
        facts: about it, for the record.
        times: how often to call it in one timed run, where a single call is too short for a clock.
        parts: how often one call does what is timed.
        memory: also measure its peak memory.
    """

    function: Callable[[], Any]
    work: Work | None = None
    facts: Mapping[str, Any] | None = None
    times: int = 1
    parts: int = 1
    memory: bool = False


def timed(case: Mapping[str, Any], variants: Mapping[str, Variant], repeats: int) -> Iterator[harness.Row]:
    """A row per variant: medians over `repeats` runs after one to warm up, in turns; of a variant that does not fit, the error."""
    functions = {}
    for name, variant in variants.items():
        function = partial(repeated, variant.function, variant.times)
        if tried(function)[1]:  # which warms up
            functions[name] = function
        else:
            yield row_of(case, name, details=dict(variant.facts or {}) | {"error": DOES_NOT_FIT})
    for row in harness.rows(case, functions, repeats, warm_up=False) if functions else ():
        variant = variants[row["variant"]]
        for clock in ("seconds", "processor_seconds"):
            row[clock] = {name: value / (variant.times * variant.parts) for name, value in row[clock].items()}
        row |= {"work": variant.work, "details": dict(variant.facts or {})}
        if variant.memory:
            row["peak_mib"] = harness.peak_mib_of(variant.function)
        yield row


def tried(function: Callable[[], Any]) -> tuple[Any, bool]:
    """What a function returns, and whether memory sufficed."""
    try:
        return function(), True
    except Exception as error:
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
            raise
    gc.collect()  # the exception is gone by now, and with it the tensors that its traceback held
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, False


def repeated(function: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        function()


def row_of(case: Mapping[str, Any], variant: str, seconds: Sequence[float] = (), **more: Any) -> harness.Row:
    """A row of values that were measured in another way than by `timed`."""
    times = {"seconds": harness.spread(np.array(seconds))} if len(seconds) else {}
    return {"case": dict(case), "variant": variant, **times, **more}
