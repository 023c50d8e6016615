"""The curves of one or several runs as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firedistill.report.read import column, running_mean
from firedistill.run.log import read_jsonl

# Panel title, column, logarithmic axis.
PANELS = [
    ("held-out accuracy", "accuracy", False),
    ("gradient norm before clipping", "grad_norm", True),
    ("correct rollouts", "correct_rate", False),
    ("response length (tokens)", "response_length", False),
    ("loss", "loss", False),
    ("tokens over the radius", "chi_active", False),
]


def plot_runs(runs: Sequence[str | Path], path: str | Path, labels: Sequence[str] | None = None) -> Path:
    """Draw the curves of run directories into a file (.png, .svg or .pdf; .png without a suffix), and return its path.

    Raises:
        ValueError: a folder has no rows in `metrics.jsonl`.
    """
    from matplotlib.figure import Figure  # takes a second to import, which training steps need not wait for

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    names = [Path(run).resolve().name for run in runs]
    labels = labels or (names if len(set(names)) == len(names) else [str(run) for run in runs])
    for run, label in zip(runs, labels, strict=True):
        metrics = read_jsonl(Path(run) / "metrics.jsonl")
        if not metrics:
            raise ValueError(f"{run} is not a run directory: it has no rows in metrics.jsonl")
        measured = [row for row in read_jsonl(Path(run) / "evals.jsonl") if row["n"]]
        steps, values, errors = ([row[name] for row in measured] for name in ("step", "accuracy", "stderr"))
        axes[0].errorbar(steps, values, yerr=errors, marker="o", markersize=3, capsize=2, label=label)
        for axis, (_, key, logarithmic) in zip(axes[1:], PANELS[1:], strict=True):
            steps, values = column([row for row in metrics if not logarithmic or row.get(key, 0) > 0], key)
            if steps:
                drawn = axis.plot(steps, values, alpha=0.3, linewidth=1)
                axis.plot(steps, running_mean(values, 5), color=drawn[0].get_color(), linewidth=1.6)
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
