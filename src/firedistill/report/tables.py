"""The paper's tables: final accuracy as mean ± sample standard deviation over seeds, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import numpy as np
import pandas as pd

from firedistill.report.charts import CHARTS, Chart, charts_of
from firedistill.report.groups import (
    Group,
    Setting,
    Study,
    comparable,
    makes_a_difference,
    partition,
    settings_of,
    short_model,
    task_title,
)
from firedistill.report.log import CUMULATIVE
from firedistill.report.paired import notes_on_problems
from firedistill.report.read import Run, shown


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is NaN for a single value, and both are NaN without values."""
    return fmean(values) if values else math.nan, stdev(values) if len(values) > 1 else math.nan


@dataclass
class Cell:
    """Accuracies in percent.

    Attributes:
        values: one per finished run.
        mean, deviation: over the values; NaN where undefined.
        best: whether no other cell of its column has a higher mean at the two decimals that are printed.
    """

    values: list[float]
    mean: float = field(init=False)
    deviation: float = field(init=False)
    best: bool = False

    def __post_init__(self) -> None:
        self.mean, self.deviation = mean_and_deviation(self.values)

    @property
    def n(self) -> int:
        return len(self.values)

    def text(self, with_n: bool) -> str:
        """`61.11 ± 2.35 (n=3)`; a dash without values."""
        if not self.n:
            return "–"
        deviation = f" ± {self.deviation:.2f}" if self.n > 1 else ""
        return f"{self.mean:.2f}{deviation}" + (f" (n={self.n})" if with_n else "")

    def latex(self, with_n: bool) -> str:
        """The same for LaTeX, with the mean in bold if it is the best."""
        if not self.n:
            return "--"
        mean = rf"\mathbf{{{self.mean:.2f}}}" if self.best else f"{self.mean:.2f}"
        deviation = rf"{{\pm}}{self.deviation:.2f}" if self.n > 1 else ""
        return f"${mean}{deviation}$" + (rf" {{\scriptsize($n={self.n}$)}}" if with_n else "")


@dataclass
class AccuracyTable:
    """Rows of methods, columns of tasks, categories or both.

    Attributes:
        name: of its files, without the suffix.
        rows: a label, and a cell per column.
        average: cells of a last column, the mean over the others where none of them is empty; None without that column.
        notes: what a reader must know before comparing rows.
        runs: the number of runs in a cell if all cells that are not empty have the same, else None.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    average: list[Cell] | None = None
    head: str = "Algorithm"
    notes: list[str] = field(default_factory=list)
    runs: int | None = field(init=False)

    def __post_init__(self) -> None:
        counts = {cell.n for _, cells in self.rows for cell in cells if cell.n}
        self.runs = counts.pop() if len(counts) == 1 else None
        for cells in [*zip(*(cells for _, cells in self.rows), strict=True), self.average or []]:
            best = max((round(cell.mean, 2) for cell in cells if cell.n), default=math.nan)
            for cell in cells:
                cell.best = len(cells) > 1 and round(cell.mean, 2) == best

    @property
    def caption(self) -> str:
        n = f"{self.runs} run{'s' * (self.runs > 1)}" if self.runs else "the n finished runs of each cell"
        text = f"{self.title}: final accuracy (%), mean ± sample standard deviation over {n}; the best of each column in bold."
        return " ".join([text, *self.notes])

    @property
    def header(self) -> list[str]:
        return [self.head, *self.columns, *(["Avg."] if self.average else [])]

    def texts(self) -> list[list[tuple[str, bool]]]:
        """Rows of cells as text, and whether each is the best of its column; the label first, the average last."""
        found = [
            [(label, False), *((cell.text(with_n=not self.runs), cell.best) for cell in cells)] for label, cells in self.rows
        ]
        for row, cell in zip(found, self.average or [], strict=False):
            row.append((cell.text(with_n=False), cell.best))
        return found


def accuracy_tables(study: Study) -> list[AccuracyTable]:
    """All tables of a study: methods by task for each model, categories for tasks that have some, learning rates."""
    tables = []
    for model, settings in partition(study.settings, lambda setting: setting.model).items():
        made = [method_table(model, settings)]
        made += [category_table(setting) for setting in settings if categories(setting)]
        if any(group.factor != 1 for setting in settings for group in setting.groups):
            made.append(rate_table(model, settings))
        for table in made:
            table.notes = notes_on_problems(settings, study.notes)
        tables += made
    tables = [table for table in tables if any(cell.n for _, cells in table.rows for cell in cells)]
    names = Counter[str]()
    for table in tables:  # two models may share the last part of their names
        names[table.name] += 1
        table.name += f"-{names[table.name]}" if names[table.name] > 1 else ""
    return tables


def method_table(model: str, settings: Sequence[Setting]) -> AccuracyTable:
    rows = labelled_rows([setting.compared for setting in settings], lambda group: group.label)
    average = None
    if len(settings) > 1:
        average = [Cell([fmean(cell.mean for cell in cells)] if all(cell.n for cell in cells) else []) for _, cells in rows]
    columns = [task_title(setting.task) for setting in settings]
    return AccuracyTable(f"accuracy-{file_name(model)}", short_model(model), columns, rows, average)


def category_table(setting: Setting) -> AccuracyTable:
    keys = [*categories(setting), "accuracy"]
    rows = [(group.label, [accuracy_cell([group], key) for key in keys]) for group in setting.compared]
    columns = [shown(key.removeprefix("accuracy_").replace("_", " ").capitalize()) for key in keys[:-1]] + ["Overall"]
    name = f"categories-{file_name(setting.model)}-{file_name(setting.task)}"
    return AccuracyTable(name, f"{setting.title}, by category", columns, rows)


def rate_table(model: str, settings: Sequence[Setting]) -> AccuracyTable:
    """Rows of learning rates as multiples of the comparison's, for the methods that ran at several."""
    swept = {(g.method, g.apart) for setting in settings for g in setting.groups if g.factor != 1}
    groups = [[g for g in setting.groups if (g.method, g.apart) in swept] for setting in settings]
    rows = labelled_rows(groups, lambda group: f"{group.title}{group.suffix}, {group.factor:g}×")
    columns = [task_title(setting.task) for setting in settings]
    title = f"{short_model(model)}, learning rates"
    return AccuracyTable(f"learning-rates-{file_name(model)}", title, columns, rows, head="Algorithm, rate")


