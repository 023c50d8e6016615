"""Head and loss: the literal equations with autograd, `fire_head_loss`, and plain self-distillation.

    python benchmarks/fire_head.py [--quick] [--model MODEL] [--repeats N] [--threads N] [-o DIR]

The same as `firedistill bench fire_head`; the measuring code is `firedistill.benchmarks.fire_head`.
"""

import sys

from firedistill.cli import main

if __name__ == "__main__":  # memory is measured in new processes, which import this file
    sys.exit(main(["bench", "fire_head", *sys.argv[1:]]))
