"""The curves of one or several runs as one picture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import TrainerCallback

from firedistill.files import written_at_once
from firedistill.report.charts import THINNED, drawn
from firedistill.report.log import EVALUATIONS, METRICS, read_log
from firedistill.report.read import UNREADABLE, left_out, running_mean, shown

logger = logging.getLogger(__name__)

# Panel title, column, logarithmic axis.
PANELS = [
    ("held-out accuracy", "accuracy", False),
    ("gradient norm before clipping", "grad_norm", True),
    ("correct rollouts", "correct_rate", False),
    ("response length (tokens)", "response_length", False),
    ("loss", "loss", False),
    ("tokens over the radius", "chi_active", False),
]


def plot_runs(
    runs: Sequence[str | Path], path: str | Path, labels: Sequence[str] | None = None, notes: list[str] | None = None
) -> Path:
    """Draw the curves of run directories into a file (.png, .svg or .pdf; .png without a suffix), and return its path.

    Long curves are thinned out, which the title says.

    Args:
        labels: of the runs; by default the names of their folders.
        notes: receives, in words, which runs and which parts of their files are left out.

    Raises:
        ValueError: no folder has rows in `metrics.jsonl`.
        OSError: the picture cannot be written.
    """
    from matplotlib.figure import Figure  # takes a second to import, which training steps need not wait for

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    names = [Path(run).resolve().name for run in runs]
    labels = labels or (names if len(set(names)) == len(names) else [str(run) for run in runs])
    notes = [] if notes is None else notes
    thinned = False
    for run, label in zip(runs, labels, strict=True):
        found: list[str] = []
        try:
            metrics = read_log(Path(run) / "metrics.jsonl", METRICS, found)
            evaluations = read_log(Path(run) / "evals.jsonl", EVALUATIONS, found)
            if not len(metrics):
                raise ValueError(f"{run} is not a run directory: it has no rows in metrics.jsonl")
        except UNREADABLE as error:
            notes.append(left_out(run, error))
            continue
        notes += [f"{shown(run)}, {note}." for note in found]
        steps, values = evaluations.column("accuracy")
        errors = evaluations["stderr"][np.isfinite(evaluations["accuracy"])]
        errors = np.where(np.isfinite(errors) & (errors >= 0), errors, np.nan)
        name = shown(label).replace("$", r"\$")
        axes[0].errorbar(steps, values, yerr=errors, marker="o", markersize=3, capsize=2, label=name)
        for axis, (_, key, logarithmic) in zip(axes[1:], PANELS[1:], strict=True):
            steps, values = metrics.column(key)
            if logarithmic:
                steps, values = steps[values > 0], values[values > 0]
            thinned |= len(steps) > len(drawn(values, values))
            colour = None
            for side, style in ((values, {"alpha": 0.3, "linewidth": 1}), (running_mean(values, 5), {"linewidth": 1.6})):
                kept = drawn(side, side)
                if len(kept):
                    colour = axis.plot(steps[kept], side[kept], color=colour, **style)[0].get_color()
    if not axes[0].containers:
        raise ValueError(f"there is nothing to draw. {' '.join(notes)}")
    if thinned:
        figure.suptitle(THINNED, fontsize=8)
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
    with written_at_once(path) as unfinished:
        figure.savefig(unfinished, dpi=140)
    return path


class CurvesAtTheEnd(TrainerCallback):
    """Draws the curves of the run when training ends or stops."""

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.run_dir)
            try:
                plot_runs([folder], folder / "curves.png")
            except (OSError, ValueError) as error:
                logger.error("curves.png could not be written (%s); later: firedistill report %s -o curves.png", error, folder)
