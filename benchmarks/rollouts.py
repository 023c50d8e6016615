"""Sampling: the package's loop on a merged copy of the adapter against `generate` with the unmerged one.

    python benchmarks/rollouts.py [--quick] [--model MODEL] [--repeats N] [--threads N] [-o DIR]

The same as `firedistill bench rollouts`; the measuring code is `firedistill.benchmarks.rollouts`.
"""

import sys

from firedistill.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "rollouts", *sys.argv[1:]]))
