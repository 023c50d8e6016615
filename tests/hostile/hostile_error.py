"""Raises an error whose text never ends."""


class Trap(BaseException):
    def __str__(self):
        while True:
            pass


def solve(x):
    raise Trap
