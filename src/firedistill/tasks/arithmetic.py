"""A built-in task: arithmetic word problems made on the spot, in the manner of ASDiv. No data, no network.

A problem is told by a template: a small function that draws its people, things and numbers from a `Scene`, computes with
`scene.plus`, `minus`, `times` and `divided` (which write down the working), and returns the text. The answer is the last
number computed, so text, working and answer cannot drift apart.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from firedistill.tasks.answers import numeric_gold
from firedistill.tasks.numeric import NumericTask
from firedistill.tasks.sources import optional_text, text_field
from firedistill.tasks.types import Example

# What a level consists of: (steps of the working, size of the numbers), each as likely as the others.
LEVELS: dict[str, tuple[tuple[int, str], ...]] = {
    "easy": ((1, "small"),),
    "medium": ((1, "large"), (2, "small")),
    "hard": ((2, "large"), (3, "large")),
    "mixed": ((1, "small"), (1, "small"), (1, "large"), (2, "small"), (2, "large"), (3, "small"), (3, "large")),
}

# How many problems a split has when nobody says how many. There is no end to them.
DEFAULT_SIZE = {"train": 8000, "eval": 1000}


@dataclass(frozen=True)
class Problem:
    """A word problem with its working (`28 - 17 = 11`, one step per line), its answer, and the name of its template."""

    question: str
    working: tuple[str, ...]
    answer: int
    template: str


class Arithmetic(NumericTask):
    """Word problems over +, -, *, / with one to three steps; answers are whole numbers.

    Levels: `"easy"` has one step and small numbers, `"medium"` one step with larger numbers or two with small ones, `"hard"`
    two or three steps with larger numbers, and `"mixed"`, the default, all of these. As task names: `arithmetic` (mixed),
    `arithmetic:easy`, `arithmetic:medium`, `arithmetic:hard`.

    Whether a problem is for training or held out is decided by its text alone (a hash of it), so no question is in both
    splits, whatever the seeds and the levels. Within one call all questions differ.

    Raises:
        ValueError: there is no such level.
    """

    train_split = "train"
    eval_split = "eval"

    def __init__(self, level: str = "mixed") -> None:
        if level not in LEVELS:
            raise ValueError(f"arithmetic has no level {level!r}; choose one of {', '.join(LEVELS)}")
        self.level = level
        self.name = "arithmetic" if level == "mixed" else f"arithmetic:{level}"

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        """The first `n` problems of a stream that depends on level, split and seed only; `data_dir` is not used.

        Raises:
            ValueError: `split` is neither "train" nor "eval", or `n` is negative.
        """
        split, _ = self.resolve_split(split)
        if n is not None and n < 0:
            raise ValueError(f"n must be at least 0, or None for {DEFAULT_SIZE[split]} examples; got {n}")
        problems = self._stream(split, seed)
        count = DEFAULT_SIZE[split] if n is None else n
        return [_as_example(next(problems), f"{self.name}/{split}/{seed}-{i}") for i in range(count)]

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        """A problem from elsewhere: {"question": "...", "answer": "11", "solution": "28 - 17 = 11\\n#### 11"}."""
        gold = numeric_gold(text_field(row, "answer"))
        return Example(uid=uid, question=text_field(row, "question"), answer=gold, solution=optional_text(row, "solution"))

    def _stream(self, split: str, seed: int) -> Iterator[Problem]:
        """Problems of one split without end, each question once."""
        rng = random.Random(_integer_of(f"{self.level}/{split}/{seed}"))
        seen: set[str] = set()
        while True:
            problem = draw_problem(rng, self.level)
            if problem.question not in seen and split_of(problem.question) == split:
                seen.add(problem.question)
                yield problem


def split_of(question: str) -> str:
    """The split that a question belongs to, by its text."""
    return "eval" if _integer_of(question) % 2 else "train"


def draw_problem(rng: random.Random, level: str = "mixed") -> Problem:
    """One problem of the level, of either split."""
    steps, size = rng.choice(LEVELS[level])
    template = rng.choice(TEMPLATES[steps])
    scene = Scene(rng, size)
    question = template(scene)
    return Problem(question, tuple(scene.working), scene.result, template.__name__)


def _as_example(problem: Problem, uid: str) -> Example:
    solution = "\n".join((*problem.working, f"#### {problem.answer}"))
    return Example(uid=uid, question=problem.question, answer=str(problem.answer), solution=solution)


def _integer_of(text: str) -> int:
    """An integer that is the same on every platform (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


# ---------------------------------------------------------------------------------------------------------------------
# What problems are about


class Person(NamedTuple):
    name: str
    they: str  # she, he

    @property
    def They(self) -> str:  # noqa: N802 (the capital is the point)
        return self.they.capitalize()


class Thing(NamedTuple):
    """Something that can be counted: `thing(1)` is "1 apple", `thing(3)` is "3 apples"."""

    one: str
    many: str

    def __call__(self, count: int) -> str:
        return f"{count} {self.one if count == 1 else self.many}"


def _things(text: str) -> tuple[Thing, ...]:
    """From words separated by blanks: `fox/foxes` gives both forms, `apple` takes an s; `_` stands for a blank."""
    pairs = (word.replace("_", " ").partition("/") for word in text.split())
    return tuple(Thing(one, many or f"{one}s") for one, _, many in pairs)


def _named(they: str, names: str) -> tuple[Person, ...]:
    return tuple(Person(name, they) for name in names.split())


PEOPLE = _named(
    "she",
    "Ada Amina Anna Beatriz Carla Chloe Daria Elena Emma Fatima Grace Hana Ines Jade Julia Kavya Keiko Lena Lucy Maria Maya "
    "Mei Nadia Nora Olga Priya Rosa Ruth Sara Sofia Tara Uma Vera Wendy Yara Zoe",
) + _named(
    "he",
    "Adam Ahmed Ben Bruno Carlos Chen Daniel David Diego Ethan Felix Finn George Hugo Ivan Jack James Jonas Karim Kofi Leo "
    "Liam Luis Marco Max Nikhil Noah Omar Oscar Paul Pedro Ravi Samuel Tariq Theo Tom Victor Yusuf",
)

BELONGINGS = _things(
    "apple marble sticker pencil book coin shell button balloon stamp crayon card toy_car seashell bead badge comic_book "
    "postcard key_ring puzzle model_plane bracelet ribbon eraser notebook"
)
FOODS = _things(
    "cookie muffin orange plum peach/peaches grape cherry/cherries strawberry/strawberries sandwich/sandwiches pancake egg "
    "banana pear bread_roll cupcake doughnut"
)
GOODS = _things(
    "pen notebook ruler mug cap toy_robot candle flower_pot poster scarf/scarves brush/brushes lunch_box/lunch_boxes"
)
CONTAINERS = _things("box/boxes bag basket crate jar tray packet")
FURNITURE = _things("shelf/shelves table bench/benches rack desk")
ANIMALS = _things("chicken duck sheep/sheep goat cow rabbit horse goose/geese")
PLANTS = _things("rose tulip tomato_plant apple_tree sunflower pine_tree bean_plant")
VEHICLES = _things("bus/buses van minibus/minibuses boat tram")
HANDIWORK = _things("photo drawing paper_crane clay_bowl")
PAGE = Thing("page", "pages")
SELLERS = _things("shop kiosk market_stall store museum_shop")
TREATS = _things("bicycle/bicycles camera guitar tent skateboard telescope keyboard pair_of_skates")


class Scene:
    """Draws what a problem is about and keeps its working.

    Numbers are `small` (amounts to 20, factors to 10) or `large` (amounts to 300, factors to 25).
    """

    def __init__(self, rng: random.Random, size: str) -> None:
        self.rng = rng
        self.working: list[str] = []
        self.result = 0
        self._amounts, self._factors = ((2, 20), (2, 10)) if size == "small" else ((15, 300), (3, 25))

    # Drawing

    def person(self) -> Person:
        return self.people(1)[0]

    def people(self, count: int) -> list[Person]:
        """Different people."""
        return self.rng.sample(PEOPLE, count)

    def thing(self, kind: tuple[Thing, ...] = BELONGINGS) -> Thing:
        return self.rng.choice(kind)

    def things(self, count: int, kind: tuple[Thing, ...] = BELONGINGS) -> list[Thing]:
        """Different things."""
        return self.rng.sample(kind, count)

    def pick(self, *words: str) -> str:
        return self.rng.choice(words)

    def amount(self) -> int:
        return self.rng.randint(*self._amounts)

    def factor(self) -> int:
        return self.rng.randint(*self._factors)

    def few(self) -> int:
        """A number for groups and repetitions that stays small in every problem."""
        return self.rng.randint(2, 9)

    def price(self) -> int:
        return self.rng.randint(2, 3 * self._factors[1])

    def part(self, whole: int) -> int:
        """A positive number smaller than `whole` (which is at least 2)."""
        return self.rng.randint(1, whole - 1)

    def two_amounts(self) -> tuple[int, int]:
        """A larger and a smaller amount."""
        larger = max(self.amount(), self._amounts[0] + 1)
        return larger, self.rng.randint(self._amounts[0], larger - 1)

    # Computing

    def plus(self, a: int, *more: int) -> int:
        return self._step(" + ".join(map(str, (a, *more))), a + sum(more))

    def minus(self, a: int, b: int) -> int:
        return self._step(f"{a} - {b}", a - b)

    def times(self, a: int, b: int) -> int:
        return self._step(f"{a} * {b}", a * b)

    def divided(self, a: int, b: int) -> int:
        if a % b:
            raise ValueError(f"{a} / {b} is not a whole number: the template must choose its numbers to fit")
        return self._step(f"{a} / {b}", a // b)

    def _step(self, expression: str, result: int) -> int:
        self.working.append(f"{expression} = {result}")
        self.result = result
        return result


Template = Callable[[Scene], str]
TEMPLATES: dict[int, list[Template]] = {1: [], 2: [], 3: []}


def steps(count: int) -> Callable[[Template], Template]:
    """Enter a template under the number of steps that its working takes."""

    def enter(template: Template) -> Template:
        TEMPLATES[count].append(template)
        return template

    return enter


# ---------------------------------------------------------------------------------------------------------------------
# One step: addition


@steps(1)
def gets_more(s: Scene) -> str:
    who, thing, had, got = s.person(), s.thing(), s.amount(), s.amount()
    s.plus(had, got)
    source = s.pick("buys", "finds", "is given")
    return f"{who.name} has {thing(had)}. Then {who.they} {source} {got} more. How many {thing.many} does {who.name} have now?"


@steps(1)
def two_collections(s: Scene) -> str:
    (a, b), thing, first, second = s.people(2), s.thing(), s.amount(), s.amount()
    s.plus(first, second)
    return (
        f"{a.name} has {thing(first)} and {b.name} has {thing(second)}. "
        f"How many {thing.many} do {a.name} and {b.name} have together?"
    )


@steps(1)
def two_kinds(s: Scene) -> str:
    who, (one, two), first, second = s.person(), s.things(2, FOODS), s.amount(), s.amount()
    s.plus(first, second)
    return (
        f"{who.name} packs {one(first)} and {two(second)} for a picnic. How many pieces of food does {who.they} pack in total?"
    )


@steps(1)
def more_than(s: Scene) -> str:
    (a, b), thing, count, extra = s.people(2), s.thing(), s.amount(), s.amount()
    s.plus(count, extra)
    return (
        f"{a.name} has {thing(count)}. {b.name} has {extra} more {thing.many} than {a.name}. "
        f"How many {thing.many} does {b.name} have?"
    )


@steps(1)
def before_giving(s: Scene) -> str:
    (a, b), thing, given, left = s.people(2), s.thing(), s.amount(), s.amount()
    s.plus(given, left)
    return (
        f"{a.name} gave {thing(given)} to {b.name} and had {left} left. "
        f"How many {thing.many} did {a.name} have at the beginning?"
    )


@steps(1)
def farm(s: Scene) -> str:
    who, (one, two), first, second = s.person(), s.things(2, ANIMALS), s.amount(), s.amount()
    s.plus(first, second)
    return (
        f"There are {one(first)} and {two(second)} on {who.name}'s farm. "
        f"How many {one.many} and {two.many} are there altogether?"
    )


@steps(1)
def two_days(s: Scene) -> str:
    who, first, second = s.person(), s.amount(), s.amount()
    s.plus(first, second)
    days = s.pick("on Monday and {} on Tuesday", "on Saturday and {} on Sunday", "yesterday and {} today").format(second)
    return f"{who.name} read {PAGE(first)} of a book {days}. How many pages did {who.they} read on the two days?"


# One step: subtraction


@steps(1)
def gives_away(s: Scene) -> str:
    (a, b), thing, had = s.people(2), s.thing(), s.amount()
    given = s.part(had)
    s.minus(had, given)
    return (
        f"{a.name} has {thing(had)}. {a.They} gives {given} of them to {b.name}. How many {thing.many} does {a.name} have left?"
    )


@steps(1)
def eaten(s: Scene) -> str:
    food, on_plate = s.thing(FOODS), s.amount()
    eaten_count = s.part(on_plate)
    s.minus(on_plate, eaten_count)
    who = s.pick("the children", "the guests", "the hikers")
    return (
        f"At the start there were {food(on_plate)} on the table. "
        f"{who.capitalize()} ate {eaten_count} of them. How many {food.many} were left?"
    )


@steps(1)
def how_many_more(s: Scene) -> str:
    (a, b), thing, (more, fewer) = s.people(2), s.thing(), s.two_amounts()
    s.minus(more, fewer)
    return (
        f"{a.name} collected {thing(more)} and {b.name} collected {thing(fewer)}. "
        f"How many more {thing.many} did {a.name} collect than {b.name}?"
    )


@steps(1)
def how_many_fewer(s: Scene) -> str:
    (one, two), (more, fewer) = s.things(2, PLANTS), s.two_amounts()
    s.minus(more, fewer)
    return f"A garden has {one(fewer)} and {two(more)}. How many fewer {one.many} than {two.many} does the garden have?"


@steps(1)
def fewer_than(s: Scene) -> str:
    (a, b), thing, count = s.people(2), s.thing(), s.amount()
    less = s.part(count)
    s.minus(count, less)
    return f"{a.name} has {thing(count)}. {b.name} has {less} fewer than {a.name}. How many {thing.many} does {b.name} have?"


@steps(1)
def still_needed(s: Scene) -> str:
    who, thing, (goal, has) = s.person(), s.thing(), s.two_amounts()
    s.minus(goal, has)
    return (
        f"{who.name} wants to collect {thing(goal)}. {who.They} already has {has}. "
        f"How many more {thing.many} does {who.they} need?"
    )


@steps(1)
def how_many_bought(s: Scene) -> str:
    who, thing, (now, before) = s.person(), s.thing(), s.two_amounts()
    s.minus(now, before)
    return (
        f"{who.name} had {thing(before)}. After buying some more {who.they} has {now}. "
        f"How many {thing.many} did {who.name} buy?"
    )


@steps(1)
def the_others(s: Scene) -> str:
    thing, total = s.thing(GOODS), s.amount()
    colour, other = s.rng.sample(["red", "blue", "green", "yellow", "white"], 2)
    some = s.part(total)
    s.minus(total, some)
    verb = "is" if some == 1 else "are"
    return (
        f"A shop has {thing(total)}. Of these, {some} {verb} {colour} and all the others are {other}. "
        f"How many {other} {thing.many} does the shop have?"
    )


@steps(1)
def change(s: Scene) -> str:
    who, thing, price = s.person(), s.thing(GOODS), s.price()
    paid = price + s.rng.randint(1, 20)
    s.minus(paid, price)
    return f"{who.name} buys a {thing.one} for ${price} and pays with ${paid}. How many dollars does {who.they} get back?"


# One step: multiplication


@steps(1)
def full_containers(s: Scene) -> str:
    who, thing, container, count, each = s.person(), s.thing(), s.thing(CONTAINERS), s.few(), s.factor()
    s.times(count, each)
    return (
        f"{who.name} has {container(count)} with {thing(each)} in each {container.one}. "
        f"How many {thing.many} does {who.they} have?"
    )


@steps(1)
def rows_of_plants(s: Scene) -> str:
    who, plant, rows, each = s.person(), s.thing(PLANTS), s.few(), s.factor()
    s.times(rows, each)
    return (
        f"{who.name} plants {rows} rows of {plant.many} with {each} in every row. How many {plant.many} does {who.they} plant?"
    )


@steps(1)
def total_price(s: Scene) -> str:
    who, thing, count, price = s.person(), s.thing(GOODS), s.few(), s.price()
    s.times(count, price)
    return f"A {thing.one} costs ${price}. How many dollars does {who.name} pay for {thing(count)}?"


@steps(1)
def times_as_many(s: Scene) -> str:
    (a, b), thing, count, ratio = s.people(2), s.thing(), s.factor(), s.rng.randint(3, 6)
    s.times(count, ratio)
    return (
        f"{a.name} has {thing(count)}. {b.name} has {ratio} times as many {thing.many} as {a.name}. "
        f"How many {thing.many} does {b.name} have?"
    )


@steps(1)
def seats(s: Scene) -> str:
    vehicle, count, each = s.thing(VEHICLES), s.few(), s.factor()
    s.times(count, each)
    return f"Each {vehicle.one} can carry {each} passengers. How many passengers can {vehicle(count)} carry?"


@steps(1)
def every_day(s: Scene) -> str:
    seller, thing, days, each = s.thing(SELLERS), s.thing(GOODS), s.few(), s.factor()
    s.times(days, each)
    return f"A {seller.one} sells {thing(each)} every day. How many {thing.many} does the {seller.one} sell in {days} days?"


# One step: division


@steps(1)
def shared_equally(s: Scene) -> str:
    who, food, friends, each = s.person(), s.thing(FOODS), s.few(), s.factor()
    total = friends * each
    s.divided(total, friends)
    return (
        f"{who.name} shares {food(total)} equally among {friends} friends and keeps none. "
        f"How many {food.many} does each friend get?"
    )


@steps(1)
def packed(s: Scene) -> str:
    who, thing, container, count, each = s.person(), s.thing(), s.thing(CONTAINERS), s.factor(), s.few()
    s.divided(count * each, each)
    return (
        f"{who.name} puts {thing(count * each)} into {container.many}, {each} in each {container.one}. "
        f"How many {container.many} does {who.they} need?"
    )


@steps(1)
def on_furniture(s: Scene) -> str:
    thing, place, count, each = s.thing(), s.thing(FURNITURE), s.few(), s.factor()
    s.divided(count * each, count)
    return (
        f"A class sets out {thing(count * each)} on {place(count)}, the same number on each {place.one}. "
        f"How many {thing.many} are on each {place.one}?"
    )


@steps(1)
def price_of_one(s: Scene) -> str:
    who, thing, count, price = s.person(), s.thing(GOODS), s.few(), s.price()
    s.divided(count * price, count)
    return (
        f"{who.name} pays ${count * price} for {thing(count)} that all cost the same. "
        f"How many dollars does one {thing.one} cost?"
    )


@steps(1)
def how_many_affordable(s: Scene) -> str:
    who, thing, count, price = s.person(), s.thing(GOODS), s.factor(), s.few()
    s.divided(count * price, price)
    return (
        f"A {thing.one} costs ${price}. {who.name} spends ${count * price} on {thing.many}. "
        f"How many {thing.many} does {who.they} buy?"
    )


@steps(1)
def times_fewer(s: Scene) -> str:
    (a, b), thing, count, ratio = s.people(2), s.thing(), s.factor(), s.rng.randint(3, 6)
    s.divided(count * ratio, ratio)
    return (
        f"{a.name} has {thing(count * ratio)}. That is {ratio} times as many as {b.name} has. "
        f"How many {thing.many} does {b.name} have?"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Two steps


@steps(2)
def gets_then_gives(s: Scene) -> str:
    (a, b), thing, had, got = s.people(2), s.thing(), s.amount(), s.amount()
    given = s.part(had + got)
    s.minus(s.plus(had, got), given)
    return (
        f"{a.name} has {thing(had)}. {a.They} buys {got} more and then gives {given} to {b.name}. "
        f"How many {thing.many} does {a.name} have now?"
    )


@steps(2)
def gives_twice(s: Scene) -> str:
    (a, b, c), thing = s.people(3), s.thing()
    first, second, left = s.amount(), s.amount(), s.amount()
    had = first + second + left
    s.minus(s.minus(had, first), second)
    return (
        f"{a.name} has {thing(had)}. {a.They} gives {first} to {b.name} and {second} to {c.name}. "
        f"How many {thing.many} does {a.name} have left?"
    )


@steps(2)
def more_than_together(s: Scene) -> str:
    (a, b), thing, count, extra = s.people(2), s.thing(), s.amount(), s.amount()
    s.plus(count, s.plus(count, extra))
    return (
        f"{a.name} has {thing(count)}. {b.name} has {extra} more than {a.name}. "
        f"How many {thing.many} do {a.name} and {b.name} have altogether?"
    )


@steps(2)
def fewer_than_together(s: Scene) -> str:
    (a, b), thing, count = s.people(2), s.thing(HANDIWORK), s.amount()
    less = s.part(count)
    s.plus(count, s.minus(count, less))
    return (
        f"{a.name} makes {thing(count)}. {b.name} makes {less} fewer than {a.name}. "
        f"How many {thing.many} do {a.name} and {b.name} make together?"
    )


@steps(2)
def containers_and_loose(s: Scene) -> str:
    who, thing, container, count, each, loose = s.person(), s.thing(), s.thing(CONTAINERS), s.few(), s.factor(), s.amount()
    s.plus(s.times(count, each), loose)
    verb = "lies" if loose == 1 else "lie"
    return (
        f"{who.name} has {container(count)} with {thing(each)} in each {container.one}. Another {loose} {verb} on the desk. "
        f"How many {thing.many} does {who.they} have in all?"
    )


@steps(2)
def delivered_and_sold(s: Scene) -> str:
    seller, thing, days, each = s.thing(SELLERS), s.thing(GOODS), s.few(), s.factor()
    sold = s.part(days * each)
    s.minus(s.times(days, each), sold)
    return (
        f"A new {seller.one} receives {thing(each)} every day for {days} days and then sells {sold} of them. "
        f"How many {thing.many} does the {seller.one} still have?"
    )


@steps(2)
def change_for_several(s: Scene) -> str:
    who, thing, count, price = s.person(), s.thing(GOODS), s.few(), s.price()
    paid = count * price + s.rng.randint(1, 30)
    s.minus(paid, s.times(count, price))
    return f"{who.name} buys {thing(count)} at ${price} each and hands over ${paid}. How many dollars does {who.they} get back?"


@steps(2)
def two_purchases(s: Scene) -> str:
    who, (one, two), count, price, other = s.person(), s.things(2, GOODS), s.few(), s.price(), s.price()
    s.plus(s.times(count, price), other)
    return (
        f"{who.name} buys {one(count)} for ${price} each and a {two.one} for ${other}. "
        f"How many dollars does {who.they} spend altogether?"
    )


@steps(2)
def shared_after_eating(s: Scene) -> str:
    who, food, friends, each, gone = s.person(), s.thing(FOODS), s.few(), s.factor(), s.amount()
    had = friends * each + gone
    s.divided(s.minus(had, gone), friends)
    return (
        f"{who.name} brings home {food(had)}. The family eats {gone} of them, "
        f"and the rest are shared equally among {friends} neighbours. How many {food.many} does each neighbour get?"
    )


@steps(2)
def pooled_and_shared(s: Scene) -> str:
    (a, b), thing, friends, each = s.people(2), s.thing(), s.few(), s.factor()
    first = s.part(friends * each)
    second = friends * each - first
    s.divided(s.plus(first, second), friends)
    return (
        f"{a.name} brings {thing(first)} and {b.name} brings {thing(second)}. They divide all of them equally "
        f"among {friends} children. How many {thing.many} does each child get?"
    )


@steps(2)
def times_as_many_together(s: Scene) -> str:
    (a, b), thing, count, ratio = s.people(2), s.thing(), s.factor(), s.rng.randint(3, 6)
    s.plus(count, s.times(count, ratio))
    return (
        f"{a.name} has {thing(count)} and {b.name} has {ratio} times as many. "
        f"How many {thing.many} do {a.name} and {b.name} have altogether?"
    )


@steps(2)
def times_as_many_difference(s: Scene) -> str:
    (a, b), thing, count, ratio = s.people(2), s.thing(), s.factor(), s.rng.randint(3, 6)
    s.minus(s.times(count, ratio), count)
    return (
        f"{a.name} has {thing(count)} and {b.name} has {ratio} times as many. "
        f"How many more {thing.many} does {b.name} have than {a.name}?"
    )


@steps(2)
def three_baskets(s: Scene) -> str:
    (a, b, c), food, first, second, third = s.people(3), s.thing(FOODS), s.amount(), s.amount(), s.amount()
    s.plus(s.plus(first, second), third)
    return (
        f"{a.name} gathers {food(first)}, {b.name} gathers {food(second)} and {c.name} gathers {food(third)}. "
        f"How many {food.many} do they gather in total?"
    )


@steps(2)
def passengers(s: Scene) -> str:
    vehicle, on_board, joined = s.thing(VEHICLES), s.amount(), s.amount()
    left = s.part(on_board)
    s.plus(s.minus(on_board, left), joined)
    gets = "gets" if left == 1 else "get"
    stop = "harbour" if vehicle.one == "boat" else "next stop"
    return (
        f"There are {on_board} passengers on a {vehicle.one}. At the {stop}, {left} {gets} off and {joined} get on. "
        f"How many passengers are on the {vehicle.one} now?"
    )


@steps(2)
def repacked(s: Scene) -> str:
    thing, (old, new), old_count, new_each = s.thing(), s.things(2, CONTAINERS), s.factor(), s.few()
    old_each = new_each * s.few()
    s.divided(s.times(old_count, old_each), new_each)
    return (
        f"A shop receives {old(old_count)} with {thing(old_each)} in each {old.one}. All of them are put into {new.many} "
        f"of {new_each}. How many {new.many} are filled?"
    )


@steps(2)
def saving_up(s: Scene) -> str:
    who, thing, weeks, weekly, has = s.person(), s.thing(TREATS), s.factor(), s.few(), s.amount()
    price = has + weeks * weekly
    s.divided(s.minus(price, has), weekly)
    return (
        f"{who.name} wants to buy a {thing.one} for ${price} and already has ${has}. {who.They} saves ${weekly} every week. "
        f"In how many weeks will {who.they} have enough money?"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Three steps


@steps(3)
def two_kinds_of_containers(s: Scene) -> str:
    who, thing, (one, two) = s.person(), s.thing(), s.things(2, CONTAINERS)
    first, first_each, second, second_each = s.few(), s.factor(), s.few(), s.factor()
    s.plus(s.times(first, first_each), s.times(second, second_each))
    return (
        f"{who.name} has {one(first)} with {thing(first_each)} in each {one.one}, and {two(second)} with {thing(second_each)} "
        f"in each {two.one}. How many {thing.many} does {who.they} have altogether?"
    )


@steps(3)
def two_purchases_each(s: Scene) -> str:
    who, (one, two), n, price, m, other = s.person(), s.things(2, GOODS), s.few(), s.price(), s.few(), s.price()
    s.plus(s.times(n, price), s.times(m, other))
    return (
        f"A {one.one} costs ${price} and a {two.one} costs ${other}. {who.name} buys {one(n)} and {two(m)}. "
        f"How many dollars does {who.they} pay?"
    )


@steps(3)
def change_from_two_purchases(s: Scene) -> str:
    who, (one, two), n, price, other = s.person(), s.things(2, GOODS), s.few(), s.price(), s.price()
    paid = n * price + other + s.rng.randint(1, 30)
    s.minus(paid, s.plus(s.times(n, price), other))
    return (
        f"{who.name} has ${paid}. {who.They} buys {one(n)} at ${price} each and a {two.one} for ${other}. "
        f"How many dollars does {who.they} have left?"
    )


@steps(3)
def containers_given_and_found(s: Scene) -> str:
    (a, b), thing, container, count, each, found = s.people(2), s.thing(), s.thing(CONTAINERS), s.few(), s.factor(), s.amount()
    given = s.part(count * each)
    s.plus(s.minus(s.times(count, each), given), found)
    return (
        f"{a.name} has {container(count)} of {thing.many}, {each} in each {container.one}. {a.They} gives {given} of the "
        f"{thing.many} to {b.name} and later finds {found} more. How many {thing.many} does {a.name} have in the end?"
    )


@steps(3)
def chain_of_comparisons(s: Scene) -> str:
    (a, b, c), thing, count, ratio = s.people(3), s.thing(), s.factor(), s.rng.randint(3, 6)
    less = s.part(count * ratio)
    more = s.times(count, ratio)
    s.plus(more, s.minus(more, less))
    return (
        f"{a.name} has {thing(count)}. {b.name} has {ratio} times as many as {a.name}, and {c.name} has {less} fewer "
        f"than {b.name}. How many {thing.many} do {b.name} and {c.name} have together?"
    )


@steps(3)
def all_three_together(s: Scene) -> str:
    (a, b, c), food, count, extra, last = s.people(3), s.thing(FOODS), s.amount(), s.amount(), s.amount()
    s.plus(s.plus(count, s.plus(count, extra)), last)
    return (
        f"{a.name} sells {food(count)}. {b.name} sells {extra} more than {a.name}. {c.name} sells {food(last)}. "
        f"How many {food.many} do the three of them sell altogether?"
    )


@steps(3)
def harvest_packed(s: Scene) -> str:
    who, food, container, each, full = s.person(), s.thing(FOODS), s.thing(CONTAINERS), s.few(), s.factor()
    spoiled, first = s.few(), s.part(full * each)
    second = full * each - first + spoiled
    s.divided(s.minus(s.plus(first, second), spoiled), each)
    return (
        f"{who.name} gets {food(first)} from one shop and {food(second)} from another. {spoiled} of them are bad and thrown "
        f"away. The good ones are packed {each} to a {container.one}. How many {container.many} does {who.name} fill?"
    )


@steps(3)
def profit(s: Scene) -> str:
    who, thing, count, cost, gain, stall = s.person(), s.thing(GOODS), s.factor(), s.price(), s.few(), s.few()
    stall = min(stall, count * gain)
    s.minus(s.times(count, s.minus(cost + gain, cost)), stall)
    return (
        f"{who.name} buys {thing(count)} for ${cost} each and sells all of them for ${cost + gain} each. The market stall "
        f"costs ${stall}. How many dollars does {who.name} earn after paying for the {thing.many} and the stall?"
    )


@steps(3)
def shared_cost(s: Scene) -> str:
    thing, friends, count, price = s.thing(GOODS), s.few(), s.few(), s.price()
    delivery = friends * s.few() - count * price % friends
    s.divided(s.plus(s.times(count, price), delivery), friends)
    return (
        f"{friends} friends order {thing(count)} at ${price} each, and the delivery costs ${delivery}. They split the "
        f"whole cost equally. How many dollars does each friend pay?"
    )
