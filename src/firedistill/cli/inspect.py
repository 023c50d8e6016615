"""`firedistill eval` and `firedistill inspect`: a model, an adapter or a run, without training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from firedistill.attribution import Inspection, Inspector, save_attribution
from firedistill.cli.arguments import Parser, config_of, from_zero, split_recipe, wants_help
from firedistill.cli.console import accuracy_line
from firedistill.config import SelfDistillConfig
from firedistill.evaluation import answer_examples, evaluate
from firedistill.memory import SHORTER_CONTEXTS, SMALLER_EVALUATIONS, SMALLER_ROLLOUTS, BatchLimit
from firedistill.models.sharding import gather, lockstep
from firedistill.models.states import unwrap
from firedistill.ops import Head
from firedistill.prompts import shown_prompt, teacher_messages
from firedistill.recipes import read_recipe
from firedistill.rollouts.engine import RolloutEngine
from firedistill.rollouts.load import in_use, load_engines
from firedistill.run.checkpoints import newest_checkpoint
from firedistill.run.log import read_jsonl
from firedistill.setup import Setup, load_setup
from firedistill.tasks import Example
from firedistill.teacher import Teacher
from firedistill.terminal import quiet_libraries, visible
from firedistill.warmstart import WarmStartConfig


def setup_for(arguments: Sequence[str], teacher: bool = True) -> Setup:
    """Model, adapter, task and held-out problems of a run directory (a warm start's too) or a recipe; nothing to train on."""
    arguments = list(arguments)
    recipe, rest = split_recipe(arguments)
    given = any(argument.startswith(("--initial_adapter", "--initial-adapter")) for argument in rest)
    if recipe is not None and (Path(recipe) / "config.yaml").is_file() and not given:
        adapter = Path(recipe) / "adapter"
        if not adapter.is_dir():
            raise ValueError(f"{recipe} has no adapter yet: finish it with --resume, or name a checkpoint by --initial_adapter")
        arguments += ["--initial_adapter", str(adapter)]
    quiet_libraries()
    supervised = recipe is not None and read_recipe(recipe).get("method") == "supervised"
    return load_setup(config_of(WarmStartConfig if supervised else SelfDistillConfig, arguments), train=False, teacher=teacher)


def eval_command(arguments: Sequence[str], console: Console) -> int:
    if wants_help(arguments):
        console.print(
            "firedistill eval RUN|RECIPE [--initial_adapter DIR] [--task NAME] [--eval_size N] ...\n\n"
            "Greedy accuracy on held-out problems. RUN is a run directory (its adapter is used), RECIPE as in train."
        )
        return 0
    setup = setup_for(arguments, teacher=False)
    adjustable = lockstep(setup.model) is None
    limit = BatchLimit(setup.args.eval_batch_size, "eval_batch_size", SMALLER_EVALUATIONS, adjustable=adjustable)
    _, engine = load_engines(setup.model, setup.tokenizer, setup.args, {"rollouts": limit, "evaluation": limit})
    with in_use(engine), console.status("evaluating") as status:

        def show(done: int, total: int) -> None:
            status.update(f"evaluation {done}/{total}")

        every = partial(gather, setup.model)
        _, summary = evaluate(engine, setup.task, setup.encoder, setup.eval_examples, setup.args, show, every)
    if not summary["n"]:
        raise ValueError("no held-out problem was answered: eval_size is 0, or every prompt is over the budget")
    console.print(accuracy_line(summary, prefix=""))
    for name, value in summary.items():
        if name.startswith("accuracy_"):
            console.print(f"  {visible(name.removeprefix('accuracy_'))}: {value:.1%}")
    return 0


def inspect_command(arguments: Sequence[str], console: Console) -> int:
    if wants_help(arguments):
        console.print(
            "firedistill inspect RUN|RECIPE [--example INDEX] [--split train|eval] [--task NAME] ...\n"
            "firedistill inspect RUN --save [--count N] [--example INDEX] [--checkpoint STEP] ...\n\n"
            "Student prompt, a sampled response, the verdict, the feedback fields, every teacher view, and a table per token.\n"
            "--save writes N examples from INDEX on to RUN/attribution/, which firedistill report shows.\n"
            "--checkpoint uses student and teacher of that step instead of the last ones."
        )
        return 0
    parser = Parser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--example", type=from_zero, default=0)
    parser.add_argument("--count", type=from_zero, default=1)
    parser.add_argument("--split", default="eval")
    parser.add_argument("--checkpoint")
    options, rest = parser.parse_known_args(list(arguments))
    if options.count < 1 or (options.count > 1 and not options.save):
        raise ValueError(f"--count is {options.count}; expected 1 or more, and --save with more than 1")
    folder = Path(split_recipe(rest)[0] or "")
    if options.save and not (folder / "config.yaml").is_file():
        raise ValueError("--save needs a run directory: firedistill inspect RUN --save")
    checkpoint = None
    if options.checkpoint is not None:
        checkpoint = folder / f"checkpoint-{options.checkpoint}"
        if not (checkpoint / "checkpoint.json").is_file():
            steps = ", ".join(sorted(p.name.partition("-")[2] for p in folder.glob("checkpoint-*"))) or "none"
            raise ValueError(f"--checkpoint is {options.checkpoint}; {folder} has checkpoints of these steps: {steps}")
        rest += ["--initial_adapter", str(checkpoint)]
    setup = setup_for(rest)
    args, task, first = setup.args, setup.task, options.example
    examples = task.examples(options.split, first + options.count, args.eval_subset_seed, args.data_dir)
    if first >= len(examples):
        raise ValueError(f"--example is {first}, but the {options.split} split of {task.name} has {len(examples)} problems")
    teacher = setup.teacher(
        BatchLimit(args.score_tokens_per_forward, "score_tokens_per_forward", SHORTER_CONTEXTS, smallest=64)
    )
    if weights := checkpoint or newest_checkpoint(args.run_dir):
        teacher.weights.load(weights)
    elif args.teacher_kind == "initial" and (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} has no checkpoint, and checkpoints hold the weights of teacher initial: train with fewer save_steps"
        )
    inspector = Inspector.of(args, setup.model, teacher, Head.of(unwrap(setup.model), args.score_temperature))
    limit = BatchLimit(args.rollout_batch_size, "rollout_batch_size", SMALLER_ROLLOUTS)
    engine, _ = load_engines(setup.model, setup.tokenizer, args, {"rollouts": limit, "evaluation": limit})
    if not options.save:
        with in_use(engine), console.status("sampling a response and scoring it under every teacher view"):
            inspection = inspect_example(setup, engine, inspector, examples[first])
        print_inspection(inspection, teacher, console)
        return 0
    records = []
    with in_use(engine):
        for example in examples[first : first + options.count]:
            try:
                inspection = inspect_example(setup, engine, inspector, example)
            except ValueError as error:
                console.print(visible(f"left out: {error}"))
                continue
            records.append(inspector.record(inspection))
            console.print(visible(f"{example.uid}: {len(inspection.tokens)} tokens"))
    metrics = read_jsonl(folder / "metrics.jsonl")
    reached = int(options.checkpoint) if checkpoint is not None else (metrics[-1]["step"] if metrics else 0)
    console.print(f"wrote {save_attribution(records, folder, reached)}", soft_wrap=True)
    return 0


