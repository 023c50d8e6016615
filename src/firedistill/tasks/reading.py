"""Rows of files of any size, data sets and lists, read one at a time. A row that cannot be read has an error of its own, so that all of
them can be named at once."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from firedistill.tasks.sources import PARQUET_EXPORT, DataError, Rows, kind_of

TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".tsv", ".parquet")
CHUNK = 1024  # rows of a columnar file that are converted together
SHORT_LIST = 26  # numbers in a list that may be options; a longer one is an embedding
LONGEST_CELL = 2**31 - 1  # characters of a text file; a C long has no fewer bits on any platform


class BadRow(DataError):
    """A row that cannot be used.

    Attributes:
        kind: what is wrong, in the words that all such rows share.
        found: what this row has.
        fix: what to do about it.
    """

    def __init__(self, kind: str, fix: str, found: str = ""):
        super().__init__(f"{kind}{f' ({found})' if found else ''}; {fix}")
        self.kind, self.fix, self.found = kind, fix, found


def is_data_file(name: str) -> bool:
    return name.lower().endswith(TABLE_SUFFIXES)


def open_rows(path: Path) -> Rows:
    """The rows of a file; each is read when it is asked for.

    Raises:
        DataError: the file cannot be read as what its name says.
    """
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            return parquet_rows(path)
        if name.endswith((".csv", ".tsv")):
            return csv_rows(path, "\t" if name.endswith(".tsv") else None)
        if not name.endswith(".gz"):
            return JsonLines(path.open("rb")).rows(str(path))
        with gzip.open(path) as compressed, scratch_file() as file:
            shutil.copyfileobj(compressed, file)
        return JsonLines(file).rows(str(path))
    except (OSError, EOFError, zlib.error) as error:
        text = f"{path} cannot be read ({type(error).__name__}: {error}): download or write it again"
        raise DataError(text) from error


@contextmanager
def scratch_file() -> Iterator[IO[bytes]]:
    """A file without a name, which stays open after the block unless the block raises."""
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        yield file
    except BaseException:
        file.close()
        raise


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises BadRow if a key is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow("a key is given twice", "keep one of the two", next(name for name in names if names.count(name) > 1))
    return found


class JsonLines(Sequence[Mapping[str, Any]]):
    """One JSON object per line of a file, found by the places where the lines begin: 16 bytes of memory per row.

    Only a line feed ends a line; `str.splitlines` would also split at U+2028, which rows contain.

    Args:
        file: open for reading; closed with this object.
        numbers: the row number of every line; by default the line's own.
        problems: lines that stand for a row that could not be read, by their place.
    """

    def __init__(self, file: IO[bytes], numbers: array[int] | None = None, problems: Mapping[int, BadRow] | None = None):
        self.file, self.problems = file, problems or {}
        weakref.finalize(self, file.close)
        self.starts, self.numbers = array("q"), array("q")
        file.seek(0)
        place = 0
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                self.starts.append(place)
                self.numbers.append(number)
            place += len(line)
        if numbers is not None:
            self.numbers = numbers

    def rows(self, source: str) -> Rows:
        return Rows(source, self, self.numbers)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        if index in self.problems:
            raise self.problems[index]
        self.file.seek(self.starts[index])
        try:
            record = json.loads(self.file.readline().decode("utf-8-sig"), object_pairs_hook=with_unique_keys)
        except BadRow:
            raise
        except UnicodeDecodeError as error:
            raise BadRow("not text in UTF-8", "save the file in UTF-8", f"byte {error.object[error.start]:#04x}") from error
        except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, too deep
            raise BadRow("not JSON", "write one complete JSON object per line", str(error).split("\n")[0]) from error
        if not isinstance(record, dict):
            raise BadRow("not a JSON object", 'write every row as {"column": value, ...}', kind_of(record))
        return record

    def __reduce__(self) -> Any:
        raise TypeError("rows of an open file cannot be copied to another process")


def csv_rows(path: Path, delimiter: str | None) -> Rows:
    """The rows of a text file with a line of column names; an empty cell is None. Cells may span several lines.

    Args:
        delimiter: None for a comma, or for a semicolon or tab if the first line has one and no comma.

    Raises:
        DataError: column names are missing or repeated, the text is not UTF-8, or a quotation mark is not closed.
    """
    numbers, problems, start = array("q"), dict[int, BadRow](), 1
    with path.open(encoding="utf-8-sig", newline="") as text, scratch_file() as file, cells_of_any_length():
        try:
            first = text.readline()
            text.seek(0)
            if delimiter is None:
                delimiter = next((mark for mark in ",;\t" if mark in re.sub(r'"[^"]*"', "", first)), ",")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(reader, [])]
            if not names or len(set(names)) < len(names) or "" in names:
                found = ", ".join(names) or "none"
                raise DataError(f"{path}: the first line must name the columns, each by a name of its own; found {found}")
            start = reader.line_num + 1
            for cells in reader:
                if cells:
                    if len(cells) != len(names):
                        fix = f"put quotation marks around cells that hold {'a tab' if delimiter == chr(9) else delimiter}"
                        found = f"{len(cells)} instead of {len(names)}"
                        problems[len(numbers)] = BadRow("another number of cells than the first line", fix, found)
                    row = dict(zip(names, (cell.replace("\r\n", "\n") or None for cell in cells), strict=False))
                    file.write(json.dumps(row).encode() + b"\n")
                    numbers.append(start)
                start = reader.line_num + 1
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x}"
            raise DataError(f"{path}: not text in UTF-8 ({byte}); save the file in UTF-8") from error
        except csv.Error as error:
            fix = "a quotation mark that is not closed or stands inside of a cell? Write it twice there"
            raise DataError(f"{path}, row {start}: {error}; {fix}") from error
    return JsonLines(file, numbers, problems).rows(str(path))


@contextmanager
def cells_of_any_length() -> Iterator[None]:
    """No limit on the cells that the module csv reads, which is 128 KiB for the whole process outside of this block."""
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


class Columnar(Sequence[Mapping[str, Any]]):
    """Rows of columns in Arrow's format, converted `CHUNK` at a time where they are read in order.

    Args:
        length: the number of rows.
        read: returns the rows from the first to before the last index as a `pyarrow.Table`.

    Attributes:
        names_classes: rows hold the names of classes in place of the numbers that `datasets` stores (`ClassLabel`).
    """

    def __init__(self, length: int, read: Callable[[int, int], Any]):
        self.length, self.read, self.names_classes = length, read, False
        self.chunk: list[Any] = []
        self.start, self.last = 0, -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        in_order, self.last = index == self.last + 1, index
        if not self.start <= index < self.start + len(self.chunk):
            size = CHUNK if in_order else 1
            self.chunk, self.start = self._convert(index, min(index + size, self.length)), index
        return self.chunk[index - self.start]

    def _convert(self, start: int, end: int) -> list[Any]:
        import pyarrow

        try:
            table = self.read(start, end)
            has_map = any(pyarrow.types.is_map(kind) for kind in table.schema.types)  # the way for maps is several times slower
            rows = table.to_pylist(maps_as_pydicts="strict" if has_map else None)
            for field in table.schema:
                if needs_conversion(field.type):
                    for row in rows:
                        row[field.name] = converted(row[field.name], field.type)
            for name, names in class_names(table.schema).items() if self.names_classes else ():
                for row in rows:
                    if isinstance(number := row.get(name), int):
                        row[name] = names[number] if 0 <= number < len(names) else None  # -1 is a missing label
            return rows
        except (ValueError, KeyError, OverflowError, pyarrow.ArrowException) as error:  # texts, dates and maps unlike Python's
            if end - start > 1:
                self.last = start - 2  # one at a time, so that the error is that of a row
                return self._convert(start, start + 1)
            raise BadRow("values that cannot be read", "write the file again", str(error).split("\n")[0]) from error


def class_names(schema: Any) -> dict[str, list[str]]:
    """The names of the classes of each column in which `datasets` stores their numbers (`ClassLabel`)."""
    features = json.loads((schema.metadata or {}).get(b"huggingface", "{}")).get("info", {}).get("features", {})
    return {
        name: kind["names"] for name, kind in features.items() if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
    }


def with_class_names(rows: Rows) -> Rows:
    """The same rows, with the names of classes in place of their numbers."""
    if isinstance(rows.records, Columnar):
        rows.records.names_classes = True
    return rows


def needs_conversion(kind: Any) -> bool:
    """Whether an Arrow type is or contains one that `converted` changes."""
    import pyarrow

    if is_json(kind) or is_short_float(kind):
        return True
    if pyarrow.types.is_struct(kind):
        return any(needs_conversion(field.type) for field in kind)
    if not pyarrow.types.is_nested(kind):
        return False
    return needs_conversion(inner_type(kind))


def is_short_float(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_float16(kind) or pyarrow.types.is_float32(kind)


def is_json(kind: Any) -> bool:
    """Whether an Arrow type is `arrow.json`, in which `datasets` stores values whose types differ between rows, as text."""
    return getattr(kind, "extension_name", None) == "arrow.json"


def inner_type(kind: Any) -> Any:
    """The type of the items of a list, or of the values of a map."""
    return kind.item_type if hasattr(kind, "item_type") else kind.value_type


def converted(value: Any, kind: Any) -> Any:
    """A value of an Arrow type with what stands for texts in `arrow.json`, and with the shortest decimals of numbers in float32 and
    float16: 0.1, which as float64 is 0.10000000149011612. Lists of more than `SHORT_LIST` numbers stay as they are."""
    import pyarrow

    if value is None or not needs_conversion(kind):
        return value
    if is_json(kind):
        return json.loads(value)
    if isinstance(value, float):
        return shortest_decimal(value, kind.to_pandas_dtype())
    if isinstance(value, dict):
        if pyarrow.types.is_struct(kind):
            return {field.name: converted(value[field.name], field.type) for field in kind}
        return {name: converted(item, inner_type(kind)) for name, item in value.items()}
    if is_short_float(inner_type(kind)) and len(value) > SHORT_LIST:
        return value
    return [converted(item, inner_type(kind)) for item in value]


def shortest_decimal(value: float, kind: Any) -> float:
    """A number of a NumPy type as its shortest decimal. A whole number stays as it is."""
    return value if value.is_integer() else float(str(kind(value)))


def parquet_rows(path: Path) -> Rows:
    """The rows of a Parquet file, whose columns are in memory."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet ({error}): download or write it again") from error
    return Rows(str(path), Columnar(len(table), lambda start, end: table.slice(start, end - start)))


