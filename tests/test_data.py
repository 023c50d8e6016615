"""Data without code: reading, splits, bad rows, kinds of answers, feedback templates, the `data` command, `@task`, async methods."""

from __future__ import annotations

import asyncio
import csv
import gzip
import importlib.util
import json
import logging
import random
import re
import threading
import time
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from firedistill import Example, FeedbackField, Task, Verdict, load_task, task
from firedistill.cli.arguments import parse_settings
from firedistill.cli.data import another, near_misses
from firedistill.cli.main import main
from firedistill.models.lora import add_lora
from firedistill.objectives import load_objective
from firedistill.prompts import PromptEncoder, TokenBudget, student_messages, teacher_messages
from firedistill.rollout import Response, Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.sampler import Sampler, fitting_prompts
from firedistill.run.identity import data_fingerprint
from firedistill.setup import given_examples
from firedistill.step import select_rollouts
from firedistill.tasks import DataError, TableTask
from firedistill.tasks.code import CodeTask
from firedistill.tasks.coroutines import Loop
from firedistill.tasks.guard import GuardedTask, TaskFault
from firedistill.tasks.kinds import MathTask, expression, read_gold
from firedistill.tasks.reading import needs_conversion, open_rows, rows_of
from firedistill.tasks.table import SAMPLE
from firedistill.teacher import Teacher
from tiny import ToyTask, byte_tokenizer, random_model, run_trainer, save_checkpoint

ROWS = [{"question": f"What is {n} + {n}?", "answer": 2 * n, "hint": f"Double {n}."} for n in range(20)]


def write_jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def both(found: TableTask) -> list[Example]:
    """All examples, in the order of the rows."""
    examples = {e.uid: e for split in ("train", "eval") for e in found.examples(split)}
    return [examples[uid] for uid in sorted(examples, key=lambda uid: (uid.rpartition("/")[0], int(uid.rpartition("/")[2])))]


def contents(examples):
    return {(e.question, e.answer, e.feedback) for e in examples}


# Files


def write_as(kind: str, folder: Path) -> str:
    path = folder / f"my.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    elif kind == "jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, ROWS)).encode())
    else:
        mark = "\t" if kind == "tsv" else ";" if kind == "semicolon.csv" else ","
        lines = [mark.join(map(str, row.values())) for row in [{"q": "question", "a": "answer", "h": "hint"}, *ROWS]]
        path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "semicolon.csv", "tsv", "parquet"])
def test_every_kind_of_file_gives_the_same_split(kind, tmp_path):
    options = {"feedback": {"hint": "Hint: {hint}"}}
    found, expected = load_task(write_as(kind, tmp_path), **options), load_task(ROWS, **options)
    for split, count in (("train", 16), ("eval", 4)):
        assert contents(found.examples(split)) == contents(expected.examples(split))
        assert len(found.examples(split)) == count
    assert both(found)[3].uid == f"{found.name}/all/3"


@pytest.mark.parametrize("gold", ["41", "--3", "9" * 5000, "-0", "pine", ""])
def test_another_answer_is_another_answer(gold):
    assert another(Example(uid="", question="", answer=gold)) != gold


def test_numbers_with_a_decimal_comma_are_pointed_out():
    for answers, guess in (
        (["0,5", "3"], "several numbers, not a decimal comma, in 1 of them, the first '0,5'"),
        (["1; 2", "3"], None),
    ):
        rows = [{"question": str(i), "answer": answer} for i, answer in enumerate(answers)]
        for answer in (None, "numeric"):
            task = load_task(rows, answer=answer)
            task.prepare()
            assert [text for text in task.guesses if text.startswith("several")] == [guess] * (guess is not None)
    task = load_task([{"question": str(i), "answer": answer} for i, answer in enumerate(("1,5", "a", "b"))])
    task.prepare()
    assert not [text for text in task.guesses if text.startswith("several")]  # they are texts


def test_near_misses_change_the_answer_and_not_its_marker():
    right, _, emphasized, both, wrong, _ = near_misses(load_task("wic"), Example("u", "q", "A", labels=("A", "B")))
    assert [right, emphasized, both, wrong] == ["Answer: A", "Answer: **A**", "Answer: A or B", "Answer: B"]


def test_the_split_does_not_depend_on_seed_or_order_of_rows_and_keeps_repeated_questions_together(caplog):
    rows = [*ROWS, *ROWS[:7]]
    held_out = contents(load_task(rows).examples("eval"))
    assert len(held_out) == 4
    random.Random(1).shuffle(rows)
    found = load_task(rows)
    assert contents(found.examples("eval", seed=5)) == held_out
    assert not contents(found.examples("train")) & held_out
    assert "7 rows: the same question and answer as an earlier row" in caplog.text


def test_a_quoted_name_may_hold_the_other_delimiter(tmp_path):
    (tmp_path / "my.csv").write_text('"question, in full";answer\nWhat is 1 + 1?;2\n', encoding="utf-8")
    found = load_task(str(tmp_path / "my.csv"), columns={"question": "question, in full"}, eval_data=ROWS[:1])
    with pytest.raises(DataError, match="column 'question, in full' is missing"):
        found.check()  # of `eval_data`
    assert found.known_columns == ["question, in full", "answer"]


def test_a_data_set_gives_the_rows_that_a_list_gives():
    data = datasets.Dataset.from_list(ROWS).shuffle(seed=1).select(range(15))
    assert contents(both(load_task(data))) == contents(both(load_task(list(data))))
    divided = datasets.DatasetDict({"train": data, "validation": datasets.Dataset.from_list(ROWS[:2])})
    assert len(load_task(divided).examples("train")) == 15
    assert contents(load_task(divided).examples("eval")) == contents(both(load_task(ROWS[:2])))
    with pytest.raises(DataError, match="not a streaming one"):
        load_task(data.to_iterable_dataset()).examples("train")


