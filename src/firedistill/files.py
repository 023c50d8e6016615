"""Folders and files that are either complete or absent, even if the process that writes them is killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a folder to write into; when the block ends, sync it to disk and rename it to `target`.

    If the block or the sync raises, `target` is unchanged and what was written is removed.
    """
    unfinished, replaced = (target.with_name(prefix + target.name) for prefix in (UNFINISHED, REPLACED))
    discard(unfinished)
    unfinished.mkdir(parents=True)
    try:
        with naming(target):
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
    """Yield a file to write to; rename it to `path` when the block ends, remove it if the block raises."""
    unfinished = path.with_name(UNFINISHED + path.name)
    try:
        with naming(path):
            yield unfinished
            unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8, complete or not at all; halves of surrogate pairs become escapes."""
    with written_at_once(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_json(path: Path, refusal: type[ValueError]) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        refusal: the file is missing or holds no mapping.
        OSError: the system cannot read the file.
    """
    try:
        with naming(path):
            text = path.read_text(encoding="utf-8")
        values = json.loads(text)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        raise refusal(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise refusal(f"{path} does not hold a mapping")
    return values


SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)|^unable to open file <.*\((\d+)\)$", re.DOTALL)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Raise the system's errors of the block as OSErrors with a file name: `path` where they have none.

    Errors of writing, syncing and closing name no file. Those of safetensors, tokenizers and PyTorch's storages have the system's error
    in their text only.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (found := SYSTEM_ERROR.search(str(error))):
            number = int(found[1] or found[2])
        if number is None or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def sha256(path: Path) -> str:
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def discard(folder: Path) -> None:
    """Remove a folder if it exists; ignore errors, since a leftover does no harm."""
    shutil.rmtree(folder, ignore_errors=True)


def sync(folder: Path) -> None:
    """Flush a folder with all of its files and subfolders to disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk, where the system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
