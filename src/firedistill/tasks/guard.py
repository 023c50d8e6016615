"""Calls into user code that may raise, hang, or return anything: each ends with a result or a `TaskFault`."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, FeedbackField, Verdict

logger = logging.getLogger(__name__)


class TaskFault(Exception):
    """A task's method raised, timed out, or returned the wrong type; the message names the method and the fault."""


class GuardedTask:
    """A task whose `verify` always returns a verdict and whose `feedback` returns fields or raises `TaskFault`.

    All other attributes are the task's own.

    Args:
        task: its methods may raise, hang, or return anything.
        seconds: time limit of one call, enforced as `time_limit` describes; None for no limit.
    """

    def __init__(self, task: Task, seconds: float | None = None):
        self.task, self.seconds = task, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def verify(self, example: Example, response: str) -> Verdict:
        """The task's verdict, or an incorrect one marked `failed` if the task returns none."""
        try:
            return self._call("verify", Verdict, example, response)
        except TaskFault as fault:
            logger.warning("%s; the response counts as wrong and is left out of training", fault)
            return Verdict(False, None, str(example.answer), failed=True)

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        """The task's feedback.

        Raises:
            TaskFault: the task returns none.
        """
        fields = self._call("feedback", (tuple, list), example, response, verdict)
        wrong = [item for item in fields if not (isinstance(item, FeedbackField) and isinstance(item.text, str))]
        if wrong:
            raise TaskFault(f"{example.uid}: feedback holds a {type(wrong[0]).__name__}, expected FeedbackField(name, text)")
        return tuple(fields)

    def _call(self, name: str, kind: type | tuple[type, ...], example: Example, *rest: Any) -> Any:
        where = f"{example.uid}: {name} of {type(self.task).__name__}"
        try:
            with time_limit(self.seconds):
                value = getattr(self.task, name)(example, *rest)
        except TimeIsUp as error:
            raise TaskFault(f"{where} took longer than {self.seconds:g} s (task_timeout)") from error
        except (Exception, SystemExit) as error:
            raise TaskFault(f"{where} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        if not isinstance(value, kind):
            expected = "a Verdict" if kind is Verdict else "a tuple of FeedbackField"
            raise TaskFault(f"{where} returned a {type(value).__name__}, expected {expected}")
        return value


class TimeIsUp(BaseException):
    """Raised in a block that exceeds its time limit. An `except Exception` in user code does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeIsUp` in the block after `seconds`, and again every second in case the block suppresses it.

    Interrupts Python code, regular expressions, sleeps and waits; interrupts a loop in a C extension only when it returns. Has no
    effect outside the main thread, on systems without SIGALRM, or if `seconds` is None.
    """
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def up(number: int, frame: Any) -> None:
        raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, up)
    start = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # restart the timer that was running
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), interval)
