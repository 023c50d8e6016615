"""The content of a suite: a YAML file of recipes x methods x seeds x settings, expanded to a list of runs and stored as `plan.json`."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firedistill.coerce import built_in_names, coerce, is_secret, read_yaml
from firedistill.files import write_text
from firedistill.tasks import load_task, names_rows, refuse_unknown
from firedistill.tasks.judge import load_judge
from firedistill.tasks.reading import is_data_file
from firedistill.tasks.table import local_files
from firedistill.terminal import shortened, visible, without_messages

if TYPE_CHECKING:
    from firedistill.config import SelfDistillConfig

BLOCK_KEYS = {"recipes", "methods", "seeds", "settings", "learning_rate_factors", "warmstart", "label", "subset_per_seed"}
SUBSET_OFFSET = 10_000  # the authors' held-out subset of a seed has the seed plus this; reports average such runs
LISTS = ["recipes", "methods", "seeds", "learning_rate_factors"]
MOST_RUNS = 10_000
# Options that the suite sets for every run, and what to use instead.
SET_BY_SUITE = {
    "method": "use methods: [fire]",
    "seed": "use seeds: [0]",
    "output_dir": "use -o FOLDER on the command line",
    "resume_from_checkpoint": "leave it out: the same command continues a suite",
}
# The settings and options that also apply to a shared warm start: where things are and what data mean, not how long to train.
WARMSTART_OPTIONS = {"model", "model_revision", "task", "data_dir", "model_dtype", "use_cpu", "quantization"}
WARMSTART_OPTIONS |= {"columns", "answer", "feedback", "eval_data", "bad_rows", "format_instruction"}

# The settings that name a task, a file, a folder or a model, beside those of one's own data
INPUTS = ("task", "data_dir", "eval_data", "eval_also", "judge", "model", "teacher", "initial_adapter")
MOST_READ = 2**24  # bytes of data whose first rows are read while planning, which takes a fraction of a second

WORDS = {"ema", "student", "initial", "lab", "smollm2"}  # teachers and models, whatever the working folder holds


@dataclass(frozen=True)
class PlannedRun:
    """One run of a suite.

    Attributes:
        id: name of its run directory below `runs/`, of its log and of its state files.
        command: "train" or "warmstart".
        settings: options that override the recipe, as on the command line.
        model, task, method, seed, learning_rate, max_steps: the values that recipe and settings resolve to.
        variant: what distinguishes it besides method and seed, such as "2x" for the learning rate, after the block's label if it
            has one; usually empty.
        needs: id of the warm start whose adapter the run starts from.
        recipe_digest: see `recipe_digest`; empty in plans of earlier versions.

    Raises:
        ValueError: the id cannot be the name of a folder, or a setting is a secret: plans, logs and command lines can be read by all.
    """

    id: str
    command: str
    recipe: str
    settings: dict[str, Any]
    model: str
    task: str
    method: str
    seed: int
    learning_rate: float
    max_steps: int
    variant: str = ""
    needs: str | None = None
    recipe_digest: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^/\\\0]{1,200}", self.id) or self.id.startswith("."):
            raise ValueError(f"a run is named {self.id[:200]!r}, which cannot be the name of a folder")
        if secret := next(filter(is_secret, self.settings), None):
            raise ValueError(f"{secret} must not be part of a suite, whose plan and logs others can read; set HF_TOKEN instead")


@dataclass
class Plan:
    """The runs of a suite in the order in which they start, warm starts first, and the options given for all of them."""

    suite: str
    title: str
    options: dict[str, Any]
    runs: list[PlannedRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs = sorted(self.runs, key=lambda run: run.command != "warmstart")


def with_warm_starts(chosen: Sequence[PlannedRun], runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The chosen runs and the warm starts that they need, in the order of `runs`."""
    wanted = {run.id for run in chosen} | {run.needs for run in chosen}
    return [run for run in runs if run.id in wanted]


