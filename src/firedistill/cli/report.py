"""`firedistill report`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from firedistill.terminal import visible

PICTURES = (".png", ".svg", ".pdf")


def report_command(arguments: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="firedistill report", description="Report on runs and suites, including those that are still running."
    )
    parser.add_argument("runs", nargs="+", help="run directories and folders of suites")
    parser.add_argument(
        "-o", "--output", default="report", help="folder for page, tables and figures (report); or a picture: .png, .svg, .pdf"
    )
    options = parser.parse_args(list(arguments))
    output = Path(options.output)
    if output.suffix and not output.is_dir() and not options.output.endswith(("/", os.sep)):
        if output.suffix.lower() not in PICTURES:
            expected = f"a folder, or a picture that ends with {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
            raise ValueError(
                f"-o is {options.output}: expected {expected}; {options.output}/ makes a folder, with the page index.html in it"
            )
        from firedistill.report.curves import plot_runs  # imports torch

        notes: list[str] = []
        written = [plot_runs(options.runs, output, notes=notes)]
    else:
        from firedistill.report.build import write_report  # imports torch

        study, written = write_report(options.runs, output)
        notes = study.notes
    for note in notes:
        console.print(visible(note), soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
    return 0
