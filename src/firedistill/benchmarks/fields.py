"""The cost of a FIRE step against the number of feedback fields B, and how well joined fields serve where B is large.

The cost is that of the worst case: all responses are wrong and every token violates the radius, so that every view is needed
everywhere. All fields have the same length; the teacher's prompts grow with their number, and so does the Full Context step.

Joined fields are measured on wrong answers that the lab model samples, where every field is also removed alone. The fields are the
task's own four about the answer, and others that are noise by construction, because they are about answers to other problems; in random
order. `kl` is KL(exact FIRE target || target with joined fields), mean over the tokens over the radius.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import LOG_PROB_FLOOR, NO_BUDGET, ONE_BY_ONE, ModelSizes, PrescribedSteps, StepSizes
from firedistill.metrics import Metrics
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.models.states import score_responses
from firedistill.objectives.distributions import reverse_kl
from firedistill.objectives.fire import fire_target
from firedistill.prompts import PromptEncoder, field_groups, joined
from firedistill.rollout import Rollout, Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.sampler import Sampler, fitting_prompts
from firedistill.tasks import load_task
from firedistill.teacher import Teacher

TITLE = "A whole FIRE step against the number of feedback fields, every token over the radius"


@dataclass
class Sizes:
    prompt: int = 150
    field_words: int = 90
    fields: tuple[int, ...] = (1, 2, 4, 8)
    responses: tuple[int, ...] = (200,)
    model: ModelSizes = ModelSizes()
    repeats: int = 3
    memory: bool = True
    many: tuple[int, ...] = ()  # numbers of fields that are joined
    views: tuple[int, ...] = (16, 8, 4)  # to which they are joined
    answers: int = 6


SIZES = {
    "full": Sizes(many=(8, 16, 32)),
    "quick": Sizes(80, 40, (1, 4), (40, 40), ModelSizes(4, 256, 8192), repeats=2, memory=False, many=(16,)),
}


def sweeps(sizes: Sizes) -> dict[str, dict]:
    return {"fields": {}}


def variants_of(steps: PrescribedSteps) -> dict[str, Callable[[], Metrics]]:
    steps.set_over(1.0, of_tokens=True)  # also a warm-up
    return {
        "full context": partial(steps.step, "full_context"),
        "fire": partial(steps.step, "fire"),
        "fire, one pass per view": partial(steps.step, "fire", ONE_BY_ONE),
    }


def prepared(*sizes_and_options) -> dict[str, Callable[[], Metrics]]:
    return variants_of(PrescribedSteps(*sizes_and_options))


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for count in sizes.fields:
        case, step_sizes = {"fields": count}, StepSizes(sizes.prompt, (sizes.field_words,) * count, sizes.responses)
        steps = PrescribedSteps(step_sizes, sizes.model, options)
        repeats = options.repeats or sizes.repeats
        yield from harness.rows(case, variants_of(steps), repeats, warm_up=False, details=steps.facts)
        if sizes.memory:
            yield from harness.memory_rows(case, prepared, step_sizes, sizes.model, options)
    if sizes.many:
        wrong = WrongAnswers(sizes.answers)
        for count in sizes.many:
            yield from wrong.rows(count, [views for views in sizes.views if views < count])


class WrongAnswers:
    """Wrong answers that the lab model samples, and its teacher."""

    def __init__(self, count: int):
        torch.manual_seed(0)
        model, tokenizer = load_model_and_tokenizer("lab", dtype="float32")
        self.model, self.task, encoder = add_lora(model).eval(), load_task("arithmetic"), PromptEncoder(tokenizer)
        self.teacher = Teacher(self.model, self.task, encoder, share_prefixes=True)
        sampling = Sampling(1.0, 1.0, 48)
        prompts, _ = fitting_prompts(self.task, encoder, self.task.examples("train", 8 * count, 1), sampling, NO_BUDGET)
        answers = Sampler(HFRolloutEngine(self.model, tokenizer), self.task, encoder, sampling, NO_BUDGET, seed=1).student(
            prompts
        )
        self.wrong = [answer for answer in answers if not answer.verdict.correct and answer.response_ids]
        self.count = count

    def rows(self, fields: int, views: Sequence[int]) -> Iterator[harness.Row]:
        """Tokens read, and divergence from the exact target, means over the answers; the first row removes each field alone."""
        found: dict[str, list[tuple[float, float, float]]] = {}
        for number, answer in enumerate(self.wrong):
            if len(next(iter(found.values()), [])) == self.count:
                break
            answer = replace(answer, feedback=self.feedback(answer, fields, number))
            student, exact, over, tokens = self.target(answer)
            if not over.any():
                continue
            found.setdefault("each field alone", []).append((tokens, 0.0, 0.0))
            for most in views:
                parts = replace(answer, feedback=joined(answer.feedback, most))
                _, target, _, tokens = self.target(parts)
                found.setdefault(f"{most} views", []).append((tokens, *divergences(exact, target, over)))
            none = fire_target(*student, attribution=False, log_prob_floor=LOG_PROB_FLOOR).log_probs
            found.setdefault("no attribution", []).append((0.0, *divergences(exact, none, over)))
        for variant, values in found.items():
            tokens, kl, largest = (sum(column) / len(column) for column in zip(*values, strict=True))
            shown = {"views' tokens": tokens, "kl": kl, "largest kl": largest, "answers": len(values)}
            yield {"case": {"noisy fields": fields}, "variant": variant, "shown": shown}

    def feedback(self, answer: Rollout, fields: int, seed: int):
        """The task's fields about the answer, and about others."""
        draw = random.Random(f"{seed} {fields}")
        others = [other for other in self.wrong if other is not answer]
        about = [answer, *draw.choices(others, k=fields)]
        own, *rest = (self.task.feedback(one.example, one.response.text, one.verdict) for one in about)
        chosen = [*own, *(draw.choice(of_other) for of_other in rest)][:fields]
        draw.shuffle(chosen)
        return tuple(replace(field, name=f"field{j}") for j, field in enumerate(chosen))

    @torch.no_grad()
    def target(self, answer: Rollout) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, int]:
        """Logits of student and full teacher, `log q_FIRE`, which tokens are over the radius, and the tokens read for the views."""
        teacher, head = self.teacher, self.teacher.head
        student = head(score_responses(self.model, [answer.prompt_ids], [answer.response_ids]).hidden)
        full = head(teacher.full([answer]).hidden)
        teacher.take_metrics()
        states = teacher.states([answer], [view for _, view in field_groups(answer.feedback)])
        tokens = teacher.take_metrics().totals["teacher_tokens"]
        teacher.forget()
        target = fire_target(student, full, torch.stack([head(view.hidden) for view in states]), log_prob_floor=LOG_PROB_FLOOR)
        return (student, full), target.log_probs, target.chi > 0, tokens


def divergences(exact: Tensor, target: Tensor, over: Tensor) -> tuple[float, float]:
    """Mean and maximum of `KL(exact || target)` over the tokens `over`; both are log-probabilities `[T, V]`."""
    kl = reverse_kl(exact, target)[over]
    return float(kl.mean()), float(kl.max())
