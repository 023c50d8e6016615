"""SIGTERM and Ctrl-C stop a run after the current step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback


class StopRequest(TrainerCallback):
    """Stops training with a checkpoint once any process has received SIGTERM or Ctrl-C.

    Used as a context, it handles these signals: the first one is recorded, and a second Ctrl-C raises KeyboardInterrupt. Outside the
    main thread, where Python cannot handle signals, it does nothing. As a callback, it stops the trainer. An evaluation that the
    last step requires is left to the resumed run, since the sender of the signal may not wait for it.

    Attributes:
        signal: the number of the recorded signal, or None.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.signal: int | None = None
        self._handlers: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """SIGTERM, SIGINT, or an empty string."""
        return signal.Signals(self.signal).name if self.signal is not None else ""

    def __enter__(self) -> StopRequest:
        self.signal = None
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._record) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal = number
        hint = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        with suppress(OSError):  # not `print`: the signal may have interrupted one
            os.write(2, f"\n{self.name}: finishing this step, then saving a checkpoint{hint}\n".encode())

    def on_step_end(self, args, state, control, **kwargs):
        if self._requested():
            self.trainer.evaluation_due = control.should_evaluate
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step and self._requested():
            control.should_save = control.should_training_stop = True

    def _requested(self) -> bool:
        """Whether any process has recorded a signal; called by all of them together."""
        signals = [number for number in gather_object([self.signal]) if number is not None]
        if signals and self.signal is None:
            self.signal = signals[0]
        return bool(signals)
