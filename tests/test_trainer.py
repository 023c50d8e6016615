"""The trainer: Algorithm 1 on a tiny model, its bookkeeping, and exact resumption."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from peft import AutoPeftModelForCausalLM

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.objectives import Objective, register
from firedistill.rollouts.engine import Response, Rollout
from firedistill.run.log import read_jsonl
from firedistill.trainer import StepLog, TrainingOrder, learning_rate_factor
from firedistill.warmstart import WarmStartConfig, WarmStartTrainer
from tiny import ToyTask, save_checkpoint

METHODS = [
    "fire",
    "no_attribution",
    "no_projection",
    "hard_gradient_excision",
    "full_context",
    "on_policy_sft",
    "veto",
    "demopsd",
    "top_d",
    "tropd",
    "srpo",
    "scope",
]


DIAGNOSTICS = {
    "on_policy_sft": {"nll"},
    "veto": {"veto_beta", "kl"},
    "demopsd": {"demopsd_disagreement", "demopsd_alpha"},
    "top_d": {"top_d_return_std", "top_d_ratio", "top_d_clip_fraction", "grad_norm_max"},
    "tropd": {"tropd_trusted", "tropd_reward", "prefix_length"},
    "srpo": {"srpo_advantage", "srpo_entropy_weight_max", "srpo_teacher_entropy"},
    "scope": {"scope_student_perplexity", "scope_teacher_perplexity", "scope_teacher_weight_max"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "base")


def config(checkpoint: str, folder: Path, **changes) -> SelfDistillConfig:
    settings = {
        "model": checkpoint,
        "task": "toy",
        "model_dtype": "float32",
        "output_dir": str(folder),
        "max_steps": 4,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "max_new_tokens": 9,
        "eval_size": 5,
        "eval_steps": 2,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "top_p": 1.0,
        "temperature": 1.0,
        "nominal_learning_rate": 1e-3,
    }
    return SelfDistillConfig(**{**settings, **changes})


def trainer(checkpoint: str, folder: Path, **changes) -> SelfDistillTrainer:
    return SelfDistillTrainer(args=config(checkpoint, folder, **changes), task=ToyTask())


def adapter_weights(t: SelfDistillTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in t.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_every_method(method, checkpoint, tmp_path):
    t = trainer(checkpoint, tmp_path / "run", method=method)
    start = adapter_weights(t)
    t.train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-2 * learning_rate_factor(k, 2, 4) for k in range(1, 5)])
    assert [row["step_scale"] for row in rows] == pytest.approx([max(1, row["learning_rate"] / 1e-3) for row in rows])
    assert rows[-1]["cumulative_generated_tokens"] == sum(row["generated_tokens"] for row in rows)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert any(not torch.equal(start[name], value) for name, value in adapter_weights(t).items())
    if method == "fire":
        wrong = [row for row in rows if row["correct_rate"] < 1]
        assert wrong and any(row["correct_rate"] > 0 for row in rows), "the toy task must give work to both branches"
        assert all(row["max_bound_ratio"] <= 1 + 1e-4 for row in wrong)
        assert {"alpha_full", "alpha_outcome", "alpha_hint", "beta", "eta", "chi_active"} <= set().union(*rows)
        for row in wrong:
            assert row["alpha_full"] + row["alpha_outcome"] + row["alpha_hint"] == pytest.approx(1, abs=1e-5)
    if method in {"no_attribution", "full_context", "veto", "top_d", "tropd"}:
        # One view each: all that is saved is how its teacher's prompts begin alike.
        assert rows[0]["teacher_tokens"] > 0 and rows[0]["teacher_tokens_saved"] > 0
    if method == "on_policy_sft":
        assert rows[0]["teacher_tokens"] == 0
    assert DIAGNOSTICS.get(method, set()) <= set().union(*rows), "a column that says what the method does"
    groups = {"on_policy_sft": 4, "top_d": 4, "srpo": 4, "scope": 4, "tropd": 5}.get(method, 1)
    for row in rows:
        rollouts = pq.read_table(tmp_path / "run" / "rollouts" / f"step_{row['step']:06d}.parquet").to_pylist()
        assert len(rollouts) == 4 * groups
        sampled = sum(r["response_tokens"] - r["prefix_tokens"] + r["draft_tokens"] for r in rollouts)
        assert row["generated_tokens"] == sampled > 0
    if method == "top_d":
        assert all(row["updates"] == 4 for row in rows)
    if method == "tropd":
        assert rows[0]["prefix_length"] > 0 and "prefix_length" not in rows[-1], "guidance ends with the schedule"
    if method == "veto":
        assert [row["veto_beta"] for row in rows] == pytest.approx([0.8, 0.8 * 2 / 3, 0.8 / 3, 0.0], abs=1e-6)
    evaluations = read_jsonl(tmp_path / "run" / "evals.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert {
        "accuracy",
        "lenient_accuracy",
        "well_formed_rate",
        "stderr",
        "n",
        "truncated_rate",
        "response_length",
    } <= evaluations[0].keys()
    assert evaluations[-1]["cumulative_generated_tokens"] == rows[-1]["cumulative_generated_tokens"]


def test_the_run_directory(checkpoint, tmp_path):
    t = trainer(checkpoint, tmp_path / "run")
    t.train()
    folder = tmp_path / "run"
    rollouts = pq.read_table(folder / "rollouts" / "step_000003.parquet").to_pylist()
    assert len(rollouts) == 4 and {r["uid"].split("/")[0] for r in rollouts} == {"toy"}
    wrong = next(r for r in rollouts if not r["correct"])
    assert [f["name"] for f in wrong["feedback"]] == ["outcome", "hint"] and wrong["trained"]
    assert next(r for r in rollouts if r["correct"])["feedback"] == []
    assert (folder / "checkpoint-4" / "teacher.safetensors").is_file()
    assert not list(folder.rglob("*.bin")), "no pickles of weights or settings"
    assert "| 4 |" in (folder / "README.md").read_text(), "the model card holds the last evaluation"
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(ids).logits, t.model.eval()(ids).logits)
    again = SelfDistillConfig(**t.args.resolved())
    assert again.resolved() == t.args.resolved()


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_change_memory_not_the_result(method, checkpoint, tmp_path):
    results = []
    for size, accumulation in ((4, 1), (1, 4)):
        t = trainer(
            checkpoint,
            tmp_path / f"{size}",
            method=method,
            max_steps=2,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            eval_size=0,
        )
        t.train()
        results.append((read_jsonl(tmp_path / f"{size}" / "metrics.jsonl"), adapter_weights(t)))
    (rows, weights), *others = results
    for other_rows, other_weights in others:
        for row, other in zip(rows, other_rows, strict=True):
            assert row["generated_tokens"] == other["generated_tokens"]
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        for name in weights:
            torch.testing.assert_close(weights[name], other_weights[name], rtol=1e-3, atol=1e-4)


def test_the_objectives_draws_do_not_repeat_the_samplers(checkpoint, tmp_path):
    """Both seed a generator: a token's acceptance must not hang on how it was drawn."""
    t = trainer(checkpoint, tmp_path / "run", method="tropd")
    t.step_log = StepLog(1e-3, 1.0, 0.0)
    draws, sampled_with = (
        torch.rand(200, generator=torch.Generator().manual_seed(seed)) for seed in (t.step_batch([]).seed, t.sampling_seed())
    )
    assert not torch.isin(draws, sampled_with).any()


