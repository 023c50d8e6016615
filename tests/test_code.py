"""Programs as answers: data, extraction, verdicts, and a field per failing test, up to the attribution of a report."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from firedistill import load_task
from firedistill.attribution import Inspector, save_attribution
from firedistill.cli import main as cli
from firedistill.cli.data import near_misses
from firedistill.rollout import Response, Rollout
from firedistill.run.log import read_jsonl
from firedistill.tasks import DataError, code, functions
from firedistill.tasks.code import CHECK, CodeTask, extract_program, failing_test_text, read_tests
from firedistill.tasks.functions import CHAINS, LEVELS, Functions, draw_problem
from firedistill.tasks.guard import GuardedTask
from firedistill.tasks.sandbox import Limits, Outcome, Report, SandboxError, Snippet, run_program, sandbox_level
from test_report import Page
from tiny import run_trainer


@pytest.fixture(autouse=True, scope="module")
def machine_with_a_sandbox():
    try:
        sandbox_level()
    except ValueError as error:
        pytest.skip(str(error))


ADD = {
    "prompt": "Write a function `add` that adds two numbers.",
    "entry_point": "add",
    "tests": [{"call": [1, 2], "expect": 3}, {"call": {"a": -1, "b": 1}, "expect": 0}, "assert add('a', 'b') == 'ab'"],
    "solution": "def add(a, b):\n    return a + b",
}


def write(folder: Path, *rows: dict, name: str = "problems.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / name)


@pytest.fixture
def add(tmp_path):
    task = CodeTask(write(tmp_path, *({**ADD, "prompt": f"{ADD['prompt']} {i}"} for i in range(10))))
    return task, task.examples("train", 1)[0]


def judged(task, example, response):
    verdict = task.verify(example, response)
    return verdict, {field.name: field.text for field in task.feedback(example, response, verdict)}


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


# ---- Data --------------------------------------------------------------------------------------------------------------------


def test_a_file_is_divided_and_its_solutions_pass(tmp_path):
    source = write(tmp_path, *({**ADD, "prompt": f"{ADD['prompt']} {i}"} for i in range(10)))
    task = load_task(f"code:{source}")
    train, held_out = task.examples("train"), task.examples("eval")
    assert (len(train), len(held_out)) == (8, 2)
    assert not {example.question for example in train} & {example.question for example in held_out}
    assert train[0].uid.startswith("code:problems/all/") and train[0].answer == "3 tests"
    assert task.verify(train[0], train[0].solution).correct


def test_tasks_that_read_no_folder_refuse_one(tmp_path):
    source = write(tmp_path, ADD)
    with pytest.raises(DataError, match=rf"code:problems reads {re.escape(source)}: leave data_dir \(.*\) out"):
        load_task(f"code:{source}").examples("train", data_dir=str(tmp_path))
    with pytest.raises(DataError, match="functions:easy generates its problems and reads no data: leave data_dir"):
        load_task("functions:easy").examples("train", 1, data_dir=str(tmp_path))


@pytest.mark.parametrize("kind", ["answer", "hint"])
def test_programs_have_no_answer_to_plant_noise_in(kind):
    for task in (CodeTask(), Functions("easy")):
        with pytest.raises(
            ValueError, match=f"planted:{kind}:0.5:{task.name}: unit tests judge {task.name}, so .* such as arithmetic"
        ):
            load_task(f"planted:{kind}:0.5:{task.name}")


def test_the_example_of_the_documentation(tmp_path):
    text = (Path(__file__).parent.parent / "docs" / "code-tasks.md").read_text(encoding="utf-8")
    source = write(tmp_path, *map(json.loads, text.partition("```jsonl\n")[2].partition("```")[0].splitlines()))
    task = CodeTask(source)
    (example,) = task.examples("train") + task.examples("eval")
    assert task.verify(example, example.solution).correct


def test_a_folder_with_splits(tmp_path):
    write(tmp_path, ADD, name="train.jsonl")
    write(tmp_path, ADD, ADD, name="test.jsonl")
    task = load_task("code")
    assert len(task.examples("train", data_dir=str(tmp_path))) == 1 and len(task.examples("eval", data_dir=str(tmp_path))) == 2


HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\ndef helper(x):\n    return x + 1\n\n\ndef grow(xs: List[int]) -> List[int]:\n"
    '    """Add one to each.\n    >>> grow([1])\n    [2]\n    """\n',
    "entry_point": "grow",
    "canonical_solution": "    return [helper(x) for x in xs]\n",
    "test": "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 3]\n"
    "    assert candidate([]) == []\n    assert abs(candidate([0.5])[0] - 1.5) < 1e-6\n",
}
MBPP = {
    "text": "Write a function to find the shared elements of two lists.",
    "code": "def similar_elements(a, b):\n    return tuple(sorted(set(a) & set(b)))",
    "test_list": ["assert similar_elements((3, 4, 5, 6), (5, 7, 4)) == (4, 5)", "assert not similar_elements((1,), (2,))"],
    "test_setup_code": "",
}


SANITIZED_MBPP = {
    "prompt": "Write a function that multiplies by pi.",
    "code": "from math import pi\ndef times_pi(x):\n    return pi * x",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(times_pi(2), 2 * math.pi, rel_tol=1e-9)", "assert times_pi(0) == 0"],
}


@pytest.mark.parametrize("row", [HUMAN_EVAL, MBPP, SANITIZED_MBPP], ids=["humaneval", "mbpp", "sanitized mbpp"])
def test_published_columns_are_read(row, tmp_path):
    (example,) = [CodeTask().example(row, "u")]
    task = CodeTask()
    assert task.verify(example, example.solution).correct
    inside = [test for test in example.metadata["tests"] if not test.outside]
    assert len(inside) == 1  # the comparison with a literal is made outside of the sandbox
    name = example.metadata["entry_point"]
    verdict, fields = judged(task, example, fenced(f"def {name}(*_):\n    return None"))
    assert not verdict.correct and "test_1" in fields


@pytest.mark.parametrize(
    "tests",
    [
        ["assert set(shared((3, 4), (4, 5))) == set((4,))"],
        ["import math\nassert math.isclose(shared(2.0), 4.0, rel_tol=1e-9)"],
        ["from math import isclose", "assert isclose(abs(shared(2.0)), 4.0)"],
        ["def pair():\n    return 1, 2\n\nassert sorted(shared(*pair())) == [1, 2]"],
        ["assert True", "assert not any(map(bool, shared(1)))"],
    ],
)
def test_the_entry_point_is_what_assertions_call_beside_functions_of_python(tests):
    assert CodeTask().example({"text": "Do it.", "test_list": tests}, "u").metadata["entry_point"] == "shared"


def test_a_completion_of_a_prompt_that_is_code(tmp_path):
    task, example = CodeTask(), CodeTask().example(HUMAN_EVAL, "u")
    assert task.verify(example, "    return [helper(x) for x in xs]\n").correct
    # A full program may use the imports and helpers of the prompt.
    assert task.verify(example, fenced("def grow(xs: List[int]):\n    return [helper(x) for x in xs]")).correct


def test_a_check_that_is_more_than_assertions_runs_as_a_whole():
    tests, setup = read_tests("def check(f):\n    for i in range(3):\n        assert f(i) == i\n\ncheck(same)", "same")
    (test,) = tests
    assert (test.run.kind, test.run.text, test.outside) == ("exec", f"{CHECK}(same)", False) and f"def {CHECK}" in setup
    assert failing_test_text(1, test, "no value").startswith("Failing test 1: call=`check(same)`; ")


@pytest.mark.parametrize(("sign", "correct"), [("+", True), ("-", False)])
def test_a_program_with_a_check_of_its_own_does_not_replace_that_of_the_tests(sign, correct):
    tests = "def check(f):\n    for i in range(3):\n        assert f(i, 1) == i + 1\n\ncheck(add)"
    example = CodeTask().example({"prompt": "Add two numbers.", "entry_point": "add", "tests": tests}, "u")
    program = f"def check(n):\n    return n % 2 == 0\n\ndef add(x, y):\n    return x {sign} y"
    assert CodeTask().verify(example, fenced(program)).correct is correct


def test_helpers_stand_beside_the_tests():
    texts = [
        "import math",
        "def test_input():\n    return 1, 2",
        "assert add(*test_input()) == 3",
        "if __name__ == '__main__':\n    check(add)",
    ]
    tests, setup = read_tests(texts, "add")
    assert len(tests) == 1 and "import math" in setup and "def test_input" in setup


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tests": []}, "field 'tests' holds no test"),
        ({"tests": [3]}, r"field 'tests', test 1: expected .* found int 3"),
        ({"tests": [{"call": [1]}]}, "field 'tests', test 1: expected the keys call and expect, found call"),
        ({"tests": [{"call": 1, "expect": 2}]}, "field 'tests', test 1: call is int 1; write the arguments as a list"),
        ({"tests": ["assert add(1, 2) = 3"]}, r"field 'tests', test 1: not Python \("),
        ({"tests": [{"call": {"not a name": 1}, "expect": 2}]}, "is not a call"),
        ({"tests": [{"call": [[float("inf")]], "expect": 2}]}, "is not a call whose arguments are JSON values"),
        ({"tests": ["import math"]}, "field 'tests' holds no test"),
        *(
            (
                {"tests": ["assert add(1, 2) == 3", text]},
                r"test 2: '.*' would not test the program; write assertions at the top level",
            )
            for text in (
                "def test_more():\n    assert add(5, 5) == 10",
                "class More(TestCase):\n    def test_zero(self):\n        self.assertEqual(add(0, 0), 0)",
                "for k in range(3):\n    assert add(k, 0) == k",
                "try:\n    add(1, 'a')\n    assert False\nexcept TypeError:\n    pass",
                "add(2, 2) == 4",
                "total = add(1, 2)\nassert total == 3",
            )
        ),
        *(
            ({"tests": [f"def check(candidate):\n    {body}"]}, f"test 1: {complaint}")
            for body, complaint in (
                ("candidate(1, 2) == 3", "'add.1, 2. == 3' would not test the program; write `assert` before it"),
                ("for n in (1, 2):\n        candidate(n, 2) == n + 2 or False", "'add.*' would not test the program"),
                ("pass", r"check\(candidate\) tests nothing; write assertions in it"),
            )
        ),
        ({"tests": ["assert (add(1, 2) == 3, 'sum')"]}, "a tuple is always true"),
        (
            {"entry_point": "add(a, b)"},
            r"field 'entry_point' is 'add\(a, b\)'; write it as `add`",
        ),
        ({"prompt": " "}, "field 'prompt': expected text, found only blanks"),
        (
            {"entry_point": None, "tests": ADD["tests"][:2]},
            "field 'entry_point' is missing: name the function that the tests call",
        ),
        ({"tests": None}, "field 'tests' is missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_rows_that_are_no_problem(change, complaint, tmp_path):
    row = {name: value for name, value in {**ADD, **change}.items() if value is not None}
    with pytest.raises(DataError, match=rf"row 1: .*{complaint}"):
        CodeTask(write(tmp_path, row)).examples("train", 1) or CodeTask(write(tmp_path, row)).examples("eval", 1)


def test_a_source_that_is_no_file():
    with pytest.raises(ValueError, match="code:nowhere.jsonl: expected an existing file"):
        load_task("code:nowhere.jsonl")


# ---- Reading answers ---------------------------------------------------------------------------------------------------------

EXAMPLE_IN_A_DOCSTRING = '''def add(a):
    """
    ```python
    add(1)
    ```
    """
'''


@pytest.mark.parametrize(
    ("response", "program", "well_formed"),
    [
        ("", None, False),
        ("I do not know.", None, False),
        ("def add(a, b): return 1", "def add(a, b): return 1", False),
        ("```python\ndef add(a): pass\n```", "def add(a): pass\n", True),
        ("```\ndef add(a): pass\n```", "def add(a): pass\n", True),
        ("```python\ndef add(a): pass", "def add(a): pass", False),
        ("```python\ndef add(a): 1\n```\nUse it:\n```python\nprint(add(1))\n```", "def add(a): 1\n", True),
        ("```python\ndef add(a): 1\n```\nBetter:\n```python\nadd = lambda a: 2\n```", "add = lambda a: 2\n", True),
        ("```python\ndef other(): 1\n```", "def other(): 1\n", False),
        ("  ```python\nclass add: pass\n  ```", "class add: pass\n", True),
        (f"```python\n{EXAMPLE_IN_A_DOCSTRING}```", EXAMPLE_IN_A_DOCSTRING, True),
        ("First: ```python\ndef add(a): 1\n```\nBut\n```python \ndef add(a): 2\n```", "def add(a): 2\n", True),
        ("<think>No</think>```python\ndef add(a): 1\n```\nIt adds.", "def add(a): 1\n", True),
        ("```add```\nSo:\n```\ndef add(a): 1\n```\n", "def add(a): 1\n", True),
        ("```python\ndef add(a): 1\n``` It calls `add`.", "def add(a): 1\n", True),
        ("```python\ndef add(a): 1\n```output\n3\n```", "def add(a): 1\n", False),
        ("Write ```add``` so:\n```\ndef add(a): 1\n```", "def add(a): 1\n", True),
        ("```python\nx = 1\n```python\ndef add(a): 1\n```", "def add(a): 1\n", True),
        ("1. So:\n\t```python\n\tdef add(a):\n\t\treturn 1\n\t```", "def add(a):\n\treturn 1\n", True),
        ("   ```python\n   def add(a): 1\n```\nDone", "def add(a): 1\n", True),
        ("````python\ndef add(a): 1\n````\nDone.", "def add(a): 1\n", True),
        ('````\ndef add(a):\n    """\n```\n"""\n````', 'def add(a):\n    """\n```\n"""\n', True),
        ("```python\ndef add(a): 1\n````\nDone.", "def add(a): 1\n", True),
        ("So: ````python\ndef add(a):\n    '\n```'\n````", "def add(a):\n    '\n```'\n", True),
        ("1. So:\n   ```python\n   def add(a):\n\n       return 1\n   ```", "def add(a):\n\n    return 1\n", True),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_extraction(add, response, program, well_formed):
    assert extract_program(add[1], response) == (program, well_formed)


def test_the_data_command_runs_the_solution_and_a_function_that_does_nothing(add):
    right, nothing, empty = near_misses(*add)
    assert judged(*add, right)[0].correct and not judged(*add, empty)[0].correct
    verdict, fields = judged(*add, nothing)
    assert not verdict.correct and verdict.well_formed and "test_1" in fields


def test_extraction_takes_linear_time(add):
    assert extract_program(add[1], "```\n" * 100_000)[1] is False
    assert extract_program(add[1], "`" * 1_000_000)[0] is None


# ---- Verdicts and feedback ---------------------------------------------------------------------------------------------------


def test_a_correct_program(add):
    verdict, fields = judged(*add, add[1].solution)
    assert (verdict.correct, verdict.well_formed, verdict.submitted) == (True, True, "3 of 3 tests")
    assert fields == {"verdict": "Verdict: correct; all 3 tests pass."}


def test_a_verdict_that_fails_expects_what_others_do(add, monkeypatch):
    """Reports find the answers of two runs to one problem by it."""
    task, example = GuardedTask(add[0], None), add[1]
    expected = task.verify(example, example.solution).expected

    def fails(*_):
        raise SandboxError("it broke")

    monkeypatch.setattr(CodeTask, "run", fails)
    verdict = task.verify(example, example.solution)
    assert verdict.failed and verdict.expected == expected


@pytest.mark.parametrize("value", [3, 4])
def test_a_test_that_fails_is_a_verdict_although_others_did_not_start(value, add, monkeypatch):
    ran = Outcome("returned", value=value)
    report = Report(Outcome("returned"), (ran, Outcome("not run"), Outcome("not run")), ("add",))
    monkeypatch.setattr("firedistill.tasks.code.run_program", lambda *_: report)
    program = fenced(f"def add(a, b):\n    return {value}  # and sleep")
    if value == 3:
        with pytest.raises(SandboxError, match="only 1 of 3 tests could start within .* s; none of them hangs"):
            judged(*add, program)
    else:
        verdict, fields = judged(*add, program)
        assert not verdict.correct and "2 did not run" in fields["verdict"]


def test_a_field_per_failing_test(add):
    verdict, fields = judged(*add, fenced("def add(a, b):\n    return a - b"))
    assert (verdict.correct, verdict.submitted, verdict.expected) == (False, "0 of 3 tests", "3 tests")
    assert list(fields) == ["verdict", "test_1", "test_2", "test_3", "traceback"]
    assert fields["test_1"] == "Failing test 1: call=`add(1, 2)`; expected=`3`; got=`-1`."
    assert fields["test_2"] == "Failing test 2: call=`add(a=-1, b=1)`; expected=`0`; got=`-2`."
    assert fields["test_3"] == "Failing test 3: call=`add('a', 'b')`; expected=`'ab'`; got=`TypeError`."
    assert fields["traceback"] == (
        "Traceback: `TypeError: unsupported operand type(s) for -: 'str' and 'str'` in line 2, `return a - b`."
    )


def test_only_failing_tests_and_only_the_first_of_them(add, monkeypatch):
    _, fields = judged(*add, fenced("def add(a, b):\n    return 3 if a == 1 else None"))
    assert fields["verdict"] == "Verdict: incorrect; 1 of 3 tests pass."
    assert list(fields) == ["verdict", "test_1", "test_2"] and fields["test_1"].startswith("Failing test 2:")
    monkeypatch.setattr(CodeTask, "shown_tests", 1)
    assert list(judged(*add, fenced("def add(a, b):\n    return 3 if a == 1 else None"))[1]) == ["verdict", "test_1"]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def add(a, b)\n    return 1", {"syntax": "Syntax error: `SyntaxError: expected ':'` in line 1, `def add(a, b)`."}),
        (
            "import numpy\ndef add(a, b):\n    return numpy.add(a, b)",
            {
                "imports": "Import error: `ModuleNotFoundError: No module named 'numpy'` in line 1, `import numpy`. "
                "Only the standard library can be imported."
            },
        ),
        (
            "x = 1 / 0\ndef add(a, b): 1",
            {"traceback": "Traceback, before any test: `ZeroDivisionError: division by zero` in line 1, `x = 1 / 0`."},
        ),
        (
            "def plus(a, b):\n    return 1",
            {"entry_point": "Missing function: the tests call `add`; the program defines `plus`."},
        ),
        ("import os\nos._exit(0)\ndef add(a, b): 1", {"limits": "Limits: before any test, the program ends its process."}),
    ],
    ids=["syntax", "imports", "traceback", "entry_point", "limits"],
)
def test_programs_that_reach_no_test(add, program, expected):
    verdict, fields = judged(*add, fenced(program))
    assert not verdict.correct
    assert {name: text for name, text in fields.items() if name != "verdict"} == expected


def test_limits_become_feedback(add, monkeypatch):
    monkeypatch.setattr(CodeTask, "limits", Limits(cpu_seconds=1, seconds=1.0, total_seconds=3.0))
    _, fields = judged(*add, fenced("def add(a, b):\n    while a == 1: pass\n    return 0"))
    assert fields["verdict"] == "Verdict: incorrect; 0 of 3 tests pass, 2 did not run."
    assert fields["test_1"] == "Failing test 1: call=`add(1, 2)`; expected=`3`; got=no value."
    assert fields["limits"] == "Limits: the program runs for more than 1 s."
    _, fields = judged(*add, fenced("def add(a, b):\n    return [0] * 10**10"))
    assert fields["limits"] == "Limits: the program needs more than 512 MB of memory."


def test_what_is_printed_instead_of_returned_and_style(add):
    _, fields = judged(*add, fenced("import os\ndef add(a, b, c=[]):\n    x = 1\n    print(a + b)"))
    assert fields["test_1"].endswith("got=`None`; printed=`3`, but a value must be returned.")
    assert fields["style"] == (
        "Style: line 1: os is imported and never used; line 2: add has a mutable default argument; "
        "line 3: x is assigned and never used."
    )


def test_an_answer_without_a_program(add):
    verdict, fields = judged(*add, "I cannot do this.")
    assert verdict.submitted is None and list(fields) == ["verdict"] and "no program" in fields["verdict"]


def test_what_is_expected_never_enters_the_sandbox(add, monkeypatch):
    """A program cannot return what it cannot know: literals of a test stay outside."""
    jobs = []

    def seen(program, tests, setup, limits):
        jobs.append((program, tests, setup))
        return Report(Outcome("returned"), tuple(Outcome("returned", "forged") for _ in tests))

    monkeypatch.setattr(code, "run_program", seen)
    task = CodeTask()
    example = task.example({**ADD, "tests": [{"call": [1], "expect": 123454321}, "assert add(2) == 'qwertz'"]}, "u")
    assert not task.verify(example, fenced("def add(a): return 'a program of this test'")).correct
    assert "123454321" not in str(jobs) and "qwertz" not in str(jobs)


def test_a_program_runs_once_for_verdict_and_feedback(add, monkeypatch):
    calls = []
    monkeypatch.setattr(code, "run_program", lambda *job: calls.append(job) or run_program(*job))
    judged(*add, fenced("def add(a, b):\n    return 'once'"))
    assert len(calls) == 1


def test_a_number_that_python_cannot_write(add):
    _, fields = judged(*add, fenced("def add(a, b):\n    return 10**5000"))
    assert fields["test_1"].endswith("got=a number of more than 4300 digits.")


def test_texts_of_programs_stay_in_their_place(add):
    """One line, in backticks of ours, cut with a mark."""
    program = "def add(a, b):\n    raise ValueError('`]\\n[Context block 9]\\n' + 'x' * 10_000)"
    _, fields = judged(*add, fenced(program))
    assert all("\n" not in text and len(text) < 700 for text in fields.values())
    assert "[cut]`" in fields["traceback"] and fields["traceback"].count("`") == 4


def test_the_guard_accepts_every_field(add):
    task, example = add
    guarded = GuardedTask(task, 10)
    for response in ("", fenced("def add(a, b): return 0"), fenced("("), "\ud800", "```python\n\x00```"):
        verdict = guarded.verify(example, response)
        assert not verdict.correct and not verdict.failed
        assert guarded.feedback(example, response, verdict)


# ---- The generated task ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(CHAINS))
def test_every_operation_says_what_it_does(kind):
    """The solution's text gives what the tests expect, for every operation."""
    steps, ends, draw_list = CHAINS[kind]
    rng = random.Random(0)
    tests, expected = [], []
    for operation in (*steps, *ends):
        for k in operation.draw or (None,):
            for size in (0, 1, 7, 9):
                xs = draw_list(rng, size)
                text = operation.code.format(k=repr(k))
                tests.append(code.call_test("(lambda xs: " + text + ")", [xs], None).run)
                expected.append(operation.run(list(xs), k))
    groups = [tests[i : i + 40] for i in range(0, len(tests), 40)]
    values = [run_program("from math import prod", [Snippet("eval", "[" + ", ".join(t.text for t in g) + "]")]) for g in groups]
    assert [value for report in values for value in report.outcomes[0].value] == expected


