"""Takes memory that its limit of address space does not count."""

import ctypes
import os


def solve(x):
    libc = ctypes.CDLL(None, use_errno=True)
    taken = 0
    for _ in range(64):
        segment = libc.shmget(0, 256 << 20, 0o1600)
        if segment >= 0:
            taken += 1
    try:
        for _ in range(32):
            handle = os.memfd_create("hostile")
            os.ftruncate(handle, 1 << 30)
            taken += 1
    except OSError:
        pass
    return taken
