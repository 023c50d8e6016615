"""The command line: recipes and options, help, mistakes told in one line, and every command on a tiny model."""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import yaml
from rich.console import Console

from distributed_worker import ZERO_2
from firedistill import FeedbackField, SelfDistillConfig, SelfDistillTrainer, Verdict, __version__, load_task
from firedistill.attribution import Inspection, Inspector
from firedistill.cli import main as cli
from firedistill.cli import names
from firedistill.cli import train as training
from firedistill.cli.arguments import parse_settings
from firedistill.cli.inspect import config_for, inspect_command, options_read, print_inspection
from firedistill.coerce import built_in_names, coerce, describe
from firedistill.config import UNUSED
from firedistill.evaluation import answer_examples
from firedistill.objectives import load_objective, registered_objectives
from firedistill.recipes import OptionError, build_config, option_groups
from firedistill.report.page import attributions_of
from firedistill.report.read import read_run
from firedistill.rollout import Response
from firedistill.run.console import ConsoleReport, accuracy_line, correct_rate_trend, first_and_last
from firedistill.run.log import read_jsonl
from firedistill.tasks import DataError
from firedistill.teacher.ema import EMAWeights
from firedistill.terminal import visible
from firedistill.warmstart import WarmStartConfig
from tiny import ToyTask, run_trainer

# Inherited options that something reads.
HAVE_AN_EFFECT = """
optim optim_args tf32 activation_checkpointing activation_checkpointing_kwargs
gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica
disable_tqdm run_name trackio_space_id trackio_bucket_id trackio_static_space_id eval_delay save_strategy
hub_token hub_private_repo hub_model_id hub_revision full_determinism
use_cpu accelerator_config parallelism_config dataloader_num_workers dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters
ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp deepspeed
debug skip_memory_metrics do_eval resume_from_checkpoint local_rank
"""

RECIPE = """\
model: {model}
task: tiny:ToyTask
output_dir: {output}
model_dtype: float32
use_cpu: true
gradient_checkpointing: no
learning_rate: 2e-3          # text to YAML 1.1, a number to us
nominal_learning_rate: 1e-4
lr_scheduler_type: constant
warmup_steps: 1
max_steps: 4
save_steps: 2
eval_steps: 2
eval_size: 2
max_new_tokens: 7
temperature: 1
top_p: 1
per_device_train_batch_size: 2
"""


@pytest.fixture(scope="module")
def recipe(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "toy.yaml").write_text(RECIPE.format(model=model, output=folder / "run"))
    return folder / "toy.yaml"


@pytest.fixture(scope="module")
def run(recipe):
    """A finished run of the recipe."""
    assert cli.main(["train", str(recipe)]) == 0
    return recipe.parent / "run"


@pytest.fixture
def firedistill(capsys):
    """Run a command: its status, what it printed, and what it complained about."""

    def call(*arguments):
        capsys.readouterr()
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as leaving:  # argparse
            status = leaving.code
        printed = capsys.readouterr()
        return SimpleNamespace(status=status, out=printed.out, err=printed.err)

    return call


def comparable(path):
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in read_jsonl(path)]


def same_rows(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7, nan_ok=True)


# ---- Options ---------------------------------------------------------------------------------------------------------------


def test_options_override_the_recipe_which_overrides_the_defaults(recipe):
    config = build_config(SelfDistillConfig, str(recipe), parse_settings(["--max-steps", "7", "--temperature=0.5"]))
    assert (config.max_steps, config.temperature) == (7, 0.5)
    assert (config.eval_size, config.top_p) == (2, 1.0)
    assert (config.lora_r, config.weight_decay) == (16, 0.01)


def test_a_warm_start_is_supervised_whatever_the_method_of_the_recipe():
    for recipe in built_in_names("recipes"):
        assert build_config(WarmStartConfig, recipe, {"use_cpu": True}).method == "supervised"
    with pytest.raises(OptionError, match="method is 'fire'; a warm start is supervised fine-tuning: use firedistill train"):
        build_config(WarmStartConfig, "lab", {"use_cpu": True, "method": "fire"})


def test_settings_of_the_method_can_be_set_one_by_one(recipe):
    config = build_config(
        SelfDistillConfig,
        str(recipe),
        parse_settings(["--method", "veto", "--method_settings.beta_start", "1e-1", "--method_settings.beta-end=0.05"]),
    )
    assert config.method_settings == {"beta_start": "1e-1", "beta_end": "0.05"}
    veto = load_objective(config.method, config.method_settings)
    assert (veto.beta_start, veto.beta_end, veto.group_size) == (0.1, 0.05, 1)
    with pytest.raises(OptionError, match="--max_steps.x: max_steps is '9' on the command line, expected a mapping"):
        build_config(SelfDistillConfig, None, {"max_steps": "9", "max_steps.x": "1"})
    with pytest.raises(OptionError, match="--method_settings.projection: .* expected a mapping"):
        build_config(
            SelfDistillConfig, None, {"method_settings.projection": "false", "method_settings": '{"attribution": false}'}
        )


def test_a_recipe_may_have_options_that_depend_on_the_method(tmp_path):
    """The paper's tables: group size and micro-batches of the chosen method."""
    chosen = {
        method: build_config(
            SelfDistillConfig, "arc_challenge-qwen2.5-3b", {"use_cpu": True} | ({"method": method} if method else {})
        )
        for method in (None, "veto", "srpo", "on_policy_sft")
    }
    batches = {m: (c.per_device_train_batch_size, c.gradient_accumulation_steps) for m, c in chosen.items()}
    assert batches == {None: (8, 1), "veto": (8, 1), "srpo": (2, 4), "on_policy_sft": (2, 4)}
    assert load_objective("srpo", chosen["srpo"].method_settings).group_size == 4
    assert load_objective("on_policy_sft", chosen["on_policy_sft"].method_settings).group_size == 2
    large = build_config(
        SelfDistillConfig, "mmlu_pro-qwen2.5-14b", {"use_cpu": True, "method": "scope", "quantization": "none"}
    )
    assert large.method_settings == {"group_size": 2} and large.gradient_accumulation_steps == 8
    override = {"method": "srpo", "gradient_accumulation_steps": "2", "method_settings.group_size": "8", "use_cpu": True}
    ours = build_config(SelfDistillConfig, "arc_challenge-qwen2.5-3b", override)
    assert ours.gradient_accumulation_steps == 2 and load_objective("srpo", ours.method_settings).group_size == 8
    for text, complaint in [
        ("methods: [srpo]", "methods in .* must hold a mapping"),
        ("methods: {srp: {}}", "unknown method 'srp'"),
    ]:
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(OptionError, match=complaint):
            build_config(SelfDistillConfig, str(tmp_path / "mine.yaml"), {})


def test_numbers_in_scientific_notation(recipe):
    assert isinstance(yaml.safe_load("2e-3"), str), "YAML 1.1 wants a point in it"
    config = build_config(SelfDistillConfig, str(recipe), {"nominal_learning_rate": "5e-7", "max_steps": "1e2"})
    assert (config.learning_rate, config.nominal_learning_rate) == (2e-3, 5e-7)
    assert config.max_steps == 100 and isinstance(config.max_steps, int)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("log_prob_floor", "none", None),
        ("log_prob_floor", "NULL", None),
        ("log_prob_floor", None, None),
        ("quantization", "none", None),
        ("train_size", "null", None),
        ("report_to", "none", []),
        ("report_to", None, []),
        ("report_to", "tensorboard", ["tensorboard"]),
        ("lora_target_modules", "q_proj, v_proj", ["q_proj", "v_proj"]),
        ("lora_target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("lora_target_modules", ["q_proj"], ["q_proj"]),
        ("drop_unfinished_rollouts", "true", True),
        ("log_rollouts", "No", False),
        ("log_rollouts", False, False),
        ("output_dir", 7, "7"),
        ("output_dir", "a=b", "a=b"),
        ("eval_steps", "0.5", 0.5),
        ("optim", "adamw_torch_fused", "adamw_torch_fused"),
    ],
)
def test_values_get_the_type_of_the_option(name, value, expected):
    assert getattr(build_config(SelfDistillConfig, None, {"use_cpu": True, name: value}), name) == expected


