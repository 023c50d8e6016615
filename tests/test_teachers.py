"""Who re-scores: an average of the student, its present or first weights, another adapter, another model; with feedback or without."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from firedistill import SelfDistillConfig
from firedistill.checks import memory_estimate
from firedistill.cli import main as cli
from firedistill.footprint import memory_of_step, pass_memory
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.models.states import score_responses, unwrap
from firedistill.ops import Head
from firedistill.prompts import student_messages
from firedistill.run.checkpoints import CheckpointError
from firedistill.run.log import read_jsonl
from firedistill.setup import load_setup
from firedistill.tasks.feedback import CUT_MARK
from killable import same_runs, train
from test_resume import die, interrupted
from test_trainer import METHODS
from tiny import adapter_weights, byte_tokenizer, random_model, run_config, run_trainer, save_checkpoint

KINDS = ["ema", "student", "initial", "adapter", "model"]


def save_larger(folder: Path, rows: int = 300) -> str:
    """Another architecture and size with the same tokenizer; its vocabulary is filled up further."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.25,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """The student's checkpoint, and the value of `teacher` for every kind."""
    folder = tmp_path_factory.mktemp("teachers")
    base = save_checkpoint(folder / "base")
    student = random_model()
    student.name_or_path = base
    torch.manual_seed(3)
    adapter = add_lora(student, r=3, target_modules=("q_proj", "down_proj"))  # another shape than the student's
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    adapter.save_pretrained(folder / "adapter")
    words = {kind: kind for kind in ("ema", "student", "initial")}
    return {"base": base, **words, "adapter": str(folder / "adapter"), "model": save_larger(folder / "larger")}


# ---- Whose distribution it is ------------------------------------------------------------------------------------------------------


def teacher_log_probs(trainer, rollouts):
    full = trainer.teacher.full(rollouts)
    trainer.teacher.forget()
    return trainer.teacher.head(full.hidden).log_softmax(-1)


