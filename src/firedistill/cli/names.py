"""Names of options, methods and recipes, read from the source files: a mistake is reported before torch is imported."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

OF_COMMANDS = {
    "train": ["resume", "overwrite", "preflight", "allow_changes"],
    "warmstart": ["resume", "overwrite", "preflight", "allow_changes"],
    "eval": ["json"],
    "inspect": ["example", "split", "save", "count", "checkpoint", "prompts"],
}


@cache
def setting_names() -> frozenset[str]:
    """The names of all options of a run, the inherited ones included."""
    package = Path(str(files("firedistill")))
    transformers = find_spec("transformers")
    assert transformers is not None and transformers.submodule_search_locations
    inherited = Path(transformers.submodule_search_locations[0]) / "training_args.py"
    sources = {
        "SelfDistillConfig": package / "config.py",
        "WarmStartConfig": package / "config.py",
        "TrainingArguments": inherited,
    }
    return frozenset(name for of_class, path in sources.items() for name in _fields(path, of_class))


@cache
def method_names() -> frozenset[str]:
    """The names under which the package registers its methods."""
    names = set()
    for path in (Path(str(files("firedistill"))) / "objectives").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in node.decorator_list if isinstance(node, ast.ClassDef) else []:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register":
                    names.add(ast.literal_eval(call.args[0]))
    return frozenset(names)


@cache
def recipe_names() -> frozenset[str]:
    """The names of the built-in recipes."""
    return frozenset(path.stem for path in (Path(str(files("firedistill"))) / "recipes").glob("*.yaml"))


def wants_help(arguments: Sequence[str]) -> bool:
    return any(argument in {"-h", "--help", "--help-all"} for argument in arguments)


def check_names(command: str, arguments: Sequence[str]) -> None:
    """Check the names of the recipe, of options and of the method in the arguments of a command that takes a recipe.

    Raises:
        ValueError: an unknown name, with the nearest known one.
    """
    if command not in OF_COMMANDS or wants_help(arguments):
        return
    recipe = arguments[0] if arguments and not arguments[0].startswith("--") else None
    if recipe is not None and recipe not in recipe_names() and not Path(recipe).exists():
        listed = ", ".join(sorted(recipe_names()))
        raise ValueError(f"no recipe {recipe!r}: neither a file or folder nor one of {listed}{nearest(recipe, recipe_names())}")
    known = setting_names() | set(OF_COMMANDS[command])
    for place, argument in enumerate(arguments):
        if not argument.startswith("--") or argument == "--":
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.partition(".")[0].replace("-", "_")
        if name not in known:
            hint = nearest(name, known) or "; see --help and --help-all"
            raise ValueError(f"unknown option {name[:200]!r} on the command line{hint}")
        if name == "method":
            method = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
            if ":" not in method and method not in method_names():
                listed = ", ".join(sorted(method_names()))
                raise ValueError(
                    f"unknown method {method!r}{nearest(method, method_names())}; known are {listed}, or a dotted path module:Class"
                )


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean learning_rate?`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _fields(path: Path, of_class: str) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of_class)
    declared = [line for line in found.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    return [
        line.target.id for line in declared if isinstance(line.target, ast.Name) and "ClassVar" not in ast.dump(line.annotation)
    ]
