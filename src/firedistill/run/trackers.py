"""Experiment trackers whose failures do not stop a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

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
