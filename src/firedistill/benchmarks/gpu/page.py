"""The page of a folder of measurements: a table per part, with floors beside the measured values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from firedistill.benchmarks import gpu, parts
from firedistill.benchmarks.gpu.sizes import AS_IN_TRAINING
from firedistill.files import write_text

PAGE = "gpu.md"
SLOW = 3.0  # times its floor

Row = dict[str, Any]
INTRODUCTION = f"""\
# On a GPU: measurements

`firedistill bench gpu` makes this page from the `.json` files beside it. Times are medians; runs to warm up are left out. The clock
waits until the device has finished, except that events of the device time sampling and teacher of a step. Models have random weights
at the shapes of Qwen2.5.

A **floor** is the least time that the work can take: each phase takes its operations at the measured rate of a large product in
bfloat16, or its bytes at the measured bandwidth of a copy, whichever takes longer. "x floor" is the measured time over it, **bold**
above {SLOW:g}. A floor is an estimate: it leaves out everything but matrix products, weights, caches and logits.
"""


def write_page(folder: Path) -> Path:
    """Write `gpu.md` into the folder; returns its path.

    Raises:
        ValueError: the folder holds no measurement, or a file that is none.
    """
    found = {part.name: parts.read(folder, part.name) for part in gpu.PARTS}
    records = [record for record in found.values() if record is not None]
    if not records:
        raise ValueError(f"{folder} holds no measurements: make them with firedistill bench gpu -o {folder}")
    path = folder / PAGE
    write_text(path, page(records, [name for name, record in found.items() if record is None]))
    return path


def page(records: Sequence[parts.Record], missing: Sequence[str] = ()) -> str:
    """The page in Markdown.

    Args:
        records: of the parts that have been started, in the order in which they are shown.
        missing: names of the others.
    """
    rates = rates_of(next((record["rows"] for record in records if record["part"] == "ceilings"), []))
    lines = [INTRODUCTION]
    if any(record.get("tiny") for record in records):
        lines += ["**Tiny sizes: the times say nothing.**", ""]
    lines += [*hardware_lines(records), "", *check_lines(records, missing), "", *slow_lines(records, rates), ""]
    for record in records:
        lines += [f"## {record['title']}", ""]
        note = f"{record['part']}: {record['state']}"
        if "error" in record:
            note += f": {record['error']}"
        lines += [f"{cell(note)} ({record.get('seconds', 0):.0f} s)", ""]
        if record["rows"]:
            lines += [*table(record["rows"], rates), ""]
    return "\n".join(lines)


def rates_of(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Operations and bytes per second, from the rows of the part `ceilings`; None before it has been measured."""
    found = {row["variant"]: row for row in rows}
    if "copy" not in found or "matrix product" not in found:
        return None
    operations = found["matrix product"]["work"][0][0] / found["matrix product"]["seconds"]["median"]
    return operations, found["copy"]["work"][0][1] / found["copy"]["seconds"]["median"]


def floor(work: Sequence[Sequence[float]] | None, rates: tuple[float, float] | None) -> float | None:
    """The least seconds for this work; None without work or rates."""
    if not work or rates is None:
        return None
    return sum(max(operations / rates[0], read / rates[1]) for operations, read in work)


def times_floor(row: Row, rates: tuple[float, float] | None) -> float | None:
    least = floor(row.get("work"), rates)
    return row["seconds"]["median"] / least if least and "seconds" in row else None


def check_lines(records: Sequence[parts.Record], missing: Sequence[str]) -> Iterator[str]:
    """Parts without a result, what did not fit into memory, wrong numbers, failed tests; what ran without `torch.compile` or graphs."""
    found = [f"not measured: {', '.join(missing)}"] if missing else []
    for record in records:
        if record["state"] != parts.DONE:
            found.append(f"{record['part']}: {record['state']}: {record.get('error', '')}")
        for row in record["rows"]:
            facts = row.get("details") or {}
            if facts.get("within") is False:
                found.append(f"{record['part']}: {row['variant']} is wrong ({case_text(row)})")
            if facts.get("equal") is False:
                found.append(f"{record['part']}: {row['variant']}: not equal to the bit ({case_text(row)})")
            if facts.get("head_compiled") is False and record.get("device") == "cuda":
                found.append(f"{record['part']}: {row['variant']}: the head is not compiled ({case_text(row)})")
            if facts.get("captured") is False:
                found.append(f"{record['part']}: {row['variant']}: sampled without CUDA graphs ({case_text(row)})")
            if "error" in facts:
                found.append(f"{record['part']}: {row['variant']}: {facts['error']} ({case_text(row)})")
            if facts.get("out_of_memory"):
                found.append(f"{record['part']}: {row['variant']}: batches did not fit and were halved ({case_text(row)})")
            if facts.get("failed") or facts.get("errors"):
                found.append(f"{record['part']}: {facts}")
    yield "Every part has a result, and every check holds." if not found else "To look at:"
    yield ""
    yield from (f"- {cell(text)}" for text in found)


