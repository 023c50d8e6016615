"""How benchmarks measure, and what they leave: times of variants that take turns, peak memory, the hardware, a table, a picture.

All variants of a case are timed in one process and in turn, so that whatever else the machine does hits all of them alike, and
compared within each turn. On a shared machine the processor time is the robust number: what other processes take is not in it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

MIB = 2**20
M_MMAP_THRESHOLD = -3  # of malloc.h

Row = dict[str, Any]


@dataclass
class Options:
    """What a user chooses.

    Attributes:
        model: hub id or folder for the benchmarks that run a model; None is a random one.
        repeats: timed runs per variant; None is the benchmark's own number.
        device: "cpu" or "cuda".
    """

    model: str | None = None
    repeats: int | None = None
    device: str = "cpu"


def rows(
    case: Mapping[str, Any],
    variants: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    warm_up: bool = True,
    details: Callable[[str], Mapping[str, Any]] = lambda variant: {},
) -> list[Row]:
    """Times of all variants of one case, in turn; the first variant is the one that the others are compared with.

    Args:
        case: what is varied between the cases of a benchmark, with its value.
        variants: functions without arguments that do all of the work.
        repeats: timed runs of each.
        warm_up: run each once before, untimed.
        details: further facts about a variant, asked for after its last run.

    Returns:
        A row per variant: `case`, `variant`, `seconds` and `processor_seconds` of a run (`median`, `min`, `max`), `relative` and
        `relative_processor` (the median over the turns of its time over the first variant's), `repeats`, `details`.
    """
    wall: dict[str, list[float]] = {variant: [] for variant in variants}
    processor: dict[str, list[float]] = {variant: [] for variant in variants}
    found: dict[str, dict[str, Any]] = {}
    for repeat in range(-1 if warm_up else 0, repeats):
        for variant, function in variants.items():
            gc.collect()
            synchronise()
            wall_start, processor_start = time.perf_counter(), time.process_time()
            function()
            synchronise()
            if repeat >= 0:
                wall[variant].append(time.perf_counter() - wall_start)
                processor[variant].append(time.process_time() - processor_start)
            found[variant] = dict(details(variant))
    first = next(iter(variants))
    return [
        {
            "case": dict(case),
            "variant": variant,
            "seconds": spread(wall[variant]),
            "processor_seconds": spread(processor[variant]),
            "relative": relative(wall[variant], wall[first]),
            "relative_processor": relative(processor[variant], processor[first]),
            "repeats": repeats,
            "details": found[variant],
        }
        for variant in variants
    ]


def memory_rows(case: Mapping[str, Any], factory: Callable[..., Mapping[str, Callable[[], Any]]], *arguments: Any) -> list[Row]:
    """A row per variant with its peak memory; `factory(*arguments)` prepares the case and makes the functions to measure."""
    peaks = peak_mib(factory, *arguments)
    return [{"case": dict(case), "variant": variant, "peak_mib": peak} for variant, peak in peaks.items()]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def relative(values: list[float], baseline: list[float]) -> float:
    return statistics.median(value / max(base, 1e-9) for value, base in zip(values, baseline, strict=True))


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_mib(factory: Callable[..., Mapping[str, Callable[[], Any]]], *arguments: Any) -> dict[str, float | None]:
    """Peak memory in MiB of one run beyond what was held before it, by variant; None where it cannot be read.

    Of the GPU if the run uses one; else resident memory, which only Linux tells, without what the allocator would keep of freed
    blocks. In a process of its own, where no other work has left memory that could be used again; the variants run there one after
    the other.

    Args:
        factory: a function of a module, which the new process imports; it answers the functions to measure.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peaks_mib, torch.get_num_threads(), factory, arguments).result()


def _peaks_mib(threads: int, factory: Callable[..., Mapping[str, Callable[[], Any]]], arguments: tuple) -> dict:
    from firedistill.cli.main import quiet_libraries

    torch.set_num_threads(threads)
    quiet_libraries()
    with suppress(
        OSError, AttributeError, TypeError
    ):  # where there is no such function, there is no resident memory to read either
        # From the start, blocks above 1 MiB go back when they are freed: what is resident is what is needed.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    return {variant: _peak_mib(function) for variant, function in factory(*arguments).items()}


def _peak_mib(function: Callable[[], Any]) -> float | None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before: float = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide a part of the peak
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status_mib("VmRSS")
    except (OSError, AttributeError, TypeError):
        return None
    function()
    return status_mib("VmHWM") - before