def labelled_rows(columns: Sequence[Sequence[Group]], label: Callable[[Group], str]) -> list[tuple[str, list[Cell]]]:
    """A row per label in the order of the paper, and in it a cell for the groups of each column that have the label."""
    groups = sorted((group for column in columns for group in column), key=lambda group: (*group.order, group.factor))
    labels = dict.fromkeys(label(group) for group in groups)
    return [(name, [accuracy_cell(g for g in groups if label(g) == name) for groups in columns]) for name in labels]


def accuracy_cell(groups: Iterable[Group], key: str = "accuracy") -> Cell:
    return Cell([value for group in groups for value in group.finals(key)])


def categories(setting: Setting) -> list[str]:
    keys = {key for group in setting.compared for run in group.runs for key in run.evaluations.columns}
    return sorted(key for key in keys if key.startswith("accuracy_"))


def file_name(text: str) -> str:
    kept = "".join(c if c.isalnum() or c in ".-_" else "-" for c in short_model(text))[:60]
    return kept.strip(".-") or "unnamed"


# ---- Overview --------------------------------------------------------------------------------------------------------------


def overview(study: Study) -> list[dict[str, str]]:
    """A row per group, as texts by column name: how accurate, how stable, how expensive.

    A row covers the finished runs of its group, or all of them if none is finished; "Went wrong" always covers all.
    """
    measures = [chart for chart in charts_of(study.runs) if chart not in CHARTS and not chart.over_steps]
    return [overview_row(setting, group, measures) for setting, group in study.groups]


def overview_row(setting: Setting, group: Group, measures: Sequence[Chart]) -> dict[str, str]:
    runs = group.finished or group.runs
    norms = np.concatenate([run.metrics.column("grad_norm")[1] for run in runs])
    wrong = Counter(rule for run in group.runs for rule in dict.fromkeys(event.rule for event in run.events))
    tokens, seconds = ([run.metrics[key][-1] for run in runs] for key in CUMULATIVE)
    return {
        "Setting": setting.title,
        "Algorithm": group.label,
        "Runs finished": f"{len(group.finished)} of {len(group.runs)}",
        "Accuracy at step 0 (%)": spread([100 * run.initial for run in runs], ".2f"),
        "Final accuracy (%)": spread(group.finals(), ".2f"),
        **{
            f"{chart.title} ({chart.unit})": spread(
                [chart.y_factor * run.final(chart.y) for run in group.finished], ".2f" if chart.held_out else ".3g"
            )
            for chart in measures
        },
        "Went wrong": ", ".join(f"{rule} in {count} of {len(group.runs)}" for rule, count in wrong.items()) or "–",
        "Gradient norm, median": f"{np.median(norms):.3g}" if len(norms) else "–",
        "Gradient norm, maximum": f"{np.max(norms):.3g}" if len(norms) else "–",
        "Sampled answers right (%), first to last tenth": first_to_last(runs, "correct_rate", ".0f", 100),
        "Entropy (nats), first to last tenth": first_to_last(runs, "entropy", ".2f"),
        "Response length, first to last tenth": first_to_last(runs, "response_length", ".1f"),
        "Generated tokens": spread(tokens, ",.0f"),
        "Training time (min)": spread([value / 60 for value in seconds], ".1f"),
    }