def read_suite(name: str) -> tuple[str, dict[str, Any], Path | None]:
    """Name, content and folder (None if built in) of a suite file.

    Raises:
        ValueError: no suite has that name, or the file does not describe one.
    """
    path = Path(name)
    built_in = resources.files("firedistill.suites") / f"{name}.yaml"
    if not path.is_file() and not built_in.is_file():
        raise ValueError(f"no suite {name!r}: neither a file nor one of {', '.join(built_in_names('suites'))}")
    try:
        content = read_yaml(path if path.is_file() else built_in)
    except ValueError as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("blocks"), list) or not content["blocks"]:
        raise ValueError(f"{name} is not a suite: expected a mapping with a list of blocks, each with recipes and methods")
    for number, block in enumerate([content, *content["blocks"]]):
        with errors_in(f"{name}, block {number}" if number else name):
            if not isinstance(block, dict):
                raise ValueError(f"the block is {shortened(repr(block))}; expected a mapping")
            unknown = [key for key in block if key not in BLOCK_KEYS | (set() if number else {"title", "blocks"})]
            if unknown:
                raise ValueError(f"unknown key {shortened(repr(unknown[0]))}; a block may have {', '.join(sorted(BLOCK_KEYS))}")
    return (path.stem if path.is_file() else name), content, (path.resolve().parent if path.is_file() else None)


def make_plan(
    name: str, seeds: Sequence[int] | None = None, only: Sequence[str] | None = None, options: Mapping[str, Any] | None = None
) -> Plan:
    """Expand a suite to its runs and validate the settings of each.

    Args:
        name: a built-in suite or the path of a YAML file.
        seeds: replace those of the file.
        only: restrict the plan to these methods.
        options: settings of every run; they override those of the file.

    Raises:
        ValueError: unknown suite, recipe, method or option, an invalid value, or one that names something that does not exist.
    """
    suite, content, folder = read_suite(name)
    options = {key: absolute(key, value) for key, value in (options or {}).items()}
    shared = {key: value for key, value in content.items() if key in BLOCK_KEYS}
    with errors_in(name):
        settings = settings_of(shared)
    runs: dict[str, PlannedRun] = {}
    methods: list[str] = []
    checked: list[dict[str, Any]] = []
    for number, own in enumerate(content["blocks"], 1):
        with errors_in(f"{name}, block {number}"):
            block = {**shared, **own, "settings": settings | settings_of(own)}
            if (count := math.prod(len(listed(block, key, default=[0])) for key in LISTS)) > MOST_RUNS:
                raise ValueError(f"it stands for {count:,} runs; a suite may have {MOST_RUNS:,}")
            for run, config in runs_of(block, folder, seeds, only, options):
                inputs = {name: getattr(config, name) for name in INPUTS} | config.data_options
                if run.needs is not None:
                    inputs["initial_adapter"] = None  # the suite names that of the warm start
                if inputs not in checked:
                    check_inputs(inputs, config)
                    checked.append(inputs)
                known = runs.setdefault(run.id, run)
                if known != run:
                    both = f"{known.settings} and {run.settings}"
                    raise ValueError(f"two runs are named {run.id}, with settings {both}; give one of the blocks a label")
            methods += map(str, block["methods"])
    if unknown := [method for method in only or [] if method not in methods]:
        raise ValueError(f"--only names {unknown[0]!r}; {name} has {', '.join(dict.fromkeys(methods))}")
    return Plan(suite, str(content.get("title", suite)), options, list(runs.values()))


