"""What a method samples with: responses of the live student, plain or from a forced prefix, and drafts of the EMA teacher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from firedistill.prompts import PromptEncoder, TokenBudget, fit_feedback, student_messages
from firedistill.rollout import Prompt, Rollout, Sampling
from firedistill.rollouts.engine import RolloutEngine
from firedistill.tasks import Example, Task
from firedistill.tasks.guard import TaskFault, explained
from firedistill.tasks.types import FeedbackField
from firedistill.teacher import Teacher

logger = logging.getLogger(__name__)


def fitting_prompts(
    task: Task,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    sampling: Sampling,
    budget: TokenBudget,
    first_index: int = 0,
) -> tuple[list[Prompt], list[Example]]:
    """Student prompts within the budget, and the examples that are left out; the log names them.

    The limit is `budget.prompt`, or `budget.context` minus the longest response. An example is also left out if its prompt cannot be
    built: the task's method or the chat template raises, takes too long, or returns something else than text.
    """
    limit = min(budget.prompt, budget.context - sampling.max_new_tokens)
    prompts, skipped = [], []
    for position, example in enumerate(examples):
        try:
            with explained("encode", pass_on=()):
                ids = encoder.encode(student_messages(task, example))
            reason = f"its prompt has {len(ids)} tokens, the limit is {limit}" if len(ids) > limit else None
        except TaskFault as fault:
            reason = f"its prompt cannot be built ({fault})"
        if reason is None:
            prompts.append(Prompt(example, ids, first_index + position))
        else:
            logger.warning("%s left out: %s", example.uid, reason)
            skipped.append(example)
    return prompts, skipped


@dataclass
class Sampler:
    """Samples and judges the responses of one step. Every call draws from its own seed, so that a step can be repeated.

    Attributes:
        engine: generates with the weights that the model has at the time.
        sampling: the sampling parameters of all responses and drafts.
        teacher: the EMA teacher; needed for drafts only.
        seed: of the step and process.
        progress: called with the number of responses that are done.
    """

    engine: RolloutEngine
    task: Task
    encoder: PromptEncoder
    sampling: Sampling
    budget: TokenBudget
    teacher: Teacher | None = None
    seed: int = 0
    progress: Callable[[int], None] | None = None
    calls: int = field(default=0, init=False)

    def student(self, prompts: Sequence[Prompt], prefixes: Sequence[list[int]] | None = None) -> list[Rollout]:
        """One judged response of the live student per prompt, in order.

        Args:
            prefixes: token ids with which each response begins, verbatim; they count towards `max_new_tokens`.
        """
        prefixes = prefixes if prefixes is not None else [[]] * len(prompts)
        limits = [self.sampling.max_new_tokens - len(prefix) for prefix in prefixes]
        continued = [prompt.token_ids + prefix for prompt, prefix in zip(prompts, prefixes, strict=True)]
        sampled = self.engine.generate(continued, self.sampling, self._next_seed(), self.progress, limits)
        rollouts = []
        for prompt, prefix, response in zip(prompts, prefixes, sampled, strict=True):
            if prefix:
                ids = prefix + response.token_ids
                response = replace(response, token_ids=ids, text=self.encoder.decode(ids))
            verdict = self.task.verify(prompt.example, response.text)
            rollouts.append(
                Rollout(
                    prompt.example,
                    prompt.token_ids,
                    response,
                    verdict,
                    prompt_index=prompt.index,
                    prefix_length=len(prefix),
                )
            )
        return rollouts

    def teacher_drafts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Responses of the teacher to its own prompt, with the feedback on an empty response; token ids.

        Empty where that prompt exceeds the context budget, or where the task gives no feedback.
        """
        assert self.teacher is not None  # the trainer passes it
        requests = [self._draft_prompt(prompt) for prompt in prompts]
        with self.teacher.weights.applied():
            drafts = iter(
                self.engine.generate([request for request in requests if request is not None], self.sampling, self._next_seed())
            )
        return [[] if request is None else next(drafts).token_ids for request in requests]

    def _draft_prompt(self, prompt: Prompt) -> list[int] | None:
        assert self.teacher is not None
        try:
            fitted: Sequence[FeedbackField] = ()
            if self.teacher.feedback:
                feedback = self.task.feedback(prompt.example, "", self.task.verify(prompt.example, ""))
                fitted, _ = fit_feedback(feedback, self.encoder, self.budget.feedback)
            ids = self.teacher.encode(prompt.example, fitted)
        except TaskFault as fault:
            logger.warning("%s; no draft", fault)
            return None
        if len(ids) + self.sampling.max_new_tokens > self.budget.context:
            logger.warning("%s: no draft, the teacher's prompt is over the context budget", prompt.example.uid)
            return None
        return ids

    def _next_seed(self) -> int:
        self.calls += 1
        return (self.seed + (self.calls - 1) * 1_000_000_007) % 2**63
