"""The built-in word problems: reproducible, disjoint, correct, and readable."""

import hashlib
import random
import re
from collections import Counter

import pytest

from firedistill.tasks import load_task
from firedistill.tasks.arithmetic import LEVELS, NOUNS, TEMPLATES, Arithmetic, Thing, draw_problem
from firedistill.tasks.generated import split_of

PEOPLE = NOUNS["people"]
CATALOGUE = [noun for nouns in NOUNS.values() for noun in nouns if isinstance(noun, Thing)] + [Thing("page", "pages")]
SINGULAR, PLURAL = {thing.one for thing in CATALOGUE}, {thing.many for thing in CATALOGUE}
COUNTED = re.compile(rf"(?<![\d$])(\d+) ({'|'.join(sorted(SINGULAR | PLURAL, key=len, reverse=True))})\b")
ALL_TEMPLATES = [template for templates in TEMPLATES.values() for template in templates]


def compute(expression: str) -> int:
    """`3 + 4 + 5`, `9 - 2`, `3 * 4` or `12 / 4`, by hand."""
    first, *rest = expression.split(" ")
    value = int(first)
    for operator, text in zip(rest[::2], rest[1::2], strict=True):
        number = int(text)
        if operator == "+":
            value += number
        elif operator == "-":
            value -= number
        elif operator == "*":
            value *= number
        else:
            assert operator == "/" and value % number == 0, expression
            value //= number
    return value


def problems(count: int):
    """`count` problems of every template in both sizes."""
    for template in ALL_TEMPLATES:
        for size in ("small", "large"):
            for seed in range(count):
                yield template.make_problem(random.Random(seed), size)


@pytest.mark.parametrize("level", LEVELS)
def test_same_seed_same_problems(level):
    first = Arithmetic(level).examples("train", 50, seed=3)
    assert first == Arithmetic(level).examples("train", 50, seed=3)
    assert first[:20] == Arithmetic(level).examples("train", 20, seed=3)
    other_seed = {e.question for e in Arithmetic(level).examples("train", 50, seed=4)}
    assert len(other_seed & {e.question for e in first}) < 10


def test_problems_are_the_same_everywhere():
    """Golden values: a change here means that older runs can no longer be reproduced."""
    example = Arithmetic().examples("train", 3, seed=0)[2]
    assert example.uid == "arithmetic/train/0-2"
    assert example.question == (
        "Tom makes 4 photos. Chen makes 1 fewer than Tom. How many photos do Tom and Chen make together?"
    )
    assert (example.answer, example.solution) == ("7", "4 - 1 = 3\n4 + 3 = 7\n#### 7")
    rng = random.Random(0)
    drawn = [draw_problem(rng, level) for level in LEVELS for _ in range(1000)]
    text = "\n".join(f"{p.template}: {p.question} {'; '.join(p.working)}; {p.answer}" for p in drawn)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "83c3481a2a095718", "the embedded model was trained on this text"


def test_splits_are_disjoint():
    train, held_out = set(), set()
    for seed in range(3):
        for level in LEVELS:
            train |= {e.question for e in Arithmetic(level).examples("train", 600, seed)}
            held_out |= {e.question for e in Arithmetic(level).examples("eval", 600, seed)}
    assert len(train) > 6000 and len(held_out) > 6000
    assert not train & held_out
    assert {split_of(q) for q in train} == {"train"}
    assert {split_of(q) for q in held_out} == {"eval"}


def test_questions_and_uids_are_unique_within_a_call():
    examples = load_task("arithmetic:easy").examples("train", 5000)
    assert len({e.question for e in examples}) == len({e.uid for e in examples}) == 5000
    assert examples[17].uid == "arithmetic:easy/train/0-17"


def test_default_sizes_and_bad_requests():
    assert len(Arithmetic().examples("eval")) == 1000
    assert Arithmetic().examples("train", 0) == []
    with pytest.raises(ValueError, match="no split 'dev'"):
        Arithmetic().examples("dev", 1)
    with pytest.raises(ValueError, match="at least 0"):
        Arithmetic().examples("train", -1)
    with pytest.raises(ValueError, match="easy, medium, hard"):
        Arithmetic("impossible")


