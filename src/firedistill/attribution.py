"""What the feedback does to the tokens of a response: both branches of FIRE, computed for single responses."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from firedistill.config import SelfDistillConfig
from firedistill.files import write_text
from firedistill.memory import SHORTER_CONTEXTS, explained_memory
from firedistill.models.states import inference_mode, score_responses
from firedistill.objectives.fire import FireTarget, fire_target, sft_weight
from firedistill.ops import Head
from firedistill.ops.head import chunks
from firedistill.prompts import PromptEncoder, View, field_groups, shown_prompt
from firedistill.rollout import Rollout
from firedistill.step import add_feedback
from firedistill.teacher import Teacher

logger = logging.getLogger(__name__)


@dataclass
class Inspection:
    """A judged rollout with its feedback, and per token of its response the quantities of both branches.

    Attributes:
        removed: the views that leave out a field, or a group of fields, by its name.
    """

    rollout: Rollout
    tokens: list[str]
    target: FireTarget
    beta: torch.Tensor
    removed: dict[str, View]

    def text(self, name: str) -> str:
        """What was removed under a name: the text of the field, or name and text of every one of the fields."""
        view, feedback = self.removed[name], self.rollout.feedback
        if isinstance(view, tuple):
            return "\n".join(f"[{feedback[j].name}] {feedback[j].text}" for j in view)
        return feedback[cast(int, view)].text


class Inspector:
    """Computes both branches of FIRE with the settings of a run, whatever its method and the verdict.

    Attributes:
        step_scale: `s = max(1, a_k / a_0)` at the peak learning rate.
        encoder: of the student's prompts.
        budget: as in training, longer feedback is cut, and a response whose teacher prompt is too long is not inspected.
    """

    def __init__(self, args: SelfDistillConfig, model: nn.Module, teacher: Teacher, head: Head, encoder: PromptEncoder):
        self.model, self.teacher, self.head, self.encoder = model, teacher, head, encoder
        self.step_scale = args.step_scale_at(args.learning_rate)
        self.log_prob_floor, self.budget = args.log_prob_floor, args.budget

    @torch.no_grad()
    def inspect(self, rollout: Rollout) -> Inspection:
        """Score a response with the student and every teacher view.

        Raises:
            ValueError: the response is empty, the task cannot give feedback (`TaskFault`), the teacher's prompt is over the budget, or
                memory does not suffice (`OutOfMemory`).
        """
        uid, teacher = rollout.example.uid, self.teacher
        if not rollout.response_ids:
            raise ValueError(f"{uid}: the response is empty")
        rollout, _ = add_feedback(rollout, teacher, self.budget.feedback)
        if (tokens := teacher.view_tokens(rollout, "full")) > self.budget.context:
            raise ValueError(f"{uid}: the teacher view has {tokens} tokens, max_context_tokens is {self.budget.context}")
        with explained_memory(SHORTER_CONTEXTS):
            return self._inspect(rollout)

    def _inspect(self, rollout: Rollout) -> Inspection:
        teacher = self.teacher
        with inference_mode(self.model):
            student = score_responses(self.model, [rollout.prompt_ids], [rollout.response_ids]).hidden
        removed = dict(field_groups(rollout.feedback))
        states = [view.hidden for view in teacher.states([rollout], ["full", *removed.values()])]
        teacher.forget()
        token_ids = torch.tensor(rollout.response_ids, device=student.device)
        targets, betas, teacher_head = [], [], teacher.head
        for chunk in chunks(student, self.head, distributions=1 + len(states)):
            logits = self.head(student[chunk])
            full, *without = (teacher_head(view[chunk]) for view in states)
            target = fire_target(
                logits,
                full,
                torch.stack(without) if without else None,
                step_scale=self.step_scale,
                log_prob_floor=self.log_prob_floor,
                attribution=bool(without),
            )
            target.log_probs = logits.new_empty(0)  # [C, V] of every chunk would be held
            targets.append(target)
            betas.append(sft_weight(logits, token_ids[chunk], self.step_scale))
        names = [name for name in FireTarget.__dataclass_fields__ if name != "log_probs"]
        joined = {name: torch.cat([getattr(target, name) for target in targets], dim=-1) for name in names}
        tokens = [str(teacher.encoder.tokenizer.decode([token])) for token in rollout.response_ids]
        return Inspection(rollout, tokens, FireTarget(log_probs=torch.empty(0), **joined), torch.cat(betas), removed)

    def record(self, inspection: Inspection) -> dict[str, Any]:
        """What the attribution view of a report shows: strings, and numbers per token; those of the fields as one list per field."""
        rollout, target = inspection.rollout, inspection.target

        def numbers(values: torch.Tensor) -> list[float]:
            return [float(f"{value:.6g}") for value in values.tolist()]

        return {
            "uid": rollout.example.uid,
            "prompt": shown_prompt(self.teacher.task, self.encoder, rollout.example),
            "correct": rollout.verdict.correct,
            "submitted": "" if rollout.verdict.submitted is None else str(rollout.verdict.submitted),
            "expected": str(rollout.verdict.expected),
            "fields": [{"name": name, "text": inspection.text(name)} for name in inspection.removed],
            "tokens": inspection.tokens,
            "rho": numbers(target.rho),
            "gradient_norm": numbers(target.energy.sqrt()),
            "chi": numbers(target.chi),
            "alpha_full": numbers(target.alpha[0]),
            "alpha": [numbers(of_field) for of_field in target.alpha[1:]],
            "energy": [numbers(of_field) for of_field in target.field_energy],
            "eta": numbers(target.eta),
            "beta": numbers(inspection.beta),
        }

    def wrong_answers(
        self, rollouts: Sequence[Rollout], count: int, progress: Callable[[int], None] | None = None
    ) -> list[dict[str, Any]]:
        """Records of the first wrong responses, `count` of them; those that cannot be inspected are logged.

        Args:
            progress: called with the number of records that are made.
        """
        records: list[dict[str, Any]] = []
        for rollout in rollouts:
            if len(records) < count and rollout.response_ids and not (rollout.verdict.correct or rollout.verdict.failed):
                try:
                    records.append(self.record(self.inspect(rollout)))
                except ValueError as error:
                    logger.warning("%s: left out of the attribution", error)
                if progress is not None:
                    progress(len(records))
        return records


def save_attribution(records: Sequence[dict[str, Any]], folder: Path, step: int) -> Path:
    """Write `attribution/step_000010.json` into a run directory, from which `firedistill report` shows it."""
    path = folder / "attribution" / f"step_{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"step": step, "examples": list(records)}))
    return path