def status_mib(field: str) -> float:
    """A line of the process's status, which is in kB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def hardware() -> dict[str, Any]:
    """The machine as far as it matters, without its name; the load says how busy it was when the measurement began."""
    return {
        "processor": processor_name(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(load, 1) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def result(name: str, title: str, sizes: Any, options: Options, found: Iterable[Row], machine: Mapping[str, Any]) -> Row:
    """What is written as JSON. Of a model only its last name is kept."""
    chosen = dataclasses.asdict(options) | {"model": Path(options.model).name if options.model else "random"}
    return {
        "benchmark": name,
        "title": title,
        "hardware": dict(machine),
        "options": chosen,
        "sizes": dataclasses.asdict(sizes),
        "rows": list(found),
    }


def write(result: Row, folder: Path, sweeps: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """`NAME.json` and `NAME.png` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return [path, plot(result, folder / f"{result['benchmark']}.png", sweeps)]


def table(result: Row) -> Table:
    """Times and memory as a person reads them: a line per case and variant."""
    shown = Table(title=result["title"])
    for column in ("case", "variant"):
        shown.add_column(column, overflow="fold")
    for column in ("seconds", "from", "to", "processor", "relative", "of processor", "peak MiB"):
        shown.add_column(column, justify="right")
    for row in merged(result["rows"]):
        cells = ["-"] * 6
        if "seconds" in row:
            wall = row["seconds"]
            numbers = (wall["median"], wall["min"], wall["max"], row["processor_seconds"]["median"])
            cells = [f"{n:.3g}" for n in numbers] + [f"{row['relative']:.2f}", f"{row['relative_processor']:.2f}"]
        peak = row.get("peak_mib")
        shown.add_row(case_name(row["case"]), row["variant"], *cells, "-" if peak is None else f"{peak:.0f}")
    return shown


def merged(found: Iterable[Row]) -> list[Row]:
    """Rows of the same case and variant as one: times and memory are measured apart."""
    together: dict[tuple[str, str], Row] = {}
    for row in found:
        together.setdefault((case_name(row["case"]), row["variant"]), {}).update(row)
    return list(together.values())


def case_name(case: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in case.items())


def plot(result: Row, path: Path, sweeps: Mapping[str, Mapping[str, Any]]) -> Path:
    """Time and memory against what is swept, a column per sweep; bars of the times if nothing is.

    Args:
        sweeps: by the name of the quantity that is varied, the values of the others.
    """
    from matplotlib.figure import Figure  # takes a second to import

    found = merged(result["rows"])
    measures = (("processor seconds", lambda row: row.get("processor_seconds", {}).get("median")), ("peak MiB", peak_of))
    if not sweeps:
        labels = [f"{row['variant']} ({case_name(row['case'])})" if row["case"] else row["variant"] for row in found]
        figure = Figure(figsize=(8, 0.9 + 0.4 * len(found)), layout="constrained")
        axis = figure.subplots()
        values = [row["processor_seconds"]["median"] if "seconds" in row else math.nan for row in found]
        bars = axis.barh(labels[::-1], values[::-1], color="tab:blue")
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axis.set_xlabel("processor seconds (median)", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.12)
    else:
        figure = Figure(figsize=(max(6.4, 3.7 * len(sweeps)), 5.6), layout="constrained")
        axes = figure.subplots(2, len(sweeps), squeeze=False)
        for column, (name, others) in enumerate(sweeps.items()):
            for axis, (label, value_of) in zip(axes[:, column], measures, strict=True):
                lines: dict[str, list[tuple[float, float]]] = {}
                for row in found:
                    case, value = row["case"], value_of(row)
                    if value is not None and name in case and all(case.get(k) == v for k, v in others.items()):
                        lines.setdefault(row["variant"], []).append((case[name], value))
                for number, variant in enumerate(dict.fromkeys(row["variant"] for row in found)):
                    if variant in lines:  # a variant has one colour in all panels
                        axis.plot(*zip(*sorted(lines[variant]), strict=True), marker="o", color=f"C{number}", label=variant)
                axis.set_xlabel(name, fontsize=9)
                axis.set_ylabel(label, fontsize=9)
                axis.set_ylim(bottom=0)
                axis.grid(alpha=0.25)
                axis.tick_params(labelsize=8)
        shown = {
            line.get_label(): line for axis in axes.flat for line in axis.get_lines()
        }  # not every variant is in every panel
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(result["title"], fontsize=10)
    figure.savefig(path, dpi=120)
    return path


def peak_of(row: Row) -> float | None:
    return row.get("peak_mib")
