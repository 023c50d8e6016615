"""The trainer: Algorithm 1 on a tiny model, its rows, its run directory, and the updates of student and teacher."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import GenerationConfig, TrainerCallback

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.metrics import Metrics
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.objectives import MicroBatch, Objective, register
from firedistill.objectives.top_d import TopD
from firedistill.prompts import student_messages
from firedistill.rollout import Response
from firedistill.rollouts.fixed import Decoder
from firedistill.run.log import read_jsonl
from firedistill.step import step_seed
from firedistill.warmstart import WarmStartConfig, WarmStartTrainer
from tiny import DEVICE, ToyTask, adapter_weights, byte_tokenizer, random_model, run_config, run_trainer

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
    "routing",
    "negative_advantage",
    "rlcsd",
    "sdpg",
]
# One method for each way in which a step can be put together: views without fields, updates of their own, groups, prefixes, a state.
DIFFERENT_METHODS = {"fire", "top_d", "srpo", "tropd", "sdpg"}

DIAGNOSTICS = {
    "on_policy_sft": {"nll"},
    "veto": {"veto_beta", "kl"},
    "demopsd": {"demopsd_disagreement", "demopsd_alpha"},
    "top_d": {"top_d_return_std", "top_d_ratio", "top_d_clip_fraction", "grad_norm_max"},
    "tropd": {"tropd_trusted", "tropd_reward", "prefix_length"},
    "srpo": {"srpo_advantage", "srpo_entropy_weight_max", "srpo_teacher_entropy"},
    "negative_advantage": {"negative_advantage", "negative_log_prob"},
    "rlcsd": {"rlcsd_modulated", "rlcsd_advantage", "rlcsd_gap"},
    "sdpg": {"sdpg_advantage", "sdpg_beta", "sdpg_reference", "kl"},
    "scope": {"scope_student_perplexity", "scope_teacher_perplexity", "scope_teacher_weight_max"},
}


class Finished:
    """A run that has ended."""

    def __init__(self, folder, trainer: SelfDistillTrainer):
        self.folder, self.trainer, self.start = folder, trainer, adapter_weights(trainer)
        trainer.train()
        self.rows, self.evaluations = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "evals.jsonl")

    def rollouts(self, step: int) -> list[dict]:
        return pq.read_table(self.folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def short_run(checkpoint, folder, task=None, **changes) -> Finished:
    """A run without evaluations and checkpoints."""
    changes = {"max_steps": 2, "eval_size": 0, "save_strategy": "no", **changes}
    return Finished(folder, run_trainer(checkpoint, folder, task, **changes))


@pytest.fixture(scope="module")
def run_of(checkpoint, tmp_path_factory):
    """Four steps of a method, run once for all tests that look at them."""
    finished = {}

    def run(method: str) -> Finished:
        if method not in finished:
            folder = tmp_path_factory.mktemp("runs") / method
            saved = {} if method == "fire" else {"save_strategy": "no"}
            finished[method] = Finished(folder, run_trainer(checkpoint, folder, method=method, **saved))
        return finished[method]

    return run


# ---- Runs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_every_method(method, run_of):
    run = run_of(method)
    rows = run.rows
    assert [(row["step"], row["prompts"]) for row in rows] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [row["learning_rate"] for row in rows] == pytest.approx([5e-3, 1e-2, 7.5e-3, 2.5e-3])
    assert [row["step_scale"] for row in rows] == pytest.approx([5, 10, 7.5, 2.5])
    assert rows[-1]["cumulative_generated_tokens"] == sum(row["generated_tokens"] for row in rows)
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert any(not torch.equal(run.start[name], value) for name, value in adapter_weights(run.trainer).items())
    if method == "fire":
        wrong = [row for row in rows if row["correct_rate"] < 1]
        assert wrong and any(row["correct_rate"] > 0 for row in rows), "the toy task must give work to both branches"
        assert all(row["max_bound_ratio"] <= 1 + 1e-4 for row in wrong)
        assert {"alpha_full", "alpha_outcome", "alpha_hint", "beta", "eta", "chi_active"} <= set().union(*rows)
        for row in wrong:
            assert row["alpha_full"] + row["alpha_outcome"] + row["alpha_hint"] == pytest.approx(1, abs=1e-5)
    if method in {"no_attribution", "full_context", "veto", "top_d", "tropd"}:
        # One view each: only the common beginnings of the teacher's prompts are saved, on a CPU.
        assert rows[0]["teacher_tokens"] > 0 and (rows[0]["teacher_tokens_saved"] > 0) == (DEVICE == "cpu")
    if method == "on_policy_sft":
        assert rows[0]["teacher_tokens"] == 0 and "seconds_score" not in rows[0]
    if method == "rlcsd":
        assert any(row["teacher_tokens"] > 0 for row in rows)
    assert all(row["teacher_tokens_saved"] >= 0 for row in rows)
    logged = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert [(entry["loss"], entry["grad_norm"]) for entry in logged] == [(row["loss"], row["grad_norm"]) for row in rows]
    assert DIAGNOSTICS.get(method, set()) <= set().union(*rows), "a column that says what the method does"
    groups = {"on_policy_sft": 4, "top_d": 4, "srpo": 4, "scope": 4, "tropd": 5, "rlcsd": 4, "sdpg": 4}.get(method, 1)
    assert run.trainer.objective.responses_per_prompt == groups
    for row in rows:
        rollouts = run.rollouts(row["step"])
        assert len(rollouts) == 4 * groups
        sampled = sum(r["response_tokens"] - r["prefix_tokens"] + r["draft_tokens"] for r in rollouts)
        assert row["generated_tokens"] == sampled > 0
    if method == "top_d":
        assert all(row["updates"] == 4 for row in rows)
    if method == "tropd":
        assert rows[0]["prefix_length"] > 0 and "prefix_length" not in rows[-1], "guidance ends with the schedule"
    if method == "veto":
        assert [row["veto_beta"] for row in rows] == pytest.approx([0.8, 0.8 * 2 / 3, 0.8 / 3, 0.0], abs=1e-6)
    evaluations = run.evaluations
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


def test_the_run_directory(run_of):
    run = run_of("fire")
    folder, trainer = run.folder, run.trainer
    rollouts = run.rollouts(3)
    assert len(rollouts) == 4 and {r["uid"].split("/")[0] for r in rollouts} == {"toy"}
    wrong = next(r for r in rollouts if not r["correct"])
    assert [f["name"] for f in wrong["feedback"]] == ["outcome", "hint"] and wrong["trained"]
    assert next(r for r in rollouts if r["correct"])["feedback"] == []
    assert (folder / "checkpoint-4" / "teacher.safetensors").is_file()
    assert not list(folder.rglob("*.bin")), "no pickles of weights or settings"
    card = (folder / "README.md").read_text()
    assert "| 4 |" in card, "the model card holds the last evaluation"
    assert 'from_pretrained("path/to/base")' in card, "a folder of this machine is no name"
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]], device=trainer.model.device)
    torch.testing.assert_close(loaded.to(ids.device)(ids).logits, trainer.model.eval()(ids).logits)
    again = SelfDistillConfig(**trainer.args.resolved())
    assert again.resolved() == trainer.args.resolved()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_computes_what_a_cpu_computes(method, checkpoint, tmp_path, monkeypatch):
    """In float32, with sampling by CUDA graphs: equal responses, and rows that agree within rounding."""
    capture, captured = Decoder.capture, []
    monkeypatch.setattr(Decoder, "capture", lambda *arguments: captured.append(capture(*arguments)) or captured[-1])
    on_cpu, on_gpu = (short_run(checkpoint, tmp_path / f"{flag}", method=method, use_cpu=flag) for flag in (True, False))
    assert {p.device.type for p in on_gpu.trainer.model.parameters()} == {"cuda"}
    assert captured and None not in captured
    responses = [[r["response"] for step in (1, 2) for r in run.rollouts(step)] for run in (on_cpu, on_gpu)]
    assert responses[0] == responses[1]
    for expected, row in zip(on_cpu.rows, on_gpu.rows, strict=True):
        numbers = {name: value for name, value in expected.items() if not re.search("seconds|teacher_tokens|memory", name)}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)


@pytest.mark.gpu
def test_a_model_object_is_on_the_gpu_before_engine_and_teacher_are_made(checkpoint, tmp_path, monkeypatch):
    """Also where transformers leaves it to DeepSpeed, which moves it when training starts."""
    monkeypatch.setattr(SelfDistillConfig, "place_model_on_device", False)
    args = run_config(checkpoint, tmp_path / "run", use_cpu=False)
    trainer = SelfDistillTrainer(
        load_model_and_tokenizer(checkpoint, dtype="float32")[0], args, ToyTask(), processing_class=byte_tokenizer()
    )
    tensors = [*trainer.model.parameters(), *trainer.teacher.weights.shadow.values()]
    assert {tensor.device.type for tensor in tensors} == {"cuda"} and trainer.rollout_engine.decoder is not None


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in DIFFERENT_METHODS else pytest.mark.slow) for m in METHODS])
def test_micro_batches_change_memory_not_the_result(method, checkpoint, tmp_path):
    run, other = (
        short_run(
            checkpoint,
            tmp_path / f"{size}",
            method=method,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        for size, accumulation in ((4, 1), (1, 4))
    )
    for row, other_row in zip(run.rows, other.rows, strict=True):
        assert row["generated_tokens"] == other_row["generated_tokens"]
        assert row["loss"] == pytest.approx(other_row["loss"], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(other_row["grad_norm"], rel=1e-3)
    weights, other_weights = adapter_weights(run.trainer), adapter_weights(other.trainer)
    for name in weights:
        torch.testing.assert_close(weights[name], other_weights[name], rtol=1e-3, atol=1e-4)


def test_warm_start_learns_the_solutions_and_a_run_continues_its_adapter(checkpoint, tmp_path):
    settings = run_config(checkpoint, tmp_path / "warm").resolved() | {
        "max_steps": 12,
        "learning_rate": 3e-2,
        "method": "supervised",
        "eval_size": 0,
        "save_strategy": "no",
    }
    warm = WarmStartTrainer(args=WarmStartConfig(**settings), task=ToyTask())
    warm.train()
    rows = read_jsonl(tmp_path / "warm" / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"] and rows[-1]["generated_tokens"] == 0
    trainer = run_trainer(checkpoint, tmp_path / "run", initial_adapter=str(tmp_path / "warm" / "adapter"), max_steps=1)
    for name, value in adapter_weights(trainer).items():
        torch.testing.assert_close(value, adapter_weights(warm)[name])
        assert torch.equal(trainer.teacher.weights.shadow[name], value.float())


def test_a_warm_start_has_settings_of_its_own():
    """Other trainers would sample and train on the answers, right or wrong."""
    with pytest.raises(
        ValueError, match="SelfDistillTrainer does not fit args, which is a WarmStartConfig: use WarmStartTrainer"
    ):
        SelfDistillTrainer(args=WarmStartConfig(use_cpu=True))
    with pytest.raises(
        ValueError, match="WarmStartTrainer does not fit args, which is a SelfDistillConfig: use WarmStartConfig"
    ):
        WarmStartTrainer(args=SelfDistillConfig(use_cpu=True))


def test_a_warm_start_names_what_is_over_the_budget_of_its_prompt(checkpoint, tmp_path, caplog):
    settings = run_config(checkpoint, tmp_path / "warm").resolved() | {"method": "supervised", "eval_size": 0}
    warm = WarmStartTrainer(args=WarmStartConfig(**settings), task=ToyTask())
    examples = warm.task.examples("train")
    lengths = {example.uid: len(warm.encoder.encode(student_messages(warm.task, example))) for example in examples}
    limit, most = min(lengths.values()), warm.args.max_prompt_tokens
    over = [uid for uid, length in lengths.items() if length > limit]
    warm.args.max_prompt_tokens = limit
    fitting, metrics = warm.sample(examples)
    assert [rollout.example.uid for rollout in fitting] == [uid for uid in lengths if uid not in over]
    assert metrics.row()["skipped_over_budget"] == len(over) == 8
    for uid in over:
        assert f"{uid} left out: its prompt has {lengths[uid]} tokens, the limit is {limit}" in caplog.text
    warm.args.feedback_share, warm.args.max_feedback_tokens, warm.args.max_prompt_tokens = 1.0, 40, most
    fitting, metrics = warm.sample(examples)
    with pytest.raises(ValueError, match="has no gold solution; .*: add a column solution, or remove these rows"):
        warm.sample([replace(examples[0], solution=None)])
    assert len(fitting) == 12 and metrics.row()["cut_feedback_fields"] >= 12
    for rollout in fitting:
        assert rollout.response_ids == [*warm.encoder.encode_text(rollout.example.solution), warm.stop_id]
        assert "feedback-conditioned teacher" in warm.encoder.decode(rollout.prompt_ids), "the teacher's prompt"
    assert all(f"{uid}: feedback over 40 tokens; cut: " in caplog.text for uid in lengths)


def test_the_progress_of_sampling_ends_at_its_total(checkpoint, tmp_path):
    trainer, told = run_trainer(checkpoint, tmp_path / "run", method="tropd", max_steps=1, eval_size=0), []
    trainer.on_progress = lambda phase, done, total: told.append((done, total))
    trainer.train()
    assert told[-1] == (20, 20)


# ---- Settings --------------------------------------------------------------------------------------------------------------


def test_the_settings_of_the_caller_stay_as_they_are(checkpoint, tmp_path):
    model = random_model()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=True, top_k=20, repetition_penalty=1.1)
    args = run_config(checkpoint, tmp_path / "run", checkpoint_sampling=True, eval_size=0)
    args.eval_strategy, args.eval_on_start, args._n_gpu = "steps", True, 2
    processes = args.distributed_state  # equal to itself only
    before = copy.deepcopy(vars(args) | {"distributed_state": None})
    trainer = SelfDistillTrainer(model, args=args, task=ToyTask(), processing_class=byte_tokenizer())
    assert args.distributed_state is processes and vars(args) | {"distributed_state": None} == before
    assert (trainer.args.top_k, trainer.args.repetition_penalty) == (20, 1.1)
    assert (trainer.args.eval_strategy, trainer.args.eval_on_start, trainer.args.n_gpu) == ("no", False, 1)


def test_sharded_base_models_are_refused(checkpoint, tmp_path, monkeypatch):
    create = SelfDistillTrainer.create_accelerator_and_postprocess

    def by_the_launcher(self):
        create(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(SelfDistillTrainer, "create_accelerator_and_postprocess", by_the_launcher)
    with pytest.raises(ValueError, match="FSDP is not supported, .*--fsdp_size N"):
        run_trainer(checkpoint, tmp_path / "run")


# ---- One step --------------------------------------------------------------------------------------------------------------


@register("curious")
class Curious(Objective):
    """Trains on every response and remembers what the trainer passes to it."""

    def needs_teacher(self, rollout):
        return False

    def prepare(self, step):
        self.step, self.batches = step, []
        self.seeds = [*getattr(self, "seeds", []), step.seed]
        return [rollout.prompt_index for rollout in step.rollouts], Metrics()

    def loss(self, batch: MicroBatch):
        self.batches.append(batch)
        metrics = Metrics()
        metrics.mean(curiosity=1.0)
        return batch.student.hidden.float().square().mean() / batch.responses, metrics


def test_the_step_scale_follows_the_schedule_or_is_fixed(checkpoint, tmp_path):
    moving = short_run(checkpoint, tmp_path / "moving")
    fixed = short_run(checkpoint, tmp_path / "fixed", nominal_learning_rate=None, step_scale=10.0)
    assert [row["learning_rate"] for row in moving.rows] == [row["learning_rate"] for row in fixed.rows] == [5e-3, 1e-2]
    assert [row["step_scale"] for row in moving.rows] == pytest.approx([5, 10])
    assert [row["step_scale"] for row in fixed.rows] == [10, 10]
    first, second = moving.rows[0], fixed.rows[0]  # the same student and answers, with half the radius
    assert second["rho"] == pytest.approx(first["rho"] / 2) and second["generated_tokens"] == first["generated_tokens"]


def test_the_methods_draws_do_not_repeat_the_samplers(checkpoint, tmp_path):
    """Both seed a generator: a token's acceptance must not depend on how it was drawn."""
    objective = short_run(checkpoint, tmp_path / "run", method="curious", max_steps=1).trainer.objective
    draws, sampled_with = (
        torch.rand(200, generator=torch.Generator().manual_seed(seed)) for seed in (objective.step.seed, step_seed(0, 0))
    )
    assert not torch.isin(draws, sampled_with).any()