def first_to_last(runs: Sequence[Run], key: str, form: str, factor: float = 1) -> str:
    """The mean over the runs in the first and in the last tenth of their steps."""
    values = [run.metrics.column(key)[1] for run in runs]
    tenths = [(v[: max(1, len(v) // 10)].mean(), v[-max(1, len(v) // 10) :].mean()) for v in values if len(v)]
    return " → ".join(format(factor * fmean(side), form) for side in zip(*tenths, strict=True)) if tenths else "–"


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± sample standard deviation of the finite values."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "–"
    mean, deviation = mean_and_deviation(values)
    return format(mean, form) + (f" ± {format(deviation, form)}" if len(values) > 1 else "")


def without_constants(rows: Sequence[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Rows without the columns that have the same text in all of several rows, and these columns."""
    same = {name: rows[0][name] for name in rows[0] if len({row[name] for row in rows}) == 1} if len(rows) > 1 else {}
    return [{name: text for name, text in row.items() if name not in same} for row in rows], same


def differing_settings(study: Study) -> list[tuple[str, bool, list[tuple[str, str]]]]:
    """The settings in which runs differ, besides model, task and method.

    Returns:
        Of each setting its name, whether it can change training, and its values with the groups whose runs have them.
    """
    found = []
    several = len(study.settings) > 1
    of_runs = [
        (f"{setting.title}: {group.label}" if several else group.label, settings_of(run))
        for setting, group in study.groups
        for run in group.runs
    ]
    for name in dict.fromkeys(name for _, settings in of_runs for name in settings):
        if name not in ("model", "task", "method", "seed", "output_dir"):
            values: dict[str, tuple[str, dict[str, None]]] = {}
            for label, settings in of_runs:
                value = settings.get(name)
                values.setdefault(repr(comparable(value)), (shown(value), {}))[1][label] = None
            if len(values) > 1:
                rows = [(text, ", ".join(labels)) for text, labels in values.values()]
                found.append((shown(name), makes_a_difference(name), rows))
    return sorted(found, key=lambda setting: not setting[1])


# ---- Formats ---------------------------------------------------------------------------------------------------------------


def markdown(table: AccuracyTable) -> str:
    """The caption and a pipe table, the best cells in bold."""
    rows = [[f"**{markdown_text(text)}**" if best else markdown_text(text) for text, best in row] for row in table.texts()]
    return f"{markdown_text(table.caption)}\n\n{pipe_table(table.header, rows, '---:')}"


def overview_markdown(rows: Sequence[dict[str, str]]) -> str:
    return pipe_table(list(rows[0]), [list(map(markdown_text, row.values())) for row in rows], "---")


def pipe_table(header: Sequence[str], rows: Sequence[Sequence[str]], rule: str) -> str:
    """A Markdown table; `rule` aligns all columns but the first. The rows are Markdown, the header is text."""
    lines = [[markdown_text(name) for name in header], ["---", *[rule] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown_text(text: str) -> str:
    """Escape a text for a cell in Markdown: no markup, no HTML, no line or cell breaks."""
    for character in "\\`*_[]<>|~":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def latex(table: AccuracyTable) -> str:
    """A `table` environment for the package booktabs."""
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
    for position, (label, cells) in enumerate(table.rows):
        row = [latex_text(label), *(cell.latex(with_n=not table.runs) for cell in cells)]
        if table.average:
            average = table.average[position]
            text = latex_text(average.text(with_n=False))
            row.append(rf"\textbf{{{text}}}" if average.best else text)
        lines.append(" & ".join(row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def latex_text(text: str) -> str:
    replaced = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    replaced |= {character: f"\\{character}" for character in "&%$#_{}"}
    replaced |= {"±": r"$\pm$", "×": r"$\times$", "–": "--", "→": r"$\rightarrow$"}
    return "".join(replaced.get(character, character) for character in text)


def csv_text(tables: Sequence[AccuracyTable]) -> str:
    """All cells of all tables, one per line, with the accuracy of every run."""
    rows = [
        {
            "table": table.name,
            "algorithm": label,
            "column": column,
            "n": cell.n,
            "mean": cell.mean,
            "sample_standard_deviation": cell.deviation,
            "best": int(cell.best),
            "values": " ".join(f"{value:.6g}" for value in cell.values),
        }
        for table in tables
        for label, cells in table.rows
        for column, cell in zip(table.columns, cells, strict=True)
    ]
    return pd.DataFrame(rows).to_csv(index=False, float_format="%.6g", lineterminator="\n")
