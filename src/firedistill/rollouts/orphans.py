"""A plugin that vLLM loads in each of its processes: they end with the trainer that has started them, however it ends.

vLLM's processes outlive a parent that is killed, and keep the memory of the accelerator.
"""

from __future__ import annotations

import os
import threading
import time

TRAINER = "FIREDISTILL_TRAINER"


def end_with_trainer() -> None:
    """Watch the process that `TRAINER` names in the environment; does nothing in processes of other programs."""
    if process := os.environ.get(TRAINER, ""):
        threading.Thread(target=_watch, args=(int(process),), name="trainer watch", daemon=True).start()


def _watch(process: int) -> None:
    while True:
        time.sleep(1.0)
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            os._exit(1)
