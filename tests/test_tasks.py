"""Tasks: prompts, golds, splits, uids and errors, on rows written here and on the real data if it is available."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from firedistill.tasks import TASKS, DataError, Example, NumericTask, Task, Verdict, isolated, load_task
from firedistill.tasks import gym as gym_module
from firedistill.tasks.isolated import IsolatedScorer
from firedistill.tasks.sources import PARQUET_EXPORT

ROWS = {
    "gsm8k": {
        "question": "Tom has 3 bags of 400 nails. How many nails?",
        "answer": "He has 3*400=<<3*400=1200>>1200 nails.\nThat is all.\n#### 1,200",
    },
    "asdiv": {
        "body": "Two red pens and seven blue pens are in a box. ",
        "question": "How many pens are in the box?",
        "solution_type": "Addition",
        "answer": "9 (pens)",
        "formula": "2+7=9",
    },
    "aqua_rat": {
        "question": "What is 3 times 4?",
        "options": ["A)10", "B)11", "C)A)12", "D)D)13", "E)None of these"],
        "rationale": "3 * 4 = 12\nAnswer: C",
        "correct": "C",
    },
    "arc_challenge": {
        "id": "X_1",
        "question": "Which one is a gas?",
        "choices": {"text": ["stone", "air", "milk"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
    "winogrande": {
        "sentence": "Ann thanked Eve because _ had helped.",
        "option1": "Ann",
        "option2": "Eve",
        "answer": "2",
    },
    "wic": {
        "word": "bank",
        "sentence1": "A bank by the river.",
        "sentence2": "The bank is closed.",
        "start1": 2,
        "start2": 4,
        "end1": 6,
        "end2": 8,
        "idx": 0,
        "label": 0,
    },
    "mmlu_pro": {
        "question_id": 1,
        "question": " Which organelle makes ATP? ",
        "options": ["Nucleus", "N/A is not an organelle", "Mitochondrion", "Ribosome", "N/A", "N/A"],
        "answer": "C",
        "answer_index": 1,
        "cot_content": "",
        "category": "biology",
        "src": "own",
    },
}
PROMPTS = {
    "gsm8k": "Tom has 3 bags of 400 nails. How many nails?",
    "asdiv": "Two red pens and seven blue pens are in a box.\nHow many pens are in the box?",
    "aqua_rat": "What is 3 times 4?\n\nChoices:\nA. 10\nB. 11\nC. A)12\nD. 13\nE. None of these",
    "arc_challenge": "Which one is a gas?\n\nChoices:\nA. stone\nB. air\nC. milk",
    "winogrande": (
        "Choose the option that best fills the blank in the sentence. Resolve the reference using commonsense reasoning.\n\n"
        "Sentence:\nAnn thanked Eve because _ had helped.\n\nChoices:\nA. Ann\nB. Eve"
    ),
    "wic": (
        "Consider the word 'bank' in the two sentences below. "
        "Determine whether it has the same meaning in both sentences.\n\n"
        "Sentence 1:\nA bank by the river.\n\nSentence 2:\nThe bank is closed.\n\n"
        "Choices:\nA. Different meaning\nB. Same meaning"
    ),
    "mmlu_pro": (
        "Which organelle makes ATP?\n\nChoices:\nA. Nucleus\nB. N/A is not an organelle\nC. Mitochondrion\nD. Ribosome"
    ),
}
ANSWERS = {
    "gsm8k": "1200",
    "asdiv": "9",
    "aqua_rat": "C",
    "arc_challenge": "B",
    "winogrande": "B",
    "wic": "A",
    "mmlu_pro": "C",
}
SOLUTIONS = {
    "gsm8k": "He has 3*400=1200 nails.\nThat is all.\n#### 1200",
    "asdiv": "2 + 7 = 9\n#### 9",
    "aqua_rat": "3 * 4 = 12\nAnswer: C",
    **{name: f"Answer: {ANSWERS[name]}" for name in ("arc_challenge", "winogrande", "wic", "mmlu_pro")},
}
NAMES = sorted(ROWS)
MATH = (
    "Work through the problem step by step, showing your arithmetic. Then, on a new final line, write the final answer as "
    "`#### ` followed by the number only (for example `#### 42`). Write nothing after that line."
)
CHOICE = (
    "Reason step by step about the options. Then, on a new final line, write `Answer: ` followed by the single option letter "
    "only (for example `Answer: B`). Write nothing after that line."
)


def write_json_lines(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def canonical(task: Task, answer: str) -> str:
    return f"Some reasoning.\n{task.final_marker} {answer}"


def wrong_answer(example: Example) -> str:
    return next((label for label in example.labels if label != example.answer), "987654321")


def word_problems(count: int):
    return [{"question": f"What is {k} + 1?", "answer": f"It is {k + 1}.\n#### {k + 1}"} for k in range(count)]


# One row of each task


@pytest.mark.parametrize("name", NAMES)
def test_prompt_gold_and_solution_of_one_row(name):
    task = load_task(name)
    example = task.example(ROWS[name], uid=f"{name}/train/0")
    assert task.name == name and example.uid == f"{name}/train/0"
    assert task.prompt(example) == PROMPTS[name]
    assert example.answer == ANSWERS[name]
    assert example.solution == SOLUTIONS[name]
    assert len(example.labels) == len(example.options)
    assert hash(example) == hash(task.example(ROWS[name], uid=f"{name}/train/0"))


@pytest.mark.parametrize("name", NAMES)
def test_kind_marker_and_instruction(name):
    task = load_task(name)
    if name in ("gsm8k", "asdiv"):
        assert (task.type_name, task.final_marker, task.format_instruction) == ("math", "####", MATH)
    else:
        assert (task.type_name, task.final_marker, task.format_instruction) == ("multiple_choice", "Answer:", CHOICE)


@pytest.mark.parametrize("name", NAMES)
def test_verdicts(name):
    task = load_task(name)
    example = task.example(ROWS[name], uid="u")
    right = task.verify(example, canonical(task, example.answer))
    assert right == Verdict(True, example.answer, example.answer, well_formed=True, lenient_correct=True)
    wrong = task.verify(example, canonical(task, wrong_answer(example)))
    assert not wrong.correct and wrong.submitted == wrong_answer(example) and wrong.expected == example.answer
    empty = task.verify(example, "")
    assert not empty.correct and empty.submitted is None and not empty.well_formed
    assert len(task.feedback(example, "", empty)) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_in_another_form_is_lenient_correct(name):
    task = load_task(name)
    example = task.example(ROWS[name], uid="u")
    verdict = task.verify(example, f"The answer is \\boxed{{{example.answer}}}.\nThat was easy.")
    assert not verdict.correct and not verdict.well_formed and verdict.lenient_correct


def test_arc_letters_are_kept():
    row = {**ROWS["arc_challenge"], "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}
    assert load_task("arc_challenge").example(row, uid="u").answer == "A"


def test_wic_labels():
    assert load_task("wic").example({**ROWS["wic"], "label": 1}, uid="u").answer == "B"


@pytest.mark.parametrize(
    ("rationale", "solution"),
    [
        ("x = 3\nANSWER:C", "x = 3\nAnswer: C"),
        ("x = 3\nThe correct answer is (C).", "x = 3\nAnswer: C"),
        ("x = 3\nSo the answer is c.", "x = 3\nAnswer: C"),
        ("x = 3\nAnswer : Option C", "x = 3\nAnswer: C"),
        ("x = 3. Answer D", "x = 3. Answer D\nAnswer: C"),
        ("Answer: C", "Answer: C"),
        ("  ", "Answer: C"),
        (None, "Answer: C"),
    ],
)
def test_aqua_rationales(rationale, solution):
    assert load_task("aqua_rat").example({**ROWS["aqua_rat"], "rationale": rationale}, uid="u").solution == solution


def test_mmlu_pro_prefers_the_letter_and_falls_back_to_the_index():
    task = load_task("mmlu_pro")
    assert task.example(ROWS["mmlu_pro"], uid="u").answer == "C"
    assert task.example({**ROWS["mmlu_pro"], "answer": None}, uid="u").answer == "B"
    assert task.example({**ROWS["mmlu_pro"], "cot_content": "A: ATP.\nDone"}, uid="u").solution == "ATP.\nDone\nAnswer: C"


@pytest.mark.parametrize(
    ("formula", "working"),
    [
        ("3*4=12; 12-2=10", "3 * 4 = 12\n12 - 2 = 10"),
        ("(2+3)*4=20", "(2 + 3) * 4 = 20"),
        ("17/5=3 r2", "17/5=3 r2"),
        ("x:The number; 5x-17=23", "x:The number\n5x-17=23"),
        ("2.5-0.5=2", "2.5 - 0.5 = 2"),
    ],
)
def test_asdiv_formulas(formula, working):
    assert load_task("asdiv").example({**ROWS["asdiv"], "formula": formula}, uid="u").solution == f"{working}\n#### 9"


def test_asdiv_drops_rows_without_a_number(tmp_path):
    rows = [{**ROWS["asdiv"], "body": f"Story {k}."} for k in range(10)] + [{**ROWS["asdiv"], "answer": "Mrs. Hilt"}]
    write_json_lines(tmp_path / "validation.jsonl", rows)
    both = [load_task("asdiv").examples(split, data_dir=tmp_path) for split in ("train", "eval")]
    assert [len(examples) for examples in both] == [8, 2]
    with pytest.raises(DataError, match="Mrs. Hilt"):
        load_task("asdiv").example(rows[-1], uid="u")


# Splits, shuffles, uids


@pytest.mark.parametrize(
    "place", ["train.jsonl", "train.jsonl.gz", "train.parquet", "gsm8k/train.jsonl", "gsm8k/train.parquet"]
)
def test_every_local_form_gives_the_same_examples(tmp_path, place):
    rows = word_problems(20)
    rows[3]["question"] = "One\u2028row,\u0085not three"
    path = tmp_path / place
    if place.endswith(".parquet"):
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_json_lines(path, rows)
    examples = load_task("gsm8k").examples("train", seed=3, data_dir=str(tmp_path))
    assert sorted(int(example.uid.rpartition("/")[2]) for example in examples) == list(range(20))
    for example in examples:
        index = int(example.uid.removeprefix("gsm8k/train/"))
        assert (example.question, example.answer) == (rows[index]["question"], str(index + 1))


def test_seeds_and_counts(tmp_path):
    write_json_lines(tmp_path / "train.jsonl", word_problems(50))
    task = load_task("gsm8k")

    def load(**options):
        return task.examples("train", data_dir=tmp_path, **options)

    assert load(seed=1) == load(seed=1)
    assert load(seed=1) != load(seed=2) and set(load(seed=1)) == set(load(seed=2))
    assert load(seed=1, n=7) == load(seed=1)[:7]
    assert load(n=0) == [] and len(load(n=500)) == 50
    assert [example.uid for example in load(n=3)] == ["gsm8k/train/38", "gsm8k/train/11", "gsm8k/train/1"]
    with pytest.raises(ValueError, match="at least 0"):
        load(n=-1)


def test_a_divided_split_is_disjoint_complete_and_independent_of_seed_and_order(tmp_path):
    rows = [{**ROWS["asdiv"], "body": f"Story {k // 2}."} for k in range(100)]  # every problem twice
    write_json_lines(tmp_path / "a" / "validation.jsonl", rows)
    write_json_lines(tmp_path / "b" / "validation.jsonl", rows[::-1])
    task = load_task("asdiv")
    train, held_out = (task.examples(split, data_dir=tmp_path / "a") for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (80, 20)
    assert not {example.question for example in train} & {example.question for example in held_out}
    assert {example.uid for example in train + held_out} == {f"asdiv/validation/{k}" for k in range(100)}
    assert set(task.examples("eval", seed=9, data_dir=tmp_path / "a")) == set(held_out)
    turned = task.examples("eval", data_dir=tmp_path / "b")
    assert {example.question for example in turned} == {example.question for example in held_out}


@pytest.mark.parametrize(
    ("name", "split", "resolved"),
    [
        ("gsm8k", "train", ("train", None)),
        ("gsm8k", "eval", ("test", None)),
        ("gsm8k", "test", ("test", None)),
        ("asdiv", "train", ("validation", "train")),
        ("asdiv", "eval", ("validation", "eval")),
        ("asdiv", "validation", ("validation", "eval")),
        ("aqua_rat", "eval", ("validation", None)),
        ("aqua_rat", "test", ("test", None)),
        ("arc_challenge", "validation", ("validation", None)),
        ("arc_challenge", "test", ("test", None)),
        ("winogrande", "eval", ("validation", None)),
        ("wic", "validation", ("validation", None)),
        ("mmlu_pro", "train", ("test", "train")),
        ("mmlu_pro", "test", ("test", "eval")),
        ("mmlu_pro", "validation", ("validation", None)),
    ],
)
def test_split_names(name, split, resolved):
    assert load_task(name).resolve_split(split) == resolved


@pytest.mark.parametrize(
    ("name", "split"), [("gsm8k", "validation"), ("winogrande", "test"), ("wic", "test"), ("asdiv", "dev")]
)
def test_an_unknown_split_lists_the_known_ones(name, split):
    with pytest.raises(ValueError, match=f"{name} has no split '{split}'. Use 'train' .*'eval'"):
        load_task(name).examples(split)


def test_mmlu_pro_is_balanced_and_ignores_other_categories(tmp_path):
    categories = [*load_task("mmlu_pro").categories, "law"]
    rows = [
        {**ROWS["mmlu_pro"], "question": f"Question {k}?", "category": categories[k % 7], "question_id": k} for k in range(350)
    ]
    write_json_lines(tmp_path / "mmlu_pro" / "test.jsonl.gz", rows)
    train = load_task("mmlu_pro").examples("train", data_dir=tmp_path)
    held_out = load_task("mmlu_pro").examples("eval", data_dir=tmp_path)
    assert len(train) == 240 and len(held_out) == 60 and not set(train) & set(held_out)
    for start in (0, 6, 12):
        assert {example.category for example in train[start : start + 6]} == set(categories[:6])


# Errors


def failure(task_name, tmp_path, split="train"):
    with pytest.raises(DataError) as caught:
        load_task(task_name).examples(split, data_dir=str(tmp_path))
    return str(caught.value)


def changed(name, **fields):
    return {**ROWS[name], **fields}


@pytest.mark.parametrize(
    ("name", "row", "parts"),
    [
        ("gsm8k", {"question": "q"}, ["'answer' is missing", "question", "column names of the hub"]),
        ("gsm8k", changed("gsm8k", question=7), ["'question'", "expected text", "int 7", "JSON string"]),
        ("gsm8k", changed("gsm8k", question="  "), ["'question'", "only blanks"]),
        ("gsm8k", changed("gsm8k", answer="1200"), ["'answer'", "#### <number>"]),
        ("gsm8k", changed("gsm8k", answer="so\n#### none"), ["'answer'", "#### <number>"]),
        ("aqua_rat", changed("aqua_rat", correct="F"), ["'correct'", "A, B, C, D, E", "'F'"]),
        ("aqua_rat", changed("aqua_rat", options="A)1"), ["'options'", "list of texts", "str 'A)1'"]),
        ("aqua_rat", changed("aqua_rat", options=["A)1"]), ["'options'", "2 to 26", "found 1"]),
        ("arc_challenge", changed("arc_challenge", choices=None), ["'choices'", "mapping", "null"]),
        ("arc_challenge", changed("arc_challenge", choices={"text": ["a", "b"]}), ["'choices.label' is missing"]),
        ("arc_challenge", changed("arc_challenge", choices={"text": ["a", "b"], "label": ["A"]}), ["as many labels as texts"]),
        ("arc_challenge", changed("arc_challenge", answerKey="B"), ["'answerKey'", "1, 2, 3", "'B'"]),
        ("winogrande", changed("winogrande", answer=""), ["'answer'", "only blanks"]),
        ("winogrande", changed("winogrande", answer="3"), ["'answer'", "1, 2", "'3'"]),
        ("wic", changed("wic", label=-1), ["'label'", "0, 1", "-1"]),
        ("wic", changed("wic", label="1"), ["'label'", "integer", "str '1'"]),
    ],
)
def test_a_faulty_row_is_named(tmp_path, name, row, parts):
    path = write_json_lines(tmp_path / "train.jsonl", [ROWS[name], row])
    message = failure(name, tmp_path)
    for part in [str(path), "row 2", "field", *parts]:
        assert part in message


def test_a_faulty_row_of_a_divided_split_is_named(tmp_path):
    write_json_lines(tmp_path / "test.jsonl", [ROWS["mmlu_pro"], changed("mmlu_pro", category=None)])
    assert "row 2: field 'category': expected text, found null" in failure("mmlu_pro", tmp_path)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"question": "a"', "one complete JSON object per line"),
        (b"[1]", "not a JSON object (list [1])"),
        (b"\xff{}", "UTF-8"),
        (b'{"question": %s}' % (b"9" * 5000), "one complete JSON object"),
        (b"[" * 100_000, "one complete JSON object"),
    ],
    ids=lambda value: str(value[:12]),
)
def test_malformed_lines(tmp_path, line, part):
    good = json.dumps(ROWS["gsm8k"]).encode()
    (tmp_path / "train.jsonl").write_bytes(good + b"\n\n" + line + b"\n")
    message = failure("gsm8k", tmp_path)
    assert "train.jsonl, row 3" in message and part in message


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.parquet"])
def test_a_file_with_the_wrong_suffix(tmp_path, name):
    (tmp_path / name).write_bytes(b"plain text, long enough to be read")
    assert name in failure("gsm8k", tmp_path) and "download or write it again" in failure("gsm8k", tmp_path)


def test_texts_of_a_parquet_file_that_are_not_utf_8(tmp_path):
    texts = pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"question": texts, "answer": ["#### 1"]}), tmp_path / "train.parquet")
    assert "train.parquet, row 1: values that cannot be read" in failure("gsm8k", tmp_path)


def test_whatever_a_row_makes_a_task_raise_names_the_row(tmp_path):
    class Divides(TASKS["gsm8k"]):
        def example(self, row, uid):
            raise ZeroDivisionError("by zero")

    path = write_json_lines(tmp_path / "train.jsonl", [ROWS["gsm8k"]])
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}, row 1: ZeroDivisionError: by zero"):
        Divides().examples("train", data_dir=tmp_path)


def test_a_truncated_file(tmp_path):
    path = write_json_lines(tmp_path / "train.jsonl.gz", word_problems(100))
    path.write_bytes(path.read_bytes()[:-20])
    assert "download or write it again" in failure("gsm8k", tmp_path)


def test_a_missing_split_lists_what_is_there(tmp_path):
    write_json_lines(tmp_path / "gsm8k" / "train.jsonl.gz", word_problems(2))
    (tmp_path / "asdiv").mkdir()
    message = failure("gsm8k", tmp_path, "eval")
    for part in ("split 'test'", "test.jsonl", "test.parquet", "train.jsonl.gz", "asdiv/"):
        assert part in message
    assert "is not a folder" in failure("gsm8k", tmp_path / "nowhere")


def test_an_unreachable_hub_points_to_local_files(monkeypatch):
    def refuse(*arguments, **options):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(DataError) as caught:
        load_task("gsm8k").examples("eval")
    for part in ("openai/gsm8k (main)", "'test'", "ConnectionError: no route", "--data_dir", "test.jsonl", "sub-folder gsm8k"):
        assert part in str(caught.value)


def test_arguments_of_the_hub_request(monkeypatch):
    calls = []

    def answer(identifier, **options):
        calls.append((identifier, options))
        return [ROWS["wic" if "glue" in identifier else "gsm8k"]]

    monkeypatch.setattr("datasets.load_dataset", answer)
    assert load_task("gsm8k").examples("train")[0].uid == "gsm8k/train/0"
    assert load_task("wic").examples("eval")[0].uid == "wic/validation/0"
    assert calls == [
        ("openai/gsm8k", {"split": "train", "revision": None, "name": "main"}),
        (
            "aps/super_glue",
            {
                "split": "validation",
                "revision": PARQUET_EXPORT,
                "data_files": {"validation": "wic/validation/*.parquet"},
            },
        ),
    ]


# Names


def test_built_in_names():
    assert sorted(TASKS) == NAMES
    assert all(isinstance(load_task(name), Task) for name in TASKS)


@pytest.mark.parametrize(
    ("name", "close"), [("gsm", "gsm8k"), ("arc", "arc_challenge"), ("mmlu_pro_six", "mmlu_pro"), ("GSM8K", "gsm8k")]
)
def test_an_unknown_name_suggests_close_ones(name, close):
    with pytest.raises(ValueError, match=f"unknown task '{name}'. Did you mean .*{close}.*Known tasks: gsm8k, .*arithmetic"):
        load_task(name)


def test_arithmetic_is_found_with_and_without_a_level():
    assert load_task("arithmetic").name == load_task("arithmetic:mixed").name == "arithmetic"
    with pytest.raises(ValueError, match="no_such_level"):
        load_task("arithmetic:no_such_level")


@pytest.mark.parametrize("name", ["", ":", "gym:", "no_such_module:MyTask", "no_such.module:MyTask"])
def test_other_unknown_names(name):
    with pytest.raises(ValueError, match="unknown task"):
        load_task(name)


OWN_TASK = """
from firedistill.tasks import Example, Task, Verdict