def test_dictionaries_that_differ_between_rows_stay_dictionaries(tmp_path):
    """`datasets` stores them as text in JSON, within columns as well, and so does a Parquet file that it writes."""
    rows = [
        {"turns": [{"role": "user", "content": "2+2?"}], "meta": {"level": 1}, "tags": None, "plain": {"a": 1}},
        {
            "turns": [{"role": "user", "content": "3?", "name": "x"}],
            "meta": {"topic": "add", "level": "2"},
            "tags": [1, "b"],
            "plain": {"a": 2},
        },
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path / "cache"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    if not any(map(needs_conversion, (field.type for field in data.features.arrow_schema))):
        pytest.skip("this version of datasets has no columns of JSON")
    for found in (rows_of(data, "data"), open_rows(tmp_path / "rows.parquet"), open_rows(Path(file))):
        assert [dict(row) for row in found] == rows


def test_a_folder_has_splits(tmp_path, caplog):
    for name, rows in (("train", ROWS[:10]), ("validation", ROWS[10:13]), ("test", ROWS[13:])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    found = load_task(str(tmp_path))
    assert [len(found.examples(split)) for split in ("train", "eval", "validation", "test")] == [10, 3, 3, 7]
    assert "held-out problems are the split 'validation'" in caplog.text
    assert len(load_task(str(tmp_path), eval_data="test").examples("eval")) == 7
    others = load_task({"train": ROWS, "holdout": ROWS[:2]})
    assert len(others.examples("train")) + len(others.examples("eval")) == len(ROWS)
    assert "held-out problems are a fifth of the split 'train', not of holdout (--eval_data names another)" in others.guesses
    other = write_jsonl(tmp_path / "other.jsonl", ROWS[:2])
    assert len(load_task(str(tmp_path / "train.jsonl"), eval_data=other).examples("eval")) == 2
    assert len(load_task(str(tmp_path / "train.jsonl"), eval_data=other).examples("train")) == 10
    with pytest.raises(
        DataError, match="eval_data is 'tset': expected a file .* or the name of a split; the data have the splits"
    ):
        load_task(str(tmp_path), eval_data="tset")
    (tmp_path / "train.jsonl").rename(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="none is called 'train'"):
        load_task(str(tmp_path))


def test_folders_of_other_forms_are_told_to_be_converted(tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    (tmp_path / "clone" / "data").mkdir(parents=True)
    for name, call in (("saved", "load_from_disk"), ("clone", "load_dataset")):
        with pytest.raises(
            DataError, match=rf"write each split as a file, as in datasets.{call}\(.*{name}'\)\['train'\].to_parquet"
        ):
            load_task(str(tmp_path / name))


def test_a_hub_data_set_is_read_split_by_split(monkeypatch):
    asked = []

    def load(hub_id, **request):
        asked.append((hub_id, request["name"], request["split"]))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda hub_id, config: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_task("somebody/sums:main")
    assert len(found.examples("eval")) == len(found.examples("train")) == 20
    assert asked == [("somebody/sums", "main", "train"), ("somebody/sums", "main", "test")]

    def fails(*arguments):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "get_dataset_split_names", fails)
    with pytest.raises(DataError, match="'somebody/sums' on the Hugging Face hub .ConnectionError: no route"):
        load_task("somebody/sums")


def test_published_tasks_are_not_shadowed_by_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("arithmetic", "gsm8k"):
        (tmp_path / name).mkdir()
        assert not isinstance(load_task(name), TableTask)
    with pytest.raises(ValueError, match="answer is set, but the task 'gsm8k' says itself"):
        load_task("gsm8k", answer="exact")


# Rows that cannot be used

BAD = {
    "not JSON": b'{"question": "?", "answer": ',
    "not a JSON object": b"[1, 2]",
    "not text in UTF-8": b'{"question": "\xe9", "answer": 1}',
    "column 'question' is missing": b'{"qestion": "?", "answer": 1}',
    "column 'question' is empty": b'{"question": " ", "answer": 1}',
    "column 'question' is not a text": b'{"question": {"a": 1}, "answer": 1}',
    "column 'answer' is missing": b'{"question": "?", "anwser": 1}',
    "column 'answer' is empty": b'{"question": "?", "answer": null}',
    "a key is given twice": b'{"question": "?", "answer": 1, "answer": 2}',
    "column 'answer' is not a number": b'{"question": "?", "answer": "none"}',
    "column 'answer' is not one answer": b'{"question": "?", "answer": [1, 2]}',
    "the question of an earlier row with another answer": b'{"question": "What is 1 + 1?", "answer": 3}',
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_or_left_out(kind, tmp_path, caplog):
    path = tmp_path / "my.jsonl"
    lines = [json.dumps(row).encode() for row in ROWS]
    path.write_bytes(b"\r\n".join([*lines[:4], b"", BAD[kind], *lines[4:], BAD[kind]]))
    with pytest.raises(DataError) as error:
        load_task(str(path)).check()
    assert "2 of 22 rows cannot be used" in str(error.value) and "--bad_rows skip" in str(error.value)
    assert f"2 rows: {kind} (rows 6, 23" in str(error.value) and " -> " in str(error.value)
    found = load_task(str(path), bad_rows="skip")
    assert contents(both(found)) == contents(both(load_task(ROWS)))
    assert f"left out 2 rows: {kind}" in caplog.text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            'question,answer\nfoo,1\nbar,2,3\n"a ""b"" c",3\n',
            r"row 3: another number of cells than the first line \(3 instead of 2\)",
        ),
        ('question,answer\nfoo,1\n"two\nlines",x\nbar,4\n', "row 3: column 'answer' is not a number"),
        ('question,answer\nfoo,1\n"bar,2\nbaz,3\n', "row 3: unexpected end of data; a quotation mark"),
        ('question,answer\nfoo,1\n"a "b" c",3\n', "row 3: ',' expected after"),
        ("question,question\nfoo,1\n", "each by a name of its own"),
        ("question,answer\n", "has no rows"),
        ("", "must name the columns"),
    ],
)
def test_a_bad_text_file_is_named_by_line(text, match, tmp_path):
    (tmp_path / "my.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=match):
        load_task(str(tmp_path / "my.csv"), answer="numeric").check()


def test_a_cell_of_a_text_file_may_be_long(tmp_path):
    rows, limit = [dict(ROWS[0], hint="x" * 200_000), *ROWS[1:]], csv.field_size_limit()
    with (tmp_path / "my.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(rows)
    options = {"feedback": {"hint": "{hint}"}}
    assert contents(both(load_task(str(tmp_path / "my.csv"), **options))) == contents(both(load_task(rows, **options)))
    with (tmp_path / "my.csv").open("a", encoding="utf-8") as file:
        file.write('"not closed,1\n' + "x,1\n" * 50_000)
    with pytest.raises(DataError, match="row 22: unexpected end of data; a quotation mark"):
        load_task(str(tmp_path / "my.csv")).check()
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("name", ["my.csv", "my.jsonl", "my.parquet", "my.jsonl.gz"])
def test_no_bytes_end_in_another_error(name, tmp_path):
    draw = random.Random(0)
    for _ in range(60):
        good = gzip.compress(json.dumps(ROWS[0]).encode()) if name.endswith("gz") else json.dumps(ROWS[0]).encode()
        content = bytearray(good * draw.randint(0, 2) + draw.randbytes(draw.randint(0, 40)))
        draw.shuffle(content) if draw.random() < 0.2 else None
        (tmp_path / name).write_bytes(content)
        try:
            load_task(str(tmp_path / name)).check()
        except DataError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.parametrize(
    ("row", "lacks"),
    [
        ({"question": "?", "answer": "B"}, "answer"),
        ({"question": "?", "options": ["x", "y"], "answer": "B"}, "answer"),
        ({"question": "?", "options": ["x", "y"], "answer": "B"}, "options"),
    ],
)
def test_a_file_that_lacks_a_column_is_told_to_have_the_same_ones(row, lacks, tmp_path):
    rows = [{**row, "question": f"q{n}"} for n in range(4)]
    other = [{name if name != lacks else "other": value for name, value in row.items()} for row in rows]
    found = load_task(rows, eval_data=write_jsonl(tmp_path / "other.jsonl", other))
    with pytest.raises(DataError, match=f"4 rows: column '{lacks}' is missing .*row 1: the row has .*all files need the same"):
        found.check()
    found = load_task(rows, columns={lacks: f"{{{lacks}}}"}, eval_data=str(tmp_path / "other.jsonl"))
    with pytest.raises(DataError, match=f"4 rows: column '{lacks}' in the template of the {lacks} is empty"):
        found.check()


# Columns


@pytest.mark.parametrize(
    ("row", "options", "match"),
    [
        (
            {"question": "?", "prompt": "?", "answer": 1},
            {},
            "the question could be in the column question or prompt: name it by",
        ),
        ({"question": "?", "answer": 1, "label": 1}, {}, "the answer could be in the column answer or label"),
        (
            {"qestion": "?", "answer": 1},
            {},
            "no column is known to hold the question .*Did you mean --columns question=qestion",
        ),
        ({"question": "?", "result": 1}, {}, "no column is known to hold the answer .*The columns are: question, result"),
        ({"question": "?", "answer": 1}, {"columns": {"question": "qestion"}}, "no column 'qestion'; did you mean 'question'"),
        (
            {"question": "?", "answer": 1},
            {"columns": {"qestion": "question"}},
            "columns names 'qestion': expected question, answer",
        ),
        ({"question": "?", "answer": 1}, {"answer": "choice"}, "no column is known to hold the options"),
        ({"question": "?", "answer": 1}, {"answer": "number"}, "answer is 'number': expected numeric, choice"),
        ({"question": "?", "answer": 1}, {"answer": "regex"}, "expected the pattern after a colon"),
        ({"question": "?", "answer": 1}, {"answer": "regex:("}, "not a regular expression"),
        ({"question": "?", "answer": 1}, {"bad_rows": "drop"}, "bad_rows is 'drop': expected 'refuse' or 'skip'"),
        ({"question": "?", "answer": 1}, {"feedback": {"full": "?"}}, "feedback names a field 'full'"),
        ({"question": "?", "answer": 1}, {"feedback": {"verifer": ""}}, "verifer= removes no field; did you mean verifier"),
        (
            {"question": "?", "answer": 1},
            {"feedback": {"x": "answer"}},
            "feedback x=answer is the same text in every row: write x={answer}",
        ),
        ({"question": "?", "answer": 1}, {"feedback": {"x": 1}}, "feedback x is 1: expected a text"),
        ({"question": "?", "answer": 1}, {"columns": {"answer": 1}}, "columns answer is 1: expected the name"),
        ({"question": "?", "answer": 1}, {"eval_data": "test"}, "eval_data is 'test'"),
        ({"question": "?", "answer": 1}, {"eval_data": "test.jsonl"}, "eval_data: there is no file test.jsonl"),
        (
            {"question": "?", "answer": 1},
            {"columns": {"answer": ""}},
            "a row needs its answer: name a column by --columns answer=",
        ),
        (
            {"question": "?", "answer": 1},
            {"columns": {"question": ""}},
            "a row needs its question: .*columns: question, answer",
        ),
        ({"question": "?", "answer": 1}, {"columns": ["question"]}, "columns is a list: expected a mapping"),
        ({"question": "?", "answer": 1}, {"feedback": ["hint"]}, "feedback is a list: expected a mapping"),
    ],
)
def test_what_cannot_be_guessed_is_asked_for(row, options, match):
    with pytest.raises(ValueError, match=match):
        load_task([row], **options).prepare()


def test_numbers_and_texts_in_equal_parts_are_not_guessed():
    rows = [{"question": str(n), "answer": n if n % 3 else f"t{n}"} for n in range(12)]
    with pytest.raises(
        DataError, match="8 of the first 12 are numbers, the others are not: say how answers are read by --answer"
    ):
        load_task(rows).prepare()
    assert {e.answer for e in both(load_task(rows, answer="exact"))} >= {"1", "t3"}
    assert load_task([{"question": str(n), "answer": f"t{n}"} for n in range(12)]).examples("train")[0].answer.startswith("t")


def test_nested_columns_and_templates():
    rows = [{"task": {"text": f"q{n}", "input": "x"}, "reward": {"truth": [n]}} for n in range(5)]
    found = load_task(rows, columns={"question": "{task.text} {{{task.input}}}", "answer": "reward.truth"})
    assert both(found)[2].question == "q2 {x}" and both(found)[2].answer == "2"
    rows[3]["task"]["input"] = ""
    with pytest.raises(DataError, match="row 4: column 'task.input' in the template of the question is empty -> fill it in"):
        load_task(rows, columns={"question": "{task.text} {task.input}", "answer": "reward.truth"}).check()


def test_messages_keep_their_turns():
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
    ]
    rows = [{"messages": [*turns, {"role": "user", "content": f"{n} + 1?"}], "answer": n + 1} for n in range(5)]
    found = load_task(rows)
    one = both(found)[0]
    assert one.question == "0 + 1?" and list(one.history) == turns
    student, teacher = student_messages(found, one), teacher_messages(found, one, ())
    assert student[:3] == teacher[:3] == turns and [message["role"] for message in student] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert student[3]["content"].endswith("0 + 1?") and "Structured feedback context" in teacher[3]["content"]
    ids = PromptEncoder(byte_tokenizer()).encode([*student[:3], {"role": "user", "content": "<|im_end|>"}])
    assert ids.count(2) == 4  # one end of turn per message: none from the content
    for wrong in ([*turns], [{"role": "tool", "content": "?"}], [], [{"role": "user", "content": [{"type": "image"}]}]):
        with pytest.raises(DataError, match="row 6: column 'messages'"):
            load_task([*rows, {"messages": wrong, "answer": 1}]).check()


# Kinds of answers

CHOICES = [
    ("letter", {"choices": ["x", "y", "z"], "answer": "b"}, {}),
    ("text", {"choices": ["x", "y", "z"], "answer": "Y"}, {}),
    ("number from 0", {"choices": ["x", "y", "z"], "answer": 1}, {"answer": "choice:0"}),
    ("number from 1", {"choices": ["x", "y", "z"], "answer": "2"}, {"answer": "choice:1"}),
    ("labels", {"choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answer": "2"}, {}),
    ("labelled", {"choices": [{"label": "1", "text": "x"}, {"label": "2", "text": "y"}], "answer": "2"}, {}),
    ("arrays", {"choices": {"label": np.array(["1", "2"]), "text": np.array(["x", "y"])}, "answer": "2"}, {}),
    ("mapping", {"options": {"A": "x", "B": "y"}, "answer": "B"}, {}),
    ("mapping with gaps", {"options": {"A": "x", "B": None, "C": "y", "D": float("nan")}, "answer": "C"}, {}),
    ("solution", {"options": ["x", "y"], "answer": "B", "solution": "Answer: B"}, {}),
    ("lettered", {"options": ["A) x", "B) y"], "answer": "B"}, {}),
    ("columns", {"o1": "x", "o2": "y", "o3": None, "answer": "B"}, {"columns": {"options": "o1,o2,o3"}}),
    ("JSON in a cell", {"options": '["x", "y"]', "answer": "B"}, {}),
]


@pytest.mark.parametrize(("row", "options"), [case[1:] for case in CHOICES], ids=[case[0] for case in CHOICES])
def test_options_in_every_form(row, options):
    found = load_task([{"question": "Which?", **row}, {"question": "Other?", **row}], **options)
    one = both(found)[0]
    assert one.question.startswith("Which?\n\nChoices:\nA. x\nB. y") and one.answer == "B" and one.solution == "Answer: B"
    assert found.verify(one, "Answer: B").correct and not found.verify(one, "Answer: A").correct


@pytest.mark.parametrize(
    ("numbers", "first"),
    [([0, 1, 2], "A"), ([1, 2, 3], "A"), ([1, 2, 1], None), ([0, 1, 3], None)],
    ids=["0", "1", "open", "both"],
)
def test_numbers_of_options_start_where_the_rows_say(numbers, first):
    rows = [{"question": f"q{n}", "choices": ["x", "y", "z"], "answer": n} for n in numbers]
    if first is None:
        with pytest.raises(DataError, match="say what the first option is called by --answer choice:0 or"):
            load_task(rows).prepare()
    else:
        assert [e.answer for e in both(load_task(rows))] == ["A", "B", "C"]


@pytest.mark.parametrize("first", [0, 1])
def test_numbers_of_options_may_be_floats(first, tmp_path):
    rows = [{"question": f"q{n}", "choices": ["x", "y", "z"], "answer": float(n + first)} for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist([*rows, {**rows[0], "answer": float("nan")}]), tmp_path / "my.parquet")
    found = load_task(str(tmp_path / "my.parquet"), bad_rows="skip")
    assert [e.answer for e in both(found)] == ["A", "B", "C"]
    assert sum(problem.count for problem in found.scan("all").problems.values()) == 1
    for choices in ([1, 2, 3], [1.0, 2.0, 3.0], ["1", "2", "3"]):
        rows = [{"question": f"q{n}", "choices": choices, "answer": float(n)} for n in (1, 2, 3)]
        assert [e.answer for e in both(load_task(rows))] == ["A", "B", "C"]


def test_a_number_that_is_also_the_text_of_an_option_is_refused():
    rows = [{"question": f"q{n}", "choices": ["5", "6", "1"], "answer": n} for n in (0, 1, 2)]
    with pytest.raises(DataError, match="the text of one option and the number of another"):
        load_task(rows).check()
    assert [e.answer for e in both(load_task(rows, answer="choice:0"))] == ["A", "B", "C"]


def test_golds_that_are_texts_of_options_are_no_letters():
    rows = [{"question": f"q{n}", "choices": ["O", "AB", "A", "B"], "answer": n} for n in ("O", "AB", "A", "B")]
    assert [e.answer for e in both(load_task(rows))] == ["A", "B", "C", "D"]
    assert [e.answer for e in both(load_task([*rows[2:], {**rows[0], "answer": "D"}]))] == ["A", "B", "D"]  # letters


def test_golds_may_be_letters_and_texts_where_none_could_be_both():
    rows = [{"question": f"q{n}", "choices": ["Paris", "Rome", "Bonn"], "answer": n} for n in ("C", "Paris", "rome")]
    assert [e.answer for e in both(load_task(rows))] == ["C", "A", "B"]
    unclear = {"question": "Which?", "choices": ["B", "A"], "answer": "B"}
    assert [e.answer for e in both(load_task([rows[0], unclear]))] == ["C", "B"]
    assert [e.answer for e in both(load_task([rows[1], unclear]))] == ["A", "A"]
    with pytest.raises(DataError, match="row 4: column 'answer' is the letter of one option and the text of another"):
        load_task([*rows, unclear]).check()
    assert [e.answer for e in both(load_task([*rows, {**unclear, "choices": ["A", "B"]}]))] == ["C", "A", "B", "B"]


def test_golds_may_repeat_the_letter_and_differ_in_case_only():
    rows = [{"question": f"q{n}", "choices": ["A. Paris", "B. Rome"], "answer": n} for n in ("A. Paris", "B)", "(B) Rome", "A")]
    assert [e.answer for e in both(load_task(rows))] == ["A", "B", "B", "A"]
    with pytest.raises(DataError, match="row 5: column 'answer' is none of the options"):
        load_task([*rows, {**rows[0], "question": "?", "answer": "B. Paris"}]).check()
    rows = [{"question": f"q{n}", "choices": ["AA", "Aa", "aa"], "answer": n} for n in ("Aa", "AA", "aa")]
    assert [e.answer for e in both(load_task(rows))] == ["B", "A", "C"]


def test_numbers_of_options_in_a_csv_file_may_be_floats(tmp_path):
    (tmp_path / "my.csv").write_text("question,A,B,C,answer\n" + "".join(f"q{n},x,y,z,{n}.0\n" for n in (1, 2, 3)))
    assert [e.answer for e in both(load_task(str(tmp_path / "my.csv"), columns={"options": "A,B,C"}))] == ["A", "B", "C"]
    (tmp_path / "texts.csv").write_text("question,A,B,C,answer\n" + "".join(f"q{n},2,3,4,{n}.0\n" for n in (2, 3, 4)))
    assert [e.answer for e in both(load_task(str(tmp_path / "texts.csv"), columns={"options": "A,B,C"}))] == ["A", "B", "C"]


def test_a_solution_has_one_answer_line():
    rows = [{"question": f"q{n}", "options": ["x", "y"], "answer": "B", "solution": "Not x.\n\nAnswer: y"} for n in range(2)]
    assert {e.solution for e in both(load_task(rows))} == {"Not x.\nAnswer: B"}


def test_options_without_texts_are_bad_rows():
    rows = [{"question": f"q{n}", "options": ["x", "y"], "answer": "B"} for n in range(2)]
    with pytest.raises(DataError, match="row 3: column 'options' has an option that is neither a text nor has the keys label"):
        load_task([*rows, {"question": "?", "options": [{"text": "x"}, {"text": "y"}], "answer": "B"}]).check()


def test_questions_whose_options_are_shuffled_stay_together():
    letters = ["p", "q", "r", "s"]
    once = [{"question": f"Question {n}?", "options": letters, "answer": "p"} for n in range(40)]
    again = [{**row, "options": letters[::-1]} for row in once]

    def questions(rows, part):
        return {int(e.question.partition("?")[0].removeprefix("Question ")) for e in load_task(rows).examples(part)}

    assert questions(once, "eval") == {2, 4, 12, 16, 18, 20, 23, 32}
    for rows in ([*once, *again], [*again, *once]):
        assert len(questions(rows, "eval")) == 8 and questions(rows, "train") == set(range(40)) - questions(rows, "eval")
    assert questions([*once, *again], "eval") == questions([*again, *once], "eval")


def test_options_are_shown_to_verifiers_and_no_kind_drops_them_silently(caplog):
    rows = [{"question": f"q{n}", "choices": ["x", "y"], "answer": "second"} for n in range(4)] + [{"question": "Open?"}]
    first, *_, last = both(task(rows)(lambda row, response: True))
    assert (first.question, first.labels, first.answer) == ("q0\n\nChoices:\nA. x\nB. y", ("A", "B"), "second")
    assert (
        last.question == "Open?" and both(task(rows, columns={"options": ""})(lambda row, response: True))[0].question == "q0"
    )
    with pytest.raises(DataError, match="is not a list of options .* or leave the column out by --columns options="):
        task([{"question": "q", "options": {"digits": 3}}])(lambda row, response: True).check()
    with pytest.raises(DataError, match="columns options=choices, but answers are read as exact, without options: leave one"):
        load_task(rows[:4], answer="exact", columns={"options": "choices"}).prepare()
    assert both(load_task(rows[:4], answer="exact"))[0].question == "q0"
    assert "column 'choices' is not shown, because answers are read as exact" in caplog.text


VERDICTS = [
    ("numeric", "1,200", "#### 1200", True),
    ("numeric", "Some working.\n#### 72", "#### 72", True),
    ("numeric", 3.5, "#### 7/2", True),
    ("numeric", 2**1400, f"#### {2**1400}", True),
    ("exact", "Paris", "Answer: **paris**.", True),
    ("exact", ["Paris", "City of Light"], "It is\nAnswer: city of  light", True),
    ("exact", "Paris", "Paris", False),
    ("exact", "Paris", "**Answer**: Paris", True),
    ("exact", "Paris", "### Final answer\uff1a Paris", True),
    ("exact", "Paris", "__ANSWER :__ Paris", True),
    ("exact", "Paris", "Answer: Paris\nAnswer: Rome", False),
    ("exact", True, "Answer: True", True),
    ("exact", 1.0, "Answer: 1", True),
    ("exact", [7.0, "seven"], "Answer: 7", True),
    ("exact", 1.5, "Answer: 1.5", True),
    (r"regex:total = (\d+)", 7.0, "total = 7", True),
    ("exact", "snake_case", "Answer: snake case", False),
    *(
        ("exact", "Paris", response, True)
        for response in (
            "**Answer:** **Paris**",
            "**Answer: Paris.**",
            "**Answer: Paris**.",
            "**Answer: **Paris**",
            "* Answer: *Paris*",
            "So **yes**: **Answer: Paris**",
            "The `x` gives **Answer: Paris**.",
            "Note: 2*3 = 6, **Answer: Paris**",
            "Answer: Paris\n\nAnswer:",
            "Answer: Paris. Answer:",
            "Answer: Paris\n\nAnswer:\n",
            "Answer: Paris\nAnswer:\nAnswer:",
            "Answer: Paris\n**Answer:**",
            '"Answer: Paris"',
        )
    ),
    ("exact", "Rome", "Answer: Rome\nNo.\nAnswer:\nParis", False),
    ("exact", "5'", "Answer: 5'", True),
    ("exact", "5'", '**Answer: 5"**', False),
    ("exact", "C*", "**Answer:** C*", True),
    ("exact", "C*", "Answer: C", False),
    *(
        ("exact", "Paris", f"Answer: {text}", True)
        for text in ("„Paris“", "„Paris”", "«Paris»", "»Paris«", "「Paris」", "Paris。", "Paris\u200b")
    ),
    ("exact", "שלום", "Answer: \u200fשלום", True),
    ("exact", "Paris", "Answer: «Paris", False),
    ("exact", "10²", "Answer: 10^2", True),
    ("exact", "10²", "Answer: 102", False),
    ("exact", "H₂O", "Answer: H2O", True),
    ("regex:Result: (.+)", "Paris", "**Result: Paris**", True),
    ("regex:Result: (.+)", "C*", "Result: C*", True),
    (r"regex:total = (\d+)", 7, "total = 6, so total = 7", True),
    (r"regex:total = (\d+)", 7, "7", False),
    ("json", {"a": 1, "b": [True]}, 'Answer: {"b": [true], "a": 1.0}', True),
    ("json", '{"a": 1}', 'Answer:\n```json\n{"a": 1}\n```', True),
    ("json", {"a": 1}, 'Answer: {"a": true}', False),
    ("json", {"a": 1}, '**Answer:** {"a": 1}', True),
    ("json", {"a": 1}, '**Answer**: `{"a": 1}`', True),
    ("json", {"a": 1}, '**answer: {"a": 1}**', True),
    ("json", {"a": "Answer: b"}, 'Answer: {"a": "Answer: b"}', True),
    ("json", {"a": 1}, 'Answer: {"a": 1}\nAnswer: {"a": 2}', False),
    ("json", {"a": 1}, 'Answer: {"a": 1}\nBecause `a` is one.', True),
    ("json", {"a": 1}, 'Answer: {"a": 1}.', True),
    ("json", {"a": 1}, 'Answer: `{"a": 1}`.', True),
    ("json", {"a": 1}, 'Answer: ```json\n{"a": 1}\n```\nBecause `a` is one.', True),
    ("json", {"a": 1}, 'Answer: as follows\n```json\n{"a": 1}\n```', True),
    ("json", {"a": 1}, 'Answer: {"a": 1} or {"a": 2}', False),
    ("json", {"a": "Answer: 1"}, 'Answer: {"a": "Answer: 1"}', True),
    ("json", {"a": 1, "b": None}, 'Answer: {"a": 1}', True),
    ("json", [{"a": 1, "b": None}], 'Answer: [{"a": 1, "b": null}]', True),
    ("json", [1, None], "Answer: [1]", False),
    ("json", {"a": 1}, "Answer: " + "[" * 100_000, False),
    ("json", 1, "Answer: NaN", False),
]


@pytest.mark.parametrize(("answer", "gold", "response", "right"), VERDICTS, ids=range(len(VERDICTS)))
def test_verdicts_of_every_kind(answer, gold, response, right):
    found = load_task([{"question": "?", "answer": gold}, {"question": "!", "answer": gold}], answer=answer)
    (one,) = found.examples("train", 1)
    assert found.verify(one, response).correct is right
    assert one.solution is None or found.verify(one, one.solution).correct
    for text in ("", "Answer:", "####", "\x00", "Answer: " + "9" * 5000):
        assert not found.verify(one, text).correct


def test_golds_that_are_not_of_their_kind_are_bad_rows():
    for answer, gold in (
        ("json", "{"),
        ("json", None),
        ("numeric", "$1.5M"),
        ("numeric", "$1.5 M"),
        ("numeric", "20 k"),
        ("numeric", "11:30"),
        ("exact", {"a": 1}),
        ("exact", []),
        ("numeric", float("nan")),
    ):
        with pytest.raises(DataError, match="row 2: column 'answer'"):
            load_task([{"question": "?", "answer": 1}, {"question": "!", "answer": gold}], answer=answer).check()


def test_a_question_may_be_repeated_with_what_is_the_same_answer():
    rows = [{"question": "Which city?", "answer": answer} for answer in ("Paris", "**paris**.")]
    assert len(both(load_task(rows, answer="exact"))) == 2
    with pytest.raises(DataError, match="row 3: the question of an earlier row with another answer"):
        load_task([*rows, {"question": "Which city?", "answer": "Rome"}], answer="exact").check()
    with pytest.raises(DataError, match="row 2: the question of an earlier row with another answer"):
        load_task([{"question": "?", "answer": gold} for gold in (-1, -2)]).check()
    for answer, one, other in (
        ("numeric", "0.5", "1/2"),
        ("json", {"a": 1, "b": None}, {"a": 1}),
        ("exact", ["Paris", "City"], ["City", "paris"]),
    ):
        assert len(both(load_task([{"question": "?", "answer": gold} for gold in (one, other)], answer=answer))) == 2
    with pytest.raises(DataError, match="row 2: the question of an earlier row with another answer"):
        load_task(
            [{"question": "?", "answer": gold} for gold in (["Paris", "City"], ["Paris", "Metropole"])], answer="exact"
        ).check()


def test_a_function_may_return_a_dataset_with_its_types():
    rows = [{"question": f"q{n}", "label": n % 2} for n in range(3)]
    classes = datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    numbers = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": [0.1, 2.5]}).cast_column(
        "answer", datasets.Value("float32")
    )
    for data, answers in ((classes, {"q0": "no", "q1": "yes", "q2": "no"}), (numbers, {"a": "0.1", "b": "2.5"})):
        assert {e.question: e.answer for e in both(TableTask(partial(lambda rows: rows, data)))} == answers


