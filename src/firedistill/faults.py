"""What can go wrong while a run goes on, each with one outcome, so that hours of work do not hang on one bad row.

`docs/reliability.md` has the table of faults, outcomes and the columns that count them.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback

from firedistill.feedback import FeedbackField
from firedistill.tasks.task import Example, Task, Verdict

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


# ---- Verifiers and feedback of users -----------------------------------------------------------------------------------------


class TaskFault(Exception):
    """A task's function raised, took too long, or returned something else; the message says which and what."""


class GuardedTask:
    """A task whose verdicts always come, and whose feedback comes or raises `TaskFault`. Everything else is the task's own.

    Args:
        task: whose functions may raise, hang, or return anything.
        seconds: limit for one call; None for no limit. It works in the main thread of systems with SIGALRM, as `time_limit` does.
    """

    def __init__(self, task: Task, seconds: float | None = None):
        self.task, self.seconds = task, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def verify(self, example: Example, response: str) -> Verdict:
        """The task's verdict; one marked `failed`, and not correct, if it gives none."""
        try:
            return self._call("verify", Verdict, example, response)
        except TaskFault as fault:
            logger.warning("%s; the response counts as wrong and is left out of training", fault)
            return Verdict(False, None, str(example.answer), failed=True)

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        """The task's feedback.

        Raises:
            TaskFault: there is none.
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
    """Raised inside a block that took too long; no `except Exception` of a user's code stops it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeIsUp` inside the block after so many seconds, and again every second for code that will not hear.

    Python code, regular expressions, sleeps and waits are interrupted; a loop inside a C extension only when it returns. Outside the
    main thread, and on systems without SIGALRM, there is no limit.
    """
    if seconds is None or not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def up(number: int, frame: Any) -> None:
        raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, up)
    begun = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # someone else's timer goes on
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3), interval)


# ---- Memory ------------------------------------------------------------------------------------------------------------------


# What a user can do.
SMALLER_ROLLOUTS = "sampling does not fit; lower rollout_batch_size, max_new_tokens or max_context_tokens"
SHORTER_CONTEXTS = "scoring a single response does not fit; lower max_context_tokens or max_new_tokens, or use quantization nf4"
SMALLER_MICRO_BATCHES = (
    "training does not fit; lower per_device_train_batch_size and raise gradient_accumulation_steps by the same factor (the result is "
    "the same), turn gradient_checkpointing on, and go on with --allow_changes and their names"
)


class OutOfMemory(ValueError):
    """Not even the smallest pieces fit into memory; the message says what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted, of the accelerator or of the machine."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in ("out of memory", "can't allocate memory"))
    )


def in_smaller_pieces(attempt: Callable[[], Result], shrink: Callable[[], bool], mend: str) -> Result:
    """`attempt()`, again with smaller pieces each time that memory runs out.

    Args:
        shrink: makes the pieces smaller; False if they are as small as they can be.
        mend: what the user can do then.

    Raises:
        OutOfMemory: the smallest pieces do not fit.
    """
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
        # Outside of the except block, where the traceback would hold on to the tensors.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not shrink():
            raise OutOfMemory(f"out of memory ({reason}): {mend}")


@contextmanager
def explained_memory(mend: str) -> Iterator[None]:
    """Turn an exhausted memory inside the block into an `OutOfMemory` that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory ({' '.join(str(error).split())[:200]}): {mend}") from error


# ---- Trackers ----------------------------------------------------------------------------------------------------------------


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
