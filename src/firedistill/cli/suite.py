"""`firedistill suite`: what the command takes and what it shows."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from firedistill.suites.plan import Plan, PlannedRun, built_in_suites, make_plan, merge
from firedistill.suites.run import (
    ORDER,
    Runner,
    RunState,
    SuiteFolder,
    array_part,
    duration,
    share,
    summary,
    train_command,
)

DESCRIPTION = """\
Run a list of runs; stop it at any point, and continue it with the same command.

NAME is one of {names}, a YAML file, or the folder of a suite that was started.
Options that are not listed are those of `firedistill train`, for every run: --data_dir data, --max_steps 20, ...
"""


def suite_command(arguments: Sequence[str], console: Console) -> int:
    """Plan, run, continue or look at a suite; 1 if a run has failed."""
    options, rest = parse(arguments)
    if options.name is None:
        raise ValueError(f"name a suite: one of {', '.join(built_in_suites())}, a YAML file, or the folder of a suite")
    suite, plan, chosen = planned(options, rest)
    if options.status:
        plan = suite.plan
        states = suite.states(plan)
        console.print(table(plan.runs, states, plan.title), soft_wrap=True)
        console.print(summary(plan, states))
        return 0
    part = (options.index, options.of) if options.index is not None else array_part(os.environ)
    if part is not None:
        chosen = share(chosen, *part)
        console.print(f"part {part[0]} of {part[1]}: {len(chosen)} runs")
    if options.dry_run:
        return dry_run(suite, plan, chosen, console)
    plan = suite.widen(plan)
    console.print(f"{plan.title}\n{len(chosen)} runs in {suite.folder}", soft_wrap=True)
    view = View(console, suite, plan, chosen)
    runner = Runner(suite, plan, chosen, slots(options), options.retry_failed, told=view.told, watch=view.watch)
    try:
        with view:
            states = runner.work()
    except KeyboardInterrupt:
        console.print(f"stopped; the same command continues {suite.folder}", soft_wrap=True)
        return 130
    console.print(summary(plan, states))
    mine = [states[run.id] for run in chosen]
    if any(state.name == "running" for state in mine):
        console.print("other processes are at the runs that are still going")
    failed = [run.id for run in chosen if states[run.id].name == "failed"]
    if failed:
        console.print(f"failed: {', '.join(failed)}; --retry-failed runs them again, logs are in {suite.folder / 'logs'}")
    console.print(f"report: firedistill report {shlex.quote(str(suite.folder))} -o report", soft_wrap=True)
    return 1 if failed else 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    from firedistill.recipes import parse_overrides

    names = ", ".join(built_in_suites())
    usage = "firedistill suite NAME [--seeds ...] [--only ...] [--option value ...] [--dry-run | --status | --retry-failed]"
    parser = argparse.ArgumentParser(
        prog="firedistill suite",
        usage=usage,
        description=DESCRIPTION.format(names=names),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="suite, YAML file, or folder")
    parser.add_argument("-o", "--output_dir", "--output-dir", help="folder of the suite (runs/NAME)")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="show the runs and their commands, run nothing")
    parser.add_argument("--status", action="store_true", help="show what is done, running, failed and to do")
    parser.add_argument("--seeds", nargs="+", type=numbers, help="these seeds instead of the suite's: 0 or 0,1,2")
    parser.add_argument("--only", nargs="+", type=words, help="these methods only: fire,full_context")
    parser.add_argument("--retry-failed", "--retry_failed", action="store_true", help="run failed runs again")
    parser.add_argument("--gpus", nargs="+", type=words, help="one run at a time on each of these GPUs: 0,1,2,3")
    parser.add_argument("--jobs", type=int, help="runs at a time (1, or one per GPU)")
    parser.add_argument("--index", type=int, help="which part of the runs, from 0 on; by default SLURM_ARRAY_TASK_ID's, if set")
    parser.add_argument("--of", type=int, help="how many parts")
    options, rest = parser.parse_known_args(list(arguments))
    for name in ("seeds", "only", "gpus"):
        if lists := getattr(options, name):
            setattr(options, name, [value for values in lists for value in values])
    if (options.index is None) != (options.of is None):
        raise ValueError("--index and --of belong together: --index 0 --of 4")
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs is {options.jobs}; expected 1 or more")
    return options, parse_overrides(rest)


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def planned(options: argparse.Namespace, rest: Mapping[str, str]) -> tuple[SuiteFolder, Plan, list[PlannedRun]]:
    """The suite's folder, its plan with what this call asks for, and the runs that this call is about."""
    for name in ("method", "seed", "output_dir", "resume", "overwrite"):
        if name in rest:
            raise ValueError(f"--{name} differs from run to run of a suite; use --only, --seeds, -o")
    if (Path(options.name) / "plan.json").is_file():
        suite = SuiteFolder(options.name)
        plan = suite.plan
        if rest:
            raise ValueError(f"--{next(iter(rest))} would change the runs of {options.name}, which are planned already")
        seeds, methods = set(options.seeds or ()), set(options.only or ())
        chosen = [r for r in plan.runs if r.command == "train"]
        chosen = [r for r in chosen if (not seeds or r.seed in seeds) and (not methods or r.method in methods)]
        if not chosen:
            raise ValueError(
                f"{options.name} plans no run with these seeds and methods; see firedistill suite {options.name} --status"
            )
        return suite, plan, plan.with_needed(chosen)
    suite = SuiteFolder(options.output_dir or Path("runs") / Path(options.name).stem)
    if options.status:
        return suite, suite.plan, []
    known = suite.plan if suite.plan_path.is_file() else None
    # What was given for all runs when the suite was started need not be given again.
    plan = make_plan(options.name, options.seeds, options.only, rest or (known.options if known else {}))
    chosen = list(plan.runs)
    return suite, (merge(known, plan, suite.folder) if known else plan), chosen