def test_what_a_method_is_given(checkpoint, tmp_path):
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "log_prob_floor": -7.0, "max_steps": 3}
    run = short_run(checkpoint, tmp_path / "run", method="curious", warmup_steps=0, lr_scheduler_type="constant", **changes)
    step, batches = run.trainer.objective.step, run.trainer.objective.batches
    assert (step.prompts, step.progress, len(step.rollouts)) == (4, 1.0, 4)
    assert len(set(run.trainer.objective.seeds)) == 3, "every step has its own draws"
    assert [len(batch.rollouts) for batch in batches] == [2, 2]
    for batch in batches:
        assert list(batch.prepared) == [rollout.prompt_index for rollout in batch.rollouts]
        assert (batch.responses, batch.prompts, batch.progress) == (4, 4, 1.0)
        assert (batch.step_scale, batch.log_prob_floor) == (pytest.approx(10.0), -7.0)
        assert batch.student.lengths == [len(rollout.response_ids) for rollout in batch.rollouts]
    assert {id(r) for batch in batches for r in batch.rollouts} == {id(r) for r in step.rollouts}
    assert [row["curiosity"] for row in run.rows] == [1.0] * 3


class Scripted:
    """The same response to every prompt of a step, empty where `empty` says so."""

    def __init__(self, empty: tuple[int, ...] = ()):
        self.empty = empty

    def generate(self, prompts, sampling, seed, progress=None, limits=None):
        return [Response([], "", False) if i in self.empty else Response([8, 9, 10], "xyz", True) for i in range(len(prompts))]


