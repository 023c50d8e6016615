"""The paper's figures: a panel per model and task, a line per method, as SVG and PNG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from firedistill.files import written_at_once
from firedistill.report.charts import CHARTS, THINNED, Chart, Curve, charts_of, rate_curve
from firedistill.report.groups import Group, Study, partition
from firedistill.report.palette import GROUND, Line
from firedistill.terminal import shortened

Curves = Sequence[tuple[Group, Curve]]
Panels = Sequence[tuple[str, Curves]]
LINE_STYLES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
# The charts that are also drawn at every learning rate.
SWEPT = ("gradient-norm", "sampled-answers", "policy-kl")
# Methods that a chart leaves out, as the paper does.
LEFT_OUT = {"gradient-norm": ("on_policy_sft",)}


def write_figures(study: Study, folder: Path) -> list[Path]:
    """Write every figure for which the runs have data, as .svg and .png files; returns the paths.

    A figure that cannot be drawn, because it has too many panels for instance, is noted in the study and left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    charts = charts_of(study.runs)
    figures = {chart.name: method_figure(study, chart) for chart in charts}
    figures["learning-rates"] = rate_figure(study)
    figures |= {f"learning-rates-{chart.name}": rate_step_figure(study, chart) for chart in charts if chart.name in SWEPT}
    written = []
    # Without a date and with fixed ids, the same runs give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "firedistill", "svg.fonttype": "none"}):
        for name, figure in figures.items():
            if figure is not None:
                try:
                    for ending, metadata in (("svg", {"Date": None}), ("png", None)):
                        with written_at_once(folder / f"{name}.{ending}") as unfinished:
                            figure.savefig(unfinished, dpi=160, metadata=metadata)
                except (ValueError, ArithmeticError, MemoryError) as error:
                    study.notes.append(f"The figure {name} is left out because it cannot be drawn: {error}.")
                else:
                    written += [folder / f"{name}.svg", folder / f"{name}.png"]
    return written


def method_figure(study: Study, chart: Chart) -> Figure | None:
    """A chart with a panel per setting and a line per compared group; None without data."""
    panels = [
        (s.title, [(g, chart.curve(g.runs)) for g in drawn_groups(s.compared, chart)]) for s in study.settings if s.compared
    ]

    def draw(axes: Axes, curves: Curves) -> None:
        for group, curve in curves:
            draw_curve(axes, curve, chart, group.label, group.line)

    title = f"{chart.title}\n{caption(chart, panels)}{remarks(study, chart)}"
    return panel_figure(panels, draw, chart.x_title, chart.y_title, title, chart.logarithmic)


def drawn_groups(groups: Sequence[Group], chart: Chart) -> list[Group]:
    return [group for group in groups if group.method not in LEFT_OUT.get(chart.name, ())]


def remarks(study: Study, chart: Chart) -> str:
    """What a reader of the chart must know about the runs."""
    left_out = {g.title for _, g in study.groups if g.method in LEFT_OUT.get(chart.name, ())}
    text = f"; without {', '.join(sorted(left_out))}, as in the paper" if left_out else ""
    if chart.x == "cumulative_train_seconds" and any(run.shared for run in study.runs):
        text += "; some runs shared their machine: times are not comparable"
    return text


def rate_figure(study: Study) -> Figure | None:
    """Final accuracy against the learning rate, for the methods that ran at several; None without data."""
    panels = []
    for setting in study.settings:
        sweeps = [(group, setting.sweep(group)) for group in setting.compared]
        curves = [(group, rate_curve(sweep)) for group, sweep in sweeps if len(sweep) > 1]
        if any(curve.x for _, curve in curves):
            panels.append((setting.title, curves))

    def draw(axes: Axes, curves: Curves) -> None:
        ticks = sorted({x for _, curve in curves for x in curve.x})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
        for group, curve in curves:
            mean = np.array(curve.mean)
            error = [mean - curve.low, curve.high - mean]
            style: dict[str, Any] = {"color": group.line.light, "marker": "o", "markersize": 4, "capsize": 3}
            style["linestyle"] = LINE_STYLES[group.line.style]
            axes.errorbar(curve.x, curve.mean, yerr=error, label=literal(group.label), **style)

    title = "Learning rates\nbars: ± sample standard deviation over seeds; 95 % interval over problems for a single seed"
    return panel_figure(panels, draw, "peak learning rate", "final accuracy (%)", title)