def slots(options: argparse.Namespace) -> list[dict[str, str]]:
    """What the environment of each of the runs that go on at the same time has in addition."""
    jobs = options.jobs or len(options.gpus or [0])
    if options.gpus:
        return [{"CUDA_VISIBLE_DEVICES": options.gpus[job % len(options.gpus)]} for job in range(jobs)]
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{} for _ in range(jobs)]
    # Runs that share the processor cores: each takes its part of them.
    return [{"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} for _ in range(jobs)]


def dry_run(suite: SuiteFolder, plan: Plan, chosen: Sequence[PlannedRun], console: Console) -> int:
    states = suite.states(plan) if suite.plan_path.is_file() else {run.id: RunState("to do") for run in plan.runs}
    for run in chosen:
        command = shlex.join(["firedistill", *train_command(suite, run)[3:]])
        console.print(f"{states[run.id].name:8} {command}", soft_wrap=True)
    steps = sum(run.max_steps for run in chosen)
    console.print(f"{plan.title}: {len(chosen)} runs, {steps:,} optimizer steps; nothing was run or written", soft_wrap=True)
    return 0


class View:
    """What a person sees: on a terminal a table that is kept up to date, elsewhere a line for everything that happens."""

    def __init__(self, console: Console, suite: SuiteFolder, plan: Plan, runs: Sequence[PlannedRun]):
        self.suite, self.plan, self.runs, self.console = suite, plan, runs, console
        self.live = Live(console=console, refresh_per_second=2, transient=True) if console.is_terminal else None

    def __enter__(self) -> View:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self.live is not None:
            self.live.stop()

    def told(self, line: str) -> None:
        states = self.suite.states(self.plan)
        self.console.print(line, soft_wrap=True)
        if self.live is None:
            self.console.print(f"  {summary(self.plan, states)}", soft_wrap=True)

    def watch(self, runner: Runner) -> None:
        if self.live is None:
            return
        states = self.suite.states(self.plan)
        active = [run for run in self.runs if states[run.id].name in ("running", "failed")]
        self.live.update(table(active, states, summary(self.plan, states)))


def table(runs: Sequence[PlannedRun], states: Mapping[str, RunState], title: str) -> Table:
    """A row per run: where it stands."""
    shown = Table(title=title, title_justify="left")
    for name in ("run", "state", "step", "accuracy", "time", ""):
        shown.add_column(name, justify="left" if name in ("run", "state", "") else "right", overflow="fold")
    colours = dict(zip(ORDER, ("green", "cyan", "red", "yellow", "dim"), strict=True))
    for run in runs:
        state = states[run.id]
        shown.add_row(
            run.id,
            state.name,
            f"{state.step}/{run.max_steps}",
            f"{state.accuracy:.1%}" if state.accuracy == state.accuracy else "",
            duration(state.seconds) if state.seconds else "",
            state.note,
            style=colours[state.name],
        )
    return shown