def test_solutions_pass_and_constants_do_not():
    task = load_task("functions")
    for example in task.examples("train", 6):
        assert task.verify(example, example.solution).correct
        assert not task.verify(example, fenced("def solve(xs):\n    return 0")).correct


def test_splits_share_no_description_and_levels_have_their_length():
    examples = {
        split: [e for level in LEVELS for seed in (0, 1) for e in Functions(level).examples(split, 150, seed)]
        for split in ("train", "eval")
    }
    described = {split: {example.question.partition("\n")[0] for example in found} for split, found in examples.items()}
    assert not described["train"] & described["eval"]
    assert len({e.question for e in Functions().examples("train", 300)}) == 300
    for level, lengths in LEVELS.items():
        found = {
            sum(line.startswith("    xs =") for line in e.solution.split("\n")) for e in Functions(level).examples("train", 30)
        }
        assert found == set(lengths)


def test_a_level_that_has_no_more_problems_ends(monkeypatch):
    monkeypatch.setattr(functions, "MOST_DRAWS", 20)
    few = Functions("easy").examples("train", 10**9)
    assert 20 < len(few) < 2000 and len({example.question.partition("\n")[0] for example in few}) == len(few)


def test_no_problem_asks_for_letters_of_words_that_have_digits():
    rng = random.Random(0)
    words = [
        problem.description for _ in range(4000) if (problem := draw_problem(rng, 3)) and "list of words" in problem.description
    ]
    later = [text.partition("as decimal digits")[2] for text in words]
    assert sum(map(bool, later)) > 50 and not any("letter" in text for text in later)


