"""Signals that stop a run after the current step, with a checkpoint."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

ALWAYS = (signal.SIGTERM, signal.SIGINT)
TO_REPORT = 5.0  # seconds
# A closed terminal, the warnings of batch systems, and a limit of processor time; none of them exists on Windows.
UNLESS_USED = [getattr(signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signal, name)]
REQUESTS = (*ALWAYS, *UNLESS_USED)
# The process that imported this module, and its parent: the launcher, if torchrun started it.
_IMPORTED_BY, _PARENT = os.getpid(), os.getppid()


class StopOverdue(KeyboardInterrupt):
    """Raised in the main thread where a requested stop takes longer than it may."""


def end_later(number: int, frame: FrameType | None) -> None:
    """A handler: the process ends by the signal after `TO_REPORT` seconds, or at once by a second one."""
    signal.signal(number, signal.SIG_DFL)
    timer = threading.Timer(TO_REPORT, os.kill, [os.getpid(), number])
    timer.daemon = True
    timer.start()


class StopRequest(TrainerCallback):
    """Stops training with a checkpoint once any process has received a signal that asks for it.

    Used as a context, it handles SIGTERM and Ctrl-C, and SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU unless they are ignored (`nohup`) or
    have a handler. The first signal is recorded. A second Ctrl-C raises KeyboardInterrupt; so does a second SIGTERM
    after a second, since launchers repeat signals. Outside the main thread, where Python cannot handle signals, it does nothing.
    As a callback, it stops the trainer. An evaluation that the last step requires is left to the resumed run, since the sender of the
    signal may not wait for it. The last step of a run that another callback ends is evaluated and saved, as that of a whole run.

    A process of torchrun whose launcher has ended stops as if it had received SIGTERM. Once one process has ended, torchrun sends
    SIGTERM to the others: one that has left the context with an error ends `TO_REPORT` seconds later, after it has reported the error.

    Args:
        trainer: the trainer to stop.
        within: seconds after the first signal at which `StopOverdue` is raised; None for no limit.

    Attributes:
        signal: the number of the recorded signal, or None.
    """

    def __init__(self, trainer: Any, within: float | None = None):
        self.trainer, self.within = trainer, within
        self.signal: int | None = None
        self._recorded = 0.0  # when, by the monotonic clock; infinity where only another process has received one
        self._overdue = False
        self._ending = False  # a callback has asked for the end in the middle of a step
        self._timer: threading.Timer | None = None
        self._handlers: dict[int, Any] = {}
        self._ended = threading.Event()
        self._launcher = _PARENT if os.getpid() == _IMPORTED_BY else os.getppid()

    @property
    def name(self) -> str:
        """The name of the signal, or an empty string."""
        return signal.Signals(self.signal).name if self.signal is not None else ""

    def __enter__(self) -> StopRequest:
        self.signal, self._overdue, self._ending = None, False, False
        if threading.current_thread() is threading.main_thread():
            unused = [number for number in UNLESS_USED if signal.getsignal(number) is signal.SIG_DFL]
            self._handlers = {number: signal.signal(number, self._record) for number in (*ALWAYS, *unused)}
        self._ended.clear()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=self._watch_launcher, name="launcher watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if any(error) and self._handlers.get(signal.SIGTERM) is signal.SIG_DFL and "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGTERM, end_later)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal is recorded, or for this number of seconds."""
        until = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < until:
            time.sleep(min(0.2, seconds))

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._overdue:
            self._overdue = False  # once
            raise StopOverdue
        if self.signal is not None:
            if self._recorded == math.inf:  # another process has received one, and this is the first one here
                self._recorded = time.monotonic()
                return
            alone = number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ
            if number in ALWAYS and (alone or time.monotonic() > self._recorded + 1.0):
                raise KeyboardInterrupt
            return
        self.signal, self._recorded = number, time.monotonic()
        limit = "" if self.within is None else f", for at most {self.within:g} s"
        hint = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        with suppress(OSError):  # not `print`: the signal may have interrupted one
            os.write(2, f"\n{self.name}: finishing this step{limit}, then saving a checkpoint{hint}\n".encode())
        if self.within is not None and self._handlers:
            self._timer = threading.Timer(self.within, self._expire, [threading.main_thread().ident])
            self._timer.daemon = True
            self._timer.start()

    def _expire(self, main_thread: int) -> None:
        if not self._ended.is_set():
            self._overdue = True
            signal.pthread_kill(main_thread, signal.SIGTERM)

    def _watch_launcher(self) -> None:
        while self.signal is None and not self._ended.wait(1.0):
            if os.getppid() != self._launcher and self.signal is None:
                logger.error("the launcher (process %d) has ended; this process stops after the current step", self._launcher)
                self._record(signal.SIGTERM, None)

    # This callback is the last one: it sees what the others ask for.

    def on_step_begin(self, args, state, control, **kwargs):
        """A run ends after a whole step: the loop would leave this one at its next micro-batch."""
        self._ending |= control.should_training_stop or control.should_epoch_stop
        control.should_training_stop = control.should_epoch_stop = False

    on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_step_begin

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= self._ending | control.should_epoch_stop
        self._ending = control.should_training_stop
        if control.should_training_stop:
            self._end_with_this_step(args, control)
        self.trainer.evaluation_due = control.should_evaluate
        self.trainer.settle()
        if self._requested():
            control.should_evaluate = False
            control.should_save = control.should_training_stop = self._ending = True

    def on_log(self, args, state, control, **kwargs):
        if state.global_step and (control.should_training_stop or control.should_epoch_stop) and not self._ending:
            self._ending = control.should_training_stop = True
            self._end_with_this_step(args, control)
            self.trainer.evaluation_due = control.should_evaluate

    def _end_with_this_step(self, args, control):
        """The last step is evaluated and saved, whatever `eval_steps` and `save_steps` are."""
        control.should_evaluate = args.eval_strategy != "no" and self.trainer.eval_dataset is not None
        control.should_save = args.save_strategy != "no"

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step and self._requested():
            control.should_save = control.should_training_stop = self._ending = True
        elif state.global_step and (control.should_training_stop or control.should_epoch_stop):  # another callback's
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = self._ending = True

    def _requested(self) -> bool:
        """Whether any process has recorded a signal; called by all of them together."""
        signals = [number for number in gather_object([self.signal]) if number is not None]
        if signals and self.signal is None:  # this process may receive the same signal later, which then is not a second one
            self.signal, self._recorded = signals[0], math.inf
        if signals and self._timer is not None:  # the step has ended in time; the checkpoint may take longer
            self._timer.cancel()
        return bool(signals)
