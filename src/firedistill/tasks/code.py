"""Programs that are judged by unit tests: `--task code:problems.jsonl`, or `--task code --data_dir FOLDER`.

The feedback about a wrong program has a field per failing test, and others for what went wrong before or besides, so that their
number differs from answer to answer. Programs run in the sandbox of `sandbox.py`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from firedistill.tasks.feedback import quoted
from firedistill.tasks.reading import open_rows
from firedistill.tasks.sandbox import (
    AT_ONCE,
    Limits,
    Other,
    Outcome,
    Report,
    SandboxError,
    Snippet,
    matches,
    run_program,
    sandbox_level,
)
from firedistill.tasks.sources import SUFFIXES, DataError, Rows, kind_of, optional_text, text_field
from firedistill.tasks.task import Task
from firedistill.tasks.types import Example, FeedbackField, Verdict

CODE_INSTRUCTION = (
    "Answer with one Python program in a fenced code block (```python ... ```). It is run and tested; nothing else is read."
)
MAX_REMARKS = 3
CHECK = "check_of_the_tests"  # the name of the tests' `check` beside the program, which may define its own

# The names under which published datasets (HumanEval, MBPP) have what the columns below hold.
PROMPT_COLUMNS, TEST_COLUMNS, SOLUTION_COLUMNS = (
    ("prompt", "text"),
    ("tests", "test", "test_list"),
    ("solution", "canonical_solution", "code"),
)

_OPENING = re.compile(r"([ \t]*)(`{3,8}+)[^`]*|.*?(`{3,8}+)\w[^`\s]*\s*")  # a line; after other text, it must name a language
_NEXT_FENCE = re.compile(r"([ \t]*)(`{3,8}+)(?!`)(\w[^`\s]*\s*$)?")  # with the language that it names
_CALLABLE = re.compile(r"[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*)*(?<!\))")  # add, or Solution().add
_COMPARISONS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
}


@dataclass(frozen=True)
class UnitTest:
    """One test of a program.

    Attributes:
        run: what the sandbox runs. Only where `outside` is false does it contain what is expected.
        operator: how the value is compared with `expected`: "==", "!=", "is" or "is not".
        expected: plain data.
        json: `expected` comes from JSON, so that a tuple is accepted where it has a list.
        outside: whether the value is compared outside of the sandbox; otherwise `run` is a whole assertion.
    """

    run: Snippet
    operator: str = "=="
    expected: Any = field(default=True, hash=False)
    json: bool = False
    outside: bool = True

    def passes(self, outcome: Outcome) -> bool:
        if outcome.status != "returned":
            return False
        equal = matches(outcome.value, self.expected, lists_for_tuples=self.json)
        return equal if self.operator in ("==", "is") else not equal and not isinstance(outcome.value, Other)

    @property
    def wanted(self) -> str:
        """What is expected, for people and models."""
        if not self.outside:
            return "no error"
        return quoted(repr(self.expected)) if self.operator in ("==", "is") else f"anything but {quoted(repr(self.expected))}"


class CodeTask(Task):
    """Programs in Python that unit tests judge.

    A row: {"prompt": "Write a function `add` that ...", "entry_point": "add", "tests": [{"call": [1, 2], "expect": 3}, ...],
    "solution": "def add(a, b): ..."}. `call` holds the arguments, as a list or, by name, as a mapping. A test may also be text with
    assertions (`"assert add(1, 2) == 3"`), and `tests` one such text, also with a function `check(candidate)` as in HumanEval. The
    columns of HumanEval and MBPP are read under their own names. `solution` is optional.

    An assertion that compares with a literal is taken apart: the program's process evaluates the call, and the comparison is made
    outside of it. Any other assertion runs next to the program, which could manipulate it.

    Args:
        source: a `.jsonl`, `.jsonl.gz` or `.parquet` file with all problems, of which a fixed seed holds out 20 %; None reads
            `train` and `test` from `data_dir`.

    Class attributes:
        shown_tests: failing tests that get a feedback field; the others are counted in the field `verdict`.
        limits: what a program may use.
        at_once: as many programs run at the same time as this process has processors; a subclass whose methods do not bear threads
            sets 1.
    """

    name = "code"
    type_name = "code"
    answer_type = "program"
    checker_mode = "unit-tests"
    format_instruction = CODE_INSTRUCTION
    at_once = AT_ONCE
    shown_tests: int = 3
    limits: Limits = Limits()

    def __init__(self, source: str | None = None) -> None:
        sandbox_level()  # refuses here rather than at the first response
        self.source = None if source is None else Path(source).expanduser().absolute()
        if self.source is not None:
            if not self.source.is_file() or not self.source.name.endswith(SUFFIXES):
                raise ValueError(f"code:{source}: expected an existing file that ends with {', '.join(SUFFIXES)}")
            self.name = f"code:{self.source.name.partition('.')[0]}"
            self.train_split = self.eval_split = "all"
            self.reads_data_dir = False

    def load_rows(self, published_split: str, data_dir: str | None = None) -> Rows:
        if self.source is None:
            return super().load_rows(published_split, data_dir)
        if data_dir is not None:
            raise DataError(
                f"{self.name} reads {self.source}: leave data_dir ({data_dir}) out, or name the task code, which reads it"
            )
        return open_rows(self.source)

    def division_key(self, row: Mapping[str, Any]) -> str:
        return text_field(row, _column(row, PROMPT_COLUMNS))

    def example(self, row: Mapping[str, Any], uid: str) -> Example:
        prompt = text_field(row, _column(row, PROMPT_COLUMNS))
        column = _column(row, TEST_COLUMNS)
        if column not in row:
            raise DataError(
                f"field {column!r} is missing (the row has: {', '.join(map(str, row)) or 'nothing'}); add it or remove the row"
            )
        entry_point = optional_text(row, "entry_point") or _called_name(row, column)
        if not _CALLABLE.fullmatch(entry_point):
            raise DataError(f"field 'entry_point' is {entry_point[:80]!r}; write it as `add`, `Solution().add` or `module.add`")
        tests, setup = read_tests(row[column], entry_point, column)
        begun = _begun_program(prompt, entry_point)
        setup = "\n".join(filter(None, [_test_imports(row), optional_text(row, "test_setup_code"), begun, setup]))
        solution = next((text for name in SOLUTION_COLUMNS if (text := row.get(name)) and isinstance(text, str)), None)
        if solution is not None and begun is not None and not defines(solution, entry_point):
            solution = f"{prompt}\n{solution}"
        question = prompt if re.search(rf"\b{re.escape(entry_point)}\b", prompt) else f"{prompt}\n\nName it `{entry_point}`."
        return code_example(uid, question, entry_point, tests, setup, solution, completes=begun is not None)

    def verify(self, example: Example, response: str) -> Verdict:
        """Correct if all tests pass.

        Raises:
            SandboxError: the sandbox failed, so that there is no verdict.
        """
        expected = example.answer  # as of a verdict that fails, so that reports find both to be about one problem
        program, well_formed = extract_program(example, response)
        if program is None:
            return Verdict(False, None, expected)
        report, results = self.run(example, program)
        passed = sum(result.passes for result in results)
        correct = passed == len(results)
        submitted = f"{passed} of {example.answer}" if report.load.status == "returned" else "a program that fails to load"
        return Verdict(correct, submitted, expected, well_formed, lenient_correct=correct)

    def run(self, example: Example, program: str) -> tuple[Report, tuple[Result, ...]]:
        """What the program does, and how its tests went. The last 1024 programs are not run again.

        Raises:
            SandboxError: the sandbox failed.
        """
        return _run(program, example.metadata["tests"], example.metadata["setup"], self.limits)

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        """`verdict`, then what applies of `syntax`, `imports`, `entry_point`, `test_1` ..., `traceback`, `limits`, and `style`.

        Raises:
            SandboxError: the sandbox failed.
        """
        program, well_formed = extract_program(example, response)
        entry_point = example.metadata["entry_point"]
        if program is None:
            text = f"Verdict: incorrect; the answer has no program. Write one in a fenced code block; it must define `{entry_point}`."
            return (FeedbackField("verdict", text),)
        report, results = self.run(example, program)
        ran = [result for result in results if result.outcome.status != "not run"]
        failing = [result for result in ran if not result.passes]
        outcomes = [result.outcome for result in failing]
        fields = [("verdict", _verdict_text(len(results), len(ran), len(failing), well_formed))]
        lines = program.split("\n")
        if report.load.status != "returned":
            fields.append(_load_field(report.load, lines, self.limits))
        elif failing and all(_undefined(outcome, entry_point) for outcome in outcomes):
            defined = ", ".join(map(quoted, report.defined)) or "no function"
            fields.append(("entry_point", f"Missing function: the tests call `{entry_point}`; the program defines {defined}."))
        else:
            fields += [(f"test_{rank}", _test_text(result)) for rank, result in enumerate(failing[: self.shown_tests], start=1)]
            if raised := next((o for o in outcomes if o.error is not None and o.error.line is not None), None):
                fields.append(("traceback", _traceback_text(raised, lines)))
            if over := next((o for o in outcomes if o.status in ("time", "memory")), None):
                fields.append(("limits", f"Limits: the program {_ending(over, self.limits)}."))
        if report.remarks:
            fields.append(("style", f"Style: {'; '.join(report.remarks[:MAX_REMARKS])}."))
        return tuple(FeedbackField(name, text) for name, text in fields)


def code_example(
    uid: str,
    question: str,
    entry_point: str,
    tests: Sequence[UnitTest],
    setup: str = "",
    solution: str | None = None,
    completes: bool = False,
) -> Example:
    """A problem of a `CodeTask`.

    Args:
        setup: Python text that runs before the program, such as imports that the tests need.
        solution: a program that passes the tests.
        completes: the question itself is the beginning of the program, which a response may continue.
    """
    return Example(
        uid=uid,
        question=question,
        answer=f"{len(tests)} test{'s' * (len(tests) != 1)}",
        solution=None if solution is None else f"```python\n{solution.strip()}\n```",
        metadata={"entry_point": entry_point, "tests": tuple(tests), "setup": setup, "completes": completes},
    )


@dataclass(frozen=True)
class Result:
    """How one test of a program went.

    Attributes:
        number: of the test, from 1.
        outcome: without its value.
        got: what the program gave instead of what is expected, for people and models.
    """

    number: int
    test: UnitTest
    passes: bool
    outcome: Outcome
    got: str


@functools.lru_cache(maxsize=1024)
def _run(program: str, tests: tuple[UnitTest, ...], setup: str, limits: Limits) -> tuple[Report, tuple[Result, ...]]:
    report = run_program(program, [test.run for test in tests], setup, limits)
    results = tuple(
        Result(number, test, test.passes(outcome), replace(outcome, value=None), _got(outcome, limits))
        for number, (test, outcome) in enumerate(zip(tests, report.outcomes, strict=True), start=1)
    )
    ran = [result for result in results if result.outcome.status != "not run"]
    if report.cut_short and all(result.passes for result in ran):  # one that fails is a verdict
        raise SandboxError(
            f"only {len(ran)} of {len(tests)} tests could start within {limits.total_seconds:g} s; none of them hangs"
        )
    return replace(report, outcomes=()), results  # values can be large


# ---- Reading answers --------------------------------------------------------------------------------------------------------


def extract_program(example: Example, response: str) -> tuple[str | None, bool]:
    """The program of a response, None if there is none, and whether it is well-formed.

    It is the last fenced block that defines the entry point, else the last block, else the whole text if it has a definition. Where
    the question is the beginning of the program, text without a definition continues it. Well-formed is a closed block that defines the
    entry point.
    """
    entry_point = example.metadata["entry_point"]
    blocks = fenced_blocks(response)
    defining = [block for block in blocks if defines(block[0], entry_point)]
    if defining:
        return defining[-1]
    text = blocks[-1][0] if blocks else response
    if example.metadata["completes"] and text.strip() and not defines(text, entry_point):
        return f"{example.question}\n{text}", False
    return (text, False) if blocks or re.search(r"^[ \t]*(def|class|import|from)\b", text, re.MULTILINE) else (None, False)


def fenced_blocks(response: str) -> list[tuple[str, bool]]:
    """The fenced blocks of a response, and whether each is closed. Lines of an indented block, as in a list, lose its indentation.

    A fence that is shorter than that of its block, or indented at least four columns more, as in a docstring, belongs to the text. A
    fence that names a language begins the next block.
    """
    blocks: list[tuple[str, bool]] = []
    lines: list[str] | None = None  # of the open block
    indent, ticks = "", 3
    for line in response.split("\n"):
        if lines is not None:
            fence = _NEXT_FENCE.match(line)
            if fence is None or len(fence[2]) < ticks or columns(fence[1]) > columns(indent) + 3:
                lines.append(re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", line) if indent else line)
                continue
            blocks.append(("".join(f"{text}\n" for text in lines), fence[3] is None))
            lines = None
            if fence[3] is None:
                continue
        if opening := _OPENING.fullmatch(line):
            lines, indent, ticks = [], opening[1] or "", len(opening[2] or opening[3])
    return blocks if lines is None else [*blocks, ("\n".join(lines), False)]


def columns(blanks: str) -> int:
    return len(blanks.expandtabs(4))


def defines(program: str, entry_point: str) -> bool:
    """Whether a text seems to define a name at its top level; it is not parsed."""
    name = re.escape(re.split(r"\W", entry_point)[0])
    return re.search(rf"^(?:async[ \t]+def|def|class)[ \t]+{name}\b|^{name}[ \t]*=", program, re.MULTILINE) is not None


# ---- Reading tests ----------------------------------------------------------------------------------------------------------


def read_tests(value: Any, entry_point: str, column: str = "tests") -> tuple[list[UnitTest], str]:
    """Tests of a row, and what stands beside them: imports and helpers, which run before the program.

    Raises:
        DataError: a test is not of the form that `CodeTask` describes, or there is none.
    """
    tests: list[UnitTest] = []
    setup: list[str] = []
    for number, item in enumerate(value if isinstance(value, list | tuple) else [value], start=1):
        where = f"field {column!r}, test {number}"
        if isinstance(item, Mapping):
            tests.append(_call_test(item, entry_point, where))
        elif isinstance(item, str):
            found, beside = _text_tests(item, entry_point, where)
            tests += found
            setup += beside
        else:
            raise DataError(
                f'{where}: expected {{"call": [...], "expect": ...}} or a text with assertions, found {kind_of(item)}'
            )
    if not tests:
        raise DataError(f"field {column!r} holds no test; add one or remove the row")
    return tests, "\n".join(setup)


def call_test(entry_point: str, arguments: Sequence[Any], expected: Any) -> UnitTest:
    """The test that a call with these arguments, all of them plain data, returns what is expected."""
    return UnitTest(Snippet("eval", f"{entry_point}({', '.join(map(repr, arguments))})"), expected=expected)


def _call_test(item: Mapping[str, Any], entry_point: str, where: str) -> UnitTest:
    if set(item) != {"call", "expect"}:
        raise DataError(f"{where}: expected the keys call and expect, found {', '.join(map(str, item)) or 'none'}")
    given = item["call"]
    if not isinstance(given, list | tuple | Mapping):
        raise DataError(f"{where}: call is {kind_of(given)}; write the arguments as a list, or as a mapping by name")
    named = [f"{name}={value!r}" for name, value in given.items()] if isinstance(given, Mapping) else None
    text = f"{entry_point}({', '.join(named if named is not None else map(repr, given))})"
    try:
        call: Any = ast.parse(text, mode="eval").body
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(argument)  # Infinity and NaN, which are no JSON, would be names here
    except (SyntaxError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: {text[:80]} is not a call whose arguments are JSON values: {error}") from error
    return UnitTest(Snippet("eval", text), expected=item["expect"], json=True)


def _text_tests(text: str, entry_point: str, where: str) -> tuple[list[UnitTest], list[str]]:
    """The assertions in a text, those of `check(candidate)` included, and the statements beside them."""
    tests, beside = [], []
    for statement in _parsed(text, where).body:
        if isinstance(statement, ast.Assert):
            tests.append(_assertion(statement, where))
        elif isinstance(statement, ast.FunctionDef) and statement.name == "check" and len(statement.args.args) == 1:
            body = [_Renamed({statement.args.args[0].arg: entry_point}).visit(part) for part in statement.body]
            parts = list(ast.walk(statement))
            if lost := next((part for part in parts if _is_comparison(part)), None):
                raise _lost(lost, where, "write `assert` before it")
            if not any(isinstance(part, ast.Assert | ast.Raise | ast.Call) for part in parts):
                raise DataError(f"{where}: check({statement.args.args[0].arg}) tests nothing; write assertions in it")
            if all(isinstance(part, ast.Assert) for part in body):
                tests += [_assertion(part, where) for part in body]
            else:
                statement.name = CHECK
                beside.append(ast.unparse(_Renamed({"check": CHECK}).visit(statement)))
                tests.append(UnitTest(Snippet("exec", f"{CHECK}({entry_point})"), outside=False))
        elif not _calls_check(statement) and _is_lost(statement, entry_point):
            raise _lost(statement, where, "write assertions at the top level, or in a function check(candidate)")
        elif not _calls_check(statement):
            beside.append(ast.unparse(statement))
    return tests, beside


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where}: not Python ({error}); correct it or remove the row") from error


def _lost(statement: ast.AST, where: str, fix: str) -> DataError:
    return DataError(f"{where}: {ast.unparse(statement).splitlines()[0][:80]!r} would not test the program; {fix}")


def _is_comparison(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Compare | ast.BoolOp)


def _assertion(statement: ast.Assert, where: str) -> UnitTest:
    test = statement.test
    if isinstance(test, ast.Tuple) and test.elts:
        raise _lost(statement, where, "a tuple is always true: write the message after the parenthesis")
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _COMPARISONS:
        try:
            expected = ast.literal_eval(test.comparators[0])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        else:
            return UnitTest(Snippet("eval", ast.unparse(test.left)), _COMPARISONS[type(test.ops[0])], expected)
    return UnitTest(Snippet("exec", ast.unparse(statement)), outside=False)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        return ast.copy_location(ast.parse(self.names[node.id], mode="eval").body, node)


def _is_lost(statement: ast.stmt, entry_point: str) -> bool:
    """Whether a statement beside the assertions is a test that would not run, or would run before the program: a test of pytest or
    unittest, an assertion in a loop, a comparison without `assert`, a call of the program."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = any(isinstance(part, ast.Return) and part.value is not None for part in ast.walk(statement))
        return statement.name.startswith("test") and not returns
    if isinstance(statement, ast.ClassDef):
        return any(getattr(part, "name", "").startswith("test") for part in statement.body)
    if _is_comparison(statement):
        return True
    names = {part.id for part in ast.walk(statement) if isinstance(part, ast.Name)}
    calls_program = re.split(r"\W", entry_point)[0] in names and "check" not in names
    return calls_program or any(isinstance(part, ast.Assert) for part in ast.walk(statement))


