"""`firedistill train` and `firedistill warmstart`."""

from __future__ import annotations

import gc
import os
import shlex
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from firedistill.cli.arguments import config_of, parse, wants_help
from firedistill.coerce import built_in_names
from firedistill.config import UNUSED, SelfDistillConfig, default_of
from firedistill.imports import METHODS, TASKS, package, plugins
from firedistill.objectives import objective_class, registered_objectives
from firedistill.recipes import option_groups, read_recipe
from firedistill.run.console import correct_rate_trend, first_and_last
from firedistill.run.directory import RunLock, refuse_other_files, temporary_folder
from firedistill.run.identity import meaning, refuse_another_run
from firedistill.run.log import iterate_jsonl, read_jsonl
from firedistill.setup import read_method_settings
from firedistill.terminal import quiet_libraries, visible
from firedistill.trainer import SelfDistillTrainer
from firedistill.warmstart import WarmStartTrainer


def train_command(arguments: Sequence[str], console: Console) -> int:
    return run_training(SelfDistillTrainer, arguments, console, "train")


def warmstart_command(arguments: Sequence[str], console: Console) -> int:
    return run_training(WarmStartTrainer, arguments, console, "warmstart")


def run_training(trainer_class: type[SelfDistillTrainer], arguments: Sequence[str], console: Console, command: str) -> int:
    """Run `train` or `warmstart` and end the process group; returns the exit status."""
    status = _train(trainer_class, arguments, console, command)
    # After an error, it could wait for processes that have ended. A process whose step was dropped ends alone, and NCCL would wait for
    # the others.
    if dist.is_available() and dist.is_initialized() and (status == 0 or "nccl" not in dist.get_backend_config()):
        end_process_group()
    return status


def end_process_group() -> None:
    """Destroy the process group, and end its threads, which should not outlive the interpreter.

    A thread of Gloo that frees a tensor waits for Python's lock. DDP's reducer would end the threads without releasing that lock;
    the reference here is the last one, and releases it.
    """
    group = dist.group.WORLD
    dist.destroy_process_group()
    for _ in range(2):  # the trainer refers to the group; one collection may not suffice
        gc.collect()
    del group


def _train(trainer_class: type[SelfDistillTrainer], arguments: Sequence[str], console: Console, command: str) -> int:
    if wants_help(arguments):
        print_help(trainer_class.config_class, console, command, everything="--help-all" in arguments)
        return 0
    options = parse(command, arguments)
    allowed = [name.replace("-", "_") for names in options.allow_changes for name in names.split(",") if name]
    if options.resume and options.overwrite:
        raise ValueError("--resume continues a run, --overwrite replaces it; give one of them")
    if (options.resume or options.overwrite) and "resume_from_checkpoint" in options.settings:
        raise ValueError(
            "--resume continues from the newest checkpoint, --overwrite from none, and --resume_from_checkpoint from the one that it "
            "names; give one of them"
        )
    if command == "train" and options.recipe is not None and "feedback_share" in read_recipe(options.recipe):
        raise ValueError(f"{options.recipe} is a warm start: use firedistill warmstart {options.recipe}")
    config = config_of(trainer_class.config_class, options.recipe, options.settings)
    quiet_libraries()
    folder = Path(config.run_dir)
    wanted = True if options.resume else False if options.overwrite else config.resume_from_checkpoint
    if meaning(wanted) not in (None, True) and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0"):
        raise ValueError(
            "torchrun --max_restarts repeats the command after a failure, and --overwrite or --resume_from_checkpoint would remove the "
            "later checkpoints again: leave one of the two out"
        )
    main_process = config.process_index == 0
    refuse_other_files(folder)
    # From before the model is loaded, so that a second command fails at once.
    with (temporary_folder if options.preflight == "only" else RunLock)(folder) if main_process else nullcontext():
        read_method_settings(config)  # a wrong setting is an error of its own, and no other run
        if meaning(wanted) is None:
            # Where `auto` has chosen another engine than vLLM, the run has no `vllm_weights`.
            refuse_another_run(folder, config, ["vllm_weights"] if config.rollouts == "auto" else ())
        console.print(
            f"{config.method} on {config.task} with {config.model}, seed {config.seed}; run directory {folder}", soft_wrap=True
        )
        if options.preflight == "only":
            config.push_to_hub = False  # which would create the repository
        trainer = trainer_class(args=config)
        checkpoint = trainer.checkpoint_to_resume(wanted, allowed)
        if options.preflight != "skip":
            check_before_training(trainer, console, notes=options.preflight == "only")
            if options.preflight == "only":
                return 0
        if trainer.console_report is not None:
            trainer.console_report.console = console
        trainer.train(resume_from_checkpoint=checkpoint or wanted, allow_changes=allowed, preflight=False)
    if trainer.stop.signal is not None and not trainer.ended:
        step = trainer.state.global_step
        resume = f"firedistill {command} {shlex.quote(str(folder))}"
        console.print(f"stopped by {trainer.stop.name} after step {step}; resume with: {resume}", soft_wrap=True)
        return 128 + trainer.stop.signal
    if trainer.is_world_process_zero():
        print_summary(trainer, folder, console)
    return 0


