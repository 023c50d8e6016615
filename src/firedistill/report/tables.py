"""The paper's tables: final accuracy as mean ± sample standard deviation over seeds, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from firedistill.report.read import METHODS, Group, Run, Setting, Study, mean_and_deviation, short_model, task_title


@dataclass
class Cell:
    """Accuracies in percent.

    Attributes:
        values: one per finished run; empty where there is none.
        mean, deviation: NaN where they do not exist.
        best: whether no other cell of its column has a higher mean, to the two decimals that are printed.
    """

    values: list[float]
    mean: float = math.nan
    deviation: float = math.nan
    best: bool = False

    @property
    def n(self) -> int:
        return len(self.values)


@dataclass
class AccuracyTable:
    """Rows of methods, columns of tasks, categories or both.

    Attributes:
        name: of its files.
        runs: the same number of runs in every cell that has any, or None.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    average: list[float] | None = None
    head: str = "Algorithm"
    runs: int | None = field(init=False)

    def __post_init__(self) -> None:
        counts = {cell.n for _, cells in self.rows for cell in cells if cell.n}
        self.runs = counts.pop() if len(counts) == 1 else None
        for column in range(len(self.columns)):
            cells = [cells[column] for _, cells in self.rows]
            best = max((round(cell.mean, 2) for cell in cells if cell.n), default=math.nan)
            for cell in cells:
                cell.best = len(self.rows) > 1 and cell.n > 0 and round(cell.mean, 2) == best

    @property
    def best_average(self) -> float:
        return max((round(value, 2) for value in self.average or [] if math.isfinite(value)), default=math.nan)

    @property
    def caption(self) -> str:
        n = f"{self.runs} run{'s' * (self.runs > 1)}" if self.runs else "the finished runs, their number n in the cell"
        return f"{self.title}: final accuracy (%), mean ± sample standard deviation over {n}; the best of a column in bold."

    def cell_text(self, cell: Cell, plus_minus: str = " ± ") -> str:
        """`61.11 ± 2.35`, with the number of runs where it differs from cell to cell."""
        if not cell.n:
            return "–"
        text = f"{cell.mean:.2f}" + (f"{plus_minus}{cell.deviation:.2f}" if cell.n > 1 else "")
        return text if self.runs else f"{text} (n={cell.n})"

    def texts(self) -> list[list[tuple[str, bool]]]:
        """Rows of cells as text, and whether each is the best of its column; the average last."""
        found = []
        for position, (label, cells) in enumerate(self.rows):
            row = [(label, False), *((self.cell_text(cell), cell.best) for cell in cells)]
            if self.average is not None:
                row.append(self.average_text(position))
            found.append(row)
        return found

    def average_text(self, position: int) -> tuple[str, bool]:
        assert self.average is not None
        value = self.average[position]
        if not math.isfinite(value):
            return "–", False
        return f"{value:.2f}", len(self.rows) > 1 and round(value, 2) == self.best_average

    @property
    def header(self) -> list[str]:
        return [self.head, *self.columns, *(["Avg."] if self.average is not None else [])]


def accuracy_cell(groups: Sequence[Group], key: str = "accuracy") -> Cell:
    values = [100 * value for group in groups for value in group.finals(key)]
    return Cell(values, *mean_and_deviation(values))


def accuracy_tables(study: Study) -> list[AccuracyTable]:
    """All tables of a study: methods by task for each model, categories for tasks that have some, learning rates."""
    tables = []
    for model in study.models:
        settings = study.of_model(model)
        tables.append(method_table(model, settings))
        tables += [category_table(setting) for setting in settings if categories(setting)]
        if any(group.factor != 1 for setting in settings for group in setting.groups):
            tables.append(rate_table(model, settings))
    return [table for table in tables if any(cell.n for _, cells in table.rows for cell in cells)]


def method_table(model: str, settings: Sequence[Setting]) -> AccuracyTable:
    labels = ordered(dict.fromkeys(group.label for setting in settings for group in setting.compared), settings)
    rows = []
    for label in labels:
        cells = [accuracy_cell([g for g in setting.compared if g.label == label]) for setting in settings]
        rows.append((label, cells))
    average = None
    if len(settings) > 1:
        average = [fmean(cell.mean for cell in cells) if all(cell.n for cell in cells) else math.nan for _, cells in rows]
    columns = [task_title(setting.task) for setting in settings]
    return AccuracyTable(f"accuracy-{file_name(model)}", short_model(model), columns, rows, average)