def _calls_check(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"


def _test_imports(row: Mapping[str, Any]) -> str:
    """The imports that the tests need, which the sanitized MBPP has in a list.

    Raises:
        DataError: it is neither a list of texts nor a text.
    """
    lines = row.get("test_imports") or []
    lines = [lines] if isinstance(lines, str) else lines
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise DataError(f"field 'test_imports' is {kind_of(lines)}; write a list of texts, one import in each")
    return "\n".join(lines)


def _called_name(row: Mapping[str, Any], column: str) -> str:
    """The function that the first assertion calls: MBPP has no column for it.

    Functions of Python (`set(shared(...)) == ...`), and those that the tests import or define, are others.

    Raises:
        DataError: there is none, or a test is not Python.
    """
    tests = row[column] if isinstance(row[column], list | tuple) else [row[column]]
    texts = {f"field {column!r}, test {number}": test for number, test in enumerate(tests, start=1)}
    texts |= {"field 'test_imports'": _test_imports(row), "field 'test_setup_code'": row.get("test_setup_code")}
    nodes = [node for where, text in texts.items() if isinstance(text, str) for node in ast.walk(_parsed(text, where))]
    others = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)} | set(dir(builtins))
    others |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    others |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for assertion in nodes:
        for node in ast.walk(assertion) if isinstance(assertion, ast.Assert) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in others:
                return node.func.id
    raise DataError("field 'entry_point' is missing: name the function that the tests call")


