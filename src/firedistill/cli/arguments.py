"""Arguments of the commands that take a run's options: `[RECIPE] [--option value ...]`, parsed and checked before torch is imported."""

from __future__ import annotations

import argparse
import re
from argparse import Action, ArgumentError, Namespace
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from firedistill.cli.names import OF_TRL, method_names, setting_types
from firedistill.coerce import built_in_names
from firedistill.imports import METHODS, plugins
from firedistill.tasks import refuse_unknown
from firedistill.terminal import nearest

if TYPE_CHECKING:
    from firedistill.config import SelfDistillConfig

    Config = TypeVar("Config", bound=SelfDistillConfig)


def wants_help(arguments: Sequence[str]) -> bool:
    return any(argument in {"-h", "--help", "--help-all"} for argument in arguments)


def from_zero(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


SUITE = """\
Execute a list of training runs. Stop it at any point; the same command continues it.

NAME is one of {names}, a YAML file, or the folder of an existing suite.
Any other option is a setting of every run, as in `firedistill train`: --data_dir data, --max_steps 20, ...
"""

# The options of each command beside those of a run, as arguments of `add_argument`.
FLAG: dict[str, Any] = {"action": "store_true"}
TRAINING: dict[str, dict[str, Any]] = {
    "resume": FLAG,
    "overwrite": FLAG,
    "preflight": {"choices": ["run", "only", "skip"], "default": "run"},
    "allow_changes": {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME"},
}
OF_COMMANDS: dict[str, dict[str, dict[str, Any]]] = {
    "train": TRAINING,
    "warmstart": TRAINING,
    "eval": {"json": FLAG},
    "inspect": {
        "save": FLAG,
        "prompts": FLAG,
        "example": {"type": from_zero, "default": 0},
        "count": {"type": from_zero, "default": 1},
        "split": {},
        "checkpoint": {},
    },
    "data": {"json": FLAG, "rows": {"type": from_zero, "default": 3}},
}


class Setting(Action):
    """Keeps the value of a run's option, or `NAME=VALUE` words as a mapping, in `settings`; refuses one that is given twice."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        name = str(option_string)[2:]
        if name in namespace.settings:
            raise ArgumentError(None, f"--{name} is given twice")
        if self.nargs == "*":
            values = values[0] if len(values) == 1 and values[0].startswith("{") else mapping_of(values, name)
        namespace.settings[name] = values


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are ValueErrors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


class Parser(OneLineParser):
    """A parser of a run's options, and of a command's own."""

    def __init__(self, command: str | None = None) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.mappings = {name for name, kind in setting_types().items() if kind == "dict[str, str]"}
        self.own = OF_COMMANDS.get(command or "", {})
        for name, form in self.own.items():
            self.add_argument(f"--{name}", **form)
        for name in setting_types():
            self.add_setting(name)

    def add_setting(self, name: str) -> None:
        several = name in self.mappings
        form: dict[str, Any] = {"nargs": "*"} if several else {"nargs": "?", "const": "true"}
        self.add_argument(f"--{name}", action=Setting, default=argparse.SUPPRESS, **form)

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """The command's own options, `recipe` (or None), and the run's options as texts in `settings`.

        Raises:
            ValueError: an unknown option, an invalid or repeated one, or a word that is none.
        """
        words = list(arguments)
        recipe = words.pop(0) if words and not words[0].startswith("-") else None
        words = self.prepared(words)
        for name in dict.fromkeys(word.partition("=")[0][2:] for word in words):
            if name.partition(".")[0] in setting_types() and name not in setting_types():
                self.add_setting(name)
        options, rest = self.parse_known_args(words, Namespace(recipe=recipe, settings={}))
        if "--" in words:
            rest.insert(0, "--")
        for word in rest:
            if not word.startswith("--") or word == "--":
                before = next((name for name in reversed(words[: words.index(word)]) if name.startswith("--")), "")
                several = setting_types().get(before[2:].partition("=")[0], "").startswith("list")
                hint = "; several values are separated by commas" if several else ""
                raise ValueError(f"{word!r} is not an option; options are written --name value{hint}")
            name = word[2:].partition("=")[0].partition(".")[0]
            here = f"; what TRL calls {name} is {OF_TRL[name]} here" if name in OF_TRL else ""
            hint = here or nearest(name, [*setting_types(), *self.own]) or "; see --help and --help-all"
            raise ValueError(f"unknown option {name[:200]!r} on the command line{hint}")
        self.refuse_missing_values(words)
        return options

    def refuse_missing_values(self, words: Sequence[str]) -> None:
        """Raise ValueError for an option without a value, unless it is one that can be true."""
        for word, following in pairwise([*words, "--"]):
            kind = setting_types().get(word.removeprefix("--"), "bool")
            if (
                word.startswith("--")
                and following.startswith("--")
                and not re.search(r"\b(bool|dict)\b", kind)
                and word != "--resume_from_checkpoint"
            ):
                raise ValueError(f"{word} needs a value: {word} VALUE")

    def prepared(self, words: Sequence[str]) -> list[str]:
        """The words with underscores in names, and with values that begin with a dash joined to their names."""
        found: list[str] = []
        for word in words:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                name = "--" + name[2:].replace("-", "_")
                found += [name, value] if equals and name[2:] in self.mappings else [name + equals + value]
            elif word.startswith("-") and found and found[-1].startswith("--") and "=" not in found[-1]:
                found[-1] += f"={word}"
            else:
                found.append(word)
        return found


def mapping_of(words: Sequence[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` words as a mapping; raises ValueError for a word without `=`, or a name that is given twice."""
    mapping: dict[str, str] = {}
    for word in words or [""]:
        name, equals, value = word.partition("=")
        if not equals or name in mapping:
            problem = f"names {name!r} twice" if equals else f"has {word!r}, expected NAME=VALUE"
            raise ValueError(f"--{option} {problem} (with quotation marks around a value that has blanks: 'NAME=a b')")
        mapping[name] = value
    return mapping


def parse(command: str, arguments: Sequence[str]) -> Namespace:
    """What the arguments of a command say, with the names of recipe, method and task checked, as far as they are given.

    Raises:
        ValueError: see `Parser.parse`; or an unknown recipe, method or task, with the nearest known one.
    """
    options = Parser(command).parse(arguments)
    recipe, method, task = options.recipe, options.settings.get("method"), options.settings.get("task")
    recipes = built_in_names("recipes")
    if recipe is not None and command != "data" and recipe not in recipes and not Path(recipe).exists():
        kinds = "a run directory, an adapter or a recipe" if command in ("eval", "inspect") else "a file or folder"
        raise ValueError(f"there is no {recipe!r}: expected {kinds}, or one of {', '.join(recipes)}{nearest(recipe, recipes)}")
    if method is not None and ":" not in method and method not in method_names():
        known = sorted([*method_names(), *plugins(METHODS)])
        if method not in known:
            listed = ", ".join(known)
            raise ValueError(
                f"unknown method {method!r}{nearest(method, known)}; known are {listed}, or module:Class or file.py:Class"
            )
    if task is not None:
        refuse_unknown(task)
    return options


def refuse_unread(settings: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise ValueError for an option of a run that a command does not read.

    Args:
        read: the options that it reads.
    """
    for name in settings:
        if name.partition(".")[0] not in read:
            raise ValueError(f"--{name} has no effect on this command: leave it out")


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value` and `--flag` (true) as a mapping of texts; `--columns a=b c=d` as one of mappings.

    Raises:
        ValueError: see `Parser.parse`.
    """
    options = Parser().parse(words)
    if options.recipe is not None:
        raise ValueError(f"{options.recipe!r} is not an option; options are written --name value")
    return options.settings


def parse_suite(arguments: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """The options of `firedistill suite`, and those for every run."""
    parser = OneLineParser(
        prog="firedistill suite",
        usage="firedistill suite NAME [--seeds ...] [--only ...] [--option value ...] [--dry-run | --status | --retry-failed]",
        description=SUITE.format(names=", ".join(built_in_names("suites"))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="suite, YAML file, or folder")
    parser.add_argument("-o", "--output_dir", "--output-dir", help="folder of the suite (runs/NAME)")
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--dry-run", "--dry_run", action="store_true", help="show the runs and their commands, run nothing")
    one_of.add_argument("--status", action="store_true", help="show which runs are done, running, failed and to do")
    parser.add_argument("--seeds", nargs="+", type=numbers, help="use these seeds instead of the suite's: 0 or 0,1,2")
    parser.add_argument("--only", nargs="+", type=words, help="run only these methods: fire,full_context")
    one_of.add_argument("--retry-failed", "--retry_failed", action="store_true", help="run failed runs again")
    parser.add_argument("--gpus", nargs="+", type=words, help="one run at a time on each of these GPUs: 0,1,2,3")
    parser.add_argument("--jobs", type=int, help="number of concurrent runs (1, or one per GPU)")
    parser.add_argument("--index", type=int, help="part of the runs to execute, from 0; defaults to SLURM_ARRAY_TASK_ID if set")
    parser.add_argument("--of", type=int, help="number of parts")
    options, rest = parser.parse_known_args(list(arguments))
    for name in ("seeds", "only", "gpus"):
        if lists := getattr(options, name):
            setattr(options, name, [value for values in lists for value in values])
    if (options.index is None) != (options.of is None):
        raise ValueError("--index and --of must be given together: --index 0 --of 4")
    if options.of is not None and options.of < 1:
        raise ValueError(f"--of is {options.of}; expected 1 or more")
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs is {options.jobs}; expected 1 or more")
    if options.status and (unread := [name for name in ("gpus", "jobs", "index") if getattr(options, name) is not None]):
        raise ValueError(f"--{unread[0]} has no effect on --status: leave it out")
    return options, parse_settings(rest)


def numbers(text: str) -> list[int]:
    if not all(word.removeprefix("-").isdecimal() for word in words(text)):
        raise argparse.ArgumentTypeError(f"expected whole numbers, such as 0 or 0,1,2, got {text!r}")
    return [int(word) for word in words(text)]


def words(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"expected values separated by commas, got {text!r}")
    return found


def config_class_of(recipe: str | None) -> type[SelfDistillConfig]:
    """The class of the settings in a recipe or a run directory: those of a warm start, or of self-distillation."""
    from firedistill.config import SelfDistillConfig, WarmStartConfig  # imports torch
    from firedistill.recipes import read_recipe

    settings = {} if recipe is None else read_recipe(recipe)
    warm = "feedback_share" in settings or settings.get("method") == "supervised"
    return WarmStartConfig if warm else SelfDistillConfig


def config_of(config_class: type[Config], recipe: str | None, settings: Mapping[str, Any]) -> Config:
    """The settings that `[RECIPE] [--option value ...]` stand for."""
    from firedistill.recipes import build_config  # imports torch

    given = dict(settings)
    if recipe is not None and (Path(recipe) / "config.yaml").is_file():
        given.setdefault("output_dir", recipe)  # a run that was moved is where it is, not where it was
    return build_config(config_class, recipe, given)