def test_a_function_may_return_a_streaming_dataset():
    classes = [{"question": f"q{n}", "label": n % 2} for n in range(3)]
    typed = datasets.Dataset.from_list(classes).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    for data in (datasets.Dataset.from_list(ROWS), typed):
        streamed = TableTask(partial(lambda rows: rows, data.to_iterable_dataset()))
        assert contents(both(streamed)) == contents(both(load_task(data)))


def test_questions_that_differ_in_case_and_blanks_stay_together(tmp_path):
    texts = [text for n in range(60) for text in (f"What is {n} + 3?", f"what  is\n{n} + 3?")]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"question": text, "answer": int(re.findall(r"\d+", text)[0]) + 3}) + "\n" for text in texts)
    )
    found = load_task(str(path))
    parts = [{int(re.findall(r"\d+", e.question)[0]) for e in found.examples(part)} for part in ("train", "eval")]
    assert parts[0].isdisjoint(parts[1]) and len(parts[0] | parts[1]) == 60 and all(len(part) > 5 for part in parts)


def test_structs_have_all_keys_and_classes_have_names(tmp_path):
    """Arrow fills structs up with null, and `datasets` stores the numbers of classes."""
    rows = [{"question": f"q{n}", "facts": {"city" if n else "symbol": "x"}, "label": n % 2} for n in range(3)]
    rows += [{"question": "q3", "facts": {"city": "y"}, "label": -1}]
    data = datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    for source in (data, str(tmp_path / "rows.parquet")):
        found = load_task(source, columns={"answer": "facts"}, answer="json")
        assert all(
            found.verify(e, f"Answer: {json.dumps(row['facts'])}").correct for e, row in zip(both(found), rows, strict=True)
        )
        named = load_task(source, bad_rows="skip")
        assert {e.question: e.answer for e in both(named)} == {"q0": "no", "q1": "yes", "q2": "no"}
    assert [e.answer for e in given_examples(data.select([1]), named, "rows")] == ["yes"]
    wide = [{"question": f"q{n}", "options": dict(zip("ABC", "xyz"[: n + 2], strict=False)), "answer": "B"} for n in range(2)]
    assert [len(e.options) for e in both(load_task(datasets.Dataset.from_list(wide)))] == [2, 3]


