"""Calls of programs of others (a task's methods, a chat template), which may raise, hang, or return anything.

Each ends with a result or a `TaskFault`; `process.py` limits its time and undoes what it leaves behind in the process.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from firedistill.tasks.coroutines import AsyncCall, TimeLimit, in_thread, loop_of_threads
from firedistill.tasks.process import TimeIsUp, kept_state, time_limit
from firedistill.tasks.sources import DataError
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, FeedbackField, Verdict

if TYPE_CHECKING:
    from firedistill.tasks.judge import JudgeFile

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1_000_000  # of a prompt, and of the feedback about a response; longer ones would take minutes to tokenize
MAX_FIELDS = 1000  # of feedback: a generator may have no end
Result = TypeVar("Result")


class TaskFault(ValueError):
    """A task or a chat template raised, timed out, or returned something else than expected; the message names both."""


class GuardedTask:
    """A task whose methods return what their annotations promise, or raise `TaskFault`; `verify` always returns a verdict.

    Values of another type are converted where their meaning is clear: truth values and numbers of NumPy and PyTorch, 0 and 1 as truth
    values, numbers as texts, any iterable of feedback or examples. All other attributes are the task's own.

    Args:
        task: its methods may raise, hang, or return anything.
        seconds: time limit of one call of `verify`, `feedback` or `prompt`, enforced as `time_limit` describes; None for no limit.
    """

    judge_file: JudgeFile | None = None  # of the judge beside the task, see `JudgedTask`

    def __init__(self, task: Task, seconds: float | None = None):
        self.task, self.seconds = task, seconds

    @property
    def own(self) -> GuardedTask:
        """The task without the judge that may stand beside it, see `JudgedTask`."""
        return self

    def begin_run(self, folder: Path, process: int, train: bool = True) -> None:
        """A judge, if any, keeps its replies in this run directory from now on.

        Args:
            train: False for an evaluation of the run.
        """

    def cost_line(self, folder: Path) -> str:
        """What the judge of a run has cost, in a sentence; empty without one."""
        return ""

    def take_counts(self) -> dict[str, float]:
        """Columns of the log about the judge, since the last call; none without one."""
        return {}

    def __getattr__(self, name: str) -> Any:
        if name == "task" or name.startswith("__"):  # what `copy` and `pickle` ask a new object, which has no task yet
            raise AttributeError(name)
        return getattr(self.task, name)

    @property
    def name_in_errors(self) -> str:
        """The class of the task, or the function that `@task` made it of."""
        kind = type(self.task).__name__
        return f"{kind} {self.task.name!r}" if kind == "TableTask" else kind

    def verify(self, example: Example, response: str, started: Any = None) -> Verdict:
        """The task's verdict, or an incorrect one marked `failed` if the task returns none.

        Args:
            started: what `begin("verify", ...)` returned.
        """
        try:
            return self._call("verify", read_verdict, example, response, started=started)
        except TaskFault as fault:
            logger.warning("%s; the response counts as wrong and is left out of training", fault)
            return Verdict(False, None, str(example.answer), failed=True)

    def verdict(self, example: Example, response: str) -> Verdict:
        """The task's verdict.

        Raises:
            TaskFault: the task returns none.
        """
        return self._call("verify", read_verdict, example, response)

    def feedback(self, example: Example, response: str, verdict: Verdict, started: Any = None) -> tuple[FeedbackField, ...]:
        """The task's feedback; its fields have different names.

        Args:
            started: what `begin("feedback", ...)` returned.

        Raises:
            TaskFault: the task returns none.
        """
        return self._call("feedback", read_feedback, example, response, verdict, started=started)

    def begin(self, name: str, *arguments: Any) -> Any:
        """Begin a call of `verify` or `feedback` where it runs beside the caller; None, and nothing begins, where it does not.

        Several calls run at the same time, while the caller does something else. The time limit holds for each. The methods of the
        same names take what this one returns.
        """
        method = getattr(self.task, name)
        if inspect.iscoroutinefunction(method):
            return AsyncCall(partial(method, *arguments), self.seconds)
        if self.begins(name):
            return AsyncCall(partial(in_thread, method, *arguments), self.seconds, loop_of_threads(self.task.at_once))
        return None

    def begins(self, name: str) -> bool:
        """Whether calls of `verify` or `feedback` run beside the caller: the method is `async def`, or the task allows threads."""
        several = name in ("verify", "feedback") and getattr(self.task, "at_once", 1) > 1
        return several or inspect.iscoroutinefunction(getattr(self.task, name))

    def prompt(self, example: Example) -> str:
        """The dataset prompt.

        Raises:
            TaskFault: the task returns none.
        """
        return self._call("prompt", read_prompt, example)

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """The first `n` examples that the task returns. There is no time limit, since data may take long to load.

        Raises:
            TaskFault: the task returns something else, or raises an error of another kind than those below.
            DataError, ImportError: as the task raises them.
        """
        where = f"examples({split!r}) of {self.name_in_errors}"
        with explained(where, pass_on=(DataError, ImportError)), kept_state():
            return read_examples(self.task.examples(split, n, seed, data_dir), where, n)

    def _call(self, name: str, read: Callable[[Any, str], Result], example: Example, *rest: Any, started: Any = None) -> Result:
        where = f"{example.uid}: {name} of {self.name_in_errors}"
        if (call := started or self.begin(name, example, *rest)) is not None:
            try:
                with explained(where, pass_on=(TimeLimit,)):
                    return read(call.result(), where)
            except TimeLimit as error:
                raise TaskFault(f"{where} took longer than {self.seconds:g} s (task_timeout)") from error
        return guarded(where, lambda: read(getattr(self.task, name)(example, *rest), where), self.seconds, "task_timeout")


def guarded(where: str, function: Callable[[], Result], seconds: float | None, setting: str = "") -> Result:
    """The result of a program of others.

    Args:
        where: names the program in messages.
        seconds: time limit, see `time_limit`.
        setting: the option that sets the limit, if any.

    Raises:
        TaskFault: it raised anything but KeyboardInterrupt, which belongs to Ctrl-C, or took too long.
    """
    try:
        with kept_state(), time_limit(seconds), explained(where, pass_on=()):
            return function()
    except TimeIsUp as error:
        raise TaskFault(f"{where} took longer than {seconds:g} s{f' ({setting})' if setting else ''}") from error


class explained(AbstractContextManager):
    """Turn what a program of others raises into a `TaskFault`, except Ctrl-C, a time limit, and errors of the types `pass_on`.

    A class, since the time may be up just before the block begins. A generator would be discarded then, and explain its GeneratorExit.
    """

    def __init__(self, where: str, pass_on: tuple[type[Exception], ...] = (ValueError, OSError, ImportError)):
        self.where = where
        self.unchanged: tuple[type[BaseException], ...] = (KeyboardInterrupt, TimeIsUp, TaskFault, *pass_on)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, self.unchanged):
            return
        try:  # `error` may also be a SystemExit, and what sandboxes derive from BaseException
            text = " ".join(str(error).split())
        except (KeyboardInterrupt, TimeIsUp):
            raise
        except BaseException:
            text = "an error whose text cannot be read"
        shown = text if len(text) <= 200 else f"{text[:200]} [cut]"
        raise TaskFault(f"{self.where} raised {type(error).__name__}: {shown}") from error


# ---- What comes back ---------------------------------------------------------------------------------------------------------


def read_verdict(value: Any, where: str) -> Verdict:
    """A verdict whose fields have the declared types; the same object if they had them."""
    if not isinstance(value, Verdict):
        raise TaskFault(f"{where} returned a {type(value).__name__}, expected a Verdict")
    changed: dict[str, Any] = {}
    for name in Verdict.__dataclass_fields__:
        given: Any = getattr(value, name)
        found: Any = "" if name == "expected" else None
        if name not in ("submitted", "expected"):
            found = read_truth(given, f"{where}: Verdict.{name}")
        elif given is not None:
            found = read_text(given, f"{where}: Verdict.{name}")
        if found is not given:
            changed[name] = found
    return replace(value, **changed) if changed else value


def read_feedback(value: Any, where: str) -> tuple[FeedbackField, ...]:
    """Fields with texts and with names that differ."""
    if isinstance(value, FeedbackField):
        value = (value,)
    if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
        raise TaskFault(f"{where} returned a {type(value).__name__}, expected a tuple of FeedbackField")
    items = list(islice(value, MAX_FIELDS + 1))
    if len(items) > MAX_FIELDS:
        raise TaskFault(f"{where} returned more than {MAX_FIELDS} fields")
    fields: dict[str, FeedbackField] = {}
    for item in items:
        if not isinstance(item, FeedbackField):
            raise TaskFault(f"{where}: feedback holds a {type(item).__name__}, expected FeedbackField(name, text)")
        name, text = read_text(item.name, f"{where}: FeedbackField.name"), read_text(item.text, f"{where}: FeedbackField.text")
        if isinstance(item.text, bool):
            raise TaskFault(f"{where}: the text of field {name!r} is {item.text}, expected text")
        if item.group is not None and not isinstance(item.group, str):
            raise TaskFault(f"{where}: field {name!r} has the group {item.group!r}, expected a text or None")
        if name in fields or "full" in (name, item.group):  # alpha_<name> is a column of metrics.jsonl, and so is alpha_full
            reason = "two fields have this name" if name in fields else "this name stands for the feedback as a whole"
            raise TaskFault(f"{where}: field {name!r}: {reason}; give the field another one")
        same = name is item.name and text is item.text
        fields[name] = item if same else replace(item, name=name, text=text)
    if (characters := sum(len(field.text) for field in fields.values())) > MAX_CHARACTERS:
        raise TaskFault(f"{where}: the fields have {characters:,} characters in all, expected at most {MAX_CHARACTERS:,}")
    return tuple(fields.values())


def read_prompt(value: Any, where: str) -> str:
    """A prompt, which is a text already."""
    if not isinstance(value, str):
        raise TaskFault(f"{where} returned a {type(value).__name__}, expected text")
    return read_text(value, where)


def read_examples(value: Any, where: str, n: int | None = None) -> list[Example]:
    """The first `n` examples, whose texts are texts."""
    if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
        raise TaskFault(f"{where} returned a {type(value).__name__}, expected a list of Example")
    found = [read_example(example, f"{where}, entry {i}") for i, example in enumerate(islice(value, n))]
    if isinstance(value, list | tuple) and len(value) > len(found):
        logger.warning("%s returned %d examples; the first %d, which were requested, are used", where, len(value), n)
    return found


def read_example(value: Any, where: str) -> Example:
    """An example whose texts are texts. `answer` and `metadata` are for the task's own methods."""
    if not isinstance(value, Example):
        raise TaskFault(f"{where} is a {type(value).__name__}, expected Example(uid=..., question=..., answer=...)")
    uid = read_text(value.uid, f"{where}: Example.uid")
    for name in ("question", "solution", "category"):
        given = getattr(value, name)
        if not isinstance(given, str) and (given is not None or name == "question"):
            raise TaskFault(f"{where} ({uid}): Example.{name} is a {type(given).__name__}, expected text")
    for name in ("labels", "options"):
        given = getattr(value, name)
        if not (isinstance(given, list | tuple) and all(isinstance(item, str) for item in given)):
            raise TaskFault(f"{where} ({uid}): Example.{name} is not a tuple of texts")
    if not all(
        isinstance(turn, Mapping) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
        for turn in value.history
    ):
        raise TaskFault(f'{where} ({uid}): Example.history holds something else than {{"role": text, "content": text}}')
    return value if uid is value.uid else replace(value, uid=uid)


def read_truth(value: Any, where: str) -> bool:
    """True or False; also 0, 1, and values of NumPy and PyTorch with one element."""
    plain = _plain(value)
    if isinstance(plain, bool | int | float) and plain in (0, 1):
        return bool(plain)
    raise TaskFault(f"{where} is a {type(value).__name__}, expected True or False")


def read_text(value: Any, where: str) -> str:
    """A text, or a finite number as text."""
    plain = _plain(value)
    with suppress(ValueError, TypeError, OverflowError):  # NaN, complex numbers, integers of thousands of digits
        if isinstance(plain, Number) and math.isfinite(plain):  # type: ignore[arg-type]
            return str(plain)
    if not isinstance(plain, str):
        raise TaskFault(f"{where} is a {type(value).__name__}, expected text")
    if len(plain) > MAX_CHARACTERS:
        raise TaskFault(f"{where} has {len(plain):,} characters, expected at most {MAX_CHARACTERS:,}")
    return plain if type(plain) is str else str.__str__(plain)


def _plain(value: Any) -> Any:
    """The Python value of a scalar of NumPy or PyTorch, or of an array with one element."""
    item = getattr(value, "item", None)
    with suppress(ValueError, RuntimeError):  # several elements
        return item() if callable(item) else value
    return value