def plain_log_probs(model, trainer, rollouts, rows=263):
    """By one forward pass per response."""
    prompts = [trainer.teacher.prompt_ids(rollout, "full") for rollout in rollouts]
    model.eval()
    with torch.no_grad():
        states = score_responses(model, prompts, [rollout.response_ids for rollout in rollouts], max_tokens=1)
        return Head.of(unwrap(model))(states.hidden)[..., :rows].log_softmax(-1)


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_is_who_it_says(kind, share_prefixes, places, tmp_path):
    """After three updates, compared with a model that is put together by hand."""
    from peft import PeftModel

    from test_teacher import rollouts_with_different_fields

    trainer = run_trainer(
        places["base"], tmp_path, teacher=places[kind], max_steps=3, ema_rate=0.5, share_prefixes=share_prefixes
    )
    start = adapter_weights(trainer)
    trainer.train()
    now, rollouts = adapter_weights(trainer), rollouts_with_different_fields()
    assert any(not torch.equal(start[name], now[name]) for name in now)
    found = teacher_log_probs(trainer, rollouts)
    assert found.shape[-1] == 263, "rows that stand for no token are cut"
    if kind == "model":
        expected = plain_log_probs(load_model_and_tokenizer(places["model"], dtype="float32")[0], trainer, rollouts)
    elif kind == "adapter":
        base = load_model_and_tokenizer(places["base"], dtype="float32")[0]
        expected = plain_log_probs(PeftModel.from_pretrained(base, places["adapter"]), trainer, rollouts)
    else:
        own = {"student": now, "initial": start, "ema": trainer.teacher.weights.shadow if kind == "ema" else None}[kind]
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if name in own:
                    parameter.copy_(own[name])
        expected = plain_log_probs(trainer.model, trainer, rollouts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_shares_the_base_model_with_the_student(places, tmp_path):
    setup = load_setup(run_config(places["base"], tmp_path, teacher=places["adapter"]))
    ours, theirs = ({id(p) for p in model.parameters()} for model in (setup.model, setup.teacher_model))
    assert len(theirs - ours) == 2 * 2 * 2 and not any(p.requires_grad for p in setup.teacher_model.parameters())
    assert sum(p.requires_grad for p in setup.model.parameters()) == len(ours - theirs)
    assert 0 < memory_estimate(setup)["model of the teacher"] < memory_estimate(setup)["model"] / 5


def test_the_memory_of_a_second_model_is_counted(places, tmp_path):
    setup = load_setup(run_config(places["base"], tmp_path, teacher=places["model"], teacher_dtype="bfloat16"))
    assert memory_estimate(setup)["model of the teacher"] == 2 * sum(p.numel() for p in setup.teacher_model.parameters())
    assert "model of the teacher" not in memory_estimate(load_setup(run_config(places["base"], tmp_path)))
    assert load_setup(run_config(places["base"], tmp_path, teacher=places["model"]), teacher=False).teacher_model is None


def test_the_passes_of_a_second_model_are_counted(places, tmp_path):
    """A pass of a wide teacher is estimated with its own layers."""
    wide = save_checkpoint(tmp_path / "wide", sizes=(64, 4096))
    setup = load_setup(run_config(places["base"], tmp_path, method="full_context", teacher=wide))
    args, needs = setup.args, memory_estimate(setup)
    narrow = memory_of_step(args, setup.model, bool(args.gradient_checkpointing))
    assert needs["training"] >= pass_memory(setup.teacher_model, 1, args.max_context_tokens) > 2 * narrow["training"]


def test_a_second_model_is_loaded_as_the_student_is(places, tmp_path, monkeypatch):
    config = run_config(places["base"], tmp_path, teacher=places["model"], attn_implementation="eager")
    loaded = load_setup(config)
    assert {model.config._attn_implementation for model in (unwrap(loaded.model), loaded.teacher_model)} == {"eager"}

    def without_a_gpu(name, *, device, **settings):
        devices.append(device)
        return load_model_and_tokenizer(name, **settings)

    devices = []
    for module in ("setup", "teacher.own_model"):
        monkeypatch.setattr(f"firedistill.{module}.load_model_and_tokenizer", without_a_gpu)
    monkeypatch.setattr(SelfDistillConfig, "device", torch.device("cuda", 1))
    monkeypatch.setattr("firedistill.setup.decide_for_device", lambda *_: {})
    load_setup(config)
    assert devices == [torch.device("cuda", 1)] * 2


def test_without_feedback_the_teacher_has_the_students_prompt(places, tmp_path):
    trainer = run_trainer(places["base"], tmp_path, teacher=places["model"], method="full_context", teacher_feedback=False)
    trainer.train()
    (first, *_) = trainer.train_dataset.examples
    prompt = trainer.teacher.encode(first, ())
    assert prompt == trainer.encoder.encode(student_messages(trainer.task, first))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert all(row["kl"] > 0 and row["teacher_tokens"] > 0 for row in rows)


@pytest.mark.parametrize("kind", ["ema", "adapter", "model"])
def test_the_teacher_check_asks_the_teacher_of_the_run(kind, places, tmp_path, monkeypatch, capsys):
    run_config(places["base"], tmp_path / "run", eval_size=8).save_yaml(tmp_path / "mine.yaml")
    script = Path(__file__).parents[1] / "examples" / "teacher_check.py"
    line = [str(script), str(tmp_path / "mine.yaml"), "--teacher", places[kind], "--max_feedback_tokens", "60"]
    monkeypatch.setattr("sys.argv", line)
    found = runpy.run_path(str(script))
    setup = found["setup"]
    assert found["engine"].model is (setup.model if kind == "ema" else setup.teacher_model)
    assert found["wrong"] and all(CUT_MARK in setup.encoder.decode(ids) for ids in found["prompts"])
    if kind == "model":
        monkeypatch.setattr("sys.argv", [*line[:-2], "--teacher_feedback", "false", "--method", "no_attribution"])
        found = runpy.run_path(str(script))
        asked = [student_messages(setup.task, rollout.example) for rollout in found["wrong"]]
        assert found["prompts"] == [setup.encoder.encode(messages) for messages in asked]
        assert "teacher, greedy, without feedback: " in capsys.readouterr().out


def test_the_live_student_without_feedback_teaches_nothing(places, tmp_path):
    trainer = run_trainer(places["base"], tmp_path, teacher="student", method="full_context", teacher_feedback=False)
    trainer.train()
    assert all(abs(row["loss"]) < 1e-6 and row["ema_distance"] == 0 for row in read_jsonl(tmp_path / "metrics.jsonl"))


# ---- All kinds, all methods --------------------------------------------------------------------------------------------------------

# What a method refuses, by method: the kinds of teacher, and whether it must read feedback.
NOT_EMA = {"student", "initial", "adapter", "model"}
REFUSED = {"tropd": {"adapter", "model"}, "on_policy_sft": NOT_EMA, "negative_advantage": NOT_EMA}
WITH_FEEDBACK = {"fire", "no_projection", "hard_gradient_excision", "demopsd", "rlcsd", "on_policy_sft", "negative_advantage"}
FIRST: dict[tuple[str, bool], tuple[float, float]] = {}  # loss and gradient of the first step with the teacher `ema`
FEW = {("fire", "model"), ("tropd", "student"), ("demopsd", "adapter"), ("top_d", "model")}


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=() if (method, kind) in FEW or kind in REFUSED.get(method, ()) else pytest.mark.slow)
        for method in METHODS
        for kind in KINDS
    ],
)
def test_every_method_with_every_teacher_trains_or_says_why_not(method, kind, feedback, places, tmp_path):
    changes = dict(method=method, teacher=places[kind], teacher_feedback=feedback, max_steps=2, eval_size=0, save_steps=2)
    if kind in REFUSED.get(method, ()) or (not feedback and method in WITH_FEEDBACK):
        with pytest.raises(ValueError, match=rf"^method {method} .*teacher"):
            run_trainer(places["base"], tmp_path, **changes)
        return
    if method == "sdpg":  # else its schedule leaves the teacher out of the first step, and of the last one
        changes["method_settings"] = {"warmup": 0}
    trainer = run_trainer(places["base"], tmp_path, **changes)
    start = adapter_weights(trainer)
    trainer.train()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == 2 and all(abs(row["loss"]) < 1e6 and math.isfinite(row["grad_norm"]) for row in rows)
    first = rows[0]["loss"], rows[0]["grad_norm"]
    if kind == "ema":
        FIRST[method, feedback] = first
    elif kind in ("adapter", "model") and (method, feedback) in FIRST:
        assert first != FIRST[method, feedback], "the teacher is another one"
    assert ("ema_distance" in rows[0]) == (kind not in ("adapter", "model"))
    assert (tmp_path / "checkpoint-2" / "teacher.safetensors").is_file() == (kind not in ("adapter", "model"))
    if kind in ("adapter", "model"):
        assert any(not torch.equal(start[name], value) for name, value in adapter_weights(trainer).items())


