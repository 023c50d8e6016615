"""Modules of the user: tasks and methods that are named by `module:Class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


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


def import_users_file(path: Path) -> ModuleType:
    """The module in a file, imported once; what lies beside it can be imported by it.

    Raises:
        ValueError: there is no such file.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
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
