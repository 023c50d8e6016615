"""Values from YAML files and command lines as the types that settings declare."""

from __future__ import annotations

import enum
import json
import math
import types
import typing
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
    "null". Of any other class, the value must be an instance; annotations that are not classes accept every value.

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
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError, yaml.YAMLError):
            continue
    raise TypeError(f"expected {describe(annotation)}")


def describe(annotation: Any) -> str:
    """The annotated type in words, such as "a number or none"."""
    words = []
    for kind in sorted(_members(annotation), key=lambda kind: kind is types.NoneType):
        origin = typing.get_origin(kind) or kind
        if origin is typing.Literal:
            words += [repr(choice) for choice in typing.get_args(kind)]
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
        number = value if isinstance(value, int) else float(value)
        value = int(number) if number == int(number) else None
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        value = origin(coerce(item, (arguments or (Any,))[0]) for item in value)
    elif origin is float or (origin is str and isinstance(value, int | float)) or issubclass(origin, enum.Enum):
        value = origin(value)
    if not isinstance(value, origin) or (origin is float and math.isnan(value)):
        raise TypeError
    return value


def _parsed(text: str, kind: type) -> Any:
    if kind is bool:
        return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]
    if kind is dict:
        return json.loads(text)
    return yaml.safe_load(text) if text.lstrip().startswith("[") else [item.strip() for item in text.split(",")]
