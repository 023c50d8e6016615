"""Comparisons by libraries that must not see the text of a model in the trainer's process: they evaluate it, or compute without end."""

from __future__ import annotations

import pickle
import selectors
import subprocess
import sys
import threading
from typing import Any

STARTING_SECONDS = 120.0
SCORING_SECONDS = 5.0
MEMORY = 4 << 30  # bytes of address space


class IsolatedScorer:
    """A process of its own that turns a request into a number, with limits on time and memory. It starts with the first request.

    Args:
        source: a program that defines `score(*request)`, a number. `sys.argv[1:]` are the arguments.
        arguments: texts for the program.
        seconds: limit of one request; a process that takes longer is ended, and the next request starts a new one.
    """

    PROGRAM = """
import os, pickle, sys
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
except (ImportError, ValueError, OSError):
    pass
{source}
print(0.0, file=replies, flush=True)
while True:
    request = pickle.load(sys.stdin.buffer)  # EOFError ends the process
    try:
        number = float(score(*request))
    except BaseException:
        number = 0.0
    print(number, file=replies, flush=True)
"""

    def __init__(self, source: str, *arguments: str, seconds: float = SCORING_SECONDS):
        self.source, self.arguments, self.seconds = source, arguments, seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.lock = threading.Lock()

    def score(self, *request: Any) -> float:
        """What the program returns; 0.0 if it raises, ends, or takes too long."""
        with self.lock:
            self.start()
            if not self.ready:
                self._read(STARTING_SECONDS)  # waits for slow imports, which the time limit excludes
                self.ready = self.process is not None
            return self._ask(request)

    def start(self) -> None:
        """Start the process if there is none, without waiting for it."""
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        program = self.PROGRAM.replace("{memory}", str(MEMORY)).replace("{source}", self.source)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _ask(self, request: tuple[Any, ...]) -> float:
        if self.process is None:  # it did not start
            return 0.0
        assert self.process.stdin is not None  # a pipe
        try:
            self.process.stdin.write(pickle.dumps(request))
            self.process.stdin.flush()
        except OSError:
            self.close()
            return 0.0
        return self._read(self.seconds)

    def _read(self, seconds: float) -> float:
        assert self.process is not None and self.process.stdout is not None  # a pipe
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                return float(self.process.stdout.readline() if selector.select(seconds) else b"")
        except (OSError, ValueError):
            self.close()
            return 0.0
        except BaseException:  # Ctrl-C or a time limit: a late reply would be taken for that of the next request
            self.close()
            raise

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        if self.process is not None:
            process, self.process, self.ready = self.process, None, False
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        self.close()