def test_loss_is_the_sum_over_responses_divided_by_the_prompts(checkpoint, tmp_path):
    """Eq. fire_objective with N = prompts: leaving out half of the responses halves the loss of equal ones."""
    rows = []
    for empty in ((), (1, 3)):
        changes = {"method": "supervised", "train_size": 1, "max_steps": 1, "eval_size": 0, "save_strategy": "no"}
        trainer = run_trainer(checkpoint, tmp_path / f"{len(empty)}", **changes)
        trainer.rollout_engine = Scripted(empty)
        (example,) = trainer.train_dataset.examples
        prompt = trainer.encoder.encode(student_messages(trainer.task, example))
        with torch.no_grad():
            log_probs = (
                trainer.model(torch.tensor([[*prompt, 8, 9, 10]], device=trainer.model.device)).logits[0, -4:-1].log_softmax(-1)
            )
        trainer.train()
        rows += read_jsonl(tmp_path / f"{len(empty)}" / "metrics.jsonl")
    full, half = (row["loss"] for row in rows)
    assert full == pytest.approx(2 * half, rel=1e-5)
    assert full == pytest.approx(-log_probs[torch.arange(3), torch.tensor([8, 9, 10])].mean().item(), rel=1e-4)
    assert [row.get("empty_responses", 0) for row in rows] == [0, 2]