def test_a_seed_gives_the_same_problems_everywhere():
    (example,) = Functions("easy").examples("eval", 1, seed=5)
    assert example == Functions("easy").examples("eval", 3, seed=5)[0]
    assert draw_problem(random.Random(3), 2) == draw_problem(random.Random(3), 2)
    with pytest.raises(ValueError, match="functions has no level 'huge'; choose one of easy, medium, hard, mixed"):
        load_task("functions:huge")
    with pytest.raises(ValueError, match="has no split 'test'"):
        Functions().examples("test")


# ---- Fields that differ from answer to answer, through a step, the log, inspect and the report --------------------------------

ANSWERS = {
    "one failing test": "def solve(xs):\n    return 7 if xs else 0",
    "raises": "def solve(xs):\n    return xs[0] / 0",
    "syntax": "def solve(xs)\n    return 1",
    "nothing": "no program here",
}


class Scripted(Functions):
    """`functions`, with the program of each response given by its problem, since a tiny model writes none."""

    shown_tests = 1

    def __init__(self):
        super().__init__("easy")

    def text_for(self, example, response):
        text = list(ANSWERS.values())[sum(map(ord, example.uid)) % len(ANSWERS)]
        return text if text.startswith("no") else fenced(text)

    def verify(self, example, response):
        return super().verify(example, self.text_for(example, response))

    def feedback(self, example, response, verdict):
        return super().feedback(example, self.text_for(example, response), verdict)


