"""What a run shows in the terminal: steps, evaluations, progress, and text of others made safe to print."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from firedistill.terminal import in_notebook, plain_console


class Column(NamedTuple):
    """A column of the table of steps: its title, its key in `metrics.jsonl`, its width, and the format of its numbers."""

    title: str
    key: str
    width: int
    format: str

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The value of a step, right-aligned; a dash if it is missing or undefined."""
        value = metrics.get(self.key, math.nan)
        return ("-" if math.isnan(value) else format(value, self.format)).rjust(self.width)


COLUMNS = [
    Column("step", "step", 4, ""),
    Column("loss", "loss", 8, ".4f"),
    Column("|grad|", "grad_norm", 7, ".3f"),
    Column("correct", "correct_rate", 7, ".0%"),
    Column("tokens", "response_length", 6, ".1f"),
    Column("over rho", "chi_active", 8, ".1%"),
    Column("eta", "eta", 6, ".3f"),
    Column("beta", "beta", 6, ".3f"),
    Column("s/step", "train_seconds", 6, ".1f"),
]


class NotebookLive:
    """A renderable in the output of a notebook's cell, which is replaced as it changes, at most twice a second.

    Args:
        render: returns what to show.
    """

    def __init__(self, render: Callable[[], Any]):
        self.render = render
        self.handle: Any = None
        self.shown = 0.0

    def start(self) -> None:
        from IPython.display import display  # is there, since this is a notebook

        self.handle = display(self.content(), raw=True, display_id=True)

    def refresh(self) -> None:
        if self.handle is not None and time.monotonic() > self.shown + 0.5:
            self.handle.update(self.content(), raw=True)
            self.shown = time.monotonic()

    def stop(self) -> None:
        self.shown = 0.0
        self.refresh()
        self.handle = None

    def content(self) -> dict[str, str]:
        """The renderable as HTML and, for front ends without it, as text."""
        console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False, force_terminal=True)
        console.print(self.render())
        page = console.export_html(clear=False, inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")
        return {"text/html": page, "text/plain": console.export_text()}


class ConsoleReport(TrainerCallback):
    """Prints a line per step and evaluation. On a terminal, a live table shows the last steps above a progress bar; in a notebook,
    so does the output of the cell, with the evaluations above.

    Args:
        trainer: the trainer to watch.
        rows: number of steps in the live table; earlier steps become lines above it.

    Attributes:
        console: where to print; it can be replaced before training.
        lines: what a notebook shows above the table.
    """

    def __init__(self, trainer: Any, rows: int = 12):
        self.trainer, self.console, self.rows = trainer, plain_console(), rows
        self.columns: list[Column] = []
        self.latest: list[tuple[dict[str, float], str]] = []
        self.scrolled = False
        trainer.on_progress = self.phase
        self.lines: list[str] = []
        self.progress: Progress
        self.live: Live | NotebookLive | None = None
        self.bar: TaskID | None = None

    def stop(self) -> None:
        """Restore the terminal: a live display that is not stopped leaves the cursor hidden."""
        if self.live is not None:
            self.live.stop()

    def phase(self, name: str, done: int, total: int) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, phase=f"{name} {done}/{total}")
            self.refresh()

    def refresh(self) -> None:
        """Show the present state where nothing else does: the display of a terminal refreshes itself."""
        if isinstance(self.live, NotebookLive):
            self.live.refresh()

    def on_train_begin(self, args, state, control, **kwargs):
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[phase]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.columns, self.latest, self.lines, self.scrolled = [], [], [], False
        if in_notebook():
            self.live = NotebookLive(self.render)
        elif self.console.is_terminal:
            self.live = Live(console=self.console, get_renderable=self.render, refresh_per_second=4)
        if state.global_step:
            self.print(f"resuming after step {state.global_step}, from {self.trainer.resumed_from}")
        self.bar = self.progress.add_task("steps", total=state.max_steps, completed=state.global_step, phase="")
        if self.live is not None:
            self.live.start()

    def on_train_end(self, args, state, control, **kwargs):
        if isinstance(self.live, NotebookLive) and self.trainer.stop.signal is not None and self.trainer.incomplete:
            self.print(f"stopped by {self.trainer.stop.name} after step {state.global_step}; run the cell again to continue")
        self.stop()

    def on_step_end(self, args, state, control, **kwargs):
        metrics = dict(self.trainer.last_metrics)
        # A method may report a value in some steps only; its column stays once it has appeared.
        columns = [column for column in COLUMNS if column.key in metrics or column in self.columns]
        new_header, self.columns = columns != self.columns, columns
        note = ""
        if skipped := metrics["skipped_update"]:
            reason = "no rollout to train on" if math.isfinite(metrics["grad_norm"]) else "the gradient is not finite"
            updates = metrics.get("updates", 1)
            note = f"skipped: {reason}" if skipped == updates else f"{skipped} of {updates} updates skipped: {reason}"
        assert self.bar is not None  # `on_train_begin` sets it
        self.progress.update(self.bar, completed=state.global_step, phase="")
        if self.live is None:
            if new_header:
                self.print(self.header(), style="bold")
            self.print(self.line(metrics, note))
            return
        self.latest.append((metrics, note))
        if len(self.latest) > self.rows:
            first = self.latest.pop(0)
            if isinstance(self.live, Live):
                if not self.scrolled:
                    self.print(self.header(), style="bold")
                self.print(self.line(*first))
            self.scrolled = True
        self.refresh()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics and metrics.get("eval_n"):
            self.print(f"held-out, step {state.global_step}: {accuracy_line(metrics)}", style="cyan")
            self.refresh()

    def header(self) -> str:
        return "  ".join(column.title.rjust(column.width) for column in self.columns)

    def line(self, metrics: Mapping[str, float], note: str) -> str:
        return "  ".join(column.cell(metrics) for column in self.columns) + (f"  {note}" if note else "")

    def render(self) -> Group:
        """The table of the last steps above the progress bar; in a notebook also the lines above the table."""
        earlier = self.scrolled and isinstance(self.live, NotebookLive)
        table = Table(caption="earlier steps: metrics.jsonl" if earlier else None)
        for column in self.columns:
            table.add_column(column.title, justify="right")
        noted = any(note for _, note in self.latest)
        if noted:
            table.add_column("")
        for metrics, note in self.latest:
            cells = [column.cell(metrics).strip() for column in self.columns]
            table.add_row(*cells, *([note] if noted else []), style="yellow" if note else None)
        return Group(*map(Text, self.lines), *([table] if self.latest else []), self.progress)

    def print(self, text: str, style: str | None = None) -> None:
        if isinstance(self.live, NotebookLive):
            self.lines.append(text)
            return
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def accuracy_line(metrics: Mapping[str, float], prefix: str = "eval_") -> str:
    """`21.4% ± 3.0% right (lenient 23.4%, well-formed 98.4%, 17.1 tokens, n 192)`."""
    value = {name.removeprefix(prefix): number for name, number in metrics.items()}
    return (
        f"{value['accuracy']:.1%} ± {value['stderr']:.1%} right "
        f"(lenient {value['lenient_accuracy']:.1%}, well-formed {value['well_formed_rate']:.1%}, "
        f"{value['response_length']:.1f} tokens, n {value['n']:.0f})"
    )


