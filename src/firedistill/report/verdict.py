"""The answer of a report: which group is best, what collapsed, and what cannot be told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from firedistill.report import paired
from firedistill.report.collapse import COLLAPSES
from firedistill.report.groups import Group, Setting, Study, partition
from firedistill.report.intervals import Estimate, estimate
from firedistill.report.paired import Difference, differences_from, different_problems, reference_of


@dataclass(frozen=True)
class Verdict:
    """What the runs of a setting show.

    Attributes:
        candidates: the groups that can be the best: those that are compared, at their common rate; all groups if only one is compared.
        collapsed: groups with runs that collapsed, and for each of them what happened, in words.
        best: the candidate with the highest mean accuracy, of equal ones the reference; None if no run is finished.
        ties: the labels of all candidates with that mean.
        final, sampled: its greedy and its sampled accuracy.
        first: its accuracy before the first step, in percent.
        gain: see `Group.gain`.
        level: candidates whose difference from the best one has an interval that covers 0.
        behind, ahead: the differences of those whose interval lies below or above 0. A candidate can be ahead on the problems and seeds
            that it shares with the best one, if one of them has more.
        unknown: candidates that share too few answers with the best one.
        problems: see `different_problems`.
    """

    setting: Setting
    candidates: list[Group]
    collapsed: list[tuple[Group, str]]
    best: Group | None = None
    ties: list[str] = field(default_factory=list)
    final: Estimate | None = None
    sampled: Estimate | None = None
    first: float | None = None
    gain: float | None = None
    level: list[Difference] = field(default_factory=list)
    behind: list[Difference] = field(default_factory=list)
    ahead: list[Difference] = field(default_factory=list)
    unknown: list[Group] = field(default_factory=list)
    problems: str = ""

    @property
    def sentence(self) -> str:
        """The first line of a report."""
        return f"{self.answer} {self.problems}".rstrip()

    @property
    def nothing(self) -> str:
        """Why there is no best method."""
        return "No finished run was evaluated" if any(group.finished for group in self.candidates) else "No run is finished yet"

    @property
    def answer(self) -> str:
        if self.best is None or self.final is None:
            return f"{self.nothing}, so no method can be called the best."
        verb = "solves" if len(self.ties) == 1 else "each solve"
        solved = f"{listed(self.ties)} {verb} {self.final.mean:.1f} % of the held-out problems after training"
        if len(self.candidates) == 1:
            gain = f", {with_minus(self.gain)} points since step 0" if self.gain is not None else ""
            return f"{solved}{gain}."
        level = [difference.label for difference in self.level if difference.label not in self.ties]
        clauses = []
        if len(level) > 3 and not (self.behind or self.ahead or self.unknown):
            clauses.append("none of the others can be told apart from that")
        elif level:
            clauses.append(f"{listed(level)} cannot be told apart from that")
        if self.ahead:
            verb = "is" if len(self.ahead) == 1 else "are"
            clauses.append(f"{listed([d.label for d in self.ahead])} {verb} ahead on the problems and seeds that both have")
        if self.behind and not (level or self.ahead or self.unknown):
            who = f"{self.behind[0].label} is" if len(self.behind) == 1 else "the others are"
            clauses.append(f"{who} behind{self.behind[0].scope}")
        if self.unknown:
            who = listed([group.label for group in self.unknown])
            clauses.append(f"{who} cannot be compared: no common seed, or too few saved answers to the same problems")
        return "; ".join([f"{solved}, the most of {len(self.candidates)} {self.kind}", *clauses]) + "."

    @property
    def kind(self) -> str:
        return "methods" if len({group.method for group in self.candidates}) == len(self.candidates) else "groups"


def listed(names: Sequence[str], most: int = 3) -> str:
    """`A, B and C`; `A, B and 4 others`."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} others"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def with_minus(points: float) -> str:
    """`+1.5`, `0.0`, or `−1.5` with a minus sign."""
    return paired.signed(points).replace("-", "−")


def verdicts(study: Study) -> list[Verdict]:
    """One for each setting of a study."""
    return [verdict_of(setting, study.notes) for setting in study.settings]


def verdict_of(setting: Setting, notes: list[str]) -> Verdict:
    candidates = setting.compared if len(setting.compared) > 1 else setting.groups
    finals = {id(group): found for group in candidates if (found := estimate(group))}
    candidates = [group for group in candidates if id(group) in finals] or candidates
    highest = max((round(found.mean, 2) for found in finals.values()), default=None)
    first = [group for group in candidates if id(group) in finals and round(finals[id(group)].mean, 2) == highest]
    reference = reference_of(setting)
    best = reference if any(group is reference for group in first) else next(iter(first), None)
    collapsed = [(group, text) for group in setting.groups if (text := collapse_of(group))]
    if best is None:
        return Verdict(setting, candidates, collapsed)
    labels = {group.label for group in candidates}
    compared = [
        d for d in differences_from(setting, best, "greedy", notes) if d.label in labels and d.problems >= paired.ENOUGH
    ]
    known = {best.label, *(difference.label for difference in compared)}
    return Verdict(
        setting,
        candidates,
        collapsed,
        best=best,
        ties=[group.label for group in first],
        final=finals[id(best)],
        sampled=estimate(best, "sampled_accuracy"),
        first=best.initial(),
        gain=best.gain(),
        level=sorted((d for d in compared if not d.told_apart), key=lambda d: -d.mean),
        behind=sorted((d for d in compared if d.told_apart and d.mean < 0), key=lambda d: -d.mean),
        ahead=sorted((d for d in compared if d.told_apart and d.mean > 0), key=lambda d: -d.mean),
        unknown=[group for group in candidates if group.label not in known],
        problems=f"{different_problems(setting, notes)} {different_steps(candidates)}".strip(),
    )


def different_steps(groups: Sequence[Group]) -> str:
    """The numbers of steps of the groups, as a sentence; empty if all were trained equally long."""
    parts = partition(groups, lambda group: group.runs[0].max_steps)
    counts = "; ".join(f"{steps} for {listed([group.label for group in parts[steps]])}" for steps in sorted(parts))
    return f"They were trained for different numbers of steps: {counts}." if len(parts) > 1 else ""


def collapse_of(group: Group) -> str:
    """`sampling drop in 2 of 3 seeds, from step 87`; empty if no run of the group collapsed."""
    events = [(run, event) for run in group.runs for event in run.events if event.rule in COLLAPSES]
    rules = Counter(rule for _, rule in dict.fromkeys((id(run), event.rule) for run, event in events))
    steps = {rule: min(event.step for _, event in events if event.rule == rule) for rule in rules}
    where = "" if len(group.runs) == 1 else " in {} of " + f"{len(group.runs)} seeds"
    return "; ".join(f"{rule}{where.format(count)}, from step {steps[rule]}" for rule, count in rules.items())
