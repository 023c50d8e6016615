"""Small functions over lists, generated with their tests. No data, no network.

A problem is a chain of operations: some that keep a part of the list or change its items, then one that reduces it. Each operation has
three forms, in words for the prompt, as an expression for the solution, and as a function that computes what the tests expect.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

from firedistill.tasks.code import CodeTask, call_test, code_example
from firedistill.tasks.generated import GeneratedTask, split_of
from firedistill.tasks.types import Example

# The equally likely numbers of operations, before the one that reduces, of a level.
LEVELS: dict[str, tuple[int, ...]] = {"easy": (1,), "medium": (2,), "hard": (3,), "mixed": (1, 2, 3)}
MOST_DRAWS = 3000  # in a row without a new problem: the level has no more
ENTRY_POINT = "solve"


class Functions(GeneratedTask, CodeTask):
    """Functions over a list of numbers or words, with six tests each.

    Levels: `"easy"` has one operation before the result, `"medium"` two, `"hard"` three, and `"mixed"`, the default, any of these. As
    task names: `functions`, `functions:easy`, `functions:medium`, `functions:hard`.

    `"easy"` has about 1,400 problems per split.
    """

    name = "functions"
    levels = LEVELS
    default_size = {"train": 2000, "eval": 400}

    def stream(self, split: str, seed: int) -> Iterator[Problem]:
        rng = random.Random(f"{self.level}/{split}/{seed}")
        seen: set[str] = set()
        last = 0
        for draw in count():
            if draw - last > MOST_DRAWS:
                return
            problem = draw_problem(rng, rng.choice(LEVELS[self.level]))
            if problem is not None and problem.description not in seen and split_of(problem.description) == split:
                seen.add(problem.description)
                last = draw
                yield problem


@dataclass(frozen=True)
class Operation:
    """One operation on a list `xs`.

    Attributes:
        words: for the prompt; `{k}` stands for a number or letter that is drawn.
        code: an expression of `xs` for the solution, with `{k}`.
        run: computes the same from the list and k.
        draw: the numbers or letters that k may be; empty if there is none.
    """

    words: str
    code: str
    run: Callable[[Any, Any], Any]
    draw: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A description, a solution, and the tests: lists with what the function returns for them."""

    description: str
    solution: str
    cases: tuple[tuple[list[Any], Any], ...]

    def as_example(self, uid: str) -> Example:
        (given, result), *tests = self.cases
        question = f"{self.description}\n\nFor example, `{ENTRY_POINT}({given!r})` returns `{result!r}`."
        cases = [call_test(ENTRY_POINT, [xs], expected) for xs, expected in tests]
        return code_example(uid, question, ENTRY_POINT, cases, solution=self.solution)


def draw_problem(rng: random.Random, length: int) -> Problem | None:
    """One problem of either split; None if its tests tell too little, or if it asks for letters of words that have digits by then."""
    kind = rng.choice(list(CHAINS))
    steps, ends, draw_list = CHAINS[kind]
    chain = [(operation, _draw(operation, rng)) for operation in (*rng.sample(steps, length), rng.choice(ends))]
    phrases = [operation.words.format(k=k) for operation, k in chain[:-1]]
    opening = phrases[0][0].upper() + phrases[0][1:] if length == 1 else f"First, {phrases[0]}"
    end, end_k = chain[-1]
    description = " ".join(
        [f"Write a Python function `{ENTRY_POINT}(xs)`, where `xs` is a list of {kind}.", f"{opening}."]
        + [f"Then {phrase}." for phrase in phrases[1:]]
        + [f"Return {end.words.format(k=repr(end_k))}."]
    )
    lines = [f"    xs = {operation.code.format(k=repr(k))}" for operation, k in chain[:-1]]
    imports = ["from math import prod", ""] if end.run is prod_of else []
    solution = "\n".join([*imports, f"def {ENTRY_POINT}(xs):", *lines, f"    return {end.code.format(k=repr(end_k))}"])
    cases = []
    for size in (6, 0, 1, 5, 7, 8, 9):
        xs = draw_list(rng, size)
        value: Any = list(xs)
        for operation, k in chain:
            value = operation.run(value, k)
        cases.append((xs, value))
    distinct = {repr(value) for _, value in cases}
    _, appends_digits, later = " ".join(operation.words for operation, _ in chain).partition("as decimal digits")
    unclear = appends_digits and "letter" in later
    return Problem(description, solution, tuple(cases)) if len(distinct) >= 4 and not unclear else None


def _draw(operation: Operation, rng: random.Random) -> Any:
    return rng.choice(operation.draw) if operation.draw else None


