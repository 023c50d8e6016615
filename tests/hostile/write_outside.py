"""Writes wherever it can."""

import os


def solve(x):
    done = []
    for folder in (
        SECRET_FOLDER,
        "/",
        "/root",
        "/home",
        "/etc",
        "/var/tmp",
        "/usr/lib",
        "/dev/shm",
        "/proc/self",
        os.path.dirname(os.__file__),
    ):
        try:
            with open(f"{folder}/hostile-was-here", "w") as file:
                file.write("x")
            done.append(folder)
        except OSError:
            pass
    try:
        os.remove(f"{SECRET_FOLDER}/secret")
        done.append("removed")
    except OSError:
        pass
    return done
