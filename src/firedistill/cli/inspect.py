"""`firedistill eval` and `firedistill inspect`: a model, an adapter or a run, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from firedistill.attribution import Inspection, Inspector, save_attribution
from firedistill.cli.arguments import config_class_of, config_of, parse, refuse_unread, wants_help
from firedistill.coerce import built_in_names
from firedistill.config import SelfDistillConfig, default_of
from firedistill.evaluation import answer_examples, evaluate_all
from firedistill.files import read_json
from firedistill.memory import SMALLER_EVALUATIONS, SMALLER_ROLLOUTS, BatchLimit, scoring_limit
from firedistill.models.sharding import lockstep
from firedistill.models.states import unwrap
from firedistill.ops import Head
from firedistill.prompts import PromptEncoder, View, shown_prompt, teacher_messages
from firedistill.recipes import option_groups, read_recipe
from firedistill.rollouts.engine import RolloutEngine
from firedistill.rollouts.load import in_use, load_engines
from firedistill.run.checkpoints import all_checkpoints, newest_checkpoint, read_manifest, step_of
from firedistill.run.console import accuracy_line
from firedistill.run.directory import finished_step
from firedistill.run.identity import part
from firedistill.run.log import json_line, last_row
from firedistill.setup import Setup, load_setup
from firedistill.suites.plan import absolute
from firedistill.tasks import Example, names_rows
from firedistill.tasks.guard import GuardedTask
from firedistill.teacher import Teacher
from firedistill.terminal import quiet_libraries, visible

FILES = ("config.yaml", "adapter_config.json")
"""Files that a run directory or an adapter has."""
SAMPLED = {"temperature", "top_p", "top_k", "score_tokens_per_forward"}
"""Options that sampled responses depend on, and greedy ones do not."""
OF_RUN = {"task", "model", "data_dir", "initial_adapter", "method", "teacher", "teacher_feedback"}
"""Options that define a run."""
OF_THE_ROWS = {"feedback", "eval_data"}
"""Options about one's own data that other rows do not share."""
# The options that a command reads: all of some groups, but for those that only training reads, and more.
OF_BOTH = {"seed", "deterministic", "output_dir", "eval_subset_seed", "use_cpu", "ddp_backend", "ddp_timeout", "tf32"}
OF_TRAINING = {"train_size", "ema_rate", "drop_unfinished_rollouts", "gradient_checkpointing"}
OF_TRAINING |= {"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"}
NOT_OF_EVAL = {"method", "method_settings", "max_feedback_tokens", "rollout_batch_size", "share_prefixes"}
OF_EVAL = {"eval_size", "eval_split", "eval_samples", "eval_also", "eval_batch_size"}


def options_read(command: str) -> set[str]:
    """The options of a run that `eval` or `inspect` reads."""
    groups = ["What to train", "Your own data", "Rollouts", "Model and adapter", *(["Method"] if command == "inspect" else [])]
    known = option_groups(SelfDistillConfig)
    found = {option.name for group in groups for option in known[group]} - OF_TRAINING | OF_BOTH
    return found - NOT_OF_EVAL | OF_EVAL if command == "eval" else found | {"learning_rate"}


def config_for(recipe: str | None, settings: dict[str, Any]) -> SelfDistillConfig:
    """The settings of a run directory (a warm start's too), an adapter, or a recipe.

    Raises:
        ValueError: nothing names a model, or the folder is none of these.
    """
    if recipe is None and not {"model", "initial_adapter"} & settings.keys():
        raise ValueError(
            f"expected a run directory, an adapter, a recipe, or --model; recipes are {', '.join(built_in_names('recipes'))}"
        )
    is_folder = recipe is not None and Path(recipe).is_dir() and recipe not in built_in_names("recipes")
    if recipe is not None and is_folder and not any((Path(recipe) / name).is_file() for name in FILES):
        raise ValueError(f"{recipe} is neither a run directory nor an adapter: it has none of {', '.join(FILES)}")
    if recipe is not None and (Path(recipe) / "adapter_config.json").is_file():
        recipe, settings = of_adapter(recipe, settings)
    if recipe is not None and (Path(recipe) / "config.yaml").is_file() and "initial_adapter" not in settings:
        adapter = Path(recipe) / "adapter"
        if not adapter.is_dir():
            raise ValueError(
                f"{recipe} has no adapter yet: finish it with --resume, or name a checkpoint: {recipe}/checkpoint-N"
            )
        if finished_step(Path(recipe)) is None:
            raise ValueError(
                f"{recipe} has no finished.json: it is training, or was continued and has not ended again. Let it end (--resume), or "
                f"name a checkpoint ({recipe}/checkpoint-N) or the adapter of an earlier end ({adapter})"
            )
        settings = {**settings, "initial_adapter": str(adapter)}
    if recipe is not None and "task" in settings:
        settings = {**about_another_task(settings["task"], read_recipe(recipe).get("task")), **settings}
    quiet_libraries()
    return config_of(config_class_of(recipe), recipe, settings)


