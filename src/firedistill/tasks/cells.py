"""The cells of a row: what a column name means, a cell as text, and texts with columns in braces."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firedistill.tasks.reading import shortest_decimal
from firedistill.tasks.sources import DataError
from firedistill.terminal import shortened

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class Template:
    """A text with columns in braces: `The hint is: {hint}`. Two braces stand for one. Nothing else is evaluated.

    Args:
        where: names the text in errors.
        what: what errors call the names in braces.

    Raises:
        DataError: a brace stands alone, or a name in braces is not a column.
    """

    def __init__(self, text: str, columns: Sequence[str], where: str, what: str = "column"):
        self.parts: list[str | tuple[str]] = []
        end = 0
        for found in _BRACES.finditer(text):
            self.parts.append(text[end : found.start()])
            end = found.end()
            if found[0] in ("{{", "}}"):
                self.parts.append(found[0][0])
            elif found[1] is None:
                raise DataError(
                    f"{where}: {found[0]!r} stands alone in {shortened(repr(text))}; write {found[0] * 2} for the character itself"
                )
            else:
                known(found[1], columns, where, what)
                self.parts.append((found[1],))
        self.parts.append(text[end:])

    @property
    def names(self) -> list[str]:
        """The columns in braces."""
        return [part[0] for part in self.parts if not isinstance(part, str)]

    def fill(self, row: Mapping[str, Any], missing: str | None = None) -> str | None:
        """The text for a row, with `missing` in place of a value that is missing, null or blank; None if that is None."""
        texts = [part if isinstance(part, str) else shown(cell(row, part[0])) or missing for part in self.parts]
        return None if None in texts else "".join(texts)  # type: ignore[arg-type]


def in_braces(text: str) -> list[str]:
    """The names in braces."""
    return [found[1] for found in _BRACES.finditer(text) if found[1]]


def known(name: str, columns: Sequence[str], where: str, what: str = "column") -> None:
    """
    Raises:
        DataError: the data have no column, and no key of nested data, of that name.
    """
    if name not in columns:
        close = difflib.get_close_matches(name, columns, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"{where}: there is no {what} {name!r}{hint} ({what}s: {shortened(', '.join(columns), 500)})")


def names_in(row: Mapping[str, Any], depth: int = 3) -> Iterator[str]:
    """The columns of a row, and the keys of nested data as `column.key`."""
    for name, value in row.items():
        yield str(name)
        if isinstance(value, Mapping) and depth > 1:
            yield from (f"{name}.{inner}" for inner in names_in(value, depth - 1))


def cell(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of `column.key` in nested data; None if there is none."""
    value: Any = row
    for key in [name] if name in row else name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    value = without_array(value)
    return None if is_missing(value) else value


def without_array(value: Any) -> Any:
    """An array or a number of NumPy, which pandas has in place of lists and numbers, as Python's; of 0.1 in float32 as 0.1."""
    if isinstance(value, list) or getattr(value, "shape", None):
        return [without_array(item) for item in value]
    if str(getattr(value, "dtype", "")) in ("float16", "float32"):
        return shortest_decimal(value.item(), value.dtype.type)
    return value.tolist() if hasattr(value, "tolist") else value


def is_missing(value: Any) -> bool:
    """Whether a value is one that pandas has in place of a missing one: NaN, NA or NaT."""
    return value != value if isinstance(value, float) else type(value).__name__ in ("NAType", "NaTType")


def shown(value: Any) -> str | None:
    """A cell as text for the teacher or the student: a text as it stands, other values as JSON; None if it is null or blank."""
    if isinstance(value, str):
        return value.strip() or None
    return None if value is None or is_missing(value) else json.dumps(value, ensure_ascii=False, default=str)
