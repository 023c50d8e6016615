"""Recipes and command-line options to settings, with errors that name the option, what was expected, and where it stood."""

from __future__ import annotations

import difflib
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from firedistill.config import SelfDistillConfig
from firedistill.objectives import objective_class

Config = TypeVar("Config", bound=SelfDistillConfig)


class OptionError(ValueError):
    """A recipe or an option that cannot be understood."""


def build_config(kind: type[Config], recipe: str | None, overrides: Mapping[str, Any]) -> Config:
    """Settings from a recipe (a path, the name of a built-in one, or None) and overrides, which win.

    Raises:
        OptionError: an unknown option, a value of the wrong type, an unreadable recipe, or values that cannot be meant.
    """
    from_recipe = read_recipe(recipe) if recipe else {}
    from_recipe |= settings_of_method(
        from_recipe.pop("methods", None), overrides.get("method", from_recipe.get("method")), recipe
    )
    values = {name: (value, f"in {recipe}") for name, value in from_recipe.items()}
    for name, value in overrides.items():
        mapping, dot, key = name.partition(".")
        if dot:  # --method_settings.alpha 0.3 changes one entry of the mapping
            given = values.get(mapping, ({}, ""))[0]
            if not isinstance(given, dict):
                raise OptionError(f"--{name}: {mapping} is {given!r} {values[mapping][1]}, expected a mapping")
            values[mapping] = (given | {key: value}, "on the command line")
        else:
            values[name] = (value, "on the command line")
    known = {f.name: f for f in fields(kind) if f.init}
    annotations = typing.get_type_hints(kind)
    settings = {}
    for name, (value, where) in values.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; see --help and --help-all"
            raise OptionError(f"unknown option {name!r} {where}{hint}")
        try:
            settings[name] = coerce(value, annotations[name])
        except (TypeError, ValueError) as error:
            raise OptionError(f"{name} {where} is {value!r}: {error}") from error
    if "report_to" in settings and settings["report_to"] is None:
        settings["report_to"] = "none"  # transformers would look for a tracker called None
    try:
        return kind(**settings)
    except (ValueError, ImportError) as error:
        raise OptionError(str(error)) from error


def read_recipe(name: str) -> dict[str, Any]:
    """The mapping in a YAML file, or in the built-in recipe of that name.

    Raises:
        OptionError: there is none, or it holds no mapping.
    """
    path = Path(name)
    built_in = resources.files("firedistill.recipes") / f"{name}.yaml"
    if path.is_dir() and (path / "config.yaml").is_file():
        path = path / "config.yaml"
    if not path.is_file() and not built_in.is_file():
        raise OptionError(f"no recipe {name!r}: neither a file nor one of {', '.join(built_in_recipes())}")
    try:
        text = (path if path.is_file() else built_in).read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            # A dozen lines of them stand for more values than any machine holds.
            raise OptionError(f"{name} has aliases (*name), which a recipe may not have: write the values out")
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise OptionError(f"{name} must hold a mapping of option names to values, not {type(values).__name__}")
    return values or {}


def settings_of_method(methods: Any, chosen: str | None, recipe: str | None) -> dict[str, Any]:
    """What a recipe's `methods` says about the chosen method: options that change with it, such as its group size.

    Raises:
        OptionError: it is no mapping of method names to mappings of options.
    """
    if methods is None:
        return {}
    if not isinstance(methods, dict) or not all(isinstance(options, dict) for options in methods.values()):
        raise OptionError(f"methods in {recipe} must hold a mapping of options for each method that it names")
    for name in methods:
        try:
            objective_class(name)
        except ValueError as error:
            raise OptionError(f"methods in {recipe}: {error}") from error
    return methods.get(chosen or SelfDistillConfig.method, {})


def built_in_recipes() -> list[str]:
    return sorted(
        f.name.removesuffix(".yaml") for f in resources.files("firedistill.recipes").iterdir() if f.name.endswith(".yaml")
    )


def parse_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """`--name value`, `--name=value` and `--flag` to a mapping of strings.

    Raises:
        OptionError: an argument that is no option, or one given twice.
    """
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise OptionError(f"{argument!r} is no option; options are written --name value")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        name = name.replace("-", "_")
        if name in overrides:
            raise OptionError(f"--{name} is given twice")
        overrides[name] = value
    return overrides


def coerce(value: Any, annotation: Any) -> Any:
    """A YAML value or a command-line string as the type of an option.

    Raises:
        TypeError, ValueError: it is none; the message says what was expected.
    """
    choices = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)
    if value is None or (isinstance(value, str) and value.lower() in {"none", "null"}):
        if type(None) in choices:
            return None
        if not (isinstance(value, str) and str in choices):
            raise TypeError(f"expected {describe(annotation)}")
    for choice in sorted((c for c in choices if c is not type(None)), key=_strictness):
        try:
            return _as(value, choice)
        except (TypeError, ValueError, yaml.YAMLError):
            continue
    raise TypeError(f"expected {describe(annotation)}")


def _strictness(kind: Any) -> int:
    """Plain text takes anything, so it is tried last."""
    return {bool: 0, int: 1, float: 2, str: 9}.get(kind, 5)


def _as(value: Any, kind: Any) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin is bool:
        if isinstance(value, bool):
            return value
        truth = {"true": True, "false": False, "yes": True, "no": False}.get(str(value).lower())
        return _fail() if truth is None else truth
    if isinstance(value, bool):
        _fail()
    if origin is int:
        number = float(value)
        return int(number) if number.is_integer() else _fail()
    if origin is float:
        return float(value)
    if origin is str:
        return str(value) if isinstance(value, str | int | float) else _fail()
    if origin is list:
        items = yaml.safe_load(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
        items = [item.strip() for item in items.split(",")] if isinstance(items, str) else items
        return [_as(item, (typing.get_args(kind) or (str,))[0]) for item in items] if isinstance(items, list) else _fail()
    if origin is dict:
        mapping = json.loads(value) if isinstance(value, str) else value
        return mapping if isinstance(mapping, dict) else _fail()
    if isinstance(origin, type):  # an enumeration of transformers
        return origin(value)
    _fail()


def _fail() -> typing.NoReturn:
    raise TypeError


def describe(annotation: Any) -> str:
    """A type in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    choices = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)
    named = [words.get(typing.get_origin(c) or c, getattr(c, "__name__", str(c))) for c in choices if c is not type(None)]
    return " or ".join(dict.fromkeys(named + (["none"] if type(None) in choices else [])))


def option_groups(kind: type[SelfDistillConfig]) -> dict[str, list[Field]]:
    """Our own options by group, in the order in which they are declared."""
    # Among a dataclass's fields, those that replace an inherited one stand in its place.
    ours = [c for c in reversed(kind.__mro__) if issubclass(c, SelfDistillConfig)]
    declared = list(dict.fromkeys(name for c in ours for name in inspect.get_annotations(c)))
    groups: dict[str, list[Field]] = {}
    for option in sorted((f for f in fields(kind) if "group" in f.metadata), key=lambda f: declared.index(f.name)):
        groups.setdefault(option.metadata["group"], []).append(option)
    return groups


def default_of(option: Field) -> Any:
    return option.default if option.default is not MISSING else cast(Callable[[], Any], option.default_factory)()
