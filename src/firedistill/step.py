"""One training step as functions: its examples, seed and rate, and the way from judged rollouts to micro-batches."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import Dataset

from firedistill.metrics import Metrics
from firedistill.models.states import ResponseStates
from firedistill.objectives import Objective
from firedistill.objectives.batches import sampled_log_probs
from firedistill.ops import Head
from firedistill.prompts import TokenBudget, field_groups, fit_feedback, grouped, joined
from firedistill.rollout import Rollout
from firedistill.tasks import Example
from firedistill.tasks.guard import GuardedTask, TaskFault
from firedistill.teacher import Teacher

logger = logging.getLogger(__name__)


class TrainingOrder(Dataset):
    """The examples in the order of training: one seeded shuffle, consumed in order, reshuffled at the end.

    Item i is a function of the seed alone, so that a resumed run continues with the example that comes next.
    """

    def __init__(self, examples: Sequence[Example], length: int, seed: int):
        self.examples, self.length, self.seed = examples, length, seed
        self._round = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        shuffle, position = divmod(index, len(self.examples))
        if shuffle != self._round:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + shuffle)
            self._round, self._order = shuffle, torch.randperm(len(self.examples), generator=generator).tolist()
        return self.examples[self._order[position]]


def learning_rate_factor(step: int, warmup: int, total: int, kind: str = "cosine") -> float:
    """The rate of step 1, 2, ..., total as a share of the peak: `step / warmup`, then a cosine that reaches 0 at step total + 1.

    Args:
        kind: "cosine", or "constant" for the peak rate after the warm-up.
    """
    if step <= warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total + 1 - warmup))))


def step_seed(seed: int, step: int, process: int = 0) -> int:
    """The sampling seed of step 0, 1, ... on a process: a resumed run samples what the uninterrupted one would have sampled."""
    return ((seed * 1_000_003 + step) * 1_009 + process) % 2**63


def engine_gap(student: ResponseStates, rollouts: Sequence[Rollout], head: Head) -> Tensor:
    """Log-probability of each sampled token under the engine's model minus that under the student; `[N]` float32.

    Its mean estimates KL(engine || student) where sampling is neither tempered nor truncated. Empty for an engine that runs the
    student itself.

    Args:
        student: states of the responses.
        head: the student's, at temperature 1.
    """
    gaps = [
        torch.tensor(engine) - ours[-len(engine) :].float()
        for rollout, ours in zip(rollouts, sampled_log_probs(head, student, rollouts), strict=True)
        if (engine := rollout.response.log_probs)
    ]
    return torch.cat([torch.empty(0), *gaps])


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """How the responses of a step look. Those that begin with the teacher's own tokens are counted apart."""
    metrics = Metrics()
    metrics.total(generated_tokens=sum(rollout.generated_tokens for rollout in rollouts))
    for rollout in rollouts:
        correct = float(rollout.verdict.correct)
        if rollout.prefix_length:
            metrics.mean(guided_correct_rate=correct, prefix_length=float(rollout.prefix_length))
            continue
        metrics.mean(
            correct_rate=correct,
            truncated_rate=float(not rollout.response.finished),
            response_length=float(len(rollout.response_ids)),
            well_formed_rate=float(rollout.verdict.well_formed),
        )
    return metrics


def begin_feedback(rollout: Rollout, teacher: Teacher) -> Any:
    """Begin the feedback about a response where it runs beside the caller (`GuardedTask.begins`); None where it does not."""
    task = teacher.task
    if not (teacher.feedback and isinstance(task, GuardedTask)):
        return None
    return task.begin("feedback", rollout.example, rollout.response.text, rollout.verdict)


def add_feedback(rollout: Rollout, teacher: Teacher, max_tokens: int, begun: Any = None) -> tuple[Rollout, list[str]]:
    """The rollout with the feedback about its response, and the names of the fields that were cut to `max_tokens` in all.

    The feedback is the task's, in the groups of the settings. There is none if the teacher reads none.

    Args:
        begun: what `begin_feedback` returned.

    Raises:
        TaskFault: the task gives no feedback.
    """
    if not teacher.feedback:
        return rollout, []
    about = rollout.example, rollout.response.text, rollout.verdict
    feedback = teacher.task.feedback(*about) if begun is None else cast(GuardedTask, teacher.task).feedback(*about, begun)
    feedback = grouped(feedback, teacher.groups)
    fitted, cut = fit_feedback(joined(feedback, teacher.most_views), teacher.encoder, max_tokens)
    if len(field_groups(fitted)) < len(field_groups(feedback)):
        say_joined(teacher.most_views)
    return replace(rollout, feedback=fitted), cut


@cache
def say_joined(most_views: int | None) -> None:
    """Log, once per process, that fields are attributed together."""
    logger.warning(
        "feedback with more than %s fields or groups: neighbouring ones are removed together and have one weight "
        "(attribution_views changes the number, attribution_groups names groups)",
        most_views,
    )