def rate_step_figure(study: Study, chart: Chart) -> Figure | None:
    """A chart with a panel per setting and method and a line per learning rate; None without data."""
    panels = []
    for setting in study.settings:
        for group in drawn_groups(setting.compared, chart):
            if len(sweep := setting.sweep(group)) > 1:
                panels.append((f"{setting.title}, {group.label}", [(g, chart.curve(g.runs)) for g in sweep]))
    colours = rate_colours([group.factor for _, curves in panels for group, _ in curves])

    def draw(axes: Axes, curves: Curves) -> None:
        for group, curve in curves:
            draw_curve(axes, curve, chart, f"{group.factor:g}× rate", colours[f"{group.factor:g}"])

    title = f"{chart.title} at different learning rates\n{caption(chart, panels)}{remarks(study, chart)}"
    return panel_figure(panels, draw, chart.x_title, chart.y_title, title, chart.logarithmic, same_scale=True)


def caption(chart: Chart, panels: Panels) -> str:
    curves = [pair for _, of_panel in panels for pair in of_panel]
    return chart.caption((group for group, _ in curves), (curve for _, curve in curves))


def rate_colours(factors: Sequence[float]) -> dict[str, Line]:
    """A shade of one hue per learning rate, from light to dark, the same in every panel."""
    names = list(dict.fromkeys(f"{factor:g}" for factor in sorted(factors)))
    shades = matplotlib.colormaps["Blues"]
    return {name: Line(to_hex(shades(0.58 + 0.42 * i / max(len(names) - 1, 1)))) for i, name in enumerate(names)}


def panel_figure(
    panels: Panels,
    draw: Callable[[Axes, Curves], None],
    x_title: str,
    y_title: str,
    title: str,
    logarithmic: bool = False,
    same_scale: bool = False,
) -> Figure | None:
    """Panels, three in a row, with one title above and one legend below all of them; None if no curve has a point."""
    if not any(curve.x for _, curves in panels for _, curve in curves):
        return None
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(max(4.6 * columns, 7.2), 3.3 * rows + 0.7), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=same_scale).ravel()
        for axes, (panel_title, curves) in zip(grid, panels, strict=False):
            axes.set_title(literal(panel_title), fontsize=10)
            if logarithmic:
                axes.set_yscale("log")
            draw(axes, curves)
            axes.set_xlabel(x_title)
            axes.set_ylabel(y_title)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        add_title(figure, title.split("\n"), fontsize=10)
        add_legend(figure)
        return figure


def draw_curve(axes: Axes, curve: Curve, chart: Chart, label: str, line: Line, theme: str = "light") -> None:
    """Draw the line and the band of a curve, if it has points; one or two are dots with whiskers."""
    if not curve.x:
        return
    mean, low, high = curve.mean, curve.low, curve.high
    if chart.logarithmic:  # a step without a gradient has norm 0, which a logarithmic axis cannot show
        mean, low, high = ([value if value > 0 else math.nan for value in side] for side in (mean, low, high))
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(curve.x) < 3 or chart.evaluated else {}
    colour, style = getattr(line, theme), LINE_STYLES[line.style] if len(curve.x) > 2 else ""
    axes.plot(curve.x, mean, linestyle=style, color=colour, linewidth=1.4, label=literal(label), **marker)
    if low != high and len(curve.x) < 3:
        axes.errorbar(curve.x, mean, [np.subtract(mean, low), np.subtract(high, mean)], fmt="none", ecolor=colour, capsize=2)
    elif low != high:
        axes.fill_between(curve.x, low, high, color=colour, alpha=0.13, linewidth=0)


# ---- One picture of a study ----------------------------------------------------------------------------------------------------