def first_and_last(evaluations: list[dict[str, float]]) -> Table:
    """The first and the last evaluation side by side."""
    table, ends = Table(title="held-out accuracy, greedy"), (evaluations[0], evaluations[-1])
    for title in ("", f"step {ends[0]['step']}" if ends[0]["step"] else "before", "after"):
        table.add_column(title, justify="right" if title else "left")
    table.add_row("right", *(f"{row['accuracy']:.1%} ± {row['stderr']:.1%}" for row in ends))
    table.add_row("right, lenient", *(f"{row['lenient_accuracy']:.1%}" for row in ends))
    table.add_row("well-formed", *(f"{row['well_formed_rate']:.1%}" for row in ends))
    table.add_row("tokens per response", *(f"{row['response_length']:.1f}" for row in ends))
    return table


def correct_rate_trend(metrics: Iterable[Mapping[str, float]]) -> str | None:
    """The share of right sampled answers in the first and in the last quarter of the steps; None for fewer than four steps."""
    rates = [row["correct_rate"] for row in metrics if "correct_rate" in row]
    quarter = len(rates) // 4
    if quarter == 0:
        return None
    first, last = (sum(part) / quarter for part in (rates[:quarter], rates[-quarter:]))
    return f"sampled answers that were right: {first:.0%} in the first {quarter} steps, {last:.0%} in the last {quarter}"