@pytest.mark.parametrize(
    ("method", "settings"), [("tropd", {"max_prefix": 0}), ("demopsd", {"reference": "student"})], ids=["tropd", "demopsd"]
)
def test_the_way_out_that_a_refusal_names(method, settings, places, tmp_path):
    feedback = method == "tropd"
    changes = dict(method_settings=settings, teacher=places["model"], teacher_feedback=feedback, max_steps=1, eval_size=0)
    trainer = run_trainer(places["base"], tmp_path, method=method, **changes)
    trainer.train()
    assert trainer.state.global_step == 1


# ---- What does not fit -------------------------------------------------------------------------------------------------------------


def test_teachers_that_do_not_fit_are_refused(places, tmp_path):
    from transformers import AutoTokenizer

    other = Path(save_larger(tmp_path / "other"))
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(other)
    smaller = save_larger(tmp_path / "smaller", rows=260)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path in Path(places["adapter"]).iterdir():
        (foreign / path.name).write_bytes(path.read_bytes())
    settings = json.loads((foreign / "adapter_config.json").read_text())
    (foreign / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "somebody/else"}))
    for teacher, message in (
        (str(other), r"another tokenizer than the student: 1 tokens have another id or none, such as '<another>'"),
        (smaller, r"has 260 rows, the student's has 263"),
        (str(foreign), r"was made for somebody/else"),
        (str(tmp_path / "nothing" / "here"), r"nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            load_setup(run_config(places["base"], tmp_path / "run", teacher=teacher))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": "student", "teacher_dtype": "float32"}, "teacher is 'student', and teacher_dtype"),
        ({"teacher_quantization": "nf4"}, "teacher is 'ema', and teacher_dtype"),
        ({"teacher": "some/model", "teacher_dtype": "float16"}, "teacher_dtype is 'float16': expected 'bfloat16' or 'float32'"),
        ({"teacher": "some/model", "fsdp_size": 2}, "teacher 'some/model' has weights of its own, which fsdp_size"),
    ],
)
def test_options_that_would_do_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SelfDistillConfig(use_cpu=True, **changes)


# ---- Checkpoints and commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_resumed_run_equals_the_uninterrupted_one(kind, places, tmp_path):
    train(places["base"], tmp_path / "whole", "fire", 3, teacher=places[kind])
    with pytest.raises(ConnectionResetError):
        interrupted(places["base"], tmp_path / "killed", 3, die, "fire", 3, teacher=places[kind])
    resumed = train(places["base"], tmp_path / "killed", "fire", 3, teacher=places[kind])
    assert resumed.resumed_from == tmp_path / "killed" / "checkpoint-2"
    assert same_runs(tmp_path / "whole", tmp_path / "killed") == []


def test_another_teacher_is_another_run(places, tmp_path):
    run = tmp_path / "run"
    train(places["base"], run, "fire", 2, teacher=places["model"])
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in Path(places["model"]).iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    train(places["base"], run, "fire", 2, teacher=str(moved))  # the same weights elsewhere
    for teacher in (places["adapter"], "student"):
        with pytest.raises(CheckpointError, match="teacher_weights was"):
            train(places["base"], run, "fire", 4, teacher=teacher)
    manifest = run / "checkpoint-2" / "checkpoint.json"
    assert json.loads(manifest.read_text())["given"]["teacher_weights"] not in KINDS


@pytest.mark.parametrize(("kind", "feedback"), [("initial", True), ("model", True), ("adapter", False)])
def test_inspect_and_eval_take_the_runs_teacher(kind, feedback, places, tmp_path, capsys):
    method = "fire" if feedback else "no_attribution"
    run = tmp_path / "run"
    changes = dict(teacher=places[kind], teacher_feedback=feedback, method=method, max_steps=2, attribution_examples=1)
    trainer = run_trainer(places["base"], run, **changes)
    trainer.train()
    capsys.readouterr()
    assert cli.main(["eval", str(run)]) == 0
    assert cli.main(["inspect", str(run), "--save"]) == 0, capsys.readouterr().err
    (stored,) = json.loads((run / "attribution" / "step_000002.json").read_text())["examples"]
    assert [field["name"] for field in stored["fields"]] == (["outcome", "hint"] if feedback else [])
    assert cli.main(["inspect", str(run), "--checkpoint", "2"]) == 0, capsys.readouterr().err