def test_arrays_are_lists():
    rows = [{"question": f"q{n}", "answer": np.array([f"a{n}", "b"])} for n in range(3)]
    found = load_task(rows)
    assert found.verify(found.examples("train")[0], "Answer: b").correct


def test_numbers_in_float32_are_their_shortest_decimals(tmp_path):
    """As float64, 0.1 would be 0.10000000149011612, and no answer right. Whole numbers stay what they are: 65,504, not 6.55e4."""
    values = [0.1, 12.34, 3.25, 65504.0]
    columns = {
        name: pyarrow.array(np.array(values, dtype), kind)
        for name, dtype, kind in (("answer", np.float32, pyarrow.float32()), ("half", np.float16, pyarrow.float16()))
    }
    inner = pyarrow.struct([("of", pyarrow.float32()), ("list", pyarrow.list_(pyarrow.struct([("of", pyarrow.float32())])))])
    nested = [{"of": value, "list": [{"of": value}, None]} for value in values]
    table = pyarrow.table({"question": list("abcd"), **columns, "nested": pyarrow.array(nested, inner)})
    parquet.write_table(table, tmp_path / "my.parquet")
    rows = list(open_rows(tmp_path / "my.parquet"))
    assert [row["answer"] for row in rows] == values and [row["half"] for row in rows] == [0.1, 12.34, 3.25, 65504.0]
    assert [row["nested"] for row in rows] == nested
    options = pyarrow.array([np.array(values[:3], np.float32)] * 2, pyarrow.list_(pyarrow.float32()))
    parquet.write_table(
        pyarrow.table({"question": ["a", "b"], "options": options, "answer": ["A", "B"]}), tmp_path / "choice.parquet"
    )
    assert [e.options for e in both(load_task(str(tmp_path / "choice.parquet")))] == [("0.1", "12.34", "3.25")] * 2
    assert [e.answer for e in both(load_task(str(tmp_path / "my.parquet")))] == ["0.1", "12.34", "3.25", "65504"]
    for dtype in (np.float16, np.float32):
        listed = [{"question": name, "answer": value} for name, value in zip("abcd", np.array(values, dtype), strict=True)]
        assert [e.answer for e in both(load_task(listed))] == ["0.1", "12.34", "3.25", "65504"]
    for options in (np.array(values[:3], np.float32), list(np.array(values[:3], np.float32))):
        choices = [{"question": name, "options": options, "answer": "12.34"} for name in "ab"]
        assert [(e.options, e.answer) for e in both(load_task(choices))] == [(("0.1", "12.34", "3.25"), "B")] * 2