def test_empty_responses_are_counted(checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path / "run", eval_size=0, save_strategy="no")
    trainer.rollout_engine = Scripted(empty=(1, 3))
    trainer.train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["empty_responses"] for row in rows] == [2] * 4 and all(row["skipped_update"] == 0 for row in rows)


def test_over_budget_examples_and_unfinished_rollouts_are_left_out_but_counted(checkpoint, tmp_path):
    run = short_run(checkpoint, tmp_path / "run", max_prompt_tokens=80)
    assert sum(row.get("skipped_over_budget", 0) for row in run.rows) > 0
    assert run.trainer.prompts_per_step == 4
    run = short_run(checkpoint, tmp_path / "drop", drop_unfinished_rollouts=True)
    assert sum(row.get("dropped_unfinished", 0) for row in run.rows) > 0


# ---- Updates of student and teacher ----------------------------------------------------------------------------------------


def test_teacher_starts_as_the_student_and_follows_every_executed_update(checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path / "run", max_steps=1, eval_size=0, ema_rate=0.25, save_strategy="no")
    start, weights = adapter_weights(trainer), trainer.teacher.weights
    for name, value in start.items():
        assert torch.equal(value.float(), weights.shadow[name])
    trainer.train()
    for name, value in adapter_weights(trainer).items():
        torch.testing.assert_close(weights.shadow[name], 0.75 * start[name] + 0.25 * value)


