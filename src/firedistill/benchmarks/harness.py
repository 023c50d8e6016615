"""Measurement and output of benchmarks: times, peak memory, hardware, a table and a figure.

The variants of a case run in one process and take turns, so that other load on the machine affects all of them alike. Ratios compare
runs of the same turn. Of a run on a CPU, use the CPU time: it excludes the time of other processes on a shared machine. Of a run on a
GPU, use the wall time, for which the clock waits until the GPU has finished: the CPU only starts its work.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import hashlib
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import psutil
import torch
import transformers
from rich.table import Table

from firedistill.files import write_text
from firedistill.terminal import quiet_libraries

MIB = 2**20
M_MMAP_THRESHOLD = -3  # malloc.h
NO_GLIBC = (OSError, AttributeError, TypeError)  # what ctypes and /proc raise on other systems

Row = dict[str, Any]
Variants = Mapping[str, Callable[[], Any]]


@dataclass
class Options:
    """Options of the command line.

    Attributes:
        model: hub id or folder for the benchmarks that run a model; None is a random model.
        repeats: timed runs per variant; None is the benchmark's default.
        device: "cpu" or "cuda".
        dtype: "bfloat16" or "float32", the type of the model.
    """

    model: str | None = None
    repeats: int | None = None
    device: str = "cpu"
    dtype: str = "bfloat16"


def rows(
    case: Mapping[str, Any],
    variants: Variants,
    repeats: int,
    *,
    warm_up: bool = True,
    details: Callable[[Any], Mapping[str, Any]] = lambda returned: {},
) -> list[Row]:
    """Times of all variants of one case, in turns. The first variant is the baseline.

    Args:
        case: the values of what varies between the cases of a benchmark.
        variants: functions to time.
        repeats: timed runs of each variant.
        warm_up: also run each variant once before, untimed.
        details: facts about a run, from what its function returned.

    Returns:
        A row per variant: `case`, `variant`, `seconds` and `processor_seconds` of a run (`median`, `min`, `max`), `relative` and
        `relative_processor` (the median over the turns of its time over the baseline's), `repeats`, `details` of the last run.
    """
    found: dict[str, Mapping[str, Any]] = {}
    times = np.zeros((2, len(variants), repeats))  # wall clock and CPU
    for turn in range(-1 if warm_up else 0, repeats):
        for number, (variant, function) in enumerate(variants.items()):
            gc.collect()
            synchronize()
            processor = processor_time()  # outside of the wall time: it looks for all child processes
            start = time.perf_counter()
            returned = function()
            synchronize()
            wall = time.perf_counter() - start
            if turn >= 0:
                times[:, number, turn] = wall, processor_time() - processor
            found[variant] = dict(details(returned))
    relative = np.median(times / times[:, :1].clip(min=1e-9), axis=-1)
    return [
        {
            "case": dict(case),
            "variant": variant,
            "seconds": spread(times[0, number]),
            "processor_seconds": spread(times[1, number]),
            "relative": float(relative[0, number]),
            "relative_processor": float(relative[1, number]),
            "repeats": repeats,
            "details": found[variant],
        }
        for number, variant in enumerate(variants)
    ]


def processor_time() -> float:
    """Seconds of CPU time of this process and of those that it started, directly or not."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def spread(values: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(values)), "min": float(values.min()), "max": float(values.max())}


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def memory_rows(case: Mapping[str, Any], factory: Callable[..., Variants], *arguments: Any) -> list[Row]:
    """A row per variant with its peak memory; see `peak_mib`."""
    peaks = peak_mib(factory, *arguments)
    return [{"case": dict(case), "variant": variant, "peak_mib": peak} for variant, peak in peaks.items()]


def peak_mib(factory: Callable[..., Variants], *arguments: Any) -> dict[str, float | None]:
    """Peak memory in MiB of one run of each variant, beyond what was held before the run; None if it cannot be read.

    GPU memory if the run uses a GPU, otherwise resident memory (Linux only). The variants run one after the other in a new process,
    where no earlier work has left memory to reuse.

    Args:
        factory: a function at module level, which the new process imports; `factory(*arguments)` returns the variants.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peaks_mib, torch.get_num_threads(), factory, arguments).result()


def _peaks_mib(threads: int, factory: Callable[..., Variants], arguments: tuple) -> dict[str, float | None]:
    torch.set_num_threads(threads)
    quiet_libraries()
    with suppress(*NO_GLIBC):  # return freed blocks above 1 MiB to the system, so that resident memory is memory in use
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    return {variant: peak_mib_of(function) for variant, function in factory(*arguments).items()}


def peak_mib_of(function: Callable[[], Any]) -> float | None:
    """As `peak_mib`, for one function in this process, where earlier work may have left resident memory to reuse."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - held) / MIB
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed earlier would hide a part of the peak
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        resident = _status_mib("VmRSS")
    except NO_GLIBC:
        return None
    function()
    return _status_mib("VmHWM") - resident


def _status_mib(field: str) -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 1024  # kB


def hardware() -> dict[str, Any]:
    """The machine without its name, and its load at the time."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:(.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return {
        "processor": name[1].strip() if name else platform.processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "gpu": gpu() if torch.cuda.is_available() else None,
        "load_average": [round(load, 1) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "revision": revision(),
    }


def gpu() -> dict[str, Any]:
    """The present GPU: name, memory, what is in use, driver, CUDA."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": total // MIB,
        "free_mib": free // MIB,
        "driver": driver(),
        "cuda": torch.version.cuda,
    }


