"""Returns more than any pipe holds."""


def solve(x):
    return ["x" * 1000] * 100_000
