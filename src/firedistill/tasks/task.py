"""What is asked and how it is judged: the types that every task shares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from firedistill.tasks.feedback import structured_feedback
from firedistill.tasks.sources import DataError, Rows, load_rows
from firedistill.tasks.types import Example, FeedbackField, Verdict

TRAIN_SHARE = 0.8  # of a published split that has to serve both as training and as evaluation data


class Task:
    """A family of problems with a verifier. Subclass it to add your own.

    A subclass must give two methods, `example` (one row of data into an `Example`) and `verify` (a response into a `Verdict`),
    and says in class attributes what it is called, what it asks for and where its rows are:

        class Capitals(Task):
            name = "capitals"                       # in uids, logs and feedback
            type_name = "short_answer"
            final_marker = "Answer:"
            format_instruction = "Write `Answer: ` and the city on a new final line."
            hub_id = "somebody/capitals"            # not needed when rows always come from `data_dir`

            def example(self, row, uid):
                return Example(uid=uid, question=f"What is the capital of {row['country']}?", answer=row["capital"])

            def verify(self, example, response):
                submitted = response.rpartition("Answer:")[2].strip() or None
                return Verdict(submitted == example.answer, submitted, example.answer, "Answer:" in response)

    `load_task("my_package.my_module:Capitals")` then loads it. The rest has defaults that may be overridden: `prompt`,
    `feedback` (the four structured fields; any other fields will do), `usable` (rows to leave out), `examples` (for problems
    that are generated rather than read). For numbers and options, start from `NumericTask` (numeric.py) and
    `ChoiceTask` (choice.py), which bring `verify`.

    **Splits.** Two names always work: `"train"` (fit on) and `"eval"` (held out). They stand for the published splits
    `train_split` and `eval_split`. Every published split that has labels may also be asked for under its own name, and is
    then given whole. Where a dataset has only one usable split, `train_split` and `eval_split` are equal: that split
    is divided once and for all, four fifths for `"train"` and the rest for `"eval"`, and its own name means `"eval"`, so that
    no name can lead to an evaluation on training rows. Any other name is an error that lists the possible ones.

    Class attributes:
        name: used in uids, logs and feedback.
        type_name: the kind of task as the feedback names it (`math` and `multiple_choice` in the tasks of the paper).
        answer_type: the kind of answer as the feedback names it.
        checker_mode: how answers are compared, as the feedback names it.
        final_marker: what opens the final-answer line; empty if there is no such line.
        format_instruction: how the student is asked to answer.
        hub_id, hub_config, hub_revision: where `datasets.load_dataset` finds the rows.
        folder: the sub-folder of `data_dir` that may hold local copies; `name` when None.
        train_split, eval_split, other_splits: published splits, see above.
        division_seed: fixes the division of a split into `"train"` and `"eval"`; never a user's seed, so that all runs agree.
    """

    name: str = "task"
    type_name: str = "task"
    answer_type: str = "text"
    checker_mode: str = "exact-match"
    final_marker: str = ""
    format_instruction: str = ""

    hub_id: str | None = None
    hub_config: str | None = None
    hub_revision: str | None = None
    folder: str | None = None
    train_split: str = "train"
    eval_split: str = "test"
    other_splits: tuple[str, ...] = ()
    division_seed: int = 0

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        """One row, in the columns of the dataset as published, as an `Example`.

        Raises:
            DataError: the row lacks a column or holds something unexpected.
        """
        raise NotImplementedError(f"{type(self).__name__} must define example(row, uid)")

    def verify(self, example: Example, response: str) -> Verdict:
        """The verdict on one response. Must return for any string."""
        raise NotImplementedError(f"{type(self).__name__} must define verify(example, response)")

    def prompt(self, example: Example) -> str:
        """The dataset prompt, without the format instruction."""
        return example.question

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        """Feedback about this response in separable fields; by default the four of the paper."""
        return structured_feedback(self, example, response, verdict)

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """Problems of one split in a shuffled order that depends only on `seed` (and on which rows there are).

        Args:
            split: `"train"`, `"eval"`, or a published split by its own name (see the class).
            n: how many; None for all. A split with fewer usable rows gives all it has.
            seed: of the shuffle. It changes neither uids nor what belongs to `"train"` and to `"eval"`.
            data_dir: a folder with local copies in the hub's columns (`<split>.jsonl`, `.jsonl.gz` or `.parquet`), or one
                with a sub-folder for this dataset. None asks the hub.

        Returns:
            The first `n` examples of the shuffled split. Only these are parsed: a faulty row beyond them goes unnoticed.

        Raises:
            ValueError: the split is unknown, or `n` is negative.
            DataError: the data cannot be read, or a row is not what it should be; says where and how to mend it.
        """
        if n is not None and n < 0:
            raise ValueError(f"n must be at least 0, or None for all examples; got {n}")
        published, part = self.resolve_split(split)
        rows = self.load_rows(published, data_dir)
        indices = [index for index in range(len(rows)) if _at(rows, index, self.usable)]
        if part is not None:
            indices = self._divide(rows, indices, part)
        ordered = self.ordered(rows, indices, seed)
        return [
            _at(rows, index, lambda row, index=index: self.example(row, uid=f"{self.name}/{published}/{index}"))
            for index in ordered[:n]
        ]

    def load_rows(self, published_split: str, data_dir: str | None = None) -> Rows:
        """All rows of one published split. Override it to read data from elsewhere."""
        if data_dir is None and self.hub_id is None:
            raise DataError(f"{self.name} has no dataset on the hub: pass data_dir, a folder with {published_split}.jsonl")
        return load_rows(
            self.hub_id, self.hub_config, published_split, self.hub_revision, folder=self.folder or self.name, data_dir=data_dir
        )

    def resolve_split(self, split: str) -> tuple[str, str | None]:
        """(published split, part of it) for a split name; the part is `"train"`, `"eval"`, or None for the whole.

        Raises:
            ValueError: no such split; lists the names that work.
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
        """Whether a row belongs to the task. Rows that do not are left out before anything is divided or counted."""
        return True

    def division_key(self, row: Mapping[str, Any]) -> str:
        """The text by which a row goes to `"train"` or `"eval"`: by default the question. Equal keys stay together."""
        return self.example(row, uid="").question

    def ordered(self, rows: Rows, indices: Sequence[int], seed: int) -> list[int]:
        """Row indices in the order in which `examples` gives them out: shuffled by `seed`."""
        return sorted(indices, key=lambda index: _digest(f"{seed}/{index}"))

    def _divide(self, rows: Rows, indices: Sequence[int], part: str) -> list[int]:
        """The indices of `"train"` or `"eval"`. Goes by content: the order in which rows are published does not matter."""
        ranks = {index: _digest(f"{self.division_seed}/{_at(rows, index, self.division_key)}") for index in indices}
        distinct = sorted(set(ranks.values()))
        if not distinct:
            return []
        held_out = set(distinct[round(TRAIN_SHARE * len(distinct)) :])
        return [index for index in indices if (ranks[index] in held_out) == (part == "eval")]


def _digest(text: str) -> bytes:
    """A hash in place of a random number: equal on every machine, Python and library version."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _at(rows: Rows, index: int, read: Any) -> Any:
    """`read(rows[index])`, with the file and the row in the message if it fails."""
    try:
        return read(rows[index])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{rows.where(index)}: {reason}") from error
