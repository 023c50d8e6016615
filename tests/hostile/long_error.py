"""Raises an error with a text of a hundred megabytes and control characters."""


def solve(x):
    raise ValueError("\x1b[2J\x00\ud800" + "x" * 100_000_000)
