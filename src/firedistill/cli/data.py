"""`firedistill data`: what a task asks, what counts as right, what the teacher sees, and which rows are wrong; without a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from firedistill.checks import check_examples, check_feedback, check_golds
from firedistill.cli.arguments import config_class_of, config_of, parse, refuse_unread, wants_help
from firedistill.coerce import built_in_names
from firedistill.config import SelfDistillConfig
from firedistill.prompts import student_messages, teacher_messages
from firedistill.recipes import option_groups
from firedistill.setup import Setup, held_out
from firedistill.tasks import DataError, Example, TableTask, Task, load_task
from firedistill.tasks.answers.numbers import count_normalized
from firedistill.tasks.cells import Template
from firedistill.tasks.judge import Opinion, load_judge
from firedistill.tasks.judged import JudgedTask, guarded_task
from firedistill.terminal import quiet_libraries, shortened, visible, without_messages

HELP = """\
firedistill data FILE|FOLDER|TASK|RUN|RECIPE [--rows N] [--json] [--columns ROLE=COLUMN ...] [--answer KIND] [--feedback NAME=TEXT ...]

Prints the columns with their roles, the splits, and for the first N rows (default 3) what the student is asked, which responses
count as right, and what the teacher sees about a wrong one. Every row is read. The exit status is 2 if anything is wrong. All
options of firedistill train that name data have the same meaning here, and the others are refused. No model is loaded.
--judge FILE asks a judge about these rows, and shows what it was asked and what it replied.
"""


READ = {"task", "data_dir", "task_timeout", "judge", "train_size", "attribution_groups"}
READ |= {"eval_size", "eval_subset_seed", "eval_split", "seed", "use_cpu"}
"""The options of a run that the command reads, beside those of your own data."""
NOT_USABLE = "not usable"


@dataclass
class Shown:
    """One row.

    Attributes:
        cell: what stands in the answer column.
        student: the messages of the student's prompt.
        judged: responses and their verdicts, the first of which states the gold answer.
        wrong: the response that the feedback is about.
        teacher: the content of the teacher's message about it.
        asked: the messages to the judge about it; none without a judge.
        reply: what the judge replied, as JSON, or why its reply cannot be used.
    """

    uid: str
    answer: str
    cell: str | None
    student: list[dict[str, str]]
    judged: list[dict[str, Any]]
    wrong: str
    feedback: dict[str, str]
    teacher: str
    asked: list[dict[str, str]] = field(default_factory=list)
    reply: str = ""


@dataclass
class DataReport:
    """What the command shows; `--json` prints it as it is."""

    task: str
    columns: list[str] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    guessed: list[str] = field(default_factory=list)
    answer: str = ""
    splits: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
    rows: list[Shown] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def data_command(arguments: Sequence[str], console: Console) -> int:
    if wants_help(arguments):
        console.print(HELP)
        return 0
    options = parse("data", arguments)
    recipe, settings = options.recipe, options.settings
    refuse_unread(settings, READ | {option.name for option in option_groups(SelfDistillConfig)["Your own data"]})
    if recipe is not None and not is_recipe(recipe):
        if "task" in settings:
            raise ValueError(f"{recipe} and --task {settings['task']} both name data: leave one of them out")
        recipe, settings = None, {"task": recipe, **settings}
    elif recipe is None and "task" not in settings:
        raise ValueError("name the data: firedistill data my.jsonl")
    quiet_libraries()
    with without_messages("firedistill.tasks.table"):  # the report says it
        report = inspect_data(config_of(config_class_of(recipe), recipe, settings), options.rows)
    if options.json:
        console.print(json.dumps(asdict(report), ensure_ascii=True, indent=1), soft_wrap=True)
    else:
        for line in lines_of(report):
            console.print(visible(line), soft_wrap=True)
    return 2 if report.problems else 0


def is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or (Path(name) / "config.yaml").is_file() or name in built_in_names("recipes")


def inspect_data(config: SelfDistillConfig, count: int) -> DataReport:
    """Read the data of a configuration.

    Args:
        count: rows to show.
    """
    judge = load_judge(config.judge) if config.judge is not None else None
    task = load_task(config.task, judged=judge is not None and judge.decides, **config.data_options)
    report = DataReport(config.task)
    if isinstance(task, TableTask):
        describe_table(task, report)
        if report.problems and task.bad_rows == "refuse":
            task.bad_rows = "skip"  # show what the other rows give
    guarded = guarded_task(task, config.task_timeout, judge)
    try:
        train = guarded.examples("train", config.train_size, config.seed, config.data_dir)
        evaluation = held_out(guarded, config, config.eval_split)
    except DataError as error:
        if not report.problems:
            raise
        report.notes.append(str(error).split("\n")[0])
        return report
    report.splits = {"train": len(train), f"{config.eval_split} (the first {config.eval_size})": len(evaluation)}
    if config.eval_size and not evaluation:
        report.notes.append("held-out data: there is none, so a run evaluates nothing; name some by --eval_data")
    report.answer = f"{guarded.answer_type}, {guarded.checker_mode}"
    # All that the checks of data read.
    setup = cast(Setup, SimpleNamespace(args=config, task=guarded, train_examples=train, eval_examples=evaluation))
    for finding in (found for check in (check_examples, check_golds, check_feedback) for found in check(setup)):
        (report.notes if finding.level == "note" else report.problems).append(str(finding).removeprefix("note: "))
    first = sorted(train, key=place) if isinstance(task, TableTask) else train
    report.rows = [shown(guarded, example) for example in first[:count]]
    report.problems += [
        f"{row.uid}: the judge's reply is {row.reply}" for row in report.rows if row.reply.startswith(NOT_USABLE)
    ]
    return report


def place(example: Example) -> tuple[int, str]:
    number = example.uid.rpartition("/")[2]
    return (int(number) if number.isdecimal() else 0, example.uid)


def describe_table(task: TableTask, report: DataReport) -> None:
    """Columns, guesses, and the rows that cannot be used."""
    scans = [task.scan(split, refuse=False) for split in dict.fromkeys((task.train_split, task.eval_split))]
    report.columns, report.guessed = task.known_columns, task.guesses
    for role, spec in task.roles.items():
        report.roles[role] = (
            task.columns[role] if isinstance(spec, Template) else ", ".join(spec) if isinstance(spec, list) else spec
        )
    for scan in scans:
        report.left_out += sum(problem.count for problem in scan.problems.values())
        report.problems += [f"{scan.rows.source}: {problem}" for problem in scan.problems.values()]
        if scan.repeated is not None:
            report.notes.append(f"{scan.rows.source}: {scan.repeated}")
    if task.bad_rows == "skip":
        report.notes, report.problems = [*report.notes, *(f"left out: {text}" for text in report.problems)], []


def shown(task: Task, example: Example) -> Shown:
    """One row as student, verifier and teacher see it."""
    inner = getattr(task, "task", task)  # without its guard
    right, *others = near_misses(task, example)
    if isinstance(task, JudgedTask) and task.judge_file.decides:
        others = [text for text in others if text][-1:]  # every verdict is a request
    judged = []
    for response in (right, *others):
        verdict = task.verify(example, response)
        result = "failed" if verdict.failed else "right" if verdict.correct else "wrong"
        if result == "wrong" and verdict.lenient_correct:
            result = "wrong (right answer, wrong form)"
        judged.append({"response": response, "verdict": result, "read": verdict.submitted})
    wrong = next((item["response"] for item in judged[::-1] if item["verdict"] == "wrong" and item["response"]), "")
    feedback = task.feedback(example, wrong, task.verify(example, wrong))
    opinion = task.ask(example, wrong).result() if isinstance(task, JudgedTask) else None
    return Shown(
        example.uid,
        str(example.answer),
        inner.answer_cell(example) if isinstance(inner, TableTask) else None,
        student_messages(task, example),
        judged,
        wrong,
        {item.name: item.text for item in feedback},
        teacher_messages(task, example, feedback)[-1]["content"],
        *(() if opinion is None else (opinion.messages, reply_of(opinion))),
    )


def reply_of(opinion: Opinion) -> str:
    return json.dumps(opinion.values, ensure_ascii=False) if opinion.values is not None else f"{NOT_USABLE}: {opinion.problem}"


def near_misses(task: Task, example: Example) -> list[str]:
    """Responses that state the gold answer as the task demands and in other ways, another answer, and none."""
    gold = str(example.answer)
    if task.answer_type == "program":
        name = example.metadata.get("entry_point", "")
        does_nothing = f"```python\ndef {name}(*arguments):\n    pass\n```" if name.isidentifier() else "```python\npass\n```"
        return [*([example.solution] if example.solution else []), does_nothing, ""]
    if not gold:
        return [example.solution or "I do not know.", ""]
    line = (example.solution or "").rpartition("\n")[2] or gold
    stated = line if task.final_marker and line.startswith(task.final_marker) else f"{task.final_marker} {gold}".strip()
    other, (before, found, after) = another(example), stated.rpartition(gold)
    emphasized, wrong = (f"{before}{text}{after}" if found else stated for text in (f"**{gold}**", other))
    responses = [stated, f"The answer is {gold}.", emphasized, f"{stated} or {other}", wrong, ""]
    return list(dict.fromkeys(responses))


def another(example: Example) -> str:
    """An answer other than the gold one."""
    gold = str(example.answer)
    if example.labels:
        return next(label for label in example.labels if label != gold)
    if re.fullmatch(r"-?\d{1,1000}", gold):
        return str(int(gold) + 1)
    if count_normalized(gold):
        return re.sub("^-?", r"\g<0>1", gold)  # 5.7 -> 15.7
    return f"{gold} not" if gold else "something"


def lines_of(report: DataReport) -> Iterator[str]:
    """The report as text."""
    yield f"task: {report.task}"
    if report.columns:
        yield f"columns: {', '.join(report.columns)}"
        yield "used as: " + ", ".join(f"{role} = {column}" for role, column in report.roles.items())
    if report.guessed:
        yield f"guessed: {'; '.join(report.guessed)}"
    yield f"answers: {report.answer}"
    yield "problems to train on: " + ", ".join(f"{name} {count:,}" for name, count in report.splits.items())
    for row in report.rows:
        yield f"\n{row.uid}"
        read = f"   (the column has {shortened(row.cell, 100)!r})" if row.cell not in (None, row.answer) else ""
        yield f"  gold answer: {row.answer or '(none)'}{read}"
        for message in row.student:
            yield f"  {message['role']}: " + message["content"].replace("\n", "\n    ")
        for item in row.judged:
            text = shortened(item["response"], 100).replace("\n", "\\n") or "(empty)"
            yield f"  {item['verdict']:>33}:  {text}" + (f"   -> read as {shortened(item['read'], 60)}" if item["read"] else "")
        yield f"  feedback about {shortened(row.wrong, 60) or '(empty)'!r}:"
        for name, text in row.feedback.items():
            yield f"    {name}: {text}"
        if row.asked:
            yield f"  the judge replies: {row.reply}"
    if report.rows:
        for message in report.rows[0].asked:
            yield f"\nthe judge is asked about the first row, {message['role']}:\n    " + message["content"].replace(
                "\n", "\n    "
            )
        yield "\nteacher's message about the first row:\n    " + report.rows[0].teacher.replace("\n", "\n    ")
    yield ""
    for note in report.notes:
        yield f"note: {note}"
    for problem in report.problems:
        yield problem if problem.startswith(("error:", "warning:")) else f"error: {problem}"
    if not report.problems:
        yield "nothing is wrong with the rows"
