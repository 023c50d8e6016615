"""One example under the microscope: prompt, response, verdict, feedback, teacher views, and what FIRE makes of every token."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from firedistill.cli.console import visible
from firedistill.evaluation import answer_examples
from firedistill.models.states import score_responses
from firedistill.objectives.base import chunks
from firedistill.objectives.fire import FireTarget, fire_target, sft_weight
from firedistill.prompts import View, fit_feedback, student_messages, teacher_messages
from firedistill.rollouts.engine import Rollout
from firedistill.tasks import Example
from firedistill.tasks.guard import TaskFault

if TYPE_CHECKING:
    from firedistill.trainer import SelfDistillTrainer

logger = logging.getLogger(__name__)


@dataclass
class Inspection:
    """A judged rollout with its feedback, and per token of its response the quantities of both branches."""

    rollout: Rollout
    tokens: list[str]
    target: FireTarget
    beta: torch.Tensor


def sample_answers(trainer: SelfDistillTrainer, examples: Sequence[Example], seed: int) -> list[Rollout]:
    """One judged response per example, as in training; none for prompts over the budget and for empty responses."""
    args = trainer.args
    rollouts, _ = answer_examples(
        trainer.rollout_engine, trainer.judge, trainer.encoder, examples, args.sampling, args.budget, seed=seed
    )
    return [rollout for rollout in rollouts if rollout.response_ids]


def inspect_example(trainer: SelfDistillTrainer, example: Example, seed: int = 0) -> Inspection:
    """Sample one response and inspect it.

    Raises:
        ValueError: the prompt is over the budget, the response is empty, or the task cannot give feedback.
    """
    rollouts = sample_answers(trainer, [example], seed)
    if not rollouts:
        raise ValueError(f"{example.uid}: the prompt is over the budget, or the response is empty")
    return inspect_rollout(trainer, rollouts[0])


@torch.no_grad()
def inspect_rollout(trainer: SelfDistillTrainer, rollout: Rollout) -> Inspection:
    """Score a response with the student and every teacher view.

    Both branches of FIRE are computed, whatever the verdict and the run's method are, at the peak learning rate's step scale.

    Raises:
        ValueError: the task cannot give feedback.
    """
    args = trainer.args
    try:
        feedback = trainer.judge.feedback(rollout.example, rollout.response.text, rollout.verdict)
    except TaskFault as fault:
        raise ValueError(str(fault)) from fault
    rollout.feedback, _ = fit_feedback(feedback, trainer.encoder, args.max_feedback_tokens)

    trainer.model.eval()
    student = score_responses(trainer.model, [rollout.prompt_ids], [rollout.response_ids]).hidden
    views: list[View] = ["full", *range(len(rollout.feedback))]
    with trainer.teacher.applied():
        states = trainer.view_scorer.score([0], [[trainer.view_ids(rollout, view)] for view in views], [rollout.response_ids])
    trainer.view_scorer.forget()
    teacher = [view.hidden for view in states]
    token_ids = torch.tensor(rollout.response_ids, device=student.device)
    teacher_head = trainer.teacher_head()
    scale = max(1.0, args.learning_rate / (args.nominal_learning_rate or args.learning_rate))
    targets, betas = [], []
    for rows in chunks(student, trainer.head):
        logits = trainer.head(student[rows])
        full, *without = (teacher_head(view[rows]) for view in teacher)
        loo_logits = torch.stack(without) if without else None
        target = fire_target(
            logits,
            full,
            loo_logits,
            step_scale=scale,
            log_prob_floor=args.log_prob_floor,
            attribution=loo_logits is not None,
        )
        targets.append(target)
        betas.append(sft_weight(logits, token_ids[rows], scale))
    names = [name for name in FireTarget.__dataclass_fields__ if name != "log_probs"]
    joined = {name: torch.cat([getattr(target, name) for target in targets], dim=-1) for name in names}
    tokens = [cast(str, trainer.processing_class.decode([token])) for token in rollout.response_ids]
    return Inspection(rollout, tokens, FireTarget(log_probs=torch.empty(0), **joined), torch.cat(betas))


def attribution_record(inspection: Inspection, trainer: SelfDistillTrainer) -> dict[str, Any]:
    """What the attribution view of a report shows: texts, and per token the numbers, those of the fields as one list per field."""
    rollout, target = inspection.rollout, inspection.target

    def numbers(values: torch.Tensor) -> list[float]:
        return [float(f"{value:.6g}") for value in values.tolist()]

    return {
        "uid": rollout.example.uid,
        "prompt": trainer.encoder.render(student_messages(trainer.task, rollout.example)),
        "correct": rollout.verdict.correct,
        "submitted": str(rollout.verdict.submitted),
        "expected": str(rollout.verdict.expected),
        "fields": [{"name": field.name, "text": field.text} for field in rollout.feedback],
        "tokens": inspection.tokens,
        "rho": numbers(target.rho),
        "gradient_norm": numbers(target.energy.sqrt()),
        "chi": numbers(target.chi),
        "alpha_full": numbers(target.alpha[0]),
        "alpha": [numbers(row) for row in target.alpha[1:]],
        "energy": [numbers(row) for row in target.field_energy],
        "eta": numbers(target.eta),
        "beta": numbers(inspection.beta),
    }


def save_wrong_answers(trainer: SelfDistillTrainer, step: int) -> Path | None:
    """Sample answers to held-out problems and save the attribution of the first wrong ones, `attribution_examples` of them.

    Eight times as many problems are tried; None if no answer to them was wrong.
    """
    args = trainer.args
    records: list[dict[str, Any]] = []
    examples = trainer.task.examples("eval", 8 * args.attribution_examples, args.eval_subset_seed, args.data_dir)
    for rollout in sample_answers(trainer, examples, args.seed):
        if len(records) == args.attribution_examples:
            break
        if not rollout.verdict.correct:
            try:
                records.append(attribution_record(inspect_rollout(trainer, rollout), trainer))
            except ValueError as error:
                logger.warning("%s: left out of the attribution", error)
    return save_attribution(records, Path(args.run_dir), step) if records else None


def save_attribution(records: Sequence[dict[str, Any]], folder: Path, step: int) -> Path:
    """Write `attribution/step_000010.json` into a run directory, from which `firedistill report` shows it."""
    path = folder / "attribution" / f"step_{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step": step, "examples": list(records)}), encoding="utf-8")
    return path


def print_inspection(inspection: Inspection, trainer: SelfDistillTrainer, console: Console, views: bool = True) -> None:
    """Everything about the example, in the order in which it comes about. Text of models and datasets is never markup."""
    rollout = inspection.rollout
    verdict = rollout.verdict

    def panel(text: str, title: str) -> None:
        console.print(Panel(Text(visible(text)), title=Text(visible(title)), title_align="left"))

    panel(trainer.encoder.render(student_messages(trainer.task, rollout.example)), f"student prompt, {rollout.example.uid}")
    panel(
        rollout.response.text,
        f"response, {len(rollout.response_ids)} tokens{'' if rollout.response.finished else ', unfinished'}",
    )
    panel(
        f"correct: {verdict.correct}\nsubmitted: {verdict.submitted}\nexpected: {verdict.expected}\n"
        f"well-formed: {verdict.well_formed}\nright by a lenient reading: {verdict.lenient_correct}",
        "verdict",
    )
    for number, field in enumerate(rollout.feedback, start=1):
        panel(field.text, f"feedback field {number}, {field.name}")
    if views:
        for view in ["full", *range(len(rollout.feedback)), "none"]:
            title = {"full": "full", "none": "without feedback"}.get(view) or f"without {rollout.feedback[view].name}"
            message = teacher_messages(trainer.task, rollout.example, rollout.feedback, view)[0]["content"]
            panel(message, f"teacher message, {title} ({len(trainer.view_ids(rollout, view))} tokens)")
    console.print(token_table(inspection))


def token_table(inspection: Inspection) -> Table:
    """Radius, gate, attribution and contraction of every response token; tokens over the radius stand out."""
    target, names = inspection.target, [field.name for field in inspection.rollout.feedback]
    branch = "correct: beta applies" if inspection.rollout.verdict.correct else "incorrect: chi, alpha, eta apply"
    table = Table(title=f"per token ({branch})")
    table.add_column("token")
    for title in ["rho", "|g_c|", "chi", "alpha full", *(f"alpha {name}" for name in names), "eta", "beta"]:
        table.add_column(Text(visible(title)), justify="right")
    for t, token in enumerate(inspection.tokens):
        alphas = [f"{float(a):.3f}" for a in target.alpha[:, t]]
        values = [float(target.rho[t]), float(target.energy[t]) ** 0.5, float(target.chi[t])]
        table.add_row(
            Text(repr(token)[1:-1]),
            *(f"{value:.4f}" for value in values),
            *alphas,
            f"{float(target.eta[t]):.3f}",
            f"{float(inspection.beta[t]):.3f}",
            style="bold yellow" if target.chi[t] > 0 else None,
        )
    return table
