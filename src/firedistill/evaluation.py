"""Evaluation on held-out examples with the verifier of the task: greedy accuracy, and what sampling shows beyond it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

from accelerate.utils import gather_object
from torch import nn

from firedistill.config import SelfDistillConfig
from firedistill.memory import SMALLER_EVALUATIONS, explained_memory, scoring_limit
from firedistill.models.sharding import gather
from firedistill.models.states import is_sharded, unwrap
from firedistill.objectives.batches import frozen_states, in_parts, map_tokens
from firedistill.objectives.distributions import entropy
from firedistill.ops import Head
from firedistill.prompts import PromptEncoder, TokenBudget
from firedistill.rollout import Rollout, Sampling
from firedistill.rollouts.engine import RolloutEngine
from firedistill.rollouts.sampler import Sampler, fitting_prompts
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example

ROLLOUTS_PER_SCORING = 64  # whose hidden states are held at once, at most


@dataclass
class Evaluation:
    """What an evaluation found.

    Attributes:
        greedy: one rollout per problem.
        sampled: `eval_samples` rollouts per problem.
        summary: the columns of `evals.jsonl`.
    """

    greedy: list[Rollout]
    sampled: list[Rollout]
    summary: dict[str, Any]


def evaluate_all(
    engine: RolloutEngine,
    task: Task,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    also: Mapping[str, tuple[Task, Sequence[Example]]],
    args: SelfDistillConfig,
    model: nn.Module,
    progress: Callable[..., None],
) -> Evaluation:
    """Answer the held-out examples greedily, `eval_samples` times by sampling, and those of further tasks greedily.

    Args:
        also: tasks with their examples, by the names of their columns.
        model: the student, which scores the entropy of sampled responses.
        progress: called as `progress(phase, done, total=...)`.

    Raises:
        OutOfMemory: as `evaluate`.
    """
    sampled: list[Rollout] = []
    with getattr(engine, "returning_memory", nullcontext)():  # training has fewer prompts at once
        greedy, summary = evaluate(engine, task, encoder, examples, args, model, partial(progress, "evaluation"))
        if args.eval_samples:
            sampled, of_samples = evaluate_samples(
                engine, task, encoder, examples, args, model, partial(progress, "sampled evaluation")
            )
            summary |= of_samples
        for name, (other, others) in also.items():
            _, found = evaluate(engine, other, encoder, others, args, model, partial(progress, f"evaluation on {name}"))
            summary |= {f"also_{name}": found["accuracy"], f"also_{name}_stderr": found["stderr"]}
            # Columns that begin with `also_` are charts of reports.
            for left_out, column in (("skipped", "skipped_over_budget"), ("failed", "failed_verdicts")):
                if column in found:
                    summary[f"{left_out}_also_{name}"] = found[column]
    return Evaluation(greedy, sampled, summary)


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
    prompts, skipped = fitting_prompts(task, encoder, examples, sampling, budget, engine=engine)
    return Sampler(engine, task, encoder, sampling, budget, seed=seed, progress=progress).student(prompts), skipped


def evaluate(
    engine: RolloutEngine,
    task: Task,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    args: SelfDistillConfig,
    model: nn.Module,
    progress: Callable[..., None],
) -> tuple[list[Rollout], dict[str, Any]]:
    """Answer all examples greedily, each process its share of them.

    Args:
        progress: called as `progress(done, total=...)`.

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
    rollouts = gather_rollouts(model, rollouts, examples, args)
    summary = summarize(rollouts)
    if skipped_anywhere := sum(gather_object([len(skipped)])):
        summary["skipped_over_budget"] = skipped_anywhere
    return rollouts, summary


def evaluate_samples(
    engine: RolloutEngine,
    task: Task,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    args: SelfDistillConfig,
    model: nn.Module,
    progress: Callable[..., None],
) -> tuple[list[Rollout], dict[str, Any]]:
    """Sample `eval_samples` responses to every example with the sampling settings of the run; see `evaluate`.

    Every evaluation of a run uses the same random numbers.
    """
    mine = list(examples)[args.process_index :: args.world_size]
    prompts, _ = fitting_prompts(task, encoder, mine, args.sampling, args.budget, engine=engine)
    requests = [prompt for prompt in prompts for _ in range(args.eval_samples)]
    shown = partial(progress, total=len(requests))
    with explained_memory(SMALLER_EVALUATIONS):
        rollouts = Sampler(
            engine, task, encoder, args.sampling, args.budget, seed=args.seed + args.process_index, progress=shown
        ).student(requests)
        entropies = entropy_sums(model, rollouts, args.tokens_per_forward)
    rollouts, everywhere = gather_rollouts(model, rollouts, examples, args), gather(model, [entropies])
    tokens = sum(count for _, count in everywhere)
    mean_entropy = sum(total for total, _ in everywhere) / tokens if tokens else math.nan
    return rollouts, summarize_samples(rollouts, args.eval_samples) | {"sampled_entropy": mean_entropy}


