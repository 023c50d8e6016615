"""What a person sees while a run goes on: a live table or a line per step, accuracies, and where everything is in the end."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback

from firedistill.terminal import visible as visible

# Column title, key in metrics.jsonl, format; a column shows where the method has the value.
COLUMNS = [
    ("step", "step", "{:>4}"),
    ("loss", "loss", "{:>8.4f}"),
    ("|grad|", "grad_norm", "{:>7.3f}"),
    ("correct", "correct_rate", "{:>7.0%}"),
    ("tokens", "response_length", "{:>6.1f}"),
    ("over rho", "chi_active", "{:>8.1%}"),
    ("eta", "eta", "{:>6.3f}"),
    ("beta", "beta", "{:>6.3f}"),
    ("s/step", "train_seconds", "{:>6.1f}"),
]


class ConsoleReport(TrainerCallback):
    """A line per step and evaluation; on a terminal, the last steps as a table that is kept up to date, above a progress bar.

    Args:
        trainer: the trainer to watch.
        console: where to print.
        rows: steps that the table holds; earlier ones are lines above it.
    """

    def __init__(self, trainer: Any, console: Console, rows: int = 12):
        self.trainer, self.console, self.rows = trainer, console, rows
        self.columns: list[tuple[str, str, str]] = []
        self.latest: list[tuple[dict[str, float], str]] = []
        self.scrolled = False
        trainer.on_progress = self.phase
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[phase]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=4) if console.is_terminal else None
        self.bar: TaskID | None = None

    def stop(self) -> None:
        """Leave the terminal as it was; a live display that is left on hides the cursor."""
        if self.live is not None:
            self.live.stop()

    def phase(self, name: str, done: int, total: int) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, phase=f"{name} {done}/{total}")

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.print(f"goes on after step {state.global_step}, from {self.trainer.resumed_from}")
        self.bar = self.progress.add_task("steps", total=state.max_steps, completed=state.global_step, phase="")
        if self.live is not None:
            self.live.start()

    def on_train_end(self, args, state, control, **kwargs):
        self.stop()

    def on_step_end(self, args, state, control, **kwargs):
        metrics = self.trainer.last_metrics
        available = [column for column in COLUMNS if column[1] in metrics]
        # FIRE's branches report what they had; once a column has been seen it stays.
        news = not self.columns or {c[1] for c in available} - {c[1] for c in self.columns}
        if news:
            self.columns = [c for c in COLUMNS if c in available or c in self.columns]
        note = ""
        if metrics["skipped_update"]:
            note = "skipped: " + (
                "no rollout to train on" if math.isfinite(metrics["grad_norm"]) else "the gradient is not finite"
            )
        assert self.bar is not None  # since `on_train_begin`
        self.progress.update(self.bar, completed=state.global_step, phase="")
        if self.live is None:
            if news:
                self.print(self.header(), style="bold")
            self.print(self.line(metrics, note))
            return
        self.latest.append((dict(metrics), note))
        if len(self.latest) > self.rows:
            if not self.scrolled:
                self.print(self.header(), style="bold")
            self.scrolled = True
            self.print(self.line(*self.latest.pop(0)))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics and metrics.get("eval_n"):
            self.print(f"held-out, step {state.global_step}: {accuracy_line(metrics)}", style="cyan")

    def header(self) -> str:
        return "  ".join(title.rjust(width(form)) for title, _, form in self.columns)

    def line(self, metrics: dict[str, float], note: str) -> str:
        return "  ".join(cells(self.columns, metrics)) + (f"  {note}" if note else "")

    def render(self) -> Group:
        """The table of the last steps and the bar."""
        table = Table()
        for title, _, _ in self.columns:
            table.add_column(title, justify="right")
        noted = any(note for _, note in self.latest)
        if noted:
            table.add_column("")
        for metrics, note in self.latest:
            style = "yellow" if note else None
            table.add_row(*(text.strip() for text in cells(self.columns, metrics)), *([note] if noted else []), style=style)
        return Group(*([table] if self.latest else []), self.progress)

    def print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def cells(columns: list[tuple[str, str, str]], metrics: dict[str, float]) -> list[str]:
    """The values of a step as text of the columns' widths, a dash where there is none."""
    return [
        form.format(metrics[key]) if key in metrics and metrics[key] == metrics[key] else "-".rjust(width(form))
        for _, key, form in columns
    ]


def width(form: str) -> int:
    return int(form.removeprefix("{:>").split(".")[0].rstrip("}"))


def accuracy_line(metrics: dict[str, float], prefix: str = "eval_") -> str:
    """`21.4 % ± 3.0 right (lenient 23.4 %, well-formed 98.4 %, 17.1 tokens, n 192)`."""
    value = {name.removeprefix(prefix): number for name, number in metrics.items()}
    return (
        f"{value['accuracy']:.1%} ± {value['stderr']:.1%} right "
        f"(lenient {value['lenient_accuracy']:.1%}, well-formed {value['well_formed_rate']:.1%}, "
        f"{value['response_length']:.1f} tokens, n {value['n']:.0f})"
    )


def before_and_after(evaluations: list[dict[str, float]]) -> Table:
    """The first and the last evaluation side by side."""
    table = Table(title="held-out accuracy, greedy")
    for title in ("", "before", "after"):
        table.add_column(title, justify="right" if title else "left")
    first, last = evaluations[0], evaluations[-1]
    rows = [("right", "accuracy"), ("right, lenient", "lenient_accuracy"), ("well-formed", "well_formed_rate")]
    for title, key in rows:
        error = [f" ± {row['stderr']:.1%}" if key == "accuracy" else "" for row in (first, last)]
        table.add_row(title, f"{first[key]:.1%}{error[0]}", f"{last[key]:.1%}{error[1]}")
    table.add_row("tokens per response", f"{first['response_length']:.1f}", f"{last['response_length']:.1f}")
    return table


def correct_rate_trend(metrics: list[dict[str, float]]) -> str | None:
    """How often sampled answers to training problems were right, in the first and in the last quarter of the steps."""
    rates = [row["correct_rate"] for row in metrics if "correct_rate" in row]
    quarter = len(rates) // 4
    if quarter == 0:
        return None
    first, last = (sum(part) / quarter for part in (rates[:quarter], rates[-quarter:]))
    return f"sampled answers that were right: {first:.0%} in the first {quarter} steps, {last:.0%} in the last {quarter}"
