"""Experiment trackers whose failures do not stop a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class GuardedTracker(TrainerCallback):
    """Forwards all events to a tracker's callback; counts its exceptions instead of raising them.

    Attributes:
        failed: number of calls that raised.
    """

    def __init__(self, tracker: TrainerCallback):
        self.failed = 0
        for name in dir(tracker):
            if name.startswith("on_"):
                setattr(
                    self, name, partial(self._forward, getattr(tracker, name), f"{type(tracker).__name__} failed in {name}")
                )

    def _forward(self, call: Callable, failure: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                logger.warning("the tracker %s (%s); training continues, and metrics.jsonl has every step", failure, problem)
            return None


def guard_trackers(callbacks: list[TrainerCallback]) -> list[GuardedTracker]:
    """Replace the callbacks of `report_to` in the list by guarded ones, and return those."""
    for position, callback in enumerate(callbacks):
        if type(callback).__module__.startswith("transformers.integrations"):
            callbacks[position] = GuardedTracker(callback)
    return [callback for callback in callbacks if isinstance(callback, GuardedTracker)]