def test_teacher_starts_as_the_student_and_follows_every_executed_update(checkpoint, tmp_path):
    t = trainer(checkpoint, tmp_path / "run", max_steps=1, eval_size=0, ema_rate=0.25)
    start = adapter_weights(t)
    for name, value in start.items():
        assert torch.equal(value.float(), t.teacher.shadow[name])
    t.train()
    for name, value in adapter_weights(t).items():
        torch.testing.assert_close(t.teacher.shadow[name], 0.75 * start[name] + 0.25 * value)


@register("nothing")
class Nothing(Objective):
    """Trains on no rollout."""

    def trains(self, rollout):
        return False


@register("explosion")
class Explosion(Objective):
    """A loss whose gradient is not a number."""

    def needs_teacher(self, rollout):
        return False

    def loss(self, batch):
        return (batch.student.hidden * math.nan).sum()


@pytest.mark.parametrize("method", ["nothing", "explosion"])
def test_a_step_without_a_usable_gradient_updates_nothing(method, checkpoint, tmp_path):
    t = trainer(checkpoint, tmp_path / "run", method=method, max_steps=2, weight_decay=0.5)
    start, teacher = adapter_weights(t), copy.deepcopy(t.teacher.shadow)
    t.train()
    for name, value in adapter_weights(t).items():
        assert torch.equal(value, start[name]) and torch.equal(t.teacher.shadow[name], teacher[name])
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_update"] for row in rows] == [1, 1] and rows[-1]["skipped_updates"] == 2
    assert rows[0]["learning_rate"] != rows[1]["learning_rate"], "the schedule advances"


