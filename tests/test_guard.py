"""Tasks whose functions raise, hang or return something else: a verdict always comes, and a run continues without the rest."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from firedistill import Example, FeedbackField, Verdict
from firedistill.run.log import read_jsonl
from firedistill.setup import load_setup
from firedistill.tasks import load_task
from firedistill.tasks.guard import MAX_CHARACTERS, MAX_FIELDS, GuardedTask, TaskFault, explained
from firedistill.tasks.process import TimeIsUp, kept_state, time_limit
from firedistill.warmstart import WarmStartConfig, WarmStartTrainer
from tiny import ToyTask, run_config, run_trainer


def hang(how: str) -> None:
    if how == "loop":
        while True:
            pass
    if how == "sleep":
        time.sleep(60)
    if how == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if how == "deaf":
        while True:
            with contextlib.suppress(Exception):
                time.sleep(60)
    if how.startswith("alarm"):  # a time limit of its own, which it takes back
        signal.alarm(5)
        signal.alarm(0)
        hang(how.removeprefix("alarm "))
    if how.startswith("ignored"):
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        try:
            hang(how.removeprefix("ignored "))
        finally:
            signal.signal(signal.SIGALRM, before)
    if how == "text":
        raise Unreadable(60)


class Unreadable(Exception):
    """An error whose text takes long, or raises."""

    def __str__(self):
        time.sleep(self.args[0])
        raise SystemExit


class SandboxTimeout(BaseException):
    """As sandboxes define it, so that no `except Exception` of the program that they run catches it."""


class Faulty(ToyTask):
    """Its verifier, its feedback or its prompt fails for every other example."""

    def __init__(self, how: str, where: str = "verify"):
        self.how, self.where = how, where

    def act(self, example, where):
        if where != self.where or int(example.uid.rpartition("/")[2]) % 2:
            return None
        if self.how == "raise":
            raise ZeroDivisionError("by zero\nand more")
        if self.how == "exit":
            raise SystemExit(3)
        errors = {"generator": GeneratorExit, "stop": StopIteration, "sandbox": SandboxTimeout, "unreadable": Unreadable}
        if self.how in errors:
            raise errors[self.how](0)
        if self.how == "nonsense":
            return {"correct": True}
        if self.how == "fields":
            return ("a text",)
        return hang(self.how)

    def prompt(self, example):
        return self.act(example, "prompt") or super().prompt(example)

    def verify(self, example, response):
        return self.act(example, "verify") or super().verify(example, response)

    def feedback(self, example, response, verdict):
        return self.act(example, "feedback") or super().feedback(example, response, verdict)


RAISING = ["raise", "exit", "nonsense", "generator", "stop", "sandbox", "unreadable"]
HANGING = [
    "loop",
    "sleep",
    "regex",
    "deaf",
    "alarm loop",
    "alarm sleep",
    "alarm regex",
    "ignored sleep",
    "ignored loop",
    "text",
]


@pytest.mark.parametrize("how", ["raise", "exit", "stop", "generator", "sleep"])
def test_a_verifier_in_a_thread_that_gives_no_verdict(how):
    task = Faulty(how)
    task.at_once = 2
    guarded = GuardedTask(task, seconds=0.5)
    bad, good = guarded.examples("train", 2)
    calls = [(example, guarded.begin("verify", example, "ab")) for example in (bad, bad, bad, good)]
    verdicts = [guarded.verify(example, "ab", call) for example, call in calls]
    assert [verdict.failed for verdict in verdicts] == [True, True, True, False] and verdicts[3].correct


def test_a_block_that_is_left_before_it_begins_explains_nothing():
    """The time may be up between the two; what a discarded object raises would be an error of pytest here."""
    block = explained("the block")
    block.__enter__()
    del block
    gc.collect()


@pytest.mark.parametrize("how", [*RAISING, *HANGING])
def test_a_verifier_that_gives_no_verdict(how):
    faulty = Faulty(how)
    bad, good = faulty.examples("train", 2)
    assert GuardedTask(faulty, seconds=0.1).verify(bad, "ab") == Verdict(False, None, "even", failed=True)
    verdict = GuardedTask(faulty, seconds=30.0).verify(good, "ab")  # on a busy machine, too
    assert verdict.correct and not verdict.failed
    assert signal.getitimer(signal.ITIMER_REAL) == signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("how", "complaint"),
    [("raise", "raised ZeroDivisionError: by zero and more"), ("sleep", "longer than 0.1 s"), ("nonsense", "returned a dict")],
)
def test_feedback_that_does_not_come(how, complaint):
    task = GuardedTask(Faulty(how, "feedback"), seconds=0.1)
    with pytest.raises(TaskFault, match=f"toy/train/0: feedback of Faulty .*{complaint}"):
        task.feedback(task.examples("train", 1)[0], "a", Verdict(False, "1", "even"))
    with pytest.raises(TaskFault, match="holds a str, expected FeedbackField"):
        GuardedTask(Faulty("fields", "feedback")).feedback(task.examples("train", 1)[0], "a", Verdict(False, "1", "even"))


def test_the_time_limit_leaves_other_timers_alone():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeIsUp), kept_state(), time_limit(0.1):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.alarm(0)
            time.sleep(5)
        assert not rang
        time.sleep(0.4)
        assert rang, "the other timer rings at its time"
        with time_limit(None), time_limit(float("inf")):
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_time_limits_one_in_another():
    with pytest.raises(TimeIsUp), time_limit(60), time_limit(0.05):
        time.sleep(60)
    with pytest.raises(TimeIsUp), time_limit(0.2):
        with time_limit(60):
            pass
        time.sleep(60)


def test_many_short_calls_are_not_interrupted():
    for _ in range(300):
        with contextlib.suppress(TimeIsUp), time_limit(0.001):
            pass
    time.sleep(0.01)
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


def test_no_time_limit_outside_of_the_main_thread():
    found = []
    task = GuardedTask(ToyTask(), 0.01)
    thread = threading.Thread(target=lambda: found.append(task.verify(task.examples("train", 1)[0], "ab")))
    thread.start()
    thread.join()
    assert found[0].correct


def test_ctrl_c_is_nobodys_verdict():
    class Interrupted(ToyTask):
        def verify(self, example, response):
            signal.raise_signal(signal.SIGINT)
            return super().verify(example, response)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for commands in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            GuardedTask(Interrupted(), 5).verify(ToyTask().examples("train", 1)[0], "ab")
    finally:
        signal.signal(signal.SIGINT, before)


class Careless(ToyTask):
    """Leaves settings of the process behind."""

    def verify(self, example, response):
        os.chdir("/")
        sys.stdout = sys.stderr = io.StringIO()
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.alarm(60)
        return super().verify(example, response)


class Forking(ToyTask):
    """A sandbox whose child process raises instead of ending."""

    def verify(self, example, response):
        child = os.fork()
        if child == 0:
            raise SystemExit(3)
        assert os.waitpid(child, 0)[1] != 0
        return super().verify(example, response)


def test_a_process_that_a_verifier_forks_does_not_go_on_as_a_second_trainer(tmp_path):
    task, main = GuardedTask(Forking(), 30), os.getpid()
    assert task.verify(task.examples("train", 1)[0], "ab").correct
    if os.getpid() != main:
        os._exit(0)


def state_of_the_process():
    torch_state = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    return os.getcwd(), sys.stdout, sys.stderr, *torch_state, *handlers, signal.getitimer(signal.ITIMER_REAL)


def test_what_a_verifier_leaves_behind_is_undone():
    task, before = GuardedTask(Careless(), 5), state_of_the_process()
    assert task.verify(task.examples("train", 1)[0], "ab").correct
    assert state_of_the_process() == before


# ---- Values of other types -------------------------------------------------------------------------------------------------


class Returning(ToyTask):
    """A task whose methods return given values."""

    def __init__(self, **values):
        self.values = values

    def verify(self, example, response):
        return self.values["verify"] if "verify" in self.values else super().verify(example, response)

    def feedback(self, example, response, verdict):
        return self.values["feedback"] if "feedback" in self.values else super().feedback(example, response, verdict)

    def prompt(self, example):
        return self.values.get("prompt", example.question)

    def examples(self, split, n=None, seed=0, data_dir=None):
        return self.values["examples"] if "examples" in self.values else super().examples(split, n)


def kind(value) -> str:
    return value[:12] if isinstance(value, str) else type(value).__name__


EXAMPLE = Example("toy/train/0", "Why?", "even")
TRUTHS = [True, np.True_, np.bool_(1), torch.tensor(True), torch.tensor([1]), np.array([True]), 1, 1.0, np.int64(1)]
TEXTS = [("a", "a"), (np.str_("a"), "a"), (3, "3"), (np.float64(0.5), "0.5"), (Fraction(1, 2), "1/2"), (torch.tensor(7), "7")]
NO_TRUTHS = [None, "false", "True", {}, [], [True], 0.5, 2, float("nan"), np.array([True, False]), object(), torch.tensor(0.5)]
NO_TEXTS = [{}, ["a"], b"a", float("nan"), np.inf, object(), np.array([1, 2]), 10**5000, "a" * (MAX_CHARACTERS + 1), complex(1)]


@pytest.mark.parametrize("value", TRUTHS, ids=repr)
def test_truth_values_of_other_types(value):
    false = type(value)(0) if isinstance(value, int | float | np.generic) else value ^ value
    given = Verdict(value, None, "even", false, value, false)
    verdict = GuardedTask(Returning(verify=given), 5).verify(EXAMPLE, "")
    assert verdict == Verdict(True, None, "even", False, True, False)
    assert all(type(getattr(verdict, name)) is bool for name in ("correct", "well_formed", "lenient_correct", "failed"))


@pytest.mark.parametrize(("value", "text"), TEXTS, ids=repr)
def test_texts_of_other_types(value, text):
    task = Returning(verify=Verdict(False, value, value), feedback=[FeedbackField(value, value)])
    verdict = GuardedTask(task).verify(EXAMPLE, "")
    (field,) = GuardedTask(task).feedback(EXAMPLE, "", verdict)
    texts = [verdict.submitted, verdict.expected, field.name, field.text]
    assert texts == [text] * 4 and all(type(found) is str for found in texts)


def test_a_guarded_task_can_be_copied():
    task = GuardedTask(ToyTask(), seconds=3.0)
    for copied in (copy.copy(task), copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert type(copied) is GuardedTask and (copied.name, copied.seconds) == ("toy", 3.0)


def test_a_verdict_as_declared_is_the_same_object():
    class Own(Verdict):
        pass

    given = Own(True, "1", "1")
    assert GuardedTask(Returning(verify=given)).verify(EXAMPLE, "") is given
    changed = GuardedTask(Returning(verify=replace(given, expected=None, correct=np.True_))).verify(EXAMPLE, "")
    assert type(changed) is Own and changed.expected == "" and changed.correct is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("correct", value) for value in NO_TRUTHS),
        *((name, {}) for name in ("well_formed", "lenient_correct", "failed")),
        *((name, value) for name in ("submitted", "expected") for value in NO_TEXTS),
    ],
    ids=kind,
)
def test_verdicts_that_mean_nothing_are_failed_ones(name, value, caplog):
    given = replace(Verdict(False, None, "even"), **{name: value})
    assert GuardedTask(Returning(verify=given), 5).verify(EXAMPLE, "") == Verdict(False, None, "even", failed=True)
    problem = "has 1,000,001 characters" if isinstance(value, str) and name != "correct" else f"is a {type(value).__name__}"
    assert f"toy/train/0: verify of Returning: Verdict.{name} {problem}" in caplog.text


def endless():
    while True:
        yield FeedbackField("a", "b")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "returned a NoneType"),
        ({"a": "b"}, "returned a dict"),
        ("text", "returned a str"),
        (3, "returned a int"),
        ([("a", "b")], "holds a tuple, expected FeedbackField"),
        ([None], "holds a NoneType"),
        (endless(), f"returned more than {MAX_FIELDS} fields"),
        ((1 / 0 for _ in "a"), "raised ZeroDivisionError"),
        ([FeedbackField("a", "b"), FeedbackField("a", "c")], "field 'a': two fields have this name"),
        ([FeedbackField("1", "b"), FeedbackField(1, "c")], "field '1': two fields have this name"),
        ([FeedbackField("a", "b" * 600_000), FeedbackField("c", "d" * 600_000)], "1,200,000 characters in all"),
        ([FeedbackField("full", "b")], "field 'full': this name stands for the feedback as a whole"),
        *(([FeedbackField("a", value)], "FeedbackField.text") for value in [None, *NO_TEXTS]),
        *(([FeedbackField(value, "a")], "FeedbackField.name") for value in [None, *NO_TEXTS]),
    ],
    ids=kind,
)
def test_feedback_that_means_nothing(value, complaint):
    with pytest.raises(TaskFault, match=f"toy/train/0: feedback of Returning.*{complaint}"):
        GuardedTask(Returning(feedback=value), 5).feedback(EXAMPLE, "", Verdict(False, None, "even"))


FIELDS = (FeedbackField("a", "b"), FeedbackField("c", "d"))


@pytest.mark.parametrize(
    "value", [list(FIELDS), FIELDS, iter(FIELDS), (f for f in FIELDS), dict.fromkeys(FIELDS).keys()], ids=kind
)
def test_feedback_may_be_any_iterable(value):
    assert GuardedTask(Returning(feedback=value)).feedback(EXAMPLE, "", Verdict(False, None, "even")) == FIELDS


def test_feedback_may_be_one_field_or_none():
    assert GuardedTask(Returning(feedback=FIELDS[0])).feedback(EXAMPLE, "", Verdict(False, None, "even")) == FIELDS[:1]
    assert GuardedTask(Returning(feedback=[])).feedback(EXAMPLE, "", Verdict(False, None, "even")) == ()


@pytest.mark.parametrize("value", [None, 3, ["a"], b"a", {"role": "user"}])
def test_prompts_that_are_no_texts(value):
    with pytest.raises(TaskFault, match=f"toy/train/0: prompt of Returning returned a {type(value).__name__}, expected text"):
        GuardedTask(Returning(prompt=value)).prompt(EXAMPLE)


@pytest.mark.parametrize("how", HANGING)
@pytest.mark.parametrize("where", ["prompt", "feedback"])
def test_every_method_has_a_time_limit(where, how):
    task = GuardedTask(Faulty(how, where), seconds=0.1)
    with pytest.raises(TaskFault, match=rf"{where} of Faulty took longer than 0.1 s \(task_timeout\)"):
        task.prompt(EXAMPLE) if where == "prompt" else task.feedback(EXAMPLE, "", Verdict(False, None, "even"))


# ---- Examples and classes --------------------------------------------------------------------------------------------------


def test_examples_from_an_iterator_and_more_than_requested(caplog):
    examples = [Example(i, f"Question {i}", "even") for i in range(5)]
    assert [e.uid for e in GuardedTask(Returning(examples=iter(examples))).examples("train", 3)] == ["0", "1", "2"]
    assert not caplog.records
    assert len(GuardedTask(Returning(examples=examples)).examples("train", 3)) == 3
    assert "returned 5 examples; the first 3, which were requested, are used" in caplog.text
    assert len(GuardedTask(Returning(examples=examples)).examples("train")) == 5


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "returned a NoneType, expected a list of Example"),
        ({"a": EXAMPLE}, "returned a dict"),
        ("text", "returned a str"),
        ([EXAMPLE, 7], "entry 1 is a int, expected Example"),
        ([("a", "b", "c")], "entry 0 is a tuple"),
        ([FIELDS[0]], "entry 0 is a FeedbackField"),
        ((1 / 0 for _ in "a"), "raised ZeroDivisionError: division by zero"),
        ([replace(EXAMPLE, uid=None)], "Example.uid is a NoneType"),
        ([replace(EXAMPLE, question=3)], r"entry 0 \(toy/train/0\): Example.question is a int, expected text"),
        ([replace(EXAMPLE, question=None)], "Example.question is a NoneType"),
        ([replace(EXAMPLE, solution=["a"])], "Example.solution is a list"),
        ([replace(EXAMPLE, category=3)], "Example.category is a int"),
        ([replace(EXAMPLE, labels="AB")], "Example.labels is not a tuple of texts"),
        ([replace(EXAMPLE, options=(1, 2))], "Example.options is not a tuple of texts"),
    ],
)
def test_examples_of_other_types(value, complaint, checkpoint, tmp_path):
    with pytest.raises(TaskFault, match=rf"examples\('train'\) of Returning.*{complaint}"):
        run_trainer(checkpoint, tmp_path / "run", Returning(examples=value))
    if isinstance(value, list):
        with pytest.raises(TaskFault, match=f"train_examples.*{complaint}"):
            load_setup(run_config(checkpoint, tmp_path / "run"), task=ToyTask(), train_examples=value)


BROKEN = """
from firedistill import Task, task
import sys

