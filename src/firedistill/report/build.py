"""A complete report: tables, figures and the page, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firedistill.files import write_text
from firedistill.report.figures import write_figures
from firedistill.report.groups import Study, read_study
from firedistill.report.page import write_page
from firedistill.report.paired import HEADER, notes_on_problems, paired_differences, row, sentences
from firedistill.report.tables import (
    accuracy_tables,
    csv_text,
    latex,
    markdown,
    markdown_text,
    overview,
    overview_markdown,
    pipe_table,
)
from firedistill.run.directory import make_folder
from firedistill.terminal import some


def write_report(paths: Sequence[str | Path], folder: str | Path) -> tuple[Study, list[Path]]:
    """Report on run directories and suites.

    Writes `index.html`, `tables/*.md`, `tables/*.tex`, `tables/accuracy.csv`, `figures/*.svg` and `figures/*.png` into the folder;
    `tables/differences.md` where runs have answered the same held-out problems. Other files in `tables` and `figures` stay, and are
    noted in the study.

    Returns:
        The study, and the paths of the written files.

    Raises:
        ValueError: a path is neither a run directory nor a suite, no run has completed a step, or `folder` is a file or cannot be made.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; -o takes a folder, or a .png, .svg or .pdf file")
    study = read_study(paths)
    for path in (folder, folder / "tables"):
        make_folder(path, "-o")
    study.notes += notes_on_problems(study.settings, study.notes)
    tables = accuracy_tables(study)
    texts = {}
    for table in tables:
        texts[f"{table.name}.md"] = markdown(table)
        texts[f"{table.name}.tex"] = latex(table)
    if tables:
        texts["accuracy.csv"] = csv_text(tables)
    differences = paired_differences(study)
    if differences:
        compared = pipe_table(HEADER, [[markdown_text(cell) for cell in row(d)] for d in differences], "---")
        texts["differences.md"] = compared + "\n" + "".join(f"- {markdown_text(text)}\n" for text in sentences(differences))
    figures = write_figures(study, folder / "figures")
    page = write_page(study, tables, folder / "index.html", differences)
    notes = "".join(f"- {markdown_text(note)}\n" for note in study.notes)
    texts["overview.md"] = overview_markdown(overview(study)) + (f"\n{notes}" if notes else "")
    for name, text in texts.items():
        write_text(folder / "tables" / name, text)
    written = [*(folder / "tables" / name for name in texts), *figures, page]
    found = sorted(path for part in ("tables", "figures") for path in (folder / part).iterdir())
    if others := [str(path.relative_to(folder)) for path in found if path not in written]:
        study.notes.append(
            f"{folder} holds files that this report did not write, such as those of an earlier one: {some(others, 20)}."
        )
    return study, written
