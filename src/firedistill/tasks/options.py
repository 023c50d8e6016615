"""The options of a choice as data hold them, and where a value stands among them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from string import ascii_uppercase
from typing import Any

from firedistill.tasks.cells import is_missing, shown, without_array
from firedistill.tasks.kinds import whole
from firedistill.tasks.reading import BadRow
from firedistill.tasks.sources import kind_of

_LETTERED = re.compile(r"\(?([A-Z])[).:]\s*")


def read_options(value: Any, subject: str, *, columns: bool, needed: bool) -> tuple[list[str], list[str]]:
    """The published labels of the options, A, B, ... if there are none, and their texts.

    Args:
        value: a list of texts or of mappings with `label` and `text`, a mapping of labels to texts, or JSON of either.
        subject: what errors call it.
        columns: the values of several columns, of which the last ones may be empty.
        needed: the answers are read as choices, so that the column cannot be left out.

    Raises:
        BadRow: they are not options.
    """
    if columns:
        while value and value[-1] in (None, ""):
            value.pop()
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):  # a cell of a text file
        with suppress(ValueError):
            value = json.loads(value)
    labels: Any = None
    fix = 'write a list of 2 to 26 texts: ["first", "second"]'
    if not needed:
        fix += ", or leave the column out by --columns options="
    if isinstance(value, list) and any(isinstance(option, Mapping) for option in value):
        if not all(isinstance(option, Mapping) and {"label", "text"} <= option.keys() for option in value):
            raise BadRow(f"{subject} has an option that is neither a text nor has the keys label and text", fix, kind_of(value))
        value = {name: [option[name] for option in value] for name in ("label", "text")}
    if isinstance(value, Mapping) and {"label", "text"} <= value.keys():
        labels, value = (without_array(value[name]) for name in ("label", "text"))
    elif isinstance(value, Mapping):  # Parquet and `datasets` have all labels in all rows
        labels = [label for label, text in value.items() if not (text is None or is_missing(text))]
        value = [value[label] for label in labels]
    if not isinstance(value, list) or not 2 <= len(value) <= len(ascii_uppercase):
        raise BadRow(f"{subject} is not a list of options", fix, kind_of(value))
    texts = [shown(option) for option in value]
    if None in texts or len(set(texts)) < len(texts):
        raise BadRow(f"{subject} has an option that is empty or occurs twice", "correct it or remove the row", kind_of(value))
    options = [str(text) for text in texts]
    bare = [_without_letter(option, letter) for option, letter in zip(options, ascii_uppercase, strict=False)]
    options = options if None in bare else [str(option) for option in bare]
    if labels is None or len(labels) != len(options):
        labels = ascii_uppercase[: len(options)]
    return [str(label) for label in labels], options


def places(value: Any, names: Sequence[str]) -> list[int]:
    """Where a value stands among labels or options. 1.0 and `1.0` count as 1, and case does not count, where no other is equal."""
    text = str(whole(value)).strip()
    for same in (str.strip, str.casefold, _without_zero):
        if found := [i for i, name in enumerate(names) if same(name) in (same(text), same(str(value).strip()))]:
            return found
    return []


def marked_places(text: str, labels: Sequence[str], options: Sequence[str]) -> list[int]:
    """Where `B)`, or `B) 21` if 21 is the text of B, stands among the options."""
    mark = _LETTERED.match(text)
    found = places(mark[1], labels) if mark else []
    return found if mark and text[mark.end() :] in ("", *(options[i] for i in found)) else []


def _without_zero(text: str) -> str:
    return text.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", text) else text


def option_number(value: Any) -> int | None:
    """The number of an option; 1.0 and `1.0`, which pandas makes of 1, count as 1."""
    found = re.fullmatch(r"(\d{1,2})(?:\.0)?", str(value).strip())
    return None if found is None else int(found[1])


def _without_letter(option: str, letter: str) -> str | None:
    """`A) 21`, `A. 21`, `(A) 21` or `A: 21` as `21`; None if the option does not begin so."""
    mark = _LETTERED.match(option)
    return option[mark.end() :] if mark and mark[1] == letter and mark.end() < len(option) else None
