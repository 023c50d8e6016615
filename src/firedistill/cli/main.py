"""The command line: `firedistill COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

import firedistill
from firedistill.cli.arguments import OF_COMMANDS, parse, parse_suite, wants_help
from firedistill.tasks.sources import DataError
from firedistill.terminal import nearest, of_rank, plain_console, unfailing_output, visible

EPILOGUE = """\
examples:
  firedistill warmstart quickstart-warmstart
  firedistill train quickstart --seed 1
  firedistill train gsm8k-qwen2.5-1.5b --data_dir data --max_steps 50
  firedistill train runs/my-run                      resumes the run
  firedistill eval runs/my-run --eval_size 500
  firedistill inspect runs/my-run --example 3
  firedistill inspect runs/my-run --save --count 8
  firedistill data my.jsonl --columns question=prompt
  firedistill suite lab --seeds 0 --only fire,full_context
  firedistill report runs/lab -o report
  firedistill report runs/a runs/b -o curves.png
  firedistill bench --quick
  firedistill bench gpu --budget 500

FIREDISTILL_TRACEBACK=1 in the environment prints the traceback of an error.
"""

# Module and function of each command, and its description.
COMMANDS = {
    "warmstart": (
        "train:warmstart_command",
        "supervised fine-tuning of the adapter on gold solutions, before self-distillation",
    ),
    "train": ("train:train_command", "train with FIRE or another method"),
    "eval": ("inspect:eval_command", "greedy accuracy on held-out problems"),
    "inspect": ("inspect:inspect_command", "one example: prompts, response, feedback, and a per-token table"),
    "data": (
        "data:data_command",
        "your own data without a model: columns, prompts, verdicts, feedback, and invalid rows",
    ),
    "suite": ("suite:suite_command", "many runs: the paper's tables and figures, or your own; can be stopped and resumed"),
    "report": ("report:report_command", "tables, figures and a page of runs and suites, or their curves as a picture"),
    "completion": (
        "completion:completion_command",
        "a script that completes commands, options and methods in bash, zsh or fish",
    ),
    "bench": ("bench:bench_command", "time and memory on this machine, compared with the naive implementation"),
}
# Commands, and options of any command, whose only result is what they print.
PRINTING_COMMANDS = {"eval", "inspect", "data", "completion"}
PRINTING_OPTIONS = {"-h", "--help", "--help-all", "--version", "--status", "--dry-run", "--dry_run"}

LOST = (
    "another process of this run has ended, or has not answered within ddp_timeout; see its message; {again} continues from the last "
    "checkpoint"
)
REPLACING = ("--overwrite", "--resume_from_checkpoint")
"""Options with which a repeated command would remove later checkpoints."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for a user's mistake, reported in one line.

    An output that cannot be written does not change the status, unless the command does nothing but print. A pipe whose reader ends
    early, as in `| head`, never does.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    prints = not PRINTING_COMMANDS.isdisjoint(words[:1]) or not PRINTING_OPTIONS.isdisjoint(words)
    with unfailing_output(report_pipes=not prints) as output:
        status = run(words)
        output.flush()
    lost = output.failure is not None and not isinstance(output.failure, BrokenPipeError)
    return 2 if prints and lost and status == 0 else status


def run(arguments: Sequence[str]) -> int:
    """Run one command and report a user's mistake; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="firedistill",
        description="Feedback-based on-policy self-distillation of language models.",
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"firedistill {firedistill.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, add_help=False)
        command.add_argument("rest", nargs=argparse.REMAINDER)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        hint = nearest(arguments[0], COMMANDS) or f"; known are {', '.join(COMMANDS)}"
        parser.error(f"unknown command {arguments[0]!r}{hint}")
    parsed, unknown = parser.parse_known_args(arguments)
    console = plain_console()
    try:
        rest = unknown + parsed.rest
        # A mistake is reported before the command's module imports torch.
        if parsed.command in OF_COMMANDS and not wants_help(rest):
            parse(parsed.command, rest)
        elif parsed.command == "suite":
            parse_suite(rest)
        return load_command(parsed.command)(rest, console)
    except KeyboardInterrupt:
        hint = ""
        if parsed.command in ("train", "warmstart"):
            hint = f"; {repeated(arguments)} resumes the run from its last checkpoint, if there is one"
        Console(stderr=True, markup=False, highlight=False).print(f"{of_rank()}stopped{hint}", style="yellow", soft_wrap=True)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        # A user's mistake is a ValueError with a message that says so, a file that cannot be used, or a package that is not installed.
        # Other errors keep their traceback.
        lost = is_lost_process(error)
        if os.environ.get("FIREDISTILL_TRACEBACK") or (isinstance(error, RuntimeError) and not lost):
            raise
        text = f"{LOST.format(again=repeated(arguments))} ({str(error)[:300]})" if lost else str(error)
        # One line, but for the kinds of rows that cannot be used.
        lines = text.splitlines() if isinstance(error, DataError) else [text]
        lines[0] = f"{of_rank()}firedistill {parsed.command}: {lines[0]}"
        message = "\n".join(visible(" ".join(line.split())) for line in lines)
        Console(stderr=True, markup=False, emoji=False, highlight=False).print(message, style="red", soft_wrap=True)
        return 2


def repeated(arguments: Sequence[str]) -> str:
    """The command that resumes this one's run, in words."""
    given = {word.partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    left_out = [option for option in REPLACING if option.replace("-", "_") in given]
    return f"the command without {' and '.join(left_out)}" if left_out else "the same command"


def is_lost_process(error: BaseException) -> bool:
    """Whether an error says that another process of the run has ended or does not answer: gloo's are known by their text only."""
    distributed = "DistError" in {kind.__name__ for kind in type(error).__mro__}
    return distributed or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def load_command(name: str) -> Callable[[Sequence[str], Console], int]:
    """The function of a command; its module is imported on first use."""
    # peft imports bitsandbytes where it is installed, which warns of a missing kernel that only repacked weights use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"firedistill.cli.{module}"), function)
