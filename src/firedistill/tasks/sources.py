"""Rows of a dataset, from the hub or from local files in the hub's columns, and checked access to their fields."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
PARQUET_EXPORT = "refs/convert/parquet"  # the hub's own conversion of datasets that were published as a loading script


class DataError(ValueError):
    """Data that cannot be used. The message says where it is, what was expected, and how to mend it."""


@dataclass(frozen=True)
class Rows:
    """The rows of one published split.

    Attributes:
        source: a file or a hub dataset, for messages.
        records: the rows, in published order.
        numbers: the 1-based line of each row where that differs from its position (blank lines), else None.
    """

    source: str
    records: Sequence[Mapping[str, Any]]
    numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.records[index]

    def where(self, index: int) -> str:
        """Where the row is, for a message; rows count from 1."""
        return f"{self.source}, row {self.numbers[index] if self.numbers else index + 1}"


def load_rows(
    hub_id: str | None,
    config: str | None,
    split: str,
    revision: str | None = None,
    *,
    folder: str | None = None,
    data_dir: str | Path | None = None,
) -> Rows:
    """The rows of one published split: from `data_dir` if given, else from the hub.

    Args:
        hub_id, config, revision: as `datasets.load_dataset` takes them.
        split: the name of the split as published.
        folder: the sub-folder of `data_dir` in which this dataset may lie.
        data_dir: a folder with `<split>.jsonl`, `<split>.jsonl.gz` or `<split>.parquet`, or with `folder` that holds it.

    Raises:
        DataError: no such file, an unreadable one, or the hub did not give the split.
    """
    if data_dir is not None:
        return read_file(find_file(data_dir, folder, split))
    if hub_id is None:
        raise DataError(f"no hub dataset is known for split {split!r}: pass data_dir")
    return load_from_hub(hub_id, config, split, revision, folder)


def find_file(data_dir: str | Path, folder: str | None, split: str) -> Path:
    """The local file of a split; `<data_dir>/<folder>` is looked at before `data_dir` itself.

    Raises:
        DataError: there is none; lists what is there.
    """
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise DataError(f"data_dir {root} is not a folder")
    places = [root / folder, root] if folder else [root]
    for place in places:
        for suffix in SUFFIXES:
            if (place / f"{split}{suffix}").is_file():
                return place / f"{split}{suffix}"
    seen = "; ".join(f"in {place}: {_listing(place)}" for place in places if place.is_dir())
    raise DataError(
        f"data_dir {root} has no file for split {split!r}: expected {split}.jsonl, {split}.jsonl.gz or {split}.parquet there"
        + (f" or in its sub-folder {folder}" if folder else "")
        + f". Found {seen}."
    )


def read_file(path: str | Path) -> Rows:
    """All rows of a `.jsonl`, `.jsonl.gz` or `.parquet` file.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    path = Path(path)
    if path.name.endswith(".parquet"):
        return _read_parquet(path)
    try:
        return _read_json_lines(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}): fetch it again or rewrite it") from error


def load_from_hub(hub_id: str, config: str | None, split: str, revision: str | None, folder: str | None = None) -> Rows:
    """One split from the Hugging Face hub. Never runs code from the hub.

    Raises:
        DataError: the hub cannot be reached, or has no such dataset, configuration or split.
    """
    import datasets  # takes a second to import, and local files do not need it

    if revision == PARQUET_EXPORT:  # that branch carries no list of configurations, only folders named after them
        request: dict[str, Any] = {"data_files": {split: f"{config}/{split}/*.parquet"}}
    else:
        request = {"name": config}
    try:
        records = list(datasets.load_dataset(hub_id, split=split, revision=revision, **request))
    except Exception as error:  # the hub client raises many unrelated types; to the user they are one thing
        raise DataError(
            f"could not load {_hub_name(hub_id, config)}, split {split!r}, from the Hugging Face hub "
            f"({type(error).__name__}: {_first_line(error)}). If the hub cannot be reached from here, pass a local copy in "
            f"the hub's columns: data_dir (--data_dir) with {split}.jsonl, {split}.jsonl.gz or {split}.parquet"
            + (f", alone or in a sub-folder {folder}." if folder else ".")
        ) from error
    return Rows(f"{_hub_name(hub_id, config)}, split {split!r}", records)


