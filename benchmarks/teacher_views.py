"""The views of the teacher: shared prefixes against one forward pass per view.

    python benchmarks/teacher_views.py [--quick] [--model MODEL] [--repeats N] [--threads N] [-o DIR]

The same as `firedistill bench teacher_views`; the measuring code is `firedistill.benchmarks.teacher_views`.
"""

import sys

from firedistill.cli import main

if __name__ == "__main__":  # memory is measured in new processes, which import this file
    sys.exit(main(["bench", "teacher_views", *sys.argv[1:]]))
