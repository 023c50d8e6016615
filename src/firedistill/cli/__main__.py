"""`python -m firedistill.cli`."""

import sys

from firedistill.cli.main import main

sys.exit(main())
