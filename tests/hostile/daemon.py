"""Leaves a process behind, by two forks and a session of its own, which keeps the pipes open."""

import os
import signal
import time


def solve(x):
    if os.fork() == 0:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for _ in range(3):
            if os.fork():
                os._exit(0)
            os.setsid()
        time.sleep(1000)
    return 0