def rows_of(data: Any, source: str) -> Rows:
    """The rows of a `datasets.Dataset`, or of a sequence of mappings.

    Raises:
        DataError: it is neither.
    """
    if hasattr(data, "with_format") and hasattr(data, "column_names") and hasattr(data, "__len__"):
        arrow = data.with_format("arrow")
        return Rows(source, Columnar(len(data), lambda start, end: arrow[start:end]))
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return Rows(source, data)
    raise DataError(
        f"{source} is a {type(data).__name__}, expected a list of mappings or a datasets.Dataset (not a streaming one)"
    )


def folder_splits(folder: Path) -> dict[str, Path]:
    """The data files of a folder by the name of their split, `<split>.jsonl` for instance.

    Raises:
        DataError: it has none, or several of one split.
    """
    splits: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        suffix = next((suffix for suffix in TABLE_SUFFIXES if path.name.lower().endswith(suffix)), None)
        if suffix is None or not path.is_file():
            continue
        name = path.name[: -len(suffix)]
        if name in splits:
            raise DataError(f"{folder} has two files of the split {name!r}: {splits[name].name} and {path.name}; remove one")
        splits[name] = path
    if not splits:
        saved = any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))
        if saved or (folder / "data").is_dir():
            kind, load = (
                ("a folder of save_to_disk", "load_from_disk") if saved else ("a clone of a hub dataset", "load_dataset")
            )
            call = f"datasets.{load}({str(folder)!r})"
            raise DataError(
                f"{folder} looks like {kind}: write each split as a file, as in {call}['train'].to_parquet('train.parquet')"
            )
        raise DataError(f"{folder} has no data files: expected <split>{', <split>'.join(TABLE_SUFFIXES)}")
    return splits