def categories(setting: Setting) -> list[str]:
    keys = {key for g in setting.compared for run in g.runs for row in run.evaluations for key in row}
    return sorted(key for key in keys if key.startswith("accuracy_"))


def category_table(setting: Setting) -> AccuracyTable:
    keys = [*categories(setting), "accuracy"]
    rows = [(group.label, [accuracy_cell([group], key) for key in keys]) for group in setting.compared]
    columns = [key.removeprefix("accuracy_").replace("_", " ").capitalize() for key in keys[:-1]] + ["Overall"]
    name = f"categories-{file_name(setting.model)}-{file_name(setting.task)}"
    return AccuracyTable(name, f"{setting.title}, by category", columns, rows)


def rate_table(model: str, settings: Sequence[Setting]) -> AccuracyTable:
    """Rows of learning rates as multiples of the comparison's, for the methods that were run at several."""
    rows = []
    groups = [(setting, group) for setting in settings for group in setting.groups]
    swept = {(group.method, group.apart) for _, group in groups if group.factor != 1}
    keys = {(g.method, g.apart, round(g.factor, 6)) for _, g in groups if (g.method, g.apart) in swept}
    order = list(METHODS)
    for method, apart, factor in sorted(keys, key=lambda k: (order.index(k[0]) if k[0] in order else -1, k)):
        title = METHODS.get(method, (method,))[0] + (f" ({apart})" if apart else "")
        cells = []
        for setting in settings:
            here = [g for g in setting.groups if (g.method, g.apart, round(g.factor, 6)) == (method, apart, factor)]
            cells.append(accuracy_cell(here))
        rows.append((f"{title}, {factor:g}×", cells))
    columns = [task_title(setting.task) for setting in settings]
    return AccuracyTable(
        f"learning-rates-{file_name(model)}", f"{short_model(model)}, learning rates", columns, rows, head="Algorithm, rate"
    )


def ordered(labels: Iterable[str], settings: Sequence[Setting]) -> list[str]:
    """Labels in the order of the paper, whichever setting has them."""
    rank = {g.label: (list(METHODS).index(g.method) if g.method in METHODS else -1) for s in settings for g in s.groups}
    return sorted(labels, key=lambda label: (rank[label], label))


def file_name(text: str) -> str:
    kept = "".join(c if c.isalnum() or c in ".-_" else "-" for c in short_model(text))
    return kept.strip(".-") or "unnamed"


# ---- Overview --------------------------------------------------------------------------------------------------------------

OVERVIEW_COLUMNS = [
    "Setting",
    "Algorithm",
    "Runs finished",
    "Accuracy at step 0 (%)",
    "Final accuracy (%)",
    "Went wrong",
    "Gradient norm, median",
    "Gradient norm, maximum",
    "Sampled answers right (%), first to last tenth",
    "Entropy (nats), first to last tenth",
    "Response length, first to last tenth",
    "Generated tokens",
    "Training time (min)",
]


def overview(study: Study) -> list[dict[str, Any]]:
    """A row per group: how accurate, how stable, how expensive; keys are `OVERVIEW_COLUMNS`.

    Over the finished runs of a group, or over all while none is; what went wrong is told of all.
    """
    rows = []
    for setting in study.settings:
        for group in setting.groups:
            rows.append(dict(zip(OVERVIEW_COLUMNS, overview_row(setting, group), strict=True)))
    return rows


def overview_row(setting: Setting, group: Group) -> list[str]:
    runs = group.finished or group.runs
    norms = [[r["grad_norm"] for r in run.metrics if math.isfinite(r.get("grad_norm", math.nan))] for run in runs]
    everything = [norm for of_run in norms for norm in of_run]
    before = [100 * run.evaluations[0]["accuracy"] for run in runs if run.evaluations and not run.evaluations[0]["step"]]
    after = accuracy_cell([group])
    wrong = Counter(rule for run in group.runs for rule in dict.fromkeys(event.rule for event in run.events))
    return [
        setting.title,
        group.label,
        f"{len(group.finished)} of {len(group.runs)}",
        spread(before, ".2f"),
        spread(after.values, ".2f"),
        ", ".join(f"{rule} in {count} of {len(group.runs)}" for rule, count in wrong.items()) or "–",
        f"{median(everything):.3g}" if everything else "–",
        f"{max(everything):.3g}" if everything else "–",
        first_to_last(runs, "correct_rate", ".0f", 100),
        first_to_last(runs, "entropy", ".2f"),
        first_to_last(runs, "response_length", ".1f"),
        spread([run.metrics[-1].get("cumulative_generated_tokens", math.nan) for run in runs], ",.0f"),
        spread([run.metrics[-1].get("cumulative_train_seconds", math.nan) / 60 for run in runs], ".1f"),
    ]