def test_working_leads_to_the_answer():
    for example in Arithmetic().examples("train", 3000, seed=1):
        *working, last = example.solution.split("\n")
        results = []
        for step in working:
            expression, result = step.split(" = ")
            assert compute(expression) == int(result) >= 0
            results.append(result)
        assert last == f"#### {example.answer}" == f"#### {results[-1]}"


def test_working_starts_from_the_text():
    """Every number of the working is in the question or the result of an earlier step, and every number of the question is used."""
    for problem in problems(30):
        known = Counter(re.findall(r"\d+", problem.question))
        unused = set(known)
        for step in problem.working:
            expression, result = step.split(" = ")
            used = re.findall(r"\d+", expression)
            assert set(used) <= set(known), problem
            unused -= set(used)
            known[result] += 1
        assert not unused, problem


def test_gold_solutions_verify():
    task = load_task("arithmetic")
    for example in task.examples("eval", 500):
        verdict = task.verify(example, example.solution)
        assert verdict.correct and verdict.well_formed and verdict.submitted == example.answer
        wrong = task.verify(example, f"#### {int(example.answer) + 1}")
        assert not wrong.correct and wrong.well_formed


def test_numbers_stay_in_proportion():
    largest = {level: max(int(e.answer) for e in Arithmetic(level).examples("train", 2000)) for level in LEVELS}
    assert largest["easy"] <= 300
    assert largest["hard"] <= 5000


def test_steps_follow_the_level():
    def step_counts(level):
        return {e.solution.count("=") for e in Arithmetic(level).examples("train", 500)}

    assert step_counts("easy") == {1}
    assert step_counts("medium") == {1, 2}
    assert step_counts("hard") == {2, 3}
    assert step_counts("mixed") == {1, 2, 3}


def test_the_working_has_the_steps_of_its_level():
    steps = {template.name: count for count, templates in TEMPLATES.items() for template in templates}
    for problem in problems(50):
        assert len(problem.working) == steps[problem.template], problem


def test_variety():
    assert len({template.name for template in ALL_TEMPLATES}) == len(ALL_TEMPLATES) >= 40
    rng = random.Random(0)
    drawn = Counter(draw_problem(rng).template for _ in range(4000))
    assert len(drawn) == len(ALL_TEMPLATES)
    assert max(drawn.values()) < 4000 * 0.1
    operators = Counter(op for e in Arithmetic().examples("train", 1000) for op in re.findall(r" ([-+*/]) ", e.solution))
    assert all(operators[op] > 100 for op in "+-*/")
    assert len(PEOPLE) == len({person.name for person in PEOPLE}) > 70


def test_text_is_clean_english():
    for problem in problems(60):
        question, message = problem.question, f"{problem.template}: {problem.question}"
        assert not re.search(r"[{}<>_]|None|Scene|Thing|Person", question), message
        assert "  " not in question and question == question.strip(), message
        assert re.fullmatch(r"[A-Z0-9].*\?", question), message
        for number, word in COUNTED.findall(question):
            assert word in (SINGULAR if number == "1" else PLURAL), message
        assert not re.search(r"(?<![\d$])1 (get|lie|are|were)\b", question), message
        assert not re.search(r"\ba [aeiou]", question), message
        assert not re.search(r"\b(\w+) \1\b", question), message
        assert not re.search(r"[.?!][A-Za-z]", question), message
        assert re.search(r"(How many|In how many) ", question), message


def test_people_keep_their_pronoun():
    pronoun = {person.name: person.they for person in PEOPLE}
    for problem in problems(40):
        question = problem.question
        names = {word for word in re.findall(r"[A-Z][a-z]+", question) if word in pronoun}
        for they in re.findall(r"\b(she|he)\b", question, re.IGNORECASE):
            assert they.lower() in {pronoun[n] for n in names}, problem


def test_rows_from_elsewhere():
    example = Arithmetic().example({"question": "What is 28 - 17?", "answer": "11"}, uid="mine/0")
    assert (example.uid, example.answer, example.solution) == ("mine/0", "11", None)
