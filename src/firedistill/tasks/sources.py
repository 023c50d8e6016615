"""Local files of published datasets, with the hub's columns, and checked access to the fields of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
MOST_LISTED = 20  # files of a folder in a message
PARQUET_EXPORT = "refs/convert/parquet"  # the hub's own conversion of datasets that were published as a loading script


class DataError(ValueError):
    """Invalid or missing data. The message names the place, the expected value, and the fix."""


@dataclass(frozen=True)
class Rows:
    """The rows of one published split.

    Attributes:
        source: a file or a hub dataset, for error messages.
        records: the rows, in published order.
        numbers: the 1-based line number of each row; None if the rows are numbered by position.
    """

    source: str
    records: Sequence[Mapping[str, Any]]
    numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.records[index]

    def where(self, index: int) -> str:
        """The place of a row, for error messages; rows count from 1."""
        return f"{self.source}, row {self.numbers[index] if self.numbers else index + 1}"


def refuse_data(name: str, data_dir: str | None) -> None:
    """Raise a DataError if a task that generates its problems is given data."""
    if data_dir is not None:
        raise DataError(
            f"{name} generates its problems and reads no data: leave data_dir ({data_dir}) out, or name another task"
        )


def find_file(data_dir: str | Path, folder: str, split: str) -> Path:
    """The local file of a split, in `<data_dir>/<folder>` or else in `data_dir` itself.

    Raises:
        DataError: no such file; lists the files that exist.
    """
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise DataError(
            f"data_dir {root} is not a folder: expected one with {split}.jsonl, {split}.jsonl.gz or {split}.parquet, or with a "
            f"sub-folder {folder} that has them"
        )
    places = [root / folder, root]
    for place in places:
        for suffix in SUFFIXES:
            if (place / f"{split}{suffix}").is_file():
                return place / f"{split}{suffix}"
    seen = "; ".join(f"in {place}: {_listing(place)}" for place in places if place.is_dir())
    raise DataError(
        f"data_dir {root} has no file for split {split!r}: expected {split}.jsonl, {split}.jsonl.gz or {split}.parquet there "
        f"or in its sub-folder {folder}. Found {seen}."
    )


def text_field(row: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    """`row[name]`, a text, without surrounding white space.

    Raises:
        DataError: the field is missing, not a text, or blank (unless `empty`).
    """
    value = _field(row, name, lambda value: isinstance(value, str), "text", "a JSON string")
    if not value.strip() and not empty:
        raise DataError(f"field {name!r}: expected text, found only blanks; fill it in or remove the row")
    return value.strip()


def optional_text(row: Mapping[str, Any], name: str) -> str | None:
    """Like `text_field`; None if the field is absent, null or blank."""
    return None if row.get(name) is None else text_field(row, name, empty=True) or None


def integer_field(row: Mapping[str, Any], name: str) -> int:
    """`row[name]`, an integer.

    Raises:
        DataError: the field is missing or not an integer.
    """

    def is_integer(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    return _field(row, name, is_integer, "an integer", "a JSON number")


def text_list_field(row: Mapping[str, Any], name: str, *, of: str | None = None) -> list[str]:
    """`row[name]`, a list of texts without surrounding white space. `of` names the enclosing field in messages.

    Raises:
        DataError: the field is missing or not a list of texts.
    """

    def is_text_list(value: object) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, str) for item in value)

    return [item.strip() for item in _field(row, name, is_text_list, "a list of texts", "a JSON list of strings", of)]


def mapping_field(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`row[name]`, a mapping.

    Raises:
        DataError: the field is missing or not a mapping.
    """
    return _field(row, name, lambda value: isinstance(value, Mapping), "a mapping", "a JSON object")


def label_error(name: str, label: object, labels: Sequence[str]) -> DataError:
    """The error for a gold label that is not among the options."""
    return DataError(
        f"field {name!r}: expected one of the labels {', '.join(labels)}, found {label!r}; correct it or remove the row"
    )


def _field(
    row: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool], expected: str, form: str, of: str | None = None
) -> Any:
    label = f"{of}.{name}" if of else name
    if name not in row:
        raise DataError(
            f"field {label!r} is missing (the row has: {', '.join(map(str, row)) or 'nothing'}); "
            "use the column names of the hub version"
        )
    if not is_valid(row[name]):
        raise DataError(f"field {label!r}: expected {expected}, found {kind_of(row[name])}; write it as {form}")
    return row[name]


def kind_of(value: Any) -> str:
    shown = repr(value)
    return "null" if value is None else f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _listing(folder: Path) -> str:
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    shown = ", ".join(names[:MOST_LISTED]) or "nothing"
    return shown + (f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else "")
