"""Tasks and methods of others: `module:Name`, `./file.py:Name`, and the entry points of installed packages."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

METHODS, TASKS = "firedistill.methods", "firedistill.tasks"
"""Groups of entry points in which packages name their methods and tasks."""


@cache
def plugins(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name, each name with those of every installed package; nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return dict(sorted(found.items()))


def load_plugin(group: str, name: str) -> Any | None:
    """What an installed package offers under a name; None if none does.

    Raises:
        ValueError: two packages have the name, or importing it raises; the message names the packages.
    """
    points = plugins(group).get(name, [])
    if not points:
        return None
    packages = " and ".join(map(package, points))
    if len(points) > 1:
        raise ValueError(
            f"{name!r} is an entry point of {packages} (group {group}): uninstall one of them, or name module:Name"
        )
    try:
        with errors_of(points[0].module):
            return points[0].load()
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"{name!r} of the package {packages} ({points[0].value}) cannot be loaded: {error}") from error


@cache
def refuse_plugin(group: str, name: str) -> None:
    """Log, once, that the entry point of a package does not replace what is built in under its name."""
    if points := plugins(group).get(name):
        packages = " and ".join(map(package, points))
        logger.warning("the entry point %r of %s (group %s) is refused, because the name is built in", name, packages, group)


def package(point: EntryPoint) -> str:
    """`name version` of the package of an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"


def load_object(path: str) -> Any:
    """The object that `module:Name` or `file.py:Name` names.

    Raises:
        ModuleNotFoundError: there is no such module on the Python path or in the working folder.
        ImportError: importing the module raises one.
        ValueError: there is no such file, the module has no such name, or importing it raises another error.
    """
    place, _, name = path.rpartition(":")
    file = users_file(Path(place)) if place.endswith(".py") else None
    with errors_of(place):
        module = import_users_module(place) if file is None else import_users_file(file)
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, vars(module), n=3)
        raise ValueError(f"{path!r}: {place} has no {name}" + (f"; did you mean {' or '.join(close)}?" if close else ""))
    return getattr(module, name)


@contextmanager
def errors_of(place: str) -> Iterator[None]:
    """Turn whatever the import of a module raises into an ImportError or a ValueError that names the module.

    Ctrl-C and the error of a module that does not exist pass.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        if isinstance(error, ModuleNotFoundError) and is_missing(place, error):
            raise
        kind = next((kind for kind in (ModuleNotFoundError, ImportError) if isinstance(error, kind)), ValueError)
        raise kind(f"importing {place} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def import_users_module(name: str) -> ModuleType:
    """A module on the Python path or, if it is not there, in the working folder.

    The working folder is on the path during this import only, and last, so that no other module is taken from it.

    Raises:
        ModuleNotFoundError: neither has the module, or something that it imports is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not is_missing(name, error):
            raise
    with last_on_path(os.getcwd()):
        return importlib.import_module(name)


def users_file(given: Path) -> Path:
    """The full path of a file.

    Raises:
        ValueError: there is no such file.
    """
    path = given.expanduser().resolve()
    if not path.is_file():
        relative = "" if given.expanduser().is_absolute() else f" ({given} is relative to the working folder)"
        raise ValueError(f"there is no file {path}{relative}")
    return path


def import_users_file(path: Path) -> ModuleType:
    """The module in a file, imported once; what lies beside it can be imported by it."""
    name = f"firedistill_file_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"  # hides no other module
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # a file that ends with .py
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            with last_on_path(str(path.parent)):
                spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@contextmanager
def last_on_path(folder: str) -> Iterator[None]:
    """Search a folder for modules too, after all others."""
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def is_missing(name: str, error: ModuleNotFoundError) -> bool:
    """Whether it is the module `name` itself that was not found, and not something that it imports."""
    return error.name in (name, name.partition(".")[0])
