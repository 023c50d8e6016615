"""Groups of feedback fields: what is removed together, by name or because there are many, and FIRE's equations on groups."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

import reference
from firedistill import FeedbackField, SelfDistillConfig
from firedistill import step as steps
from firedistill.attribution import Inspector
from firedistill.benchmarks.fields import WrongAnswers
from firedistill.evaluation import answer_examples
from firedistill.models.states import score_responses
from firedistill.objectives import load_objective
from firedistill.prompts import field_groups, grouped, joined, teacher_messages
from firedistill.run.log import read_jsonl
from firedistill.tasks.guard import GuardedTask, TaskFault
from test_teacher import example, moved_teacher, rollout
from tiny import ToyTask, run_config, run_trainer, save_checkpoint


def fields(*names: str, **groups: str) -> tuple[FeedbackField, ...]:
    return tuple(FeedbackField(name, f"text of {name}", groups.get(name)) for name in names)


# ---- Which fields belong together --------------------------------------------------------------------------------------------------


def test_a_group_is_one_view_and_a_field_without_a_group_another():
    feedback = fields("a", "test_1", "b", "test_2", "tests", test_1="tests", test_2="tests")
    assert field_groups(feedback) == [("a", 0), ("tests", (1, 3, 4)), ("b", 2)], "a field with a group's name is part of it"
    assert field_groups(fields("a", "b")) == [("a", 0), ("b", 1)] and field_groups(()) == []


def test_patterns_name_groups_and_the_first_that_fits_decides():
    feedback = grouped(fields("test_1", "style", "Test_2", "hint", hint="own"), {"test_*": "tests", "*st*": "late"})
    assert [field.group for field in feedback] == ["tests", "late", "late", "own"]


@pytest.mark.parametrize("entry", ["tests", "=tests", "test_*=", "a=full"])
def test_what_is_no_group_is_refused_by_name(entry):
    with pytest.raises(ValueError, match=r"attribution_groups has .*expected PATTERN=GROUP"):
        SelfDistillConfig(use_cpu=True, attribution_groups=["b*=ok", entry])


def test_more_fields_than_views_are_joined_evenly_to_neighbours():
    feedback = fields(*(f"f{j}" for j in range(7)))
    assert joined(feedback, None) == joined(feedback, 7) == feedback
    assert field_groups(joined(feedback, 3)) == [("f0..f1", (0, 1)), ("f2..f3", (2, 3)), ("f4..f6", (4, 5, 6))]
    assert field_groups(joined(feedback, 1)) == [("f0..f6", tuple(range(7)))]
    mixed = joined(fields("a", "t1", "b", "t2", t1="t", t2="t"), 2)
    assert field_groups(mixed) == [("a", 0), ("t..b", (1, 2, 3))], "a group stays whole"


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 64, 100])
@pytest.mark.parametrize("most", [1, 3, 16])
def test_joined_fields_are_a_partition_of_all(count, most):
    groups = field_groups(joined(fields(*(f"f{j}" for j in range(count))), most))
    members = [view if isinstance(view, tuple) else (view,) for _, view in groups]
    assert sorted(j for group in members for j in group) == list(range(count))
    assert len(groups) == min(count, most) and max(map(len, members)) - min(map(len, members)) <= 1


def test_a_group_of_a_task_is_checked():
    class Grouped(ToyTask):
        def feedback(self, example, response, verdict):
            return fields("a", a=self.group)

    task, judged = Grouped(), example()
    guard = GuardedTask(task)
    for group, message in (("full", "stands for the feedback as a whole"), (3, "has the group 3")):
        task.group = group
        with pytest.raises(TaskFault, match=message):
            guard.feedback(judged, "x", None)
    task.group = "mine"
    assert guard.feedback(judged, "x", None)[0].group == "mine"


# ---- What the teacher reads, and the equations -------------------------------------------------------------------------------------


def test_a_view_without_several_fields_empties_each_of_them():
    feedback = fields("a", "b", "c")
    content = teacher_messages(ToyTask(), example(), feedback, (0, 2))[0]["content"]
    assert content.endswith("[Context block 1]\n\n[Context block 2]\ntext of b\n[Context block 3]\n")
    with pytest.raises(ValueError, match="3 fields"):
        teacher_messages(ToyTask(), example(), feedback, (0, 3))


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_rows_with_different_groups_share_a_batch(share_prefixes):
    """Three groups of two fields, one field, none, and five fields of which four are a group."""
    teacher = moved_teacher(share_prefixes=share_prefixes)
    draw = torch.Generator().manual_seed(0)
    feedbacks = [
        fields("a", "b", "c", "d", "e", "f", a="x", d="x", b="y", e="y", c="z", f="z"),
        fields("a"),
        (),
        fields("a", "b", "c", "d", "e", b="g", c="g", d="g", e="g"),
    ]
    rows = [
        replace(rollout(torch.randint(3, 263, (4 + i,), generator=draw).tolist(), (), i), feedback=feedback)
        for i, feedback in enumerate(feedbacks)
    ]
    full = teacher.full(rows)
    tokens = torch.arange(sum(full.lengths))
    found = teacher.states_without_fields(rows, full, tokens)
    assert len(found) == 3
    for i, (row, start) in enumerate(zip(rows, [0, 4, 9, 15], strict=True)):
        views = [view for _, view in field_groups(row.feedback)]
        for j in range(3):
            (expected,) = teacher.states([row], [views[j] if j < len(views) else "full"])
            part = found[j, start : start + 4 + i]
            torch.testing.assert_close(part, expected.hidden, rtol=1e-9, atol=1e-9)


def test_fires_loss_on_groups_is_the_literal_equation_with_the_unions_left_out():
    """From prompts that are written out here, by one forward pass each, in 60-digit arithmetic."""
    from firedistill.objectives import MicroBatch

    teacher = moved_teacher()
    feedback = fields("a", "b", "c", "d", a="x", c="x")  # x, b, d
    row = replace(rollout([20, 21, 22, 23, 2], ()), feedback=feedback)
    model, head = teacher.model, teacher.head
    student = score_responses(model, [row.prompt_ids], [row.response_ids])

    def logits(*without: int) -> torch.Tensor:
        texts = [replace(field, text="") if j in without else field for j, field in enumerate(feedback)]
        prompt = teacher.encoder.encode(teacher_messages(teacher.task, row.example, texts))
        with teacher.weights.applied():
            return head(score_responses(model, [prompt], [row.response_ids]).hidden)

    full, views = logits(), [logits(0, 2), logits(1), logits(3)]
    batch = MicroBatch([row], [None], student, head, teacher, step_scale=100.0)
    loss, metrics = load_objective("fire").loss(batch)
    expected, alphas = 0.0, []
    for t, z in enumerate(head(student.hidden).detach()):
        of_token = reference.fire(z, full[t], [view[t] for view in views], step_scale=100.0)
        expected += float(of_token.loss) / 5
        alphas.append([float(a) for a in of_token.alpha])
    assert any(alpha[0] < 1 for alpha in alphas), "attribution has something to do"
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9)
    means = [sum(column) / 5 for column in zip(*alphas, strict=True)]
    found = metrics.row()
    assert [found[f"alpha_{name}"] for name in ("full", "x", "b", "d")] == pytest.approx(means, rel=1e-6)


# ---- Runs --------------------------------------------------------------------------------------------------------------------------


class ManyTests(ToyTask):
    """One hint and one to twenty tests, by the response."""

    def feedback(self, example, response, verdict):
        tests = [FeedbackField(f"test_{j}", f"input {j}: wrong") for j in range(1 + len(response) % 20)]
        return (FeedbackField("hint", "Answers are right when their length is even."), *tests)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("fields") / "base")


@pytest.mark.parametrize("method", ["fire", "no_projection", "hard_gradient_excision"])
def test_named_groups_are_columns_and_cost_one_view(method, checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path, ManyTests(), method=method, max_steps=2, attribution_groups=["test_*=tests"])
    trainer.train()
    row = read_jsonl(tmp_path / "metrics.jsonl")[0]
    stem = "excised" if method == "hard_gradient_excision" else "alpha"
    assert {name for name in row if name.startswith(f"{stem}_")} - {"alpha_full"} == {f"{stem}_hint", f"{stem}_tests"}


def test_many_fields_are_joined_and_the_log_says_so(checkpoint, tmp_path, caplog):
    steps.say_joined.cache_clear()
    with caplog.at_level(logging.WARNING):
        trainer = run_trainer(
            checkpoint, tmp_path, ManyTests(), max_steps=2, attribution_views=3, max_new_tokens=20, attribution_examples=1
        )
        trainer.train()
    assert caplog.text.count("feedback with more than 3 fields or groups") == 1
    (stored,) = json.loads((tmp_path / "attribution" / "step_000000.json").read_text())["examples"]
    assert 1 < len(stored["fields"]) <= 3 and len(stored["alpha"]) == len(stored["fields"])
    sums = [full + sum(row[t] for row in stored["alpha"]) for t, full in enumerate(stored["alpha_full"])]
    assert sums == pytest.approx([1.0] * len(sums), abs=1e-4)
    shown = "\n".join(field["text"] for field in stored["fields"])
    assert "[test_0] input 0: wrong" in shown, "a group says which fields it holds"


def test_the_limit_does_not_touch_feedback_with_fewer_fields(checkpoint, tmp_path):
    """Attribution to each field alone is the default, bit for bit."""
    losses = []
    for name, views in (("default", 16), ("all", None), ("two", 2)):
        trainer = run_trainer(checkpoint, tmp_path / name, max_steps=2, attribution_views=views)
        trainer.train()
        losses.append([row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == losses[1] == losses[2]


def test_the_inspector_reads_groups(checkpoint, tmp_path):
    args = run_config(checkpoint, tmp_path, attribution_groups=["test_*=tests"])
    trainer = run_trainer(checkpoint, tmp_path, ManyTests(), attribution_groups=["test_*=tests"])
    rollouts, _ = answer_examples(
        trainer.rollout_engine, trainer.task, trainer.encoder, trainer.eval_examples, args.sampling, args.budget, args.seed
    )
    inspection = Inspector(args, trainer.model, trainer.teacher, trainer.head, trainer.encoder).inspect(rollouts[0])
    assert list(inspection.removed) == ["hint", "tests"] and len(inspection.target.alpha) == 3
    assert inspection.text("tests").startswith("[test_0] input 0: wrong") and inspection.text("hint").startswith("Answers")


def test_the_benchmark_compares_joined_fields_with_each_alone():
    rows = {row["variant"]: row["shown"] for row in WrongAnswers(1).rows(5, [2])}
    assert list(rows) == ["each field alone", "2 views", "no attribution"]
    assert rows["each field alone"]["kl"] == 0 and 0 < rows["2 views"]["kl"] <= rows["2 views"]["largest kl"]
    assert rows["2 views"]["views' tokens"] < rows["each field alone"]["views' tokens"]
