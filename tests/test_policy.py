"""What updates do to the policy: the measures against a literal reading, without effect on the run, and the shortened update."""

from __future__ import annotations

import math

import pytest
import torch

from firedistill.memory import BatchLimit
from firedistill.policy import MOST_TRIES, PolicyChange
from firedistill.rollout import Response, Rollout
from firedistill.run.log import read_jsonl
from firedistill.tasks import Example, Verdict
from tiny import adapter_weights, run_trainer

MEASURED = {"policy_kl", "policy_kl_max", "weight_step", "weight_step_relative"}
TIMES = {"train_seconds", "cumulative_train_seconds", "seconds_rollout", "seconds_score", "seconds_update"}


def trained(checkpoint, folder, **changes):
    trainer = run_trainer(checkpoint, folder, **{"eval_size": 0, "save_strategy": "no", **changes})
    trainer.train()
    rows = [{name: value for name, value in row.items() if name not in TIMES} for row in read_jsonl(folder / "metrics.jsonl")]
    return trainer, rows


def rollouts_of(lengths):
    generator = torch.Generator().manual_seed(3)
    return [
        Rollout(
            Example(f"x/{length}", "?", "1"),
            torch.randint(3, 200, (5,), generator=generator).tolist(),
            Response(torch.randint(3, 200, (length,), generator=generator).tolist(), "", True),
            Verdict(False, None, "1"),
        )
        for length in lengths
    ]


def log_probs(model, rollouts):
    """`[T, V]` float64 log-probabilities of each response's positions, by the model's own forward pass."""
    found = []
    with torch.no_grad():
        for rollout in rollouts:
            ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
            logits = model.eval()(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double()
            found.append(logits - logits.exp().sum(-1, keepdim=True).log())
    return found


def test_the_measures_are_those_of_the_definition(checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path / "run", max_steps=1, eval_size=0)
    model, rollouts = trainer.model, rollouts_of([4, 1, 7, 3])
    before, start = log_probs(model, rollouts), adapter_weights(trainer)
    change = PolicyChange(model, rollouts, BatchLimit(16, "tokens", ""))
    assert float(change.kl().abs().max()) < 1e-7 and change.weight_step()[0] == 0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in change.parameters.values():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    after = log_probs(model, rollouts)
    expected = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(before, after, strict=True)])
    torch.testing.assert_close(change.kl().double(), expected, rtol=1e-4, atol=1e-6)
    moved = adapter_weights(trainer)
    squares = [
        sum(float((w.double() ** 2).sum()) for w in part) for part in ([moved[n] - start[n] for n in start], start.values())
    ]
    assert change.weight_step() == pytest.approx((math.sqrt(squares[0]), math.sqrt(squares[0] / squares[1])), rel=1e-6)
    row = change.metrics().row()
    assert row.keys() == MEASURED
    assert row["policy_kl"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert row["policy_kl_max"] == pytest.approx(float(expected.max()), rel=1e-4)


@pytest.mark.parametrize("method", ["fire", "top_d"])
def test_measuring_does_not_change_the_run(method, checkpoint, tmp_path):
    plain, rows = trained(checkpoint, tmp_path / "off", method=method)
    measured, other_rows = trained(checkpoint, tmp_path / "on", method=method, policy_kl_every=2)
    assert [row.keys() >= MEASURED for row in other_rows] == [True, False, True, False]
    assert all(row["policy_kl_max"] >= row["policy_kl"] > 0 and row["weight_step"] > 0 for row in other_rows[::2])
    assert [{name: value for name, value in row.items() if name not in MEASURED} for row in other_rows] == rows
    weights = adapter_weights(measured)
    assert all(torch.equal(value, weights[name]) for name, value in adapter_weights(plain).items())


@pytest.mark.parametrize("method", ["fire", "top_d"])
def test_an_update_is_shortened_to_the_radius_and_others_are_left_alone(method, checkpoint, tmp_path, monkeypatch):
    plain, rows = trained(checkpoint, tmp_path / "off", method=method, policy_kl_every=1)
    radius = min(row["policy_kl"] for row in rows) / (5 if method == "fire" else 500)  # of a step; TOP-D makes four updates
    _, wide = trained(checkpoint, tmp_path / "wide", method=method, policy_step_radius=1e3, policy_kl_every=1)
    added = {"policy_step_share", "policy_step_tries"}
    assert all(row["policy_step_share"] == 1 and row["policy_step_tries"] == 1 for row in wide)
    assert [{name: value for name, value in row.items() if name not in added} for row in wide] == rows
    kept, scale_back = [], PolicyChange.scale_back

    def measured(change, *arguments):
        metrics = scale_back(change, *arguments)
        kept.append(float(change.kl().double().mean()))
        return metrics

    monkeypatch.setattr(PolicyChange, "scale_back", measured)
    _, short = trained(checkpoint, tmp_path / "short", method=method, policy_step_radius=radius, policy_kl_every=1)
    assert len(kept) == len(short) * (1 if method == "fire" else 4) and 0 < min(kept) <= max(kept) < radius * (1 + 1e-6)
    assert all(0 < row["policy_step_share"] < 1 and 2 <= row["policy_step_tries"] <= 4 for row in short)
    if method == "fire":  # one update per step: what is measured is what was limited
        assert all(radius / 3 < row["policy_kl"] <= radius for row in short)


@pytest.mark.parametrize("change_of_weights", [1.0, math.inf])
def test_an_update_that_cannot_be_shortened_is_undone(change_of_weights, checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path / "run", max_steps=1, eval_size=0)
    start = adapter_weights(trainer)
    change = PolicyChange(trainer.model, rollouts_of([3]), BatchLimit(64, "tokens", ""))
    with torch.no_grad():
        for p in change.parameters.values():
            p.add_(change_of_weights)
    calls = []
    row = change.scale_back(1e-3, lambda kl: calls.append(len(kl)) or math.nan).row()
    assert row["policy_step_share"] == 0 and len(calls) == MOST_TRIES and set(calls) == {3}
    assert all(torch.equal(value, start[name]) for name, value in adapter_weights(trainer).items())


def test_the_papers_optimizer_step_and_a_larger_epsilon(checkpoint, tmp_path):
    """SGD with momentum is resumed exactly; the epsilon of AdamW arrives."""
    sgd = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.5, "save_strategy": "steps"}
    whole, rows = trained(checkpoint, tmp_path / "whole", **sgd)
    (group, *_) = whole.optimizer.param_groups
    assert group["momentum"] == 0.9 and type(whole.optimizer.optimizer) is torch.optim.SGD
    assert any(state.get("momentum_buffer") is not None for state in whole.optimizer.state.values())
    part = run_trainer(checkpoint, tmp_path / "whole", eval_size=0, **sgd)
    part.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    again = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    assert all(torch.equal(value, adapter_weights(part)[name]) for name, value in adapter_weights(whole).items())
    adam, _ = trained(checkpoint, tmp_path / "adam", adam_epsilon=1e-3, max_steps=1)
    assert adam.optimizer.param_groups[0]["eps"] == 1e-3
