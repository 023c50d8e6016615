"""Modules of the user: tasks and methods that are named by `module:Class`."""

from __future__ import annotations

import importlib
import os
import sys
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
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def is_missing(name: str, error: ModuleNotFoundError) -> bool:
    """Whether it is the module `name` itself that was not found, and not something that it imports."""
    return error.name in (name, name.partition(".")[0])
