"""Feedback with planted noise, on any task with answers: what a method does with a field that is wrong with a known probability."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace

from firedistill.tasks import load_task
from firedistill.tasks.code import CodeTask
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, FeedbackField, Verdict

KINDS = ("answer", "hint")


class Planted(Task):
    """A task whose feedback is wrong about a share of the problems. Prompts, problems and verdicts stay those of the task.

    As a task name: `planted:<kind>:<rate>:<task>`, for instance `planted:answer:0.3:arithmetic`.

    - `answer`: the expected answer that the feedback states is another one (in the structured feedback: the field `verifier`).
    - `hint`: one more field, `hint`, names the answer; it names another one instead.

    A hash of the problem's uid decides, so all runs are wrong about the same problems, and those of a lower rate are among those of a
    higher one.

    Args:
        rate: share of the problems, from 0 to 1.
        task: the task.

    Raises:
        ValueError: the kind or the rate is unknown, or unit tests judge the task, so that it has no answer to be wrong about; or its
            `feedback` is a coroutine.
    """

    def __init__(self, kind: str, rate: float, task: Task):
        if kind not in KINDS or not 0 <= rate <= 1:
            raise ValueError(
                f"planted:{kind}:{rate:g}: expected planted:<kind>:<rate>:<task>, a kind of {', '.join(KINDS)}, and a rate from 0 to 1"
            )
        self.kind, self.rate, self.task = kind, rate, task
        self.name = f"planted:{kind}:{rate:g}:{task.name}"
        if isinstance(task, CodeTask):
            raise ValueError(
                f"{self.name}: unit tests judge {task.name}, so that there is no answer for feedback to be wrong about; name a task "
                "with answers, such as arithmetic"
            )
        if inspect.iscoroutinefunction(task.feedback):
            raise ValueError(f"{self.name}: feedback of {task.name} is async def, which planted noise does not wait for")
        self.reads_data_dir = getattr(task, "reads_data_dir", True)
        attributes = "type_name answer_type checker_mode final_marker format_instruction at_once train_split eval_split"
        for name in [*attributes.split(), "examples", "resolve_split", "prompt", "verify"]:  # `verify` may be async def
            setattr(self, name, getattr(task, name))

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        stated = other_answer(example) if number_of(example, "wrong") < self.rate else str(verdict.expected)
        if self.kind == "answer":
            return self.task.feedback(example, response, replace(verdict, expected=stated))
        return (*self.task.feedback(example, response, verdict), FeedbackField("hint", f"Hint: the final answer is {stated}."))


def other_answer(example: Example) -> str:
    """An answer that differs from the gold one: another label, or a number that is off by 1 to 9."""
    if example.labels:
        others = [label for label in example.labels if label != example.answer]
        return others[int(number_of(example, "label") * len(others))]
    offset = 1 + int(number_of(example, "offset") * 9)
    try:
        return str(int(example.answer) + offset)
    except ValueError:
        return str(offset)


def number_of(example: Example, purpose: str) -> float:
    """A number in [0, 1) that depends on the problem and the purpose alone."""
    digest = hashlib.blake2b(f"{purpose}/{example.uid}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def planted_task(rest: str) -> Task:
    """The task of `<kind>:<rate>:<task>`.

    Raises:
        ValueError: the text is not of this form, or there is no such task.
    """
    kind, _, after = rest.partition(":")
    rate, _, name = after.partition(":")
    form = "expected planted:<kind>:<rate>:<task>, as in planted:answer:0.3:arithmetic"
    if not name:
        raise ValueError(f"task planted:{rest}: unknown task '', {form}")
    try:
        number = float(rate)
    except ValueError:
        raise ValueError(f"task planted:{rest}: {form}") from None
    return Planted(kind, number, load_task(name))