def about_another_task(task: str, own: Any) -> dict[str, Any]:
    """The options about the data of a recipe or run, `own`, that another task does not take over, with their defaults: those of columns
    and answers may hold for other rows too."""
    if absolute("task", task) == absolute("task", own):
        return {}
    options = option_groups(SelfDistillConfig)["Your own data"]
    return {option.name: default_of(option) for option in options if option.name in OF_THE_ROWS or not names_rows(task)}


def setup_for(config: SelfDistillConfig, teacher: bool = True) -> Setup:
    """Model, adapter, task and held-out problems."""
    setup = load_setup(config, train=False, teacher=teacher)
    if (Path(config.run_dir) / "config.yaml").is_file():
        cast(GuardedTask, setup.task).begin_run(Path(config.run_dir), config.process_index, train=False)
    return setup


def of_adapter(folder: str, settings: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The run and the settings that the folder of an adapter stands for.

    Raises:
        ValueError: the adapter is not in a run directory, and no task is given, or no base model is known.
    """
    if "initial_adapter" in settings:
        raise ValueError(f"{folder} and --initial_adapter both name an adapter: leave one of them out")
    run, settings = Path(folder).resolve().parent, {**settings, "initial_adapter": folder}
    if (run / "config.yaml").is_file():
        return str(run), settings
    if "task" not in settings:
        raise ValueError(f"{folder} is an adapter outside of a run directory: name the task to evaluate it on, --task NAME")
    stored = read_json(Path(folder) / "adapter_config.json", ValueError)
    base, revision = settings.get("model") or stored.get("base_model_name_or_path"), stored.get("revision")
    if not base:
        raise ValueError(f"{folder} does not name its base model: name it, --model NAME")
    if revision is not None and "model" not in settings and not Path(base).expanduser().exists():
        settings = {"model_revision": str(revision), **settings}
    return None, {**settings, "model": str(base)}


def eval_command(arguments: Sequence[str], console: Console) -> int:
    if wants_help(arguments):
        console.print(
            "firedistill eval RUN|ADAPTER|RECIPE [--task NAME] [--eval_size N] [--json] ...\n\n"
            "Greedy accuracy on held-out problems. RUN is a run directory (its adapter is used), ADAPTER the folder of an\n"
            "adapter or a checkpoint, RECIPE as in train. --json prints one JSON object.\n"
            "--eval_samples N adds sampled accuracy, pass@k, entropy and distinct answers, --eval_also TASK,... further tasks."
        )
        return 0
    options = parse("eval", arguments)
    refuse_unread(options.settings, options_read("eval"))
    config = config_for(options.recipe, options.settings)
    if not config.eval_samples and (unread := [name for name in options.settings if name in SAMPLED]):
        raise ValueError(f"--{unread[0]} has no effect on greedy responses: add --eval_samples N, or leave it out")
    setup = setup_for(config, teacher=False)
    adjustable = lockstep(setup.model) is None
    limit = BatchLimit(setup.args.eval_batch_size, "eval_batch_size", SMALLER_EVALUATIONS, adjustable=adjustable)
    _, engine = load_engines(setup.model, setup.tokenizer, setup.args, {"rollouts": limit, "evaluation": limit})
    if not options.json:
        count = len(setup.eval_examples)
        console.print(
            f"{visible(str(setup.args.model))} on {visible(setup.task.name)}, {count} held-out problems", soft_wrap=True
        )
    with in_use(engine), console.status("evaluating") as status:

        def show(phase: str, done: int, total: int) -> None:
            status.update(f"{phase} {done}/{total}")

        summary = evaluate_all(
            engine, setup.task, setup.encoder, setup.eval_examples, setup.also, setup.args, setup.model, show
        ).summary
    if not summary["n"]:
        raise ValueError("no held-out problem was answered: eval_size is 0, or every prompt is over the budget")
    if options.json:
        console.print(json_line(summary), end="", soft_wrap=True)
        return 0
    console.print(accuracy_line(summary, prefix=""))
    for name, value in summary.items():
        if name.startswith("accuracy_"):
            console.print(f"  {visible(name.removeprefix('accuracy_'))}: {value:.1%}")
        elif name.startswith(("sampled_", "pass_at_", "distinct_")) or (
            name.startswith("also_") and not name.endswith("_stderr")
        ):
            console.print(f"  {visible(name)}: {value:.4g}")
    return 0


def inspect_command(arguments: Sequence[str], console: Console) -> int:
    if wants_help(arguments):
        console.print(
            "firedistill inspect RUN|CHECKPOINT|ADAPTER|RECIPE [--example INDEX (0)] [--split train|eval|NAME (eval)] [--prompts] ...\n"
            "firedistill inspect RUN --save [--count N] [--example INDEX] [--checkpoint STEP] ...\n\n"
            "A sampled response, a table of its tokens, the verdict and the feedback fields; with --prompts also what student and\n"
            "teacher are asked.\n"
            "--save writes N (1) examples from INDEX on to RUN/attribution/, which firedistill report shows.\n"
            "--checkpoint uses student and teacher of that step instead of the last ones."
        )
        return 0
    options = parse("inspect", arguments)
    refuse_unread(options.settings, options_read("inspect"))
    if options.count < 1 or (options.count > 1 and not options.save):
        raise ValueError(f"--count is {options.count}; expected 1 or more, and --save with more than 1")
    if options.save and options.prompts:
        raise ValueError("--prompts has no effect with --save: leave one of them out")
    folder = Path(options.recipe or "")
    if options.save and not (folder / "config.yaml").is_file():
        raise ValueError("--save needs a run directory: firedistill inspect RUN --save")
    if options.save and (other := sorted(OF_RUN & options.settings.keys())):
        raise ValueError(
            f"--{other[0]} has no place beside --save, which stores what the run itself does: leave one of them out"
        )
    checkpoint = None
    if options.checkpoint is not None:
        if "initial_adapter" in options.settings:
            raise ValueError("--checkpoint and --initial_adapter both name an adapter: leave one of them out")
        checkpoint = folder / f"checkpoint-{options.checkpoint}"
        if not (checkpoint / "checkpoint.json").is_file():
            steps = ", ".join(str(step_of(path)) for path in all_checkpoints(folder)) or "none"
            raise ValueError(f"--checkpoint is {options.checkpoint}; {folder} has checkpoints of these steps: {steps}")
        options.settings["initial_adapter"] = str(checkpoint)
    elif (folder / "checkpoint.json").is_file():
        checkpoint = folder  # student and teacher of that step
    places = (folder, folder.resolve().parent) if options.recipe is not None and folder.is_dir() else ()
    run = next((place for place in places if (place / "config.yaml").is_file()), None)  # a recipe's student is in no run
    config = config_for(options.recipe, options.settings)
    split = options.split or config.eval_split
    config.eval_size = 0  # its problems are not needed
    setup = setup_for(config)
    args, task, first = setup.args, setup.task, options.example
    seed = args.seed if split in ("train", task.train_split) else args.eval_subset_seed  # as training and evaluation read them
    examples = task.examples(split, first + options.count, seed, args.data_dir)
    if first >= len(examples):
        raise ValueError(f"--example is {first}, but the {split} split of {task.name} has {len(examples)} problems")
    teacher = setup.teacher(scoring_limit(args.tokens_per_forward))
    if weights := checkpoint or (newest_checkpoint(run) if run is not None else None):
        named, own = options.settings.get("teacher"), part(read_manifest(weights), "settings").get("teacher", "ema")
        if named in ("ema", "student", "initial") and named != own:
            raise ValueError(
                f"--teacher is {named!r}, but {weights} holds the weights of the run's own teacher ({own}): leave --teacher out, or "
                "name an adapter or a model"
            )
        teacher.weights.load(weights)
    elif args.teacher_kind == "initial" and run is not None:
        raise ValueError(
            f"{run} has no checkpoint, and checkpoints hold the weights of teacher initial: train with fewer save_steps"
        )
    inspector = Inspector(args, setup.model, teacher, Head.of(unwrap(setup.model), args.score_temperature), setup.encoder)
    limit = BatchLimit(args.rollout_batch_size, "rollout_batch_size", SMALLER_ROLLOUTS)
    engine, _ = load_engines(setup.model, setup.tokenizer, args, {"rollouts": limit, "evaluation": limit})
    with in_use(engine):
        if not options.save:
            with console.status("sampling a response and scoring it under every teacher view"):
                inspection = inspect_example(setup, engine, inspector, examples[first])
            print_inspection(inspection, teacher, console, setup.encoder if options.prompts else None)
            return 0
        last = last_row(folder / "metrics.jsonl")
        step = step_of(checkpoint) if checkpoint is not None else last["step"] if last else 0
        save_inspections(setup, engine, inspector, examples[first : first + options.count], folder, step, console)
    return 0


def save_inspections(
    setup: Setup,
    engine: RolloutEngine,
    inspector: Inspector,
    examples: Sequence[Example],
    folder: Path,
    step: int,
    console: Console,
) -> None:
    """Write `attribution/step_000010.json` of the run directory; name the examples that are left out.

    Raises:
        ValueError: no response could be inspected.
    """
    records = []
    for example in examples:
        try:
            inspection = inspect_example(setup, engine, inspector, example)
        except ValueError as error:
            console.print(visible(f"left out: {error}"))
            continue
        records.append(inspector.record(inspection))
        console.print(visible(f"{example.uid}: {len(inspection.tokens)} tokens"))
    if not records:
        raise ValueError("no response could be inspected; nothing is written")
    console.print(f"wrote {save_attribution(records, folder, step)}", soft_wrap=True)


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


def print_inspection(inspection: Inspection, teacher: Teacher, console: Console, encoder: PromptEncoder | None = None) -> None:
    """Print the response, its tokens, the verdict and the feedback.

    Args:
        encoder: the student's, to print the prompts of student and teacher as well.

    Text of models and datasets is never markup.
    """
    rollout = inspection.rollout
    verdict = rollout.verdict

    def panel(text: str, title: str) -> None:
        console.print(Panel(Text(visible(text)), title=Text(visible(title)), title_align="left"))

    console.print(Text(visible(f"{rollout.example.uid}: {rollout.example.question}")))
    panel(
        rollout.response.text,
        f"response, {len(rollout.response_ids)} tokens{'' if rollout.response.finished else ', unfinished'}",
    )
    console.print(token_table(inspection, console.width))
    panel(
        f"correct: {verdict.correct}\nsubmitted: {verdict.submitted}\nexpected: {verdict.expected}\n"
        f"well-formed: {verdict.well_formed}\ncorrect by a lenient reading: {verdict.lenient_correct}",
        "verdict",
    )
    for number, field in enumerate(rollout.feedback, start=1):
        panel(field.text, f"feedback field {number}, {field.name}" + (f" of group {field.group}" if field.group else ""))
    if encoder is None:
        console.print("--prompts shows the prompts of student and teacher", style="dim")
        return
    panel(shown_prompt(teacher.task, encoder, rollout.example), f"student prompt, {rollout.example.uid}")
    without = {f"without {name}": view for name, view in inspection.removed.items()}
    views: dict[str, View] = {"full": "full", **without, "without feedback": "none"}
    for title, view in views.items():
        message = teacher_messages(teacher.task, rollout.example, rollout.feedback, view)[-1]["content"]
        panel(message, f"teacher message, {title} ({len(teacher.prompt_ids(rollout, view))} tokens)")


def token_table(inspection: Inspection, width: int) -> Table:
    """Radius, gate, attribution and contraction of every response token; tokens over the radius stand out.

    Args:
        width: columns of the terminal. The fields stand under numbers, and as many columns as fit are shown: the token, its influence
            |g_c| and the attribution come first.
    """
    target, names = inspection.target, list(inspection.removed)
    branch = "correct: beta applies" if inspection.rollout.verdict.correct else "incorrect: chi, alpha, eta apply"
    influence = [f"{float(energy) ** 0.5:.4f}" for energy in target.energy]
    columns = {"|g_c|": influence, "rho": _cells(target.rho, 4)}
    columns |= {f"a{number}": _cells(target.alpha[number], 3) for number in range(1, len(names) + 1)}
    columns |= {"eta": _cells(target.eta, 3), "chi": _cells(target.chi, 3), "beta": _cells(inspection.beta, 3)}
    columns |= {"a0": _cells(target.alpha[0], 3)}
    room = width - 22  # for the token and the frame
    shown = []
    for title, cells in columns.items():
        room -= max(len(title), *map(len, cells)) + 3
        if room < 0:
            break
        shown.append(title)
    legend = "; ".join([*(f"a{number} {name}" for number, name in enumerate(names, start=1)), "a0 full feedback"])
    hidden = [title for title in columns if title not in shown]
    note = f"\nnot shown in {width} columns: {', '.join(hidden)}" if hidden else ""
    table = Table(title=f"per token ({branch})", caption=Text(visible(legend) + note))
    table.add_column("token", overflow="fold", max_width=16)
    for title in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for t, token in enumerate(inspection.tokens):
        style = "bold yellow" if target.chi[t] > 0 else None
        table.add_row(Text(repr(token)[1:-1]), *(columns[title][t] for title in shown), style=style)
    return table


def _cells(values: Tensor, digits: int) -> list[str]:
    return [f"{float(value):.{digits}f}" for value in values]
