"""Experiment trackers whose failures do not end a run."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class GuardedTracker(TrainerCallback):
    """A tracker's callback whose errors are counted and do not end the run: `metrics.jsonl` has every row in any case.

    Attributes:
        failed: calls that raised.
    """

    def __init__(self, tracker: TrainerCallback):
        self.tracker, self.failed = tracker, 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        call = getattr(self.tracker, name)

        def guarded(args, state, control, **kwargs):
            try:
                return call(args, state, control, **kwargs)
            except Exception as error:
                self.failed += 1
                if self.failed == 1:
                    logger.warning(
                        "the tracker %s failed in %s (%s: %s); the run goes on, and metrics.jsonl has every row",
                        type(self.tracker).__name__,
                        name,
                        type(error).__name__,
                        " ".join(str(error).split())[:200],
                    )
                return None

        return guarded


def guard_trackers(callbacks: list[TrainerCallback]) -> list[GuardedTracker]:
    """Replace the callbacks of `report_to` by guarded ones, in place; the guarded ones."""
    for position, callback in enumerate(callbacks):
        if type(callback).__module__.startswith("transformers.integrations"):
            callbacks[position] = GuardedTracker(callback)
    return [callback for callback in callbacks if isinstance(callback, GuardedTracker)]
