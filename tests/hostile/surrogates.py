"""Returns and prints text that is not Unicode."""


def solve(x):
    print("\ud800\x00\x1b]0;title\x07")
    return "\ud800"
