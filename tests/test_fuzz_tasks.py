"""Whatever a task returns, and whatever a data file holds: a value of the declared type comes, or one error that names the place.

FIREDISTILL_FUZZ=5000 python -m pytest tests/test_fuzz_tasks.py    # longer, outside of continuous integration
"""

from __future__ import annotations

import datetime
import gzip
import json
import tempfile
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import given
from hypothesis import strategies as st

from firedistill import Example, FeedbackField, Verdict, load_task
from firedistill.prompts import student_messages
from firedistill.rollout import Response, Rollout
from firedistill.run.log import json_line, rollout_columns, rollout_row
from firedistill.tasks import TASKS, DataError
from firedistill.tasks.guard import GuardedTask, TaskFault, read_examples
from test_fuzz import TEXTS, fuzz
from test_guard import Returning

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.fractions(),
    st.decimals(allow_nan=True),
    TEXTS,
    st.binary(max_size=8),
    st.dates(),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
    TEXTS.map(np.str_),
    st.booleans().map(torch.tensor),
    st.integers(-5, 5).map(torch.tensor),
    st.lists(st.integers(0, 1), max_size=3).map(np.array),
    st.lists(st.booleans(), max_size=3).map(torch.tensor),
    st.just(0).map(lambda _: 10**5000),  # which cannot be written in decimal digits
    st.sampled_from([object(), Verdict, len, Decimal("sNaN"), Fraction(1, 3), "a" * 1_000_001, Ellipsis]),
)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(TEXTS, inner, max_size=2),
        st.lists(inner, max_size=3).map(iter),
    ),
    max_leaves=5,
)
VERDICTS = st.one_of(ANY, st.builds(Verdict, *[st.one_of(ANY, st.booleans(), st.none(), TEXTS)] * 6))
FIELDS = st.builds(FeedbackField, st.one_of(SCALARS, TEXTS), st.one_of(SCALARS, TEXTS))
FEEDBACK = st.one_of(ANY, FIELDS, st.lists(FIELDS, max_size=4), st.lists(st.one_of(FIELDS, ANY), max_size=3).map(iter))
EXAMPLES = st.builds(
    Example,
    *[st.one_of(TEXTS, SCALARS)] * 3,
    labels=st.one_of(ANY, st.tuples(TEXTS)),
    options=st.one_of(ANY, st.lists(TEXTS, max_size=2)),
    solution=st.one_of(TEXTS, ANY),
    category=st.one_of(TEXTS, st.none(), ANY),
)
EXAMPLE = Example("toy/train/0", "Why?", "even")


@fuzz
@given(value=VERDICTS)
def test_every_verdict_can_be_logged(value):
    verdict = GuardedTask(Returning(verify=value), 5).verify(EXAMPLE, "text")
    assert all(type(getattr(verdict, name)) is bool for name in ("correct", "well_formed", "lenient_correct", "failed"))
    assert type(verdict.expected) is str and (verdict.submitted is None or type(verdict.submitted) is str)
    row = rollout_row(Rollout(EXAMPLE, [1], Response([2], "text", True), verdict), 1, "prompt", True)
    pa.Table.from_pylist([row], schema=rollout_columns())
    assert json_line({"accuracy": sum([verdict.correct])})


@fuzz
@given(value=FEEDBACK)
def test_feedback_is_fields_or_a_fault(value):
    try:
        fields = GuardedTask(Returning(feedback=value), 5).feedback(EXAMPLE, "text", Verdict(False, None, "even"))
    except TaskFault as fault:
        assert str(fault).startswith("toy/train/0: feedback of Returning")
    else:
        assert all(type(field) is FeedbackField and type(field.name) is type(field.text) is str for field in fields)
        assert len({field.name for field in fields}) == len(fields)


@fuzz
@given(value=ANY)
def test_a_prompt_is_text_or_a_fault(value):
    try:
        (message,) = student_messages(GuardedTask(Returning(prompt=value), 5), EXAMPLE)
    except TaskFault as fault:
        assert str(fault).startswith("toy/train/0: prompt of Returning returned a ") or "characters" in str(fault)
    else:
        assert value in message["content"]


@fuzz
@given(value=st.one_of(ANY, st.lists(st.one_of(EXAMPLES, ANY), max_size=3), st.lists(EXAMPLES, max_size=3).map(iter)))
def test_examples_are_examples_or_a_fault(value):
    task = GuardedTask(Returning(examples=value))
    try:
        examples = task.examples("train", 2)
    except TaskFault as fault:
        assert str(fault).startswith("examples('train') of Returning")
        return
    assert len(examples) <= 2 and read_examples(examples, "again") == examples
    for example in examples:
        assert type(example.uid) is str and isinstance(example.question, str)
        assert student_messages(task, example)[0]["content"].endswith(example.question)