def first_to_last(runs: Sequence[Run], column: str, form: str, factor: float = 1) -> str:
    """The mean over the runs in the first and in the last tenth of their steps."""
    values = [[r[column] for r in run.metrics if math.isfinite(r.get(column, math.nan))] for run in runs]
    tenths = [(fmean(v[: max(1, len(v) // 10)]), fmean(v[-max(1, len(v) // 10) :])) for v in values if v]
    return " → ".join(format(factor * fmean(side), form) for side in zip(*tenths, strict=True)) if tenths else "–"


def spread(values: Sequence[float], form: str) -> str:
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "–"
    mean, deviation = mean_and_deviation(values)
    return format(mean, form) + (f" ± {format(deviation, form)}" if len(values) > 1 else "")


# ---- Formats ---------------------------------------------------------------------------------------------------------------


def markdown(table: AccuracyTable) -> str:
    rows = [[markdown_text(name) for name in table.header], ["---"] + ["---:"] * (len(table.header) - 1)]
    for row in table.texts():
        rows.append([f"**{markdown_text(text)}**" if best else markdown_text(text) for text, best in row])
    return markdown_text(table.caption) + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def overview_markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = [[markdown_text(name) for name in OVERVIEW_COLUMNS], ["---"] * len(OVERVIEW_COLUMNS)]
    lines += [[markdown_text(str(row[name])) for name in OVERVIEW_COLUMNS] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def markdown_text(text: str) -> str:
    """A name as text: no markup, no HTML, no new cell."""
    for character in "\\`*_[]<>|~":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def latex(table: AccuracyTable) -> str:
    """A `table` for booktabs."""
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{latex_text(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{l{'c' * (len(table.header) - 1)}}}",
        r"\toprule",
        " & ".join(rf"\textbf{{{latex_text(name)}}}" for name in table.header) + r" \\",
        r"\midrule",
    ]
    for (label, cells), row in zip(table.rows, table.texts(), strict=True):
        parts = [latex_text(label), *(latex_cell(table, cell) for cell in cells)]
        if table.average is not None:
            text, best = row[-1]
            parts.append(rf"\textbf{{{text}}}" if best else ("--" if text == "–" else text))
        lines.append(" & ".join(parts) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def latex_cell(table: AccuracyTable, cell: Cell) -> str:
    if not cell.n:
        return "--"
    mean = rf"\mathbf{{{cell.mean:.2f}}}" if cell.best else f"{cell.mean:.2f}"
    text = f"${mean}" + (rf"{{\pm}}{cell.deviation:.2f}$" if cell.n > 1 else "$")
    return text if table.runs else rf"{text} {{\scriptsize($n={cell.n}$)}}"


def latex_text(text: str) -> str:
    replaced = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    replaced |= {character: f"\\{character}" for character in "&%$#_{}"}
    replaced |= {"±": r"$\pm$", "×": r"$\times$", "–": "--", "→": r"$\rightarrow$"}
    return "".join(replaced.get(character, character) for character in text)


def csv_text(tables: Sequence[AccuracyTable]) -> str:
    """All cells of all tables, one per line, with the accuracy of every run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "algorithm", "column", "n", "mean", "sample_standard_deviation", "best", "values"])
    for table in tables:
        for label, cells in table.rows:
            for column, cell in zip(table.columns, cells, strict=True):
                numbers = ["" if math.isnan(value) else f"{value:.6g}" for value in (cell.mean, cell.deviation)]
                values = " ".join(f"{value:.6g}" for value in cell.values)
                writer.writerow([table.name, label, column, cell.n, *numbers, int(cell.best), values])
    return out.getvalue()