@contextmanager
def errors_in(place: str) -> Iterator[None]:
    """Name a place in the errors about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def settings_of(block: Mapping[str, Any]) -> dict[str, Any]:
    settings = block.get("settings") or {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"settings are {shortened(repr(settings))}; expected a mapping of options to values")
    if taken := next((key for key in settings if key in SET_BY_SUITE), None):
        raise ValueError(f"settings has {taken}, which a suite sets for each run; {SET_BY_SUITE[taken]}")
    return {name: absolute(name, value) for name, value in settings.items()}


def runs_of(
    block: Mapping[str, Any],
    folder: Path | None,
    seeds: Sequence[int] | None,
    only: Sequence[str] | None,
    options: Mapping[str, Any],
) -> Iterator[tuple[PlannedRun, SelfDistillConfig]]:
    """The runs of one block with their configurations, by recipe, then seed, method and factor: comparisons complete early."""
    factors = listed(block, "learning_rate_factors", default=[1])
    if not all(isinstance(factor, int | float) and 0 < factor < math.inf for factor in factors):
        raise ValueError(f"learning_rate_factors are {factors}; expected numbers above 0")
    methods = [str(m) for m in listed(block, "methods") if only is None or m in only]
    chosen_seeds = listed(block, "seeds", default=[0]) if seeds is None else seeds
    if not all(type(seed) is int for seed in chosen_seeds):
        raise ValueError(f"seeds are {shortened(repr(chosen_seeds))}; expected whole numbers")
    own = block["settings"]
    label = "" if block.get("label") is None else str(block["label"])
    if not isinstance(per_seed := block.get("subset_per_seed", False), bool):
        raise ValueError(f"subset_per_seed is {shortened(repr(per_seed))}; expected true or false")
    for key, option in {"subset_per_seed": "eval_subset_seed", "warmstart": "initial_adapter"}.items():
        if block.get(key) and option in {**own, **options}:
            raise ValueError(f"{key} sets {option}, which is given too: leave one of them out")
    places = dict.fromkeys(own.keys() - options.keys(), "in settings")
    needs = None
    if block.get("warmstart") and methods:
        recipe = recipe_of(str(block["warmstart"]), folder)
        shared = {key: value for key, value in own.items() if key in WARMSTART_OPTIONS and key != "feedback"}
        needs = "-".join(filter(None, ["warmstart", short(recipe), label if shared else ""]))
        shared |= {key: value for key, value in options.items() if key in WARMSTART_OPTIONS}
        yield planned(needs, "warmstart", recipe, shared, places=places)
    for recipe in [recipe_of(str(r), folder) for r in listed(block, "recipes")]:
        for seed, method, factor in product(chosen_seeds, methods, factors):
            settings = {**own, **options, "method": method, "seed": seed}
            if per_seed:
                settings["eval_subset_seed"] = seed + SUBSET_OFFSET
            rate = "" if factor == 1 else f"{factor:g}x"
            if rate:
                # A sweep keeps the nominal rate; where none is set, it is the peak rate of factor 1.
                base = resolved("train", recipe, settings, places)
                settings["learning_rate"] = base.learning_rate * factor
                if base.step_scale is None:
                    settings["nominal_learning_rate"] = base.nominal_learning_rate or base.learning_rate
            named = re.sub(r"[/\\:]+", "-", method).lstrip(".-")  # of ./calm.py:Calm, calm.py-Calm
            parts = [short(recipe), named, label, f"lr{rate}" if rate else "", f"seed{seed}"]
            variant = " ".join(filter(None, [label, rate]))
            yield planned("-".join(filter(None, parts)), "train", recipe, settings, variant, needs, places)


def planned(
    name: str,
    command: str,
    recipe: str,
    settings: dict[str, Any],
    variant: str = "",
    needs: str | None = None,
    places: Mapping[str, str] | None = None,
) -> tuple[PlannedRun, SelfDistillConfig]:
    config = resolved(command, recipe, settings, places)
    values = {key: getattr(config, key) for key in ("model", "task", "method", "seed", "learning_rate", "max_steps")}
    digest = recipe_digest(recipe, config.method)
    return PlannedRun(name, command, recipe, settings, **values, variant=variant, needs=needs, recipe_digest=digest), config


def recipe_digest(recipe: str, method: str) -> str:
    """A hash of what a recipe sets for a method."""
    from firedistill.recipes import read_recipe
    from firedistill.run.identity import digest

    options = read_recipe(recipe)
    of_methods = options.pop("methods", None)
    return digest([of_methods.get(method) if isinstance(of_methods, dict) else of_methods, *sorted(options.items(), key=str)])


def check_inputs(inputs: Mapping[str, Any], config: SelfDistillConfig) -> None:
    """Check that what the settings of a run name exists. Nothing is downloaded or converted, and of data in one's own format only
    the first rows are read.

    Args:
        inputs: the values of `INPUTS`, those of a run that needs a warm start without its initial adapter.
        config: all settings of the run.

    Raises:
        ValueError: there is no such task, file or folder, or it is not what the setting expects.
    """
    tasks = [("task", inputs["task"]), *(("eval_also", name) for name in inputs["eval_also"])]
    for option, name in tasks:
        with errors_in(option) if option == "eval_also" else nullcontext():
            refuse_unknown(name)
    for option, name in [*tasks, ("eval_data", inputs["eval_data"] or "")]:
        value = name.removeprefix("code:")
        file = value.rpartition(":")[0] if ".py:" in value else value if is_data_file(value) and ":" not in value else None
        if file is not None and not Path(file).expanduser().is_file():
            raise ValueError(f"{option}: there is no file {file}; correct the path")
    if (folder := inputs["data_dir"]) is not None and not Path(folder).expanduser().is_dir():
        raise ValueError(f"data_dir: there is no folder {folder}; correct the path")
    judge = load_judge(inputs["judge"], key=False) if inputs["judge"] is not None else None
    check_rows(inputs["task"], config, judged=judge is not None and judge.decides)
    check_models(inputs, config)


def check_rows(task: str, config: SelfDistillConfig, judged: bool) -> None:
    """Read the first rows of one's own data, in local files that are not large, with the columns of the settings.

    Raises:
        ValueError: they cannot be read.
    """
    files = local_files(task) if names_rows(task) else None
    if files is not None and sum(file.stat().st_size for file in files) <= MOST_READ:
        with without_messages("firedistill.tasks.table"):  # the run gives them
            load_task(task, judged=judged, **config.data_options)


def check_models(inputs: Mapping[str, Any], config: SelfDistillConfig) -> None:
    """
    The adapter of a run of a suite, in its folder `runs`, need not exist yet.

    Raises:
        ValueError: there is no such model or adapter.
    """
    from firedistill.models.loading import local_model
    from firedistill.models.lora import read_adapter_settings

    for name in ("model", "teacher", "initial_adapter"):
        value = inputs[name]
        if value is None or (name != "initial_adapter" and value in WORDS):
            continue
        if name != "model" and Path(value).parent.parent.name == "runs":
            continue
        with errors_in(name):
            if name == "initial_adapter" or (name == "teacher" and config.teacher_kind == "adapter"):
                read_adapter_settings(Path(value).expanduser())
            else:
                local_model(value)


def resolved(
    command: str, recipe: str, settings: Mapping[str, Any], places: Mapping[str, str] | None = None
) -> SelfDistillConfig:
    """The configuration of a run, validated as the run itself validates it; `places` as in `build_config`."""
    from firedistill.config import SelfDistillConfig, WarmStartConfig
    from firedistill.recipes import build_config, check_method

    # Planning must work on machines without the accelerator of the runs.
    kind = WarmStartConfig if command == "warmstart" else SelfDistillConfig
    config = build_config(kind, recipe, {"use_cpu": True, **settings, "output_dir": "."}, places)
    check_method(config.method, config.method_settings)
    return config


def listed(block: Mapping[str, Any], key: str, default: list[Any] | None = None) -> list[Any]:
    values = block.get(key, default)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{key} is {shortened(repr(values))}; expected a list, for instance {key}: [{key.rstrip('s')}]")
    return values


def recipe_of(recipe: str, folder: Path | None) -> str:
    """The full path of a recipe file, searched beside the suite file first; any other name is a built-in recipe."""
    path = Path(recipe).expanduser()
    if folder is not None and (folder / path).is_file():
        return str(folder / path)
    if recipe in built_in_names("recipes") and (path / "config.yaml").is_file():
        where = f"the run directory {path.resolve()} has the name of the recipe {recipe}"
        raise ValueError(f"{where}: rename it, or work in another folder")
    return str(path.resolve()) if path.is_file() else recipe


def short(recipe: str) -> str:
    return Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe


def absolute(name: str, value: Any) -> Any:
    """Make folders and files absolute, because a suite may be continued from another working directory."""
    if not isinstance(value, str):
        return value
    if name in {"model", "teacher"} and value in WORDS:
        return value
    before, path, after = "", value, ""
    if name == "task" and value.startswith("code:"):
        before, path = "code:", value.removeprefix("code:")
    elif name == "task" and ".py:" in value:
        path, colon, attribute = value.rpartition(":")
        after = colon + attribute
    elif name in {"task", "eval_data"}:
        path = value if is_data_file(value) or "/" in value else ""
    elif name not in {"data_dir", "model", "initial_adapter", "teacher", "judge"}:
        path = ""
    place = Path(path).expanduser()
    return f"{before}{place.resolve()}{after}" if path and place.exists() else value


# ---- The plan on disk ------------------------------------------------------------------------------------------------------


def read_plan(path: Path) -> Plan:
    """
    Raises:
        ValueError: the file does not hold a plan.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        plan = Plan(**coerced(Plan, content | {"runs": [PlannedRun(**coerced(PlannedRun, run)) for run in content["runs"]]}))
        names = [run.id for run in plan.runs]
        if len(set(names)) < len(names):
            raise ValueError("two runs have the same id")
        if strange := [run for run in plan.runs if run.command not in ("train", "warmstart") or run.max_steps < 1]:
            raise ValueError(f"{strange[0].id} has command {strange[0].command!r} and {strange[0].max_steps} steps")
        if lacking := [run for run in plan.runs if run.needs is not None and run.needs not in names]:
            raise ValueError(f"{lacking[0].id} needs {lacking[0].needs!r}, which is not planned")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the plan of a suite: {error}") from error
    return plan