class ExpectedTeacher(TrainerCallback):
    """Moves its own EMA after every update that changed the student, and compares it with the teacher.

    Attributes:
        executed: by step, whether each of its updates changed the student.
    """

    def __init__(self, trainer: SelfDistillTrainer, rate: float):
        self.trainer, self.rate, self.student = trainer, rate, adapter_weights(trainer)
        self.shadow = {name: value.clone() for name, value in self.student.items()}
        self.executed: list[list[bool]] = [[] for _ in range(trainer.args.max_steps)]

    def on_optimizer_step(self, args, state, control, **kwargs):
        student = adapter_weights(self.trainer)
        executed = any(not torch.equal(student[name], self.student[name]) for name in student)
        self.executed[state.global_step].append(executed)
        for name, value in student.items():
            if executed:
                self.shadow[name].lerp_(value, self.rate)
            torch.testing.assert_close(self.trainer.teacher.weights.shadow[name], self.shadow[name], rtol=1e-6, atol=1e-7)
        self.student = student


@register("fragile_top_d")
class FragileTopD(TopD):
    """TOP-D whose loss on one example is not a number."""

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        bad = any(rollout.example.uid == "toy/train/3" for rollout in batch.rollouts)
        return loss * (math.nan if bad else 1.0), metrics


@pytest.mark.parametrize("method", ["fire", "top_d", "fragile_top_d"])
def test_the_teacher_moves_once_per_executed_update(method, checkpoint, tmp_path):
    """Two passes of TOP-D over four prompts of a step are eight updates."""
    settings = {} if method == "fire" else {"epochs": 2}
    changes = {"max_steps": 3, "eval_size": 0, "ema_rate": 0.25, "weight_decay": 0.5, "save_strategy": "no"}
    trainer = run_trainer(checkpoint, tmp_path / "run", method=method, method_settings=settings, **changes)
    expected = ExpectedTeacher(trainer, 0.25)
    trainer.add_callback(expected)
    trainer.train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [len(updates) for updates in expected.executed] == [row.get("updates", 1) for row in rows]
    assert [updates.count(False) for updates in expected.executed] == [row["skipped_update"] for row in rows]
    # Three steps of four prompts are the twelve examples, each once: its two updates are skipped.
    assert sum(row["skipped_update"] for row in rows) == (2 if method == "fragile_top_d" else 0) == rows[-1]["skipped_updates"]
    assert sum(map(len, expected.executed)) == (3 if method == "fire" else 24)
    shadow, student = trainer.teacher.weights.shadow, adapter_weights(trainer)
    assert any(not torch.equal(shadow[name], student[name]) for name in student), "a move too many would show"


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
        return (batch.student.hidden * math.nan).sum(), Metrics()


