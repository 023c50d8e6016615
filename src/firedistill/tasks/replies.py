"""Replies of a judge on disk: a run that is resumed asks nothing again.

Each process appends to a file of its own and reads those of all others when it begins. A line is written before its reply is used, so a
process that is killed loses no reply that it has acted on; a line that it did not finish is left out.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from firedistill.files import naming
from firedistill.tasks.endpoint import Completion

logger = logging.getLogger(__name__)

KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "bool": (bool,), "float": (float, int)}


class Replies:
    """Completions by key; in memory until `open`."""

    def __init__(self) -> None:
        self.found: dict[str, Completion] = {}
        self.path: Path | None = None
        self.waiting: list[str] = []
        self.failing = False

    def open(self, folder: Path, name: str) -> None:
        """Read all replies in the folder, and write new ones to the file of this name there, when there are any.

        Where several files have a key, the file of this name counts, and in a file the first line.
        """
        own = folder / name
        for path in [own, *sorted(path for path in folder.glob("*.jsonl") if path != own)]:
            for key, completion in read_replies(path):
                self.found.setdefault(key, completion)
        self.path = own

    def get(self, key: str) -> Completion | None:
        return self.found.get(key)

    def put(self, key: str, completion: Completion) -> None:
        """Keep a reply. If it cannot be written (a full disk), later calls try again, and the failure is logged once.

        A refusal is written with the next reply: without one, it may be an account that is refused, and not this request.
        """
        self.found[key] = completion
        self.waiting.append(json.dumps({"key": key, **asdict(completion)}) + "\n")
        if self.path is None or completion.refused:
            return
        try:
            self._write(self.path)
        except OSError as error:
            if not self.failing:
                logger.error(
                    "replies of the judge wait until they can be written (%s); a run that is resumed asks again", error
                )
            self.failing = True

    def _write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        with naming(path), path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            data = "".join(self.waiting).encode()
            if size and not ends_a_line(path):  # a process was killed, or the disk was full
                data = b"\n" + data
            if (written := file.write(data)) != len(data):
                raise OSError(f"{written} of {len(data)} bytes were written to {path}")
        self.waiting.clear()
        self.failing = False


def ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_replies(path: Path) -> Iterator[tuple[str, Completion]]:
    """Keys and completions of a file; none if it does not exist. Lines of another form are left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                yield str(row.pop("key")), completion_of(row)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue


def completion_of(row: Mapping[str, Any]) -> Completion:
    """
    Raises:
        ValueError, KeyError: the row has another form.
    """
    for declared in fields(Completion):
        if type(row[declared.name]) not in KINDS[str(declared.type)]:
            raise ValueError(declared.name)
    return Completion(**row)
