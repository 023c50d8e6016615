"""Methods by name, with their settings."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping
from typing import Any

from firedistill.coerce import coerce
from firedistill.imports import import_users_module
from firedistill.objectives.base import Objective

_REGISTRY: dict[str, type[Objective]] = {}


def register(name: str) -> Callable[[type[Objective]], type[Objective]]:
    """Class decorator that makes an objective available to recipes under `name`."""

    def decorate(cls: type[Objective]) -> type[Objective]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def registered_objectives() -> dict[str, type[Objective]]:
    """All methods by name."""
    return dict(sorted(_REGISTRY.items()))


def objective_class(name: str) -> type[Objective]:
    """The objective registered under `name`, or named by dotted path (`my_package.my_module:MyObjective`).

    Raises:
        ValueError: no such method.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            cls = getattr(import_users_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"method {name!r} could not be loaded: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, Objective)):
            raise ValueError(f"method {name!r} is not a subclass of firedistill.objectives.Objective")
        return cls
    if name not in _REGISTRY:
        raise ValueError(f"unknown method {name!r}; known are {', '.join(sorted(_REGISTRY))}, or a dotted path module:Class")
    return _REGISTRY[name]


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
