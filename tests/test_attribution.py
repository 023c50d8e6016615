"""Inspecting single responses stays within the budgets of training, and says what it leaves out."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace

import pytest
import torch

from firedistill import FeedbackField, attribution
from firedistill.attribution import Inspector
from firedistill.cli import main as cli
from firedistill.evaluation import answer_examples
from firedistill.functional import fire_target, sft_weight
from firedistill.models.states import score_responses
from firedistill.prompts import PromptEncoder, shown_prompt
from tiny import ToyTask, run_config, run_trainer


class Fields(ToyTask):
    """Every response is wrong and gets the same number of fields."""

    def __init__(self, count: int = 2):
        self.count = count

    def verify(self, example, response):
        verdict = super().verify(example, response)
        return type(verdict)(False, verdict.submitted, "even")

    def feedback(self, example, response, verdict):
        return (FeedbackField(f"f{i}", f"hint {i}") for i in range(self.count))


def inspector_and_rollouts(checkpoint, folder, count, **changes):
    trainer = run_trainer(checkpoint, folder, Fields(count), **changes)
    args = trainer.args
    rollouts, _ = answer_examples(
        trainer.rollout_engine, trainer.task, trainer.encoder, trainer.eval_examples, args.sampling, args.budget, args.seed
    )
    return Inspector(args, trainer.model, trainer.teacher, trainer.head, trainer.encoder), [
        r for r in rollouts if r.response_ids
    ]


def test_fields_are_attributed(checkpoint, tmp_path):
    inspector, rollouts = inspector_and_rollouts(checkpoint, tmp_path / "run", 32, attribution_views=None)
    told = []
    records = inspector.wrong_answers(rollouts, 2, told.append)
    assert len(records) == 2 and told == [1, 2] and len(records[0]["alpha"]) == 32
    sums = [full + sum(row[t] for row in records[0]["alpha"]) for t, full in enumerate(records[0]["alpha_full"])]
    assert sums == pytest.approx([1.0] * len(records[0]["tokens"]), abs=1e-4)


def test_the_numbers_are_those_of_the_equations(checkpoint, tmp_path):
    """At the step scale of the peak rate, 1e-2 over 1e-3, from views that are read one by one."""
    inspector, rollouts = inspector_and_rollouts(checkpoint, tmp_path / "run", 3, log_prob_floor=-6.0)
    found = inspector.inspect(rollouts[0])
    row, rollout, teacher = inspector.record(found), found.rollout, inspector.teacher
    with torch.no_grad():
        student = score_responses(inspector.model.eval(), [rollout.prompt_ids], [rollout.response_ids])
        z = inspector.head(student.hidden)
        full, *without = (teacher.head(teacher.states([rollout], [view])[0].hidden) for view in ("full", 0, 1, 2))
    target = fire_target(z, full, torch.stack(without), step_scale=10.0, log_prob_floor=-6.0)
    expected = {"rho": target.rho, "gradient_norm": target.energy.sqrt(), "chi": target.chi, "alpha_full": target.alpha[0]}
    expected |= {"eta": target.eta, "beta": sft_weight(z, torch.tensor(rollout.response_ids), 10.0)}
    for name, values in expected.items():
        assert row[name] == pytest.approx(values.tolist(), rel=1e-3, abs=1e-6), name
    for name, rows in {"alpha": target.alpha[1:], "energy": target.field_energy}.items():
        for of_field, values in zip(row[name], rows, strict=True):
            assert of_field == pytest.approx(values.tolist(), rel=1e-3, abs=1e-6), name
    assert len(set(map(tuple, row["alpha"]))) == 3 and (target.chi > 0).any(), "the fields can be told apart"


def test_a_record_has_the_students_prompt_and_no_answer_where_none_was_found(checkpoint, tmp_path):
    inspector, rollouts = inspector_and_rollouts(checkpoint, tmp_path / "run", 2)
    teachers, rollout = inspector.teacher.encoder, replace(rollouts[0], verdict=replace(rollouts[0].verdict, submitted=None))
    inspector.teacher.encoder = PromptEncoder(copy.deepcopy(teachers.tokenizer))
    inspector.teacher.encoder.tokenizer.chat_template = "of the teacher"
    assert inspector.record(inspector.inspect(rollout))["submitted"] == ""
    assert inspector.record(inspector.inspect(rollout))["prompt"] == shown_prompt(
        inspector.teacher.task, teachers, rollout.example
    )


def test_targets_of_one_chunk_are_held_at_once(checkpoint, tmp_path, monkeypatch):
    inspector, rollouts = inspector_and_rollouts(checkpoint, tmp_path / "run", 2)
    targets, alive = [], []

    def watched(*logits, **settings):
        alive.append(sum(target() is not None for target in targets))
        found = fire_target(*logits, **settings)
        targets.append(weakref.ref(found.log_probs))
        return found

    monkeypatch.setattr(attribution, "fire_target", watched)
    monkeypatch.setattr(attribution, "chunks", lambda hidden, *_, **__: [slice(t, t + 1) for t in range(len(hidden))])
    rollout = max(rollouts, key=lambda rollout: len(rollout.response_ids))
    found = inspector.inspect(rollout)
    assert len(found.target.rho) == len(rollout.response_ids) == len(alive) > 2 and set(alive) == {0}


def test_what_training_would_not_read_is_not_inspected(checkpoint, tmp_path, caplog):
    budget = {"max_context_tokens": 700, "max_prompt_tokens": 400}
    inspector, rollouts = inspector_and_rollouts(checkpoint, tmp_path / "run", 20, **budget)
    complaint = r"the teacher view has \d+ tokens, max_context_tokens is 700"
    with pytest.raises(ValueError, match=rf"^toy/eval/\d: {complaint}$"):
        inspector.inspect(rollouts[0])
    assert inspector.wrong_answers(rollouts, 2) == []
    assert caplog.text.count("left out of the attribution") == len(rollouts)


def test_the_command_says_so_in_one_line(checkpoint, tmp_path, capsys):
    config = run_config(
        checkpoint, tmp_path / "run", task="test_attribution:Fields", max_context_tokens=300, max_prompt_tokens=200
    )
    config.save_yaml(tmp_path / "mine.yaml")
    assert cli.main(["inspect", str(tmp_path / "mine.yaml"), "--use_cpu", "true"]) == 2
    told = capsys.readouterr().err
    assert "toy/eval/0: the teacher view has" in told and "max_context_tokens is 300" in told and told.count("\n") == 1
