"""`firedistill bench`: run benchmarks and write their tables and figures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from firedistill import benchmarks
from firedistill.benchmarks import gpu, parts
from firedistill.benchmarks.gpu.page import PAGE, write_page
from firedistill.benchmarks.gpu.sizes import Setting
from firedistill.benchmarks.harness import Options, hardware, plot, result, table, write
from firedistill.models.attention import has_bfloat16
from firedistill.terminal import quiet_libraries, visible


def bench_command(arguments: Sequence[str], console: Console) -> int:
    if arguments and arguments[0] == "gpu":
        return gpu_command(arguments[1:], console)
    parser = argparse.ArgumentParser(
        prog="firedistill bench",
        description="Times and memory on this machine; both sides of each comparison take turns.",
        epilog="GPU benchmarks, from bandwidth and matrix products to whole steps: firedistill bench gpu --help",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(benchmarks.BENCHMARKS)}; default: all of them")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--model", help="hub id or folder of an instruct model; default: a random model")
    parser.add_argument("--repeats", type=int, help="timed runs of each side")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device to measure (cpu)")
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="type of the model; auto is float32 on a device that does not multiply bfloat16 matrices, and bfloat16 otherwise",
    )
    parser.add_argument("-o", "--output", default="bench", help="folder for a .json and a .png per benchmark (bench)")
    options = parser.parse_args(list(arguments))
    for name, value in (("repeats", options.repeats), ("threads", options.threads)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; expected 1 or more")
    selected = {name: benchmarks.load_benchmark(name) for name in options.names or benchmarks.BENCHMARKS}
    check_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    quiet_libraries()
    if options.dtype == "auto":
        options.dtype = "bfloat16" if has_bfloat16(torch.device(options.device)) else "float32"
    chosen = Options(options.model, options.repeats, options.device, options.dtype)
    for name, benchmark in selected.items():
        if not options.names and (package := benchmarks.missing_package(benchmark)):
            console.print(f"{name} skipped: it compares with {package}, which is not installed")
            continue
        if options.device != "cpu" and getattr(benchmark, "CPU_ONLY", False):
            console.print(f"{name} skipped: it measures the CPU")
            continue
        sizes = benchmark.SIZES["quick" if options.quick else "full"]
        folder, machine, rows = Path(options.output), hardware(), []
        with console.status(name) as status:
            for row in benchmark.run(sizes, chosen):
                rows.append(row)
                path = write(result(name, benchmark.TITLE, sizes, chosen, rows, machine), folder)
                status.update(f"{name}: {len(rows)} measurements")
        found = result(name, benchmark.TITLE, sizes, chosen, rows, machine)
        console.print(table(found))
        sweeps = benchmark.sweeps(sizes) if hasattr(benchmark, "sweeps") else {}
        for written in (path, plot(found, path.with_suffix(".png"), sweeps)):
            console.print(f"wrote {written}", soft_wrap=True)
    return 0


def check_device(device: str) -> None:
    """Raise ValueError, which says what to do, if there is no GPU to measure."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"there is no GPU that PyTorch {torch.__version__} can use: run this on a machine with a CUDA GPU and a CUDA build of "
            "PyTorch, or try the command with --device cpu (bench gpu: --device cpu --tiny)"
        )


def gpu_command(arguments: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="firedistill bench gpu",
        description="Benchmark the package on a GPU, in parts. Nothing is downloaded. Each part has a .json file, written as it is "
        "measured. A call stops when its budget is used, and the next one with the same folder makes the missing parts.",
        epilog="Parts: " + "; ".join(f"{part.name} ({part.seconds:g} s): {part.title}" for part in gpu.PARTS) + ".",
    )
    parser.add_argument("names", nargs="*", metavar="PART", help="measure these parts (again); default: those that are missing")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds of this call (500)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="device to measure (cuda)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the command; the times mean nothing")
    parser.add_argument("--page", action="store_true", help=f"only make {PAGE} of the files in the folder")
    parser.add_argument("--tests", default=default_tests(), help="folder of the test suite, for the part `tests`")
    parser.add_argument("-o", "--output", default="bench-gpu", help=f"folder for the .json files and {PAGE} (bench-gpu)")
    options = parser.parse_args(list(arguments))
    folder = Path(options.output)
    if unknown := set(options.names) - {part.name for part in gpu.PARTS}:
        raise ValueError(f"unknown part {', '.join(sorted(unknown))}; known are {', '.join(part.name for part in gpu.PARTS)}")
    if not options.budget > 0:
        raise ValueError(f"--budget is {options.budget:g}; expected seconds above 0")
    if not options.page:
        check_device(options.device)
        if options.device == "cpu" and not options.tiny:
            raise ValueError("the sizes of a GPU take hours on a CPU: add --tiny, which tries the command")
        setting = Setting(
            options.device, options.tiny, folder.absolute(), Path(options.tests).absolute() if options.tests else None
        )
        refuse_other_setting(folder, setting)

        def say(line: str) -> None:
            console.print(visible(line), soft_wrap=True)

        wanted = [replace(part, seconds=1.0) for part in gpu.PARTS] if options.tiny else gpu.PARTS
        missing = parts.run_parts(wanted, setting.folder, options.budget, gpu.measure, (setting,), options.names, say)
        if missing:
            seconds, longest = (of(part.seconds for part in missing) for of in (sum, max))
            changes = ["these parts only"] if options.names else []
            changes += [f"--budget {math.ceil(longest)} or more"] if longest > options.budget else []
            again = " ".join(["The same command", *(["with", " and ".join(changes)] if changes else [])])
            left = ", ".join(part.name for part in missing)
            console.print(
                f"left for another call: {left}; together about {seconds:.0f} s, the longest {longest:.0f} s. {again} continues",
                soft_wrap=True,
            )
    console.print(f"wrote {write_page(folder)}", soft_wrap=True)
    return 0


def default_tests() -> str | None:
    """The folder `tests` of a checkout."""
    root = Path(__file__).parents[3]
    return str(root / "tests") if (root / "pyproject.toml").exists() and (root / "tests" / "conftest.py").exists() else None


def refuse_other_setting(folder: Path, setting: Setting) -> None:
    """Raise ValueError if the folder holds measurements of another device, another GPU or other sizes."""
    for part in gpu.PARTS:
        record = parts.read(folder, part.name) or {}
        if "device" in record and (record["device"], record["tiny"]) != (setting.device, setting.tiny):
            sizes = "tiny" if record["tiny"] else "full"
            raise ValueError(
                f"{folder} holds measurements of {record['device']} at {sizes} sizes: name another folder with --output"
            )
        measured = (record.get("hardware") or {}).get("gpu")
        # The floors of all parts come from one GPU, the one that `ceilings` has measured.
        if setting.is_gpu and measured and measured["name"] != (present := torch.cuda.get_device_name()):
            raise ValueError(
                f"{folder} holds measurements of {measured['name']}, and the GPU here is {present}: name another folder with --output"
            )
