"""A Full Context step against one of trl's SDPOTrainer (pip install "trl==1.16.0").

    python benchmarks/sdpo.py [--quick] [--model MODEL] [--repeats N] [--threads N] [-o DIR]

The same as `firedistill bench sdpo`; the measuring code is `firedistill.benchmarks.sdpo`.
"""

import sys

from firedistill.cli import main

if __name__ == "__main__":  # memory is measured in new processes, which import this file
    sys.exit(main(["bench", "sdpo", *sys.argv[1:]]))
