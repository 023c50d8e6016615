"""A task with a judge beside it, which adds fields to the feedback, gives the verdict, or both."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from firedistill.tasks.cells import in_braces
from firedistill.tasks.coroutines import AsyncCall
from firedistill.tasks.guard import GuardedTask, TaskFault, read_feedback
from firedistill.tasks.judge import Judge, JudgeFile, Opinion, cost_line, write_judge
from firedistill.tasks.table import TableTask
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, FeedbackField, Verdict

logger = logging.getLogger(__name__)

FOLDER = "judge"  # in a run directory


@dataclass
class Begun:
    """A call of the task's own method and one of the judge; None where nothing has begun."""

    own: Any = None
    judge: AsyncCall | None = None


def guarded_task(task: Task, seconds: float | None, judge: JudgeFile | None = None) -> Task:
    """A guarded task, with a judge beside it if there is one. The guard has the interface of a task."""
    return cast(Task, GuardedTask(task, seconds) if judge is None else JudgedTask(task, seconds, judge))


class JudgedTask(GuardedTask):
    """A guarded task and a judge. The judge is asked while other responses are sampled or judged.

    If the judge gives the verdict, it replaces that of the task; the task still reads the submitted answer. A response about which no
    reply can be used has no verdict, as with a verifier that fails. If the judge gives fields only, the feedback lacks them then. Its
    fields follow those of the task and replace those of the same name. `seconds` does not limit the judge, which has its own limits.

    Args:
        task, seconds: see `GuardedTask`.
        file: what the judge is asked.

    Raises:
        ValueError: the prompt names something that the task's problems do not have, or the key is not set.
        JudgeError: by `verify` and `feedback`, if the endpoint cannot be used or does not answer.
    """

    judge_file: JudgeFile

    def __init__(self, task: Task, seconds: float | None, file: JudgeFile):
        columns: list[str] = []
        if isinstance(task, TableTask):
            task.prepare()
            task.find_columns(name.removeprefix("row.") for name in in_braces(file.prompt) if name.startswith("row."))
            columns = task.known_columns
        self.asks, self.judge_file = Judge(file, columns), file
        if isinstance(task, TableTask):
            task = copy.copy(task)  # another trainer may have another judge for the same task
            task.kept_columns = self.asks.columns
        super().__init__(task, seconds)
        self.unjudged = GuardedTask(task, seconds)
        self.counts: dict[str, float] = defaultdict(int)

    @property
    def own(self) -> GuardedTask:
        return self.unjudged

    def verdict(self, example: Example, response: str) -> Verdict:
        return self.own.verdict(example, response)

    def begins(self, name: str) -> bool:
        return self._joins(name) or self.own.begins(name)

    def begin(self, name: str, *arguments: Any) -> Any:
        if not self._joins(name):
            return self.own.begin(name, *arguments)
        begun = Begun(self.own.begin(name, *arguments))
        with suppress(TaskFault):  # raised again by what waits for the call
            begun.judge = self.ask(*arguments[:2])
        return begun

    def _joins(self, name: str) -> bool:
        """Whether the judge takes part in a method."""
        return (name == "verify" and self.judge_file.decides) or (name == "feedback" and self.asks.gives)

    def ask(self, example: Example, response: str, trial: bool = False) -> AsyncCall:
        """Begin to ask the judge; see `Judge.begin`.

        Raises:
            TaskFault: the task gives no prompt, or the example does not hold the columns that the judge's prompt names.
        """
        if self.asks.columns and "kept" not in example.metadata:
            raise TaskFault(
                f"{example.uid}: the prompt of the judge names columns, which only examples of the task's own rows have"
            )
        turns = [f"{turn['role']}: {turn['content']}" for turn in example.history]
        return self.asks.begin("\n\n".join([*turns, self.prompt(example)]), example, response, trial)

    def verify(self, example: Example, response: str, started: Any = None) -> Verdict:
        if not self.judge_file.decides:
            return self.own.verify(example, response, started)
        begun = started or self.begin("verify", example, response)
        own = self.own.verify(example, response, begun.own)
        try:
            values = self._opinion(example, response, begun).values
        except TaskFault as fault:
            logger.warning("%s; the response counts as wrong and is left out of training", fault)
            values = None
        if values is None:
            return Verdict(False, None, str(example.answer), failed=True)
        correct = self.asks.correct(values)
        return replace(own, correct=correct, lenient_correct=correct, failed=False)

    def feedback(self, example: Example, response: str, verdict: Verdict, started: Any = None) -> tuple[FeedbackField, ...]:
        if not self.asks.gives:
            return self.own.feedback(example, response, verdict, started)
        begun = started or self.begin("feedback", example, response, verdict)
        own = self.own.feedback(example, response, verdict, begun.own)
        values = self._opinion(example, response, begun, counted=not self.judge_file.decides).values
        fields = {field.name: field for field in own}
        fields |= {field.name: field for field in (self.asks.feedback(values) if values is not None else ())}
        return read_feedback(tuple(fields.values()), f"{example.uid}: feedback with a judge")

    def _opinion(self, example: Example, response: str, begun: Begun, counted: bool = True) -> Opinion:
        opinion: Opinion = (begun.judge or self.ask(example, response)).result()
        if counted:  # the reply of a verdict is counted with the verdict
            for name, count in opinion.counts.items():
                self.counts[name] += count
            if opinion.values is None:
                left_out = "response is left out of training" if self.judge_file.decides else "feedback lacks its fields"
                logger.warning("%s: the judge gave no usable reply (%s); the %s", example.uid, opinion.problem, left_out)
        return opinion

    def begin_run(self, folder: Path, process: int, train: bool = True) -> None:
        self.asks.replies.open(folder / FOLDER, f"replies-{process}.jsonl" if train else f"eval-{process}.jsonl")
        if train and process == 0:
            write_judge(self.judge_file, folder / FOLDER)

    def cost_line(self, folder: Path) -> str:
        return cost_line(self.judge_file, folder / FOLDER)

    def take_counts(self) -> dict[str, float]:
        counts, self.counts = self.counts, defaultdict(int)
        counts["judge_price"] = self.judge_file.cost(counts["judge_prompt_tokens"], counts["judge_reply_tokens"])
        return {name: value for name, value in counts.items() if value}
