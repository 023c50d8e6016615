"""Runs grouped by what they have in common: the groups, settings and study that a report is about."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from firedistill.config import SelfDistillConfig, effect
from firedistill.report.palette import LINES, METHODS, Line, shades, spare_lines
from firedistill.report.read import Run, read_runs, shown
from firedistill.suites.plan import SUBSET_OFFSET

Item = TypeVar("Item")

TASKS = {
    "gsm8k": "GSM8K",
    "asdiv": "ASDiv",
    "aqua_rat": "AQuA-RAT",
    "arc_challenge": "ARC-Challenge",
    "winogrande": "WinoGrande",
    "wic": "WiC",
    "mmlu_pro": "MMLU-Pro",
}


DEFAULTS = {f.name: f.default for f in fields(SelfDistillConfig) if f.init and f.default is not MISSING}


def makes_a_difference(name: str) -> bool:
    """Whether runs with different values of a setting are different experiments, which are not averaged."""
    return name != "seed" and effect(name) in ("result", "place")


@dataclass
class Group:
    """Runs that differ only in their seed, and in that of their held-out problems if it is the training seed + 10000.

    Attributes:
        factor: the learning rate relative to the comparison's; 1 for the groups that are compared.
        apart: what distinguishes this group from the others of its method, the learning rate excepted.
        line: colours and style of its curves.
    """

    method: str
    runs: list[Run]
    learning_rate: float
    factor: float
    apart: str
    line: Line = Line()

    @property
    def title(self) -> str:
        """The method's name as the paper writes it."""
        return METHODS.get(self.method, self.method)

    @property
    def label(self) -> str:
        """The title with what distinguishes this group from the others of its method."""
        return self.title + (f", {self.factor:g}× rate" if self.factor != 1 else "") + self.suffix

    @property
    def suffix(self) -> str:
        return f" ({self.apart})" if self.apart else ""

    @property
    def order(self) -> tuple[int, str, str]:
        """Sort key: methods that are not in the paper, then the order of the paper's tables."""
        return list(METHODS).index(self.method) if self.method in METHODS else -1, self.method, self.apart

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    def finals(self, key: str = "accuracy") -> list[float]:
        """Percentages after the last step, one per finished run."""
        return [100 * value for run in self.runs if math.isfinite(value := run.final(key))]

    def initial(self) -> float | None:
        """Percentage before the first step, the mean over the finished runs that were evaluated then; None without one."""
        values = [100 * value for run in self.finished if math.isfinite(value := run.initial)]
        return sum(values) / len(values) if values else None

    def gain(self) -> float | None:
        """Percentage points since step 0, the mean over the runs that were evaluated before and after; None without one."""
        gains = [100 * gain for run in self.finished if math.isfinite(gain := run.final("accuracy") - run.initial)]
        return sum(gains) / len(gains) if gains else None


@dataclass
class Setting:
    """A model on a task, with the groups that are compared and those at other learning rates."""

    model: str
    task: str
    groups: list[Group]

    @property
    def title(self) -> str:
        return f"{short_model(self.model)}, {task_title(self.task)}"

    @property
    def compared(self) -> list[Group]:
        return [group for group in self.groups if group.factor == 1]

    def sweep(self, group: Group) -> list[Group]:
        """A group and those that differ from it only in the learning rate, by rate."""
        same = [other for other in self.groups if (other.method, other.apart) == (group.method, group.apart)]
        return sorted(same, key=lambda other: other.learning_rate)


@dataclass
class Study:
    """Everything that a report covers.

    Attributes:
        notes: what a reader must know: runs that are unfinished, not started or excluded.
    """

    title: str
    settings: list[Setting]
    notes: list[str]

    @property
    def groups(self) -> list[tuple[Setting, Group]]:
        return [(setting, group) for setting in self.settings for group in setting.groups]

    @property
    def runs(self) -> list[Run]:
        return [run for _, group in self.groups for run in group.runs]


