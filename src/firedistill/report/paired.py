"""Differences between methods on the same held-out problems, with bootstrap intervals.

Two methods that answer the same problems differ by less than their separate standard errors suggest, because hard problems are hard
for both. The difference is therefore taken problem by problem, for the seeds that both methods have, and the interval is that of a
bootstrap over problems: it says how the difference would vary with other problems of the same kind, for these training seeds. How it
varies from seed to seed is shown by the seeds' own differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from firedistill.report.groups import Group, Setting, Study
from firedistill.report.read import Run, shown
from firedistill.terminal import shortened, visible

RESAMPLES, COVERAGE = 10_000, 0.95
# Resamples at a time, so that their weights do not fill the memory.
BLOCK = 500
# Greedy answers after the last step, and samples where there are some.
KINDS = {"eval": "greedy", "sampled": "sampled"}


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
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """`FIRE, 2x rate and FIRE cannot be told apart (+0.5 points, 95 % interval -0.8 to +1.7).`"""
        interval = f"{self.mean:+.1f} points, {COVERAGE * 100:.0f} % interval {self.low:+.1f} to {self.high:+.1f}"
        if not self.told_apart:
            return f"{self.label} and {self.reference} cannot be told apart ({interval})."
        return f"{self.label} is {'more' if self.mean > 0 else 'less'} accurate than {self.reference} ({interval})."


HEADER = ["Setting", "Answers", "Algorithm", "Compared with", "Difference (points)", "95 % interval", "By seed", "Problems", ""]


def row(difference: Difference) -> list[str]:
    """The cells below HEADER."""
    d = difference
    seeds = ", ".join(f"{value:+.1f}" for value in d.by_seed.values())
    judged = "" if d.told_apart else "cannot be told apart"
    interval = f"{d.low:+.1f} to {d.high:+.1f}"
    return [d.setting, d.kind, d.label, d.reference, f"{d.mean:+.1f}", interval, seeds, str(d.problems), judged]


def paired_differences(study: Study) -> list[Difference]:
    """Every group against the reference of its setting: FIRE at the rate of the comparison, else the first compared group.

    Answers that cannot be read are noted in the study. Groups without a common seed are left out.
    """
    found = []
    for setting in study.settings:
        reference = reference_of(setting)
        for prefix, kind in KINDS.items():
            answers = {id(group): answers_of(group, prefix, study.notes) for group in setting.groups}
            for group in setting.groups:
                if group is not reference:
                    compared = compare(answers[id(group)], answers[id(reference)])
                    if compared is not None:
                        found.append(Difference(setting.title, kind, group.label, reference.label, *compared))
    return found


def reference_of(setting: Setting) -> Group:
    groups = setting.compared or setting.groups
    return next((group for group in groups if group.method == "fire"), groups[0])


def answers_of(group: Group, prefix: str, notes: list[str]) -> dict[int, dict[str, float]]:
    """The share of correct answers to each problem after the last step, by seed and uid; of the finished runs."""
    found = {}
    for run in group.finished:
        if answers := answers_of_run(run, prefix, notes):
            found[run.seed] = answers
    return found


def answers_of_run(run: Run, prefix: str, notes: list[str]) -> dict[str, float]:
    path = run.folder / "rollouts" / f"{prefix}_{run.max_steps:06d}.parquet"
    if not path.is_file():
        return {}
    try:
        table = pq.read_table(path, columns=["uid", "correct"])
        uids, correct = table["uid"].to_pylist(), table["correct"].to_pylist()
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        notes.append(f"{shown(path)} is left out: {shortened(visible(' '.join(str(error).split())), 200)}.")
        return {}
    totals: dict[str, list[int]] = {}
    for uid, right in zip(uids, correct, strict=True):
        if isinstance(uid, str) and isinstance(right, bool):
            totals.setdefault(uid, []).append(right)
    return {uid: sum(values) / len(values) for uid, values in totals.items()}


def compare(
    answers: dict[int, dict[str, float]], reference: dict[int, dict[str, float]]
) -> tuple[float, float, float, dict[int, float], int] | None:
    """Mean difference, the ends of its interval, the differences by seed, and the number of problems; None without common answers."""
    pairs = {
        seed: {uid: 100 * (answers[seed][uid] - reference[seed][uid]) for uid in answers[seed] if uid in reference[seed]}
        for seed in sorted(answers.keys() & reference.keys())
    }
    pairs = {seed: of_seed for seed, of_seed in pairs.items() if of_seed}
    if not pairs:
        return None
    problems = list(dict.fromkeys(uid for of_seed in pairs.values() for uid in of_seed))
    place = {uid: position for position, uid in enumerate(problems)}
    sums, counts = np.zeros(len(problems)), np.zeros(len(problems))
    for of_seed in pairs.values():
        for uid, difference in of_seed.items():
            sums[place[uid]] += difference
            counts[place[uid]] += 1
    low, high = bootstrap_interval(sums, counts)
    by_seed = {seed: float(np.mean(list(of_seed.values()))) for seed, of_seed in pairs.items()}
    return float(sums.sum() / counts.sum()), low, high, by_seed, len(problems)


def bootstrap_interval(
    sums: ndarray, counts: ndarray, resamples: int = RESAMPLES, coverage: float = COVERAGE
) -> tuple[float, float]:
    """Percentile interval of `sum(sums) / sum(counts)` when problems are drawn with replacement; the same for the same values.

    Args:
        sums, counts: `[P]` per problem, over its seeds.
    """
    generator = np.random.default_rng(0)
    problems, estimates = len(sums), []
    for start in range(0, resamples, BLOCK):
        size = min(BLOCK, resamples - start)
        weights = generator.multinomial(problems, np.full(problems, 1 / problems), size=size)
        estimates.append(weights @ sums / (weights @ counts))
    low, high = np.quantile(np.concatenate(estimates), [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def sentences(differences: Iterable[Difference]) -> Sequence[str]:
    return [f"{d.setting}, {d.kind} answers: {d.sentence}" for d in differences]
