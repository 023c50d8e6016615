"""The command line: `firedistill warmstart | train | eval | inspect | suite | report | bench`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from firedistill.terminal import quiet_libraries, visible

if TYPE_CHECKING:
    from firedistill.config import SelfDistillConfig

EPILOGUE = """\
examples:
  firedistill warmstart quickstart-warmstart
  firedistill train quickstart --seed 1
  firedistill train gsm8k-qwen2.5-1.5b --data_dir data --max_steps 50
  firedistill train runs/my-run                      goes on where it stopped
  firedistill eval runs/my-run --eval_size 500
  firedistill inspect runs/my-run --example 3
  firedistill inspect runs/my-run --save --count 8
  firedistill suite lab --seeds 0 --only fire,full_context
  firedistill report runs/lab -o report
  firedistill report runs/a runs/b -o curves.png
  firedistill bench --quick

FIREDISTILL_TRACEBACK=1 in the environment shows where in the program an error came from.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for a user's mistake, told in one line."""
    parser = argparse.ArgumentParser(
        prog="firedistill",
        description="Feedback-based on-policy self-distillation that stays stable.",
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, add_help=False)
        command.add_argument("rest", nargs=argparse.REMAINDER)
    parsed, unknown = parser.parse_known_args(arguments)
    # Paths, names and texts of others are never markup.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False, highlight=False)
    try:
        return COMMANDS[parsed.command][0](unknown + parsed.rest, console)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            "stopped; with a checkpoint, the same command and --resume go on with the run", style="yellow"
        )
        return 130
    except (ValueError, OSError, ImportError) as error:
        # What a user can get wrong is a ValueError with a message that says so, a file that cannot be used, or a package that is
        # not installed; the rest keeps its traceback.
        if os.environ.get("FIREDISTILL_TRACEBACK"):
            raise

        message = visible(" ".join(f"firedistill {parsed.command}: {error}".split()))
        Console(stderr=True, markup=False, emoji=False, highlight=False).print(message, style="red", soft_wrap=True)
        return 2


def train_command(arguments: Sequence[str], console: Console) -> int:
    from firedistill.config import SelfDistillConfig
    from firedistill.trainer import SelfDistillTrainer

    return run_training(SelfDistillConfig, SelfDistillTrainer, arguments, console, "train")


def warmstart_command(arguments: Sequence[str], console: Console) -> int:
    from firedistill.warmstart import WarmStartConfig, WarmStartTrainer

    return run_training(WarmStartConfig, WarmStartTrainer, arguments, console, "warmstart")


