"""What a run writes into its directory while it trains, so that a crash loses nothing."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firedistill.files import UNFINISHED, naming, write_text, written_at_once
from firedistill.rollout import Rollout
from firedistill.run.directory import ATTRIBUTION, rollout_file, rollouts_in

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

# Bytes in a line, and the largest step, of which a float is exact.
LONGEST_ROW, LAST_STEP = 2**20, 2**53
STEPS_PER_FILE = 100


@cache
def rollout_columns() -> pa.Schema:
    """The columns of all rollout files of a run, so that they can be read as one table."""
    import pyarrow as pa  # takes part of a second, and training without a log of the rollouts does not need it

    feedback = pa.list_(pa.struct({"name": pa.string(), "text": pa.string()}))
    return pa.schema(
        [("step", pa.int64())]
        + [(name, pa.string()) for name in ("uid", "prompt", "response", "expected", "submitted")]
        + [(name, pa.bool_()) for name in ("correct", "lenient_correct", "well_formed", "finished")]
        + [(name, pa.int64()) for name in ("response_tokens", "prefix_tokens", "draft_tokens")]
        + [("trained", pa.bool_()), ("feedback", feedback)]
    )


class RunLog:
    """Appends to `metrics.jsonl` and `evals.jsonl`, flushed row by row, and writes `rollouts/*.parquet`.

    Rollouts have a file per step until step 100, 200, ..., which joins the last 100 of them: `step_000001-000100.parquet`.

    Args:
        folder: the run directory, created if missing.

    Attributes:
        failed_writes: number of writes that failed.
        waiting: lines that are still to be written, by file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.failed_writes = 0
        self.waiting: dict[str, list[str]] = {"metrics.jsonl": [], "evals.jsonl": []}

    def start(self, step: int, evaluated: bool = True) -> None:
        """Continue after optimizer step `step` (0: a new run), without the rows and files that will be written again.

        Args:
            evaluated: whether the evaluation after that step has been made.
        """
        import pyarrow as pa

        for name in self.waiting:
            last = step - 1 if name == "evals.jsonl" and not evaluated else step
            kept = [row for row in read_jsonl(self.folder / name) if 0 <= row["step"] <= last] if step else []
            if name == "metrics.jsonl" and len(kept) < step:
                file = self.folder / name
                logger.warning(
                    "%s has rows of %d of the %d steps before: reports and curves lack the others", file, len(kept), step
                )
            write_text(self.folder / name, "".join(map(json_line, kept)))
        for path in (self.folder / "attribution").glob("*"):
            if (of_step := ATTRIBUTION.fullmatch(path.name)) and int(of_step[1]) > step:
                path.unlink()
        folder = self.folder / "rollouts"
        for path in folder.glob(f"{UNFINISHED}*"):
            if rollouts_in(path.name.removeprefix(UNFINISHED)):
                path.unlink()
        files = [(path, *found) for path in folder.glob("*") if (found := rollouts_in(path.name))]
        joined = [(path, steps) for path, _, steps in files if len(steps) > 1]
        for path, kind, steps in files:
            leftover = kind == "step" and any(steps.start in others for _, others in joined)  # of joining
            if len(steps) == 1 and (steps.start > step or step == 0 or leftover):
                path.unlink()
        for path, steps in joined:
            if steps.stop - 1 > step:
                try:
                    self._split(path, step)
                except pa.ArrowException as error:
                    raise ValueError(f"{path} is damaged ({error}): move it away to resume without these rollouts") from error

    def metrics(self, row: dict[str, Any]) -> None:
        self._append("metrics.jsonl", row)

    def evaluation(self, row: dict[str, Any]) -> None:
        self._append("evals.jsonl", row)

    def rollouts(self, step: int, rows: Sequence[dict[str, Any]], prefix: str = "step") -> None:
        """Write the rollouts of a step or evaluation. If that fails (a full disk), they are lost, and the failure is counted."""
        if not rows:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = self.folder / "rollouts"
        try:
            folder.mkdir(exist_ok=True)
            with written_at_once(folder / rollout_file(prefix, step)) as unfinished:
                pq.write_table(pa.Table.from_pylist(list(rows), schema=rollout_columns()), unfinished)
        except (OSError, pa.ArrowException) as error:
            self.failed(f"the rollouts of step {step} could not be written", error)
        if prefix == "step" and step % STEPS_PER_FILE == 0:
            try:
                self._join(range(step - STEPS_PER_FILE + 1, step + 1))
            except (OSError, pa.ArrowException) as error:
                self.failed(f"the rollout files up to step {step} could not be joined and stay as they are", error)

    def _join(self, steps: range) -> None:
        """Replace the rollout files of these steps by one, with a row group per step."""
        import pyarrow.parquet as pq

        folder = self.folder / "rollouts"
        parts = [path for path in (folder / rollout_file("step", step) for step in steps) if path.exists()]
        joined = folder / rollout_file("step", steps[0], steps[-1])
        with written_at_once(joined) as unfinished, pq.ParquetWriter(unfinished, rollout_columns()) as writer:
            for part in parts:
                writer.write_table(pq.read_table(part, schema=rollout_columns()))
        for part in parts:
            part.unlink()

    def _split(self, path: Path, last: int) -> None:
        """Undo `_join`, without the steps after `last`."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                step = table["step"][0].as_py()
                if step <= last:
                    with written_at_once(path.with_name(rollout_file("step", step))) as unfinished:
                        pq.write_table(table, unfinished)
        path.unlink()

    def sync(self) -> None:
        """Flush all rows to disk, before a checkpoint that relies on them; raises OSError if that fails."""
        for name, lines in self.waiting.items():
            if lines:
                self._write(name)
            if (self.folder / name).exists():
                with naming(self.folder / name), (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Write a row, and the earlier ones that could not be written."""
        self.waiting[name].append(json_line(row))
        try:
            self._write(name)
        except OSError as error:
            self.failed(f"{len(self.waiting[name])} rows of {name} wait until they can be written", error)

    def _write(self, name: str) -> None:
        path = self.folder / name
        size = path.stat().st_size if path.is_file() else 0
        try:
            with naming(path), path.open("a", encoding="utf-8") as file:
                file.write("".join(self.waiting[name]))
        except OSError:
            if path.is_file():
                os.truncate(path, size)  # remove a partial line
            raise
        self.waiting[name].clear()

    def failed(self, what: str, error: Exception) -> None:
        """Count and log a write that failed without harm to the run."""
        self.failed_writes += 1
        logger.error("%s (%s); training continues. Make room in %s", what, error, self.folder)


