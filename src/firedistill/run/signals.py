"""SIGTERM and Ctrl-C end a run after the step at hand, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

NOTE = "\n{name}: finishing this step, then saving a checkpoint{again}\n"


class StopRequest:
    """Remembers that someone asked the run to end. Used as a context, within which signals do not end the process.

    The first SIGTERM or Ctrl-C is remembered; a second Ctrl-C stops at once (KeyboardInterrupt). Outside the main thread, where
    Python takes no signals, nothing is changed.

    Attributes:
        signal: the number of the signal that came, or None.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal = number
        again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        with suppress(OSError):  # written past all buffers: the signal may have come in the middle of a print
            os.write(2, NOTE.format(name=self.name, again=again).encode())

    @property
    def name(self) -> str:
        """What came: SIGTERM, SIGINT, or nothing."""
        return signal.Signals(self.signal).name if self.signal is not None else ""


class StopOnSignal(TrainerCallback):
    """Ends training with a checkpoint once a `StopRequest` has been made on any process.

    An evaluation that the last step asks for is left to the continued run: who sent the signal may not wait for it.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if self.requested():
            self.trainer.evaluation_due = control.should_evaluate
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step and self.requested():
            control.should_save = control.should_training_stop = True

    def requested(self) -> bool:
        """Whether any process was asked to stop; every process asks alike."""
        stop = self.trainer.stop
        if stop is None:
            return False
        came = [number for number in gather_object([stop.signal]) if number is not None]
        if came and stop.signal is None:
            stop.signal = came[0]
        return bool(came)
