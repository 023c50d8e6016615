"""`python -m firedistill`."""

import os
import sys

# `python -m` looks for modules in the working folder first, where anybody's accelerate.py may lie. `python -P` does not.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from firedistill.cli.main import main  # noqa: E402

sys.exit(main())