def gather_rollouts(
    model: nn.Module, rollouts: Sequence[Rollout], examples: Sequence[Example], args: SelfDistillConfig
) -> list[Rollout]:
    """The rollouts of all processes, without log-probabilities. `prompt_index` is the position in the share of a rollout's process."""
    plain = [replace(r, response=replace(r.response, log_probs=None)) for r in rollouts]
    sent = [(args.process_index + r.prompt_index * args.world_size, r.without_example()) for r in plain]
    return [replace(rollout, example=examples[position]) for position, rollout in gather(model, sent)]


def entropy_sums(model: nn.Module, rollouts: Sequence[Rollout], max_tokens: int) -> tuple[float, int]:
    """Sum over the response tokens of the entropy of the student's distribution (nats, temperature 1), and their number."""
    head, total = Head.of(unwrap(model)), 0.0
    limit = scoring_limit(max_tokens, adjustable=not is_sharded(unwrap(model)))
    ordered = sorted(rollouts, key=lambda rollout: len(rollout.prompt_ids) + len(rollout.response_ids))
    for start in range(0, len(ordered), ROLLOUTS_PER_SCORING):
        for part in in_parts(ordered[start : start + ROLLOUTS_PER_SCORING]):
            for values in map_tokens(head, frozen_states(model, part, limit), lambda logits, chunk: entropy(logits)):
                total += float(values.double().sum())
    return total, sum(len(rollout.response_ids) for rollout in rollouts)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that k of the samples, drawn without replacement, hold a correct one: `1 - C(n - c, k) / C(n, k)`.

    An unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Args:
        samples: n, at least k.
        correct: c.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def summarize_samples(rollouts: Sequence[Rollout], samples: int) -> dict[str, Any]:
    """Accuracy and pass@k of sampled responses, how many different answers a problem gets, and how the responses look.

    Args:
        rollouts: those of a problem follow each other.
        samples: responses per problem. `pass_at_k` is given for k = 2, 4, 8, ... and for all of them.
    """
    problems = [rollouts[start : start + samples] for start in range(0, len(rollouts), samples)]
    right = [sum(r.verdict.correct for r in members) for members in problems]
    counts = sorted({2**power for power in range(1, samples.bit_length()) if 2**power <= samples} | ({samples} - {1}))
    rates = [count / samples for count in right]
    summary = {
        "sampled_accuracy": mean(rates),
        "sampled_stderr": stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else math.nan,
        **{f"pass_at_{k}": mean([pass_at_k(samples, count, k) for count in right]) for k in counts},
        "distinct_answers": mean(
            [len({r.verdict.submitted for r in members if r.verdict.submitted is not None}) for members in problems]
        ),
        "sampled_length": mean([len(r.response_ids) for r in rollouts]),
        "sampled_truncated_rate": mean([not r.response.finished for r in rollouts]),
        "eval_samples": samples,
    }
    if failed := sum(r.verdict.failed for r in rollouts):
        summary["sampled_failed_verdicts"] = failed
    return summary


def mean(values: Sequence[float]) -> float:
    """The mean; NaN if there is no value."""
    return fmean(values) if values else math.nan


def summarize(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Accuracy (strict and lenient), its standard error, and how the responses look."""
    n = len(rollouts)
    accuracy = mean([r.verdict.correct for r in rollouts])
    summary = {
        "accuracy": accuracy,
        "lenient_accuracy": mean([r.verdict.lenient_correct for r in rollouts]),
        "well_formed_rate": mean([r.verdict.well_formed for r in rollouts]),
        "stderr": math.sqrt(accuracy * (1 - accuracy) / max(n, 1)),
        "n": n,
        "truncated_rate": mean([not r.response.finished for r in rollouts]),
        "response_length": mean([len(r.response_ids) for r in rollouts]),
    }
    if failed := sum(r.verdict.failed for r in rollouts):
        summary["failed_verdicts"] = failed
    categories = sorted({r.example.category for r in rollouts if r.example.category})
    plain = Counter(category.replace(" ", "_") for category in categories)
    for category in categories:
        name = category.replace(" ", "_")
        members = [r.verdict.correct for r in rollouts if r.example.category == category]
        summary[f"accuracy_{name if plain[name] == 1 else category}"] = mean(members)
    return summary