def run_training(config_class: type, trainer_class: type, arguments: Sequence[str], console: Console, command: str) -> int:
    if wants_help(arguments):
        print_help(config_class, console, command, everything="--help-all" in arguments)
        return 0
    arguments = list(arguments)
    allowed = take_list(arguments, "allow_changes")
    checks = take_option(arguments, "preflight", "run")
    if checks not in {"run", "only", "skip"}:
        raise ValueError(f"--preflight is {checks!r}; expected run, only or skip")
    resume, overwrite = ("--resume" in arguments), ("--overwrite" in arguments)
    if resume and overwrite:
        raise ValueError("--resume goes on with a run, --overwrite replaces it; give one of them")
    config = config_of(config_class, [a for a in arguments if a not in {"--resume", "--overwrite"}])
    quiet_libraries()
    folder = Path(config.run_dir)
    if (folder / "plan.json").is_file():
        raise ValueError(f"{folder} holds a suite, of which a run would become a part; name another --output_dir")
    wanted = True if resume else False if overwrite else config.resume_from_checkpoint
    if wanted is None:
        refuse_another_run(folder, config)

    from firedistill.cli.console import ConsoleReport, before_and_after, correct_rate_trend
    from firedistill.report.curves import plot_runs
    from firedistill.run.log import read_jsonl

    console.print(
        f"{config.method} on {config.task} with {config.model}, seed {config.seed}; run directory {folder}", soft_wrap=True
    )
    trainer = trainer_class(args=config)
    checkpoint = trainer.checkpoint_to_resume(wanted, allowed)
    if checks != "skip":
        check_before_training(trainer, console, notes=checks == "only")
        if checks == "only":
            return 0
    if (
        overwrite and (folder / "metrics.jsonl").exists() and trainer.is_world_process_zero()
    ):  # the new settings have proved usable
        if any(folder.resolve() in (place, *place.parents) for place in (Path.cwd(), Path.home())):
            raise ValueError(f"{folder} holds more than a run; it is not removed: name a folder of its own by --output_dir")
        shutil.rmtree(folder)
        folder.mkdir()
    report = ConsoleReport(trainer, console)
    trainer.add_callback(report)
    try:
        trainer.train(resume_from_checkpoint=checkpoint or False, allow_changes=allowed)
    finally:
        report.stop()
    if trainer.stop.signal is not None and trainer.state.global_step < config.max_steps:
        console.print(
            f"stopped by {trainer.stop.name} after step {trainer.state.global_step}; go on with: firedistill {command} {folder}",
            soft_wrap=True,
        )
        return 128 + trainer.stop.signal
    evaluations = read_jsonl(folder / "evals.jsonl")  # of the whole run, resumed or not
    if len(evaluations) > 1:
        console.print(before_and_after(evaluations))
    if trend := correct_rate_trend(read_jsonl(folder / "metrics.jsonl")):
        console.print(trend)
    picture = plot_runs([folder], folder / "curves.png")
    skipped = trainer.counters["skipped_updates"]
    if skipped:
        console.print(f"{skipped} of {config.max_steps} steps had nothing to train on or no finite gradient and were skipped")
    console.print(f"run directory  {folder}\nadapter        {folder / 'adapter'}\ncurves         {picture}", soft_wrap=True)
    return 0


def eval_command(arguments: Sequence[str], console: Console) -> int:
    """Evaluate a model, an adapter or a run on the held-out problems of its task."""
    if wants_help(arguments):
        console.print(
            "firedistill eval RUN|RECIPE [--initial_adapter DIR] [--task NAME] [--eval_size N] ...\n\n"
            "Greedy accuracy on held-out problems. RUN is a run directory (its adapter is used), RECIPE as in train."
        )
        return 0
    from firedistill.cli.console import accuracy_line

    trainer = trainer_for(arguments)
    trainer.run_log = None  # an evaluation on its own is no part of the run
    with console.status("evaluating") as status:

        def show(phase: str, done: int, total: int) -> None:
            status.update(f"{phase} {done}/{total}")

        trainer.on_progress = show
        metrics = trainer.evaluate()
    if not metrics["eval_n"]:
        raise ValueError("no held-out problem was answered: eval_size is 0, or every prompt is over the budget")
    console.print(accuracy_line(metrics))
    for name, value in metrics.items():
        if name.startswith("eval_accuracy_"):
            console.print(f"  {visible(name.removeprefix('eval_accuracy_'))}: {value:.1%}")
    return 0


