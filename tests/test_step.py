"""The stages of a step: which rollouts train and why others do not, the updates of a step and their micro-batches, seeds and rates."""

from __future__ import annotations

import random

import pytest
import torch

from firedistill import Example, FeedbackField, Verdict
from firedistill.objectives import Objective, load_objective
from firedistill.prompts import CUT_MARK, PromptEncoder, TokenBudget, student_messages, teacher_messages
from firedistill.rollout import Response, Rollout
from firedistill.step import (
    Selection,
    Update,
    add_feedback,
    learning_rate_factor,
    plan_updates,
    rollout_metrics,
    select_rollouts,
    step_seed,
)
from firedistill.tasks.guard import GuardedTask, TaskFault
from firedistill.teacher import Teacher
from firedistill.trainer import TrainingOrder
from tiny import ToyTask, byte_tokenizer, random_model

ENCODER = PromptEncoder(byte_tokenizer())


class PickyTask(ToyTask):
    """No feedback about example 13, and long feedback about example 14."""

    def feedback(self, example, response, verdict):
        if example.uid == "toy/train/13":
            raise LookupError("no such key")
        outcome, hint = super().feedback(example, response, verdict)
        return outcome, FeedbackField("hint", hint.text * (5 if example.uid == "toy/train/14" else 1))


def rollout(number: int = 0, length: int = 3, correct: bool = False, finished: bool = True, **changes) -> Rollout:
    verdict = Verdict(correct, None, "even", well_formed=changes.pop("well_formed", True), failed=changes.pop("failed", False))
    example = Example(f"toy/train/{number}", "Why? " * changes.pop("words", 1), "even")
    ids = ENCODER.encode(student_messages(ToyTask(), example))
    return Rollout(example, ids, Response([20] * length, "x" * length, finished), verdict, prompt_index=number, **changes)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(random_model(), GuardedTask(PickyTask()), ENCODER)


def selected(rollouts, teacher, method="fire", budget=None, **options) -> Selection:
    objective = method if isinstance(method, Objective) else load_objective(method)
    return select_rollouts(rollouts, objective, teacher, budget or TokenBudget(), **options)