def test_every_default_is_a_valid_value():
    config = WarmStartConfig(use_cpu=True)
    again = build_config(WarmStartConfig, None, {"use_cpu": True, **config.resolved()})
    assert again.resolved() == config.resolved()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_steps", "many", "a whole number"),
        ("max_steps", "1.5", "a whole number"),
        ("max_steps", "inf", "a whole number"),
        ("max_steps", True, "a whole number"),
        ("max_steps", None, "a whole number"),
        ("learning_rate", "fast", "a number"),
        ("learning_rate", [1e-3], "a number"),
        ("log_prob_floor", "low", "a number or none"),
        ("log_rollouts", "maybe", "true or false"),
        ("log_rollouts", 1, "true or false"),
        ("model", True, "text"),
        ("model", None, "text"),
        ("lora_target_modules", "[q_proj", "a list"),
        ("lora_target_modules", {"q_proj": 1}, "a list"),
        ("lora_target_modules", 3, "a list"),
    ],
)
def test_a_value_of_the_wrong_type_names_option_place_and_type(name, value, expected, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({name: value}))
    with pytest.raises(OptionError) as caught:
        build_config(SelfDistillConfig, str(file), {})
    assert str(caught.value).startswith(f"{name} in {file} is {value!r}: expected {expected}")
    if isinstance(value, str):
        with pytest.raises(OptionError, match=f"^{name} on the command line is .*: expected {expected}"):
            build_config(SelfDistillConfig, None, {name: value})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lora_r": 0}, "lora_r is 0: expected a number above 0 (Rank"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0: expected a number at least 0 and below 1 (LoRA dropout.)"),
        ({"log_prob_floor": 0.5}, "log_prob_floor is 0.5: expected a number below 0 or none"),
        ({"learning_rate": "a"}, "learning_rate is 'a': expected a number (Peak learning rate.)"),
        ({"learning_rate": math.nan}, "learning_rate is nan: expected a number"),
        ({"learning_rate": math.inf}, "learning_rate is inf: expected a finite number"),
        ({"weight_decay": math.nan}, "weight_decay is nan: expected a number"),
        ({"score_temperature": math.inf}, "score_temperature is inf: expected a finite number"),
        (
            {"max_grad_norm": -1.0},
            "max_grad_norm is -1.0: expected a number at least 0 (Clip gradients to this norm; 0 disables",
        ),
        ({"adam_beta1": 1.0}, "adam_beta1 is 1.0: expected a number at least 0 and below 1"),
        ({"seed": -1}, "seed is -1: expected a number at least 0 and below 4294967296"),
        ({"save_steps": 0}, "save_steps is 0.0: expected a number above 0"),
        ({"max_steps": 10**30}, "max_steps (1000000000000000000000000000000), per_device_train_batch_size (8) and"),
        ({"output_dir": "/a\udcff"}, "output_dir is '/a\\udcff': expected a path in UTF-8"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end is True: expected False (Not supported"),
        ({"hub_strategy": "checkpoint"}, "hub_strategy is 'checkpoint': expected 'every_save' or 'end'"),
        ({"quantization": "nf8"}, "quantization is 'nf8': expected 'nf4' or 'auto' or none"),
        ({"model_dtype": "float64"}, "model_dtype is 'float64': expected 'auto' or 'bfloat16' or 'float32'"),
        ({"bf16": True}, "bf16 is True: expected False (Mixed precision is not supported; use model_dtype.)"),
        ({"save_only_model": True}, "save_only_model is True: expected False"),
        (
            {"step_scale": 2, "nominal_learning_rate": 1e-6},
            "step_scale is 2 and nominal_learning_rate 1e-06, which both determine s: leave one of them out",
        ),
        ({"step_scale": 0.5}, "step_scale is 0.5: expected a number at least 1 or none"),
        ({"max_steps": 10.5}, "max_steps is 10.5: expected a whole number (Optimizer steps.)"),
        ({"model": None}, "model is None: expected text"),
        ({"rollouts": None}, "rollouts is None: expected text"),
        ({"lora_target_modules": 3}, "lora_target_modules is 3: expected a list"),
        (
            {"eval_strategy": "epoch"},
            "eval_strategy is 'epoch': expected 'steps' (Do not change; use eval_size and eval_steps.)",
        ),
        ({"eval_strategy": "no"}, "eval_strategy is 'no': expected 'steps'"),
        ({"save_strategy": "epoch"}, "save_strategy is 'epoch': expected 'steps' or 'no' (Do not change, or 'no'"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers is -1: expected 0 or more"),
        ({"dataloader_persistent_workers": True}, "dataloader_num_workers is 0: expected 0 or more, and 1 or more with"),
        ({"remove_unused_columns": True}, "remove_unused_columns is True: expected False"),
        ({"dataloader_pin_memory": True}, "dataloader_pin_memory is True: expected False"),
        ({"rollouts": "http://host:port"}, "rollouts names 'http://host:port': expected addresses such as http://host:8000"),
        ({"rollouts": "http://a:1, http://me:secret@b:2"}, "rollouts names 'b:2': expected addresses"),
        ({"rollouts": "http://a:1,"}, "rollouts names '': expected addresses"),
        (
            {"accelerator_config": {"nonsense": 1}},
            "accelerator_config has 'nonsense': expected split_batches, dispatch_batches",
        ),
        (
            {"accelerator_config": {"split_batches": True}},
            "accelerator_config has split_batches: True, which is not supported: use per_device_train_batch_size",
        ),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config has dispatch_batches: True"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "accelerator_config has gradient_accumulation_kwargs: {'num_steps': 4}, which is not supported: use gradient_acc",
        ),
        ({"optim": "schedule_free_adamw"}, "optim schedule_free_adamw is not supported: it evaluates and saves other weights"),
        ({"optim": "lomo"}, "optim lomo is not supported: it updates weights within the backward pass"),
        (
            {"optim": "galore_adamw_layerwise"},
            "optim galore_adamw_layerwise is not supported: checkpoints cannot hold its state",
        ),
        ({"optim": "adamw_torch_8bit"}, "optim adamw_torch_8bit is not supported: checkpoints cannot hold its state"),
        (
            {"optim_target_modules": ["q_proj"]},
            "optim_target_modules has no effect on a self-distillation run: lora_target_modules are",
        ),
        (
            {"deepspeed": ZERO_2, "policy_step_radius": 0.1},
            "policy_step_radius (0.1) has no effect with DeepSpeed, which updates the weights within the backward pass",
        ),
        ({"deepspeed": []}, "deepspeed has zero_optimization.stage None: expected 1 or 2; without ZeRO, leave deepspeed out"),
        (
            {"deepspeed": ZERO_2 | {"zero_optimization": {"stage": 0}}},
            "deepspeed has zero_optimization.stage 0: expected 1 or 2",
        ),
        (
            {"deepspeed": ZERO_2 | {"zero_optimization": {"stage": 3}}},
            "deepspeed has ZeRO stage 3, which shards the adapter with",
        ),
        ({"deepspeed": ZERO_2 | {"scheduler": {}}}, "deepspeed has 'scheduler', which would replace that of the options"),
        *(
            (
                {"deepspeed": {key: ZERO_2[key] for key in ZERO_2 if key != name}},
                f"deepspeed has no '{name}', so that {option} would",
            )
            for name, option in {
                "gradient_clipping": "max_grad_norm",
                "gradient_accumulation_steps": "gradient_accumulation_steps",
                "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
            }.items()
        ),
        ({"trackio_static_space_id": "me/run"}, "trackio_static_space_id is 'me/run', which is made of a space"),
        ({"max_new_tokens": 2560}, "max_new_tokens is 2560: expected less than max_context_tokens (2560)"),
    ],
)
def test_a_value_out_of_range_names_option_and_range(settings, complaint):
    with pytest.raises(ValueError) as caught:
        SelfDistillConfig(use_cpu=True, **settings)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(("status", "backend", "ended"), [(0, "cuda:nccl", 1), (143, "cuda:nccl", 0), (143, "cpu:gloo", 1)])
def test_a_process_that_ends_alone_leaves_nccl_to_the_interpreter(status, backend, ended, monkeypatch):
    calls = []
    monkeypatch.setattr(training, "_train", lambda *_: status)
    monkeypatch.setattr(training, "end_process_group", lambda: calls.append(1))
    monkeypatch.setattr(training.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(training.dist, "get_backend_config", lambda: backend)
    assert training.train_command([], None) == status and len(calls) == ended


def test_deepspeed_of_the_launcher_excludes_policy_step_radius(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"policy_step_radius \(0.1\) has no effect with DeepSpeed"):
        SelfDistillConfig(use_cpu=True, policy_step_radius=0.1)


def test_values_that_fit_others_are_accepted():
    SelfDistillConfig(use_cpu=True, trackio_space_id="me/space", trackio_static_space_id="me/run")
    once = SelfDistillConfig(use_cpu=True, accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}})
    once.accelerator_config.gradient_accumulation_kwargs["num_steps"] = 1  # as Trainer does
    replace(once)


def test_values_from_python_get_the_type_of_the_option_too(tmp_path):
    config = SelfDistillConfig(
        use_cpu=True,
        teacher_feedback="false",
        eval_also="gsm8k, asdiv",
        lora_target_modules=("q_proj",),
        data_dir=tmp_path,
        output_dir=tmp_path / "run",
        learning_rate=1,
        warmup_steps=3,
        report_to=None,
        rollouts="http://a:1/, https://b",
    )
    assert config.teacher_feedback is False and config.eval_also == ["gsm8k", "asdiv"]
    assert config.lora_target_modules == ["q_proj"] and config.report_to == []
    assert (config.data_dir, config.output_dir) == (str(tmp_path), str(tmp_path / "run"))
    assert (config.learning_rate, config.warmup_steps) == (1.0, 3.0)
    assert config.rollout_servers == ["http://a:1/", "https://b"]


