"""Methods of tasks that run beside the trainer, several at a time: those that are `async def` in an event loop of their own thread, and
those of a task that allows it (`Task.at_once`) in further threads.

They share the process with the trainer and must leave its settings alone: the working directory, signal handlers, PyTorch's defaults.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from functools import cache
from typing import Any

AT_ONCE = 32  # coroutines that run at the same time
GRACE = 5.0  # seconds after its time limit in which a coroutine must have ended


class TimeLimit(Exception):
    """A coroutine took longer than its limit."""


class Loop:
    """A thread with an event loop.

    Args:
        at_once: coroutines that run at the same time; the others wait, and their time has not begun.

    Attributes:
        blocked: a coroutine did not give up control in time, so that no other one can run; its thread is left to itself.
    """

    _current: Loop | None = None

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self.blocked = False
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(at_once))  # which starts its threads when they are needed
        self.free = asyncio.Semaphore(at_once)
        threading.Thread(target=self.loop.run_forever, name="async task", daemon=True).start()

    @classmethod
    def running(cls) -> Loop:
        """The loop of this process that is not blocked."""
        if cls._current is None or cls._current.blocked:
            cls._current = Loop()
        return cls._current


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns or raises, in a thread of its own: one that hangs takes no place of others and ends with the process."""
    found: Future[Any] = Future()
    found.set_running_or_notify_cancel()  # a coroutine that gives up leaves it as it is

    def run() -> None:
        try:
            found.set_result(function(*arguments))
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # which would end the loop, or be lost in it
            found.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="task", daemon=True).start()
    return await asyncio.wrap_future(found)


@cache
def loop_of_threads(at_once: int) -> Loop:
    """The loop of this process whose coroutines each wait for a thread."""
    return Loop(at_once)


class AsyncCall:
    """A coroutine that runs, or waits for its turn.

    Args:
        function: makes the coroutine.
        seconds: its time limit from when it begins; None for no limit.
        loop: where it runs; by default in `Loop.running()`, and in the next one if that is blocked.
    """

    def __init__(self, function: Callable[[], Coroutine[Any, Any, Any]], seconds: float | None, loop: Loop | None = None):
        self.function, self.seconds, self.loop = function, seconds, loop
        self.start()

    def start(self) -> None:
        self.began: float | None = None
        self.home = self.loop or Loop.running()
        self.future: Future[Any] = asyncio.run_coroutine_threadsafe(self._run(), self.home.loop)

    async def _run(self) -> Any:
        async with self.home.free:
            self.began = time.monotonic()
            try:
                async with asyncio.timeout(self.seconds) as limit:
                    return await self.function()
            except TimeoutError as error:
                if limit.expired():
                    raise TimeLimit from error
                raise

    def result(self) -> Any:
        """What the coroutine returns or raises; waits for it.

        Raises:
            TimeLimit: it took longer than its limit, also where it does not end when it is cancelled.
        """
        while True:
            try:
                return self.future.result(timeout=0.2)
            except StillRunning:
                if self.future.done():
                    return self.future.result()
            if self.began is not None and self.seconds is not None and time.monotonic() > self.began + self.seconds + GRACE:
                self.home.blocked = True
                raise TimeLimit
            if self.began is None and self.home.blocked:
                self.start()
