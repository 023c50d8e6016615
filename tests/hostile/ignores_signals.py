"""Ignores every signal that can be ignored, with a stack of handlers, and waits."""

import signal
import time


def handler(number, frame):
    for each in range(1, 65):
        try:
            signal.signal(each, handler)
        except (OSError, ValueError):
            pass
    time.sleep(1000)


def solve(x):
    handler(0, None)
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
