"""Arithmetic word problems in the style of ASDiv, generated from the templates of arithmetic.yaml. No data, no network."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from firedistill.tasks.answers.numbers import numeric_gold
from firedistill.tasks.generated import GeneratedTask, hash_of, split_of
from firedistill.tasks.numeric import NumericTask
from firedistill.tasks.sources import optional_text, text_field
from firedistill.tasks.types import Example

# The equally likely kinds of problems of a level: (steps of the working, size of the numbers).
LEVELS: dict[str, tuple[tuple[int, str], ...]] = {
    "easy": ((1, "small"),),
    "medium": ((1, "large"), (2, "small")),
    "hard": ((2, "large"), (3, "large")),
    "mixed": ((1, "small"), (1, "small"), (1, "large"), (2, "small"), (2, "large"), (3, "small"), (3, "large")),
}


class Arithmetic(GeneratedTask, NumericTask):
    """Word problems over +, -, *, / with one to three steps; answers are whole numbers.

    Levels: `"easy"` has one step and small numbers, `"medium"` one step with larger numbers or two with small ones, `"hard"`
    two or three steps with larger numbers, and `"mixed"`, the default, all of these. As task names: `arithmetic` (mixed),
    `arithmetic:easy`, `arithmetic:medium`, `arithmetic:hard`.
    """

    name = "arithmetic"
    levels = LEVELS
    default_size = {"train": 8000, "eval": 1000}

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        """A problem from elsewhere: {"question": "...", "answer": "11", "solution": "28 - 17 = 11\\n#### 11"}."""
        gold = numeric_gold(text_field(row, "answer"))
        return Example(uid=uid, question=text_field(row, "question"), answer=gold, solution=optional_text(row, "solution"))

    def stream(self, split: str, seed: int) -> Iterator[Problem]:
        """Endless problems of one split, each question once."""
        rng = random.Random(hash_of(f"{self.level}/{split}/{seed}"))
        seen: set[str] = set()
        while True:
            problem = draw_problem(rng, self.level)
            if problem.question not in seen and split_of(problem.question) == split:
                seen.add(problem.question)
                yield problem


@dataclass(frozen=True)
class Problem:
    """A word problem with its working (`28 - 17 = 11`, one step per line), its answer, and the name of its template."""

    question: str
    working: tuple[str, ...]
    answer: int
    template: str

    def as_example(self, uid: str) -> Example:
        solution = "\n".join((*self.working, f"#### {self.answer}"))
        return Example(uid=uid, question=self.question, answer=str(self.answer), solution=solution)


def draw_problem(rng: random.Random, level: str = "mixed") -> Problem:
    """One problem of the level, of either split."""
    steps, size = rng.choice(LEVELS[level])
    return rng.choice(TEMPLATES[steps]).make_problem(rng, size)


# Templates. The head of arithmetic.yaml explains their parts.


@dataclass(frozen=True)
class Person:
    name: str
    they: str  # she, he

    @property
    def They(self) -> str:
        return self.they.capitalize()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Thing:
    """Something that can be counted."""

    one: str
    many: str

    @classmethod
    def from_text(cls, text: str) -> Thing:
        """`fox/foxes` gives both forms; `apple` takes an s."""
        one, _, many = text.partition("/")
        return cls(one, many or f"{one}s")

    def __str__(self) -> str:
        return self.one


class Scene(dict[str, Any]):
    """The people, things and numbers of one problem by name; `scene["had thing"]` is a number with its thing, "3 apples"."""

    def __missing__(self, key: str) -> str:
        number, blank, word = key.partition(" ")
        if not blank:
            raise KeyError(f"no such name: {key}")
        thing = Thing.from_text(word) if "/" in word else self[word]
        return f"{self[number]} {thing.one if self[number] == 1 else thing.many}"

    def compute(self, expression: str) -> int:
        """The value of `had + got * ratio`, computed from left to right."""
        first, *rest = expression.split(" ")
        value = self[first]
        for sign, name in zip(rest[::2], rest[1::2], strict=True):
            value = OPERATORS[sign](value, self[name])
        return value


@dataclass(frozen=True)
class Template:
    """A kind of word problem."""

    name: str
    draw: Mapping[str, Any]
    working: list[str]
    text: str

    def make_problem(self, rng: random.Random, size: str) -> Problem:
        """A problem with numbers of the given size, `small` or `large`."""
        scene = Scene()
        for names, kind in self.draw.items():
            scene.update(zip(names.split(" "), draw_values(kind, names.count(" ") + 1, scene, RANGES[size], rng), strict=True))
        lines = []
        for step in self.working:
            name, _, expression = step.rpartition(" = ")
            left, sign, right = expression.split(" ")
            result = scene[name] = scene.compute(expression)
            lines.append(f"{scene[left]} {sign} {scene[right]} = {result}")
        return Problem(self.text.format_map(scene), tuple(lines), result, self.name)


def draw_values(kind: Any, count: int, scene: Scene, ranges: Mapping[str, tuple[int, int]], rng: random.Random) -> list[Any]:
    """`count` values of a kind, as arithmetic.yaml explains kinds."""
    if isinstance(kind, dict):
        return [kind.get(str(scene[kind["of"]]), kind["else"])]
    if isinstance(kind, list):
        return [phrase.format_map(scene) for phrase in rng.sample(kind, count)]
    if kind in NOUNS:
        return rng.sample(NOUNS[kind], count)
    if kind in ranges:
        return [rng.randint(*ranges[kind]) for _ in range(count)]
    if kind == "descending amounts":
        lowest, highest = ranges["amount"]
        larger = max(rng.randint(lowest, highest), lowest + 1)
        return [larger, rng.randint(lowest, larger - 1)]
    if kind.startswith("part of "):
        return [rng.randint(1, scene.compute(kind.removeprefix("part of ")) - 1)]
    if " to " in kind:
        return [rng.randint(*map(int, kind.split(" to ")))]
    return [scene.compute(kind)]


def divide(a: int, b: int) -> int:
    if a % b:
        raise ValueError(f"{a} / {b} is not a whole number: the template must draw numbers that fit")
    return a // b


OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
    "%": operator.mod,
    "min": min,
}

_data = yaml.safe_load(resources.files(__package__).joinpath("arithmetic.yaml").read_text(encoding="utf-8"))
RANGES: dict[str, dict[str, tuple[int, int]]] = _data["ranges"]
NOUNS: dict[str, list[Any]] = {kind: [Thing.from_text(text) for text in texts] for kind, texts in _data["things"].items()}
NOUNS["people"] = [Person(name, they) for they, names in _data["people"].items() for name in names.split()]
TEMPLATES: dict[int, list[Template]] = {1: [], 2: [], 3: []}  # by the steps of their working
for _name, _parts in _data["templates"].items():
    TEMPLATES[len(_parts["working"])].append(Template(_name, **_parts))