PANELS = ["accuracy", "sampled-answers", "gradient-norm", "entropy", "response-length", "generated-tokens"]
# In place of the last panels if all runs are of one method: losses of different methods cannot be compared.
PANELS_OF_ONE = [
    Chart("over-radius", "Tokens over the radius", "share (%)", "chi_active", y_factor=100.0, window=11),
    Chart("loss", "Loss", "loss", "loss", window=11),
]
THEMES = {"light": ("#1b1f24", GROUND[0]), "dark": ("#e7eaee", GROUND[1])}


def panels_of(study: Study) -> list[Chart]:
    """What the picture shows: held-out accuracy, and the dynamics."""
    charts = {chart.name: chart for chart in CHARTS}
    of_one = PANELS_OF_ONE if len({group.method for _, group in study.groups}) == 1 else []
    wanted = [charts[PANELS[0]], *of_one, *(charts[name] for name in PANELS[1:])]
    return [chart for chart in wanted if any(map(chart.measured, study.runs))][:6] or [charts["gradient-norm"]]


def save_picture(study: Study, path: Path, theme: str = "light") -> None:
    """Draw a study into a file: panels in two rows, or a row for each setting if there are several.

    Raises:
        ValueError: matplotlib cannot write such a file, or the picture has too many panels.
    """
    ink, ground = THEMES[theme]
    colours: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
    )
    colours |= {"figure.facecolor": ground, "axes.facecolor": ground, "grid.color": ink}
    charts = panels_of(study)
    several = len(study.settings) > 1
    columns = len(charts) if several else min(3, len(charts))
    rows = len(study.settings) if several else math.ceil(len(charts) / columns)
    with matplotlib.rc_context(colours | {"font.size": 9, "svg.hashsalt": "firedistill", "svg.fonttype": "none"}):
        figure = Figure(figsize=(max(3.7 * columns, 5), 2.9 * rows + 0.9), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        panels = [(setting, chart) for setting in study.settings for chart in charts]
        curves = []
        for axes, (setting, chart) in zip(grid, panels, strict=False):
            title = f"{setting.title}: {chart.title.lower()}" if several else chart.title
            axes.set_title(literal(title), fontsize=10, loc="left")
            if chart.logarithmic:
                axes.set_yscale("log")
            for group in setting.groups:
                curves.append(chart.curve(group.runs))
                draw_curve(axes, curves[-1], chart, group.label, group.line, theme)
            axes.set_xlabel(chart.x_title)
            axes.set_ylabel(chart.y_title)
            axes.grid(alpha=0.15, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        groups = [group for _, group in study.groups]
        kinds = partition(charts, lambda chart: chart.described(groups))
        bands = [f"{', '.join(c.title for c in of)}: {text}" if len(kinds) > 1 else text for text, of in kinds.items()]
        thinned = [THINNED] if any(curve.thinned for curve in curves) else []
        title = shortened(study.title if several else study.settings[0].title, 100)
        add_title(figure, [title, *bands, *thinned], fontsize=9)
        add_legend(figure)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def add_title(figure: Figure, lines: Sequence[str], fontsize: float) -> None:
    """A title above all panels, its lines wrapped to the width of the figure."""
    characters = int(figure.get_figwidth() / (0.0078 * fontsize))  # each about 0.0078 inches per point wide
    text = "\n".join(textwrap.fill(line, characters) for line in lines)
    figure.suptitle(text.replace("$", r"\$"), fontsize=fontsize)


def add_legend(figure: Figure) -> None:
    """One legend below all panels; the figure grows by its height."""
    handles = {label: drawn for axes in figure.axes for drawn, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    # At this font size a character is about 0.07 inches wide, a legend line with its gaps 0.6, and a legend row 0.18 high.
    fitting = int(figure.get_figwidth() / (0.07 * max(map(len, handles), default=0) + 0.6))
    ncols = max(1, min(len(handles), fitting))
    figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(handles) / ncols))
    figure.legend(handles.values(), list(handles), loc="outside lower center", ncols=ncols, frameon=False)


def literal(text: str) -> str:
    """Keep matplotlib from reading a name as mathematics ($) or hiding its label (_ at the start), and the name from being long."""
    text = shortened(text, 100)
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
