"""Planted noise: the feedback is wrong about the problems that it should be wrong about, and nothing else changes."""

from __future__ import annotations

import pytest

from firedistill.tasks import TableTask, load_task
from firedistill.tasks.choice import choice_example
from firedistill.tasks.guard import GuardedTask
from firedistill.tasks.planted import Planted, other_answer


@pytest.mark.parametrize("kind", ["answer", "hint"])
def test_the_share_of_wrong_feedback_is_the_rate_and_grows_by_inclusion(kind):
    plain = load_task("arithmetic")
    examples = plain.examples("train", 400)
    wrong = {}
    for rate in ("0", "0.1", "0.3", "1"):
        task = load_task(f"planted:{kind}:{rate}:arithmetic")
        assert task.name == f"planted:{kind}:{rate}:arithmetic" and task.examples("train", 400) == examples
        wrong[rate] = set()
        for example in examples:
            verdict = task.verify(example, "#### 1")
            assert verdict == plain.verify(example, "#### 1") and task.prompt(example) == plain.prompt(example)
            fields, usual = task.feedback(example, "#### 1", verdict), plain.feedback(example, "#### 1", verdict)
            if kind == "hint":
                assert fields[:-1] == usual and fields[-1].name == "hint"
                right = fields[-1].text == f"Hint: the final answer is {example.answer}."
            else:
                assert fields[1:] == usual[1:]
                right = fields == usual
                assert right or f"answer=`{other_answer(example)}`;" in fields[0].text
            if not right:
                wrong[rate].add(example.uid)
    assert not wrong["0"] and wrong["0.1"] < wrong["0.3"] < wrong["1"] and len(wrong["1"]) == 400
    assert 20 <= len(wrong["0.1"]) <= 60 and 90 <= len(wrong["0.3"]) <= 150


def test_a_verifier_that_is_a_coroutine():
    async def right(row, response):
        return response == row["answer"]

    task = GuardedTask(Planted("hint", 1.0, TableTask([{"question": "?", "answer": "a"}], verify=right)), 5.0)
    (example,) = task.examples("train", 1)
    assert [task.verify(example, text).correct for text in ("a", "b")] == [True, False]

    async def field(row, response, verdict):
        return "text"

    with pytest.raises(ValueError, match="feedback of .* is async def"):
        Planted("hint", 1.0, TableTask([{"question": "?", "answer": "a"}], verify=right, feedback={"more": field}))


def test_another_answer_differs_from_the_gold_one():
    assert all(other_answer(example) != example.answer for example in load_task("arithmetic").examples("train", 200))
    examples = [choice_example(f"x/{i}", "?", ["a", "b", "c"], "B") for i in range(50)]
    assert {other_answer(example) for example in examples} == {"A", "C"}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("planted:answer:0.3", "unknown task ''"),
        ("planted:answer:0.3", "expected planted:<kind>:<rate>:<task>, as in planted:answer:0.3:arithmetic"),
        ("planted:answer:much:arithmetic", "expected planted:<kind>:<rate>:<task>"),
        ("planted:answer:1.5:arithmetic", "a rate from 0 to 1"),
        ("planted:anser:0.5:arithmetic", "a kind of answer, hint"),
        ("planted:answer:0.5:arithmetik", "unknown task 'arithmetik'"),
    ],
)
def test_names_that_are_no_planted_task(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_task(name)
