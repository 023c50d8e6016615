"""Tasks whose problems are drawn at random, by level. No data, no network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from firedistill.tasks.sources import refuse_data
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example


class GeneratedTask(Task):
    """The base of a task that draws its problems. A subclass names a second base, which judges responses, and defines `stream`.

    A hash of a problem's text alone decides between training and held-out problems (`split_of`), so the splits share none, whatever the
    seeds and levels. All problems of one call differ.

    Class attributes:
        levels: by name; "mixed" is the default.
        default_size: the number of examples by split, if the caller gives none.

    Raises:
        ValueError: the level is unknown.
    """

    levels: Mapping[str, Any]
    default_size: Mapping[str, int]
    train_split = "train"
    eval_split = "eval"
    reads_data_dir = False

    def __init__(self, level: str = "mixed") -> None:
        super().__init__()
        if level not in self.levels:
            raise ValueError(f"{self.name} has no level {level!r}; choose one of {', '.join(self.levels)}")
        self.level = level
        self.name = self.name if level == "mixed" else f"{self.name}:{level}"

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """The first `n` problems of a stream that depends on level, split and seed only, or all that the level has.

        Raises:
            ValueError: `split` is neither "train" nor "eval", `n` is negative, or `data_dir` is given.
        """
        refuse_data(self.name, data_dir)
        split, _ = self.resolve_split(split)
        if n is not None and n < 0:
            raise ValueError(f"n must be at least 0, or None for {self.default_size[split]} examples; got {n}")
        problems = islice(self.stream(split, seed), self.default_size[split] if n is None else n)
        return [problem.as_example(f"{self.name}/{split}/{seed}-{i}") for i, problem in enumerate(problems)]

    def stream(self, split: str, seed: int) -> Iterator[Any]:
        """Different problems of one split, with a method `as_example(uid)`."""
        raise NotImplementedError


def split_of(text: str) -> str:
    """The split that a problem belongs to."""
    return "eval" if hash_of(text) % 2 else "train"


def hash_of(text: str) -> int:
    """An integer that is the same on every platform (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
