"""The base class of all tasks: loads problems, splits them, and delegates judgement and feedback to its subclasses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from firedistill.tasks.feedback import structured_feedback
from firedistill.tasks.reading import hub_rows, open_rows
from firedistill.tasks.sources import DataError, Rows, find_file
from firedistill.tasks.types import Example, FeedbackField, Verdict

TRAIN_SHARE = 0.8  # of a published split that serves both as training and as evaluation data
Result = TypeVar("Result")


class Task:
    """A family of problems with a verifier. Subclass it to add your own.

    A subclass defines two methods, `example` (a row of data to an `Example`) and `verify` (a response to a `Verdict`). Class
    attributes give its name, its answer format and the location of its data::

        class Capitals(Task):
            name = "capitals"                       # in uids, logs and feedback
            type_name = "short_answer"
            final_marker = "Answer:"
            format_instruction = "Write `Answer: ` and the city on a new final line."
            hub_id = "somebody/capitals"            # not needed if rows always come from `data_dir`

            def example(self, row, uid):
                return Example(uid=uid, question=f"What is the capital of {row['country']}?", answer=row["capital"])

            def verify(self, example, response):
                submitted = response.rpartition("Answer:")[2].strip() or None
                return Verdict(submitted == example.answer, submitted, example.answer, "Answer:" in response)

    `load_task("my_package.my_module:Capitals")` then loads it. Override other methods as needed: `prompt`, `feedback` (returns the
    four structured fields by default; any other fields work), `usable` (which rows to keep), `examples` (for generated problems).
    For numeric and multiple-choice answers, start from `NumericTask` and `ChoiceTask`, which define `verify`. Problems in a file need
    no class, see `TableTask`.

    `verify` and `feedback` may be `async def`. Several calls then run at the same time, and verdicts begin while other responses are
    still sampled, where the engine reports responses as they end. Plain methods that wait for something else, such as a process, do the
    same in threads if `at_once` is above 1.

    **Splits.** Every task has the splits `"train"` and `"eval"` (held out). They stand for the published splits `train_split` and
    `eval_split`. Any published split with labels is also available in full under its own name. If a dataset has only one usable
    split, `train_split` and `eval_split` are equal. That split is then divided by a fixed seed, 80 % for `"train"` and the rest
    for `"eval"`, and its own name means `"eval"`, so that no name can lead to an evaluation on training data.

    Class attributes:
        name: used in uids, logs and feedback.
        type_name: the kind of task that the feedback names (`math` or `multiple_choice` for the tasks of the paper).
        answer_type: the kind of answer that the feedback names.
        checker_mode: the comparison of answers that the feedback names.
        final_marker: the start of the final-answer line; empty if the task has no such line.
        format_instruction: tells the student how to write the answer.
        at_once: the number of threads that may call plain `verify` and `feedback` at the same time; 1: only the main thread calls
            them. A call that is past its time limit no longer counts.
        reads_data_dir: whether `examples` takes a `data_dir`.
        hub_id, hub_config, hub_revision: arguments of `datasets.load_dataset`.
        folder: the sub-folder of `data_dir` that may hold local copies; `name` if None.
        train_split, eval_split, other_splits: published splits, see above.
        division_seed: fixes the division of a split into `"train"` and `"eval"`. It is independent of a run's seed, so that all
            runs agree.
    """

    name: str = "task"
    type_name: str = "task"
    answer_type: str = "text"
    checker_mode: str = "exact-match"
    final_marker: str = ""
    format_instruction: str = ""
    at_once: int = 1

    reads_data_dir: bool = True
    hub_id: str | None = None
    hub_config: str | None = None
    hub_revision: str | None = None
    folder: str | None = None
    train_split: str = "train"
    eval_split: str = "test"
    other_splits: tuple[str, ...] = ()
    division_seed: int = 0

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        """Convert one row, with the columns of the published dataset, to an `Example`.

        Raises:
            DataError: a column is missing or holds an invalid value.
        """
        raise NotImplementedError(f"{type(self).__name__} must define example(row, uid)")

    def verify(self, example: Example, response: str) -> Verdict:
        """Judge one response. Must return for any string."""
        raise NotImplementedError(f"{type(self).__name__} must define verify(example, response)")

    def prompt(self, example: Example) -> str:
        """The dataset prompt, without the format instruction."""
        return example.question

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        """Feedback about a response in separable fields; by default the four fields of the paper."""
        return structured_feedback(self, example, response, verdict)

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """Load problems of one split, in a shuffled order that depends only on `seed` and on the available rows.

        Args:
            split: `"train"`, `"eval"`, or a published split by its own name (see the class).
            n: the number of examples; None for all. A smaller split returns all its examples.
            seed: seed of the shuffle. It affects neither uids nor the division into `"train"` and `"eval"`.
            data_dir: a folder with local copies in the hub's columns (`<split>.jsonl`, `.jsonl.gz` or `.parquet`), or with a
                sub-folder for this dataset that holds them. None loads from the hub.

        Returns:
            The first `n` examples of the shuffled split. Only their rows are parsed, so errors in other rows go unnoticed.

        Raises:
            ValueError: the split is unknown, or `n` is negative.
            DataError: the data cannot be read, or a row is invalid; names the place and the fix.
        """
        if n is not None and n < 0:
            raise ValueError(f"n must be at least 0, or None for all examples; got {n}")
        published, part = self.resolve_split(split)
        rows = self.load_rows(published, data_dir)
        indices = [index for index in range(len(rows)) if _at(rows, index, self.usable)]
        if part is not None:
            indices = self._divide(rows, indices, part)
        ordered = self.ordered(rows, indices, seed)
        return [_at(rows, index, partial(self.example, uid=f"{self.name}/{published}/{index}")) for index in ordered[:n]]

    def load_rows(self, published_split: str, data_dir: str | None = None) -> Rows:
        """All rows of one published split. Override it to read data from elsewhere."""
        folder = self.folder or self.name
        if data_dir is not None:
            return open_rows(find_file(data_dir, folder, published_split))
        if self.hub_id is None:
            raise DataError(f"{self.name} has no dataset on the hub: pass data_dir, a folder with {published_split}.jsonl")
        return hub_rows(self.hub_id, self.hub_config, published_split, self.hub_revision, folder)

    def resolve_split(self, split: str) -> tuple[str, str | None]:
        """(published split, part of it) for a split name; the part is `"train"`, `"eval"`, or None for the full split.

        Raises:
            ValueError: the split is unknown; lists the valid names.
        """
        divided = self.train_split == self.eval_split
        if split == "train":
            return self.train_split, "train" if divided else None
        if split in ("eval", self.eval_split):
            return self.eval_split, "eval" if divided else None
        if split in (self.train_split, *self.other_splits):
            return split, None
        share = ", divided by a fixed seed" if divided else ""
        others = "".join(f", {name!r}" for name in self.other_splits)
        raise ValueError(
            f"{self.name} has no split {split!r}. Use 'train' (published split {self.train_split!r}{share}), "
            f"'eval' (published split {self.eval_split!r}{share}){others}."
        )

    def usable(self, row: Mapping[str, Any]) -> bool:
        """Whether a row belongs to the task. Other rows are dropped before splits are divided and counted."""
        return True

    def division_key(self, row: Mapping[str, Any]) -> str:
        """The text that assigns a row to `"train"` or `"eval"`, by default the question. Rows with equal keys stay together."""
        return self.example(row, uid="").question

    def ordered(self, rows: Rows, indices: Sequence[int], seed: int) -> list[int]:
        """Row indices in the order in which `examples` returns them: shuffled by `seed`."""
        return sorted(indices, key=lambda index: digest(f"{seed}/{index}"))

    def _divide(self, rows: Rows, indices: Sequence[int], part: str) -> list[int]:
        """The indices of `"train"` or `"eval"`. Depends on the rows' content, not on their order."""
        ranks = {index: digest(f"{self.division_seed}/{_at(rows, index, self.division_key)}") for index in indices}
        held_out = self.held_out(ranks.values())
        return [index for index in indices if (ranks[index] in held_out) == (part == "eval")]

    @staticmethod
    def held_out(ranks: Iterable[bytes]) -> set[bytes]:
        """The hashes of the rows that are held out where a split is divided."""
        distinct = sorted(set(ranks))
        return set(distinct[round(TRAIN_SHARE * len(distinct)) :])


def folded(text: str) -> str:
    """A text without differences of case and blanks."""
    return " ".join(text.casefold().split())


def digest(text: str) -> bytes:
    """A hash that replaces a random number: equal on every machine, Python and library version."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _at(rows: Rows, index: int, read: Callable[[Mapping[str, Any]], Result]) -> Result:
    """`read(rows[index])`; errors name the file and the row."""
    try:
        return read(rows[index])
    except Exception as error:  # a subclass may raise any
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{rows.where(index)}: {reason}") from error