@pytest.mark.parametrize("method", ["nothing", "explosion"])
def test_a_step_without_a_usable_gradient_updates_nothing(method, checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path / "run", method=method, max_steps=2, weight_decay=0.5, eval_size=0)
    start, teacher = adapter_weights(trainer), copy.deepcopy(trainer.teacher.weights.shadow)
    trainer.train()
    for name, value in adapter_weights(trainer).items():
        assert torch.equal(value, start[name]) and torch.equal(trainer.teacher.weights.shadow[name], teacher[name])
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_update"] for row in rows] == [1, 1] and rows[-1]["skipped_updates"] == 2
    assert rows[0]["learning_rate"] != rows[1]["learning_rate"], "the schedule advances"


@register("clumsy")
class Clumsy(Objective):
    """Returns something else than it should."""

    names: str = ""
    returned: dict[str, Any] = {}

    def needs_teacher(self, rollout):
        return False

    def prepare(self, step):
        return self.returned.get("prepare", super().prepare(step))

    def loss(self, batch):
        return self.returned.get("loss", (batch.student.hidden.sum(), Metrics()))


def column_of_every_method(name: str = "step") -> Metrics:
    metrics = Metrics()
    metrics.mean(**{name: 3.0})
    return metrics


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ({"prepare": None}, "prepare of method clumsy returned a NoneType, expected a pair of a Sequence and Metrics"),
        ({"prepare": ([], Metrics())}, "prepare of method clumsy returned 0 entries for 4 rollouts"),
        ({"loss": None}, "loss of method clumsy returned a NoneType, expected a pair of a Tensor and Metrics"),
        ({"loss": (0.0, Metrics())}, "loss of method clumsy returned a tuple, expected a pair of a Tensor and Metrics"),
        (
            {"loss": (torch.zeros(()), Metrics())},
            "loss of method clumsy returned a number without gradient: expected one number",
        ),
        ({"loss": (torch.ones(3), Metrics())}, "loss of method clumsy returned a tensor of shape (3,): expected one number"),
        ({"prepare": ([None] * 4, column_of_every_method())}, "method clumsy logs a metric 'step', which is a column of every"),
        (
            {"prepare": ([None] * 4, column_of_every_method("correct_rate"))},
            "method clumsy logs a metric 'correct_rate', which",
        ),
    ],
)
def test_a_method_that_returns_something_else_is_told_what_is_expected(returned, complaint, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(Clumsy, "returned", returned)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        run_trainer(checkpoint, tmp_path / "run", method="clumsy", max_steps=1, eval_size=0).train()


@register("one_bad_response")
class OneBadResponse(Objective):
    """The loss of one example is not a number."""

    def needs_teacher(self, rollout):
        return False

    def loss(self, batch):
        bad = any(rollout.example.uid == "toy/train/3" for rollout in batch.rollouts)
        return (batch.student.hidden.float() ** 2).mean() * (math.nan if bad else 1.0), Metrics()


def test_one_response_without_a_finite_loss_costs_its_step_and_is_named(checkpoint, tmp_path, caplog):
    changes = {"max_steps": 3, "weight_decay": 0.5, "eval_size": 0, "save_strategy": "no"}
    trainer = run_trainer(checkpoint, tmp_path / "run", method="one_bad_response", **changes)
    expected = ExpectedTeacher(trainer, trainer.args.ema_rate)
    trainer.add_callback(expected)
    trainer.train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3], "the run came to its end"
    uids = [{r["uid"] for r in pq.read_table(path).to_pylist()} for path in sorted(tmp_path.glob("run/rollouts/step_*"))]
    bad = ["toy/train/3" in step for step in uids]
    assert bad == [bool(row["skipped_update"]) for row in rows] and True in bad and False in bad
    assert expected.executed == [[not skipped] for skipped in bad], "neither student nor teacher moves in a bad step"
    assert "the gradient is not finite, so nothing is updated; trained on:" in caplog.text and "toy/train/3" in caplog.text


