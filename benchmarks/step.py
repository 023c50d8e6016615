"""An optimizer step of FIRE against one of Full Context on the same rollouts.

    python benchmarks/step.py [--quick] [--model MODEL] [--repeats N] [--threads N] [-o DIR]

The same as `firedistill bench step`; the measuring code is `firedistill.benchmarks.step`.
"""

import sys

from firedistill.cli import main

if __name__ == "__main__":  # memory is measured in new processes, which import this file
    sys.exit(main(["bench", "step", *sys.argv[1:]]))