def test_another_engine_takes_the_place_of_a_runs_servers(tmp_path):
    stored = tmp_path / "config.yaml"
    SelfDistillConfig(use_cpu=True, rollouts="http://a:1").save_yaml(stored)
    given = {"use_cpu": True}
    assert build_config(SelfDistillConfig, str(stored), given).rollout_servers == ["http://a:1"]
    config = build_config(SelfDistillConfig, str(stored), given | {"rollouts": "hf"})
    assert (config.rollouts, config.rollout_servers) == ("hf", [])
    assert build_config(SelfDistillConfig, str(stored), given | {"rollouts": "server"}).rollout_servers == ["http://a:1"]
    SelfDistillConfig(use_cpu=True, rollouts="vllm", vllm_weights="lora").save_yaml(stored)
    for engine, expected in {"hf": None, "http://a:1": None, "vllm": "lora", "auto": "lora"}.items():
        assert build_config(SelfDistillConfig, str(stored), given | {"rollouts": engine}).vllm_weights == expected


def test_settings_without_evaluation_can_be_copied():
    config = SelfDistillConfig(use_cpu=True, eval_size=0)
    assert config.eval_strategy == replace(config, seed=1).eval_strategy == "no"
    assert replace(config, eval_strategy="steps", eval_size=5).eval_strategy == "steps"


def test_do_eval_cannot_switch_the_evaluation_off(recipe):
    with pytest.raises(OptionError, match=r"do_eval false has no effect: .* use eval_size 0"):
        build_config(SelfDistillConfig, str(recipe), {"do_eval": "false"})


def test_the_derived_do_eval_is_not_written_but_read(recipe):
    """Runs of earlier versions have it in config.yaml."""
    config = build_config(SelfDistillConfig, str(recipe), {"do_eval": True})
    assert config.do_eval and "do_eval" not in config.resolved()


def test_a_union_prefers_every_other_type_to_text():
    assert coerce("3", int | str) == 3 and coerce("3.5", str | float) == 3.5 and coerce("x", str | float) == "x"
    assert coerce('{"a": 1}', dict | str) == {"a": 1} and coerce("a=1", dict | str) == "a=1"
    assert coerce("none", str) == "none" and coerce("none", str | None) is None


def test_mappings_are_converted_with_what_they_hold():
    assert coerce({1: 2, "b": "x"}, dict[str, str]) == {"1": "2", "b": "x"} and coerce({True: 1}, dict[str, Any]) == {True: 1}
    for value in ({"x": print}, {"x": None}, {"x": ["y"]}, {("x",): "y"}):
        with pytest.raises(TypeError, match="^expected a mapping of text to text$"):
            coerce(value, dict[str, str])
    with pytest.raises(
        TypeError, match="expected a mapping of text to a number; YAML reads on, off, yes and no as truth values"
    ):
        coerce({True: 1}, dict[str, float])
    with pytest.raises(ValueError, match=r"feedback is .*: expected a mapping of text to text; functions .* @task\(feedback="):
        SelfDistillConfig(feedback={"x": print})


def test_whole_numbers_may_come_as_text():
    assert coerce(str(2**53 + 1), int) == 2**53 + 1 and coerce("1e3", int) == coerce("1000.0", int) == 1000
    for text in ("2.5", "inf", "9" * 5000, "x", ""):
        with pytest.raises(TypeError, match="expected a whole number"):
            coerce(text, int)


def test_types_of_method_settings():
    kind = Literal["ema", "student"]
    assert coerce("ema", kind) == "ema" and coerce(2**70, int) == 2**70 and coerce("1, 2", tuple[float, ...]) == (1.0, 2.0)
    assert (
        coerce(print, Callable[[str], None]) is print and coerce([{}], Any) == [{}] and describe(kind) == "'ema' or 'student'"
    )
    for value, other in (("x", kind), ("nan", float), (10**400, float), (1, Pair), ("[" * 2000, list[str])):
        with pytest.raises(TypeError, match="^expected "):
            coerce(value, other)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seed", "1", "--seed=2"], "--seed is given twice"),
        (["--eval-size", "1", "--eval_size", "2"], "--eval_size is given twice"),
        (["-s", "1"], "'-s' is not an option"),
        (["--seed", "1", "2"], "'2' is not an option"),
        (["--lora_target_modules", "q_proj", "v_proj"], "'v_proj' is not an option.*; several values are separated by commas"),
        (["--"], "'--' is not an option"),
    ],
)
def test_arguments_that_are_not_options(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_settings(arguments)


def test_the_forms_of_an_option():
    words = ["--top-k", "-1", "--use-cpu", "--model=x=y", "--task=", "--log_prob_floor", "-2e1", "--method_settings.beta-end=0"]
    assert parse_settings(words) == {
        "top_k": "-1",
        "use_cpu": "true",
        "model": "x=y",
        "task": "",
        "log_prob_floor": "-2e1",
        "method_settings.beta_end": "0",
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"model: [smollm2", "is not valid YAML"),
        (b"model: \xff\xfe", "is not valid YAML"),
        (b"- model\n- task\n", "must hold a mapping of option names to values, not list"),
        (b"[]", "not list"),
        (b"false", "not bool"),
        (b"smollm2", "not str"),
        (b"max_step: 3", "unknown option 'max_step' in .*; did you mean max_steps"),
        (b"1: 2", "unknown option 1 in"),
        (b"on: 2", "unknown option True in"),
        (b"zzzzqqqq: 2", "see --help and --help-all"),
        (b"seed: 1\nmodel: lab\nseed: 2", "'seed' is given twice in .*, line 3, column 1"),
        (b"{yes: b, 1: c}", "'yes' and '1' are the same key in .*, line 1, column 10"),
        (b"task: " + b"[" * 40 + b"]" * 40, "nested more than 30 levels deep"),
        (b"task: " + b"x" * 300_000, "longer than 256 KiB"),
        (b"seed: 1\n#" + "é".encode() * 140_000 + b"\nmax_steps: 3", "longer than 256 KiB"),
        (b"seed: " + b"9" * 5000, "is not valid YAML"),
        (b"seed: 2001-13-01", "month must be in 1..12"),
        (b"seed: !!bool x", "is not valid YAML"),
        (b"seed: !!timestamp x", "is not valid YAML"),
        (b"seed: !!int ''", "is not valid YAML"),
        (b"seed: [" + b"x, " * 1000 + b"]", r"seed in .* is \['x', .*…: expected a whole number"),
    ],
)
def test_recipes_that_cannot_be_read(text, complaint, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(text)
    with pytest.raises(OptionError, match=complaint) as caught:
        build_config(SelfDistillConfig, str(tmp_path / "mine.yaml"), {})
    assert "mine.yaml" in str(caught.value)


def test_the_settings_of_a_run_that_cannot_be_read_are_named_by_their_file(tmp_path):
    for text in ("- model", "model: ["):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(OptionError, match=f"^{tmp_path}/config.yaml (is not valid YAML|must hold a mapping)"):
            build_config(SelfDistillConfig, str(tmp_path), {})


@pytest.mark.parametrize("name", built_in_names("recipes"))
def test_every_built_in_recipe_is_valid(name):
    kind = WarmStartConfig if "warmstart" in name else SelfDistillConfig
    config = build_config(kind, name, {"use_cpu": True})
    assert config.output_dir and (config.method == "supervised") == (kind is WarmStartConfig)
    assert yaml.safe_load(yaml.safe_dump(config.resolved())) == config.resolved()


# ---- Mistakes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["train", "no-such-recipe"],
            "there is no 'no-such-recipe': expected a file or folder, or one of aqua_rat-qwen2.5-1.5b, ",
        ),
        (["train", "RECIPE", "--max_step", "3"], "unknown option 'max_step' on the command line; did you mean max_steps?"),
        (["train", "RECIPE", "--max_steps", "few"], "max_steps on the command line is 'few': expected a whole number"),
        (["train", "RECIPE", "--log_rollouts", "maybe"], "log_rollouts on the command line is 'maybe': expected true or false"),
        (["train", "RECIPE", "--top_p", "1.5"], "top_p is 1.5: expected a number above 0 and at most 1"),
        (["train", "RECIPE", "--seed", "1", "--seed", "1"], "--seed is given twice"),
        (["train", "RECIPE", "--resume", "--overwrite"], "give one of them"),
        (
            ["train", "RECIPE", "--resume", "--resume_from_checkpoint", "x/checkpoint-1"],
            "from the one that it names; give one of them",
        ),
        (["train", "RECIPE", "--overwrite", "--resume_from_checkpoint", "x/checkpoint-1"], "give one of them"),
        (["train", "RECIPE", "--task", "aritmetic"], "unknown task 'aritmetic'. Did you mean arithmetic?"),
        (["train", "RECIPE", "--task", "arithmetic:absurd"], "arithmetic has no level 'absurd'"),
        (["train", "RECIPE", "--task", "nowhere_at_all:Task"], "no module 'nowhere_at_all'"),
        (["train", "RECIPE", "--method", "water"], "unknown method 'water'; known are "),
        (["train", "RECIPE", "--task", "gsm8k", "--data_dir", "FOLDER"], "has no file for split 'train'"),
        (["train", "RECIPE", "--task", "gsm8k", "--data_dir", "FOLDER/none"], "is not a folder"),
        (["train", "RECIPE", "--initial_adapter", "FOLDER"], "is not an adapter"),
        (["train", "RECIPE", "--accelerator_config", '{"nonsense": 1}'], "accelerator_config has 'nonsense'"),
        (["train", "RECIPE", "--method", "supervised"], "use firedistill warmstart"),
        (["train", "RECIPE", "--initial_adapter", "FOLDER/none"], "FOLDER/none"),
        (["train", "RECIPE", "--model", "FOLDER"], "FOLDER"),
        (["train", "RECIPE", "--model", "FOLDER/none"], "FOLDER/none"),
        (["train", "RECIPE", "--output_dir", "RECIPE"], "RECIPE"),
        (["train", "RECIPE", "--resume", "--output_dir", "FOLDER/new"], "no complete checkpoint to resume from"),
        (["train", "RECIPE", "--output_dir", "RECIPE/run"], "RECIPE/run cannot be made (Not a directory): name another one"),
        (["train", "RECIPE", "--max_steps", "--bf16", "false"], "--max_steps needs a value: --max_steps VALUE"),
        (["train", "RECIPE", "--optim", "adamx"], "optim is 'adamx': expected one of adamw_torch, "),
        (["train", "RECIPE", "--optim_args", "momentum"], "optim_args has 'momentum': expected NAME=VALUE"),
        (["train", "RECIPE", "--optim_args", "foo=1"], "optim_args has 'foo=1', which has no effect on optim adamw_torch"),
        (
            ["train", "RECIPE", "--optim", "sgd", "--optim_args", "momentum=0.9,nestrov=true"],
            "'nestrov=true', which has no effect",
        ),
        (["train", "RECIPE", "--optim", "sgd", "--optim_args", "momentum=x"], "optim_args has 'momentum=x': could not convert"),
        (["train", "RECIPE", "--fsdp", "full_shard"], "use fsdp_size"),
        (["train", "RECIPE", "--deepspeed", "FOLDER/none.json"], "'FOLDER/none.json', and there is no such file"),
        (["train", "RECIPE", "--deepspeed", "RECIPE"], "RECIPE', which is not JSON: Expecting value"),
        (["train", "RECIPE", "--judge", "FOLDER/none.yaml"], "'FOLDER/none.yaml', and there is no such file"),
        (["train", "RECIPE", "--teacher", "FOLDER/none/none"], "teacher FOLDER/none/none: there is no model"),
        (
            ["train", "RECIPE", "--task", "words.py"],
            "'words.py' is a Python file: name the class or function in it, words.py:NAME",
        ),
        (["train", "quickstart-warmstart"], "use firedistill warmstart quickstart-warmstart"),
        (["eval"], "expected a run directory, an adapter, a recipe, or --model; recipes are aqua_rat"),
        (["eval", "FOLDER"], "FOLDER is neither a run directory nor an adapter"),
        (["inspect", "FOLDER/none"], "there is no 'FOLDER/none': expected a run directory, an adapter or a recipe"),
        (["eval", "RECIPE", "--learning_rate", "1"], "--learning_rate has no effect on this command: leave it out"),
        (["eval", "RECIPE", "--temperature", "1"], "--temperature has no effect on greedy responses: add --eval_samples N"),
        (["inspect", "RECIPE", "--max_steps", "3"], "--max_steps has no effect on this command: leave it out"),
        (["data", "RECIPE", "--learning_rate", "5"], "--learning_rate has no effect on this command: leave it out"),
        (["warmstart", "RECIPE", "--max_steps", "0"], "max_steps is 0: expected a number above 0"),
        (["warmstart", "RECIPE", "--learning_rate", "0"], "learning_rate is 0.0: expected a number above 0"),
        (["warmstart", "RECIPE", "--feedback_share", "2"], "feedback_share is 2.0: expected a number at least 0 and at most 1"),
        (["eval", "RECIPE", "--eval_size", "0"], "no held-out problem was answered"),
        (["eval", "RECIPE", "--max_prompt_tokens", "3"], "no held-out problem was answered"),
        (["inspect", "RECIPE", "--example"], "--example: expected one argument"),
        (["inspect", "RECIPE", "--example", "first"], "--example: expected a whole number from 0 on, got 'first'"),
        (["inspect", "RECIPE", "--example=-1"], "--example: expected a whole number from 0 on, got '-1'"),
        (["report", "FOLDER"], "FOLDER is not a run directory"),
        (["report", "FOLDER/none"], "none is not a run directory"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments, complaint, recipe, tmp_path, firedistill):
    def filled(text):
        return text.replace("RECIPE", str(recipe)).replace("FOLDER", str(tmp_path))

    arguments = [filled(argument) for argument in arguments]
    if "--output_dir" not in arguments and arguments[0] not in {"report", "inspect", "eval", "data"}:
        arguments += ["--output_dir", str(tmp_path / "run")]
    told = firedistill(*arguments)
    complaints = [line for line in told.err.splitlines() if " left out: " not in line]  # a warning of its own
    assert told.status == 2 and len(complaints) == 1
    assert complaints[0].startswith(f"firedistill {arguments[0]}: ") and filled(complaint) in complaints[0]