# ---- Data files ------------------------------------------------------------------------------------------------------------

CHOICES = {"text": ["one", "two"], "label": ["A", "B"]}
ROWS = {
    "gsm8k": {"question": "What is 6 times 7?", "answer": "6*7=<<6*7=42>>42\n#### 42"},
    "asdiv": {"body": "Two apples.", "question": "How many?", "answer": "2 (apples)", "formula": "1+1=2"},
    "aqua_rat": {"question": "Which?", "options": ["A)1", "B)2"], "rationale": "It is.\nANSWER:A", "correct": "A"},
    "arc_challenge": {"question": "Which?", "choices": CHOICES, "answerKey": "A"},
    "winogrande": {"sentence": "The _ ran.", "option1": "dog", "option2": "cat", "answer": "1"},
    "wic": {"word": "a", "sentence1": "a b", "sentence2": "c a", "label": 1},
    "mmlu_pro": {"question": "Which?", "options": ["1", "2"], "answer": "A", "answer_index": 0, "category": "physics"},
}
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)
COLUMNS = st.sampled_from(
    [pa.int64(), pa.float32(), pa.string(), pa.binary(), pa.list_(pa.string()), pa.timestamp("ns"), pa.null()]
)


INSERTED = [b"\n", b"\x00", b"\xff", b"[" * 5000, b"9" * 5000, b"{}", b"NaN", b"\xef\xbb\xbf"]


@st.composite
def changed_rows(draw, name):
    """Some rows of a task, with columns removed, replaced by another value, or added."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = dict(ROWS[name])
        for column in draw(st.lists(st.sampled_from([*row, "other"]), max_size=2)):
            if draw(st.booleans()):
                row.pop(column, None)
            else:
                row[column] = draw(JSON_VALUES)
        rows.append(row)
    return rows


def damaged(draw, data: bytes) -> bytes:
    """The bytes, cut, with some replaced, with others inserted, or as they are."""
    how = draw(st.sampled_from(["cut", "flip", "insert", "whole", "junk"]))
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    if how == "cut":
        return data[:at]
    if how == "flip":
        return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + 1 :]
    if how == "insert":
        return data[:at] + draw(st.sampled_from(INSERTED)) + data[at:]
    return data if how == "whole" else draw(st.binary(max_size=60))


def read_or_refuse(name: str, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    task = GuardedTask(load_task(name))
    try:
        examples = task.examples("train", 5, data_dir=str(path.parent))
    except DataError as error:
        assert str(path) in str(error), "the error names the file"
        return
    for example in examples:
        verdict = task.verify(example, f"#### {example.answer}\nAnswer: {example.answer}")
        assert not verdict.failed and example.question.strip() and example.uid.startswith(f"{name}/")
        assert task.feedback(example, "", verdict)


@fuzz
@given(data=st.data(), name=st.sampled_from(list(ROWS)), suffix=st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_json_lines_are_examples_or_one_complaint(data, name, suffix):
    rows = data.draw(changed_rows(name))
    content = damaged(data.draw, "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "surrogatepass"))
    if suffix == ".jsonl.gz":
        content = damaged(data.draw, gzip.compress(content, compresslevel=1))
    with tempfile.TemporaryDirectory() as folder:
        read_or_refuse(name, Path(folder) / f"{TASKS[name].train_split}{suffix}", content)


@fuzz
@given(data=st.data(), name=st.sampled_from(list(ROWS)))
def test_parquet_files_are_examples_or_one_complaint(data, name):
    columns = {column: [value] * 2 for column, value in ROWS[name].items()}
    for column in data.draw(st.lists(st.sampled_from([*columns, "other"]), max_size=2)):
        kind = data.draw(COLUMNS)
        value = {pa.int64(): 3, pa.float32(): float("nan"), pa.string(): "x", pa.binary(): b"\xff"}.get(kind)
        value = datetime.datetime(2200, 1, 1) if kind == pa.timestamp("ns") else value
        columns[column] = pa.array([value, None], kind) if data.draw(st.booleans()) else columns.get(column, [None, None])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{TASKS[name].train_split}.parquet"
        pq.write_table(pa.table(columns), path)
        read_or_refuse(name, path, damaged(data.draw, path.read_bytes()))