class Capitals(Task):
    name = "capitals"
    final_marker = "Answer:"

    def example(self, row, uid):
        return Example(uid=uid, question=f"Capital of {row['country']}?", answer=row["capital"])

    def verify(self, example, response):
        submitted = response.rpartition("Answer:")[2].strip() or None
        return Verdict(submitted == example.answer, submitted, example.answer, "Answer:" in response)

instance = Capitals()
number = 3
"""


def test_a_user_defined_task(tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(OWN_TASK)
    write_json_lines(tmp_path / "train.jsonl", [{"country": "Peru", "capital": "Lima"}, {"country": "Chad"}])
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        task = load_task("own_tasks:Capitals")
        assert load_task("own_tasks:instance").name == "capitals"
        assert sys.path == before
        example = task.example({"country": "Peru", "capital": "Lima"}, uid="capitals/train/0")
        verdict = task.verify(example, "Answer: Cusco")
        assert [field.name for field in task.feedback(example, "Answer: Cusco", verdict)][0] == "verifier"
        with pytest.raises(DataError, match="row 2: KeyError: 'capital'"):
            task.examples("train", data_dir=tmp_path)
        with pytest.raises(DataError, match="pass data_dir"):
            task.examples("train")
        with pytest.raises(ValueError, match="own_tasks has no Capital; did you mean Capitals"):
            load_task("own_tasks:Capital")
        with pytest.raises(ValueError, match="is not a task"):
            load_task("own_tasks:number")
    finally:
        sys.modules.pop("own_tasks", None)


def test_a_failing_import_inside_a_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_tasks.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModuleNotFoundError, match="importing broken_tasks raised ModuleNotFoundError: .*a_package_that_nobody_has"
    ):
        load_task("broken_tasks:MyTask")


# reasoning-gym


@pytest.fixture
def gym():
    pytest.importorskip("reasoning_gym")
    return load_task


def test_gym_examples_are_reproducible_and_disjoint(gym):
    task = gym("gym:chain_sum")
    train = task.examples("train", n=50, seed=1)
    assert train == task.examples("train", n=50, seed=1)
    assert train[:5] == task.examples("train", n=5, seed=1)
    assert train != task.examples("train", n=50, seed=2)
    held_out = task.examples("eval", n=50, seed=1)
    seeds = [[int(example.uid.rpartition("/")[2]) for example in examples] for examples in (train, held_out)]
    assert max(seeds[0]) < 2**30 <= min(seeds[1])
    assert all(example.uid.startswith("gym:chain_sum/") for example in train)
    with pytest.raises(ValueError, match="use 'train' or 'eval'"):
        task.examples("test")


@pytest.mark.parametrize(
    "dataset", ["chain_sum", "caesar_cipher", "spell_backward", "polynomial_multiplication", "rotate_matrix", "rush_hour"]
)
def test_gym_golds_are_right_and_other_answers_wrong(gym, dataset):
    task = gym(f"gym:{dataset}")
    for example in task.examples("eval", n=3):
        if example.answer:  # rush_hour publishes no gold
            assert task.verify(example, f"Well.\n#### {example.answer}").correct
        assert not task.verify(example, "Well.\n#### 31337 zebra").correct
        assert not task.verify(example, "").correct
        assert len(task.feedback(example, "", task.verify(example, ""))) == 4


def test_gym_accepts_another_form_of_a_number(gym):
    task = gym("gym:chain_sum")
    example = task.examples("train", n=1)[0]
    assert task.verify(example, f"#### {example.answer}.0").correct


def test_gym_reads_a_text_without_its_markup(gym):
    task = gym("gym:spell_backward")
    example = task.examples("train", n=1)[0]
    for response in ("**#### {}**", "`#### {}`", "#### {}\n####", "#### {} ####"):
        assert task.verify(example, response.format(example.answer)).correct, response
    assert not task.verify(example, "####").well_formed


def test_gym_evaluates_nothing_harmful_and_times_out(gym, tmp_path):
    task = gym("gym:polynomial_multiplication")
    task._isolated_scorer.seconds = 1.0
    example = task.examples("eval", n=1)[0]
    proof = tmp_path / "proof"
    assert not task.verify(example, f"#### __import__('pathlib').Path({str(proof)!r}).touch()").correct
    assert not task.verify(example, f"#### open({str(proof)!r}, 'w')").correct
    assert not task.verify(example, f"#### (exec)('open({str(proof)!r}, 1)')").correct
    attack = f'"open%c{str(proof)!r}, %cw%c%c" % (40, 39, 39, 41)'  # a text without a call
    for text in (f"exp({attack})", f"[exp({attack}) for exp in [exec]]", f"[exp := exec, exp({attack})]"):
        assert not task.verify(example, f"#### {text}").correct
    assert not task.verify(example, f"#### [exec #+\r({attack})]").correct
    assert not proof.exists()
    assert not task.verify(example, "#### 9**9**9**9**9").correct
    assert task.verify(example, f"#### 0 + ({example.answer})").correct  # a new process, after the one that hung
    task._isolated_scorer.close()


def test_gym_runs_no_answer_that_is_python(gym, tmp_path):
    task, proof = gym("gym:spiral_matrix"), tmp_path / "proof"
    example = task.examples("eval", n=1)[0]
    attack = f'"open%c{str(proof)!r}, %cw%c%c" % (40, 39, 39, 41)'
    for text in (f"[exp({attack}) for exp in [exec]]", f"[(exp := exec), exp({attack})]", f"[exec #+\r({attack})]"):
        assert not task.verify(example, f"#### {text}").correct
    assert not proof.exists()
    task._isolated_scorer.close()
    numbers = [int(number) for number in example.answer.split()]
    assert task._mark(str(numbers), example) > 0.0, "a list is read"
    task._isolated_scorer.close()


def test_gym_hands_no_text_to_sympy(gym, tmp_path):
    task, proof = gym("gym:simple_integration"), tmp_path / "proof"
    example = task.examples("eval", n=1)[0]
    for text in (
        f"\"open%c{str(proof)!r}, 'w')\" % 40",
        f"[\"open%c{str(proof)!r}, 'w')\" % 40]",
        f"f\"open{{40:c}}{str(proof)!r}, 'w')\"",
    ):
        assert not task.verify(example, f"#### {text}").correct
    letters = [
        f"chr {ord(letter) - 1}.9[9]" for letter in f"open({str(proof)!r}, 'w')"
    ]  # sympy reads 111.9[9] as (111 + 9/10 + 9/90)
    for text in ("+".join(letters), f"sin({'+'.join(letters)})"):
        assert not task.verify(example, f"#### {text}").correct
    assert not proof.exists() and task.verify(example, f"#### 0 + {example.answer}").correct
    task._isolated_scorer.close()


def test_numbers_that_are_not_used_do_not_count(gym):
    task = gym("gym:countdown")
    example = task.examples("eval", n=1)[0]
    target, numbers = example.metadata["metadata"]["target"], example.metadata["metadata"]["numbers"]
    remark = f"{'+'.join(['True'] * target)} # {' '.join(map(str, numbers))}"
    all_of_them = f"({'+'.join(map(str, numbers))})"
    symbols = f"{'+'.join(['x/x'] * target)} + (x-x)*{all_of_them}"
    for cheat in (remark, symbols, f"{target:#x} + 0x0*{all_of_them}"):
        assert not task.verify(example, f"#### {cheat}").correct
    assert task.verify(example, f"#### 0 + {example.metadata['metadata']['expression']}").correct is False, (
        "0 is not one of them"
    )
    assert task._mark(f"({example.metadata['metadata']['expression']})", example) == 1.0
    task._isolated_scorer.close()


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4*(6 + 10 - 9) - 4", False),  # five numbers
        ("(9 - 4)*6 - 10 + 4", False),
        ("(10 - 4)*(9 - 6) + 6", False),
        ("4*6 + 9 - 10", False),
        ("4*6 + 9/10", False),  # 24.9
        ("6*4*1*1", False),
        ("(10 - 6)*(9 - 4) + 4", False),
        ("6*(10 - 9)*4", True),
        ("-(9 - 10)*6*4", True),
        ("6*(10 - 9)* *4", False),
        ("6*4*(10 - 9) + 0", False),
        ("1" * 5000, False),
        ("6*(10 - 9)*4)", False),
        ("6*4/(10 - 9 - 1)", False),
    ],
)
def test_a_puzzle_is_solved_with_the_given_numbers_and_exactly(answer, right, gym):
    task = gym("gym:puzzle24")
    example = replace(task.examples("eval", n=1)[0], metadata={"metadata": {"numbers": [4, 6, 9, 10]}})
    assert task.verify(example, f"#### {answer}").correct is right
    assert gym_module._solves(answer, {"numbers": [4, 6, 9, 10]}) is right
    assert not gym_module._solves("5*100+2/(90*95)", {"numbers": [2, 5, 90, 95, 100], "target": 500})


@pytest.mark.parametrize("dataset", ["complex_arithmetic", "number_sorting"])
def test_what_is_not_a_number_is_not_right(dataset, gym):
    task = gym(f"gym:{dataset}")
    example = task.examples("eval", n=1)[0]
    count = example.answer.count(",") + 1
    for text in ("nan", "nani", "n an", f"[{', '.join(['NaN'] * count)}]", str(["nan"] * count)):
        assert not task.verify(example, f"#### {text}").correct
    assert task.verify(example, f"#### {example.answer}").correct


def test_formulas_of_logic_are_read(gym):
    task = gym("gym:propositional_logic")
    assert task._evaluates_by and gym_module._harmless("¬(P ∨ Q) ∧ (P → (Q ↔ R))", may_quote=False)


def test_an_answer_that_is_a_number_of_json_is_compared_as_text():
    class Mine(NumericTask):
        name = "mine"

        def example(self, row, uid):
            return Example(uid, row["question"], row["answer"])

    verdict = Mine().verify(Mine().example({"question": "2 + 2?", "answer": 4}, "u"), "#### 4")
    assert verdict.correct and (verdict.submitted, verdict.expected) == ("4", "4")


def test_a_scorer_that_raises_does_not_accept(gym, monkeypatch):
    task = gym("gym:spell_backward")
    example = task.examples("train", n=1)[0]

    class Broken:
        def score_answer(self, answer, entry):
            raise RuntimeError("no")

    monkeypatch.setattr(task, "_scorer", Broken())
    assert not task.verify(example, "#### something").correct


def test_a_scorer_that_accepts_anything_is_not_trusted(gym):
    task = gym("gym:game_of_life_halting")
    for example in task.examples("train", n=4):
        other = "False" if example.answer == "True" else "True"
        verdicts = [task.verify(example, f"#### {answer}") for answer in (example.answer, other, "7")]
        assert [verdict.correct for verdict in verdicts] == [True, False, False]


def test_an_unknown_gym_dataset_suggests_close_ones(gym):
    with pytest.raises(ValueError, match="no dataset 'chain_sums'. Close matches: chain_sum"):
        gym("gym:chain_sums")


def test_a_missing_gym_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"pip install firedistill\[gym\]"):
        load_task("gym:chain_sum")


# The real data

SHARED = Path(os.environ.get("FIREDISTILL_SHARED", Path(__file__).resolve().parents[2] / "shared"))
real_data = pytest.mark.skipif(
    not (SHARED / "data").is_dir(), reason="real datasets not available: set FIREDISTILL_SHARED to a folder that contains data/"
)
REAL_COUNTS = {
    "gsm8k": {"train": 7473, "eval": 1319, "test": 1319},
    "asdiv": {"train": 1798, "eval": 451},
    "aqua_rat": {"train": 8013, "eval": 254, "test": 254},
    "arc_challenge": {"train": 1119, "eval": 299, "test": 1172},
    "winogrande": {"train": 40398, "eval": 1267},
    "wic": {"train": 5428, "eval": 638},
    "mmlu_pro": {"train": 4304, "eval": 1067, "validation": 30},
}


@real_data
@pytest.mark.parametrize("name", NAMES)
def test_every_real_row_parses_and_its_gold_verifies(name):
    task = load_task(name)
    seen = {}
    for split, count in REAL_COUNTS[name].items():
        examples = task.examples(split, data_dir=SHARED / "data")
        assert len(examples) == count
        seen[split] = {example.uid for example in examples}
        assert len(seen[split]) == count
        for example in examples[:3000]:
            assert task.verify(example, canonical(task, example.answer)).correct, example
            assert not task.verify(example, canonical(task, wrong_answer(example))).correct, example
            if example.solution is not None:
                assert task.verify(example, example.solution).correct, example
    assert not seen["train"] & seen["eval"]


@real_data
def test_the_same_question_is_never_in_both_parts_of_a_divided_split():
    for name in ("asdiv", "mmlu_pro"):
        parts = [
            {" ".join(example.question.partition("\n\nChoices:")[0].lower().split()) for example in examples}
            for examples in (load_task(name).examples(split, data_dir=SHARED / "data") for split in ("train", "eval"))
        ]
        assert not parts[0] & parts[1]


@real_data
@pytest.mark.parametrize("name", NAMES)
def test_feedback_on_real_examples(name):
    task = load_task(name)
    for example in task.examples("eval", n=20, data_dir=SHARED / "data"):
        response = canonical(task, wrong_answer(example))
        fields = task.feedback(example, response, task.verify(example, response))
        assert f"submitted normalized answer=`{wrong_answer(example)}`" in fields[0].text
        assert "format issues=none" in fields[3].text


def test_a_scorer_that_did_not_start_in_time_starts_anew(monkeypatch):
    """A late greeting of its process would be taken for the reply to the next request."""
    scorer = IsolatedScorer("import time\ntime.sleep(1.0)\ndef score(x):\n    return float(x)\n")
    monkeypatch.setattr(isolated, "STARTING_SECONDS", 0.2)
    assert scorer.score(1) == 0.0
    monkeypatch.setattr(isolated, "STARTING_SECONDS", 60.0)
    assert [scorer.score(x) for x in (2, 3, 4)] == [2.0, 3.0, 4.0]
    scorer.close()
