"""The paper's figures: a panel per model and task, a line per method, as SVG and PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firedistill.report.read import CHARTS, Chart, Curve, Group, Setting, Study, rate_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")
# The charts that are drawn at every learning rate too.
SWEPT = ("gradient-norm", "sampled-answers")


def write_figures(study: Study, folder: Path) -> list[Path]:
    """Every figure for which the runs have something to show, as .svg and .png files."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    figures = [(chart.name, method_figure(study, chart)) for chart in CHARTS]
    figures.append(("learning-rates", rate_figure(study)))
    figures += [(f"learning-rates-{chart.name}", rate_step_figure(study, chart)) for chart in CHARTS if chart.name in SWEPT]
    written = []
    for name, figure in figures:
        if figure is None:
            continue
        for suffix in FORMATS:
            path = folder / f"{name}.{suffix}"
            # The same runs give the same file: no date in it, and names that do not change.
            with matplotlib.rc_context({"svg.hashsalt": "firedistill", "svg.fonttype": "none"}):
                figure.savefig(path, dpi=160, metadata={"Date": None} if suffix == "svg" else None)
            written.append(path)
    return written


def method_figure(study: Study, chart: Chart) -> Figure | None:
    """One kind of curve: a panel per setting, a line per compared group."""
    panels = [
        (setting, [(group, chart.curve(group.runs)) for group in setting.compared])
        for setting in study.settings
        if setting.compared
    ]
    if not any(curve.x for _, curves in panels for _, curve in curves):
        return None

    def draw(axes: Axes, curves: Sequence[tuple[Group, Curve]]) -> None:
        for group, curve in curves:
            if curve.x:
                draw_curve(axes, curve, group.label, group.colour, group.broken, chart)

    title = f"{chart.title}\n{chart.averaged}"
    return panel_figure(panels, draw, chart.x_title, chart.y_title, title, chart.logarithmic)


def rate_figure(study: Study) -> Figure | None:
    """Final accuracy against the learning rate, for the methods that were run at several."""
    panels = []
    for setting in study.settings:
        sweeps = [(group, setting.sweep(group)) for group in setting.compared]
        curves = [(group, rate_curve(sweep)) for group, sweep in sweeps if len(sweep) > 1]
        if any(curve.x for _, curve in curves):
            panels.append((setting, curves))

    def draw(axes: Axes, curves: Sequence[tuple[Group, Curve]]) -> None:
        ticks = sorted({x for _, curve in curves for x in curve.x})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
        for group, curve in curves:
            error = [100 * (m - low) for m, low in zip(curve.mean, curve.low, strict=True)]
            values = [100 * m for m in curve.mean]
            style: dict[str, Any] = {"color": group.colour, "marker": "o", "markersize": 4, "capsize": 3}
            style["linestyle"] = "--" if group.broken else "-"
            axes.errorbar(curve.x, values, yerr=error, label=literal(group.label), **style)

    title = "Learning rates\nmean over seeds; bars: ± sample standard deviation"
    return panel_figure(panels, draw, "peak learning rate", "final accuracy (%)", title) if panels else None


def rate_step_figure(study: Study, chart: Chart) -> Figure | None:
    """One kind of curve over the steps at every learning rate: a panel per setting and method."""
    panels: list[tuple[Any, Any]] = []
    for setting in study.settings:
        for group in setting.compared:
            if len(sweep := setting.sweep(group)) > 1:
                panels.append((f"{setting.title}, {group.label}", [(g, chart.curve(g.runs)) for g in sweep]))

    colours = rate_colours([group.factor for _, curves in panels for group, _ in curves])

    def draw(axes: Axes, curves: Sequence[tuple[Group, Curve]]) -> None:
        for group, curve in curves:
            if curve.x:
                draw_curve(axes, curve, f"{group.factor:g}× rate", colours[f"{group.factor:g}"], False, chart)

    title = f"{chart.title} at different learning rates\n{chart.averaged}"
    if not any(curve.x for _, curves in panels for _, curve in curves):
        return None
    return panel_figure(panels, draw, chart.x_title, chart.y_title, title, chart.logarithmic, same_scale=True)


def rate_colours(factors: Sequence[float]) -> dict[str, str]:
    """A colour per learning rate, from light to dark, the same in every panel."""
    import matplotlib
    from matplotlib.colors import to_hex

    names = list(dict.fromkeys(f"{factor:g}" for factor in sorted(factors)))
    shades = matplotlib.colormaps["inferno_r"]
    return {name: to_hex(shades(0.2 + 0.7 * i / max(len(names) - 1, 1))) for i, name in enumerate(names)}


def panel_figure(
    panels: Sequence[tuple[Setting | str, Any]],
    draw: Callable[[Axes, Any], None],
    x_title: str,
    y_title: str,
    title: str,
    logarithmic: bool = False,
    same_scale: bool = False,
) -> Figure:
    """Panels three in a row under one title, with one legend for all of them below."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(max(4.6 * columns, 7.2), 3.3 * rows + 0.7), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=same_scale).ravel()
        handles: dict[str, Any] = {}
        for axes, (setting, content) in zip(grid, panels, strict=False):
            axes.set_title(literal(setting if isinstance(setting, str) else setting.title), fontsize=10)
            if logarithmic:
                axes.set_yscale("log")
            draw(axes, content)
            axes.set_xlabel(x_title)
            axes.set_ylabel(y_title)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            drawn, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.suptitle(title, fontsize=10)
        names = list(handles)
        # At this size a character takes about 0.07 inches, a legend's line with its gaps 0.6, and a row 0.18.
        fitting = int(figure.get_figwidth() / (0.07 * max(map(len, names), default=0) + 0.6))
        ncols = max(1, min(len(names), fitting))
        figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(names) / ncols))
        figure.legend(handles.values(), names, loc="outside lower center", ncols=ncols, frameon=False)
        return figure


def draw_curve(axes: Axes, curve: Curve, label: str, colour: str, broken: bool, chart: Chart) -> None:
    x, mean, low, high = curve.x, curve.mean, curve.low, curve.high
    if chart.logarithmic:  # a norm of exactly 0, from a step without a gradient, has no place on the axis
        mean, low, high = ([value if value > 0 else math.nan for value in side] for side in (mean, low, high))
    style = "--" if broken else "-"
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(x) == 1 or chart.name == "accuracy" else {}
    axes.plot(x, mean, style, color=colour, linewidth=1.4, label=literal(label), **marker)
    if low != high:
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def literal(text: str) -> str:
    """Names of models and tasks are never mathematics, and a label that begins with _ would be hidden."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
