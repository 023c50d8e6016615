"""What a call of a program of others may do to the process: use time (`time_limit`) and leave settings behind (`kept_state`)."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LONGEST_LIMIT = 1e6  # seconds; timers accept no infinite ones


class TimeIsUp(BaseException):
    """Raised in a block that exceeds its time limit. An `except Exception` in user code does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeIsUp` in the block after `seconds`, and again every second in case the block suppresses it.

    Interrupts Python code, regular expressions, sleeps and waits; interrupts a loop in a C extension only when it returns. SIGALRM and
    its timer belong to the block. The limit has a signal of its own (SIGVTALRM), sent by a timer of processor time, which also counts
    while the block keeps other threads from running, and by a thread, which also counts while the block sleeps. Has no effect outside
    the main thread, on systems without these signals, or if `seconds` is None.
    """
    if seconds is None or not hasattr(signal, "SIGVTALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    seconds = min(seconds, LONGEST_LIMIT)
    deadline, ended = time.monotonic() + seconds, False

    def up(number: int, frame: Any) -> None:
        if not ended and time.monotonic() >= deadline:
            raise TimeIsUp

    handler = signal.signal(signal.SIGVTALRM, up)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    reminder = _Reminder.running()
    before = reminder.remind_at(deadline)
    try:
        try:
            yield
        finally:
            ended = True
    finally:
        ended = True  # again, because the time may have been up just before the first one
        reminder.remind_at(before)
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)  # a system call: a signal that is on its way arrives here, at `up`
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if handler is None else handler)


class _Reminder(threading.Thread):
    """Sends SIGVTALRM to the main thread once a time has come, and every second until another time is set.

    Attributes:
        time: in seconds of `time.monotonic`.
        wakes: the time for which the thread waits; it looks again then, so that later times need not wake it.
    """

    _current: _Reminder | None = None

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.time = self.wakes = math.inf
        self.changed = threading.Condition()

    @classmethod
    def running(cls) -> _Reminder:
        """The thread of this process; a forked process starts its own."""
        if cls._current is None or not cls._current.is_alive():
            cls._current = _Reminder()
            with suppress(RuntimeError):  # no further thread can be started: a block that sleeps is not interrupted
                cls._current.start()
        return cls._current

    def run(self) -> None:
        main = threading.main_thread().ident
        assert main is not None  # it runs
        with self.changed:
            while True:
                now = time.monotonic()
                if now >= self.time:
                    signal.pthread_kill(main, signal.SIGVTALRM)
                    self.time = now + 1.0
                self.wakes = self.time
                self.changed.wait(None if self.time == math.inf else self.time - now)

    def remind_at(self, when: float) -> float:
        """Set the time; returns the one that was set before."""
        with self.changed:
            before, self.time = self.time, when
            if when < self.wakes:
                self.changed.notify()
        return before


_ALARM = hasattr(signal, "SIGALRM")
_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPIPE")  # what stops a run
    if hasattr(signal, name)
]


@contextmanager
def kept_state() -> Iterator[None]:
    """Restore what a block may leave behind and a run depends on.

    That is: the working directory, `sys.stdin`, `sys.stdout` and `sys.stderr`, PyTorch's gradient mode, default dtype and number of
    threads, and, in the main thread, the handlers of the signals that stop a run. The alarm timer starts disarmed; one that was running
    is continued afterwards. A process that the block forks ends with the block. The global random generators are left alone, since a
    task may draw from them.
    """
    folder, streams, settings = _working_directory(), (sys.stdin, sys.stdout, sys.stderr), _torch_settings()
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS if in_main}
    process = os.getpid()
    started, (left, interval) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, 0) if in_main and _ALARM else (0.0, 0.0)
    ring = signal.getsignal(signal.SIGALRM) if left else None
    try:
        yield
    finally:
        if os.getpid() != process:  # or there would be two trainers
            os._exit(1)
        if folder is not None and _working_directory() != folder:
            with suppress(OSError):
                os.chdir(folder)
        sys.stdin, sys.stdout, sys.stderr = streams
        if settings is not None and settings != _torch_settings():
            torch: Any = sys.modules["torch"]
            torch.set_grad_enabled(settings[0])
            torch.set_default_dtype(settings[1])
            torch.set_num_threads(settings[2])
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        if in_main and _ALARM:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if ring is not None:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)


def _working_directory() -> str | None:
    """None if it has been deleted."""
    with suppress(OSError):
        return os.getcwd()
    return None


def _torch_settings() -> tuple[bool, Any, int] | None:
    """None if PyTorch is not in use; this module does not import it."""
    torch: Any = sys.modules.get("torch")
    return (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()) if torch else None