# What a state file holds about an attempt.
RECORD = {
    "state": str,
    "host": str,
    "pid": int | None,
    "since": float,
    "from_step": int,
    "slot": dict[str, str],
    "seconds": float,
    "steps": int,
    "accuracy": float | None,
    "error": str,
}


def coerced_record(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a state file.

    Raises:
        TypeError, ValueError: it is not a state.
    """
    record = {name: coerce(content[name], kind) for name, kind in RECORD.items() if name in content}
    numbers = [value for value in record.values() if isinstance(value, int | float)]
    if any(abs(value) > 1e15 for value in numbers) or (record.get("pid") or 2) < 2:
        raise ValueError("a number is out of range")
    if record.get("state") == "running" and not {"host", "since", "from_step"} <= record.keys():
        raise ValueError("a run without host and time")
    return record | {name: visible(record[name]) for name in ("host", "error") if name in record}


def coerced(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON object as arguments of a dataclass.

    Raises:
        TypeError: a value is not of its field's type.
    """
    types = typing.get_type_hints(kind)
    return {name: coerce(value, types.get(name, Any)) for name, value in content.items()}


def merge(known: Plan, new: Plan, where: Path) -> Plan:
    """A plan with the runs of both, for a suite that is started with some seeds or methods and widened later.

    Raises:
        ValueError: they are different suites, or the settings of a run differ.
    """
    if known.suite != new.suite:
        raise ValueError(f"{where} holds suite {known.suite!r}, not {new.suite!r}; name another --output_dir")
    runs = {run.id: run for run in known.runs}
    for run in new.runs:
        refuse_other_settings(runs.setdefault(run.id, run), run, where)
    for name in sorted(known.options.keys() & new.options.keys()):
        if (there := known.options[name]) != (now := new.options[name]):
            raise ValueError(
                f"{where} is planned with {name} {there}, now it is {now}: leave it out, or name another --output_dir"
            )
    return Plan(known.suite, new.title, new.options, list(runs.values()))


def refuse_edited_recipes(runs: Sequence[PlannedRun], where: Path) -> None:
    """Raise ValueError if a recipe sets other options than when one of these runs was planned."""
    for run in runs:
        refuse_other_settings(run, replace(run, recipe_digest=recipe_digest(run.recipe, run.method)), where)


def refuse_other_settings(planned: PlannedRun, now: PlannedRun, where: Path) -> None:
    if planned not in (now, replace(now, recipe_digest="")):
        differing = differences(planned, now) or f"its recipe {now.recipe} was edited"
        raise ValueError(
            f"{where} plans {now.id} with other settings ({differing}); restore them, or name another --output_dir"
        )


def differences(a: PlannedRun, b: PlannedRun) -> str:
    left, right = asdict(a) | a.settings, asdict(b) | b.settings
    differing = (name for name in dict.fromkeys([*left, *right]) if left.get(name) != right.get(name))
    names = [name for name in differing if name not in ("settings", "recipe_digest")]
    return ", ".join(f"{name} {left.get(name)} there, {right.get(name)} now" for name in names)


def write_json(path: Path, content: Any) -> None:
    """Write a file that is complete or absent, whatever reads it or kills this process."""
    write_text(path, json.dumps(content, indent=1))