def test_over_budget_examples_and_unfinished_rollouts_are_left_out_but_counted(checkpoint, tmp_path):
    t = trainer(checkpoint, tmp_path / "run", max_steps=2, max_prompt_tokens=80, eval_size=0)
    t.train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert sum(row.get("skipped_over_budget", 0) for row in rows) > 0
    assert t.prompts_per_step == 4
    t = trainer(checkpoint, tmp_path / "drop", max_steps=2, drop_unfinished_rollouts=True, eval_size=0)
    t.train()
    rows = read_jsonl(tmp_path / "drop" / "metrics.jsonl")
    assert sum(row.get("dropped_unfinished", 0) for row in rows) > 0


def test_loss_is_the_sum_over_responses_divided_by_the_prompts(checkpoint, tmp_path):
    """Eq. fire_objective with N = prompts: leaving out half of the responses halves the loss of equal ones."""
    t = trainer(checkpoint, tmp_path / "run", method="supervised", eval_size=0)
    example = t.task.examples("train", 1)[0]
    rollout = Rollout(example, [5, 6, 7], Response([8, 9, 10], "xyz", True), t.task.verify(example, "xyz"))
    t.create_optimizer_and_scheduler(4)
    t.step_log = StepLog(1e-3, 1.0, 0.0, prompts=4)
    full = t.compute_loss(t.model, [rollout] * 4)
    half = t.compute_loss(t.model, [rollout] * 2)
    assert full.item() == pytest.approx(2 * half.item(), rel=1e-5)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    log_probs = t.model(ids).logits[0, 2:5].log_softmax(-1)
    expected = -log_probs[torch.arange(3), torch.tensor([8, 9, 10])].mean()
    assert full.item() == pytest.approx(expected.item(), rel=1e-4)


def test_warm_start_learns_the_solutions_and_its_adapter_continues(checkpoint, tmp_path):
    settings = config(checkpoint, tmp_path / "warm").resolved() | {
        "max_steps": 30,
        "learning_rate": 3e-2,
        "method": "supervised",
    }
    warm = WarmStartTrainer(args=WarmStartConfig(**settings), task=ToyTask())
    warm.train()
    rows = read_jsonl(tmp_path / "warm" / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"] and rows[-1]["generated_tokens"] == 0
    t = trainer(checkpoint, tmp_path / "run", initial_adapter=str(tmp_path / "warm" / "adapter"), max_steps=1)
    for name, value in adapter_weights(t).items():
        torch.testing.assert_close(value, adapter_weights(warm)[name])
        assert torch.equal(t.teacher.shadow[name], value.float())


def test_order_is_one_seeded_shuffle_reshuffled_at_the_end():
    examples = ToyTask().examples("train", 5)
    order = [e.uid for e in (TrainingOrder(examples, 12, seed=3)[i] for i in range(12))]
    assert sorted(order[:5]) == sorted(order[5:10]) == sorted(e.uid for e in examples)
    assert order[:5] != order[5:10]
    assert [TrainingOrder(examples, 12, seed=3)[i].uid for i in (11, 2, 7)] == [order[11], order[2], order[7]]
    assert [TrainingOrder(examples, 12, seed=4)[i].uid for i in range(12)] != order


@pytest.mark.parametrize(("warmup", "total"), [(25, 200), (0, 10), (3, 3), (1, 1)])
def test_schedule_has_no_step_of_rate_zero(warmup, total):
    factors = [learning_rate_factor(step, warmup, total) for step in range(1, total + 1)]
    assert all(0 < factor <= 1 for factor in factors)
    if warmup:
        assert factors[0] == pytest.approx(1 / warmup) and factors[warmup - 1] == 1
    assert learning_rate_factor(total + 1, warmup, total) == pytest.approx(0, abs=1e-12)
    assert learning_rate_factor(total, 0, total, "constant") == 1


def test_sharded_base_models_are_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("firedistill.trainer.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="FSDP and ZeRO-3 are not supported: .* use DDP"):
        trainer(checkpoint, tmp_path / "run")
