"""Greedy evaluation on held-out examples with the verifier of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerate.utils import gather_object

from firedistill.config import SelfDistillConfig
from firedistill.memory import SMALLER_EVALUATIONS, explained_memory
from firedistill.prompts import PromptEncoder, TokenBudget
from firedistill.rollout import Rollout, Sampling
from firedistill.rollouts.engine import RolloutEngine
from firedistill.rollouts.sampler import Sampler, fitting_prompts
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example


def answer_examples(
    engine: RolloutEngine,
    task: Task,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    sampling: Sampling,
    budget: TokenBudget,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Rollout], list[Example]]:
    """Sample and judge one response per example.

    Returns:
        The rollouts in the order of the examples, and the examples left out because their prompt is over the budget.
    """
    prompts, skipped = fitting_prompts(task, encoder, examples, sampling, budget)
    return Sampler(engine, task, encoder, sampling, budget, seed=seed, progress=progress).student(prompts), skipped


def evaluate(
    engine: RolloutEngine,
    task: Task,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    args: SelfDistillConfig,
    progress: Callable[..., None],
    gather: Callable[[list[Any]], list[Any]] = gather_object,
) -> tuple[list[Rollout], dict[str, Any]]:
    """Answer all examples greedily, each process its share of them.

    Args:
        progress: called as `progress(done, total=...)`.
        gather: returns the values of all processes.

    Returns:
        The rollouts of all processes, and their summary with `skipped_over_budget` where examples were left out.

    Raises:
        OutOfMemory: the engine runs out of memory, if it makes batches smaller, even with one prompt.
    """
    mine = list(examples)[args.process_index :: args.world_size]
    with explained_memory(SMALLER_EVALUATIONS):
        rollouts, skipped = answer_examples(
            engine, task, encoder, mine, args.greedy, args.budget, progress=partial(progress, total=len(mine))
        )
    rollouts = gather(rollouts)
    summary = summarize(rollouts)
    if skipped_anywhere := sum(gather_object([len(skipped)])):
        summary["skipped_over_budget"] = skipped_anywhere
    return rollouts, summary


def summarize(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Accuracy (strict and lenient), its standard error, and how the responses look."""
    n = len(rollouts)

    def share(values: Sequence[float]) -> float:
        return sum(values) / n if n else math.nan

    accuracy = share([r.verdict.correct for r in rollouts])
    summary = {
        "accuracy": accuracy,
        "lenient_accuracy": share([r.verdict.lenient_correct for r in rollouts]),
        "well_formed_rate": share([r.verdict.well_formed for r in rollouts]),
        "stderr": math.sqrt(accuracy * (1 - accuracy) / max(n, 1)),
        "n": n,
        "truncated_rate": share([not r.response.finished for r in rollouts]),
        "response_length": share([len(r.response_ids) for r in rollouts]),
    }
    if failed := sum(r.verdict.failed for r in rollouts):
        summary["failed_verdicts"] = failed
    categories = sorted({r.example.category for r in rollouts if r.example.category})
    for category in categories:
        members = [r.verdict.correct for r in rollouts if r.example.category == category]
        summary[f"accuracy_{category.replace(' ', '_')}"] = sum(members) / len(members)
    return summary
