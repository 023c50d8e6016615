"""Rollouts for the page: a selection of the answers that the runs have saved, with each text kept once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from firedistill.report.read import Run, shown
from firedistill.run.directory import rollouts_in
from firedistill.terminal import shortened, visible

# Characters of text on a page, training steps of a run, and bytes of a file that is read.
MOST_TEXT, MOST_STEPS, MOST_BYTES = 3 * 2**20, 8, 2**26
COLUMNS = ["step", "uid", "prompt", "response", "expected", "submitted", "correct", "feedback"]
UNREADABLE = (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError)


class Texts:
    """Texts by number, each kept once; `size` counts their characters."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.size = 0

    def number(self, text: Any) -> int:
        text = "" if text is None else str(text)
        if text not in self.numbers:
            self.numbers[text] = len(self.numbers)
            self.size += len(text)
        return self.numbers[text]


def rollouts_of(runs: Sequence[Run], notes: list[str], room: int = MOST_TEXT) -> dict[str, Any]:
    """A selection of the rollouts of every run: those of the first and the last evaluation, and of training steps between them.

    Files that cannot be read are noted.

    Returns:
        `texts`, and `rows`, lists of the run's and the texts' numbers, in the order of `columns`.
    """
    texts, rows = Texts(), []
    for position, run in enumerate(runs):
        try:
            sources = sources_of(run)
        except OSError as error:
            notes.append(f"{shown(error.filename)} is left out of the browser of rollouts: {error.strerror}.")
            continue
        start, share = texts.size, (room - texts.size) // (len(runs) - position)
        for number, (kind, path, steps) in enumerate(sources):
            try:
                found = read_rollouts(path, steps)
            except UNREADABLE as error:
                problem = shortened(visible(" ".join(f"{type(error).__name__} {error}".split())))
                notes.append(f"{shown(path)} is left out of the browser of rollouts: {problem}")
                continue
            end = texts.size + max(0, start + share - texts.size) // (len(sources) - number)
            question = questions(str(row["prompt"]) for row in found)
            for row in found:
                if texts.size >= end:
                    break
                fields = [list(map(texts.number, field)) for field in row["feedback"]]
                named = [row["uid"], question[str(row["prompt"])], row["response"], row["expected"], row["submitted"]]
                rows.append([position, kind, int(row["step"]), bool(row["correct"]), *map(texts.number, named), fields])
    columns = ["run", "kind", "step", "correct", "uid", "question", "response", "expected", "submitted", "fields"]
    return {"columns": columns, "texts": list(texts.numbers), "rows": rows}


def sources_of(run: Run) -> list[tuple[str, Path, list[int]]]:
    """The kind, file and steps of what is shown of a run, the most important first."""
    folder = run.folder / "rollouts"
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    files = [(*found, folder / name) for name in names if (found := rollouts_in(name))]
    evaluations = [(steps.start, path) for kind, steps, path in files if kind == "eval"]
    sources = [("held-out", path, [step]) for step, path in dict.fromkeys([*evaluations[-1:], *evaluations[:1]])]
    packs = [(steps, path) for kind, steps, path in files if kind == "step"]
    if packs:
        low = packs[0][0].start
        high = min(max(steps.stop - 1 for steps, _ in packs), max(run.step, low))
        wanted = sorted(
            {int(step) for step in np.linspace(low, high, MOST_STEPS)}, key=lambda step: (step != high, step != low, step)
        )
        for step in wanted:
            sources += [("training", path, [step]) for steps, path in packs if step in steps][:1]
    return sources


def read_rollouts(path: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of some steps; their `feedback` is pairs of a name and a text.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError, pyarrow.ArrowException: it is not a file of rollouts.
    """
    if not path.is_file():
        raise ValueError("it is not a regular file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES // 2**20} MiB")
    rows = pq.read_table(path, columns=COLUMNS, filters=[("step", "in", list(steps))]).to_pylist()
    if missing := [name for row in rows[:1] for name in COLUMNS if name not in row]:
        raise KeyError(f"without the columns {missing}")
    for row in rows:
        row["feedback"] = [(field["name"], field["text"]) for field in row["feedback"] or []]
    return rows


def questions(prompts: Iterable[str]) -> dict[str, str]:
    """What is particular to each prompt: without the beginning and the end that all of them share, cut at lines and turn markers."""
    found = list(dict.fromkeys(prompts))
    if len(found) < 2:
        return {prompt: prompt for prompt in found}
    start = os.path.commonprefix(found)
    end = os.path.commonprefix([prompt[::-1] for prompt in found])[::-1]
    start = start[: start.rfind("\n") + 1]
    cut = re.search(r"[\n<\[]", end)
    end = end[cut.start() :] if cut else ""
    return {prompt: prompt[len(start) : len(prompt) - len(end)].strip() or prompt for prompt in found}
