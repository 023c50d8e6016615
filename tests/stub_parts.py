"""Parts that end in every way, for a child process. It imports no library, so that the process starts at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from firedistill.benchmarks.parts import Skipped


def measure(name: str, mark: str) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    if name == "skips":
        raise Skipped("there is no such thing here")
    return {"mark": mark, "process": os.getpid()}, rows(name)


def rows(name: str) -> Iterator[dict[str, Any]]:
    yield {"case": {"row": 0}, "variant": name}
    if name == "fails":
        raise RuntimeError("CUDA error: an illegal\nmemory access")
    if name == "hangs":
        time.sleep(1000)
    if name == "dies":
        print("last words", flush=True)
        os._exit(7)
    yield {"case": {"row": 1}, "variant": name}
