"""Starts other programs."""

import os
import subprocess
import sys


def solve(x):
    done = []
    for path in ("/bin/sh", "/usr/bin/python3", sys.executable, "/usr/bin/id"):
        try:
            subprocess.run([path, "-c", "pass"], check=True, timeout=1)
            done.append(path)
        except (OSError, subprocess.SubprocessError):
            pass
    try:
        os.execv(sys.executable, [sys.executable, "-c", "print(1)"])
    except OSError:
        pass
    return done
