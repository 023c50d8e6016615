"""What a method samples with: responses of the live student, plain or from a forced prefix, and drafts of the EMA teacher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from firedistill.prompts import PromptEncoder, TokenBudget, fit_feedback, teacher_messages
from firedistill.rollouts.engine import Prompt, Response, Rollout, RolloutEngine, Sampling
from firedistill.tasks import Task
from firedistill.tasks.guard import TaskFault

logger = logging.getLogger(__name__)


@dataclass
class Sampler:
    """Samples for one step. Every call draws from its own seed, so that a step can be repeated.

    Attributes:
        engine: generates with the weights that the model has at the time.
        sampling: the law of all responses and drafts.
        teacher: context manager under which the model has the EMA teacher's weights; needed for drafts only.
        seed: of the step and process.
        progress: told the number of responses that are done.
    """

    engine: RolloutEngine
    task: Task
    encoder: PromptEncoder
    sampling: Sampling
    budget: TokenBudget
    teacher: Callable[[], AbstractContextManager] = nullcontext
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
                response = Response(ids, self.encoder.decode(ids), response.finished)
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
        """Responses of the EMA teacher to its own prompt, with the feedback on an empty response; token ids.

        Empty where that prompt leaves no room within the context budget, or where the task gives no feedback.
        """
        requests: list[list[int] | None] = []
        for prompt in prompts:
            try:
                feedback = self.task.feedback(prompt.example, "", self.task.verify(prompt.example, ""))
            except TaskFault as fault:
                logger.warning("%s; no draft", fault)
                requests.append(None)
                continue
            fitted, _ = fit_feedback(feedback, self.encoder, self.budget.feedback)
            requests.append(self.encoder.encode(teacher_messages(self.task, prompt.example, fitted)))
        fits = [
            request is not None and len(request) + self.sampling.max_new_tokens <= self.budget.context for request in requests
        ]
        for prompt, request, has_room in zip(prompts, requests, fits, strict=True):
            if request is not None and not has_room:
                logger.warning("%s: no draft, the teacher's prompt is over the context budget", prompt.example.uid)
        with self.teacher():
            drafts = iter(
                self.engine.generate(
                    [request for request, has_room in zip(requests, fits, strict=True) if request is not None and has_room],
                    self.sampling,
                    self._next_seed(),
                )
            )
        return [next(drafts).token_ids if has_room else [] for has_room in fits]

    def _next_seed(self) -> int:
        self.calls += 1
        return (self.seed + (self.calls - 1) * 1_000_000_007) % 2**63