def test_a_message_steers_no_terminal(tmp_path, firedistill):
    told = firedistill("train", "\x1b[31m[bold]:smile:[/]")
    assert told.status == 2 and "\x1b" not in told.err and r"\x1b[31m[bold]:smile:[/]" in told.err.replace("\\\\", "\\")
    (tmp_path / "mine.yaml").write_text("a: [1,\n  2\nb: 3\n")
    told = firedistill("train", tmp_path / "mine.yaml")
    assert told.status == 2 and len(told.err.splitlines()) == 1 and "line 3" in told.err


def test_a_missing_package_is_a_mistake_too(firedistill, monkeypatch):
    def train(arguments, console):
        raise ImportError("tasks named gym:<dataset> need reasoning-gym: pip install firedistill[gym]")

    monkeypatch.setattr(cli, "load_command", lambda name: train)
    told = firedistill("train")
    assert told.status == 2 and "pip install firedistill[gym]" in told.err
    monkeypatch.setenv("FIREDISTILL_TRACEBACK", "1")
    with pytest.raises(ImportError):
        cli.main(["train"])


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch):
    def train(arguments, console):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "load_command", lambda name: train)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])


def test_control_c(firedistill, monkeypatch):
    def train(arguments, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_command", lambda name: train)
    told = firedistill("train")
    assert told.status == 130 and "the same command resumes the run" in told.err
    assert "the command without --overwrite resumes" in firedistill("train", "--overwrite").err
    told = firedistill("report")
    assert told.status == 130 and told.err == "stopped\n"


# ---- Help ------------------------------------------------------------------------------------------------------------------


def test_help_names_the_commands(firedistill):
    told = firedistill("--help")
    assert told.status == 0 and all(f"\n    {command}" in told.out for command in cli.COMMANDS)
    assert "examples:" in told.out


@pytest.mark.parametrize("arguments", [[], ["trian"], ["report"]])
def test_commands_that_are_none(arguments, firedistill):
    told = firedistill(*arguments)
    assert told.status == 2 and "usage: firedistill" in told.err
    if arguments == ["trian"]:
        assert "train" in told.err and "'trian'" in told.err


@pytest.mark.parametrize(("command", "kind"), [("train", SelfDistillConfig), ("warmstart", WarmStartConfig)])
def test_help_leads_with_our_options(command, kind, firedistill):
    told = firedistill(command, "--help")
    groups = option_groups(kind)
    assert told.status == 0 and told.out.startswith(f"firedistill {command} [RECIPE]")
    positions = [told.out.index(f"\n{group}:\n") for group in groups]
    assert positions == sorted(positions) and next(iter(groups)) == "What to train"
    ours = {option.name for options in groups.values() for option in options}
    assert all(f"\n  --{name} (" in told.out for name in ours) and "--resume" in told.out and "--overwrite" in told.out
    assert all(name in told.out for name in built_in_names("recipes"))
    inherited = {f.name for f in fields(kind) if f.init} - ours
    assert {"adam_epsilon", "hub_model_id"} <= inherited
    assert not any(name in told.out.replace(",", " ").split() for name in inherited)
    everything = firedistill(command, "--help-all")
    assert everything.status == 0 and all(f"  --{name} (" in everything.out for name in inherited - set(UNUSED))
    assert all(name in everything.out.partition("and refused:")[2] for name in UNUSED)
    assert "[bold]" not in told.out and "\x1b" not in told.out


@pytest.mark.parametrize(("command", "first"), [("eval", "--eval_size"), ("inspect", "--example"), ("report", "--output")])
def test_help_of_the_other_commands(command, first, firedistill):
    told = firedistill(command, "--help")
    assert told.status == 0 and f"firedistill {command}" in told.out and first in told.out


# ---- Training --------------------------------------------------------------------------------------------------------------


def test_a_run_says_last_of_all_that_it_is_finished(run, recipe, tmp_path, firedistill):
    """Suites rely on it."""
    assert json.loads((run / "finished.json").read_text()) == {"step": 4}
    times = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert max(times.values()) == times[run / "finished.json"] > times[run / "curves.png"]
    copy = shutil.copytree(run, tmp_path / "run")
    assert firedistill("train", copy, "--max_steps", "5", "--allow_changes", "max_steps", "--task_timeout", "none").status == 0
    assert json.loads((copy / "finished.json").read_text()) == {"step": 5}
    (copy / "curves.png").unlink()
    (copy / "curves.png").mkdir()  # cannot be drawn
    again = ("train", copy, "--max_steps", "6", "--allow_changes", "max_steps")
    told = firedistill(*again)
    assert told.status == 0, "the run has reached its end, without a picture"
    assert json.loads((copy / "finished.json").read_text()) == {"step": 6}


def test_the_run(run):
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["step"] for row in read_jsonl(run / "evals.jsonl")] == [0, 2, 4]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG") and (run / "adapter").is_dir()
    assert (run / "README.md").is_file() and len(list((run / "rollouts").glob("step_*.parquet"))) == 4