def _numbers(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(-12, 30) if rng.random() < 0.8 else rng.randint(-3, 3) for _ in range(size)]


def _words(rng: random.Random, size: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(size)]


def _digit_sum(x: int) -> int:
    return sum(map(int, str(abs(x))))


def _most_frequent(xs: list[Any], k: Any) -> Any:
    return min(xs, key=lambda x: (-xs.count(x), x), default=k)


def _changes(xs: list[Any], k: Any) -> list[Any]:
    return [x for i, x in enumerate(xs) if i == 0 or x != xs[i - 1]]


def prod_of(xs: list[int], k: Any) -> int:
    return prod(xs)


def _running_sums(xs: list[int], k: Any) -> list[int]:
    return [sum(xs[: i + 1]) for i in range(len(xs))]


# fmt: off
WORDS = [
    "apple", "banana", "cherry", "date", "elder", "fig", "grape", "hazel", "iris", "juniper", "kiwi",
    "lemon", "mango", "nut", "olive", "pear", "plum", "quince", "rose", "sage", "tea",
]
# fmt: on

# Operations on lists of anything.
ANY = [
    Operation(
        "keep only the items at even positions, where the first position is 1",
        "xs[1::2]",
        lambda xs, k: xs[1::2],
    ),
    Operation(
        "keep only the items at positions divisible by {k}, where the first position is 1",
        "[x for i, x in enumerate(xs, start=1) if i % {k} == 0]",
        lambda xs, k: [x for i, x in enumerate(xs, start=1) if i % k == 0],
        (2, 3),
    ),
    Operation("reverse the list", "xs[::-1]", lambda xs, k: xs[::-1]),
    Operation("remove the first {k} items", "xs[{k}:]", lambda xs, k: xs[k:], (1, 2)),
    Operation("remove the last {k} items", "xs[:-{k}]", lambda xs, k: xs[:-k], (1, 2)),
    Operation(
        "remove every item that equals the item right before it",
        "[x for i, x in enumerate(xs) if i == 0 or x != xs[i - 1]]",
        _changes,
    ),
    Operation(
        "remove every item that occurs more than once",
        "[x for x in xs if xs.count(x) == 1]",
        lambda xs, k: [x for x in xs if xs.count(x) == 1],
    ),
    Operation("move the first {k} items to the end", "xs[{k}:] + xs[:{k}]", lambda xs, k: xs[k:] + xs[:k], (1, 2)),
]
NUMBERS = [
    Operation(
        "keep only the numbers that are divisible by {k}",
        "[x for x in xs if x % {k} == 0]",
        lambda xs, k: [x for x in xs if x % k == 0],
        tuple(range(2, 10)),
    ),
    Operation(
        "keep only the numbers greater than {k}",
        "[x for x in xs if x > {k}]",
        lambda xs, k: [x for x in xs if x > k],
        tuple(range(-6, 16)),
    ),
    Operation(
        "keep only the numbers that are at most {k}",
        "[x for x in xs if x <= {k}]",
        lambda xs, k: [x for x in xs if x <= k],
        tuple(range(-2, 20)),
    ),
    Operation(
        "keep only the numbers whose last decimal digit is at least {k}",
        "[x for x in xs if abs(x) % 10 >= {k}]",
        lambda xs, k: [x for x in xs if abs(x) % 10 >= k],
        tuple(range(2, 8)),
    ),
    Operation("square each number", "[x * x for x in xs]", lambda xs, k: [x * x for x in xs]),
    Operation("add {k} to each number", "[x + {k} for x in xs]", lambda xs, k: [x + k for x in xs], tuple(range(2, 12))),
    Operation("multiply each number by {k}", "[x * {k} for x in xs]", lambda xs, k: [x * k for x in xs], tuple(range(2, 8))),
    Operation(
        "replace each number by its distance to {k}",
        "[abs(x - {k}) for x in xs]",
        lambda xs, k: [abs(x - k) for x in xs],
        tuple(range(2, 13)),
    ),
    Operation(
        "multiply each number by its position, where the first position is 1",
        "[i * x for i, x in enumerate(xs, start=1)]",
        lambda xs, k: [i * x for i, x in enumerate(xs, start=1)],
    ),
    Operation(
        "replace each number by the sum of its decimal digits, without its sign",
        "[sum(map(int, str(abs(x)))) for x in xs]",
        lambda xs, k: [_digit_sum(x) for x in xs],
    ),
    Operation(
        "replace each number by the sum of all numbers up to and including it",
        "[sum(xs[:i]) for i in range(1, len(xs) + 1)]",
        _running_sums,
    ),
    Operation(
        "replace every negative number by {k}",
        "[{k} if x < 0 else x for x in xs]",
        lambda xs, k: [k if x < 0 else x for x in xs],
        tuple(range(8)),
    ),
]
NUMBER_ENDS = [
    Operation("the sum of the numbers", "sum(xs)", lambda xs, k: sum(xs)),
    Operation("the list", "xs", lambda xs, k: xs),
    Operation(
        "the largest number, or {k} if the list is empty",
        "max(xs, default={k})",
        lambda xs, k: max(xs, default=k),
        (0, -1, 1, 99),
    ),
    Operation(
        "the difference between the largest and the smallest number, or {k} if the list is empty",
        "max(xs) - min(xs) if xs else {k}",
        lambda xs, k: max(xs) - min(xs) if xs else k,
        (0, -1, 1, 99),
    ),
    Operation(
        "the remainder of the sum of the numbers by {k}", "sum(xs) % {k}", lambda xs, k: sum(xs) % k, tuple(range(5, 13))
    ),
    Operation(
        "the second largest of the different numbers, or {k} if there are fewer than two",
        "sorted(set(xs))[-2] if len(set(xs)) > 1 else {k}",
        lambda xs, k: sorted(set(xs))[-2] if len(set(xs)) > 1 else k,
        (0, -1, 1, 99),
    ),
    Operation(
        "the different numbers in descending order",
        "sorted(set(xs), reverse=True)",
        lambda xs, k: sorted(set(xs), reverse=True),
    ),
    Operation(
        "the sum of the numbers at odd positions minus the sum of those at even positions, where the first position is 1",
        "sum(xs[::2]) - sum(xs[1::2])",
        lambda xs, k: sum(xs[::2]) - sum(xs[1::2]),
    ),
    Operation("the product of the numbers, which is 1 for an empty list", "prod(xs)", prod_of),
]
TEXTS = [
    Operation(
        "keep only the words with more than {k} letters",
        "[x for x in xs if len(x) > {k}]",
        lambda xs, k: [x for x in xs if len(x) > k],
        (3, 4),
    ),
    Operation(
        "keep only the words with at most {k} letters",
        "[x for x in xs if len(x) <= {k}]",
        lambda xs, k: [x for x in xs if len(x) <= k],
        (4, 5),
    ),
    Operation(
        "keep only the words that contain the letter {k}",
        "[x for x in xs if {k} in x]",
        lambda xs, k: [x for x in xs if k in x],
        ("a", "e", "i", "l", "r", "n"),
    ),
    Operation("reverse each word", "[x[::-1] for x in xs]", lambda xs, k: [x[::-1] for x in xs]),
    Operation(
        "remove the letter {k} from each word",
        "[x.replace({k}, '') for x in xs]",
        lambda xs, k: [x.replace(k, "") for x in xs],
        ("a", "e", "i", "l", "r", "n"),
    ),
    Operation(
        "write the last letter of each word as a capital letter",
        "[x[:-1] + x[-1:].upper() for x in xs]",
        lambda xs, k: [x[:-1] + x[-1:].upper() for x in xs],
    ),
    Operation(
        "append to each word its number of letters, as decimal digits",
        "[x + str(len(x)) for x in xs]",
        lambda xs, k: [x + str(len(x)) for x in xs],
    ),
]
TEXT_ENDS = [
    Operation("the words joined by {k}", "{k}.join(xs)", lambda xs, k: k.join(xs), ("-", ", ", "/", "+", " and ")),
    Operation("the list of the words' lengths", "[len(x) for x in xs]", lambda xs, k: [len(x) for x in xs]),
    Operation(
        "the longest word, the last one of several, or {k} if the list is empty",
        "max(xs[::-1], key=len, default={k})",
        lambda xs, k: max(xs[::-1], key=len, default=k),
        ("none", "", "?"),
    ),
    Operation(
        "the text of the first letters of all words", "''.join(x[:1] for x in xs)", lambda xs, k: "".join(x[:1] for x in xs)
    ),
    Operation(
        "a dict from each word to how often it occurs",
        "{{x: xs.count(x) for x in xs}}",
        lambda xs, k: dict(Counter(xs)),
    ),
    Operation(
        "the most frequent word, of several the first in alphabetical order, or {k} if the list is empty",
        "min(xs, key=lambda x: (-xs.count(x), x), default={k})",
        _most_frequent,
        ("none", "", "?"),
    ),
]
CHAINS: dict[str, tuple[list[Operation], list[Operation], Callable[[random.Random, int], list[Any]]]] = {
    "whole numbers": ([*ANY, *NUMBERS], NUMBER_ENDS, _numbers),
    "words": ([*ANY, *TEXTS], TEXT_ENDS, _words),
}
