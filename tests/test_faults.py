"""What goes wrong while a run goes on: one outcome each, counted, and nothing that was done is lost."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import TrainerCallback

from firedistill import FeedbackField, SelfDistillTrainer, Verdict
from firedistill.memory import OutOfMemory, in_smaller_pieces
from firedistill.objectives import Objective, register
from firedistill.rollouts.engine import Response
from firedistill.run.checkpoints import newest_checkpoint
from firedistill.run.log import RunLog, read_jsonl
from firedistill.run.trackers import guard_trackers
from firedistill.tasks.guard import GuardedTask, TaskFault, TimeIsUp, time_limit
from killable import killable_config
from tiny import ToyTask, save_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "base")


def trainer(model, run, task=None, method="fire", **changes) -> SelfDistillTrainer:
    settings = {"per_device_train_batch_size": 4, "lora_dropout": 0.0, "save_steps": 100, "eval_size": 0, "steps": 3, **changes}
    return SelfDistillTrainer(args=killable_config(model, run, method, **settings), task=task or ToyTask())


def rows_of(t: SelfDistillTrainer) -> list[dict]:
    t.train()
    rows = read_jsonl(Path(t.args.output_dir) / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, t.args.max_steps + 1)), "the run came to its end"
    return rows


# ---- The task's own functions ----------------------------------------------------------------------------------------------


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
    """Some examples bring out the worst in its verifier, its feedback or its prompt."""

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
    task = GuardedTask(Faulty(how), seconds=0.2)
    bad, good = task.examples("train", 2)
    begun = time.perf_counter()
    verdict = task.verify(bad, "ab")
    assert time.perf_counter() - begun < 3
    assert verdict == Verdict(False, None, "even", failed=True)
    assert task.verify(good, "ab").correct and not task.verify(good, "ab").failed
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "no alarm is left behind"


@pytest.mark.parametrize(
    ("how", "complaint"),
    [("raise", "raised ZeroDivisionError: by zero and more"), ("sleep", "longer than 0.2 s"), ("nonsense", "returned a dict")],
)
def test_feedback_that_does_not_come(how, complaint):
    task = GuardedTask(Faulty(how, "feedback"), seconds=0.2)
    with pytest.raises(TaskFault, match=f"toy/train/0: feedback of Faulty .*{complaint}"):
        task.feedback(task.examples("train", 1)[0], "a", Verdict(False, "1", "even"))
    with pytest.raises(TaskFault, match="holds a str, expected FeedbackField"):
        GuardedTask(Faulty("fields", "feedback")).feedback(task.examples("train", 1)[0], "a", Verdict(False, "1", "even"))


def test_a_run_with_a_faulty_verifier_counts_it_and_trains_on_the_rest(model, tmp_path, caplog):
    rows = rows_of(trainer(model, tmp_path / "run", Faulty("raise"), eval_size=4))
    rollouts = [r for path in sorted(tmp_path.glob("run/rollouts/step_*")) for r in pq.read_table(path).to_pylist()]
    failed = [r for r in rollouts if int(r["uid"].rpartition("/")[2]) % 2 == 0]
    assert sum(row.get("failed_verdicts", 0) for row in rows) == len(failed) > 0
    assert not any(r["trained"] or r["correct"] for r in failed) and any(r["trained"] for r in rollouts)
    assert [row["failed_verdicts"] for row in read_jsonl(tmp_path / "run" / "evals.jsonl")] == [2, 2]
    assert "verify of Faulty raised ZeroDivisionError" in caplog.text and any(row["skipped_update"] == 0 for row in rows)


@pytest.mark.parametrize("method", ["fire", "tropd"])
def test_a_run_with_faulty_feedback_counts_it_and_trains_on_the_rest(method, model, tmp_path):
    rows = rows_of(trainer(model, tmp_path / "run", Faulty("raise", "feedback"), method))
    assert sum(row.get("failed_feedback", 0) for row in rows) > 0 and any(row["skipped_update"] == 0 for row in rows)


def test_a_prompt_that_cannot_be_built_leaves_its_example_out(model, tmp_path, caplog):
    rows = rows_of(trainer(model, tmp_path / "run", Faulty("raise", "prompt")))
    assert sum(row.get("skipped_over_budget", 0) for row in rows) > 0
    assert "toy/train/0 left out: its prompt cannot be built (ZeroDivisionError" in caplog.text


def test_the_time_limit_leaves_other_timers_alone():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeIsUp), time_limit(0.1):
            time.sleep(5)
        assert not rang
        time.sleep(0.4)
        assert rang, "the other timer rings when it was to ring"
        with time_limit(None):
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- Responses and gradients -----------------------------------------------------------------------------------------------


def test_empty_responses_are_counted(model, tmp_path):
    class Silent:
        def generate(self, prompts, sampling, seed, progress=None, limits=None):
            return [Response([] if i % 2 else [50, 51, 52], "" if i % 2 else "abc", False) for i in range(len(prompts))]

    t = trainer(model, tmp_path / "run")
    t.rollout_engine = Silent()
    rows = rows_of(t)
    assert [row["empty_responses"] for row in rows] == [2, 2, 2] and all(row["skipped_update"] == 0 for row in rows)


@register("one_bad_response")
class OneBadResponse(Objective):
    """The loss of one example is not a number."""

    def needs_teacher(self, rollout):
        return False

    def loss(self, batch):
        bad = any(rollout.example.uid == "toy/train/3" for rollout in batch.rollouts)
        return (batch.student.hidden.float() ** 2).mean() * (math.nan if bad else 1.0)


def test_one_response_without_a_finite_loss_costs_its_step_and_is_named(model, tmp_path, caplog):
    t = trainer(model, tmp_path / "run", method="one_bad_response", weight_decay=0.5)
    untouched = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.before = (
                [p.detach().clone() for p in t.teacher.parameters.values()],
                [v.clone() for v in t.teacher.shadow.values()],
            )

        def on_step_end(self, args, state, control, **kwargs):
            after = list(t.teacher.parameters.values()), list(t.teacher.shadow.values())
            untouched.append(
                all(torch.equal(a, b) for x, y in zip(self.before, after, strict=True) for a, b in zip(x, y, strict=True))
            )

    t.add_callback(Watch())
    rows = rows_of(t)
    uids = [{r["uid"] for r in pq.read_table(path).to_pylist()} for path in sorted(tmp_path.glob("run/rollouts/step_*"))]
    bad = ["toy/train/3" in step for step in uids]
    assert bad == untouched == [bool(row["skipped_update"]) for row in rows] and True in bad and False in bad
    assert "the gradient is not finite, so nothing is updated; trained on:" in caplog.text and "toy/train/3" in caplog.text


# ---- Memory ----------------------------------------------------------------------------------------------------------------


def out_of_memory_above(limit: int, scorer, real):
    def score(*arguments):
        if scorer.max_tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(*arguments)

    return score


def test_scoring_goes_on_in_smaller_pieces(model, tmp_path, caplog):
    expected = rows_of(trainer(model, tmp_path / "whole", share_prefixes=False))
    t = trainer(model, tmp_path / "run", share_prefixes=False, score_tokens_per_forward=8192)
    t.view_scorer.score = out_of_memory_above(1000, t.view_scorer, t.view_scorer.score)
    rows = rows_of(t)
    assert t.view_scorer.max_tokens == 512 and sum(row.get("out_of_memory", 0) for row in rows) == 4
    assert "max_tokens of the ViewScorer is 4096 from now on" in caplog.text
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-4)


def test_memory_that_is_too_small_in_any_case_is_said_clearly(model, tmp_path):
    t = trainer(model, tmp_path / "run")
    t.view_scorer.score = out_of_memory_above(0, t.view_scorer, t.view_scorer.score)
    with pytest.raises(OutOfMemory, match="out of memory .*scoring a single response does not fit; lower max_context_tokens"):
        t.train()
    t = trainer(model, tmp_path / "other")
    t.objective.loss = lambda batch: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OutOfMemory, match="lower per_device_train_batch_size and raise gradient_accumulation_steps"):
        t.train()


def test_sampling_goes_on_in_smaller_batches_with_the_same_responses(model, tmp_path):
    expected = rows_of(trainer(model, tmp_path / "whole"))
    t = trainer(model, tmp_path / "run")
    real = t.rollout_engine.generate

    def generate(*arguments, **options):
        if t.rollout_engine.batch_size > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried")
        return real(*arguments, **options)

    t.rollout_engine.generate = generate
    rows = rows_of(t)
    assert t.rollout_engine.batch_size == 2 and rows[0]["out_of_memory"] == 4
    assert [row["generated_tokens"] for row in rows] == [row["generated_tokens"] for row in expected]


def test_other_errors_are_not_mistaken_for_memory():
    def broken():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        in_smaller_pieces(broken, lambda: True, "")


# ---- Disk and trackers -----------------------------------------------------------------------------------------------------


class Between(TrainerCallback):
    """Does one thing at the end of a step and another at the end of a later one."""

    def __init__(self, actions):
        self.actions = actions

    def on_step_end(self, args, state, control, **kwargs):
        self.actions.get(state.global_step, lambda: None)()


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_tried_again(model, tmp_path, caplog):
    """The system itself refuses files beyond a size, as a full disk does."""
    t = trainer(model, tmp_path / "run", save_steps=1, save_total_limit=1, steps=4)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    t.add_callback(Between({2: lambda: limit(12_000), 4: lambda: limit(before[0])}))
    seen = []
    real = t._save_checkpoint

    def save(*arguments):
        real(*arguments)
        seen.append(newest_checkpoint(tmp_path / "run").name)

    t._save_checkpoint = save
    try:
        rows = rows_of(t)
    finally:
        limit(before[0])
    assert seen == ["checkpoint-1", "checkpoint-1", "checkpoint-1", "checkpoint-4"], (
        "the earlier one stays until a new one is there"
    )
    assert [row.get("failed_checkpoints", 0) for row in rows] == [0, 0, 1, 2]
    assert "checkpoint-2 could not be written" in caplog.text and "Make room" in caplog.text
    assert not list((tmp_path / "run").glob(".unfinished*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_rows_wait_for_a_disk_that_is_full(model, tmp_path, caplog):
    t = trainer(model, tmp_path / "run", save_steps=2, steps=4)
    rows, aside = tmp_path / "run" / "metrics.jsonl", tmp_path / "aside"

    def fill():
        rows.rename(aside)
        rows.symlink_to("/dev/full")

    def empty():
        rows.unlink()
        aside.rename(rows)

    t.add_callback(Between({1: fill, 3: empty}))
    t.train()
    found = read_jsonl(rows)
    assert [row["step"] for row in found] == [1, 2, 3, 4], "none was lost"
    assert "rows of metrics.jsonl wait until they can be written" in caplog.text and found[-1]["failed_writes"] == 2
    assert found[-1]["failed_checkpoints"] == 1, "a checkpoint counts on its rows"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


def test_half_a_row_never_spoils_the_next(tmp_path, monkeypatch):
    log = RunLog(tmp_path)
    log.metrics({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, limits[1]))
    try:
        log.metrics({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n' and log.failed_writes == 1
    log.metrics({"step": 3})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_rollouts_that_cannot_be_written_are_counted(tmp_path):
    log = RunLog(tmp_path)
    (tmp_path / "rollouts").write_text("in the way")
    log.rollouts(1, [{"step": 1}])
    assert log.failed_writes == 1


def test_a_tracker_that_goes_away_does_not_take_the_run_with_it(model, tmp_path, caplog):
    class Tracker(TrainerCallback):
        calls = 0

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.calls += 1
            if self.calls > 1:
                raise ConnectionError("the tracker is gone")

    Tracker.__module__ = "transformers.integrations.integration_utils"
    t = trainer(model, tmp_path / "run", steps=4)
    tracker = Tracker()
    t.add_callback(tracker)
    t.trackers = guard_trackers(t.callback_handler.callbacks)
    rows = rows_of(t)
    assert [row.get("failed_tracker_calls", 0) for row in rows] == [0, 0, 1, 2] and tracker.calls >= 4
    assert caplog.text.count("the tracker Tracker failed in on_log (ConnectionError: the tracker is gone)") == 1


def test_feedback_may_be_a_list():
    class Listing(ToyTask):
        def feedback(self, example, response, verdict):
            return [FeedbackField("a", "b")]

    example = ToyTask().examples("train", 1)[0]
    assert GuardedTask(Listing()).feedback(example, "", Verdict(False, None, "even")) == (FeedbackField("a", "b"),)