def test_a_constant_rate_stays(run):
    assert [row["learning_rate"] for row in read_jsonl(run / "metrics.jsonl")] == pytest.approx([2e-3] * 4)


def test_the_resolved_settings_of_a_run_train_again(run, recipe, tmp_path, firedistill):
    told = firedistill("train", run / "config.yaml", "--output_dir", tmp_path / "again")
    assert told.status == 0, told.err
    for name in ("metrics.jsonl", "evals.jsonl"):
        same_rows(comparable(tmp_path / "again" / name), comparable(run / name))
    settings, again = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run, tmp_path / "again"))
    assert again == settings | {"output_dir": str(tmp_path / "again")}
    # What was shown: plain text without the codes of a progress bar, lines that belong to the rows, and where everything is.
    assert "\x1b" not in told.out and "\r" not in told.out
    lines = told.out.splitlines()
    assert lines[0].startswith("fire on tiny:ToyTask with ") and "seed 0" in lines[0]
    assert [line.split()[0] for line in lines if line.lstrip()[:1] in set("1234")] == ["1", "2", "3", "4"]
    assert [line for line in lines if line.startswith("held-out, step ")][-1].startswith("held-out, step 4: ")
    assert "before" in told.out and "after" in told.out
    assert lines[-3:] == [
        f"run directory  {tmp_path / 'again'}",
        f"adapter        {tmp_path / 'again' / 'adapter'}",
        f"curves         {tmp_path / 'again' / 'curves.png'}",
    ]


def test_a_run_that_is_there_goes_on(run, tmp_path, firedistill):
    killed = tmp_path / "killed [bold]"  # a path is no markup either
    shutil.copytree(run, killed)
    for name in ("checkpoint-4", "adapter"):
        shutil.rmtree(killed / name)
    (killed / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-20])
    told = firedistill("train", killed, "--seed", 1)
    assert told.status == 2 and "seed was 0, is 1" in told.err and "--overwrite" in told.err
    assert len(read_jsonl(killed / "metrics.jsonl")) == 3
    told = firedistill("train", killed, "--resume")
    assert told.status == 0 and f"run directory  {killed}" in told.out
    assert f"resuming after step 2, from {killed / 'checkpoint-2'}" in told.out
    for name in ("metrics.jsonl", "evals.jsonl"):
        same_rows(comparable(killed / name), comparable(run / name))
    assert (killed / "adapter" / "adapter_model.safetensors").is_file()


def test_overwrite_replaces_a_run_once_the_new_settings_have_proved_usable(recipe, tmp_path, firedistill):
    options = ["--output_dir", tmp_path / "run", "--max_steps", 1, "--save_steps", 1, "--eval_size", 0]
    assert firedistill("train", recipe, *options).status == 0
    mark, other = tmp_path / "run" / "adapter" / "mark", tmp_path / "run" / "notes.txt"
    mark.touch()
    other.touch()
    told = firedistill("train", tmp_path / "run", "--overwrite", "--task", "aritmetic")
    assert told.status == 2 and mark.exists()
    told = firedistill("train", tmp_path / "run", "--overwrite", "--seed", 1)
    assert told.status == 0 and not mark.exists() and other.exists()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 1
    assert "held-out" not in told.out, "there was no evaluation"


def test_all_prompts_over_the_budget(recipe, tmp_path, firedistill):
    options = ["train", recipe, "--output_dir", tmp_path / "run", "--max_prompt_tokens", 3, "--max_steps", 2]
    told = firedistill(*options)
    assert told.status == 2 and "have more than 3 tokens" in told.err and not (tmp_path / "run" / "metrics.jsonl").exists()
    told = firedistill(*options, "--preflight", "skip")
    assert told.status == 0 and "skipped 2 updates: nothing to train on" in told.out
    assert "skipped: no rollout to train on" in told.out
    for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (tmp_path / "run" / "README.md").is_file() and (tmp_path / "run" / "curves.png").is_file()


def test_a_warm_start_can_be_evaluated_and_inspected(recipe, tmp_path, firedistill):
    warm = tmp_path / "warm"
    options = ["--max_steps", 2, "--feedback_share", 0.5, "--method", "supervised"]
    assert firedistill("warmstart", recipe, "--output_dir", warm, *options).status == 0
    assert yaml.safe_load((warm / "config.yaml").read_text())["feedback_share"] == 0.5
    told = firedistill("eval", warm)
    assert told.status == 0 and " right (lenient " in told.out, told.err
    told = firedistill("inspect", warm)
    assert told.status == 0 and "feedback field 1" in told.out, told.err
    assert "problems to train on: train 12" in firedistill("data", warm, "--rows", 1).out


def test_recipes_of_warm_starts_are_read_by_commands_that_do_not_train(firedistill):
    assert config_for("quickstart-warmstart", {}).feedback_share == 0.8
    told = firedistill("data", "quickstart-warmstart", "--rows", 1, "--train_size", 4)
    assert told.status == 0 and "problems to train on: train 4" in told.out, told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "labb"], "; did you mean lab?"),
        (
            ["train", "lab", "--learning-rat", "1"],
            "unknown option 'learning_rat' on the command line; did you mean learning_rate?",
        ),
        (["train", "lab", "--method", "fira"], "unknown method 'fira'; did you mean fire?"),
        (["train", "lab", "--method=fira"], "unknown method 'fira'; did you mean fire?"),
        (["eval", "lab", "--jsom"], "unknown option 'jsom' on the command line; did you mean json?"),
        (["train", "lab", "--task", "aritmetic"], "unknown task 'aritmetic'. Did you mean arithmetic?"),
        (["train", "lab", "--preflight", "maybe"], "--preflight: invalid choice: 'maybe' (choose from"),
        (["inspect", "lab", "--example", "one"], "--example: expected a whole number from 0 on, got 'one'"),
        (["data", "my.jsonl", "--colums", "a=b"], "unknown option 'colums' on the command line; did you mean columns?"),
        (["suite", "lab", "--max_step", "2"], "unknown option 'max_step' on the command line; did you mean max_steps?"),
    ],
)
def test_a_typo_is_told_before_torch_is_imported(arguments, message):
    code = (
        f"import sys; from firedistill.cli.main import main; status = main({arguments}); print(status, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout == "2 False\n" and message in told.stderr and told.stderr.count("\n") == 1


def test_names_are_those_of_the_settings():
    assert names.setting_types().keys() == {f.name for f in fields(WarmStartConfig) if f.init}
    ours = {name for name, of_class in registered_objectives().items() if of_class.__module__.startswith("firedistill.")}
    assert names.method_names() == ours


def test_an_unknown_command_and_the_version(firedistill, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["trian"])
    assert ended.value.code == 2 and "unknown command 'trian'; did you mean train?" in capsys.readouterr().err
    told = subprocess.run([sys.executable, "-m", "firedistill", "--version"], capture_output=True, text=True)
    assert told.returncode == 0 and told.stdout == f"firedistill {__version__}\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tra"], ["train"]),
        (["train", "--learning_r"], ["--learning_rate"]),
        (["train", "--method", "srp"], ["srpo"]),
        (["train", "la"], ["lab"]),
    ],
)
def test_completion(words, expected, firedistill):
    script = firedistill("completion", "bash").out
    line = " ".join(["firedistill", *words])
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _firedistill; printf "%s\\n" "${{COMPREPLY[@]}}"'
    told = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, cwd="/")
    assert told.stdout.split() == expected and not told.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--log_level", "verbose"], "log_level is 'verbose': expected 'detail' or 'debug' or"),
        (
            ["--dataloader_prefetch_factor", "0", "--dataloader_num_workers", "1"],
            "dataloader_prefetch_factor is 0: expected at",
        ),
        (["--warmup_steps", "2.7"], "warmup_steps is 2.7: expected a whole number, or below 1 a share of max_steps"),
        (["--method_settings", '{"group_size": 2, "group_size": 4}'], "expected a mapping"),
        (["--fsdp_config", "no-such-file.json"], "fsdp_config has no effect on a self-distillation run"),
    ],
)
def test_values_that_would_fail_later_or_be_dropped_are_refused(options, complaint, firedistill):
    told = firedistill("train", "lab", *options)
    assert told.status == 2 and complaint in told.err


