"""`firedistill suite`: its arguments and its display."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from firedistill.cli.arguments import parse_suite
from firedistill.coerce import built_in_names
from firedistill.suites.plan import SET_BY_SUITE, Plan, PlannedRun, make_plan, merge, refuse_edited_recipes, with_warm_starts
from firedistill.suites.run import Runner, RunState, SuiteFolder, array_part, duration, run_arguments, share, summary
from firedistill.terminal import visible

COLOURS = {"done": "green", "running": "cyan", "failed": "red", "waiting": "yellow", "to do": "dim"}


def suite_command(arguments: Sequence[str], console: Console) -> int:
    """Plan, run, continue or show a suite; returns 1 if a run has failed or was not executed."""
    options, rest = parse_suite(arguments)
    if options.name is None:
        raise ValueError(f"name a suite: one of {', '.join(built_in_names('suites'))}, a YAML file, or the folder of a suite")
    suite, plan, chosen = planned(options, rest)
    if options.status:
        plan = replace(plan, runs=chosen)
        states = suite.states(plan)
        console.print(table(plan.runs, states, plan.title), soft_wrap=True)
        console.print(summary(plan, states))
        return 0
    part = (options.index, options.of) if options.index is not None else array_part(os.environ)
    if part is not None:
        chosen = share(chosen, *part)
        console.print(f"part {part[0]} of {part[1]}: {len(chosen)} runs")
    if options.dry_run:
        states = suite.states(plan) if suite.plan_path.is_file() else {run.id: RunState("to do") for run in plan.runs}
        for run in chosen:
            command = shlex.join(["firedistill", *run_arguments(suite, run, suite.checkpoint(run))])
            console.print(f"{states[run.id].name:8} {command}", soft_wrap=True)
        steps = sum(run.max_steps for run in chosen)
        console.print(
            f"{plan.title}: {len(chosen)} runs, {steps:,} optimizer steps; nothing was run or written", soft_wrap=True
        )
        return 0
    plan = suite.widen(plan)
    console.print(f"{plan.title}\n{len(chosen)} runs in {suite.folder}", soft_wrap=True)
    try:
        states = work(suite, plan, chosen, options, console)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command continues {suite.folder}", soft_wrap=True)
        return 130
    console.print(summary(plan, states))
    if any(states[run.id].name == "running" for run in chosen):
        console.print("other processes are executing the runs that are still running")
    failed, waiting = (
        [run.id for run in chosen if states[run.id].name in names] for names in (["failed"], ["to do", "waiting"])
    )
    if failed:
        console.print(f"failed: {', '.join(failed)}; --retry-failed runs them again, logs are in {suite.folder / 'logs'}")
    if waiting:
        console.print(f"not executed: {', '.join(waiting)}; the same command continues the suite", soft_wrap=True)
    console.print(f"report: firedistill report {shlex.quote(str(suite.folder))} -o report", soft_wrap=True)
    return 1 if failed or waiting else 0


def planned(options: argparse.Namespace, rest: Mapping[str, str]) -> tuple[SuiteFolder, Plan, list[PlannedRun]]:
    """The suite's folder, its plan widened by this call, and the runs that this call is about."""
    for name in (*SET_BY_SUITE, "resume", "overwrite"):
        if name in rest:
            raise ValueError(f"--{name} differs between the runs of a suite; use --only, --seeds, -o")
    # With --output_dir, `lab` is the built-in suite also where a folder of that name lies.
    built_in = options.name in built_in_names("suites") and options.output_dir is not None
    is_folder = not built_in and (Path(options.name) / "plan.json").is_file()
    if is_folder and options.output_dir is not None:
        raise ValueError(f"{options.name} is the folder of a suite, which keeps its place: leave out --output_dir")
    suite = SuiteFolder(options.name if is_folder else options.output_dir or Path("runs") / Path(options.name).stem)
    if is_folder or options.status:
        plan = suite.plan
        if rest:
            raise ValueError(
                f"--{next(iter(rest))} would change the runs of {suite.folder}, which are already planned: leave it out"
            )
        chosen = [
            run
            for run in plan.runs
            if run.command == "train"
            and (not options.seeds or run.seed in options.seeds)
            and (not options.only or run.method in options.only)
        ]
        if not chosen:
            raise ValueError(
                f"{suite.folder} plans no run with these seeds and methods; see firedistill suite {suite.folder} --status"
            )
        chosen = with_warm_starts(chosen, plan.runs)
        if not options.status:
            refuse_edited_recipes([run for run in chosen if suite.state(run).name != "done"], suite.folder)
        return suite, plan, chosen
    suite.refuse_other_content()
    known = suite.plan if suite.plan_path.is_file() else None
    # A continued suite keeps its options for all runs.
    plan = make_plan(options.name, options.seeds, options.only, {**(known.options if known else {}), **rest})
    return suite, (merge(known, plan, suite.folder) if known else plan), plan.runs


def slots(options: argparse.Namespace) -> list[dict[str, str]]:
    """Additional environment variables of each concurrent run."""
    jobs = options.jobs or len(options.gpus or [0])
    if options.gpus:
        return [{"CUDA_VISIBLE_DEVICES": options.gpus[job % len(options.gpus)]} for job in range(jobs)]
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * jobs
    return [{"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}] * jobs  # concurrent runs share the cores


def work(
    suite: SuiteFolder, plan: Plan, runs: Sequence[PlannedRun], options: argparse.Namespace, console: Console
) -> dict[str, RunState]:
    """Execute the runs, with a line per event, and on a terminal with a table that is kept up to date."""

    def on_event(line: str) -> None:
        console.print(visible(line), soft_wrap=True)
        if not console.is_terminal:
            console.print(f"  {summary(plan, suite.states(plan))}", soft_wrap=True)

    def on_poll(states: Mapping[str, RunState]) -> None:
        active = [run for run in runs if states[run.id].name in ("running", "failed")]
        live.update(table(active, states, summary(plan, states)))

    with Live(console=console, refresh_per_second=2, transient=True) as live:
        return Runner(suite, plan, runs, slots(options), options.retry_failed, on_event=on_event, on_poll=on_poll).work()


def table(runs: Sequence[PlannedRun], states: Mapping[str, RunState], title: str) -> Table:
    """One row per run."""
    shown = Table(title=title, title_justify="left")
    for name in ("run", "state", "step", "accuracy", "time", ""):
        shown.add_column(name, justify="left" if name in ("run", "state", "") else "right", overflow="fold")
    for run in runs:
        state = states[run.id]
        accuracy = "" if state.accuracy is None else f"{state.accuracy:.1%}"
        time = duration(state.seconds) if state.seconds else ""
        shown.add_row(
            run.id, state.name, f"{state.step}/{run.max_steps}", accuracy, time, state.note, style=COLOURS[state.name]
        )
    return shown