@pytest.mark.parametrize(("first", "base"), [(1, 0), (0, 1)])
def test_numbers_of_options_whose_labels_are_other_numbers(first, base):
    """0-based numbers beside the labels 1 to 4, or the other way round: three of four are labels, too."""
    labels = [str(first + i) for i in range(4)]
    rows = [{"question": f"q{i}", "choices": {"label": labels, "text": list("wxyz")}, "answer": base + i} for i in range(4)]
    with pytest.raises(
        DataError, match=r"is the label of one option and the number of another .*--answer choice:0 or choice:1"
    ):
        both(load_task(rows))
    task = load_task(rows, answer=f"choice:{base}")
    assert sorted((e.question[:2], e.answer) for e in both(task)) == [("q0", "A"), ("q1", "B"), ("q2", "C"), ("q3", "D")]


def test_a_map_of_parquet_holds_options(tmp_path):
    options = pyarrow.array([[("A", "x"), ("B", "y")]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.string()))
    table = pyarrow.table({"question": ["a", "b"], "options": options, "answer": ["A", "B"]})
    parquet.write_table(table, tmp_path / "my.parquet")
    assert [e.options for e in both(load_task(str(tmp_path / "my.parquet")))] == [("x", "y")] * 2


def test_decimals_of_parquet_are_numbers(tmp_path):
    rows = [{"question": f"q{n}", "answer": Decimal(n) / 4} for n in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "my.parquet")
    assert [e.answer for e in both(load_task(str(tmp_path / "my.parquet")))] == ["0", "0.25", "0.5", "0.75", "1"]


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra [math]")
def test_math_is_compared_in_a_process_of_its_own(tmp_path):
    found = load_task([{"problem": f"p{n}", "solution": "So \\boxed{\\frac{1}{2}}."} for n in range(5)], answer="math")
    (one,) = found.examples("train", 1)
    assert one.answer == "\\frac{1}{2}" and found.verify(one, one.solution).correct
    for right in (
        "Answer: \\boxed{\\frac12}",
        "Answer: $0.5$",
        "Answer: \\boxed{\\frac{2}{4}}",
        "Answer: 50\\%",
        "Answer: 1/2.",
        "Answer: x = 0.5.",
        "**Answer: $0.5$ cm.**",
        "Answer: \\boxed{0.5.}",
    ):
        assert found.verify(one, right).correct, right
    proof = tmp_path / "proof"
    code = f"__import__('pathlib').Path('{proof}').touch()"
    for wrong in (
        "Answer: 1/3",
        "Answer: $1/2$ or $1/3$",
        "Answer: \\boxed{1/3} or \\boxed{1/2}",
        "Answer:",
        f"Answer: {code}",
        f"Answer: \\boxed{{{code}}}",
        f"Answer: x_{{{code}}}",
        "\\boxed{" * 9999,
    ):
        assert not found.verify(one, wrong).correct
    assert not proof.exists()
    assert found.verify(one, "so \\boxed{1/2}").lenient_correct and not found.verify(one, "so \\boxed{1/2}").correct
    guarded = GuardedTask(found, seconds=20.0)
    assert not guarded.verify(one, "Answer: 9^{9^{9^{9}}}").failed  # the comparison has its own limit
    assert guarded.verify(one, "Answer: 1/2").correct  # by a new process
    found.kind.scorer.close()


