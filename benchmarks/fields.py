"""How time and memory of a FIRE step grow with the number of feedback fields.

    python benchmarks/fields.py [--quick] [--model MODEL] [--repeats N] [--threads N] [-o DIR]

The same as `firedistill bench fields`; the measuring code is `firedistill.benchmarks.fields`.
"""

import sys

from firedistill.cli import main

if __name__ == "__main__":  # memory is measured in new processes, which import this file
    sys.exit(main(["bench", "fields", *sys.argv[1:]]))
