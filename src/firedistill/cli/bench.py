"""`firedistill bench`: run benchmarks and write their tables and figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from firedistill import benchmarks
from firedistill.benchmarks.harness import Options, hardware, result, table, write
from firedistill.terminal import quiet_libraries


def bench_command(arguments: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="firedistill bench", description="Times and memory on this machine; both sides of each comparison take turns."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(benchmarks.BENCHMARKS)}; default: all of them")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--model", help="hub id or folder of an instruct model; default: a random model")
    parser.add_argument("--repeats", type=int, help="timed runs of each side")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("-o", "--output", default="bench", help="folder for a .json and a .png per benchmark (bench)")
    options = parser.parse_args(list(arguments))
    for name, value in (("repeats", options.repeats), ("threads", options.threads)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; expected 1 or more")
    selected = {name: benchmarks.load_benchmark(name) for name in options.names or benchmarks.BENCHMARKS}
    if options.threads:
        torch.set_num_threads(options.threads)
    quiet_libraries()
    chosen = Options(options.model, options.repeats, options.device)
    for name, benchmark in selected.items():
        if not options.names and (package := benchmarks.missing_package(benchmark)):
            console.print(f"{name} skipped: it compares with {package}, which is not installed")
            continue
        sizes = benchmark.SIZES["quick" if options.quick else "full"]
        machine, rows = hardware(), []
        with console.status(name) as status:
            for row in benchmark.run(sizes, chosen):
                rows.append(row)
                status.update(f"{name}: {len(rows)} measurements")
        found = result(name, benchmark.TITLE, sizes, chosen, rows, machine)
        console.print(table(found))
        sweeps = benchmark.sweeps(sizes) if hasattr(benchmark, "sweeps") else {}
        for path in write(found, Path(options.output), sweeps):
            console.print(f"wrote {path}", soft_wrap=True)
    return 0