def inspect_example(setup: Setup, engine: RolloutEngine, inspector: Inspector, example: Example) -> Inspection:
    """Sample one response, as in training, and inspect it.

    Raises:
        ValueError: the prompt cannot be built or is over the budget, or `Inspector.inspect` raises it.
    """
    args = setup.args
    rollouts, _ = answer_examples(engine, setup.task, setup.encoder, [example], args.sampling, args.budget, args.seed)
    if not rollouts:
        raise ValueError(f"{example.uid}: the prompt cannot be built, or is over the budget")
    return inspector.inspect(rollouts[0])


def print_inspection(inspection: Inspection, teacher: Teacher, console: Console, views: bool = True) -> None:
    """Print everything about the example, in the order of its stages. Text of models and datasets is never markup."""
    rollout = inspection.rollout
    verdict = rollout.verdict

    def panel(text: str, title: str) -> None:
        console.print(Panel(Text(visible(text)), title=Text(visible(title)), title_align="left"))

    panel(shown_prompt(teacher.task, teacher.encoder, rollout.example), f"student prompt, {rollout.example.uid}")
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
        panel(field.text, f"feedback field {number}, {field.name}" + (f" of group {field.group}" if field.group else ""))
    if views:
        for title, view in {
            "full": "full",
            **{f"without {name}": view for name, view in inspection.removed.items()},
            "without feedback": "none",
        }.items():
            message = teacher_messages(teacher.task, rollout.example, rollout.feedback, view)[0]["content"]
            panel(message, f"teacher message, {title} ({len(teacher.prompt_ids(rollout, view))} tokens)")
    console.print(token_table(inspection))


def token_table(inspection: Inspection) -> Table:
    """Radius, gate, attribution and contraction of every response token; tokens over the radius stand out."""
    target, names = inspection.target, list(inspection.removed)
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
