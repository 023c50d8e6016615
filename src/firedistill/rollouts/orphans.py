"""A plugin that vLLM loads in each of its processes: they end with the trainer that has started them, however it ends.

vLLM's processes outlive a parent that is killed, and keep the memory of the accelerator.
"""

from __future__ import annotations

import os
import threading
import time

STARTED_BY_TRAINER = "FIREDISTILL_ROLLOUTS"


def end_with_parent() -> None:
    """End this process when its parent has ended, if a trainer has set `STARTED_BY_TRAINER` in the environment."""
    if STARTED_BY_TRAINER in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="parent watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