@cache
def driver() -> str | None:
    """The version of the GPU's driver, if `nvidia-smi` tells it."""
    if (program := shutil.which("nvidia-smi")) is not None:
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            return next(iter(subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()), None)
    return None


@cache
def revision() -> dict[str, str | None]:
    """The commit of a checkout, with `+` if files of it have changes, and a hash of the package's source."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    commit = None
    if (program := shutil.which("git")) is not None:
        with suppress(OSError, subprocess.SubprocessError):
            # A package that is installed inside another project's checkout is not tracked there.
            asked = (["ls-files", "__init__.py"], ["describe", "--always", "--dirty=+", "--exclude=*"])
            options: dict[str, Any] = {"cwd": package, "capture_output": True, "text": True, "timeout": 20}
            tracked, described = (subprocess.run([program, *words], **options).stdout.strip() for words in asked)
            commit = described if tracked else None
    return {"commit": commit or None, "source": total.hexdigest()[:12]}


def result(name: str, title: str, sizes: Any, options: Options, found: Iterable[Row], machine: Mapping[str, Any]) -> Row:
    """The content of the JSON file. Only the last part of a model's path is kept."""
    return {
        "benchmark": name,
        "title": title,
        "hardware": dict(machine),
        "options": dataclasses.asdict(options) | {"model": Path(options.model).name if options.model else "random"},
        "sizes": dataclasses.asdict(sizes),
        "rows": list(found),
    }


def write(result: Row, folder: Path) -> Path:
    """Write `NAME.json`, which is complete at any time; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}.json"
    write_text(path, json.dumps(result, indent=2) + "\n")
    return path


def merged(found: Iterable[Row]) -> list[Row]:
    """One row per case and variant: times and memory are measured separately."""
    together: dict[tuple[str, str], Row] = {}
    for row in found:
        together.setdefault((case_name(row["case"]), row["variant"]), {}).update(row)
    return list(together.values())


def case_name(case: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in case.items())


def table(result: Row) -> Table:
    """Times and memory, a line per case and variant, and the numbers under `shown` of a row."""
    shown = Table(title=result["title"])
    for column in ("case", "variant"):
        shown.add_column(column, overflow="fold")
    for column in ("seconds", "from", "to", "processor", "relative", "of processor", "peak MiB"):
        shown.add_column(column, justify="right")
    rows = merged(result["rows"])
    further = list(dict.fromkeys(name for row in rows for name in row.get("shown", {})))
    for column in further:
        shown.add_column(column, justify="right")
    for row in rows:
        cells = ["-"] * 6
        if wall := row.get("seconds"):
            times = (wall["median"], wall["min"], wall["max"], row["processor_seconds"]["median"])
            cells = [f"{n:.3g}" for n in times] + [f"{row['relative']:.2f}", f"{row['relative_processor']:.2f}"]
        peak = row.get("peak_mib")
        numbers = [f"{row['shown'][name]:.3g}" if name in row.get("shown", {}) else "-" for name in further]
        shown.add_row(case_name(row["case"]), row["variant"], *cells, "-" if peak is None else f"{peak:.0f}", *numbers)
    return shown


def plot(result: Row, path: Path, sweeps: Mapping[str, Mapping[str, Any]]) -> Path:
    """Time and memory against the swept quantities, a column for each; bars of the times if there are none.

    The time is that of the CPU, or the wall time of a run on a GPU.

    Args:
        sweeps: the fixed values of the other quantities, by the name of the swept one.
    """
    from matplotlib.figure import Figure  # takes a second to import

    found = merged(result["rows"])
    clock = "processor_seconds" if result["options"]["device"] == "cpu" else "seconds"
    time_label = clock.replace("_", " ")
    seconds = [row.get(clock, {}).get("median", math.nan) for row in found]
    if sweeps:
        figure = Figure(figsize=(max(6.4, 3.7 * len(sweeps)), 5.6), layout="constrained")
        axes = figure.subplots(2, len(sweeps), squeeze=False)
        peaks = [math.nan if row.get("peak_mib") is None else row["peak_mib"] for row in found]
        variants = dict.fromkeys(
            row["variant"] for row in found if row["case"].keys() & sweeps
        )  # one colour each in all panels
        for (name, others), column in zip(sweeps.items(), axes.T, strict=True):
            swept = [number for number, row in enumerate(found) if name in row["case"]]
            swept = [number for number in swept if others.items() <= found[number]["case"].items()]
            swept.sort(key=lambda number: found[number]["case"][name])
            for label, values, axis in zip((time_label, "peak MiB"), (seconds, peaks), column, strict=True):
                for variant in variants:
                    points = [(found[n]["case"][name], values[n]) for n in swept if found[n]["variant"] == variant]
                    axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=variant)
                axis.set(xlabel=name, ylabel=label, ylim=(0, None))
                axis.grid(alpha=0.25)
                axis.tick_params(labelsize=8)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    else:
        figure = Figure(figsize=(8, 0.9 + 0.4 * len(found)), layout="constrained")
        axis = figure.subplots()
        bars = axis.barh([f"{row['variant']} ({case_name(row['case'])})" for row in found], seconds)
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axis.set(xlabel=f"{time_label} (median)", xmargin=0.12)
        axis.invert_yaxis()
    figure.suptitle(result["title"], fontsize=10)
    figure.savefig(path, dpi=120)
    return path