def hub_splits(hub_id: str, config: str | None) -> list[str]:
    """The names of a hub dataset's splits. Never runs code from the hub.

    Raises:
        DataError: the hub cannot be reached, or has no such dataset or configuration.
    """
    import datasets

    try:
        return list(datasets.get_dataset_split_names(hub_id, config))
    except Exception as error:  # the hub client raises many unrelated types
        name = f"{hub_id}:{config}" if config else hub_id
        raise DataError(
            f"could not find the dataset {name!r} on the Hugging Face hub ({type(error).__name__}: {str(error).split(chr(10))[0]}). A "
            "configuration is named after a colon. If the hub is unreachable, name a local file or folder instead"
        ) from error


def hub_rows(hub_id: str, config: str | None, split: str, revision: str | None = None, folder: str | None = None) -> Rows:
    """The rows of one split of a hub dataset, which `datasets` maps into memory. Never runs code from the hub.

    Args:
        hub_id, config, split, revision: as in `datasets.load_dataset`.
        folder: the sub-folder of `data_dir` that the error message suggests for a local copy; by default the name of the dataset.

    Raises:
        DataError: the hub cannot be reached, or has no such dataset, configuration or split.
    """
    import datasets  # takes a second to import, and local files do not need it

    if revision == PARQUET_EXPORT:  # that branch has no list of configurations, only folders named after them
        request: dict[str, Any] = {"data_files": {split: f"{config}/{split}/*.parquet"}}
    else:
        request = {"name": config}
    source = f"{hub_id} ({config}), split {split!r}" if config else f"{hub_id}, split {split!r}"
    try:
        dataset = datasets.load_dataset(hub_id, split=split, revision=revision, **request)
    except Exception as error:  # the hub client raises many unrelated types
        kind, text = type(error).__name__, str(error).strip()
        raise DataError(
            f"could not load {source}, from the Hugging Face hub ({kind}: {(text or kind).partition(chr(10))[0]}). If the hub is "
            f"unreachable, pass a local copy in the hub's columns: data_dir (--data_dir) with {split}.jsonl, {split}.jsonl.gz or "
            f"{split}.parquet, alone or in a sub-folder {folder or hub_id.rpartition('/')[2]}."
        ) from error
    return rows_of(dataset, source)