def short_model(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model


def task_title(task: str) -> str:
    return TASKS.get(task, task)


def read_study(paths: Sequence[str | Path]) -> Study:
    """Read run directories and suites as one study.

    Raises:
        ValueError: a path is neither a run directory nor a suite, or no run has completed a step.
    """
    runs, titles, notes = read_runs(paths)
    by_setting = partition(runs, lambda run: (run.model, run.task))
    settings = [Setting(model, task, grouped(members, notes)) for (model, task), members in by_setting.items()]
    notes += filter(None, map(different_samples, settings))
    title = settings[0].title if len(settings) == 1 else "Runs"
    return Study("; ".join(dict.fromkeys(titles)) or title, settings, notes)


def different_samples(setting: Setting) -> str:
    """A note on the numbers of samples per held-out problem; empty if all finished runs with samples have the same."""
    labels: dict[int, dict[str, None]] = {}
    for group in setting.groups:
        for count in (run.final("eval_samples") for run in group.finished):
            if math.isfinite(count):
                labels.setdefault(int(count), {})[group.label] = None
    if len(labels) < 2:
        return ""
    counts = "; ".join(f"{count} for {', '.join(labels[count])}" for count in sorted(labels))
    return (
        f"{setting.title}: the runs have different numbers of samples per held-out problem ({counts}). Their numbers of different "
        "answers cannot be compared, because these grow with the samples."
    )


def partition(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Items by key, in the order of their first appearance."""
    parts: dict[Any, list[Item]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return parts


def grouped(runs: Sequence[Run], notes: list[str]) -> list[Group]:
    """Group the runs of one setting, in the order of the paper's tables; adds a note for each excluded run."""
    # Rates of different optimizers are not multiples of each other.
    by_optimizer = partition(runs, lambda run: str(run.config.get("optim")))
    references = {optimizer: reference_rate(members) for optimizer, members in by_optimizer.items()}
    groups = []
    for method, members in partition(runs, lambda run: run.method).items():
        for values, part in split_by_settings(members):
            by_seed: dict[int, Run] = {}
            for run in sorted(part, key=lambda run: not run.finished):
                if run.seed in by_seed:
                    notes.append(f"{run.name} is excluded: {by_seed[run.seed].name} has the same settings and the same seed.")
                by_seed.setdefault(run.seed, run)
            rate, reference = part[0].learning_rate, references[str(part[0].config.get("optim"))]
            factor = 1.0 if math.isclose(rate, reference) else rate / reference
            groups.append(Group(method, [by_seed[seed] for seed in sorted(by_seed)], rate, factor, described(values)))
    groups.sort(key=lambda group: (*group.order, group.learning_rate))
    labels = Counter[str]()
    for group in groups:  # long values of different settings may begin alike
        labels[label := group.label] += 1
        group.apart = f"{group.apart} #{labels[label]}".strip() if labels[label] > 1 else group.apart
    assign_lines(groups)
    return groups


_OTHER_RATE = re.compile(r"(?:^| )[\d.e+-]+x$")  # at the end of a variant, after the label of its block


def reference_rate(runs: Sequence[Run]) -> float:
    """The learning rate of the comparison: the suite's main rate, else the one that most methods share, else the first."""
    planned = [run.learning_rate for run in runs if run.variant == ""]
    if not planned:  # all blocks have labels
        planned = [run.learning_rate for run in runs if run.variant is not None and not _OTHER_RATE.search(run.variant)]
    methods = {(run.learning_rate, run.method) for run in runs if not planned or run.learning_rate in planned}
    counts = Counter(rate for rate, _ in methods)
    return max((run.learning_rate for run in runs if run.learning_rate in counts), key=lambda rate: counts[rate])


def split_by_settings(runs: Sequence[Run]) -> list[tuple[dict[str, Any], list[Run]]]:
    """Split the runs of one method wherever their settings differ; each part comes with its values of those settings."""
    settings = [compared_settings(settings_of(run)) for run in runs]
    for run, of_run in zip(runs, settings, strict=True):  # config.yaml does not hold the number of processes
        if len(counts := run.metrics.column("prompts")[1]):
            of_run["prompts_per_step"] = float(counts[-1])
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    differing = [name for name in names if len({repr(of_run.get(name)) for of_run in settings}) > 1]
    parts: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run, of_run in zip(runs, settings, strict=True):
        values = {name: of_run.get(name) for name in differing}
        parts.setdefault(repr(values), (values, []))[1].append(run)
    nominal = [of_run.get("nominal_learning_rate") for of_run in settings]
    if all(rate in (None, of_run.get("learning_rate")) for rate, of_run in zip(nominal, settings, strict=True)):
        for values, _ in parts.values():  # the learning rate says it all
            values.pop("nominal_learning_rate", None)
    return list(parts.values())


def settings_of(run: Run) -> dict[str, Any]:
    """All settings of a run, with the seed of its held-out problems as `seed + 10000` where it follows that of the run."""
    settings = DEFAULTS | run.config
    follows = settings.get("eval_subset_seed") == run.seed + SUBSET_OFFSET
    return settings | ({"eval_subset_seed": f"seed + {SUBSET_OFFSET}"} if follows else {})


def comparable(value: Any) -> Any:
    """The value of a setting, which another one equals if both mean the same: integers as floats, empty values as None."""
    if value in (None, {}, []):
        return None
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e15 else value


def compared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make runs of a method different experiments: integers as floats, empty values left out."""
    settings = {
        name: found for name, value in config.items() if makes_a_difference(name) and (found := comparable(value)) is not None
    }
    if "step_scale" not in settings and "learning_rate" in settings:
        settings.setdefault("nominal_learning_rate", settings["learning_rate"])  # of a sweep, only the other rates have it set
    # How a step is cut into micro-batches changes memory, not the result. On one process, this is its number of prompts.
    sizes = [settings.pop(name, 1) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    return settings | {"prompts_per_step": sizes[0] * sizes[1]}


def described(values: Mapping[str, Any]) -> str:
    """Settings as text. Without the learning rate, which labels give as a multiple."""
    names = [name for name in values if name != "learning_rate"]
    return ", ".join(filter(None, (setting_text(name, values[name]) for name in names)))


def setting_text(name: str, value: Any) -> str:
    """`policy_step_radius 0.0001`; of a mapping its entries, `attribution, projection False`; empty for none."""
    if isinstance(value, Mapping):
        return ", ".join(setting_text(str(key), entry) for key, entry in value.items())
    if value is None:
        return ""
    return f"{name} {value:g}" if isinstance(value, float) else shown(name if value is True else f"{name} {value}")


def assign_lines(groups: Sequence[Group]) -> None:
    """Give the first group of each method the method's line, other groups a spare one; learning rates are shades of it."""
    families = partition(sorted(groups, key=lambda group: group.factor != 1), lambda group: (group.method, group.apart))
    used = {method for method, _ in families}
    own, spare = used & LINES.keys(), itertools.cycle(spare_lines(sorted(used)))
    for (method, _), members in families.items():
        line = LINES[method] if method in own else next(spare)
        own.discard(method)
        of_rate = shades(line, [group.factor for group in members])
        for group in members:
            group.line = of_rate[group.factor]