class Raises(Task):
    def __init__(self): raise SystemExit("no key")

class NeedsMore(Task):
    def __init__(self, path): ...

class Loads(Task):
    def examples(self, *arguments): raise LookupError("no such row")

class Lacks:
    def examples(self, *arguments): ...

class Refuses(Task):
    def examples(self, *arguments): raise ValueError("no such row")

def nothing(): ...

@task
def rows(): ...

@task("{rows}", answer="exact")
def judged(row, response): return 1 / 0
"""


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Raises", r"broken_task:Raises\(\) raised SystemExit: no key"),
        ("NeedsMore", r"broken_task:NeedsMore\(\) raised TypeError: .*path"),
        ("Lacks", "broken_task:Lacks is not a task: derive it from firedistill.Task"),
        ("nothing", "broken_task:nothing is not a task"),
        ("rows", r"broken_task:rows is decorated without parentheses: write @task\(\), or @task\(answer=...\)"),
        ("Raisse", "broken_task has no Raisse; did you mean Raises"),
    ],
)
def test_classes_that_are_no_tasks(name, complaint, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"question": "1?", "answer": "a"}\n' * 5)
    (tmp_path / "broken_task.py").write_text(BROKEN.replace("{rows}", str(tmp_path / "rows.jsonl")))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        load_task(f"broken_task:{name}")
    with pytest.raises(TaskFault, match=r"examples\('train'\) of Loads raised LookupError: no such row"):
        GuardedTask(load_task("broken_task:Loads")).examples("train")
    with pytest.raises(TaskFault, match=r"examples\('train'\) of Refuses raised ValueError: no such row"):
        GuardedTask(load_task("broken_task:Refuses")).examples("train")
    judged = GuardedTask(load_task("broken_task:judged"))
    with pytest.raises(TaskFault, match="verify of TableTask 'judged' raised ZeroDivisionError"):
        judged.verdict(judged.examples("train")[0], "a")


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "1 / 0", "def", "import sys; sys.exit()", "raise BaseException"])
def test_modules_that_cannot_be_imported(source, tmp_path, monkeypatch):
    name = f"module_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"importing {name} raised "):
        load_task(f"{name}:Task")
    for wrong in (ToyTask, 3, None):
        with pytest.raises(ValueError, match="expected a name, or an instance"):
            load_task(wrong)


# ---- Runs ------------------------------------------------------------------------------------------------------------------


def rows_of(checkpoint, folder, task, method="fire", **changes) -> list[dict]:
    run_trainer(
        checkpoint, folder, task, method=method, **{"max_steps": 2, "eval_size": 0, "save_strategy": "no", **changes}
    ).train()
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2], "the run came to its end"
    return rows


def test_a_run_with_a_faulty_verifier_counts_it_and_trains_on_the_rest(checkpoint, tmp_path, caplog):
    rows = rows_of(checkpoint, tmp_path / "run", Faulty("raise"), eval_size=4)
    rollouts = [r for path in sorted(tmp_path.glob("run/rollouts/step_*")) for r in pq.read_table(path).to_pylist()]
    failed = [r for r in rollouts if int(r["uid"].rpartition("/")[2]) % 2 == 0]
    assert sum(row.get("failed_verdicts", 0) for row in rows) == len(failed) > 0
    assert not any(r["trained"] or r["correct"] for r in failed) and any(r["trained"] for r in rollouts)
    assert [row["failed_verdicts"] for row in read_jsonl(tmp_path / "run" / "evals.jsonl")] == [2, 2]
    assert "verify of Faulty raised ZeroDivisionError" in caplog.text and any(row["skipped_update"] == 0 for row in rows)


@pytest.mark.parametrize("method", ["fire", "tropd"])
def test_a_run_with_faulty_feedback_counts_it_and_trains_on_the_rest(method, checkpoint, tmp_path):
    rows = rows_of(checkpoint, tmp_path / "run", Faulty("raise", "feedback"), method)
    assert sum(row.get("failed_feedback", 0) for row in rows) > 0 and any(row["skipped_update"] == 0 for row in rows)


def test_a_prompt_that_cannot_be_built_leaves_its_example_out(checkpoint, tmp_path, caplog):
    rows = rows_of(checkpoint, tmp_path / "run", Faulty("raise", "prompt"))
    assert sum(row.get("skipped_over_budget", 0) for row in rows) > 0
    assert (
        "toy/train/0 left out: its prompt cannot be built (toy/train/0: prompt of Faulty raised ZeroDivisionError"
        in caplog.text
    )


# ---- Runs with other faults ------------------------------------------------------------------------------------------------


class Flaky(ToyTask):
    """Its prompt fails at every third call."""

    calls = 0

    def prompt(self, example):
        self.calls += 1
        if self.calls % 3 == 0:
            raise ConnectionError("no answer")
        return super().prompt(example)


@pytest.mark.parametrize("method", ["fire", "tropd", "demopsd"])
def test_a_prompt_that_fails_now_and_then_leaves_responses_out(method, checkpoint, tmp_path):
    rows = rows_of(checkpoint, tmp_path / "run", Flaky(), method, eval_size=4, eval_steps=1, attribution_examples=2)
    assert sum(row.get("skipped_over_budget", 0) for row in rows) > 0
    prompts = [r["prompt"] for path in tmp_path.glob("run/rollouts/*") for r in pq.read_table(path).to_pylist()]
    assert any("prompt of Flaky raised ConnectionError: no answer" in prompt for prompt in prompts)


def test_a_warm_start_with_such_a_prompt(checkpoint, tmp_path):
    options = {"model": checkpoint, "model_dtype": "float32", "max_steps": 2, "eval_size": 0, "use_cpu": True}
    config = WarmStartConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, save_strategy="no", **options)
    WarmStartTrainer(args=config, task=Flaky()).train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and sum(row.get("skipped_over_budget", 0) for row in rows) > 0


class Odd(ToyTask):
    """The verdicts and the feedback of `ToyTask` in other types."""

    def verify(self, example, response):
        verdict = super().verify(example, response)
        right = np.bool_(verdict.correct)
        return Verdict(right, len(response), verdict.expected, torch.tensor(True), right, np.False_)

    def feedback(self, example, response, verdict):
        return (field for field in ToyTask().feedback(example, response, verdict))


def test_a_run_with_values_of_other_types_equals_one_with_the_declared_ones(checkpoint, tmp_path):
    runs = []
    for name, task in (("plain", ToyTask()), ("odd", Odd())):
        rows = rows_of(checkpoint, tmp_path / name, task, eval_size=4)
        steps = [{key: value for key, value in row.items() if "second" not in key} for row in rows]
        evaluations = [
            {k: v for k, v in row.items() if "second" not in k} for row in read_jsonl(tmp_path / name / "evals.jsonl")
        ]
        rollouts = [pq.read_table(path).to_pylist() for path in sorted((tmp_path / name).glob("rollouts/*"))]
        runs.append((steps, evaluations, rollouts))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("task", [Faulty("sandbox"), Returning(verify=Verdict({}, None, "even")), Careless()], ids=kind)
def test_a_run_with_a_hostile_verifier_comes_to_its_end(task, checkpoint, tmp_path):
    before = state_of_the_process()
    rows = rows_of(checkpoint, tmp_path / "run", task, eval_size=2)
    assert state_of_the_process() == before
    assert sum(row.get("failed_verdicts", 0) for row in rows) > 0 or isinstance(task, Careless)
