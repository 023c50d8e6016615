"""A plugin that vLLM loads in each of its processes: they end with the trainer that has started them, however it ends.

vLLM's processes outlive a parent that is killed, and keep the memory of the accelerator.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

STARTED_BY_TRAINER = "FIREDISTILL_ROLLOUTS"


def end_with_parent() -> None:
    """End this process when its parent has ended, if it belongs to an engine of the trainer whose pid `STARTED_BY_TRAINER` names.

    vLLM loads its plugins in the trainer, too, which must outlive its own parent, such as the shell after `nohup`.
    """
    if os.environ.get(STARTED_BY_TRAINER, str(os.getpid())) != str(os.getpid()):
        parent = multiprocessing.parent_process()  # it may have ended before this process has loaded the plugin
        parent_pid = os.getppid() if parent is None else parent.pid
        threading.Thread(target=_watch, args=(parent_pid,), name="parent watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
