"""Folders and files that are complete or absent, whatever kills the process that writes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A folder to write into; when the block ends it is on the disk and takes the place of `target` by one rename.

    An error inside the block leaves `target` as it was and removes what was written.

    Raises:
        OSError: it could not be written.
    """
    unfinished, replaced = (target.with_name(prefix + target.name) for prefix in (UNFINISHED, REPLACED))
    discard(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        sync(unfinished)
        discard(replaced)
        if target.exists():
            os.rename(target, replaced)
        os.rename(unfinished, target)
    except BaseException:
        discard(unfinished)
        raise
    sync_folder(target.parent)
    discard(replaced)


@contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of `path` when the block ends; gone if it raises."""
    unfinished = path.with_name(UNFINISHED + path.name)
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def discard(folder: Path) -> None:
    """Remove a folder if it is there; what cannot be removed stays, as it is in nobody's way."""
    shutil.rmtree(folder, ignore_errors=True)


def sync(folder: Path) -> None:
    """Bring every file of a folder, and the folder itself, to the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in [*filter(Path.is_dir, folder.rglob("*")), folder]:
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
