"""Tasks: problems, verifiers and feedback. `load_task` returns a task by name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from firedistill import imports
from firedistill.tasks.choice import AquaRat, ArcChallenge, ChoiceTask, MMLUPro, WiC, WinoGrande
from firedistill.tasks.guard import explained
from firedistill.tasks.numeric import GSM8K, ASDiv, NumericTask
from firedistill.tasks.sources import DataError
from firedistill.tasks.table import TableTask, names_data
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, FeedbackField, Verdict

__all__ = [
    "ChoiceTask",
    "DataError",
    "Example",
    "FeedbackField",
    "NumericTask",
    "TASKS",
    "TableTask",
    "Task",
    "Verdict",
    "load_task",
]

OBJECT = "object:"
"""How `config.yaml` names a task or model that was an object, with its class after it."""

TASKS: dict[str, type[Task]] = {task.name: task for task in (GSM8K, ASDiv, AquaRat, ArcChallenge, WinoGrande, WiC, MMLUPro)}
"""The tasks of the paper, which read published datasets, by name."""

GENERATED = {
    "arithmetic": "arithmetic:Arithmetic",
    "functions": "functions:Functions",
    "code": "code:CodeTask",
    "planted": "planted:planted_task",
    "gym": "gym:GymTask",
}
"""Beginnings of the names of the other built-in tasks, each with a module and what makes the task from the rest of its name."""


def load_task(name: Any, *, judged: bool = False, **options: Any) -> Task:
    """Return a task by name.

    Args:
        name: one of

            - a built-in dataset: `gsm8k`, `asdiv`, `aqua_rat`, `arc_challenge`, `winogrande`, `wic`, `mmlu_pro`;
            - `arithmetic` or `arithmetic:<level>`: generated word problems that need no download;
            - `functions` or `functions:<level>`: generated programming problems with tests that need no download;
            - `code:<file>`, or `code` with `data_dir`: your own programming problems with tests;
            - `planted:<kind>:<rate>:<task>`: a task with wrong feedback about a share of its problems (`Planted`);
            - `gym:<dataset>`: a dataset of reasoning-gym, for instance `gym:chain_sum`;
            - data of your own: a file (`my.jsonl`, `.csv`, `.parquet`), a folder with splits, a hub dataset `owner/name`; or,
              instead of a name, a list of mappings or a `datasets.Dataset`;
            - `<module>:<name>` or `<file>.py:<name>`: a task of your own, for instance `my_package.my_module:MyTask`, on the
              Python path or in the current folder;
            - the name of an entry point of the group `firedistill.tasks` in an installed package.

        judged: a judge gives the verdicts, so that data of your own need no answers.
        options: those of `TableTask`, for data of your own.

    Raises:
        ValueError: the name is unknown, with the known names and close matches; or your module or class raises.
        ImportError: a package that the task needs cannot be imported.
    """
    verifier = {"verify": undecided} if judged else {}
    if isinstance(name, list | tuple | Mapping) or hasattr(name, "column_names"):
        return TableTask(name, **{**verifier, **options})
    if not isinstance(name, str):
        _refuse_bare_decorator(name, "the task")
        raise ValueError(
            f"a task is a {type(name).__name__}; expected a name, or an instance of a class derived from firedistill.Task, or rows"
        )
    if name.startswith(OBJECT):
        raise ValueError(
            f"the task of this run was a Python object ({name.removeprefix(OBJECT)}), which no name stands for: pass it as task=... in "
            "Python, or name a task by --task, such as a file or module:Class"
        )
    prefix, colon, rest = name.partition(":")
    published = name in TASKS or prefix in GENERATED
    if names_rows(name):
        table = TableTask(name, **{**verifier, **options})
        table.prepare()
        return table
    if options:
        raise ValueError(
            f"{next(iter(options))} is set, but the task {name!r} says itself what its data are: leave {', '.join(options)} out, or "
            "name a file, a folder or a hub dataset as the task"
        )
    if published:
        imports.refuse_plugin(imports.TASKS, prefix)
    if name in TASKS:
        return TASKS[name]()
    if not published and name in imports.plugins(imports.TASKS):
        return _as_task(imports.load_plugin(imports.TASKS, name), name)
    if prefix in GENERATED and (rest or prefix not in ("planted", "gym")):
        module, _, function = GENERATED[prefix].partition(":")
        make = getattr(import_module(f"{__name__}.{module}"), function)
        return make(rest) if rest else make()
    if colon and prefix and rest:
        try:
            return _as_task(imports.load_object(name), name)
        except ModuleNotFoundError as error:
            if not imports.is_missing(prefix, error):
                raise
            text = f"unknown task: found no module {prefix!r} on the Python path or in {os.getcwd()}."
            raise ValueError(f"{text}{_suggestion(prefix)} {_known_names()}") from error
    raise _unknown(name)


def names_rows(name: str) -> bool:
    """Whether the name of a task is that of rows of one's own, which take options such as `columns`."""
    prefix = name.partition(":")[0]
    known = name in TASKS or prefix in GENERATED or name in imports.plugins(imports.TASKS)
    return not known and not prefix.endswith(".py") and names_data(name)


def undecided(row: Mapping[str, Any], response: str) -> bool:
    """The verifier of data without answers; a judge gives the verdict."""
    return False


def refuse_unknown(name: str) -> None:
    """Raise ValueError for the name of a task that is neither built in, nor data, nor one of somebody else's."""
    known = (*TASKS, *GENERATED, *imports.plugins(imports.TASKS))
    if not (":" in name or name in known or names_data(name)):
        raise _unknown(name)


def _unknown(name: str) -> ValueError:
    if name.endswith(".py"):
        return ValueError(f"task {name!r} is a Python file: name the class or function in it, {name}:NAME")
    return ValueError(f"unknown task {name!r}.{_suggestion(name)} {_known_names()}")


def _refuse_bare_decorator(task: Any, name: str) -> None:
    if getattr(task, "__qualname__", "") == "task.<locals>.decorate":
        raise ValueError(f"{name} is decorated without parentheses: write @task(), or @task(answer=...)")


def _as_task(task: Any, name: str) -> Task:
    """The task that a name of somebody else's stands for: an instance, or a class that is called without arguments."""
    _refuse_bare_decorator(task, name)
    if callable(task) and not isinstance(task, Task):
        with explained(f"{name}()", pass_on=(DataError, OSError, ImportError)):
            task = task()
    methods = ("examples", "prompt", "verify", "feedback")
    if not (hasattr(task, "format_instruction") and all(callable(getattr(task, method, None)) for method in methods)):
        raise ValueError(f"{name} is not a task: derive it from firedistill.Task")
    if isinstance(task, TableTask):
        task.prepare()
    return task


def _suggestion(name: str) -> str:
    names = [*TASKS, "arithmetic", "functions", "code", *imports.plugins(imports.TASKS)]
    beginning = [known for known in names if name and known.startswith(name.lower())]
    close = beginning or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _known_names() -> str:
    names = ", ".join([*TASKS, "arithmetic", "functions", *imports.plugins(imports.TASKS)])
    return f"Known tasks: {names}, code:<file>, gym:<dataset>, and your own: a file of rows, or <module>:<class>."
