"""Experiment trackers: their failures do not stop a run, and every run is one of its own there."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from firedistill.files import write_text
from firedistill.run.directory import RUN_NAME

logger = logging.getLogger(__name__)


class GuardedTracker(TrainerCallback):
    """Forwards the events of a training to a tracker's callback; counts its exceptions instead of raising them.

    An event outside of a training is dropped: wandb and trackio would begin a run for it, to which the next training would then log.

    Args:
        tracker: a callback of transformers.

    Attributes:
        failed: number of calls that raised.
    """

    def __init__(self, tracker: TrainerCallback):
        self.tracker: Any = tracker
        self.failed, self._training, self._begun = 0, False, False
        for name in dir(tracker):
            if name.startswith("on_"):
                setattr(self, name, partial(self._forward, name))

    def _forward(self, name: str, args: Any, *arguments: Any, **kwargs: Any) -> Any:
        if name == "on_train_begin":
            self._training = True
        if not self._training:
            return None
        before, named = self._run(), "WANDB_PROJECT" in os.environ
        os.environ.setdefault("WANDB_PROJECT", args.project)
        try:
            return self._guarded(name, getattr(self.tracker, name), args, *arguments, **kwargs)
        finally:
            self._begun |= self._run() not in (None, before)
            if not named:
                os.environ.pop("WANDB_PROJECT", None)

    def end(self, failed: bool) -> None:
        """Finish the run that wandb or trackio has begun in this training, whether or not the training came to its end.

        Args:
            failed: the training raised an exception.
        """
        if self._begun and self.tracker._initialized:  # trackio finishes its run at the end of a whole training
            if hasattr(self.tracker, "_wandb"):
                self._guarded("finish", self.tracker._wandb.finish, exit_code=int(failed))
            else:
                self._guarded("finish", self.tracker._trackio.finish)
            self.tracker._initialized = False
        self._training = self._begun = False

    def _run(self) -> Any:
        """The run to which wandb or trackio logs at present; None for another tracker."""
        if hasattr(self.tracker, "_wandb"):
            return self.tracker._wandb.run
        with suppress(AttributeError):  # another tracker, or a trackio that keeps its run elsewhere
            return self.tracker._trackio.context_vars.current_run.get()
        return None

    def _guarded(self, name: str, call: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                tracker, problem = type(self.tracker).__name__, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                logger.warning(
                    "the tracker %s failed in %s (%s); training continues, and metrics.jsonl has every step",
                    tracker,
                    name,
                    problem,
                )
            return None


def check_trackers(names: str | Sequence[str] | None) -> None:
    """Raise ImportError for a tracker of `report_to` whose package is not installed."""
    named = {names} if isinstance(names, str) else set(names or ())
    for name in sorted(named & set(INTEGRATION_TO_CALLBACK) - set(get_available_reporting_integrations())):
        raise ImportError(f"report_to {name}: its package is not installed: pip install {name}, or leave report_to out")


def guard_trackers(callbacks: list[TrainerCallback]) -> list[GuardedTracker]:
    """Replace the callbacks of `report_to` in the list by guarded ones, and return those."""
    for position, callback in enumerate(callbacks):
        if type(callback).__module__.startswith("transformers.integrations"):
            callbacks[position] = GuardedTracker(callback)
    return [callback for callback in callbacks if isinstance(callback, GuardedTracker)]


def name_in_trackers(folder: Path, name: str, step: int) -> str:
    """The name under which trackers show a run; it is stored in the run directory.

    The name of the folder gets a random suffix, because trackio appends to an earlier run of the same name.

    Args:
        name: `run_name`.
        step: the optimizer step after which the run continues, with the name that it has; 0 for a new run.
    """
    file, default = folder / RUN_NAME, name == folder.name
    if step:
        return file.read_text(encoding="utf-8") if default and file.is_file() else name
    name = f"{name}-{secrets.token_hex(3)}" if default else name
    write_text(file, name)
    return name