def _begun_program(prompt: str, entry_point: str) -> str | None:
    """Of a prompt that is itself the beginning of the program, as in HumanEval, all but the entry point; None for other prompts."""
    if not defines(prompt, entry_point):
        return None
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return "\n".join(ast.unparse(part) for part in tree.body if getattr(part, "name", None) != entry_point)


def _column(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((name for name in names if row.get(name) is not None), names[0])


# ---- Texts of the fields ----------------------------------------------------------------------------------------------------


def _verdict_text(tests: int, ran: int, failing: int, well_formed: bool) -> str:
    format_note = "" if well_formed else "; the program is not in one closed code block that defines the function"
    if not failing and ran == tests:
        return f"Verdict: correct; all {tests} tests pass{format_note}."
    rest = f", {tests - ran} did not run" if 0 < ran < tests else ""
    return f"Verdict: incorrect; {ran - failing} of {tests} tests pass{rest}{format_note}."


def _test_text(result: Result) -> str:
    text = failing_test_text(result.number, result.test, result.got)
    if result.got == "`None`" and result.outcome.output.strip():
        return f"{text[:-1]}; printed={quoted(result.outcome.output, 60)}, but a value must be returned."
    return text


def failing_test_text(number: int, test: UnitTest, got: str) -> str:
    """The feedback about one failing test."""
    call = test.run.text if test.outside else test.run.text.removeprefix("assert ").replace(f"{CHECK}(", "check(")
    return f"Failing test {number}: call={quoted(call)}; expected={test.wanted}; got={got}."


def _got(outcome: Outcome, limits: Limits) -> str:
    if outcome.status == "returned":
        try:
            return quoted(outcome.value.shown if isinstance(outcome.value, Other) else repr(outcome.value))
        except ValueError:  # Python writes no integer of more digits
            return "a number of more than 4300 digits"
    if outcome.status == "raised" and outcome.error is not None:
        return quoted(outcome.error.type)  # the field `traceback` has the rest
    return "no value" if outcome.status in ("time", "memory") else f"no value: the program {_ending(outcome, limits)}"


def _ending(outcome: Outcome, limits: Limits) -> str:
    return {
        "time": f"runs for more than {limits.cpu_seconds} s",
        "memory": f"needs more than {limits.memory_bytes >> 20} MB of memory",
        "died": "ends its process" + (f" (signal {outcome.signal})" if outcome.signal else ""),
        "large": f"returns more than {limits.result_bytes >> 10} KB",
    }.get(outcome.status, "returns something that cannot be read")


def _traceback_text(outcome: Outcome, lines: Sequence[str]) -> str:
    assert outcome.error is not None  # its status is "raised"
    error, line = outcome.error, outcome.error.line
    place = f" in line {line}, {quoted(lines[line - 1])}" if line is not None and line <= len(lines) else ""
    return f"Traceback: {quoted(f'{error.type}: {error.text}'.removesuffix(': '))}{place}."


def _load_field(load: Outcome, lines: Sequence[str], limits: Limits) -> tuple[str, str]:
    """The field about a program that cannot be loaded, so that no test runs."""
    if load.status != "raised" or load.error is None:
        return "limits", f"Limits: before any test, the program {_ending(load, limits)}."
    text = _traceback_text(load, lines).removeprefix("Traceback: ")
    if load.error.type == "SyntaxError":
        return "syntax", f"Syntax error: {text}"
    if load.error.type in ("ImportError", "ModuleNotFoundError"):
        return "imports", f"Import error: {text} Only the standard library can be imported."
    return "traceback", f"Traceback, before any test: {text}"


def _undefined(outcome: Outcome, entry_point: str) -> bool:
    name = re.split(r"\W", entry_point)[0]
    error = outcome.error
    return error is not None and error.type == "NameError" and error.line is None and f"'{name}'" in error.text
