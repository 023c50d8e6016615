"""Differences between methods on the same held-out problems, with bootstrap intervals.

Two methods that answer the same problems differ by less than their separate standard errors suggest, because hard problems are hard
for both. The difference is therefore taken problem by problem, for the seeds that both methods have, and the interval is that of a
bootstrap that draws problems and seeds, both with replacement. With few seeds it is too narrow. With one seed it draws problems
only, and says nothing about other training runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from firedistill.report.groups import DEFAULTS, Group, Setting, Study
from firedistill.report.read import Run, left_out
from firedistill.run.directory import rollout_file

RESAMPLES, COVERAGE = 10_000, 0.95
# Resamples at a time, so that their weights do not fill the memory.
BLOCK = 500
# Problems that two groups must share for a judgement of their difference.
ENOUGH = 20
# Greedy answers after the last step, and samples where there are some: what their files are called.
KINDS = {"greedy": "eval", "sampled": "sampled"}


@dataclass(frozen=True)
class Difference:
    """The accuracy of one group minus that of another, in percentage points.

    Attributes:
        kind: "greedy" or "sampled".
        by_seed: of every seed that both have.
        low, high: of the 95 % interval.
        problems: number of problems that were compared.
    """

    setting: str
    kind: str
    label: str
    reference: str
    mean: float
    low: float
    high: float
    by_seed: dict[int, float]
    problems: int

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 0 and rests on enough problems."""
        return self.problems >= ENOUGH and (self.low > 0 or self.high < 0)

    @property
    def scope(self) -> str:
        """What the interval does not cover, as an ending of a sentence; empty if there are several seeds."""
        return "" if len(self.by_seed) > 1 else ", for these single runs"

    @property
    def sentence(self) -> str:
        """`FIRE, 2x rate and FIRE cannot be told apart (+0.5 points, 95 % interval -0.8 to +1.7).`"""
        interval = f"{signed(self.mean)} points, {COVERAGE * 100:.0f} % interval {signed(self.low)} to {signed(self.high)}"
        if self.problems < ENOUGH:
            return f"{self.label} and {self.reference} share {self.problems} problems, too few for a judgement ({interval})."
        if not self.told_apart:
            return f"{self.label} and {self.reference} cannot be told apart ({interval}{self.scope})."
        return f"{self.label} is {'more' if self.mean > 0 else 'less'} accurate than {self.reference} ({interval}{self.scope})."


def signed(points: float) -> str:
    """`+1.5`; `0.0` for what rounds to zero."""
    return f"{points:+.1f}" if round(points, 1) else "0.0"


HEADER = ["Setting", "Answers", "Algorithm", "Compared with", "Difference (points)", "95 % interval", "By seed", "Problems", ""]


def row(difference: Difference) -> list[str]:
    """The cells below HEADER."""
    d = difference
    seeds = ", ".join(map(signed, d.by_seed.values()))
    judged = "too few problems" if d.problems < ENOUGH else "" if d.told_apart else "cannot be told apart"
    interval = f"{signed(d.low)} to {signed(d.high)}"
    return [d.setting, d.kind, d.label, d.reference, signed(d.mean), interval, seeds, str(d.problems), judged]


def paired_differences(study: Study) -> list[Difference]:
    """Every group against the reference of its setting: FIRE at the rate of the comparison, else the first compared group.

    Answers that cannot be read are noted in the study. Groups without a common seed are left out.
    """
    return [
        difference
        for setting in study.settings
        for kind in KINDS
        for difference in differences_from(setting, reference_of(setting), kind, study.notes)
    ]


def reference_of(setting: Setting) -> Group:
    groups = setting.compared or setting.groups
    return next((group for group in groups if group.method == "fire"), groups[0])


def differences_from(setting: Setting, reference: Group, kind: str, notes: list[str]) -> list[Difference]:
    """All other groups of a setting against one of them, on answers of a kind of KINDS."""
    theirs = answers_of(reference, kind, notes)
    paired = [(group, pairs(answers_of(group, kind, notes), theirs)) for group in setting.groups if group is not reference]
    paired = [(group, by_seed) for group, by_seed in paired if by_seed]
    intervals = bootstrap_intervals([by_seed for _, by_seed in paired])
    return [
        Difference(
            setting.title,
            kind,
            group.label,
            reference.label,
            fmean(value for of_seed in by_seed.values() for value in of_seed.values()),
            *interval,
            {seed: fmean(of_seed.values()) for seed, of_seed in by_seed.items()},
            len({problem for of_seed in by_seed.values() for problem in of_seed}),
        )
        for (group, by_seed), interval in zip(paired, intervals, strict=True)
    ]


Answers = dict[int, dict[str, float]]


def answers_of(group: Group, kind: str, notes: list[str]) -> Answers:
    """The share of correct answers to each problem after the last step, by seed and problem; of the finished runs."""
    return {run.seed: answers for run in group.finished if (answers := answers_of_run(run, kind, notes))}


def answers_of_run(run: Run, kind: str, notes: list[str]) -> dict[str, float]:
    """Read once per run."""
    if kind not in run.answers:
        run.answers[kind] = read_answers(run.folder / "rollouts" / rollout_file(KINDS[kind], run.max_steps), notes)
    return run.answers[kind]


