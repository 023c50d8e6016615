"""`python -m firedistill.cli`: the same as `python -m firedistill`."""

import firedistill.__main__  # noqa: F401
