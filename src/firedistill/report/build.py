"""A whole report: tables, figures and the page, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firedistill.report.figures import write_figures
from firedistill.report.page import write_page
from firedistill.report.read import Study, read_study
from firedistill.report.tables import accuracy_tables, csv_text, latex, markdown, markdown_text, overview, overview_markdown


def write_report(paths: Sequence[str | Path], folder: str | Path) -> tuple[Study, list[Path]]:
    """Report on run directories and suites.

    Leaves `index.html`, `tables/*.md, *.tex, accuracy.csv`, `figures/*.svg, *.png` in the folder; what it has written is returned.

    Raises:
        ValueError: a path is neither a run directory nor a suite, or no run has made a step.
    """
    study = read_study(paths)
    folder = Path(folder)
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    written = []

    def write(name: str, text: str) -> None:
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)

    tables = accuracy_tables(study)
    for table in tables:
        write(f"tables/{table.name}.md", markdown(table))
        write(f"tables/{table.name}.tex", latex(table))
    if tables:
        write("tables/accuracy.csv", csv_text(tables))
    notes = "".join(f"- {markdown_text(note)}\n" for note in study.notes)
    write("tables/overview.md", overview_markdown(overview(study)) + (f"\n{notes}" if notes else ""))
    written += write_figures(study, folder / "figures")
    written.append(write_page(study, tables, folder / "index.html"))
    return study, written
