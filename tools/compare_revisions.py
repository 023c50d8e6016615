"""Compare two revisions of this repository by a benchmark of both: processor time and peak memory, in turns.

    python tools/compare_revisions.py main . step --model smollm2
    python tools/compare_revisions.py main~20 main fields --turns 5

A revision is anything that git can name, or `.` for the files as they are. The options after the benchmark are those of
`firedistill bench`. The revisions run one after the other, TURNS times; the table has the medians, and the median over the turns of
the second one's value over the first one's. A revision whose options differ can be compared with the options that both know.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]
QUANTITIES = {"processor_seconds": "CPU seconds", "peak_mib": "peak MiB"}
Measured = dict[tuple[str, str, str], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs=2, metavar="REVISION")
    parser.add_argument("benchmark")
    parser.add_argument("--turns", type=int, default=3, help="runs of each revision (3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    chosen, options = parser.parse_known_args()
    if chosen.turns < 1:
        parser.error(f"--turns is {chosen.turns}; expected 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        trees = [tree_of(revision, Path(folder, str(side))) for side, revision in enumerate(chosen.revisions)]
        turns = []
        for _ in track(range(chosen.turns), chosen.benchmark, console=Console(stderr=True)):
            turns.append([measured(tree, chosen.benchmark, chosen.threads, options, Path(folder, "out")) for tree in trees])
    Console().print(table(chosen.revisions, turns))


def tree_of(revision: str, folder: Path) -> Path:
    """The files of a revision, in `folder` unless they are those of the working tree."""
    if revision == ".":
        return ROOT
    archive = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True)
    if archive.returncode:
        sys.exit(f"{revision}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def measured(tree: Path, benchmark: str, threads: int, options: list[str], output: Path) -> Measured:
    """One run of a benchmark: a value per case, variant and quantity."""
    script = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]["firedistill"]
    module, function = script.split(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    words = ["bench", benchmark, *options, "--repeats", "1", "--threads", str(threads), "-o", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": str(threads)}
    process = subprocess.run([sys.executable, "-P", "-c", code, *words], env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"firedistill {' '.join(words)} failed in {tree}:\n{process.stdout}{process.stderr}")
    found: Measured = {}
    for row in json.loads((output / f"{benchmark}.json").read_text(encoding="utf-8"))["rows"]:
        case = ", ".join(f"{name} {value}" for name, value in row["case"].items())
        for quantity in QUANTITIES.keys() & row.keys():
            value = row[quantity]["median"] if isinstance(row[quantity], dict) else row[quantity]
            if value is not None:  # memory that cannot be read
                found[case, row["variant"], quantity] = value
    return found


def table(revisions: list[str], turns: list[list[Measured]]) -> Table:
    shown = Table("case", "variant", "", *revisions, "ratio", title="Medians; the ratio is that of the second to the first")
    first, second = turns[0]
    for key in [key for key in first if key in second]:
        pairs = [(one[key], other[key]) for one, other in turns]
        cells = [f"{statistics.median(values):.4g}" for values in zip(*pairs, strict=True)]
        shown.add_row(*key[:2], QUANTITIES[key[2]], *cells, f"{statistics.median(b / a for a, b in pairs):.3f}")
    return shown


if __name__ == "__main__":
    main()