def check_before_training(trainer: SelfDistillTrainer, console: Console, notes: bool) -> None:
    """Print the warnings of the preflight, and its notes on request.

    Raises:
        ValueError: there are errors; names them.
    """
    found = trainer.preflight()
    for finding in found.of("warning", "note") if notes else found.of("warning"):
        console.print(visible(str(finding)), soft_wrap=True)
    if errors := found.of("error"):
        count = f"{len(errors)} problem{'s' * (len(errors) > 1)}"
        texts = "; ".join(f"{finding.subject}: {finding.text} -> {finding.fix}" for finding in errors)
        raise ValueError(f"{count} to fix before training: {texts} (--preflight skip trains nevertheless)")


def print_summary(trainer: SelfDistillTrainer, folder: Path, console: Console) -> None:
    """Accuracy before and after, of the whole run, resumed or not; and where its files are."""
    evaluations = read_jsonl(folder / "evals.jsonl")
    if len(evaluations) > 1:
        console.print(first_and_last(evaluations))
    if trend := correct_rate_trend(iterate_jsonl(folder / "metrics.jsonl")):
        console.print(trend)
    if skipped := trainer.counters["skipped_updates"]:
        console.print(f"skipped {skipped} update{'s' * (skipped > 1)}: nothing to train on, or no finite gradient")
    if cost := trainer.guarded.cost_line(folder):
        console.print(cost)
    for name, path in {"run directory": folder, "adapter": folder / "adapter", "curves": folder / "curves.png"}.items():
        if path.exists():
            console.print(f"{name:13}  {path}", soft_wrap=True)


def print_help(config_class: type[SelfDistillConfig], console: Console, command: str, everything: bool) -> None:
    """The options by group; inherited ones on request."""
    out = [f"firedistill {command} [RECIPE] [--option value ...] [--resume | --overwrite] [--allow_changes NAME ...]"]
    out += ["    [--preflight only | skip]", "", "RECIPE is a YAML file, a run directory, or one of:"]
    names = ", ".join(built_in_names("recipes"))
    out += textwrap.wrap(names, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    out += textwrap.wrap(
        "A run directory with a checkpoint of the same settings is resumed. --resume requires that, --resume_from_checkpoint DIR "
        "names the checkpoint, and --allow_changes names settings that may differ from then on. --overwrite replaces an existing "
        "run. Data, verifier, prompts, tokenizer, disk and memory are checked before the first step: --preflight only does nothing "
        "else, --preflight skip trains without the checks.",
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
    built_in = registered_objectives()
    for name in [*built_in, *(name for name in plugins(METHODS) if name not in built_in)]:
        title = f"  {name}" + ("" if name in built_in else f" ({package(plugins(METHODS)[name][0])})")
        try:
            method = objective_class(name)
        except ValueError as error:  # a package that cannot be loaded
            out += [visible(f"{title}: {error}")]
            continue
        out += [f"{title}: {next((line for line in (method.__doc__ or '').splitlines() if line.strip()), '')}"]
        out += [f"      {f.name} ({f.default}): {f.metadata.get('help', '')}" for f in fields(method)]
    if tasks := plugins(TASKS):
        out += [
            "",
            "Tasks of installed packages: " + ", ".join(f"{name} ({package(found[0])})" for name, found in tasks.items()),
        ]
    inherited = [f.name for f in fields(config_class) if f.init and f.name not in ours]
    out += ["", f"and {len(inherited)} options of transformers.TrainingArguments" + (":" if everything else " (--help-all)")]
    if everything:
        for f in fields(config_class):
            if f.name in inherited and f.name not in UNUSED:
                out += [f"  --{f.name} ({default_of(f)})"]
                out += textwrap.wrap(str(f.metadata.get("help", "")), 100, initial_indent="      ", subsequent_indent="      ")
        out += textwrap.wrap(f"Without effect on these runs, and refused: {', '.join(sorted(UNUSED))}.", 100)
    console.print("\n".join(out))
