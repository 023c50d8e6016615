"""Settings from recipes (the YAML files of this folder, or the user's own) and command-line options.

Errors name the option, where it stands, and what was expected.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from firedistill.coerce import built_in_names, coerce, is_secret, read_yaml
from firedistill.config import UNUSED, SelfDistillConfig, WarmStartConfig, without_effect
from firedistill.objectives import load_objective
from firedistill.tasks.reading import is_data_file
from firedistill.terminal import nearest, shortened

Config = TypeVar("Config", bound=SelfDistillConfig)


class OptionError(ValueError):
    """An invalid recipe or option."""


def build_config(
    kind: type[Config], recipe: str | None, overrides: Mapping[str, Any], places: Mapping[str, str] | None = None
) -> Config:
    """The settings of a recipe (a path, the name of a built-in one, or None), updated by `overrides`.

    An override named `method_settings.NAME` sets a single entry of that mapping. A warm start leaves the method of a recipe out.

    Args:
        places: where overrides stand, for errors; the others stand on the command line.

    Raises:
        OptionError: an unreadable recipe, an unknown option, or an invalid value.
    """
    settings, types = read_recipe(recipe) if recipe else {}, option_types(kind)
    if issubclass(kind, WarmStartConfig):
        settings.pop("method", None)
    engine = overrides.get("rollouts")
    if engine not in (None, "server"):  # the settings of the engine that the recipe has
        settings.pop("rollout_servers", None)
        if engine not in ("vllm", "auto"):
            settings.pop("vllm_weights", None)
    method = overrides.get("method", settings.get("method") or kind.method)
    settings |= settings_by_method(settings.pop("methods", None), types, recipe).get(str(method), {})
    values = {name: (value, f"in {recipe}") for name, value in settings.items()}
    for option, value in sorted(overrides.items(), key=lambda given: "." in given[0]):  # a mapping, then its entries
        name, dot, key = option.partition(".")
        if dot:
            earlier, where = values.get(name, ({}, ""))
            if not isinstance(earlier, dict):
                raise OptionError(f"--{option}: {name} is {earlier!r} {where}, expected a mapping")
            value = earlier | {key: value}
        values[name] = (value, (places or {}).get(option, "on the command line"))
    given = converted(values, types)
    try:
        return kind(**given)
    except (ValueError, ImportError) as error:
        raise OptionError(str(error)) from error


def converted(values: Mapping[str, tuple[Any, str]], types: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the types of the options that they are for.

    Args:
        values: each with where it stands, for errors.
        types: see `option_types`.

    Raises:
        OptionError: an option is unknown or without effect, or a value is not of its type.
    """
    found = {}
    for name, (value, where) in values.items():
        if name not in types:
            hint = nearest(str(name), types) or "; see --help and --help-all"
            raise OptionError(f"unknown option {shortened(repr(name))} {where}{hint}")
        if name in UNUSED:  # also where the value is the default
            raise OptionError(f"{without_effect(name)} ({name} {where})")
        try:
            found[name] = coerce(value, types[name])
        except TypeError as error:
            shown = "not usable" if is_secret(name) else shortened(repr(value))
            raise OptionError(f"{name} {where} is {shown}: {error}") from error
    if found.get("do_eval") is False:  # transformers derives it
        raise OptionError("do_eval false has no effect: a run is evaluated unless eval_size is 0; use eval_size 0")
    return found


def option_types(kind: type[SelfDistillConfig]) -> dict[str, Any]:
    """The types of all options by name."""
    types = typing.get_type_hints(kind)
    return {option.name: types[option.name] for option in fields(kind) if option.init}


def read_recipe(name: str) -> dict[str, Any]:
    """The mapping in a YAML file, in the `config.yaml` of a run directory, or in the built-in recipe of that name.

    Raises:
        OptionError: there is no such file, or it is not a YAML mapping.
    """
    path = Path(name) / "config.yaml" if (Path(name) / "config.yaml").is_file() else Path(name)
    source = path if path.is_file() else resources.files(__name__) / f"{name}.yaml"
    if not source.is_file():
        raise OptionError(f"no recipe {name!r}: neither a file nor one of {', '.join(built_in_names('recipes'))}")
    if is_data_file(name):
        raise OptionError(f"{name} is data and not a recipe: train on it by --task {name}")
    try:
        values = read_yaml(source)
    except ValueError as error:
        raise OptionError(f"{source} is not valid YAML: {error}") from error
    if values is None:
        raise OptionError(f"{source} is empty; expected options and their values, such as task: gsm8k")
    if not isinstance(values, dict):
        raise OptionError(f"{source} must hold a mapping of option names to values, not {type(values).__name__}")
    return values


def settings_by_method(methods: Any, types: Mapping[str, Any], recipe: str | None) -> dict[str, dict[str, Any]]:
    """A recipe's `methods`: of each method, the options that depend on it, such as its group size.

    Args:
        types: see `option_types`.

    Raises:
        OptionError: `methods` does not map method names to mappings of options, or a method or an option is not valid.
    """
    if methods is None:
        return {}
    if not isinstance(methods, dict) or not all(isinstance(options, dict) for options in methods.values()):
        raise OptionError(f"methods in {recipe} must hold a mapping of options for each method that it names")
    for name, options in methods.items():
        where = f"in {recipe}, methods: {name}"
        if "method" in options:
            raise OptionError(f"method {where} would replace the method that the options are for; leave it out")
        given = converted({option: (value, where) for option, value in options.items()}, types)
        try:
            check_method(str(name), given.get("method_settings", {}))
        except OptionError as error:
            raise OptionError(f"methods in {recipe}: {error}") from error
    return {str(name): options for name, options in methods.items()}


def check_method(name: str, settings: Mapping[str, Any]) -> None:
    """
    Raises:
        OptionError: no such method, no such setting of it, or an invalid value.
    """
    try:
        load_objective(name, settings)
    except ValueError as error:
        raise OptionError(str(error)) from error


def option_groups(kind: type[SelfDistillConfig]) -> dict[str, list[Field]]:
    """The options of firedistill by group, in the order of their declaration."""
    # `fields` puts an option that redeclares one of TrainingArguments in the place of the latter.
    classes = [cls for cls in reversed(kind.__mro__) if issubclass(cls, SelfDistillConfig)]
    names = list(dict.fromkeys(name for cls in classes for name in inspect.get_annotations(cls)))
    groups: dict[str, list[Field]] = {}
    for option in sorted((f for f in fields(kind) if f.metadata.get("group")), key=lambda f: names.index(f.name)):
        groups.setdefault(option.metadata["group"], []).append(option)
    return groups