def read_answers(path: Path, notes: list[str]) -> dict[str, float]:
    if not path.is_file():
        return {}
    try:
        table = pq.read_table(path, columns=["uid", "prompt", "expected", "correct"])
        *texts, correct = (table[name].to_pylist() for name in ("uid", "prompt", "expected", "correct"))
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        notes.append(left_out(path, error))
        return {}
    totals: dict[str, list[int]] = {}
    # Files of different problems may have equal uids.
    for *problem, right in zip(*texts, correct, strict=True):
        if isinstance(problem[0], str) and isinstance(right, bool):
            totals.setdefault("\n".join(map(str, problem)), []).append(right)
    return {problem: sum(values) / len(values) for problem, values in totals.items()}


# What picks the held-out problems of runs on the same task.
PICKED_BY = ("eval_data", "eval_split", "eval_subset_seed")


def different_problems(setting: Setting, notes: list[str]) -> str:
    """How many held-out problems each group was evaluated on, as a sentence; empty if all had the same ones with the same prompts.

    Which problems a run had is known from its saved answers, and without those from its settings and from their number.
    """
    groups = [group for group in setting.groups if any(len(run.evaluations) for run in group.finished)]
    evaluated = [run for group in groups for run in group.finished if len(run.evaluations)]
    saved = all(answers_of_run(run, "greedy", notes) for run in evaluated)
    parts: list[tuple[dict[int, Any], list[Group]]] = []
    for group in groups:
        problems = {run.seed: problems_of(run, saved) for run in group.finished if len(run.evaluations)}
        same = next((members for others, members in parts if same_problems(problems, others)), None)
        parts.append((problems, [group])) if same is None else same.append(group)
    if len(parts) < 2:
        return ""
    counts = [f"{number_of_problems(members)} for {', '.join(group.label for group in members)}" for _, members in parts]
    return f"The runs were evaluated on different held-out problems or prompts: {'; '.join(counts)}."


def notes_on_problems(settings: Iterable[Setting], notes: list[str]) -> list[str]:
    """`different_problems` of every setting where there is something to say."""
    return [f"{setting.title}: {text}" for setting in settings if (text := different_problems(setting, notes))]


def problems_of(run: Run, saved: bool) -> Any:
    """What tells the held-out problems of a run from others."""
    if saved:
        return frozenset(run.answers["greedy"])
    return run.final("n"), [run.config.get(name, DEFAULTS.get(name)) for name in PICKED_BY]


def same_problems(problems: Mapping[int, Any], others: Mapping[int, Any]) -> bool:
    """Whether every common seed has the same ones; without a common seed, whether any two seeds do."""
    common = problems.keys() & others.keys()
    if common:
        return all(problems[seed] == others[seed] for seed in common)
    return any(one == other for one in problems.values() for other in others.values())


def number_of_problems(groups: Iterable[Group]) -> str:
    """`192`, or `190 to 192`."""
    numbers = sorted({int(n) for group in groups for run in group.finished if math.isfinite(n := run.final("n"))})
    return " to ".join(map(str, dict.fromkeys([*numbers[:1], *numbers[-1:]]))) or "an unknown number"


def pairs(answers: Answers, reference: Answers) -> Answers:
    """The differences in percentage points, by seed and problem that both have."""
    found = {
        seed: {
            problem: 100 * (share - reference[seed][problem])
            for problem, share in answers[seed].items()
            if problem in reference[seed]
        }
        for seed in sorted(answers.keys() & reference.keys())
    }
    return {seed: of_seed for seed, of_seed in found.items() if of_seed}


def bootstrap_intervals(several: Sequence[Answers], resamples: int = RESAMPLES) -> list[tuple[float, float]]:
    """Percentile intervals of mean differences when seeds and problems are drawn with replacement; the same for the same values."""
    tables = [table_of(by_seed) for by_seed in several]
    found: dict[int, tuple[float, float]] = {}
    for shape in {sums.shape for sums, _ in tables}:  # which share their draws
        places = [place for place, (sums, _) in enumerate(tables) if sums.shape == shape]
        generator, estimates = np.random.default_rng(0), dict[int, list[ndarray]]()
        for start in range(0, resamples, BLOCK):
            size = min(BLOCK, resamples - start)
            seeds, problems = (generator.multinomial(n, np.full(n, 1 / n), size=size).astype(float) for n in shape)
            for place in places:
                total, count = ((seeds * (problems @ side.T)).sum(1) for side in tables[place])
                drawn = count > 0  # a draw may hold no problem of the drawn seeds
                estimates.setdefault(place, []).append(total[drawn] / count[drawn])
        for place in places:
            low, high = np.quantile(np.concatenate(estimates[place]), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
            found[place] = float(low), float(high)
    return [found[place] for place in range(len(tables))]


def table_of(by_seed: Answers) -> tuple[ndarray, ndarray]:
    """Differences and their number, `[seeds, problems]`; both are 0 where a seed does not have a problem."""
    places = {problem: place for place, problem in enumerate(dict.fromkeys(p for of_seed in by_seed.values() for p in of_seed))}
    sums, counts = np.zeros((2, len(by_seed), len(places)))
    for row, of_seed in enumerate(by_seed.values()):
        columns = [places[problem] for problem in of_seed]
        sums[row, columns], counts[row, columns] = list(of_seed.values()), 1
    return sums, counts


def sentences(differences: Iterable[Difference]) -> Sequence[str]:
    return [f"{d.setting}, {d.kind} answers: {d.sentence}" for d in differences]
