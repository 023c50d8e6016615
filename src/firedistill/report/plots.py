"""The charts of the page, as plotly.js takes them: traces and layouts without colours, which the page's script sets.

Every trace names its group and a role: `line`, `low` and `high` (the ends of a band), `seed`, `mark` (where a run went wrong), `dot`,
`small` and `before`. plotly.js reads a few tags in labels, so that every text of a label passes through `literal`.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import Any

from firedistill.report.charts import CHARTS, MEASURES, THINNED, Chart, Curve, rate_curve
from firedistill.report.groups import Group, Setting
from firedistill.report.intervals import Estimate, estimate
from firedistill.report.read import Run

# The chart on which an event is marked, by the column that shows it.
CHART_OF_COLUMN = {chart.y: chart.name for chart in reversed([*CHARTS, *MEASURES])} | {"truncated_rate": "response-length"}
# Points of a curve: the most that are drawn, the fewest (shorter curves are left to the tables), and the most with markers.
MOST_POINTS, FEWEST_POINTS, MARKED = 600, 3, 30
# Characters in a line of a name, on narrow and on wide screens.
NAME_WIDTHS = (13, 21)
LEARNING_RATES = "learning-rates"
# The charts with which their sections begin.
FIRST = ["final-accuracy", "accuracy", "sampled-accuracy", "sampled-answers", "gradient-norm", "entropy", "response-length"]


def literal(text: str) -> str:
    """Text for a label of plotly.js, which would read tags and entities in it."""
    return html.escape(text, quote=False)


def names(label: str) -> list[list[str]]:
    """The lines of a label on narrow and on wide screens."""
    return [[literal(line) for line in textwrap.wrap(label, width) or [" "]] for width in NAME_WIDTHS]


def plots_of(setting: Setting, charts: Sequence[Chart]) -> tuple[list[dict[str, Any]], list[str]]:
    """The charts of a setting, and in words those that are left out because all their values are the same."""
    made, constant = [dots(setting)], []
    runs = [run for group in setting.groups for run in group.runs]
    for chart in charts:
        points = [chart.points(run) for run in runs]
        values = {value for of_run in points for value in of_run.mean}
        if max(len(of_run.x) for of_run in points) >= FEWEST_POINTS:
            if len(values) > 1:
                made.append(lines(setting, chart))
            else:
                constant.append(f"{chart.title}: {values.pop():.4g} ({chart.unit})")
    made.append(learning_rates(setting))
    found = [plot["name"] for plot in made if plot]
    rank = dict(zip(found, range(len(found)), strict=True)) | {name: place - len(FIRST) for place, name in enumerate(FIRST)}
    return sorted((plot for plot in made if plot), key=lambda plot: (plot["section"], rank[plot["name"]])), constant


def plot(
    setting: Setting, name: str, title: str, section: str, notes: Sequence[str], x: str, y: str, **of: Any
) -> dict[str, Any]:
    """A chart.

    Args:
        notes: what it shows with bands, and with single seeds.
        of: `traces`, `xaxis` and `yaxis`.
    """
    layout = {axis: {"title": {"text": text}} | of.get(axis, {}) for axis, text in (("xaxis", x), ("yaxis", y))}
    heading = literal(f"{title} · {setting.title}")
    return {
        "name": name,
        "title": title,
        "heading": heading,
        "section": section,
        "notes": notes,
        "layout": layout,
        "traces": of["traces"],
    }


# ---- Curves --------------------------------------------------------------------------------------------------------------------


def lines(setting: Setting, chart: Chart) -> dict[str, Any]:
    shared = " (some runs shared their machine)" if chart.x == "cumulative_train_seconds" and any_shared(setting) else ""
    curves = [chart.curve(group.runs) for group in setting.groups]
    traces = [
        trace
        for number, (group, curve) in enumerate(zip(setting.groups, curves, strict=True))
        if curve.x
        for trace in group_traces(number, group, chart, curve.thinner(MOST_POINTS))
    ]
    thinned = f"; {THINNED}" if any(curve.of > MOST_POINTS for curve in curves) else ""
    smoothing = f"; running means of {chart.window} steps" if chart.window > 1 else ""
    note = chart.described(setting.groups) + thinned
    several = any(len(group.runs) > 1 for group in setting.groups)
    notes = [note, f"mean over seeds, and single seeds{smoothing}{thinned}" if several else note]
    section = "accuracy" if chart.held_out else "dynamics"
    axes = {"yaxis": {"type": "log", "tickformat": "~g"} if chart.logarithmic else {"type": "linear"}}
    return plot(setting, chart.name, chart.title + shared, section, notes, chart.x_title, chart.y_title, traces=traces, **axes)


def any_shared(setting: Setting) -> bool:
    return any(run.shared for group in setting.groups for run in group.runs)


def group_traces(number: int, group: Group, chart: Chart, curve: Curve) -> list[dict[str, Any]]:
    """Line and band of a group, its single runs if it has several, and where they went wrong."""
    hover = f"<br>{literal(chart.x_title)} %{{x:,.5~g}}<br>{literal(chart.y_title)} %{{y:.4~g}}"
    line = curve_traces(number, group.label, curve, hover, chart.logarithmic)
    if len(group.runs) > 1:
        for run in group.runs:
            points = chart.points(run, MOST_POINTS)
            x, y = points.x, short(points.mean, chart.logarithmic)
            line.append(line_trace("seed", number, f"{group.label}, seed {run.seed}", x, y, hover))
    marks = [mark for run in group.runs for mark in marks_of(run, group, chart, curve)]
    if marks:
        x, y, text = map(list, zip(*marks, strict=True))
        shown = {"text": text, "hovertemplate": "%{text}<extra></extra>"}
        line.append({"role": "mark", "group": number, "mode": "markers", "x": x, "y": y} | shown)
    return line


def curve_traces(number: int, label: str, curve: Curve, hover: str, logarithmic: bool = False) -> list[dict[str, Any]]:
    mean, low, high = (short(side, logarithmic) for side in (curve.mean, curve.low, curve.high))
    line = line_trace("line", number, label, curve.x, mean, hover)
    if low == high:
        return [line]
    if len(curve.x) <= MARKED:
        line["customdata"] = list(zip(low, high, strict=True))
        line["hovertemplate"] = f"<b>%{{meta}}</b>{hover} (%{{customdata[0]:.4~g}} to %{{customdata[1]:.4~g}})<extra></extra>"
    whole = [place for place, (below, above) in enumerate(zip(low, high, strict=True)) if None not in (below, above)]
    band: dict[str, Any] = {"group": number, "mode": "lines", "hoverinfo": "skip", "x": [curve.x[place] for place in whole]}
    ends = [
        band | {"role": role, "y": [side[place] for place in whole]} | fill
        for role, side, fill in (("low", low, {}), ("high", high, {"fill": "tonexty"}))
    ]
    return [*ends, line]


def line_trace(role: str, number: int, label: str, x: Sequence[float], y: Sequence[float | None], hover: str) -> dict[str, Any]:
    mode = "lines+markers" if len(x) <= MARKED and role == "line" else "lines"
    template = {"meta": literal(label), "hovertemplate": f"<b>%{{meta}}</b>{hover}<extra></extra>"}
    return {"role": role, "group": number, "mode": mode, "x": list(x), "y": list(y)} | template


def short(values: Sequence[float], logarithmic: bool) -> list[float | None]:
    """Four digits, and None where a logarithmic axis has no place."""
    return [None if logarithmic and value <= 0 else float(f"{value:.4g}") for value in values]


def marks_of(run: Run, group: Group, chart: Chart, curve: Curve) -> list[tuple[float, float, str]]:
    """Where a run went wrong, on the curve of its group; at its last point what lies beyond it."""
    found = []
    for event in run.events:
        if CHART_OF_COLUMN[event.key] == chart.name:
            at = next((place for place, x in enumerate(curve.x) if x >= event.step), len(curve.x) - 1)
            text = f"{group.label}, seed {run.seed}, step {event.step}: {event.rule}"
            found.append((min(event.step, curve.x[-1]), curve.mean[at], f"{literal(text)}<br>{literal(event.text)}"))
    return [mark for mark in found if not chart.logarithmic or mark[1] > 0]


def learning_rates(setting: Setting) -> dict[str, Any] | None:
    """Final accuracy against the learning rate, for methods that ran at several."""
    traces, ticks = [], set()
    for number, group in enumerate(setting.groups):
        curve = rate_curve(setting.sweep(group))
        if group.factor == 1 and len(curve.x) >= FEWEST_POINTS:
            traces += curve_traces(
                number, group.title + group.suffix, curve, "<br>learning rate %{x:.3~g}<br>accuracy (%) %{y:.4~g}"
            )
            ticks |= set(curve.x)
    if not traces:
        return None
    axis = {"type": "log", "tickvals": sorted(ticks), "ticktext": [f"{tick:.3g}" for tick in sorted(ticks)]}
    note = "± sample standard deviation over seeds; for a single seed the 95 % interval over problems"
    title, x, y = "Final accuracy at each learning rate", "peak learning rate", "accuracy (%)"
    return plot(setting, LEARNING_RATES, title, "accuracy", [note, note], x, y, traces=traces, xaxis=axis)


# ---- Final accuracies ----------------------------------------------------------------------------------------------------------


def dots(setting: Setting) -> dict[str, Any] | None:
    """The final accuracies with their intervals, the best one on top; None if no run is finished."""
    finals = [(found, number) for number, group in enumerate(setting.groups) if (found := estimate(group))]
    traces: list[dict[str, Any]] = []
    for place, (final, number) in enumerate(sorted(finals, key=lambda pair: pair[0].mean)):
        group = setting.groups[number]
        if (before := group.initial()) is not None:
            traces.append(small("before", number, [before], place, f"{group.label}, before training"))
        if sampled := estimate(group, "sampled_accuracy"):
            traces.append(dot(number, sampled, place - 0.3, f"{group.label}, sampled answers", "diamond-open"))
        traces.append(dot(number, final, place, f"{group.label}, greedy answers", "circle"))
        if len(final.values) > 1:
            traces.append(small("small", number, final.values, place + 0.25, f"{group.label}, single seeds"))
    if not traces:
        return None
    roles = {trace["role"] for trace in traces}
    with_samples = any(trace.get("marker", {}).get("symbol") == "diamond-open" for trace in traces)
    symbols = [
        "● greedy answers",
        "◇ sampled answers" if with_samples else "",
        "○ single seeds" if "small" in roles else "",
        "❘ before training" if "before" in roles else "",
    ]
    note = " · ".join(filter(None, [*symbols, "whiskers: 95 % interval over problems"]))
    title = "Accuracy after the last step"
    return plot(setting, "final-accuracy", title, "accuracy", [note, note], "right on held-out problems (%)", "", traces=traces)


def dot(number: int, found: Estimate, y: float, label: str, symbol: str) -> dict[str, Any]:
    whiskers = {"symmetric": False, "array": [found.high - found.mean], "arrayminus": [found.mean - found.low]}
    hover = f"<b>%{{meta}}</b><br>%{{x:.1f}} % (95 % interval {found.low:.1f} to {found.high:.1f})<extra></extra>"
    place = {"mode": "markers", "x": [found.mean], "y": [y], "marker": {"symbol": symbol, "size": 10}}
    return {"role": "dot", "group": number, "meta": literal(label), "hovertemplate": hover, "error_x": whiskers} | place


def small(role: str, number: int, values: Sequence[float], y: float, label: str) -> dict[str, Any]:
    marker = {"symbol": "line-ns", "size": 12} if role == "before" else {"symbol": "circle-open", "size": 5}
    place = {"mode": "markers", "x": list(values), "y": [y] * len(values), "marker": marker}
    return {
        "role": role,
        "group": number,
        "meta": literal(label),
        "hovertemplate": "%{meta}: %{x:.1f} %<extra></extra>",
    } | place