@dataclass
class Selection:
    """The rollouts of a step, and those among them that enter the loss.

    Attributes:
        rollouts: all of them, with feedback where the method needs a teacher.
        trained: the part that trains.
        metrics: why the others do not, and `naive_teacher_tokens`, what one forward pass per teacher view would read.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    trained: list[Rollout] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)


def select_rollouts(
    rollouts: Sequence[Rollout], objective: Objective, teacher: Teacher, budget: TokenBudget, drop_unfinished: bool = False
) -> Selection:
    """Build the feedback that the method needs and decide which rollouts train.

    Left out are responses without tokens or without a verdict, those that the method does not train on, those whose feedback or
    teacher prompts cannot be built, and those whose teacher prompt is over the context budget. The divisors of the loss stay those of
    the full step.

    Args:
        drop_unfinished: also leave out responses without end-of-sequence or without a well-formed answer line.
    """
    selection, rollouts = Selection(), list(rollouts)
    reasons = [reason_to_leave_out(rollout, objective, drop_unfinished) for rollout in rollouts]
    scored = [i for i, reason in enumerate(reasons) if reason is None and objective.needs_teacher(rollouts[i])]
    begun = [begin_feedback(rollouts[i], teacher) for i in scored]  # all of them, before the first one is waited for
    # Prompts are tokenized together: all full views, then the other views of those that fit.
    for i, call in zip(scored, begun, strict=True):
        try:
            rollouts[i], cut = add_feedback(rollouts[i], teacher, budget.feedback, call)
            teacher.render(rollouts[i], ["full"])
        except TaskFault as fault:
            reasons[i] = failed_feedback(fault)
        else:
            note_cut(selection.metrics, rollouts[i].example, cut, budget.feedback)
    fitting = [i for i in scored if reasons[i] is None]
    for i in fitting:
        if teacher.view_tokens(rollouts[i], "full") > budget.context:
            logger.warning("%s left out: its teacher view is longer than max_context_tokens", rollouts[i].example.uid)
            reasons[i] = "skipped_over_budget"
            continue
        try:
            teacher.render(rollouts[i], objective.views(rollouts[i]))
        except TaskFault as fault:
            reasons[i] = failed_feedback(fault)
    for i, (rollout, reason) in enumerate(zip(rollouts, reasons, strict=True)):
        selection.rollouts.append(rollout)
        if reason is None:
            views = objective.views(rollout) if i in scored else []
            naive = sum(teacher.view_tokens(rollout, view) for view in views)
            selection.trained.append(rollout)
            selection.metrics.total(naive_teacher_tokens=naive)
        elif reason:
            selection.metrics.total(**{reason: 1})
    return selection


def note_cut(metrics: Metrics, example: Example, cut: Sequence[str], max_tokens: int) -> None:
    """Count and log the fields of feedback that were cut to `max_tokens` in all."""
    if cut:
        metrics.total(cut_feedback_fields=len(cut))
        logger.warning("%s: feedback over %d tokens; cut: %s", example.uid, max_tokens, ", ".join(cut))


def failed_feedback(fault: TaskFault) -> str:
    """Log why a response is left out; returns the metric that counts it."""
    logger.warning("%s; the response is left out of training", fault)
    return "failed_feedback"


def reason_to_leave_out(rollout: Rollout, objective: Objective, drop_unfinished: bool) -> str | None:
    """The metric that counts a response as left out before feedback is built; empty where the method does not train on it."""
    if rollout.verdict.failed or not rollout.response_ids:
        return "failed_verdicts" if rollout.verdict.failed else "empty_responses"
    if not objective.trains(rollout):
        return ""
    if drop_unfinished and not (rollout.response.finished and rollout.verdict.well_formed):
        return "dropped_unfinished"
    return None


@dataclass
class Update:
    """This process's part of one optimizer update.

    Attributes:
        rollouts: with what `Objective.prepare` returned for each of them.
        prompts: prompts of the update over all processes, including those that were left out.
        trained_rollouts: rollouts of the update over all processes.
    """

    rollouts: list[tuple[Rollout, Any]]
    prompts: int
    trained_rollouts: int

    def micro_batches(self, count: int, smallest: int) -> list[list[tuple[Rollout, Any]]]:
        """The rollouts in `count` lists; those of similar length share one, which saves padding.

        Where few rollouts train, the first micro-batches have `smallest` rollouts, as in a full step, and the last ones are empty.
        """
        ordered = sorted(self.rollouts, key=lambda item: len(item[0].prompt_ids) + len(item[0].response_ids))
        size = max(math.ceil(len(ordered) / count), smallest)
        return [ordered[i * size : (i + 1) * size] for i in range(count)]


def plan_updates(
    objective: Objective,
    rollouts: list[tuple[Rollout, Any]],
    prompts: int,
    draw: random.Random,
    process: int,
    processes: int,
    examples: Sequence[Example] = (),
) -> list[Update]:
    """The optimizer updates of a step: one, unless the method wants several.

    Updates without a rollout are left out, except for the last one of a step that has none at all.

    Args:
        rollouts: the trained ones of this process, prepared.
        prompts: prompts of the step over all processes.
        draw: alike on every process.
        examples: those of the run, alike on every process. The example of a rollout that is none of them, such as a copy by a worker of
            the data loader, is sent to the other processes.
    """
    plan = objective.updates(range(prompts), draw)
    if len(plan) == 1:
        return [Update(rollouts, prompts, sum(gather_object([len(rollouts)])))]
    # A small update is divided among the processes again, or all but one would idle.
    places = {id(example): place for place, example in enumerate(examples)}
    sent = []
    for rollout, prepared in rollouts:
        place = places.get(id(rollout.example))
        sent.append((place, rollout if place is None else rollout.without_example(), prepared))
    everyone = [
        (rollout if place is None else replace(rollout, example=examples[place]), prepared)
        for place, rollout, prepared in gather_object(sent)
    ]
    members = [[item for item in everyone if item[0].prompt_index in chosen] for chosen in plan]
    updates = [
        Update(group[process::processes], len(chosen), len(group)) for chosen, group in zip(plan, members, strict=True) if group
    ]
    return updates or [Update([], prompts, 0)]