def text_field(row: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    """`row[name]`, a text, with outer white space removed.

    Raises:
        DataError: it is missing, no text, or blank (unless `empty`).
    """
    value = _field(row, name)
    if not isinstance(value, str):
        raise DataError(f"field {name!r}: expected text, found {_kind(value)}; write it as a JSON string")
    if not value.strip() and not empty:
        raise DataError(f"field {name!r}: expected text, found only blanks; fill it in or remove the row")
    return value.strip()


def optional_text(row: Mapping[str, Any], name: str) -> str | None:
    """Like `text_field`; None when the field is absent, null or blank."""
    return None if row.get(name) is None else text_field(row, name, empty=True) or None


def integer_field(row: Mapping[str, Any], name: str) -> int:
    """`row[name]`, an integer.

    Raises:
        DataError: it is missing or no integer.
    """
    value = _field(row, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"field {name!r}: expected an integer, found {_kind(value)}; write it as a JSON number")
    return value


def text_list_field(row: Mapping[str, Any], name: str, *, of: str | None = None) -> list[str]:
    """`row[name]`, a list of texts, each with outer white space removed. `of` names the enclosing field in messages.

    Raises:
        DataError: it is missing or no list of texts.
    """
    label = f"{of}.{name}" if of else name
    value = _field(row, name, label)
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise DataError(f"field {label!r}: expected a list of texts, found {_kind(value)}; write it as a JSON list of strings")
    return [item.strip() for item in value]


def mapping_field(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`row[name]`, a mapping.

    Raises:
        DataError: it is missing or no mapping.
    """
    value = _field(row, name)
    if not isinstance(value, Mapping):
        raise DataError(f"field {name!r}: expected a mapping, found {_kind(value)}; write it as a JSON object")
    return value


def label_error(name: str, label: object, labels: Sequence[str]) -> DataError:
    """The error for a gold label that is none of the options."""
    return DataError(
        f"field {name!r}: expected one of the labels {', '.join(labels)}, found {label!r}; correct it or remove the row"
    )


def _field(row: Mapping[str, Any], name: str, label: str | None = None) -> Any:
    if name not in row:
        raise DataError(
            f"field {label or name!r} is missing (the row has: {', '.join(map(str, row)) or 'nothing'}); "
            f"use the column names of the hub version"
        )
    return row[name]


def _kind(value: Any) -> str:
    shown = repr(value)
    return "null" if value is None else f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _read_json_lines(path: Path) -> Rows:
    """One JSON object per line. Only a line feed ends a line: `str.splitlines` would also cut at U+2028, which rows contain."""
    opener = gzip.open if path.name.endswith(".gz") else open
    records, numbers = [], []
    with opener(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                records.append(_parse_line(path, number, line))
                numbers.append(number)
    return Rows(str(path), records, numbers)


def _parse_line(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{path}, row {number}: expected one JSON object in UTF-8 ({error}); each line must be a complete object"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, row {number}: expected a JSON object, found {_kind(record)}; name the columns")
    return record


def _read_parquet(path: Path) -> Rows:
    import pyarrow.parquet

    try:
        return Rows(str(path), pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet ({_first_line(error)}): fetch it again or rewrite it") from error


def _listing(folder: Path, limit: int = 20) -> str:
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    shown = ", ".join(names[:limit]) or "nothing"
    return shown + (f", and {len(names) - limit} more" if len(names) > limit else "")


def _hub_name(hub_id: str, config: str | None) -> str:
    return f"{hub_id} ({config})" if config else hub_id


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
