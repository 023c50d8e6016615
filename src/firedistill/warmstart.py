"""Warm start: plain supervised fine-tuning of the same LoRA adapter on gold solutions.

A student that never writes the answer line, or never finds an answer, gives self-distillation nothing to learn from, and a teacher
that cannot read feedback has nothing to teach. A few dozen supervised steps on the task's solutions provide both: with
`feedback_share`, some of the prompts are the teacher's, with feedback about a wrong attempt, followed by the solution.

The run directory, evaluation and resuming are those of any other run. `--initial_adapter` of a training run takes its adapter.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import cached_property

from firedistill.config import WarmStartConfig
from firedistill.metrics import Metrics
from firedistill.models.tokens import end_of_turn_id
from firedistill.prompts import fit_feedback, student_messages, teacher_messages
from firedistill.rollout import Response, Rollout
from firedistill.step import note_cut
from firedistill.tasks import Example, Verdict
from firedistill.tasks.guard import TaskFault
from firedistill.trainer import SelfDistillTrainer

logger = logging.getLogger(__name__)


class WarmStartTrainer(SelfDistillTrainer):
    """`SelfDistillTrainer` whose responses are the gold solutions: `WarmStartTrainer(args=WarmStartConfig(task="arithmetic"))`.

    Its arguments are those of `SelfDistillTrainer`; `args` is a `firedistill.config.WarmStartConfig`.

    Raises:
        ValueError: a training example has no gold solution.
    """

    config_class = WarmStartConfig
    args: WarmStartConfig

    @cached_property
    def stop_id(self) -> int:
        """The token with which the chat template ends an answer."""
        found = end_of_turn_id(self.processing_class)
        return self.processing_class.eos_token_id if found is None else found

    def sample(self, examples: Sequence[Example]) -> tuple[list[Rollout], Metrics]:
        """The gold solutions as rollouts; nothing is generated."""
        draw, metrics, budget = random.Random(self.sampling_seed()), Metrics(), self.args.budget
        metrics.total(generated_tokens=0)
        fitting = []
        for example in examples:
            try:
                rollout, most = self.gold_rollout(example, draw, metrics)
            except TaskFault as fault:
                logger.warning("%s left out: its prompt cannot be built (%s)", example.uid, fault)
                metrics.total(skipped_over_budget=1)
                continue
            prompt, response = len(rollout.prompt_ids), len(rollout.response_ids)
            if prompt <= (limit := min(most, budget.context - response)):
                fitting.append(rollout)
                metrics.mean(response_length=float(response))
            else:
                logger.warning("%s left out: its prompt has %d tokens, the limit is %d", example.uid, prompt, limit)
                metrics.total(skipped_over_budget=1)
        return fitting, metrics

    def gold_rollout(self, example: Example, draw: random.Random, metrics: Metrics) -> tuple[Rollout, int]:
        """The gold solution after the student's prompt, or after the teacher's; and the most tokens that this prompt may have.

        Args:
            metrics: counts feedback that the task fails to give, and fields that are cut.
        """
        if not example.solution:
            raise ValueError(
                f"{example.uid} has no gold solution; task {self.task.name!r} cannot be warm-started on it: add a column solution, or "
                "remove these rows"
            )
        budget = self.args.budget
        messages, most = student_messages(self.task, example), budget.prompt
        if draw.random() < self.args.feedback_share:
            attempt, verdict = self.wrong_attempt(example, draw)
            try:
                feedback = self.task.feedback(example, attempt, verdict)
            except TaskFault as fault:
                logger.warning("%s; the row gets the student's prompt", fault)
                metrics.total(failed_feedback=1)
            else:
                fitted, cut = fit_feedback(feedback, self.encoder, budget.feedback)
                note_cut(metrics, example, cut, budget.feedback)
                messages, most = teacher_messages(self.task, example, fitted), budget.prompt + budget.feedback
        solution_ids = [*self.encoder.encode_text(example.solution), self.stop_id]
        response = Response(solution_ids, example.solution, finished=True)
        verdict = self.guarded.own.verify(example, example.solution)
        return Rollout(example, self.encoder.encode(messages), response, verdict), most

    def wrong_attempt(self, example: Example, draw: random.Random) -> tuple[str, Verdict]:
        """The solution of another problem with another answer; an empty attempt where none of 20 draws is one."""
        for _ in range(20):
            attempt = draw.choice(self.train_dataset.examples).solution or ""
            verdict = self.guarded.own.verify(example, attempt)  # a judge, if any, is asked for feedback only
            if not verdict.correct:
                return attempt, verdict
        return "", self.guarded.own.verify(example, "")