def test_what_a_math_verdict_compares():
    kind, asked = MathTask.__new__(MathTask), []
    kind.scorer = SimpleNamespace(score=lambda gold, answer: float(asked.append(answer) or answer == "0.5"))
    half = Example("u", "?", "\\frac{1}{2}")
    for response, expected in {
        "Answer: $0.5$.": (True, "0.5", True),
        "so \\boxed{0.5}": (False, None, True),
        "Answer: 1/3\n": (False, "1/3", False),
        "Answer: \\boxed{\\frac{1}{2}}": (True, "\\frac{1}{2}", True),
        "": (False, None, False),
    }.items():
        verdict = kind.verify(half, response)
        assert (verdict.correct, verdict.submitted, verdict.lenient_correct) == expected, response
    assert half.answer not in asked and not kind.equal("x", "9" * 20_001), "equal texts need no library, long ones get none"


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        ("5.", "5"),
        ("$5$.", "5"),
        ("$$\\sqrt{2}$$ .", "\\sqrt{2}"),
        ("\\(x+1\\).", "x+1"),
        ("\\[5\\]", "5"),
        ("$12$ cm.", "12"),
        ("12 cm.", "12 cm"),
        ("`12`", "12"),
        ("$12$.**", "12"),
        ("$\\$12$.", "\\$12"),
        (".5", ".5"),
        ("x = $5$.", "x = $5"),
        ("$5$ or $6$", "5$ or $6"),
        ("$5$ or 6", "5$ or 6"),
        ("no real $x$", "no real $x"),
        ("\\boxed{5.}", "5"),
        ("\\boxed{$5$} = \\boxed{5}", "5"),
        ("\\boxed{\\boxed{\\frac{1}{2}}}", "\\frac{1}{2}"),
        ("\\boxed{6} or \\boxed{5}", None),
        ("$.$", None),
        ("", None),
    ],
)
def test_the_expression_of_a_line(line, stated):
    assert expression(line) == stated
    if stated:
        assert read_gold(MathTask.__new__(MathTask), line, "")[0] == stated, "golds are read alike"


def test_math_names_its_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find_spec(name))
    with pytest.raises(ImportError, match=r"pip install 'firedistill\[math\]'"):
        load_task(ROWS, answer="math").prepare()


# Feedback


def test_fields_are_added_replaced_and_left_out():
    rows = [dict(row, hint=None) if n == 0 else row for n, row in enumerate(ROWS)]
    options = {"hint": "Hint: {hint} {{}}", "parser": "", "format": "As {answer}."}
    found = load_task(rows, feedback=options)
    first, second = both(found)[:2]
    fields = {e.uid: found.feedback(e, "#### 0", found.verify(e, "#### 0")) for e in (first, second)}
    assert [f.name for f in fields[second.uid]] == ["verifier", "provenance", "format", "hint"]
    assert fields[second.uid][2:] == (FeedbackField("format", "As 2."), FeedbackField("hint", "Hint: Double 1. {}"))
    assert [f.name for f in fields[first.uid]] == ["verifier", "provenance", "format"]  # its hint is null
    assert data_fingerprint(both(found)) != data_fingerprint(both(load_task(rows)))


def test_nan_is_a_missing_value():
    nan = float("nan")
    rows = [dict(row, hint=nan, solution=nan) if n == 0 else row for n, row in enumerate(ROWS)]
    first, second = both(load_task(rows, feedback={"hint": "{hint}"}))[:2]
    assert not first.feedback and first.solution == "#### 0" and second.feedback
    named = [type(name, (), {})() for name in ("NAType", "NaTType")]
    rows = [dict(row, hint=missing) for row, missing in zip(ROWS[:2], named, strict=True)]  # as of pandas
    assert not any(e.feedback for e in both(load_task(rows, feedback={"hint": "{hint}"})))
    wide = [{"question": f"q{n}", "A": "x", "B": "y", "C": last, "answer": "B"} for n, last in enumerate(("z", nan))]
    assert [len(e.options) for e in both(load_task(wide, columns={"options": "A,B,C"}))] == [3, 2]
    with pytest.raises(DataError, match="row 21: column 'question' is empty"):
        load_task([*ROWS, {"question": nan, "answer": 1}]).check()


def test_what_judges_an_answer_is_part_of_the_data():
    def verdicts_by(rows):
        return data_fingerprint(task(rows)(lambda row, response: True).examples("train"))

    changed, unordered = ([dict(row, limit=value) for row in ROWS] for value in (3, {0, 8}))
    assert len({verdicts_by(ROWS), verdicts_by(changed), verdicts_by(unordered)}) == 3
    assert verdicts_by(unordered) == verdicts_by([dict(row, limit={8, 0}) for row in ROWS])
    assert verdicts_by([dict(ROWS[0], part=object())] * 5) == verdicts_by([dict(ROWS[0], part=object())] * 5)
    row = {"prompt": "Write `add`.", "entry_point": "add", "tests": ["assert add(1, 2) == 3"]}
    programs = [row, {**row, "tests": ["assert add(1, 2) == 4"]}, {**row, "tests": ["import math\nassert add(1, 2) == 3"]}]
    assert len({data_fingerprint([CodeTask().example(each, "u")]) for each in programs}) == 3


@pytest.mark.parametrize(
    "text", ["{hint.__class__}", "{hint!r}", "{hint:>10}", "{hint[0]}", "{}", "{0}", "{", "}", "{{hint}", "{hnt}"]
)
def test_templates_have_columns_in_braces_and_nothing_else(text):
    with pytest.raises(DataError, match="feedback 'x': "):
        load_task(ROWS, feedback={"x": text}).prepare()


