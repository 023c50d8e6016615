"""Tasks whose functions raise, hang or return something else: a verdict always comes, and a run continues without the rest."""

from __future__ import annotations

import contextlib
import re
import signal
import time

import pyarrow.parquet as pq
import pytest

from firedistill import FeedbackField, Verdict
from firedistill.run.log import read_jsonl
from firedistill.tasks.guard import GuardedTask, TaskFault, TimeIsUp, time_limit
from tiny import ToyTask, run_trainer


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


@pytest.mark.parametrize("how", ["raise", "exit", "nonsense", "loop", "sleep", "regex", "deaf"])
def test_a_verifier_that_gives_no_verdict(how):
    task = GuardedTask(Faulty(how), seconds=0.1)
    bad, good = task.examples("train", 2)
    start = time.perf_counter()
    verdict = task.verify(bad, "ab")
    assert time.perf_counter() - start < 3
    assert verdict == Verdict(False, None, "even", failed=True)
    assert task.verify(good, "ab").correct and not task.verify(good, "ab").failed
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "no alarm is left behind"


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
        with pytest.raises(TimeIsUp), time_limit(0.1):
            time.sleep(5)
        assert not rang
        time.sleep(0.4)
        assert rang, "the other timer rings at its time"
        with time_limit(None):
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_feedback_may_be_a_list():
    class Listing(ToyTask):
        def feedback(self, example, response, verdict):
            return [FeedbackField("a", "b")]

    example = ToyTask().examples("train", 1)[0]
    assert GuardedTask(Listing()).feedback(example, "", Verdict(False, None, "even")) == (FeedbackField("a", "b"),)


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
    assert "toy/train/0 left out: its prompt cannot be built (ZeroDivisionError" in caplog.text