def inspect_command(arguments: Sequence[str], console: Console) -> int:
    """Show one example with everything that FIRE computes about it, or save several for the report."""
    if wants_help(arguments):
        console.print(
            "firedistill inspect RUN|RECIPE [--example INDEX] [--split train|eval] [--task NAME] ...\n"
            "firedistill inspect RUN --save [--count N] [--example INDEX] [--checkpoint STEP] ...\n\n"
            "Student prompt, a sampled response, the verdict, the feedback fields, every teacher view, and a table per token.\n"
            "With --save, the same of N examples from INDEX on goes to RUN/attribution/, where firedistill report finds it.\n"
            "--checkpoint takes student and teacher of that step instead of the last ones."
        )
        return 0
    from firedistill.attribution import save_attribution
    from firedistill.cli.inspect import print_inspection
    from firedistill.evaluation import answer_examples
    from firedistill.run.checkpoints import newest_checkpoint
    from firedistill.run.log import read_jsonl

    arguments = list(arguments)
    save = "--save" in arguments
    arguments = [argument for argument in arguments if argument != "--save"]
    index = take_number(arguments, "example", 0)
    count = take_number(arguments, "count", 1)
    if count < 1 or (count > 1 and not save):
        raise ValueError(f"--count is {count}; expected 1 or more, and --save with more than 1")
    split = take_option(arguments, "split", "eval")
    folder = Path(arguments[0]) if arguments else Path()
    if save and not (folder / "config.yaml").is_file():
        raise ValueError("--save needs a run directory: firedistill inspect RUN --save")
    checkpoint = None
    if (step := take_option(arguments, "checkpoint", "")) != "":
        checkpoint = folder / f"checkpoint-{step}"
        if not (checkpoint / "teacher.safetensors").is_file():
            there = ", ".join(sorted(p.name.partition("-")[2] for p in folder.glob("checkpoint-*"))) or "none"
            raise ValueError(f"--checkpoint is {step}; {folder} has checkpoints of these steps: {there}")
        arguments += ["--initial_adapter", str(checkpoint)]
    trainer = trainer_for(arguments)
    args, task, inspector = trainer.args, trainer.task, trainer.inspector()
    examples = task.examples(split, index + count, args.eval_subset_seed, args.data_dir)
    if index >= len(examples):
        raise ValueError(f"--example is {index}, but the {split} split of {task.name} has {len(examples)} problems")
    if checkpoint is not None:
        trainer.teacher.weights.load(str(checkpoint))
    elif (newest := newest_checkpoint(args.run_dir)) is not None:
        trainer.teacher.weights.load(newest)
    records = []
    for example in examples[index : index + count]:
        try:
            rollouts, _ = answer_examples(
                trainer.rollout_engine, task, trainer.encoder, [example], args.sampling, args.budget, args.seed
            )
            if not rollouts:
                raise ValueError(f"{example.uid}: the prompt is over the budget")
            inspection = inspector.inspect(rollouts[0])
        except ValueError as error:
            if not save:
                raise
            console.print(visible(f"left out: {error}"))
            continue
        if not save:
            print_inspection(inspection, trainer.teacher, console)
            return 0
        records.append(inspector.record(inspection))
        console.print(visible(f"{example.uid}: {len(inspection.tokens)} tokens"))
    metrics = read_jsonl(folder / "metrics.jsonl")
    reached = int(step) if checkpoint is not None else (metrics[-1]["step"] if metrics else 0)
    console.print(f"wrote {save_attribution(records, folder, reached)}", soft_wrap=True)
    return 0


def suite_command(arguments: Sequence[str], console: Console) -> int:
    """Run the paper's tables and figures, or a list of runs of one's own."""
    from firedistill.cli.suite import suite_command

    return suite_command(arguments, console)


