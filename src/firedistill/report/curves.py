"""The curves of one or several runs as one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from firedistill.report.read import running_mean
from firedistill.run.log import read_jsonl

# Panel title, key, logarithmic axis.
PANELS = [
    ("held-out accuracy", "accuracy", False),
    ("gradient norm before clipping", "grad_norm", True),
    ("correct rollouts", "correct_rate", False),
    ("response length (tokens)", "response_length", False),
    ("loss", "loss", False),
    ("tokens over the radius", "chi_active", False),
]


def plot_runs(runs: Sequence[str | Path], path: str | Path, labels: Sequence[str] | None = None) -> Path:
    """Draw the curves of run directories into a file (.png, .svg or .pdf).

    Raises:
        ValueError: a folder without `metrics.jsonl`.
    """
    from matplotlib.figure import Figure  # takes a second to import; not needed by a training step

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    names = [Path(run).resolve().name for run in runs]
    labels = labels or (names if len(set(names)) == len(names) else [str(run) for run in runs])
    for run, label in zip(runs, labels, strict=True):
        metrics, evaluations = read_jsonl(Path(run) / "metrics.jsonl"), read_jsonl(Path(run) / "evals.jsonl")
        if not metrics:
            raise ValueError(f"{run} is not a run directory: it has no rows in metrics.jsonl")
        for axis, (_, key, logarithmic) in zip(axes, PANELS, strict=True):
            if key == "accuracy":
                measured = [row for row in evaluations if row["n"]]
                steps, values, errors = ([row[name] for row in measured] for name in ("step", key, "stderr"))
                axis.errorbar(steps, values, yerr=errors, marker="o", markersize=3, capsize=2, label=label)
                continue
            points = [(row["step"], row[key]) for row in metrics if math.isfinite(row.get(key, math.nan))]
            points = [(step, value) for step, value in points if value > 0 or not logarithmic]
            if points:
                drawn = axis.plot(*zip(*points, strict=True), alpha=0.3, linewidth=1)
                xs, ys = zip(*points, strict=True)
                axis.plot(xs, running_mean(ys, 5), color=drawn[0].get_color(), linewidth=1.6)
    for axis, (title, _, logarithmic) in zip(axes, PANELS, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("optimizer step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        if logarithmic and axis.lines:
            axis.set_yscale("log")
    axes[0].legend(fontsize=8)
    path = Path(path) if Path(path).suffix else Path(path).with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return path