@pytest.mark.parametrize("name", ["hint", "more.hint"])
def test_a_column_that_is_named_may_begin_after_the_first_rows(name, tmp_path):
    rows = [{"question": f"q{n}", "answer": n} for n in range(SAMPLE + 60)]
    rows[SAMPLE + 50] |= {"hint": "Think."} if name == "hint" else {"more": {"hint": "Think."}}
    path = write_jsonl(tmp_path / "my.jsonl", rows)
    for options in (
        {"feedback": {"hint": f"{{{name}}}"}},
        {"columns": {"solution": name}},
        {"columns": {"category": f"{{{name}}}"}},
    ):
        assert both(load_task(path, **options)) != both(load_task(path))
    with pytest.raises(DataError, match="there is no column 'hnt'"):
        load_task(path, feedback={"hint": "{hnt}"}).prepare()
    rows[SAMPLE + 50] |= {"label": 1}  # another candidate for the answer, which nothing names
    load_task(rows, feedback={"hint": f"{{{name}}}"}).prepare()


def test_braces_in_the_data_are_data():
    rows = [{"question": "?", "answer": 1, "hint": "{answer} {{ {0.__class__} }}"}]
    (one,) = load_task(rows, feedback={"hint": "{hint}"}, eval_data=ROWS).examples("train")
    assert one.feedback == (FeedbackField("hint", "{answer} {{ {0.__class__} }}"),)


# Options and commands


def test_options_of_mappings_take_several_words():
    found = parse_settings(["--columns", "question=prompt", "answer=a.b", "--feedback", "hint={hint}", "x=a=b", "--seed", "1"])
    assert found == {
        "columns": {"question": "prompt", "answer": "a.b"},
        "feedback": {"hint": "{hint}", "x": "a=b"},
        "seed": "1",
    }
    assert parse_settings(["--columns={}", "--feedback.hint", "h"]) == {"columns": "{}", "feedback.hint": "h"}
    for wrong, match in ((["question"], "expected NAME=VALUE"), (["a=b", "a=c"], "names 'a' twice")):
        with pytest.raises(ValueError, match=match):
            parse_settings(["--columns", *wrong])