def report_command(arguments: Sequence[str], console: Console) -> int:
    """Tables, figures and a page of runs and suites, or their curves as one picture."""
    parser = argparse.ArgumentParser(
        prog="firedistill report", description="Report on runs and suites; on those that are still going, too."
    )
    parser.add_argument("runs", nargs="+", help="run directories and folders of suites")
    parser.add_argument(
        "-o", "--output", default="report", help="folder for page, tables and figures (report); or a picture: .png, .svg, .pdf"
    )
    options = parser.parse_args(list(arguments))
    output = Path(options.output)
    if output.suffix and not output.is_dir() and not options.output.endswith(("/", os.sep)):
        from firedistill.report.curves import plot_runs

        console.print(f"wrote {plot_runs(options.runs, output)}", soft_wrap=True)
        return 0
    from firedistill.report.build import write_report

    study, written = write_report(options.runs, output)
    for note in study.notes:
        console.print(visible(note), soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
    return 0


def bench_command(arguments: Sequence[str], console: Console) -> int:
    """Measure what the package costs on this machine."""
    from firedistill.cli.bench import bench_command

    return bench_command(arguments, console)


COMMANDS = {
    "warmstart": (
        warmstart_command,
        "supervised fine-tuning of the adapter on gold solutions, so that there is something to distil",
    ),
    "train": (train_command, "train with FIRE or another method"),
    "eval": (eval_command, "greedy accuracy on held-out problems"),
    "inspect": (inspect_command, "one example: prompts, response, feedback, and a per-token table"),
    "suite": (suite_command, "many runs: the paper's tables and figures, or your own; can be stopped and continued"),
    "report": (report_command, "tables, figures and a page of runs and suites, or their curves as a picture"),
    "bench": (bench_command, "what the package costs on this machine: times and memory"),
}


def check_before_training(trainer, console: Console, notes: bool) -> None:
    """Print what the preflight finds, notes only if asked for.

    Raises:
        ValueError: there are errors.
    """
    from firedistill.cli.preflight import preflight

    findings = preflight(trainer)
    if trainer.is_world_process_zero():
        for finding in findings:
            if notes or finding.level != "note":
                console.print(visible(str(finding)), soft_wrap=True)
    if errors := [finding for finding in findings if finding.level == "error"]:
        raise ValueError(
            f"{len(errors)} thing{'s' * (len(errors) > 1)} to mend before training: {'; '.join(e.text for e in errors)} "
            "(--preflight skip trains nevertheless)"
        )


def refuse_another_run(folder: Path, config: SelfDistillConfig) -> None:
    """A run without checkpoint is started again if it has the same settings.

    Raises:
        ValueError: the folder holds another run, and nothing says what is to become of it.
    """
    from firedistill.run.checkpoints import all_checkpoints
    from firedistill.run.identity import defaults_of, differences, stored_settings, to_plain

    if all_checkpoints(folder) or not (folder / "metrics.jsonl").exists():
        return
    earlier = stored_settings(folder)
    changed = differences({"settings": earlier or {}}, {"settings": to_plain(config.resolved())}, defaults_of(config))
    if earlier is None or changed:
        raise ValueError(
            f"{folder} holds a run already, with other settings and no checkpoint ({'; '.join(map(str, changed))}): --overwrite "
            "replaces it, or name another --output_dir"
        )


def config_of(config_class: type[SelfDistillConfig], arguments: Sequence[str]) -> SelfDistillConfig:
    """`[RECIPE] [--option value ...]` to settings."""
    from firedistill.recipes import build_config, parse_overrides

    arguments = list(arguments)
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("--") else None
    overrides = parse_overrides(arguments)
    if recipe is not None and (Path(recipe) / "config.yaml").is_file():
        overrides.setdefault("output_dir", recipe)  # a run that was moved is where it is, not where it was
    return build_config(config_class, recipe, overrides)


def trainer_for(arguments: Sequence[str]):
    """A trainer that will not train: the model, adapter and task of a run directory (a warm start's too) or recipe."""
    from firedistill.config import SelfDistillConfig
    from firedistill.recipes import read_recipe
    from firedistill.trainer import SelfDistillTrainer
    from firedistill.warmstart import WarmStartConfig

    arguments = list(arguments)
    recipe = arguments[0] if arguments and not arguments[0].startswith("--") else None
    given = any(a.startswith(("--initial_adapter", "--initial-adapter")) for a in arguments)
    if recipe is not None and (Path(recipe) / "config.yaml").is_file() and not given:
        adapter = Path(recipe) / "adapter"
        if not adapter.is_dir():
            raise ValueError(f"{recipe} has no adapter yet: finish it with --resume, or name a checkpoint by --initial_adapter")
        arguments += ["--initial_adapter", str(adapter)]
    quiet_libraries()
    supervised = recipe is not None and read_recipe(recipe).get("method") == "supervised"
    return SelfDistillTrainer(args=config_of(WarmStartConfig if supervised else SelfDistillConfig, arguments))


def take_option(arguments: list[str], name: str, default: str) -> str:
    """Remove `--name value` or `--name=value` from the arguments; the value, or the default."""
    for position, argument in enumerate(arguments):
        if argument.startswith(f"--{name}="):
            return arguments.pop(position).partition("=")[2]
    if f"--{name}" not in arguments:
        return default
    position = arguments.index(f"--{name}")
    if position + 1 == len(arguments):
        raise ValueError(f"--{name} needs a value")
    value = arguments[position + 1]
    del arguments[position : position + 2]
    return value


def take_list(arguments: list[str], name: str) -> list[str]:
    """Remove `--name a b c` (or `--name a,b`) from the arguments; the values."""
    spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
    start = next((i for i, argument in enumerate(arguments) if argument.partition("=")[0] in spellings), None)
    if start is None:
        return []
    end = next((i for i in range(start + 1, len(arguments)) if arguments[i].startswith("--")), len(arguments))
    values = [arguments[start].partition("=")[2], *arguments[start + 1 : end]]
    del arguments[start:end]
    found = [value.replace("-", "_") for text in values for value in text.split(",") if value]
    if not found:
        raise ValueError(f"--{name} needs the names of options, for instance --{name} learning_rate max_steps")
    return found


def take_number(arguments: list[str], name: str, default: int) -> int:
    number = take_option(arguments, name, str(default))
    if not number.isdecimal():
        raise ValueError(f"--{name} is {number!r}; expected a whole number from 0 on")
    return int(number)


def wants_help(arguments: Sequence[str]) -> bool:
    return any(a in {"-h", "--help", "--help-all"} for a in arguments)


def print_help(config_class: type, console: Console, command: str, everything: bool) -> None:
    """Our options by group; the inherited ones only on request."""
    from dataclasses import fields

    from firedistill.objectives import registered_objectives
    from firedistill.recipes import built_in_recipes, default_of, option_groups

    out = [f"firedistill {command} [RECIPE] [--option value ...] [--resume | --overwrite] [--allow_changes NAME ...]"]
    out += ["    [--preflight only | skip]", ""]
    out += ["RECIPE is a YAML file, a run directory, or one of:"]
    names = ", ".join(built_in_recipes())
    out += textwrap.wrap(names, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    out += textwrap.wrap(
        "A run directory that holds a checkpoint of the same settings is continued; --resume insists on that, "
        "--resume_from_checkpoint DIR names the checkpoint, --allow_changes names the settings that may differ from then on. "
        "--overwrite replaces a run that is there. Data, verifier, prompts, tokenizer, disk and memory are looked at before the "
        "first step: --preflight only does nothing else, --preflight skip leaves it out.",
        100,
    )
    ours: set[str] = set()
    for group, options in option_groups(config_class).items():
        out += ["", f"{group}:"]
        for option in options:
            ours.add(option.name)
            out += [f"  --{option.name} ({default_of(option)})"]
            out += textwrap.wrap(option.metadata["help"], 100, initial_indent="      ", subsequent_indent="      ")
    out += ["", "Methods, with the settings that --method_settings.NAME VALUE changes:"]
    for name, method in registered_objectives().items():
        summary = next((line for line in (method.__doc__ or "").splitlines() if line.strip()), "")
        out += [f"  {name}: {summary}"]
        out += [f"      {f.name} ({f.default}): {f.metadata.get('help', '')}" for f in fields(method)]
    inherited = [f for f in fields(config_class) if f.init and f.name not in ours]
    out += ["", f"and {len(inherited)} options of transformers.TrainingArguments" + (":" if everything else " (--help-all)")]
    if everything:
        out += textwrap.wrap(", ".join(f.name for f in inherited), 100, initial_indent="  ", subsequent_indent="  ")
    console.print("\n".join(out))