def test_a_launcher_that_restarts_does_not_repeat_what_removes_checkpoints(tmp_path, firedistill, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    for option in (["--overwrite"], ["--resume_from_checkpoint", "runs/x/checkpoint-5"]):
        told = firedistill("train", "lab", "--output_dir", tmp_path / "run", *option)
        assert told.status == 2 and "torchrun --max_restarts repeats the command after a failure" in told.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train lab", "the same command"),
        ("train lab --overwrite --seed 1", "the command without --overwrite"),
        ("train lab --resume-from-checkpoint=runs/x/checkpoint-5", "the command without --resume_from_checkpoint"),
    ],
)
def test_no_message_asks_to_repeat_what_would_remove_the_run(words, expected, firedistill, monkeypatch, capsys):
    def lose(*arguments):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")

    monkeypatch.setattr(cli, "load_command", lambda name: lose)
    assert cli.main(words.split()) == 2
    assert f"see its message; {expected} continues from the last checkpoint (" in capsys.readouterr().err


def test_every_inherited_option_has_an_effect_or_is_refused():
    """A new option of TrainingArguments is to be sorted into one of the two."""
    inherited = {f.name: f for f in fields(SelfDistillConfig) if f.init and not f.metadata.get("effect")}
    assert set(inherited) - set(UNUSED) <= set(HAVE_AN_EFFECT.split())
    for name in UNUSED.keys() & inherited.keys():
        option = inherited[name]
        value = 7.0 if option.default in (0, 3.0, 8, None) and option.default is not False else not option.default
        with pytest.raises(ValueError, match=f"{name} has no effect on a self-distillation run"):
            SelfDistillConfig(use_cpu=True, **{name: value})
        with pytest.raises(OptionError, match=rf"{name} has no effect .* leave it out \({name} on the command line\)"):
            build_config(SelfDistillConfig, None, {"use_cpu": True, name: option.default})


@pytest.mark.parametrize("task", ["arithmetic", "arithmetic:easy"])
def test_a_generated_task_refuses_data(task, tmp_path):
    with pytest.raises(DataError, match="generates its problems and reads no data: leave data_dir"):
        load_task(task).examples("train", 1, data_dir=str(tmp_path))


def test_the_run_directory_tells_runs_apart(model):
    def folder(**changes):
        return SelfDistillConfig(**{"model": model, "task": "tiny:ToyTask", "use_cpu": True, **changes}).output_dir

    assert folder() == "runs/base-tiny-ToyTask-fire-lr4e-06-seed0"
    assert folder(model="org/../Some Model", learning_rate=1e-3, seed=3) == "runs/Some-Model-tiny-ToyTask-fire-lr0.001-seed3"
    assert folder(output_dir="x/{method}/{max_steps}") == "x/fire/200"
    with pytest.raises(ValueError, match="output_dir is 'x/{steps}': there is no option 'steps'"):
        folder(output_dir="x/{steps}")
    with pytest.raises(ValueError, match="there is no option 'hub_token'"):
        folder(output_dir="{hub_token}")


# ---- Looking at runs -------------------------------------------------------------------------------------------------------


def test_eval_uses_the_adapter_of_the_run_and_leaves_the_run_alone(run, recipe, firedistill):
    before = (run / "evals.jsonl").read_text()
    told = firedistill("eval", run)
    assert told.status == 0 and (run / "evals.jsonl").read_text() == before and "\x1b" not in told.out
    last = read_jsonl(run / "evals.jsonl")[-1]
    about, found = told.out.splitlines()
    assert " on toy, 2 held-out problems" in about and found == accuracy_line(last, prefix="")
    told = firedistill("eval", run, "--initial_adapter", run / "checkpoint-2", "--eval_size=1")
    assert told.status == 0 and "n 1)" in told.out


def test_eval_takes_an_adapter_or_a_checkpoint_and_prints_json(run, model, tmp_path, firedistill):
    last = read_jsonl(run / "evals.jsonl")[-1]
    for folder in (run / "adapter", run / "checkpoint-4"):
        told = firedistill("eval", folder, "--json")
        assert told.status == 0 and json.loads(told.out) == {name: last[name] for name in json.loads(told.out)}
    shutil.copytree(run / "adapter", tmp_path / "alone")
    told = firedistill("eval", tmp_path / "alone")
    assert (
        told.status == 2
        and "is an adapter outside of a run directory: name the task to evaluate it on, --task NAME" in told.err
    )
    options = ["--task", "tiny:ToyTask", "--eval_size", 2, "--max_new_tokens", 7, "--model_dtype", "float32", "--use_cpu"]
    told = firedistill("eval", tmp_path / "alone", *options, "--json")
    assert told.status == 0 and json.loads(told.out)["accuracy"] == last["accuracy"]
    told = firedistill("eval", run / "adapter", "--eval_size=1", "--eval_samples=1", "--json")
    summary = json.loads(told.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert told.status == 0 and summary["n"] == 1 and summary["sampled_stderr"] is None


def test_eval_of_a_run_without_adapter_does_not_judge_the_base_model(run, tmp_path, firedistill):
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.yaml").write_text((run / "config.yaml").read_text())
    told = firedistill("eval", tmp_path / "killed")
    assert told.status == 2 and "has no adapter yet" in told.err


def test_a_run_that_is_continued_is_not_judged_by_its_earlier_end(run, tmp_path, firedistill):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "finished.json").unlink()
    for command in ("eval", "inspect"):
        told = firedistill(command, copy, "--output_dir", copy)
        assert told.status == 2 and f"{copy} has no finished.json: it is training, or was continued" in told.err
        assert firedistill(command, copy / "adapter", "--output_dir", copy).status == 0


def test_eval_by_category(recipe, firedistill):
    told = firedistill("eval", recipe, "--task", "test_cli:ToyWithCategories", "--output_dir", recipe.parent / "other")
    assert told.status == 0
    assert [line.partition(":")[0] for line in told.out.splitlines()[2:]] == [r"  [red]x\x1b[/]", "  sums"]


class ToyWithCategories(ToyTask):
    def examples(self, split, n=None, seed=0, data_dir=None):
        examples = super().examples(split, n, seed, data_dir)
        return [replace(e, category=("sums", "[red]x\x1b[/]")[i % 2]) for i, e in enumerate(examples)]


def test_inspect_shows_everything(run, firedistill):
    told = firedistill("inspect", run, "--example", 2, "--prompts")
    assert told.status == 0 and "\x1b" not in told.out and "\r" not in told.out
    assert "student prompt, toy/eval/2" in told.out and "Question 2: why why" in told.out
    assert "response, " in told.out and "verdict" in told.out and "correct: " in told.out
    for number, name in enumerate(("outcome", "hint"), start=1):
        assert f"feedback field {number}, {name}" in told.out and f"teacher message, without {name} (" in told.out
    assert "teacher message, full (" in told.out and "teacher message, without feedback (" in told.out
    header = next(line for line in told.out.splitlines() if "|g_c|" in line)
    positions = [header.index(column) for column in ["token", "|g_c|", "rho", "a1", "a2", "eta", "chi", "beta", "a0"]]
    assert positions == sorted(positions) and "a1 outcome; a2 hint; a0 full feedback" in told.out
    table, _, rest = told.out[told.out.index("|g_c|") :].partition("└")
    tokens = int(told.out.partition("response, ")[2].split()[0])
    assert sum(line.startswith("│") for line in table.splitlines()) == tokens
    assert rest.index("verdict") < rest.index("student prompt"), "the prompts come last"
    told = firedistill("inspect", run, "--example", 2)
    assert told.status == 0 and "teacher message" not in told.out and "--prompts shows the prompts" in told.out


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [(160, ["rho", "a1", "a0"], []), (60, ["rho", "a1"], ["a0"]), (40, ["|g_c|"], ["chi", "beta", "a0"])],
)
def test_a_narrow_terminal_gets_fewer_columns_in_full(width, shown, hidden, run):
    console = Console(width=width, record=True, file=io.StringIO(), markup=False, highlight=False)
    assert inspect_command([str(run), "--example", "2"], console) == 0
    lines = console.export_text().splitlines()
    titles = next(line for line in lines if "|g_c|" in line).replace("┃", " ").split()
    assert set(shown) <= set(titles) and not set(hidden) & set(titles)
    assert any("not shown in" in line for line in lines) == bool(hidden)
    assert not any("…" in line for line in lines) and max(map(len, lines)) <= width


def test_inspect_takes_another_split_and_refuses_an_example_that_is_not_there(run, firedistill):
    told = firedistill("inspect", run, "--split=train", "--example=1")
    assert told.status == 0 and "toy/train/1: " in told.out
    told = firedistill("inspect", run, "--task", "test_cli:Pair", "--example", 2)
    assert told.status == 2 and "--example is 2, but the eval split of toy has 2 problems" in told.err


