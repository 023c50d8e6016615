"""Values from YAML files and command lines as the types that settings declare."""

from __future__ import annotations

import enum
import json
import math
import types
import typing
from contextlib import suppress
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


def coerce(value: Any, annotation: Any) -> Any:
    """A value as the annotated type; of a union, as the narrowest member that fits.

    Numbers and truth values may come as text, lists as comma-separated or YAML text, mappings as JSON text, and None as "none" or
    "null". What lists and mappings hold is converted, too. Of any other class, the value must be an instance; annotations that are not
    classes accept every value.

    Raises:
        TypeError: the value does not fit; the message says what was expected.
    """
    kinds = _members(annotation)
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
        if types.NoneType in kinds:
            return None
        kinds = [kind for kind in kinds if kind in (str, Any) or typing.get_origin(kind) is typing.Literal]
    breadth = {bool: 0, int: 1, float: 2, str: 9}  # any text is a str, so that str comes last
    for kind in sorted(kinds, key=lambda kind: breadth.get(kind, 5)):
        try:
            return _converted(value, kind)
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
            continue
    quoted = isinstance(value, dict) and any(isinstance(word, bool) for pair in value.items() for word in pair)
    hint = "; YAML reads on, off, yes and no as truth values unless they are in quotation marks" if quoted else ""
    raise TypeError(f"expected {describe(annotation)}{hint}")


def describe(annotation: Any) -> str:
    """The annotated type in words, such as "a number or none"."""
    words = []
    for kind in sorted(_members(annotation), key=lambda kind: kind is types.NoneType):
        origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is typing.Literal:
            words += [repr(choice) for choice in arguments]
        elif origin is dict and arguments and Any not in arguments:
            words.append(f"a mapping of {describe(arguments[0])} to {describe(arguments[1])}")
        else:
            words.append("none" if kind is types.NoneType else WORDS.get(origin, getattr(kind, "__name__", str(kind))))
    return " or ".join(dict.fromkeys(words))


def _members(annotation: Any) -> list[Any]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return list(typing.get_args(annotation)) if is_union else [annotation]


def _converted(value: Any, kind: Any) -> Any:
    """The value as a type that is not a union. If it does not fit, any error of the conversion is raised."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return arguments[arguments.index(value)]
    if origin is Any or not isinstance(origin, type):
        return value
    if isinstance(value, str) and origin in (bool, list, tuple, dict):
        value = _parsed(value, origin)
    if isinstance(value, bool) and origin is not bool:
        raise TypeError
    if origin is int:
        with suppress(ValueError):  # "1e3" is whole, too
            value = int(value) if isinstance(value, str) else value
        number = value if isinstance(value, int) else float(value)
        value = int(number) if number == int(number) else None
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        value = origin(coerce(item, (arguments or (Any,))[0]) for item in value)
    elif origin is dict and isinstance(value, dict) and arguments and Any not in arguments:
        value = {coerce(key, arguments[0]): coerce(item, arguments[1]) for key, item in value.items()}
    elif origin is float or (origin is str and isinstance(value, int | float)) or issubclass(origin, enum.Enum):
        value = origin(value)
    if not isinstance(value, origin) or (origin is float and math.isnan(value)):
        raise TypeError
    return value


def _parsed(text: str, kind: type) -> Any:
    if kind is bool:
        return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]
    if kind is dict:
        return json.loads(text, object_pairs_hook=with_unique_keys)
    return parse_yaml(text) if text.lstrip().startswith("[") else [item.strip() for item in text.split(",")]


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of these pairs; raises ValueError if a key is repeated."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def is_secret(name: str) -> bool:
    """Whether the option holds a secret, which no file, log or message may show."""
    return name.endswith("_token")


# ---- YAML ------------------------------------------------------------------------------------------------------------------

MOST_BYTES, MOST_LEVELS = 2**18, 30


class PlainLoader(yaml.SafeLoader):
    """Loads plain values only, in time and memory proportional to the text: no aliases, no repeated keys, no deep nesting."""

    levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # A dozen lines of nested aliases stand for more values than fit into memory.
        if self.check_event(yaml.AliasEvent):
            problem = "it has aliases (*name), which are not accepted: write the values out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        self.levels += 1
        if self.levels > MOST_LEVELS:
            problem = f"it is nested more than {MOST_LEVELS} levels deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [key for key, _ in node.value]
            names = [self.construct_object(key, deep=True) for key in keys]
            second = next(position for position, name in enumerate(names) if name in names[:position])
            first, again = (str(keys[position].value)[:80] for position in (names.index(names[second]), second))
            problem = f"{again!r} is given twice" if first == again else f"{first!r} and {again!r} are the same key"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=keys[second].start_mark)
        return mapping


def parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for.

    Raises:
        ValueError: it is not valid YAML, has aliases or repeated keys, or is too deeply nested; the message says where.
    """
    try:
        return yaml.load(text, Loader=PlainLoader)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML lets the errors of its conversions through, such as that of a date in a 13th month.
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def built_in_names(folder: str) -> list[str]:
    """The names, without `.yaml`, of the files that the package has in `recipes` or in `suites`."""
    names = [file.name for file in (resources.files("firedistill") / folder).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_yaml(path: Path | Traversable) -> Any:
    """The value in a YAML file.

    Raises:
        ValueError: as `parse_yaml`, or the file is too long or not text in UTF-8.
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        error.filename = error.filename or str(path)  # errors of reading name no file
        raise
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES // 1024} KiB")
    return parse_yaml(content.decode("utf-8"))
