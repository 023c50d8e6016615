"""What a method samples with: responses of the live student, plain or from a forced prefix, and drafts of the EMA teacher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from firedistill.prompts import PromptEncoder, TokenBudget, fit_feedback, student_messages
from firedistill.rollout import Prompt, Response, Rollout, Sampling
from firedistill.rollouts.engine import RolloutEngine
from firedistill.tasks import Example, Task, Verdict
from firedistill.tasks.guard import GuardedTask, TaskFault, explained
from firedistill.tasks.types import FeedbackField
from firedistill.teacher import Teacher

logger = logging.getLogger(__name__)


def context_of(engine: RolloutEngine | None, budget: TokenBudget) -> int:
    """The most tokens of a prompt and its response. vLLM has a limit of its own, the positions of the model."""
    return min(budget.context, getattr(engine, "context", budget.context))


def fitting_prompts(
    task: Task,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    sampling: Sampling,
    budget: TokenBudget,
    first_index: int = 0,
    engine: RolloutEngine | None = None,
) -> tuple[list[Prompt], list[Example]]:
    """Student prompts within the budget, and the examples that are left out; the log names them.

    The limit is `budget.prompt`, or the context (`context_of`) minus the longest response. An example is also left out if its prompt
    cannot be built: the task's method or the chat template raises, takes too long, or returns something else than text.
    """
    limit = min(budget.prompt, context_of(engine, budget) - sampling.max_new_tokens)
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
class Verdicts:
    """The verdicts on the responses of one call. Those that run beside the caller (`GuardedTask.begins`) begin while other responses
    are still sampled; those of a plain method are made one after the other, in the order of the prompts.

    Attributes:
        calls: verdicts that have begun, with the text that they are about, by the index of the prompt.
    """

    task: Task
    encoder: PromptEncoder
    prompts: Sequence[Prompt]
    prefixes: Sequence[list[int]]
    calls: dict[int, tuple[str, Any]] = field(default_factory=dict)

    @contextmanager
    def beginning_early(self, engine: RolloutEngine) -> Iterator[None]:
        """Let the engine report every response as it ends, if it can and verdicts run beside the caller."""
        if not (isinstance(self.task, GuardedTask) and self.task.begins("verify") and hasattr(engine, "on_response")):
            yield
            return
        engine.on_response = self.begin
        try:
            yield
        finally:
            engine.on_response = None

    def begin(self, index: int, response: Response) -> Response:
        """The response with its prefix; its verdict begins, unless it has begun already."""
        if prefix := self.prefixes[index]:
            ids = prefix + response.token_ids
            response = replace(response, token_ids=ids, text=self.encoder.decode(ids))
        begun = index in self.calls and self.calls[index][0] == response.text
        if isinstance(self.task, GuardedTask) and not begun:
            call = self.task.begin("verify", self.prompts[index].example, response.text)
            if call is not None:
                self.calls[index] = response.text, call
        return response

    def of(self, index: int, response: Response) -> Verdict:
        """The verdict on the response that `begin` returned."""
        example = self.prompts[index].example
        if index in self.calls:
            return cast(GuardedTask, self.task).verify(example, response.text, self.calls[index][1])
        return self.task.verify(example, response.text)


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

        Raises:
            ValueError: the engine returns another number of responses.
        """
        prefixes = prefixes if prefixes is not None else [[]] * len(prompts)
        limits = [self.sampling.max_new_tokens - len(prefix) for prefix in prefixes]
        continued = [prompt.token_ids + prefix for prompt, prefix in zip(prompts, prefixes, strict=True)]
        verdicts = Verdicts(self.task, self.encoder, prompts, prefixes)
        with verdicts.beginning_early(self.engine):
            sampled = self.generate(continued, self.progress, limits)
        responses = [verdicts.begin(index, response) for index, response in enumerate(sampled)]
        rollouts = []
        for index, (prompt, prefix, response) in enumerate(zip(prompts, prefixes, responses, strict=True)):
            verdict = verdicts.of(index, response)
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
            drafts = iter(self.generate([request for request in requests if request is not None]))
        return [[] if request is None else next(drafts).token_ids for request in requests]

    def generate(self, prompts: Sequence[list[int]], *options: Any) -> list[Response]:
        """The engine's responses to these prompts."""
        found = list(self.engine.generate(prompts, self.sampling, self._next_seed(), *options))
        if len(found) != len(prompts):
            name = type(self.engine).__name__
            raise ValueError(f"generate of the engine {name} returned {len(found)} responses to {len(prompts)} prompts")
        return found

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
        if len(ids) + self.sampling.max_new_tokens > context_of(self.engine, self.budget):
            logger.warning("%s: no draft, the teacher's prompt is over the context budget", prompt.example.uid)
            return None
        return ids

    def _next_seed(self) -> int:
        self.calls += 1
        return (self.seed + (self.calls - 1) * 1_000_000_007) % 2**63
