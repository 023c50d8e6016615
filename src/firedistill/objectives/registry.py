"""Methods by name, with their settings."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping
from typing import Any

from firedistill.coerce import coerce
from firedistill.imports import METHODS, load_object, load_plugin, plugins, refuse_plugin
from firedistill.objectives.base import Objective
from firedistill.terminal import nearest

_REGISTRY: dict[str, type[Objective]] = {}


def register(name: str) -> Callable[[type[Objective]], type[Objective]]:
    """Class decorator that makes an objective available to recipes under `name`.

    Raises:
        ValueError: the name is that of a built-in method.
    """

    def decorate(cls: type[Objective]) -> type[Objective]:
        if name in _REGISTRY and _REGISTRY[name].__module__.startswith("firedistill.") and _REGISTRY[name] is not cls:
            raise ValueError(f"{name!r} is a built-in method: register {cls.__name__} under another name")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def registered_objectives() -> dict[str, type[Objective]]:
    """The built-in methods, and those of modules that have been imported, by name."""
    return dict(sorted(_REGISTRY.items()))


def objective_class(name: str) -> type[Objective]:
    """The method of that name: registered, an entry point of an installed package, `module:Class`, or `file.py:Class`.

    Raises:
        ValueError: no such method, it cannot be imported, or it declares settings without being a dataclass.
    """
    if name in _REGISTRY:
        refuse_plugin(METHODS, name)
        return with_settings(_REGISTRY[name], name)
    try:
        cls = load_object(name) if ":" in name else load_plugin(METHODS, name)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"method {name!r} could not be loaded: {error}") from error
    if cls is None:
        known = sorted({*_REGISTRY, *plugins(METHODS)})
        raise ValueError(
            f"unknown method {name!r}{nearest(name, known)}; known are {', '.join(known)}, or module:Class or file.py:Class"
        )
    if not (isinstance(cls, type) and issubclass(cls, Objective)):
        raise ValueError(f"method {name!r} is not a subclass of firedistill.objectives.Objective")
    return with_settings(cls, name)


def with_settings(cls: type[Objective], name: str) -> type[Objective]:
    """The class, if its settings have the values that they declare; raises ValueError otherwise."""
    # Not in `register`, which may come before or after `dataclass`.
    declared = [key for kind in cls.__mro__ for key, value in vars(kind).items() if isinstance(value, dataclasses.Field)]
    if declared:
        raise ValueError(f"method {name!r} declares {', '.join(declared)} by setting(...), which needs @dataclass on the class")
    return cls


def load_objective(name: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """A method with its settings; the others keep their defaults.

    Raises:
        ValueError: no such method, no such setting, or an invalid value.
    """
    cls = objective_class(name)
    known = {f.name: f for f in dataclasses.fields(cls)}
    types = typing.get_type_hints(cls)
    values = {}
    for key, value in (settings or {}).items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"
            raise ValueError(f"method_settings: {name!r} has no setting {key!r}{hint}")
        try:
            values[key] = coerce(value, types[key])
        except TypeError as error:
            raise ValueError(f"method_settings: {key} is {value!r}; {error}") from error
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"method_settings of {name!r}: {error}") from error
