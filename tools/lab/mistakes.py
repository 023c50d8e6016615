"""Attempts at word problems by a simulated pupil who makes five kinds of mistakes.

One field of the feedback corrects each kind, so it is known what each field has to teach:

| kind | mistake | field that corrects it |
|---|---|---|
| concept | another operation than the problem requires, or the last step is missing | verifier |
| slip | a result is off by one or ten | verifier |
| copy | a number from the problem is copied wrongly | provenance, which lists the problem's numbers |
| final | the final line holds another number than the last result | parser, which shows that line |
| format | the final line is missing or is prose | format |

Mistakes propagate: later steps use the wrong result.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from firedistill.tasks.arithmetic import Problem

CORRECTED_BY = {"concept": "verifier", "slip": "verifier", "copy": "provenance", "final": "parser", "format": "format"}
ALL_KINDS = frozenset(CORRECTED_BY)

# Probability of each kind in an attempt; nucleus sampling hardly ever keeps a token below 5 %. In the templates of TRAPS the usual
# mistake is more likely than the right working, so that greedy decoding fails there too, but sampling still finds the right one.
RATES = {"concept": 0.12, "slip": 0.02, "copy": 0.08, "final": 0.1, "format": 0.12}
TRAP_RATE = 0.6

# Misleading templates: a word suggests another operation ("how many more", "times as many"), or the number that looks like the
# answer is one step short of it. An operation replaces the one of the last step.
FORGETS_LAST_STEP = "forgets the last step"
TRAPS = {
    "before_giving": "-",
    "how_many_more": "+",
    "how_many_fewer": "+",
    "still_needed": "+",
    "how_many_bought": "+",
    "times_as_many": "+",
    "times_fewer": "*",
    "how_many_affordable": "*",
    "packed": "*",
    "more_than_together": FORGETS_LAST_STEP,
    "fewer_than_together": FORGETS_LAST_STEP,
    "times_as_many_together": FORGETS_LAST_STEP,
    "times_as_many_difference": "+",
    "containers_and_loose": FORGETS_LAST_STEP,
    "gives_twice": FORGETS_LAST_STEP,
    "change_for_several": FORGETS_LAST_STEP,
    "chain_of_comparisons": FORGETS_LAST_STEP,
    "all_three_together": FORGETS_LAST_STEP,
    "containers_given_and_found": FORGETS_LAST_STEP,
    "two_purchases_each": FORGETS_LAST_STEP,
}
CONFUSED_WITH = {"+": "-", "-": "+", "*": "+", "/": "-"}


def attempt(problem: Problem, rng: random.Random, kinds: Collection[str] = ALL_KINDS) -> str:
    """A working with its final line and mistakes of `kinds` only; without kinds, the gold solution."""
    steps = [step.split(" ") for step in problem.working]  # [["28", "-", "17", "=", "11"], ...]
    # Drawn for all kinds in the order of RATES, because the order of a set of strings differs between processes.
    makes = [kind for kind, rate in RATES.items() if (rng.random() < rate) and kind in kinds]
    trapped = problem.template in TRAPS and rng.random() < TRAP_RATE

    if trapped and "concept" in kinds:
        trap = TRAPS[problem.template]
        if trap == FORGETS_LAST_STEP:
            steps = steps[:-1]
        else:
            steps[-1][1] = trap
    elif "concept" in makes:
        if len(steps) > 1 and rng.random() < 0.5:
            steps = steps[:-1]
        else:
            step = rng.choice(steps)
            step[1] = CONFUSED_WITH[step[1]]
    if "copy" in makes:
        _miscopy(steps, rng)
    lines, numbers = _compute(steps, rng, slip_at=rng.randrange(len(steps)) if "slip" in makes else None)

    final = numbers[-1]
    others = [number for number in numbers if number != final]
    if "final" in makes and others:
        final = rng.choice(others)
    if "format" not in makes:
        return "\n".join((*lines, f"#### {final}"))
    return "\n".join(lines) if rng.random() < 0.5 else "\n".join((*lines, f"The answer is {final}."))


def _miscopy(steps: list[list[str]], rng: random.Random) -> None:
    """Replace one number that comes from the problem, rather than from an earlier step, by one near it."""
    results = {step[4] for step in steps}
    places = [(step, place) for step in steps for place in (0, 2) if step[place] not in results]
    if places:
        step, place = rng.choice(places)
        step[place] = str(_near(int(step[place]), rng))


def _compute(steps: list[list[str]], rng: random.Random, slip_at: int | None) -> tuple[list[str], list[int]]:
    """The lines of the working as the pupil computes them, and all numbers in them; the final result is the last number."""
    became: dict[int, int] = {}  # gold result -> the pupil's result
    lines, numbers = [], []
    for index, (left, operation, right, _, gold) in enumerate(steps):
        a, b = became.get(int(left), int(left)), became.get(int(right), int(right))
        if operation == "-" and a < b:
            a, b = b, a
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[operation]
        if index == slip_at:
            result = _near(result, rng)
        became[int(gold)] = result
        lines.append(f"{a} {operation} {b} = {result}")
        numbers += [a, b, result]
    return lines, numbers


def _near(number: int, rng: random.Random) -> int:
    """Another positive number: one or ten off."""
    return rng.choice([n for n in (number - 10, number - 1, number + 1, number + 10) if n > 0])
