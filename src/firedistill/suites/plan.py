"""What a suite consists of: a YAML file of recipes x methods x seeds x settings, expanded to a list of runs and kept as `plan.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

BLOCK_KEYS = {"recipes", "methods", "seeds", "settings", "learning_rate_factors", "warmstart"}
# Of the options for all runs, those that a shared warm start needs as well: where things are, not how long to train.
WARMSTART_OPTIONS = {"model", "task", "data_dir", "model_dtype", "use_cpu", "quantization"}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a suite.

    Attributes:
        id: name of its folder below `runs/`, of its log, and of its lock.
        command: "train" or "warmstart".
        settings: options on top of the recipe, as on the command line.
        model, task, method, seed, learning_rate, max_steps: what recipe and settings come to.
        variant: what it is besides method and seed, such as "2x" of the learning rate; empty for most.
        needs: id of the warm start whose adapter the run continues from.
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


@dataclass
class Plan:
    """The runs of a suite, in the order in which they are started, and the options that were given for all of them."""

    suite: str
    title: str
    options: dict[str, Any]
    runs: list[PlannedRun] = field(default_factory=list)

    def run(self, name: str) -> PlannedRun:
        return next(run for run in self.runs if run.id == name)

    def with_needed(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """The runs with the warm starts that they need, in the order of the plan."""
        wanted = {run.id for run in runs} | {run.needs for run in runs}
        return [run for run in self.runs if run.id in wanted]


def built_in_suites() -> list[str]:
    folder = resources.files("firedistill.suites")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def read_suite(name: str) -> tuple[str, dict[str, Any], Path | None]:
    """Name, content and folder (None if built in) of a suite file.

    Raises:
        ValueError: there is none of that name, or it is no suite.
    """
    path = Path(name)
    built_in = resources.files("firedistill.suites") / f"{name}.yaml"
    if not path.is_file() and not built_in.is_file():
        raise ValueError(f"no suite {name!r}: neither a file nor one of {', '.join(built_in_suites())}")
    try:
        content = yaml.safe_load((path if path.is_file() else built_in).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("blocks"), list) or not content["blocks"]:
        raise ValueError(f"{name} is no suite: it must hold a mapping with a list of blocks, each with recipes and methods")
    for block in [content, *content["blocks"]]:
        if not isinstance(block, dict):
            raise ValueError(f"{name}: a block is {block!r}; expected a mapping")
        unknown = set(block) - BLOCK_KEYS - ({"title", "blocks"} if block is content else set())
        if unknown:
            raise ValueError(f"{name}: unknown key {sorted(unknown)[0]!r}; a block may have {', '.join(sorted(BLOCK_KEYS))}")
    return (path.stem if path.is_file() else name), content, (path.resolve().parent if path.is_file() else None)


def make_plan(
    name: str, seeds: Sequence[int] | None = None, only: Sequence[str] | None = None, options: Mapping[str, Any] | None = None
) -> Plan:
    """Expand a suite to its runs; every run's settings are checked.

    Args:
        name: a built-in suite or the path of a YAML file.
        seeds: instead of those of the file.
        only: these methods only.
        options: settings of every run, which win over those of the file.

    Raises:
        ValueError: no such suite, recipe, method or option, or values that cannot be meant.
    """
    suite, content, folder = read_suite(name)
    options = {key: absolute(key, value) for key, value in (options or {}).items()}
    plan = Plan(suite, str(content.get("title", suite)), options)
    found: dict[str, PlannedRun] = {}
    methods_of_suite: list[str] = []
    for block in content["blocks"]:
        block = {key: value for key, value in content.items() if key in BLOCK_KEYS} | block
        methods_of_suite += listed(block, "methods", name)
        for run in runs_of(block, name, folder, seeds, only, options):
            known = found.setdefault(run.id, run)
            if known != run:
                raise ValueError(
                    f"{name}: two runs would be called {run.id}, with settings {known.settings} and {run.settings}"
                )
    if unknown := [method for method in only or [] if method not in methods_of_suite]:
        raise ValueError(f"--only names {unknown[0]!r}; {name} has {', '.join(dict.fromkeys(methods_of_suite))}")
    # Warm starts first: a run starts when its own is there.
    plan.runs = sorted(found.values(), key=lambda run: run.command != "warmstart")
    return plan


def runs_of(
    block: dict[str, Any],
    name: str,
    folder: Path | None,
    seeds: Sequence[int] | None,
    only: Sequence[str] | None,
    options: Mapping[str, Any],
) -> Iterator[PlannedRun]:
    """The runs of one block: recipes, then seeds, methods and factors, so that a comparison is whole as early as possible."""
    factors = listed(block, "learning_rate_factors", name) if "learning_rate_factors" in block else [1]
    if not all(isinstance(factor, int | float) and factor > 0 for factor in factors):
        raise ValueError(f"{name}: learning_rate_factors are {factors}; expected numbers above 0")
    methods = [str(m) for m in listed(block, "methods", name) if only is None or m in only]
    chosen_seeds = list(seeds) if seeds is not None else (listed(block, "seeds", name) if "seeds" in block else [0])
    for recipe in (recipe_of(str(r), folder) for r in listed(block, "recipes", name)):
        needs = None
        if block.get("warmstart") and methods:
            warm = recipe_of(str(block["warmstart"]), folder)
            given = {key: value for key, value in options.items() if key in WARMSTART_OPTIONS}
            yield planned("warmstart", warm, given, f"warmstart-{short(warm)}")
            needs = f"warmstart-{short(warm)}"
        for seed in chosen_seeds:
            for method in methods:
                for factor in factors:
                    yield planned_factor(block, recipe, method, seed, factor, options, needs)


def planned_factor(
    block: dict[str, Any], recipe: str, method: str, seed: int, factor: float, options: Mapping[str, Any], needs: str | None
) -> PlannedRun:
    settings = {**(block.get("settings") or {}), **options, "method": method, "seed": seed}
    name = f"{short(recipe)}-{method.replace(':', '-')}"
    if factor == 1:
        return planned("train", recipe, settings, f"{name}-seed{seed}", needs=needs)
    base = resolved("train", recipe, settings)
    settings["learning_rate"] = base.learning_rate * factor
    # The nominal rate stays where it is while the rate is swept; where none is set it is the peak rate, that of factor 1.
    settings["nominal_learning_rate"] = base.nominal_learning_rate or base.learning_rate
    return planned("train", recipe, settings, f"{name}-lr{factor:g}x-seed{seed}", variant=f"{factor:g}x", needs=needs)


def planned(command: str, recipe: str, settings: dict[str, Any], name: str, variant: str = "", needs: str | None = None):
    config = resolved(command, recipe, settings)
    return PlannedRun(
        name,
        command,
        recipe,
        settings,
        config.model,
        config.task,
        config.method,
        config.seed,
        config.learning_rate,
        config.max_steps,
        variant,
        needs,
    )


def resolved(command: str, recipe: str, settings: Mapping[str, Any]):
    """The settings that the run will have, checked as the run itself would check them."""
    from firedistill.config import SelfDistillConfig
    from firedistill.recipes import build_config
    from firedistill.warmstart import WarmStartConfig

    # A plan is made anywhere, also where the device of the runs is not.
    kind = WarmStartConfig if command == "warmstart" else SelfDistillConfig
    return build_config(kind, recipe, {"use_cpu": True, **settings, "output_dir": "."})


def listed(block: Mapping[str, Any], key: str, name: str) -> list[Any]:
    values = block.get(key)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name}: {key} is {values!r}; expected a list, for instance {key}: [{key.rstrip('s')}]")
    return values


def recipe_of(recipe: str, folder: Path | None) -> str:
    """A recipe file beside the suite file by its full path; anything else is the name of a built-in recipe."""
    if folder is not None and (folder / recipe).is_file():
        return str(folder / recipe)
    return str(Path(recipe).resolve()) if Path(recipe).is_file() else recipe


def short(recipe: str) -> str:
    return Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe


def absolute(name: str, value: Any) -> Any:
    """Folders by their full path: a suite may be continued from another folder."""
    if name in {"data_dir", "model", "initial_adapter"} and isinstance(value, str) and Path(value).is_dir():
        return str(Path(value).resolve())
    return value


# ---- The plan on disk ------------------------------------------------------------------------------------------------------


def write_plan(plan: Plan, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(plan))


def read_plan(path: Path) -> Plan:
    """
    Raises:
        ValueError: the file is no plan.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["runs"] = [PlannedRun(**run) for run in content["runs"]]
        return Plan(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no plan of a suite: {error}") from error


def merge(known: Plan, new: Plan, where: Path) -> Plan:
    """A plan with the runs of both; a suite may be started with some seeds or methods and widened later.

    Raises:
        ValueError: they are different suites, or a run would change its settings.
    """
    if known.suite != new.suite:
        raise ValueError(f"{where} holds suite {known.suite!r}, not {new.suite!r}; name another --output_dir")
    runs = {run.id: run for run in known.runs}
    for run in new.runs:
        if runs.setdefault(run.id, run) != run:
            differing = differences(runs[run.id], run)
            raise ValueError(f"{where} plans {run.id} with other settings ({differing}); name another --output_dir")
    ordered = sorted(runs.values(), key=lambda run: run.command != "warmstart")
    return Plan(known.suite, new.title, new.options, ordered)


def differences(a: PlannedRun, b: PlannedRun) -> str:
    left, right = asdict(a) | a.settings, asdict(b) | b.settings
    names = [n for n in dict.fromkeys([*left, *right]) if n != "settings" and left.get(n) != right.get(n)]
    return ", ".join(f"{name} {left.get(name)} there, {right.get(name)} now" for name in names)


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all: a reader, and a kill, never meet half a file."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
    unfinished.replace(path)