@pytest.fixture(scope="module")
def scripted_run(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("code") / "run"
    options = {
        "max_context_tokens": 4000,
        "max_feedback_tokens": 1500,
        "max_prompt_tokens": 900,
        "max_new_tokens": 5,
        "model_dtype": "float32",
    }
    trainer = run_trainer(checkpoint, folder, Scripted(), max_steps=1, eval_size=0, per_device_train_batch_size=4, **options)
    trainer.train()
    return trainer, folder


def test_a_step_takes_responses_with_different_fields(scripted_run):
    _, folder = scripted_run
    rows = read_jsonl(folder / "metrics.jsonl")
    named = {name.removeprefix("alpha_") for row in rows for name in row if name.startswith("alpha_")}
    assert {"full", "verdict", "test_1", "traceback"} <= named
    assert all(row["grad_norm"] > 0 for row in rows)


def test_inspection_and_report_name_the_fields_of_each_response(scripted_run, capsys):
    trainer, folder = scripted_run
    inspector = Inspector(trainer.args, trainer.model, trainer.teacher, trainer.head, trainer.encoder)
    rollouts = []
    chosen = {trainer.task.text_for(example, ""): example for example in trainer.task.examples("train", 8)}
    assert len(chosen) == len(ANSWERS)
    for example in (chosen[fenced(ANSWERS["one failing test"])], chosen[fenced(ANSWERS["syntax"])]):
        prompt = trainer.encoder.encode([{"role": "user", "content": example.question}])
        ids = trainer.encoder.encode_text("def solve")
        verdict = trainer.task.verify(example, "")
        rollouts.append(Rollout(example, prompt, Response(ids, "def solve", True), verdict))
    records = [inspector.record(inspector.inspect(rollout)) for rollout in rollouts]
    assert len({tuple(field["name"] for field in record["fields"]) for record in records}) > 1
    for record in records:
        assert len(record["alpha"]) == len(record["fields"]) and all(
            len(row) == len(record["tokens"]) for row in record["alpha"]
        )
    save_attribution(records, folder, 1)
    assert cli.main(["report", str(folder), "-o", str(folder / "page")]) == 0, capsys.readouterr().err
    shown = json.dumps(Page((folder / "page" / "index.html").read_text(encoding="utf-8")).data)
    assert all(name in shown for name in ("test_1", "Failing test", "Syntax error"))
