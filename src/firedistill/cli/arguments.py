"""Arguments of commands that take a recipe and the options of a run: `[RECIPE] [--option value ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from firedistill.config import SelfDistillConfig
from firedistill.recipes import build_config, parse_overrides


class Parser(argparse.ArgumentParser):
    """A parser for a command's own options, which leaves the options of a run to `parse_known_args`. Its errors are ValueErrors."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def from_zero(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def option_names(text: str) -> list[str]:
    """Names of options, separated by commas."""
    return [name.replace("-", "_") for name in text.split(",") if name]


def split_recipe(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, if the first argument is one, and the other arguments."""
    if arguments and not arguments[0].startswith("--"):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def config_of(config_class: type[SelfDistillConfig], arguments: Sequence[str]) -> SelfDistillConfig:
    """The settings that `[RECIPE] [--option value ...]` stand for."""
    recipe, rest = split_recipe(arguments)
    overrides = parse_overrides(rest)
    if recipe is not None and (Path(recipe) / "config.yaml").is_file():
        overrides.setdefault("output_dir", recipe)  # a run that was moved is where it is, not where it was
    return build_config(config_class, recipe, overrides)
