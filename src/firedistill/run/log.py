"""The run directory: what a run writes while it goes on, so that a crash loses nothing."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from firedistill.files import UNFINISHED, written_at_once
from firedistill.rollout import Rollout

logger = logging.getLogger(__name__)

ROLLOUT_COLUMNS = pa.schema(
    {
        "step": pa.int64(),
        "uid": pa.string(),
        "prompt": pa.string(),
        "response": pa.string(),
        "expected": pa.string(),
        "submitted": pa.string(),
        "correct": pa.bool_(),
        "lenient_correct": pa.bool_(),
        "well_formed": pa.bool_(),
        "finished": pa.bool_(),
        "response_tokens": pa.int64(),
        "prefix_tokens": pa.int64(),
        "draft_tokens": pa.int64(),
        "trained": pa.bool_(),
        "feedback": pa.list_(pa.struct({"name": pa.string(), "text": pa.string()})),
    }
)
"""The same in every file, so that the files of a run can be read as one table."""


class RunLog:
    """Appends to `metrics.jsonl` and `evals.jsonl` (flushed row by row) and writes `rollouts/*.parquet`.

    Args:
        folder: the run directory, made if missing.

    Attributes:
        failed_writes: how often something could not be written.
        waiting: rows that are still to be written, by file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.failed_writes = 0
        self.waiting: dict[str, list[str]] = {"metrics.jsonl": [], "evals.jsonl": []}

    def start(self, step: int, evaluated: bool = True) -> None:
        """Begin after optimizer step `step` (0: a fresh run); rows that the run will write again are dropped.

        Args:
            evaluated: the evaluation after that step, if there was to be one, has been made.
        """
        for name in ("metrics.jsonl", "evals.jsonl"):
            last = step - 1 if name == "evals.jsonl" and not evaluated else step
            kept = [row for row in read_jsonl(self.folder / name) if 0 <= row["step"] <= last] if step else []
            with written_at_once(self.folder / name) as unfinished:
                unfinished.write_text("".join(map(json_line, kept)), encoding="utf-8")
        for path in self.folder.glob(f"rollouts/{UNFINISHED}*.parquet"):
            path.unlink()
        for path in self.folder.glob("rollouts/*_[0-9]*.parquet"):
            if step == 0 or int(path.stem.rpartition("_")[2]) > step:
                path.unlink()

    def metrics(self, row: dict[str, Any]) -> None:
        self._append("metrics.jsonl", row)

    def evaluation(self, row: dict[str, Any]) -> None:
        self._append("evals.jsonl", row)

    def rollouts(self, step: int, rows: Sequence[dict[str, Any]], prefix: str = "step") -> None:
        """Write the rollouts of a step or evaluation; those that cannot be written (a full disk) are counted, and lost."""
        if not rows:
            return
        folder = self.folder / "rollouts"
        try:
            folder.mkdir(exist_ok=True)
            with written_at_once(folder / f"{prefix}_{step:06d}.parquet") as unfinished:
                pq.write_table(pa.Table.from_pylist(list(rows), schema=ROLLOUT_COLUMNS), unfinished)
        except (OSError, pa.ArrowException) as error:
            self._failed(f"the rollouts of step {step} could not be written", error)

    def sync(self) -> None:
        """Bring the rows to the disk, before a checkpoint that counts on them.

        Raises:
            OSError: they cannot be written.
        """
        for name in ("metrics.jsonl", "evals.jsonl"):
            if self.waiting[name]:
                self._write(name)
            if (self.folder / name).exists():
                with (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Rows that cannot be written wait for the next one."""
        self.waiting[name].append(json_line(row))
        try:
            self._write(name)
        except OSError as error:
            self._failed(f"{len(self.waiting[name])} rows of {name} wait until they can be written", error)

    def _write(self, name: str) -> None:
        path = self.folder / name
        size = path.stat().st_size if path.is_file() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(self.waiting[name]))
        except OSError:
            if path.is_file():
                os.truncate(path, size)  # half a row would spoil the next one
            raise
        self.waiting[name].clear()

    def _failed(self, what: str, error: Exception) -> None:
        self.failed_writes += 1
        logger.error("%s (%s); the run goes on. Make room in %s", what, error, self.folder)


def json_line(row: dict[str, Any]) -> str:
    """A row of numbers as a line of JSON, which has no NaN and no infinity: they become null."""
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file, null read as NaN; an unfinished last line (a run killed while writing) is left out."""
    path = Path(path)
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def rollout_row(rollout: Rollout, step: int, prompt: str, trained: bool) -> dict[str, Any]:
    """One rollout as a row of the parquet files."""
    verdict = rollout.verdict

    def text(value: Any) -> str:
        """Any text as UTF-8 has it: half a surrogate pair, which JSON can hold, is written out."""
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")

    return {
        "step": step,
        "uid": text(rollout.example.uid),
        "prompt": text(prompt),
        "response": text(rollout.response.text),
        "expected": text(verdict.expected),
        "submitted": None if verdict.submitted is None else text(verdict.submitted),
        "correct": verdict.correct,
        "lenient_correct": verdict.lenient_correct,
        "well_formed": verdict.well_formed,
        "finished": rollout.response.finished,
        "response_tokens": len(rollout.response_ids),
        "prefix_tokens": rollout.prefix_length,
        "draft_tokens": rollout.draft_tokens,
        "trained": trained,
        "feedback": [{"name": text(field.name), "text": text(field.text)} for field in rollout.feedback],
    }


def model_card(config: Any, folder: Path) -> str:
    """A short card: what this adapter is, how it was made, what it scored."""
    evaluations = read_jsonl(folder / "evals.jsonl")
    lines = [
        "---",
        "library_name: peft",
        "tags: [firedistill, self-distillation, lora]",
        "---",
        "",
        f"# {config.model} on {config.task}, {config.method}",
        "",
        f"A LoRA adapter trained by feedback-based on-policy self-distillation (`{config.method}`) with firedistill: "
        f"{config.max_steps} optimizer steps, peak learning rate {config.learning_rate:g}, seed {config.seed}. "
        "`config.yaml` holds every setting and can be trained again.",
        "",
        "| step | accuracy | lenient | well-formed | n |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['step']} | {row['accuracy']:.3f} ± {row['stderr']:.3f} | {row['lenient_accuracy']:.3f} "
        f"| {row['well_formed_rate']:.3f} | {row['n']} |"
        for row in evaluations
    ]
    return "\n".join(lines) + "\n"