def json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON, with null in place of NaN and infinity."""
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, as `iterate_jsonl`."""
    return list(iterate_jsonl(path))


def iterate_jsonl(path: str | Path, left_out: Counter[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a JSON Lines file, with NaN in place of null, one at a time; none if there is no file.

    A row is a JSON object with a whole number `step` from 0 on. Other lines are left out, and so is a last line that is not complete.

    Args:
        left_out: counts the lines that are left out, by reason. A last line that is not complete does not count.
    """
    path = Path(path)
    if not path.is_file():
        return
    with naming(path), path.open("rb") as file:
        while line := file.readline(LONGEST_ROW):
            if len(line) < LONGEST_ROW or line.endswith(b"\n"):
                found = row_of(line)
            else:
                found = f"longer than {LONGEST_ROW // 2**20} MiB"
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_ROW)
            if isinstance(found, dict):
                yield found
            elif left_out is not None and line.endswith(b"\n") and line != b"\n":
                left_out[found] += 1


def row_of(line: bytes) -> dict[str, Any] | str:
    """The row in a line, with NaN in place of null; or, in words, why there is none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(row, dict):
        return "not a JSON object"
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step <= LAST_STEP or step != int(step):
        return "without a whole number as step"
    if None in row.values():
        row = {name: math.nan if value is None else value for name, value in row.items()}
    row["step"] = int(step)
    return row


def last_row(path: str | Path) -> dict[str, Any] | None:
    """The last row of a JSON Lines file, whose end alone is read; None if the last 16 MiB have none, or there is no file."""
    path = Path(path)
    if not path.is_file():
        return None
    with naming(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for reach in (2**16, 2**24):
            file.seek(max(size - reach, 0))
            lines = file.read(reach).split(b"\n")[size > reach :]  # the first one may lack its beginning
            for line in reversed(lines):
                if isinstance(row := row_of(line), dict):
                    return row
            if reach >= size:
                return None
    return None


def rollout_row(rollout: Rollout, step: int, prompt: str, trained: bool) -> dict[str, Any]:
    """A rollout as a row of `rollout_columns()`."""
    verdict, response = rollout.verdict, rollout.response

    def text(value: Any) -> str:
        """Lone surrogates, which JSON data can hold and UTF-8 cannot, are escaped."""
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")

    return {
        "step": step,
        "uid": text(rollout.example.uid),
        "prompt": text(prompt),
        "response": text(response.text),
        "expected": text(verdict.expected),
        "submitted": None if verdict.submitted is None else text(verdict.submitted),
        "correct": verdict.correct,
        "lenient_correct": verdict.lenient_correct,
        "well_formed": verdict.well_formed,
        "finished": response.finished,
        "response_tokens": len(rollout.response_ids),
        "prefix_tokens": rollout.prefix_length,
        "draft_tokens": rollout.draft_tokens,
        "trained": trained,
        "feedback": [{"name": text(field.name), "text": text(field.text)} for field in rollout.feedback],
    }