def test_the_data_command_shows_rows_and_finds_faults(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "my.jsonl", ROWS)
    assert main(["data", "my.jsonl", "--rows", "1", "--feedback", "hint=Think: {hint}"]) == 0
    out = capsys.readouterr().out
    for part in (
        "question = question",
        "20 of the first 20 are numbers",
        "train 16",
        "What is 0 + 0?",
        "Think: Double 0.",
        "[Context block 5]",
    ):
        assert part in out, part
    assert caplog.text == ""  # the report says it all
    assert main(["data", "my.jsonl", "--rows", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and [row["answer"] for row in report["rows"]] == ["0", "2"]
    judged = {item["response"]: item["verdict"] for item in report["rows"][1]["judged"]}
    assert judged["#### 2"] == "right" and judged["#### 3"] == judged[""] == "wrong"
    assert judged["#### 2 or 3"] == "wrong (right answer, wrong form)"
    write_jsonl(tmp_path / "prices.jsonl", [{"question": f"q{n}", "answer": n + 0.5} for n in range(20)])
    assert main(["data", "prices.jsonl", "--rows", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["answer"], row["wrong"]) == ("1.5", "#### 11.5") and "`1.5`" in row["teacher"] and "3/2" not in row["teacher"]
    write_jsonl(tmp_path / "empty.jsonl", [dict(row, hint="") for row in ROWS])
    assert main(["data", "empty.jsonl", "--columns", "question=question", "--feedback", "hint={hint}"]) == 2
    assert "warning: feedback: field 'hint' is left out in 16 of 16 training rows" in capsys.readouterr().out
    noisy = [{"question": f"q{n}", "answer": 0.1 * n} for n in range(20)]
    write_jsonl(tmp_path / "noisy.jsonl", noisy)
    assert main(["data", "noisy.jsonl"]) == 2
    assert "of 16 look like rounding errors" in capsys.readouterr().out
    (tmp_path / "pipe.csv").write_text("question|answer\na|1\n")
    assert main(["data", "pipe.csv"]) == 2
    assert "Separate the cells of a row by commas, semicolons or tabs; '|' is not read." in capsys.readouterr().err
    write_jsonl(tmp_path / "my.jsonl", [*ROWS, {"question": "?", "answer": ""}])
    assert main(["data", "my.jsonl"]) == 2
    assert "row 21: column 'answer' is empty -> fill it in" in capsys.readouterr().out
    assert main(["data", "my.jsonl", "--bad_rows", "skip", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == 1
    for line, match in (
        ("data", "name the data"),
        ("data none.jsonl", "there is no file"),
        ("data my.jsonl --data_dir .", "data_dir is for the published datasets"),
        ("train my.jsonl", "is data and not a recipe: train on it by --task my.jsonl"),
        ("train --model lab --task my.jsonl", "1 of 21 rows cannot be used"),
    ):
        assert main(line.split()) == 2
        assert match in capsys.readouterr().err
    assert main(["data", "arithmetic:easy", "--rows", "1", "--train_size", "5", "--eval_size", "5"]) == 0


def test_the_data_command_reads_the_split_that_is_evaluated(tmp_path, capsys):
    for split, rows in {"train": ROWS[:9], "validation": ROWS[9:13], "test": ROWS[13:16]}.items():
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    assert main(["data", str(tmp_path), "--eval_split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"] == {"train": 9, "test (the first 192)": 3}


def test_a_run_on_a_file_is_evaluated_and_resumed_with_its_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(
        tmp_path / "my.jsonl", [{"prompt": row["question"], "result": row["answer"], "hint": row["hint"]} for row in ROWS]
    )
    line = "train --task my.jsonl --columns question=prompt answer=result --feedback hint={hint} --max_steps 2 --eval_size 2"
    line += f" --model {save_checkpoint(tmp_path / 'base')} --model_dtype float32 --max_new_tokens 4 --use_cpu --save_steps 1"
    line += " --warmup_steps 1 --per_device_train_batch_size 2 --gradient_checkpointing false"
    assert main(line.split()) == 0, capsys.readouterr().err
    (run,) = map(str, Path("runs").iterdir())
    assert Path(run).name == "base-my.jsonl-fire-lr4e-06-seed0"
    assert main(["eval", run]) == 0 and main([*line.split(), "--max_steps=2"][:-1]) == 0
    write_jsonl(tmp_path / "my.jsonl", [{"prompt": row["question"], "result": row["answer"], "hint": "Other."} for row in ROWS])
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": row["question"], "result": row["answer"]} for row in ROWS])
    assert main(["eval", run, "--task", other]) == main(["eval", run, "--task", "arithmetic:easy"]) == 0
    capsys.readouterr()
    assert main(line.split()) == 2
    assert "train_data was" in capsys.readouterr().err  # the hints are part of the data


# Python


def test_functions_that_return_rows():
    @task(answer="numeric")
    def sums():
        yield from ROWS

    assert [len(sums.examples(split)) for split in ("train", "eval")] == [16, 4] and sums.name == "sums"

    @task(columns={"question": "q", "answer": "a"})
    def words(split):
        return [{"q": f"{split} {n}", "a": "x"} for n in range(3)]

    assert [e.question.split()[0] for e in words.examples("eval")] == ["eval"] * 3

    empty = task(columns={"question": "q"})(lambda split: [{"q": "?", "answer": 1}] if split == "train" else [])
    with pytest.raises(DataError, match="split 'eval', has no rows"):
        empty.check()

    assert task(answer="numeric")(lambda: ROWS).example(ROWS[1], "u").answer == "2"  # before anything else is asked of it
    with pytest.raises(ValueError, match="the task is decorated without parentheses: write @task"):
        load_task(task(lambda: ROWS))

    @task()
    def broken():
        raise KeyError("no")

    with pytest.raises(TaskFault, match="broken.. raised KeyError"):
        broken.prepare()


def test_a_verifier_is_a_function():
    def length(row, response, verdict):
        return f"{len(response)} characters, {row['hint']}"

    @task(ROWS, feedback={"length": length, "parser": "", "blank": lambda row, response, verdict: " \n"})
    def even(row, response):
        return len(response) % 2 == 0 if response != "?" else "perhaps"

    one = even.examples("train", 1)[0]
    assert even.verify(one, "ab").correct and not even.verify(one, "a").correct
    guarded = GuardedTask(even)
    assert guarded.verify(one, "?").failed
    names = {field.name: field.text for field in guarded.feedback(one, "abc", even.verify(one, "abc"))}
    assert list(names) == ["verifier", "provenance", "format", "length"] and names["length"].startswith("3 characters, Double")
    assert task([{"question": "No gold."}])(lambda row, response: True).examples("train")[0].answer == ""


def test_files_and_modules_name_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text(
        "ROWS = [{'question': str(n), 'answer': n} for n in range(5)]\n", encoding="utf-8"
    )
    source = "from firedistill import task\nfrom helper_of_mine import ROWS\n\n@task(answer='numeric')\ndef mine():\n    return ROWS\n"
    (tmp_path / "json.py").write_text(source, encoding="utf-8")  # hides no module of Python
    for name in ("./json.py:mine", f"{tmp_path}/json.py:mine"):
        assert len(load_task(name).examples("train")) == 4
    for name, match in (
        ("./none.py:mine", "there is no file .*none.py .none.py is relative to the working folder"),
        ("./json.py:yours", "has no yours"),
    ):
        with pytest.raises(ValueError, match=match):
            load_task(name)
    with pytest.raises(ValueError, match="columns is set, but the task"):
        load_task("./json.py:mine", columns={"question": "q"})


def test_objects_are_recorded_as_such(tmp_path, capsys):
    checkpoint = save_checkpoint(tmp_path / "base")
    named = run_trainer(checkpoint, tmp_path / "a")
    assert named.args.task == "tiny:ToyTask"  # the object is what the name stands for
    with pytest.raises(ValueError, match="answer, bad_rows: a task that is a ToyTask says itself"):
        run_trainer(checkpoint, tmp_path / "c", answer="exact", bad_rows="skip")
    other = run_trainer(checkpoint, tmp_path / "b", task=ROWS, answer="exact", eval_size=2, max_steps=1)
    assert other.args.task == "object:data" and other.args.model == checkpoint
    other.train()
    assert main(["eval", str(tmp_path / "b")]) == 2
    assert "the task of this run was a Python object (data)" in capsys.readouterr().err


# Async methods


class Slow(ToyTask):
    """Verdicts and feedback that wait; counts how many do at the same time."""

    def __init__(self, seconds: float = 0.05):
        self.seconds, self.running, self.most, self.events = seconds, 0, 0, []

    async def wait(self, what):
        self.running += 1
        self.most = max(self.most, self.running)
        self.events.append(what)
        await asyncio.sleep(self.seconds)
        self.running -= 1

    async def verify(self, example, response):
        await self.wait("verify")
        return ToyTask.verify(self, example, response)

    async def feedback(self, example, response, verdict):
        await self.wait("feedback")
        return ToyTask.feedback(self, example, response, verdict)


def sampled(found: Task, batch_size: int = 4):
    model, tokenizer = random_model(), byte_tokenizer()
    encoder, sampling, budget = PromptEncoder(tokenizer), Sampling(temperature=1.0, max_new_tokens=9), TokenBudget()
    engine = HFRolloutEngine(model, tokenizer, batch_size=batch_size)
    prompts, _ = fitting_prompts(found, encoder, ToyTask().examples("train", 12), sampling, budget)
    return engine, Sampler(engine, found, encoder, sampling, budget, seed=3), prompts


def outcome(rollouts):
    return [(r.example.uid, r.response.token_ids, r.verdict) for r in rollouts]


def test_async_methods_run_at_the_same_time_with_the_results_of_plain_ones():
    slow = Slow()
    guarded = [GuardedTask(found, 5.0) for found in (slow, ToyTask())]
    rollouts = [sampler.student(prompts) for _, sampler, prompts in map(sampled, guarded)]
    assert outcome(rollouts[0]) == outcome(rollouts[1]) and slow.most > 1
    slow.most = 0
    model = add_lora(random_model(), r=2, alpha=4)
    encoder = PromptEncoder(byte_tokenizer())
    selected = []
    for found in guarded:
        teacher = Teacher(model, found, encoder)
        selected.append(select_rollouts(rollouts[0], load_objective("fire", {}), teacher, TokenBudget()))
    assert slow.most > 1
    assert [r.feedback for r in selected[0].rollouts] == [r.feedback for r in selected[1].rollouts]


def test_verdicts_begin_while_others_are_sampled(monkeypatch):
    slow = Slow(0.0)
    engine, sampler, prompts = sampled(GuardedTask(slow, 5.0))
    decode = HFRolloutEngine._decode_batch

    def watched(self, *arguments):
        if slow.events:
            time.sleep(0.05)  # the loop has time to run
        slow.events.append("batch")
        return decode(self, *arguments)

    monkeypatch.setattr(HFRolloutEngine, "_decode_batch", watched)
    sampler.student(prompts)
    last = len(slow.events) - 1 - slow.events[::-1].index("batch")
    assert slow.events.count("batch") == 3 and "verify" in slow.events[:last]
    assert engine.on_response is None
    engine, sampler, prompts = sampled(GuardedTask(ToyTask(), 5.0))
    monkeypatch.setattr(HFRolloutEngine, "_response", lambda self, ids: Response(ids, "x", True))
    plain = sampler.student(prompts)  # a plain task: responses are read once, at the end
    assert [r.response.text for r in plain] == ["x"] * 12


class Forced:
    """An engine that reports another response before the one that counts."""

    on_response = None

    def generate(self, prompts, sampling, seed, progress=None, limits=None):
        for index in range(len(prompts)):
            self.on_response(index, Response([5], "abc", True))
        return [Response([5, 6], "ab", True) for _ in prompts]


def test_what_generate_returns_counts():
    _, sampler, prompts = sampled(GuardedTask(Slow(0.0), 5.0))
    sampler.engine = Forced()
    assert all(r.verdict.correct and r.verdict.submitted == "2" for r in sampler.student(prompts))


class Faulty(ToyTask):
    async def verify(self, example, response):
        if response == "raises":
            raise RuntimeError("no")
        if response == "waits":
            await asyncio.sleep(60)
        if response == "blocks":
            time.sleep(2.0)
        if response == "times out itself":
            raise TimeoutError("of its own")
        return "nonsense" if response == "nonsense" else ToyTask.verify(self, example, response)


def test_async_faults_are_named_and_time_limits_hold(monkeypatch):
    monkeypatch.setattr("firedistill.tasks.coroutines.GRACE", 0.2)
    guarded, one = GuardedTask(Faulty(), 0.3), ToyTask().examples("train", 1)[0]
    for response, match in (
        ("raises", "raised RuntimeError: no"),
        ("waits", r"took longer than 0.3 s \(task_timeout\)"),
        ("blocks", r"took longer than 0.3 s \(task_timeout\)"),
        ("times out itself", "raised TimeoutError: of its own"),
        ("nonsense", "returned a str, expected a Verdict"),
    ):
        with pytest.raises(TaskFault, match=match):
            guarded.verdict(one, response)
        assert guarded.verify(one, response).failed
        assert guarded.verdict(one, "ab").correct  # others are not held up
    before = threading.active_count()
    assert Loop.running() is Loop.running() and threading.active_count() == before


def test_calls_that_wait_behind_a_blocked_loop_are_made(monkeypatch):
    monkeypatch.setattr("firedistill.tasks.coroutines.GRACE", 0.1)
    guarded, one = GuardedTask(Faulty(), 0.2), ToyTask().examples("train", 1)[0]
    calls = [guarded.begin("verify", one, text) for text in ("blocks", "ab", "abc")]
    assert guarded.verify(one, "blocks", calls[0]).failed
    assert [guarded.verify(one, text, call).correct for text, call in zip(("ab", "abc"), calls[1:], strict=True)] == [
        True,
        False,
    ]


def test_an_async_verifier_function_trains(tmp_path, caplog):
    async def letters(row, response, verdict):
        await asyncio.sleep(0.001)
        return f"{len(response)} characters."

    @task(ROWS, feedback={"letters": letters})
    async def even(row, response):
        await asyncio.sleep(0.001)
        return Verdict(len(response) % 2 == 0, str(len(response)), "even", well_formed=True)

    caplog.set_level(logging.WARNING)
    trainer = run_trainer(save_checkpoint(tmp_path / "base"), tmp_path / "run", task=even, max_steps=2)
    trainer.train()
    assert "alpha_letters" in trainer.last_metrics and "took longer" not in caplog.text