def test_inspect_takes_the_problems_of_the_run(run, tmp_path, firedistill, monkeypatch):
    """Those of training depend on its seed; of the held-out ones it takes the run's split, without loading them for an evaluation."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    settings = yaml.safe_load((copy / "config.yaml").read_text()) | {"seed": 5, "eval_subset_seed": 3, "eval_split": "test"}
    (copy / "config.yaml").write_text(yaml.safe_dump(settings))
    asked = []

    def examples(self, split, n=None, seed=0, data_dir=None):
        asked.append((split, seed))
        return ToyTask.examples(self, split, 2)

    monkeypatch.setattr(Pair, "other_splits", ("test",), raising=False)
    monkeypatch.setattr(Pair, "examples", examples)
    for options, found in (((), ("test", 3)), (("--split", "eval"), ("eval", 3)), (("--split", "train"), ("train", 5))):
        assert firedistill("inspect", copy, "--task", "test_cli:Pair", *options).status == 0
        assert asked == [found]
        asked.clear()


class Pair(ToyTask):
    def examples(self, split, n=None, seed=0, data_dir=None):
        return super().examples(split, 2)


def test_inspect_saves_what_a_report_shows(run, tmp_path, firedistill):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    told = firedistill("inspect", copy, "--save", "--count", 3, "--output_dir", copy)
    assert told.status == 0 and "toy/eval/2: " in told.out and told.out.endswith("attribution/step_000004.json\n")
    saved = json.loads((copy / "attribution" / "step_000004.json").read_text())
    assert saved["step"] == 4 and [e["uid"] for e in saved["examples"]] == [f"toy/eval/{i}" for i in range(3)]
    example = saved["examples"][0]
    assert [field["name"] for field in example["fields"]] == ["outcome", "hint"]
    sums = [full + sum(row[t] for row in example["alpha"]) for t, full in enumerate(example["alpha_full"])]
    assert sums == pytest.approx([1.0] * len(example["tokens"]), abs=1e-4) and len(example["energy"]) == 2
    told = firedistill("inspect", copy, "--save", "--checkpoint", 2, "--output_dir", copy)
    assert told.status == 0 and (copy / "attribution" / "step_000002.json").is_file(), told.err
    notes = []
    assert [found["step"] for found in attributions_of(read_run(copy), notes)[0]] == [2, 4] and not notes


def test_the_folder_of_a_checkpoint_has_the_teacher_of_its_step(run, firedistill, monkeypatch):
    loaded, load = [], EMAWeights.load
    monkeypatch.setattr(EMAWeights, "load", lambda self, folder: loaded.append(folder) or load(self, folder))
    by_step, by_folder = firedistill("inspect", run, "--checkpoint", 2), firedistill("inspect", run / "checkpoint-2")
    assert by_step.status == by_folder.status == 0 and by_step.out == by_folder.out
    assert loaded == [run / "checkpoint-2"] * 2
    loaded.clear()
    assert firedistill("inspect", run / "adapter").status == 0 and loaded == [run / "checkpoint-4"]
    told = firedistill("eval", run / "checkpoint-2", "--initial_adapter", run / "adapter")
    assert told.status == 2 and "both name an adapter: leave one of them out" in told.err


def test_a_recipe_is_inspected_without_the_run_in_its_folder(run, recipe, firedistill, monkeypatch):
    monkeypatch.setattr(EMAWeights, "load", lambda self, folder: pytest.fail(f"the teacher is that of {folder}"))
    assert firedistill("inspect", recipe, "--output_dir", run).status == 0


def test_inspect_writes_nothing_if_every_example_is_left_out(run, tmp_path, firedistill):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "attribution").mkdir(exist_ok=True)
    (copy / "attribution" / "step_000004.json").write_text("the run's own")
    told = firedistill("inspect", copy, "--save", "--max_prompt_tokens", 3)
    assert told.status == 2 and "no response could be inspected; nothing is written" in told.err and "wrote" not in told.out
    assert (copy / "attribution" / "step_000004.json").read_text() == "the run's own"


@pytest.mark.parametrize(
    ("command", "unread"),
    [
        ("eval", "learning_rate save_steps eval_steps lora_r stop_within report_to gradient_checkpointing max_feedback_tokens"),
        ("eval", "method teacher rollout_batch_size share_prefixes log_rollouts train_size optim hub_token feedback_share"),
        ("inspect", "max_steps save_steps eval_steps eval_size eval_split lora_r stop_within report_to ema_rate train_size"),
        ("data", "learning_rate method model max_new_tokens save_steps output_dir"),
    ],
)
def test_options_that_a_command_does_not_read_are_refused(command, unread, firedistill):
    for name in unread.split():
        told = firedistill(command, "lab", f"--{name}", "fire")
        assert told.status == 2 and f"--{name} has no effect on this command: leave it out" in told.err


def test_options_that_a_command_reads():
    of_both = (
        "model task data_dir judge columns max_new_tokens rollouts model_dtype initial_adapter lora_dtype seed deterministic"
    )
    of_eval = "temperature eval_size eval_split eval_samples eval_also eval_batch_size score_tokens_per_forward use_cpu"
    of_inspect = "temperature method method_settings teacher attribution_groups step_scale learning_rate max_feedback_tokens"
    assert {*of_both.split(), *of_eval.split()} <= options_read("eval")
    assert {*of_both.split(), *of_inspect.split()} <= options_read("inspect")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--save", "--checkpoint", "3"], "--checkpoint is 3; {run} has checkpoints of these steps: 2, 4"),
        (["--save", "--count", "0"], "--count is 0; expected 1 or more"),
        (["--count", "2"], "--count is 2; expected 1 or more, and --save with more than 1"),
        (["--save", "--prompts"], "--prompts has no effect with --save"),
        (["--checkpoint", "2", "--initial_adapter", "x"], "--checkpoint and --initial_adapter both name an adapter"),
        (["--save", "--task", "arithmetic"], "--task has no place beside --save, which stores what the run itself does"),
        (["--save", "--teacher", "student"], "--teacher has no place beside --save, which stores what the run itself does"),
        (
            ["--teacher", "student"],
            "--teacher is 'student', but {run}/checkpoint-4 holds the weights of the run's own teacher (ema)",
        ),
    ],
)
def test_inspect_refuses_what_cannot_be_meant(arguments, complaint, run, firedistill):
    told = firedistill("inspect", run, *arguments)
    assert told.status == 2 and complaint.format(run=run) in told.err
    told = firedistill("inspect", "quickstart", "--save")
    assert told.status == 2 and "--save needs a run directory" in told.err


HOSTILE = "[bold]x[/bold] [/] [red :smile: \x1b[31mred\x07\r\x9b\u202e \\[x] [link=http://a]b[/link]"
SHOWN = r"[bold]x[/bold] [/] [red :smile: \x1b[31mred\x07\r\x9b\u202e \[x] [link=http://a]b[/link]"


class HostileTask(ToyTask):
    """Markup and control characters wherever a dataset or a task can put them."""

    def examples(self, split, n=None, seed=0, data_dir=None):
        return [replace(e, uid=f"{HOSTILE}/{e.uid}", question=HOSTILE) for e in super().examples(split, n)]

    def verify(self, example, response):
        return Verdict(False, HOSTILE, HOSTILE)

    def feedback(self, example, response, verdict):
        return (FeedbackField("[/]\x1b", HOSTILE),)


@pytest.fixture(scope="module")
def hostile_trainer(recipe):
    return SelfDistillTrainer(
        args=build_config(
            SelfDistillConfig, str(recipe), {"task": "test_cli:HostileTask", "output_dir": str(recipe.parent / "h")}
        )
    )


def first_inspection(trainer: SelfDistillTrainer) -> Inspection:
    """Of a sampled response to the first held-out problem."""
    args, examples = trainer.args, trainer.eval_examples[:1]
    (rollout,), _ = answer_examples(
        trainer.rollout_engine, trainer.task, trainer.encoder, examples, args.sampling, args.budget, args.seed
    )
    return Inspector(args, trainer.model, trainer.teacher, trainer.head, trainer.encoder).inspect(rollout)


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_of_models_and_datasets_are_shown_literally(terminal, hostile_trainer):
    inspection = first_inspection(hostile_trainer)
    response = Response(inspection.rollout.response_ids, f"{HOSTILE} said", True)
    inspection.rollout = replace(inspection.rollout, response=response)
    inspection.tokens[0] = "[bold]\x1b[/]"
    out = io.StringIO()
    # Colours aside, a terminal gets the same characters.
    console = Console(file=out, width=250, force_terminal=terminal, color_system=None, legacy_windows=False)
    print_inspection(inspection, hostile_trainer.teacher, console, hostile_trainer.encoder)
    shown = "".join(line for line in out.getvalue().split("\x1b[0m")).replace("\x1b[1m", "").replace("\x1b[3m", "")
    assert not set(shown) & set("\x1b\x07\r\x9b\u202e")
    assert f"{SHOWN} said" in shown and f"submitted: {SHOWN}" in shown and f"student prompt, {SHOWN}/toy/eval/0" in shown
    assert shown.count(SHOWN) >= 8, "prompt, title, response, verdict twice, field, views"
    assert r"feedback field 1, [/]\x1b" in shown and r"a1 [/]\x1b" in shown and r"[bold]\x1b[/]" in shown


@pytest.mark.parametrize("fields_of", ["none", "correct"])
def test_inspect_without_feedback_and_of_a_correct_response(fields_of, hostile_trainer, monkeypatch):
    if fields_of == "none":
        monkeypatch.setattr(HostileTask, "feedback", lambda self, example, response, verdict: ())
    else:
        monkeypatch.setattr(HostileTask, "verify", lambda self, example, response: Verdict(True, "1", "1", True, True))
    inspection = first_inspection(hostile_trainer)
    assert inspection.target.alpha.shape == (2 - (fields_of == "none"), len(inspection.tokens))
    assert torch.isfinite(inspection.target.rho).all() and len(inspection.beta) == len(inspection.tokens)
    out = io.StringIO()
    print_inspection(inspection, hostile_trainer.teacher, Console(file=out, width=160))
    assert ("incorrect: chi, alpha, eta apply" if fields_of == "none" else "correct: beta applies") in out.getvalue()


def test_visible_keeps_every_script_and_escapes_what_steers():
    assert visible("naïve 漢字 😀\n\tend") == "naïve 漢字 😀\n\tend"
    assert visible("\x1b]0;title\x07\x7f\x85\u2028\u2066\ud800") == r"\x1b]0;title\x07\x7f\x85\u2028\u2066\ud800"
    assert visible("a\u061c\u200e\u200f\u200bb") == "a" + r"\u061c\u200e\u200f" + "\u200bb"
    assert visible("\\x1b") == "\\x1b"


def test_report_of_runs(run, recipe, tmp_path, firedistill):
    for runs in ([run], [run, run]):
        told = firedistill("report", *runs, "-o", tmp_path / "new" / "curves.png")
        assert told.status == 0 and told.out == f"wrote {tmp_path / 'new' / 'curves.png'}\n"
        assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    told = firedistill("report", run, "-o", tmp_path / "curves.xyz")
    assert told.status == 2 and "xyz" in told.err


# ---- What is shown during a run -------------------------------------------------------------------------------------------------


def shown(steps, evaluations=()):
    """What the console report prints for steps with these metrics."""
    out = io.StringIO()
    trainer = SimpleNamespace(last_metrics={}, on_progress=None, stop=SimpleNamespace(signal=None))
    report = ConsoleReport(trainer)
    report.console = Console(file=out, width=60)
    state = SimpleNamespace(max_steps=len(steps), global_step=0)
    report.on_train_begin(None, state, None)
    for metrics in evaluations:
        report.on_evaluate(None, state, None, metrics=metrics)
    for number, metrics in enumerate(steps, start=1):
        trainer.on_progress("rollouts", 1, 2)
        state.global_step = number
        trainer.last_metrics = {
            "step": number,
            "loss": 0.5,
            "grad_norm": 1.0,
            "train_seconds": 2.0,
            "skipped_update": 0,
        } | metrics
        report.on_step_end(None, state, None)
    report.on_train_end(None, state, None)
    return out.getvalue().splitlines(), report


def test_a_line_per_step_under_one_header():
    lines, _ = shown([{}, {}, {}])
    assert len(lines) == 4 and lines[0].split() == ["step", "loss", "|grad|", "s/step"]
    assert [line.split() for line in lines[1:]] == [[str(step), "0.5000", "1.000", "2.0"] for step in (1, 2, 3)]
    assert len({len(line) for line in lines}) == 1, "columns line up"


def test_a_terminal_shows_the_last_steps_as_a_table():
    out = io.StringIO()
    console = Console(file=out, width=90, height=30, force_terminal=True, color_system=None, legacy_windows=False)
    trainer = SimpleNamespace(last_metrics={}, on_progress=None)
    report = ConsoleReport(trainer, rows=2)
    report.console = console
    state = SimpleNamespace(max_steps=4, global_step=0)
    report.on_train_begin(None, state, None)
    for state.global_step in range(1, 5):
        norm, skipped = (float("nan"), 1) if state.global_step == 3 else (1.0, 0)
        trainer.last_metrics = {"step": state.global_step, "loss": 0.5, "grad_norm": norm, "skipped_update": skipped}
        report.on_step_end(None, state, None)
        if state.global_step == 2:
            report.on_evaluate(None, state, None, metrics=EVALUATION)
    last = Console(file=io.StringIO(), width=90)
    last.print(report.render())
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in last.file.getvalue().splitlines() if "│" in line]
    assert rows == [["3", "0.5000", "-", "skipped: the gradient is not finite"], ["4", "0.5000", "1.000", ""]]
    report.stop()
    report.stop()
    text = out.getvalue()
    assert "   1    0.5000    1.000" in text and "   2    0.5000    1.000" in text, "earlier steps are lines above it"
    assert "held-out, step 2: 25.0%" in text and "4/4" not in text and "100%" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is back"


def test_training_from_python_shows_the_same(model, tmp_path, capsys, caplog):
    """Lines per step and evaluation, the curves, what the preflight warns of, and from where a run is resumed."""
    settings = {"disable_tqdm": False, "max_steps": 2, "save_steps": 1}
    run_trainer(model, tmp_path / "run", **settings).train()
    assert any("5 training questions are also held-out questions" in message for message in caplog.messages)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("held-out, step 0: ") and lines[1].split()[:3] == ["step", "loss", "|grad|"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "held-out,"]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    caplog.clear()
    run_trainer(model, tmp_path / "run", **settings | {"max_steps": 3}).train(allow_changes=["max_steps"], preflight=False)
    assert not any("held-out questions" in message for message in caplog.messages)
    assert "resuming after step 2, from " in capsys.readouterr().out.splitlines()[0]


def test_a_notebook_shows_one_output_that_is_replaced(monkeypatch):
    """Evaluations, the last steps and the bar as HTML and text; nothing is printed beside it, and no codes of a terminal."""
    contents: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda content, raw: contents.append(content))
    module = SimpleNamespace(display=lambda content, raw, display_id: contents.append(content) or handle)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("firedistill.run.console.in_notebook", lambda: True)
    printed, report = shown([{"loss": float(step)} for step in range(15)], [EVALUATION])
    assert printed == [] and len(contents) < 10, "at most twice a second"
    text, page = contents[-1]["text/plain"], contents[-1]["text/html"]
    assert "\x1b" not in text + page and page.startswith("<pre")
    lines = text.splitlines()
    assert lines[0].startswith("held-out, step 0: 25.0%") and "100%" in lines[-1]
    steps = [line.split()[1] for line in lines if line.startswith("│")]
    assert steps == [str(step) for step in range(4, 16)] and "earlier steps: metrics.jsonl" in text


def test_a_column_stays_once_it_has_been_seen():
    lines, _ = shown([{}, {"eta": 0.9}, {}, {"beta": float("nan"), "eta": 1.0}])
    assert [line.split()[0] for line in lines] == ["step", "1", "step", "2", "3", "step", "4"]
    assert lines[4].split() == ["3", "0.5000", "1.000", "-", "2.0"]
    assert lines[6].split() == ["4", "0.5000", "1.000", "1.000", "-", "2.0"]


def test_a_skipped_step_says_why():
    lines, _ = shown([{"skipped_update": 1, "grad_norm": 0.0}, {"skipped_update": 1, "grad_norm": float("nan")}])
    assert lines[1].endswith("skipped: no rollout to train on")
    assert lines[2].endswith("skipped: the gradient is not finite") and lines[2].split()[2] == "-"
    lines, _ = shown([{"skipped_update": 1, "updates": 8, "grad_norm": float("nan")}])
    assert lines[1].endswith("1 of 8 updates skipped: the gradient is not finite")


EVALUATION = {
    "eval_accuracy": 0.25,
    "eval_lenient_accuracy": 0.5,
    "eval_well_formed_rate": 1.0,
    "eval_stderr": 0.03,
    "eval_response_length": 17.12,
    "eval_n": 192,
}


def test_trend_of_sampled_answers():
    rows = [{"correct_rate": rate} for rate in (0.25, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0)]
    assert correct_rate_trend(rows) == "sampled answers that were right: 50% in the first 2 steps, 75% in the last 2"
    assert correct_rate_trend(rows[:3]) is None and correct_rate_trend([{"loss": 1.0}] * 9) is None


def test_evaluations_before_and_after():
    lines, _ = shown([{}], [EVALUATION, {"eval_n": 0}, EVALUATION | {"eval_accuracy": 0.75}])
    assert lines[0] == "held-out, step 0: 25.0% ± 3.0% right (lenient 50.0%, well-formed 100.0%, 17.1 tokens, n 192)"
    assert sum(line.startswith("held-out") for line in lines) == 2, "one that answered nothing is none"
    first = {"step": 0, **{name.removeprefix("eval_"): value for name, value in EVALUATION.items()}}
    out = io.StringIO()
    Console(file=out, width=80).print(first_and_last([first, first | {"accuracy": 0.5}, first | {"accuracy": 0.75}]))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["right", "25.0% ± 3.0%", "75.0% ± 3.0%"],
        ["right, lenient", "50.0%", "50.0%"],
        ["well-formed", "100.0%", "100.0%"],
        ["tokens per response", "17.1", "17.1"],
    ]
    columns = [[column.header for column in first_and_last([first | {"step": step}, first]).columns] for step in (0, 20)]
    assert columns == [["", "before", "after"], ["", "step 20", "after"]]


def test_trackers_know_a_run_by_its_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert SelfDistillConfig(output_dir=".", use_cpu=True).run_name == "mine"
    config = SelfDistillConfig(output_dir="runs/mine", use_cpu=True)
    assert (config.run_name, config.project) == ("mine", "firedistill")
    assert SelfDistillConfig(output_dir="runs/mine", run_name="other", use_cpu=True).run_name == "other"