def slow_lines(records: Sequence[parts.Record], rates: tuple[float, float] | None) -> Iterator[str]:
    """What of a training step takes more than `SLOW` times its floor, the slowest first."""
    if rates is None:
        yield "Without the part `ceilings` there are no floors."
        return
    yield f"Measured ceilings: {rates[0] / 1e12:.0f} TFLOP/s (bfloat16), {rates[1] / 1e12:.2f} TB/s (copy, bytes read and written)."
    slow = [
        (times, f"{record['part']}: {row['variant']} ({case_text(row)})")
        for record in records
        for row in record["rows"]
        if record["part"].startswith(("step-", "vllm")) or row["variant"] == AS_IN_TRAINING
        if (times := times_floor(row, rates)) is not None and times > SLOW
    ]
    yield ""
    heading = (
        f"Of steps, and of what other parts measure as in training, {len(slow)} rows take more than {SLOW:g} times their floor"
    )
    yield heading + (":" if slow else ".")
    yield ""
    for times, text in sorted(slow, reverse=True):
        yield f"- {times:.1f}: {cell(text)}"


def hardware_lines(records: Sequence[parts.Record]) -> Iterator[str]:
    """A line per machine and revision, with the parts that it measured."""
    machines: dict[str, list[str]] = {}
    for record in records:
        machine = record.get("hardware")
        if not machine:
            continue
        device = machine.get("gpu")
        what = (
            f"{device['name']} ({device['memory_mib'] / 1024:.0f} GiB, driver {device['driver']}, CUDA {device['cuda']})"
            if device
            else f"CPU {machine['processor']}"
        )
        revision = machine.get("revision") or {}
        text = (
            f"{what}; torch {machine['torch']}, transformers {machine.get('transformers')}, peft {machine.get('peft')}, Python "
            f"{machine['python']}; revision {revision.get('commit') or 'unknown'}, source {revision.get('source')}"
        )
        machines.setdefault(text, []).append(record["part"])
    for text, measured in machines.items():
        yield f"- {cell(text)}" + (f": {', '.join(measured)}" if len(machines) > 1 else "")


def table(rows: Sequence[Row], rates: tuple[float, float] | None) -> Iterator[str]:
    columns = ["case", "variant", "time", "from", "to", "floor", "x floor", "peak MiB", "facts"]
    cells = [row_cells(row, rates) for row in rows]
    shown = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    yield "| " + " | ".join(columns[i] for i in shown) + " |"
    yield "|" + "---|" * len(shown)
    for row in cells:
        yield "| " + " | ".join(row[i] for i in shown) + " |"


def row_cells(row: Row, rates: tuple[float, float] | None) -> list[str]:
    seconds, least, times = row.get("seconds") or {}, floor(row.get("work"), rates), times_floor(row, rates)
    peak = row.get("peak_mib")
    ratio = "" if times is None else f"**{times:.2f}**" if times > SLOW else f"{times:.2f}"
    facts = ", ".join(f"{name} {number(value)}" for name, value in (row.get("details") or {}).items())
    return [
        cell(case_text(row)),
        cell(row["variant"]),
        *(duration(seconds[name]) if name in seconds else "" for name in ("median", "min", "max")),
        "" if least is None else duration(least),
        ratio,
        "" if peak is None else f"{peak:.0f}",
        cell(facts),
    ]


def case_text(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in row["case"].items())


def number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def cell(text: str) -> str:
    """Text that stays in its cell."""
    return text.replace("|", r"\|").replace("\n", " ").replace("<", "&lt;")