# ---- What trains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "reason", "options"),
    [
        (rollout(1, failed=True), "failed_verdicts", {}),
        (rollout(1, failed=True, length=0), "failed_verdicts", {}),
        (rollout(1, length=0), "empty_responses", {}),
        (rollout(1, correct=True, length=0), "empty_responses", {}),
        (rollout(1, finished=False), "dropped_unfinished", {"drop_unfinished": True}),
        (rollout(1, correct=True, well_formed=False), "dropped_unfinished", {"drop_unfinished": True}),
        (rollout(13), "failed_feedback", {}),
        (rollout(1, words=400), "skipped_over_budget", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_reason_to_leave_a_rollout_out_is_counted(left_out, reason, options, teacher, caplog):
    kept = [rollout(2), rollout(3, correct=True)]
    selection = selected([kept[0], left_out, kept[1], left_out], teacher, **options)
    uids = [r.example.uid for r in selection.rollouts]
    assert uids == [kept[0].example.uid, left_out.example.uid, kept[1].example.uid, left_out.example.uid]
    assert [r.example.uid for r in selection.trained] == [kept[0].example.uid, kept[1].example.uid]
    assert all(any(r is member for member in selection.rollouts) for r in selection.trained)
    row = selection.metrics.row()
    assert row.pop("naive_teacher_tokens") > 0 and row == {reason: 2}
    # A fault of the task and an exhausted budget are named in the log; the others are in the rows of the step alone.
    told = {
        "failed_feedback": "raised LookupError: no such key; the response",
        "skipped_over_budget": "longer than max_context",
    }
    assert told.get(reason, "") in caplog.text and (reason in told) == (left_out.example.uid in caplog.text)


@pytest.mark.parametrize("words", [1, 400])
def test_a_fault_in_a_view_without_a_field(words, teacher, monkeypatch, caplog):
    """It leaves the response out, unless the full view is over the budget already."""
    messages = teacher.messages

    def without_a_field(example, feedback, view):
        if view == 1 and example.uid == "toy/train/1":
            raise TaskFault("no view 1")
        return messages(example, feedback, view)

    monkeypatch.setattr(teacher, "messages", without_a_field)
    selection = selected([rollout(1, words=words), rollout(2)], teacher)
    assert [r.example.uid for r in selection.trained] == ["toy/train/2"] and len(selection.rollouts[0].feedback) == 2
    reason = "failed_feedback" if words == 1 else "skipped_over_budget"
    assert selection.metrics.row()[reason] == 1 and ("no view 1" in caplog.text) == (words == 1)


def test_prompts_of_a_step_are_tokenized_in_two_calls(monkeypatch):
    teacher, calls = Teacher(random_model(), GuardedTask(PickyTask()), PromptEncoder(byte_tokenizer())), []
    encode_pieces = teacher.encoder.encode_pieces
    monkeypatch.setattr(teacher.encoder, "encode_text", lambda text: [0])
    monkeypatch.setattr(teacher.encoder, "encode_pieces", lambda prompts: calls.append(len(prompts)) or encode_pieces(prompts))
    selection = selected([rollout(1), rollout(2, correct=True), rollout(3)], teacher)
    assert len(selection.trained) == 3 and calls == [2, 2 * 2], "the full views of wrong responses, then those without a field"


def test_unfinished_responses_train_unless_they_are_dropped(teacher):
    rollouts = [rollout(1, finished=False), rollout(2, correct=True, well_formed=False)]
    assert len(selected(rollouts, teacher).trained) == 2
    assert selected(rollouts, teacher, drop_unfinished=True).trained == []


class Wrong(Objective):
    """Trains on wrong responses only, without a teacher."""

    def trains(self, rollout):
        return not rollout.verdict.correct

    def needs_teacher(self, rollout):
        return False


def test_responses_that_the_method_does_not_train_on_are_no_failures(teacher):
    rollouts = [rollout(1, correct=True, finished=False), rollout(13), rollout(2, correct=True, failed=True)]
    selection = selected(rollouts, teacher, Wrong(), drop_unfinished=True)
    assert selection.rollouts == rollouts and selection.trained == [rollouts[1]], "without teacher, nothing is added to them"
    assert selection.metrics.row() == {"failed_verdicts": 1, "naive_teacher_tokens": 0}


def test_feedback_is_built_for_the_responses_that_a_teacher_reads(teacher):
    wrong, correct = selected([rollout(1), rollout(2, correct=True)], teacher).rollouts
    assert [field.name for field in wrong.feedback] == ["outcome", "hint"] and correct.feedback == ()
    assert wrong.feedback[0].text == "The length 3 is odd."
    assert [r.feedback for r in selected([rollout(1)], teacher, "on_policy_sft").rollouts] == [()]
    assert [len(r.feedback) for r in selected([rollout(1), rollout(2, correct=True)], teacher, "full_context").trained] == [
        2,
        2,
    ]


def test_long_feedback_is_cut_and_counted(teacher, caplog):
    budget = TokenBudget(feedback=150)
    selection = selected([rollout(14), rollout(1)], teacher, budget=budget)
    long, short = selection.trained
    assert selection.metrics.row()["cut_feedback_fields"] == 1
    assert "toy/train/14: feedback over 150 tokens; cut: hint" in caplog.text and "toy/train/1:" not in caplog.text
    assert long.feedback[1].text.endswith(CUT_MARK) and not short.feedback[1].text.endswith(CUT_MARK)
    assert sum(len(ENCODER.encode_text(field.text)) for field in long.feedback) <= 150
    fitted, cut = add_feedback(rollout(14), teacher, 150)
    assert fitted.feedback == long.feedback and cut == ["hint"]


def test_the_context_budget_is_that_of_the_full_view(teacher):
    (trained,) = selected([rollout(1)], teacher).trained
    size = teacher.view_tokens(trained, "full")
    assert size == len(ENCODER.encode(teacher_messages(teacher.task, trained.example, trained.feedback))) + 3
    assert len(selected([rollout(1)], teacher, budget=TokenBudget(context=size)).trained) == 1
    over = selected([rollout(1)], teacher, budget=TokenBudget(context=size - 1))
    assert over.trained == [] and len(over.rollouts[0].feedback) == 2, "the log of rollouts shows what was too long"
    assert over.metrics.row() == {"skipped_over_budget": 1}
    correct = selected([rollout(1, correct=True)], teacher, budget=TokenBudget(context=1))
    assert len(correct.trained) == 1, "the teacher does not read it"


def test_naive_teacher_tokens_are_those_of_all_views(teacher):
    rollouts = [rollout(1, length=5), rollout(2, correct=True), rollout(3, length=2, failed=True)]
    tokens = {
        method: selected(rollouts, teacher, method).metrics.row()["naive_teacher_tokens"]
        for method in ("fire", "no_attribution", "full_context", "on_policy_sft")
    }
    wrong, correct = selected(rollouts, teacher, "full_context").trained
    assert tokens["fire"] == sum(teacher.view_tokens(wrong, view) for view in ("full", 0, 1))
    assert tokens["no_attribution"] == teacher.view_tokens(wrong, "full")
    assert tokens["full_context"] == teacher.view_tokens(wrong, "full") + teacher.view_tokens(correct, "full")
    assert tokens["on_policy_sft"] == 0


def test_rollout_metrics_count_guided_responses_apart():
    rollouts = [
        rollout(0, length=4, correct=True),
        rollout(1, length=2, finished=False, well_formed=False),
        rollout(2, length=9, correct=True, prefix_length=3, draft_tokens=8),
    ]
    assert rollout_metrics(rollouts).row() == {
        "generated_tokens": 4 + 2 + (9 - 3 + 8),
        "correct_rate": 0.5,
        "truncated_rate": 0.5,
        "response_length": 3.0,
        "well_formed_rate": 0.5,
        "guided_correct_rate": 1.0,
        "prefix_length": 3.0,
    }
    assert rollout_metrics([]).row() == {"generated_tokens": 0}


# ---- Updates and micro-batches ---------------------------------------------------------------------------------------------


def prepared(numbers) -> list[tuple[Rollout, str]]:
    return [(rollout(number), f"prepared {position}") for position, number in enumerate(numbers)]


class Planned(Objective):
    """Several updates per step."""

    plan = ((0, 3), (2,), (1, 0))

    def updates(self, prompts, draw):
        assert list(prompts) == [0, 1, 2, 3]
        return [list(chosen) for chosen in self.plan]


def test_a_step_is_one_update_by_default():
    rollouts = prepared([0, 0, 2])
    (update,) = plan_updates(load_objective("fire"), rollouts, 4, random.Random(0), 0, 1)
    assert update.rollouts == rollouts and (update.prompts, update.trained_rollouts) == (4, 3)
    (empty,) = plan_updates(load_objective("fire"), [], 4, random.Random(0), 0, 1)
    assert empty.rollouts == [] and (empty.prompts, empty.trained_rollouts) == (4, 0)


def test_updates_hold_the_rollouts_of_their_prompts():
    rollouts = prepared([0, 0, 1, 3])
    first, last = plan_updates(Planned(), rollouts, 4, random.Random(0), 0, 1)
    assert first.rollouts == [rollouts[0], rollouts[1], rollouts[3]] and last.rollouts == rollouts[:3]
    assert [(u.prompts, u.trained_rollouts) for u in (first, last)] == [(2, 3), (2, 3)], (
        "the update without rollouts is left out"
    )
    (empty,) = plan_updates(Planned(), [], 4, random.Random(0), 0, 1)
    assert empty.rollouts == [] and (empty.prompts, empty.trained_rollouts) == (4, 0)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_divide_every_update_among_them(processes, monkeypatch):
    """Each process passes its own rollouts and gets its share of the rollouts of all."""
    shares = [prepared([0, 0, 1]), prepared([2, 3]), prepared([])][:processes]
    everyone = [item for share in shares for item in share]
    monkeypatch.setattr("firedistill.step.gather_object", lambda own: [(None, *item) for item in everyone])
    plans = [plan_updates(Planned(), shares[p], 4, random.Random(0), p, processes) for p in range(processes)]
    for position, (prompts, whole) in enumerate([((0, 3), 3), ((2,), 1), ((1, 0), 3)]):
        parts = [plan[position] for plan in plans]
        found = [item for part in parts for item in part.rollouts]
        assert len(found) == whole and set(found) == {item for item in everyone if item[0].prompt_index in prompts}
        assert max(len(part.rollouts) for part in parts) - min(len(part.rollouts) for part in parts) <= 1
        assert {(part.prompts, part.trained_rollouts) for part in parts} == {(len(prompts), whole)}


def test_updates_draw_alike():
    rollouts, objective = prepared([0, 1, 2, 3]), load_objective("top_d", {"minibatch_prompts": 2, "epochs": 2})
    plans = [plan_updates(objective, rollouts, 4, random.Random(seed), 0, 1) for seed in (1, 1, 2)]
    orders = [[[item[0].prompt_index for item in update.rollouts] for update in plan] for plan in plans]
    assert orders[0] == orders[1] != orders[2] and all(len(plan) == 4 for plan in plans)
    for plan in plans:
        for epoch in (plan[:2], plan[2:]):
            assert sorted(item[0].prompt_index for update in epoch for item in update.rollouts) == [0, 1, 2, 3]
        assert all((update.prompts, update.trained_rollouts) == (2, 2) for update in plan)


def sizes(batches) -> list[int]:
    return [len(batch) for batch in batches]


def test_micro_batches_sort_by_length_and_cover_the_update():
    lengths = [9, 2, 5, 7, 1, 4, 8]
    items = [(rollout(0, length), length) for length in lengths]
    update = Update(items, 4, 7)
    batches = update.micro_batches(3, 1)
    assert [[length for _, length in batch] for batch in batches] == [[1, 2, 4], [5, 7, 8], [9]]
    assert update.rollouts == items, "the update itself is left in its order"
    assert sizes(update.micro_batches(1, 1)) == [7]
    prompts = Update([(rollout(0, 3, words=3), "long"), (rollout(0, 5), "short")], 2, 2)
    assert [batch[0][1] for batch in prompts.micro_batches(2, 1)] == ["short", "long"], "prompts count, too"


def test_few_rollouts_fill_the_first_micro_batches():
    items = prepared(range(5))
    assert sizes(Update(items, 8, 5).micro_batches(4, 4)) == [4, 1, 0, 0]
    assert sizes(Update(items, 8, 5).micro_batches(4, 2)) == [2, 2, 1, 0]
    assert sizes(Update([], 8, 0).micro_batches(3, 4)) == [0, 0, 0]
    assert sizes(Update(prepared(range(9)), 8, 9).micro_batches(2, 4)) == [5, 4], "each micro-batch is larger if need be"


# ---- Seeds, rates and order ------------------------------------------------------------------------------------------------


def test_every_step_and_process_has_its_own_seed():
    seeds = {step_seed(seed, step, process) for seed in range(3) for step in range(200) for process in range(8)}
    assert len(seeds) == 3 * 200 * 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(5, 7) == step_seed(5, 7, 0) == (5 * 1_000_003 + 7) * 1_009
    assert 0 <= step_seed(2**62, 10**6, 100) < 2**63
    torch.Generator().manual_seed(step_seed(2**62, 10**6, 100))


@pytest.mark.parametrize(("warmup", "total"), [(25, 200), (0, 10), (3, 3), (1, 1)])
def test_schedule_has_no_step_of_rate_zero(warmup, total):
    factors = [learning_rate_factor(step, warmup, total) for step in range(1, total + 1)]
    assert all(0 < factor <= 1 for factor in factors)
    if warmup:
        assert factors[0] == pytest.approx(1 / warmup) and factors[warmup - 1] == 1
    assert learning_rate_factor(total + 1, warmup, total) == pytest.approx(0, abs=1e-12)
    assert learning_rate_factor(total, 0, total, "constant") == 1
    assert [learning_rate_factor(step, 1, 6) for step in (3, 4)] == pytest.approx([0.75, 0.5])


def test_order_is_one_seeded_shuffle_reshuffled_at_the_end():
    examples = ToyTask().examples("train", 5)
    order = [e.uid for e in (TrainingOrder(examples, 12, seed=3)[i] for i in range(12))]
    assert sorted(order[:5]) == sorted(order[5:10]) == sorted(e.uid for e in examples)
    assert order[:5] != order[5:10]
    assert [TrainingOrder(examples, 12, seed=3)[i].uid for i in (11, 2, 7)] == [order[11], order[2], order[7]]
    other = [TrainingOrder(examples, 12, seed=4)[i].uid for i in range(12)]
    assert other != order and other[:5] != order[5:10], "a seed does not begin where the previous one is after a round"