# ---- What a step does ------------------------------------------------------------------------------------------------------


@register("per_prompt")
class ByPrompt(Objective):
    """An update per prompt with a large gradient, except for the third prompt, which has none."""

    def needs_teacher(self, rollout):
        return False

    def updates(self, prompts, draw):
        return [[prompt] for prompt in prompts]

    def prepare(self, step):
        self.seen, self.losses = [], []
        return super().prepare(step)

    def loss(self, batch):
        self.seen.append((batch.prompts, batch.responses))
        loss = (0.0 if batch.rollouts[0].prompt_index == 2 else 1e4) * batch.student.hidden.float().sum()
        self.losses.append(float(loss.detach()))
        return loss, Metrics()


class UpdateNorms(TrainerCallback):
    """The Euclidean norm of what each update changes."""

    def __init__(self, trainer):
        self.trainer, self.before, self.norms = trainer, adapter_weights(trainer), []

    def on_optimizer_step(self, args, state, control, **kwargs):
        now = adapter_weights(self.trainer)
        self.norms.append(float(torch.cat([(now[name] - self.before[name]).flatten() for name in now]).norm()))
        self.before = now


def test_every_update_of_a_step_is_clipped_and_has_a_gradient_of_its_own(checkpoint, tmp_path):
    """By SGD, whose update is the rate, 1e-2, times the clipped gradient."""
    changes = {"optim": "sgd", "weight_decay": 0.0, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_grad_norm": 0.5}
    changes |= {"method_settings": {"group_size": 2}, "max_steps": 1, "eval_size": 0, "save_strategy": "no"}
    trainer = run_trainer(checkpoint, tmp_path / "run", method="per_prompt", **changes)
    updates = UpdateNorms(trainer)
    trainer.add_callback(updates)
    trainer.train()
    assert updates.norms == pytest.approx([0.005, 0.005, 0.0, 0.005], rel=1e-3, abs=1e-7)
    assert trainer.objective.seen == [(1, 2)] * 4, "one prompt with two responses each"
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert row["loss"] == pytest.approx(sum(trainer.objective.losses) / 4, rel=1e-5) and row["updates"] == 4
    assert 0.5 < row["grad_norm"] < row["grad_norm_max"], "before clipping"
    plain = run_trainer(
        checkpoint, tmp_path / "plain", method="per_prompt", **changes | {"max_grad_norm": 0.0, "learning_rate": 1e-8}
    )
    updates = UpdateNorms(plain)
    plain.add_callback(updates)
    plain.train()
    (unclipped,) = read_jsonl(tmp_path / "plain" / "metrics.jsonl")
    assert max(updates.norms) == pytest.approx(1e-8 * unclipped["grad_norm_max"], rel=1e-3), "0 does not clip"


def test_the_distributions_of_the_loss_have_the_temperature_of_the_setting(checkpoint, tmp_path):
    """Those of student and teacher; the engine is compared with the student at temperature 1."""
    changes = {"method": "supervised", "train_size": 1, "max_steps": 1, "eval_size": 0, "save_strategy": "no"}
    trainer = run_trainer(checkpoint, tmp_path / "run", score_temperature=2.0, **changes)
    (example,) = trainer.train_dataset.examples
    prompt, ids = trainer.encoder.encode(student_messages(trainer.task, example)), [8, 9, 10]
    with torch.no_grad():
        logits = trainer.model(torch.tensor([[*prompt, *ids]], device=trainer.model.device)).logits[0, -4:-1].cpu()
    plain, warm = (z.log_softmax(-1)[torch.arange(3), torch.tensor(ids)] for z in (logits, logits / 2))
    response = Response(ids, "xyz", True, (plain + 0.5).tolist())
    trainer.rollout_engine = SimpleNamespace(generate=lambda prompts, *arguments: [response] * len(prompts))
    trainer.train()
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert row["loss"] == pytest.approx(-warm.mean().item(), rel=1e-4)
    assert row["rollout_kl"] == pytest.approx(0.5, abs=1e-4) and trainer.teacher.head.temperature == 2.0
