"""Returns a value that is nested deeply, or that contains itself."""


def solve(x):
    value = []
    for _ in range(100_000):
        value = [value]
    value[0].append(value)
    return value
