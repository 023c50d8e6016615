"""The curves of runs and suites as one picture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback

from firedistill.files import written_at_once
from firedistill.report.groups import read_study
from firedistill.run.directory import make_folder

logger = logging.getLogger(__name__)


def plot_runs(runs: Sequence[str | Path], path: str | Path, notes: list[str] | None = None, theme: str = "light") -> Path:
    """Draw the curves of runs and suites into a file (.png, .svg or .pdf; .png without a suffix), and return its path.

    Runs that differ only in their seed are one curve with a band, as in the report. Long curves are thinned out, which the title says.

    Args:
        notes: receives, in words, which runs and which parts of their files are left out.
        theme: "light" or "dark".

    Raises:
        ValueError: a path is neither a run directory nor a suite, no run has completed a step, or the folder cannot be made.
        OSError: the picture cannot be written.
    """
    # Both take a second to import, which training steps need not wait for.
    from firedistill.report.figures import save_picture
    from firedistill.report.paired import notes_on_problems

    study = read_study(runs)
    if notes is not None:
        notes += study.notes + notes_on_problems(study.settings, study.notes)
    path = Path(path) if Path(path).suffix else Path(path).with_suffix(".png")
    make_folder(path.parent, "-o")
    with written_at_once(path) as unfinished:
        save_picture(study, unfinished, theme)
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
