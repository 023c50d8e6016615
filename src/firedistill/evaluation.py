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
    prompts = [(example, encoder.encode(student_messages(task, example))) for example in examples]
    limit = min(budget.prompt, budget.context - sampling.max_new_tokens)
    fitting = [(example, prompt) for example, prompt in prompts if len(prompt) <= limit]
    skipped = [(example, prompt) for example, prompt in prompts if len(prompt) > limit]
    for example, prompt in skipped:
        logger.warning("%s left out: its prompt has %d tokens, the limit is %d", example.uid, len(prompt), limit)
    responses = engine.generate([prompt for _, prompt in fitting], sampling, seed, progress)
    return [
        Rollout(example, prompt, response, task.verify(example, response.text))
        for (example, prompt), response in zip(fitting, responses, strict=True)
    ], [example for example, _ in skipped]


def summarise(rollouts: Sequence[Rollout]) -> dict[str, Any]:
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
    categories = sorted({r.example.category for r in rollouts if r.example.category})
    for category in categories:
        members = [r.verdict.correct for r in rollouts if r.example.category == category]
        summary[f"accuracy_{category.replace(' ', '_')}"] = sum(members) / len(members)
    return summary
