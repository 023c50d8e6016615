"""Greedy evaluation on held-out examples with the verifier of the task."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from firedistill.prompts import PromptEncoder, TokenBudget, student_messages
from firedistill.rollouts.engine import Rollout, RolloutEngine, Sampling
from firedistill.tasks.task import Example, Task

logger = logging.getLogger(__name__)


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
        The rollouts in the order of the examples, and the examples left out because their prompt is over the budget
        (`budget.prompt`, or `budget.context` together with the longest response). Their uids are logged.
    """
    prompts = {example.uid: encoder.encode(student_messages(task, example)) for example in examples}
    limit = min(budget.prompt, budget.context - sampling.max_new_tokens)
    fitting = [example for example in examples if len(prompts[example.uid]) <= limit]
    skipped = [example for example in examples if len(prompts[example.uid]) > limit]
    for example in skipped:
        logger.warning("%s left out: its prompt has %d tokens, the limit is %d", example.uid, len(prompts[example.uid]), limit)
    responses = engine.generate([prompts[example.uid] for example in fitting], sampling, seed, progress)
    return [
        Rollout(example, prompts[example.uid], response, task.verify(example, response.text))
        for example, response in zip(fitting, responses, strict=True)
    ], skipped


def summarise(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Accuracy (strict and lenient), its standard error, and how the responses look."""
    n = len(rollouts)
    if n == 0:
        return {"accuracy": math.nan, "n": 0}

    def share(values: Sequence[bool]) -> float:
        return sum(values) / n

    accuracy = share([r.verdict.correct for r in rollouts])
    summary = {
        "accuracy": accuracy,
        "lenient_accuracy": share([r.verdict.lenient_correct for r in rollouts]),
        "well_formed_rate": share([r.verdict.well_formed for r in rollouts]),
        "stderr": math.sqrt(accuracy * (1 - accuracy) / n),
        "n": n,
        "truncated_rate": share([not r.response.finished for r in rollouts]),
        "response_length": sum(len(r.response_ids) for r in rollouts) / n,
    }
    categories = sorted({r.example.category for r in rollouts if r.example.category})
    for category in categories:
        members = [r.verdict.correct for r in rollouts if r.example.category == category]
        summary[f"accuracy_{category.replace(' ', '_')}"] = sum(members) / len(members)
    return summary
