"""An inspected example on the terminal: prompt, response, verdict, feedback, teacher views, and a table per token."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from firedistill.attribution import Inspection
from firedistill.cli.console import visible
from firedistill.prompts import student_messages, teacher_messages
from firedistill.teacher import Teacher


def print_inspection(inspection: Inspection, teacher: Teacher, console: Console, views: bool = True) -> None:
    """Print everything about the example, in the order of its stages. Text of models and datasets is never markup."""
    rollout = inspection.rollout
    verdict = rollout.verdict

    def panel(text: str, title: str) -> None:
        console.print(Panel(Text(visible(text)), title=Text(visible(title)), title_align="left"))

    panel(teacher.encoder.render(student_messages(teacher.task, rollout.example)), f"student prompt, {rollout.example.uid}")
    panel(
        rollout.response.text,
        f"response, {len(rollout.response_ids)} tokens{'' if rollout.response.finished else ', unfinished'}",
    )
    panel(
        f"correct: {verdict.correct}\nsubmitted: {verdict.submitted}\nexpected: {verdict.expected}\n"
        f"well-formed: {verdict.well_formed}\ncorrect by a lenient reading: {verdict.lenient_correct}",
        "verdict",
    )
    for number, field in enumerate(rollout.feedback, start=1):
        panel(field.text, f"feedback field {number}, {field.name}")
    if views:
        for view in ["full", *range(len(rollout.feedback)), "none"]:
            title = {"full": "full", "none": "without feedback"}.get(view) or f"without {rollout.feedback[view].name}"
            message = teacher_messages(teacher.task, rollout.example, rollout.feedback, view)[0]["content"]
            panel(message, f"teacher message, {title} ({len(teacher.prompt_ids(rollout, view))} tokens)")
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
