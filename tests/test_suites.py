"""Suites: what they plan, where runs stand, which process executes one, and a real one that is killed and continued."""

from __future__ import annotations

import fcntl
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from firedistill import SelfDistillConfig, recipes
from firedistill.cli import main as cli
from firedistill.cli import suite as command
from firedistill.coerce import built_in_names
from firedistill.objectives import load_objective
from firedistill.recipes import build_config
from firedistill.run.checkpoints import newest_checkpoint, step_of
from firedistill.run.log import read_jsonl
from firedistill.run.signals import REQUESTS
from firedistill.suites import plan as planning
from firedistill.suites import run as running
from firedistill.suites.plan import Plan, absolute, make_plan, merge, read_plan, read_suite, refuse_edited_recipes
from firedistill.suites.run import (
    HOST,
    Runner,
    RunState,
    SuiteFolder,
    array_part,
    duration,
    is_locked,
    lock,
    run_arguments,
    run_command,
    seconds_left,
    share,
    summary,
)
from firedistill.tasks import reading, table
from tiny import save_checkpoint

TESTS = Path(__file__).parent
built_in = built_in_names("suites")

RECIPE = """\
model: {model}
task: tiny:ToyTask
model_dtype: float32
use_cpu: true
gradient_checkpointing: no
learning_rate: 2.0e-3
lr_scheduler_type: constant
warmup_steps: 1
max_steps: 16
save_steps: 2
eval_steps: 8
eval_size: 2
max_new_tokens: 5
per_device_train_batch_size: 2
"""

SUITE = """\
title: a toy
seeds: [0, 1]
blocks:
  - recipes: [toy.yaml]
    methods: [fire, full_context]
    settings: {ema_rate: 0.5}
  - recipes: [toy.yaml]
    methods: [fire]
    settings: {ema_rate: 0.5}
    learning_rate_factors: [0.5, 1, 2]
"""


@pytest.fixture
def toy(tmp_path):
    """A suite file with its recipe beside it."""
    (tmp_path / "toy.yaml").write_text(RECIPE.format(model="somewhere"))
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path / "suite.yaml"


# ---- Plans -----------------------------------------------------------------------------------------------------------------


def test_the_papers_main_table():
    plan = make_plan("table1")
    assert len(plan.runs) == 6 * 9 * 3 and len({run.id for run in plan.runs}) == 162
    assert {run.model for run in plan.runs} == {"Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"}
    rates = {run.task: run.learning_rate for run in plan.runs}
    assert rates == dict(gsm8k=4e-6, asdiv=4e-6, aqua_rat=2e-6, arc_challenge=4e-6, winogrande=4e-6, wic=1e-6)
    steps = {run.task: run.max_steps for run in plan.runs}
    assert steps == dict(gsm8k=200, asdiv=200, aqua_rat=250, arc_challenge=200, winogrande=150, wic=200)
    assert all(set(run.settings) == {"method", "seed"} for run in plan.runs), "everything else is the recipe's"


# Model, dataset, peak rate, a_0, 1 - mu, warm-up, steps, context, new tokens, training pool, held-out problems (the paper's table
# of resolved settings); and micro-batch and accumulation by the model's size: of one response per prompt, of groups.
PAPER = """
1.5b gsm8k         4e-6 4e-6 0.03 25 200 2560 384 1024 192
1.5b asdiv         4e-6 4e-6 0.03 25 200 2304 320 1600 192
1.5b aqua_rat      2e-6 2e-6 0.03 25 250 3072 512 2048 192
3b   arc_challenge 4e-6 4e-6 0.01 20 200 2560 320 2048 192
3b   winogrande    4e-6 4e-6 0.01 15 150 2560 320 2048 192
3b   wic           1e-6 1e-6 0.01 15 200 2560 320 2048 192
14b  mmlu_pro      1e-5 2e-6 0.01 20 200 3072 256 1536 288
"""
BATCHES = {"1.5b": ((8, 1), (2, 4)), "3b": ((8, 1), (2, 4)), "14b": ((2, 4), (1, 8))}
GROUPS = {
    "1.5b": {"on_policy_sft": 4, "top_d": 4, "tropd": 4, "srpo": 4, "scope": 4},
    "3b": {"on_policy_sft": 2, "top_d": 4, "tropd": 4, "srpo": 4, "scope": 4},
    "14b": {"top_d": 4, "tropd": 4, "srpo": 2, "scope": 2},
}


@pytest.mark.parametrize("line", PAPER.strip().splitlines())
def test_recipes_have_the_papers_settings(line):
    size, task, *numbers = line.split()
    columns = "learning_rate nominal_learning_rate ema_rate warmup_steps max_steps max_context_tokens max_new_tokens"
    names = [*columns.split(), "train_size", "eval_size"]
    for method in ("fire", "full_context", "veto", "demopsd", *GROUPS[size]):
        config = build_config(SelfDistillConfig, f"{task}-qwen2.5-{size}", {"method": method, "use_cpu": True})
        assert [getattr(config, name) for name in names] == list(map(float, numbers))
        group, batches = GROUPS[size].get(method, 1), BATCHES[size][method in GROUPS[size]]
        assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == batches
        assert load_objective(method, config.method_settings).group_size == group
        assert config.model == f"Qwen/Qwen2.5-{size.upper()}-Instruct"
        shared = {"temperature": 0.8, "top_p": 0.95, "max_prompt_tokens": 1280, "max_feedback_tokens": 768, "adam_beta1": 0.9}
        shared |= {"adam_beta2": 0.95, "weight_decay": 0.01, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine"}
        shared |= {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
        assert {name: getattr(config, name) for name in shared} == shared and config.optim.startswith("adamw_torch")
    assert load_objective("on_policy_sft", {}).sampling(config.sampling).temperature == 1.0


def test_the_papers_table_of_the_large_model():
    plan = make_plan("table-14b")
    assert len(plan.runs) == 7 * 2 and not {"on_policy_sft", "veto"} & {run.method for run in plan.runs}


def test_the_papers_ablation_has_its_own_rates_for_the_small_model():
    plan = make_plan("ablation", seeds=[7])
    assert len(plan.runs) == 6 * 4 and {run.seed for run in plan.runs} == {7}
    small = {
        run.task: (run.learning_rate, run.settings["nominal_learning_rate"], run.max_steps)
        for run in plan.runs
        if "1.5B" in run.model
    }
    assert small == {"gsm8k": (6e-6, 1e-6, 200), "asdiv": (1e-5, 1e-6, 200), "aqua_rat": (5e-6, 5e-7, 200)}
    assert all("learning_rate" not in run.settings for run in plan.runs if "3B" in run.model)


def test_the_papers_sweep():
    plan = make_plan("lr-sweep", seeds=[0])
    rates = {}
    for run in plan.runs:
        rates.setdefault(run.task, []).append(run.learning_rate)
    assert rates["gsm8k"] == [2e-6, 4e-6, 8e-6, 16e-6] and rates["wic"] == [5e-7, 1e-6, 2e-6, 4e-6]
    nominal = {run.task: run.settings["nominal_learning_rate"] for run in plan.runs}
    assert nominal == dict(gsm8k=1e-7, asdiv=5e-7, aqua_rat=1e-8, arc_challenge=5e-7, winogrande=5e-7, wic=5e-8)


def test_settings_of_a_block_are_added_to_those_of_the_file(toy):
    toy.write_text(SUITE.replace("blocks:", "settings: {ema_rate: 0.25, lora_r: 4}\nblocks:"))
    toy.write_text(toy.read_text() + "  - {recipes: [toy.yaml], methods: [veto], label: plain}\n")
    settings = {run.method: {k: run.settings[k] for k in ("ema_rate", "lora_r")} for run in make_plan(str(toy)).runs}
    assert settings["fire"] == {"ema_rate": 0.5, "lora_r": 4} and settings["veto"] == {"ema_rate": 0.25, "lora_r": 4}
    toy.write_text("settings: [1]\n" + SUITE)
    with pytest.raises(ValueError, match="settings are .1.; expected a mapping"):
        make_plan(str(toy))


def test_the_laboratory_names_every_method_and_the_sweep(monkeypatch):
    """With a stand-in for its recipe, so that edits of the recipe do not matter."""
    monkeypatch.setattr(recipes, "read_recipe", lambda name: {"lab": {"model": "lab", "learning_rate": 1e-3}}[name])
    plan = make_plan("lab")
    assert len({run.method for run in plan.runs}) == 12 and {run.seed for run in plan.runs} == {0, 1, 2}
    assert len(plan.runs) == 12 * 3 + 2 * 3 * 3, "the sweep's factor 1 is the run that is there already"


def test_the_two_suites_of_the_laboratory_share_no_run():
    lab, rates = make_plan("lab").runs, make_plan("lab-rates").runs
    assert len(rates) == (10 * 2 + 2 + 4 * 2) * 3 and not {run.id for run in lab} & {run.id for run in rates}
    factors = {}
    for run in [*lab, *rates]:
        factors.setdefault(run.method, set()).add(round(run.learning_rate / 3e-4, 6))
    assert len(factors) == 12 and all({0.25, 1, 4} <= found for found in factors.values())


def test_the_authors_subsets_follow_the_seed(toy, tmp_path):
    ours, theirs = make_plan("table1").runs, make_plan("table1-subsets").runs
    assert [run.settings | {"eval_subset_seed": run.seed + 10_000} for run in ours] == [run.settings for run in theirs]
    (tmp_path / "own.yaml").write_text("blocks: [{recipes: [lab], methods: [fire], subset_per_seed: 1}]")
    with pytest.raises(ValueError, match="subset_per_seed is 1; expected true or false"):
        make_plan(str(tmp_path / "own.yaml"))
    with pytest.raises(ValueError, match="subset_per_seed sets eval_subset_seed, which is given too"):
        make_plan("table1-subsets", options={"eval_subset_seed": "3"})


@pytest.mark.parametrize("name", [name for name in built_in if name.startswith("study") and name != "study-asdiv"])
def test_the_studies_of_the_lab_model_have_five_seeds_of_every_run(name):
    plan = make_plan(name)
    by_run = Counter(run.id.removesuffix(f"-seed{run.seed}") for run in plan.runs)
    assert set(by_run.values()) == {5} and {run.seed for run in plan.runs} == {0, 1, 2, 3, 4}
    assert all(run.recipe == "lab" and run.settings["eval_samples"] == 8 for run in plan.runs)


def test_the_study_of_asdiv_has_the_settings_and_the_largest_rate_of_the_paper():
    runs = make_plan("study-asdiv").runs
    rates = [("fire", 1.6e-5), ("full_context", 1.6e-5), ("fire", 4e-6), ("full_context", 4e-6)]
    assert [(run.method, pytest.approx(run.learning_rate)) for run in runs] == rates
    for run in runs:
        config = recipes.build_config(SelfDistillConfig, run.recipe, {"use_cpu": True, **run.settings})
        assert config.nominal_learning_rate == 5e-7 and (config.warmup_steps, config.max_steps, config.max_new_tokens) == (
            25,
            200,
            320,
        )


def test_the_labels_of_blocks_tell_runs_apart():
    runs = {run.id: run for run in make_plan("study-parts", seeds=[0]).runs}
    both = runs["lab-full_context-both-lr4x-seed0"]
    assert both.variant == "both 4x" and both.settings["method_settings"] == {"attribution": True, "projection": True}
    assert runs["lab-full_context-seed0"].variant == "" and len(runs) == 20
    assert runs["lab-routing-unbounded-seed0"].settings["method_settings"] == {"bounded_sft": False}


def test_a_label_may_be_a_number(tmp_path):
    (tmp_path / "toy.yaml").write_text("task: reverse_words:ReverseWords\n")
    (tmp_path / "sweep.yaml").write_text("blocks: [{recipes: [toy.yaml], methods: [fire], label: 0}]\n")
    assert [run.id for run in make_plan(str(tmp_path / "sweep.yaml")).runs] == ["toy-fire-0-seed0"]


def test_a_sweep_keeps_the_nominal_rate(toy):
    runs = {run.id: run for run in make_plan(str(toy), seeds=[3]).runs}
    assert list(runs) == ["toy-fire-seed3", "toy-full_context-seed3", "toy-fire-lr0.5x-seed3", "toy-fire-lr2x-seed3"]
    assert runs["toy-fire-lr2x-seed3"].settings == {
        "ema_rate": 0.5,
        "method": "fire",
        "seed": 3,
        "learning_rate": 4e-3,
        "nominal_learning_rate": 2e-3,
    }
    fixed = make_plan(str(toy), only=["fire"], seeds=[3], options={"step_scale": "2", "nominal_learning_rate": "none"}).runs
    assert fixed[-1].settings["learning_rate"] == 4e-3 and fixed[-1].settings["nominal_learning_rate"] == "none"
    assert runs["toy-fire-lr2x-seed3"].variant == "2x" and runs["toy-fire-seed3"].recipe == str(toy.parent / "toy.yaml")


def test_files_and_folders_of_a_suite_are_found_from_everywhere(toy, tmp_path, monkeypatch):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "initial").mkdir()
    (tmp_path / "my_task.py").write_text("")
    (tmp_path / "data.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    assert absolute("teacher", "teacher") == str(tmp_path / "teacher") and absolute("teacher", "initial") == "initial"
    assert absolute("task", "./my_task.py:words") == f"{tmp_path}/my_task.py:words"
    assert absolute("task", "code:data.jsonl") == f"code:{tmp_path}/data.jsonl" and absolute("task", "lab") == "lab"
    assert absolute("judge", "data.jsonl") == absolute("eval_data", "data.jsonl") == str(tmp_path / "data.jsonl")
    assert absolute("task", "teacher") == "teacher" and absolute("method", "./my_task.py:M") == "./my_task.py:M"
    toy.write_text(SUITE.replace("ema_rate: 0.5", "ema_rate: 0.5, data_dir: teacher"))
    settings = [run.settings for run in make_plan(str(toy), options={"max_steps": 3}).runs]
    assert {entry["data_dir"] for entry in settings} == {str(tmp_path / "teacher")}


def test_a_run_directory_does_not_take_the_place_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    assert make_plan("lab", seeds=[0], only=["fire"]).runs
    (tmp_path / "lab/config.yaml").write_text("max_steps: 12\n")
    with pytest.raises(ValueError, match=f"the run directory {tmp_path / 'lab'} has the name of the recipe lab: rename it"):
        make_plan("lab", seeds=[0], only=["fire"])


def test_recipes_and_the_folder_of_a_suite_may_be_in_the_home_folder(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    toy.write_text("blocks: [{recipes: [~/toy.yaml], methods: [fire], warmstart: ~/toy.yaml}]")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert {run.recipe for run in make_plan(str(toy)).runs} == {str(tmp_path / "toy.yaml")}
    assert SuiteFolder("~/s").folder == tmp_path / "s"


def test_options_for_all_runs_win_and_are_checked(toy):
    plan = make_plan(str(toy), only=["full_context"], options={"max_steps": "3", "ema_rate": "1"})
    assert [(run.max_steps, run.settings["ema_rate"]) for run in plan.runs] == [(3, "1")] * 2
    with pytest.raises(ValueError, match="unknown option 'max_step'"):
        make_plan(str(toy), options={"max_step": "3"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("title: x", "is not a suite: expected a mapping with a list of blocks"),
        ("blocks: [3]", "block 1: the block is 3; expected a mapping"),
        (
            "blocks: [{recipe: [toy.yaml]}]",
            "block 1: unknown key 'recipe'; a block may have label, learning_rate_factors, methods",
        ),
        ("blocks: [{recipes: toy.yaml, methods: [fire]}]", "recipes is 'toy.yaml'; expected a list"),
        ("blocks: [{recipes: [toy.yaml]}]", "methods is None; expected a list"),
        ("blocks: [{recipes: [nix], methods: [fire]}]", "no recipe 'nix'"),
        ("blocks: [{recipes: [toy.yaml], methods: [fier]}]", "block 1: unknown method 'fier'; did you mean fire.; known are "),
        ("blocks: [{recipes: [toy.yaml], methods: [nowhere:Calm]}]", "block 1: method 'nowhere:Calm' could not be loaded"),
        ("blocks: [{recipes: [toy.yaml], methods: [fire], learning_rate_factors: [0]}]", "expected numbers above 0"),
        (
            "blocks: [{recipes: [toy.yaml], methods: [fire]}, {recipes: [toy.yaml], methods: [fire], settings: {top_p: 1}}]",
            "two runs are named toy-fire-seed0.*; give one of the blocks a label",
        ),
        ("blocks: [{recipes: [toy.yaml], methods: [fire], settings: {task: nope}}]", "block 1: unknown task 'nope'"),
        (
            "blocks: [{recipes: [toy.yaml], methods: [fire], settings: {task: my.jsonl}}]",
            "block 1: task: there is no file my.jsonl",
        ),
        (
            "blocks: [{recipes: [toy.yaml], methods: [fire], settings: {eval_data: my.csv}}]",
            "eval_data: there is no file my.csv",
        ),
        ("blocks: [", "is not valid YAML"),
        ("blocks: [{recipes: [toy.yaml], methods: [fire], settings: [1]}]", "settings are .1.; expected a mapping"),
        (
            "blocks: [{recipes: [toy.yaml], methods: [fire], settings: {hub_token: hf_X}}]",
            "hub_token must not be part of a suite",
        ),
        ("blocks: [{recipes: [toy.yaml], methods: [fire], label: ../x}]", "block 1: a run is .*cannot be the name of a folder"),
        ("blocks: [{recipes: [toy.yaml], methods: [fire], seeds: [x]}]", r"block 1: seeds are \['x'\]; expected whole numbers"),
        ("seeds: [1.5]\nblocks: [{recipes: [toy.yaml], methods: [fire]}]", "block 1: seeds are .1.5.; expected whole numbers"),
        ("blocks: [{recipes: [toy.yaml], methods: [fire], learning_rate_factors: [.inf]}]", "expected numbers above 0"),
        ("seeds: [0]\nseeds: [1]\nblocks: [{recipes: [toy.yaml], methods: [fire]}]", "'seeds' is given twice"),
        ("a: &a [1]\nblocks: [*a, *a]", "has aliases"),
        ("[" * 10_000, "nested more than 30 levels deep"),
        ("title: " + "x" * 300_000, "longer than 256 KiB"),
        ("blocks: [{recipes: [toy.yaml], methods: [fire], seeds: &s 2001-99-99}]", "is not valid YAML: month must be"),
        (f"blocks: [{{recipes: [toy.yaml], methods: [fire], seeds: [{'1,' * 10_001}]}}]", "stands for 10,001 runs"),
        ("blocks: [{1: 2, x: 3}]", "unknown key 1"),
    ],
)
def test_invalid_suite_files(text, complaint, toy):
    toy.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        make_plan(str(toy))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"data_dir": "nope"}, "data_dir: there is no folder nope; correct the path"),
        ({"data_dir": "ok.jsonl", "task": "gsm8k"}, "data_dir: there is no folder {place}/ok.jsonl; correct the path"),
        ({"judge": "nope.yaml"}, "judge is 'nope.yaml', and there is no such file: expected a judge file (YAML)"),
        ({"judge": "toy.yaml"}, "{place}/toy.yaml: unknown entry 'task'; expected url, model, "),
        ({"initial_adapter": "initial"}, "initial_adapter: initial is not an adapter: it has no adapter_config.json"),
        ({"initial_adapter": "nope"}, "initial_adapter: nope is not an adapter: it has no adapter_config.json"),
        (
            {"model": "/nonexistent/m"},
            "model: there is no model /nonexistent/m: neither a folder, nor a GGUF file, nor a name on",
        ),
        ({"model": "nope.gguf"}, "model: no such GGUF file: nope.gguf"),
        ({"model": "folder"}, "model: {place}/folder has no config.json, so it is not a Hugging Face checkpoint"),
        ({"teacher": "./nope"}, "teacher: there is no model ./nope: "),
        (
            {"teacher": "folder/adapter"},
            "teacher: {place}/folder/adapter is not an adapter: it has no adapter_model.safetensors",
        ),
        ({"eval_also": ["asdiv", "nope.jsonl"]}, "eval_also: there is no file nope.jsonl; correct the path"),
        ({"task": "./nope.py:Mine"}, "task: there is no file ./nope.py; correct the path"),
        ({"eval_also": ["asdiv", "gms8k"]}, "eval_also: unknown task 'gms8k'. Did you mean gsm8k"),
        (
            {"task": "ok.jsonl", "columns": {"question": "qq"}},
            "{place}/ok.jsonl: columns question=qq: there is no column 'qq'; did",
        ),
        ({"task": "folder"}, "{place}/folder has no data files: expected "),
        (
            {"task": "./no/folder"},
            "./no/folder: expected .jsonl, .jsonl.gz, .csv, .tsv or .parquet, a folder of such files, or a hub",
        ),
    ],
    ids=str,
)
def test_what_settings_name_must_exist_before_the_first_run(settings, complaint, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "adapter").mkdir(parents=True)
    (tmp_path / "folder" / "adapter" / "adapter_config.json").touch()
    (tmp_path / "ok.jsonl").write_text('{"q": "1 + 1?", "answer": 2}\n')
    toy.write_text(json.dumps({"blocks": [{"recipes": ["toy.yaml"], "methods": ["fire"], "settings": settings}]}))
    assert cli.main(["suite", str(toy), "-o", "s", "--dry-run"]) == 2
    assert f"firedistill suite: {toy}, block 1: {complaint.format(place=tmp_path)}" in capsys.readouterr().err


def test_what_a_plan_cannot_know_is_left_to_the_runs(toy, tmp_path, monkeypatch, capsys):
    """Names on the hub, adapters of earlier runs, large files. Small files are read once, whatever the number of runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.jsonl").write_text('{"q": "1 + 1?", "answer": 2}\n')
    (tmp_path / "toy.yaml").write_text(RECIPE.format(model="owner/name") + "initial_adapter: runs/warmstart-first/adapter\n")
    (tmp_path / "first.yaml").write_text(RECIPE.format(model="owner/name"))
    data, read = {"task": "ok.jsonl", "columns": {"question": "q"}}, []
    judge = "url: http://localhost:1/v1\nmodel: m\nkey: UNSET_HERE\nreply: {advice: What to do instead.}\n"
    (tmp_path / "judge.yaml").write_text(judge)  # its key may be set on the machine of the runs alone
    last = {"task": "owner/rows", "initial_adapter": "s/runs/toy-fire-own-seed0/adapter", "teacher": "owner/teacher"}
    last["judge"] = "judge.yaml"
    blocks = [
        {"warmstart": "first.yaml", "settings": data, "label": "own", "methods": ["fire", "veto"], "seeds": [0, 1]},
        {"settings": last | {"teacher": "s/runs/warmstart-first-own/checkpoint-2"}, "methods": ["veto"]},
        {"settings": last, "methods": ["fire"]},
    ]
    toy.write_text(json.dumps({"recipes": ["toy.yaml"], "blocks": blocks}))
    opened = reading.open_rows
    monkeypatch.setattr(table, "open_rows", lambda path: read.append(path) or opened(path))
    assert cli.main(["suite", str(toy), "-o", "s", "--dry-run"]) == 0 and len(read) == 1
    assert capsys.readouterr().err == "", "no guesses about columns"
    monkeypatch.setattr(planning, "MOST_READ", 10)
    assert cli.main(["suite", str(toy), "-o", "s", "--dry-run"]) == 0 and len(read) == 1


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("method", "srpo", "settings has method, which a suite sets for each run; use methods: [fire]"),
        ("seed", 3, "settings has seed, which a suite sets for each run; use seeds: [0]"),
        ("output_dir", "x", "settings has output_dir, which a suite sets for each run; use -o FOLDER on the command line"),
        ("resume_from_checkpoint", "x", "settings has resume_from_checkpoint, which a suite sets for each run; leave it out: "),
        ("max_stepz", 3, "unknown option 'max_stepz' in settings; did you mean max_steps?"),
        ("max_steps", "many", "max_steps in settings is 'many': expected a whole number"),
        ("max_steps", -1, "max_steps is -1: expected a number above 0"),
        ("method_settings", 3, "method_settings in settings is 3: expected a mapping"),
        ("method_settings", {"group_siz": 2}, "method_settings: 'fire' has no setting 'group_siz'; did you mean 'group_size'?"),
        ("method_settings", {"group_size": "x"}, "method_settings: group_size is 'x'; expected a whole number"),
    ],
)
def test_settings_that_no_run_can_have_are_refused_before_the_first(key, value, complaint, toy, tmp_path, capsys):
    blocks = [{"recipes": ["toy.yaml"], "methods": ["veto"]}, {"recipes": ["toy.yaml"], "methods": ["fire"]}]
    toy.write_text(json.dumps({"blocks": [blocks[0], blocks[1] | {"settings": {key: value}}]}))
    for more in (["--dry-run"], []):
        assert cli.main(["suite", str(toy), "-o", str(tmp_path / "s"), *more]) == 2
        told = capsys.readouterr().err
        assert f"firedistill suite: {toy}, block 2: {complaint}" in told and told.count("\n") == 1
        assert "on the command line is" not in told and not (tmp_path / "s").exists()


def test_what_a_suite_sets_for_each_run_has_no_place_at_the_top_either(toy):
    toy.write_text("settings: {seed: 1}\n" + SUITE)
    with pytest.raises(ValueError, match=r"suite.yaml: settings has seed, which a suite sets for each run; use seeds: \[0\]"):
        make_plan(str(toy))
    toy.write_text("blocks: [{recipes: [toy.yaml], methods: [fire], warmstart: toy.yaml, settings: {initial_adapter: x}}]")
    with pytest.raises(ValueError, match="block 1: warmstart sets initial_adapter, which is given too: leave one of them out"):
        make_plan(str(toy))


def test_a_warm_start_has_the_revision_of_the_model_of_its_block(toy):
    settings = {"model": "owner/name", "model_revision": "v1"}
    block = {"recipes": ["toy.yaml"], "methods": ["fire"], "warmstart": "toy.yaml", "settings": settings}
    toy.write_text(json.dumps({"blocks": [block]}))
    for run in make_plan(str(toy)).runs:
        assert run.settings["model_revision"] == "v1"


def test_a_warm_start_has_the_task_of_its_block(toy):
    block = {"recipes": ["toy.yaml"], "methods": ["fire"], "warmstart": "toy.yaml"}
    settings = {"task": "arithmetic", "feedback": {"parser": ""}, "ema_rate": 0.5}
    toy.write_text(json.dumps({"blocks": [block, {**block, "settings": settings, "label": "sums"}]}))
    first, second, *runs = make_plan(str(toy), options={"use_cpu": "true"}).runs
    assert (first.id, first.task, first.settings) == ("warmstart-toy", "tiny:ToyTask", {"use_cpu": "true"})
    assert (second.id, second.settings) == ("warmstart-toy-sums", {"task": "arithmetic", "use_cpu": "true"})
    assert [run.needs for run in runs] == [first.id, second.id]


def test_an_option_of_the_command_line_is_said_to_stand_there(toy):
    with pytest.raises(ValueError, match="max_steps on the command line is 'many': expected a whole number"):
        make_plan(str(toy), options={"max_steps": "many"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "{recipe} is empty; expected options and their values, such as task: gsm8k"),
        ("# model: lab\n", "{recipe} is empty"),
        ("methods: {fier: {}}", "methods in {recipe}: unknown method 'fier'; did you mean fire?; known are "),
        ("methods: {3: {}}", "methods in {recipe}: unknown method '3'; known are "),
        ("methods: {srpo: {max_stepz: 3}}", "unknown option 'max_stepz' in {recipe}, methods: srpo; did you mean max_steps?"),
        ("methods: {srpo: {max_steps: x}}", "max_steps in {recipe}, methods: srpo is 'x': expected a whole number"),
        (
            "methods: {srpo: {method: veto}}",
            "method in {recipe}, methods: srpo would replace the method that the options are for",
        ),
        (
            "methods: {srpo: {method_settings: {group_siz: 2}}}",
            "methods in {recipe}: method_settings: 'srpo' has no setting 'group_siz'; did you mean 'group_size'?",
        ),
        (
            "methods: {calm.py:Calm: {method_settings: {patiense: 2}}}",
            "methods in {recipe}: method_settings: 'calm.py:Calm' has no setting 'patiense'; did you mean 'patience'?",
        ),
    ],
)
def test_all_of_a_recipe_is_checked_also_what_is_for_other_methods(text, complaint, toy, own_method):
    recipe = toy.parent / "toy.yaml"
    recipe.write_text(text)
    with pytest.raises(ValueError) as caught:
        make_plan(str(toy), only=["fire"])
    assert complaint.format(recipe=recipe) in str(caught.value) and str(toy) in str(caught.value)


OWN_METHOD = """from dataclasses import dataclass

from firedistill.objectives import setting
from firedistill.objectives.full_context import FullContext


@dataclass
class Calm(FullContext):
    patience: float = setting(1.0, "How calm.")
"""


@pytest.fixture
def own_method(toy, monkeypatch):
    """A method in a file in the working folder."""
    monkeypatch.chdir(toy.parent)
    (toy.parent / "calm.py").write_text(OWN_METHOD)


def test_a_method_of_ones_own_is_planned_with_its_settings(toy, own_method):
    recipe = toy.parent / "toy.yaml"
    recipe.write_text(recipe.read_text() + "methods: {calm.py:Calm: {method_settings: {patience: 2}}}\n")
    for name in ("calm.py:Calm", "./calm.py:Calm"):
        toy.write_text(f"blocks: [{{recipes: [toy.yaml], methods: ['{name}']}}]")
        (run,) = make_plan(str(toy)).runs
        assert (run.id, run.method) == ("toy-calm.py-Calm-seed0", name)
    toy.write_text("blocks: [{recipes: [toy.yaml], methods: [calm.py:Calm], settings: {method_settings: {patiense: 2}}}]")
    with pytest.raises(ValueError, match="'calm.py:Calm' has no setting 'patiense'; did you mean 'patience'"):
        make_plan(str(toy))


def test_a_token_reaches_neither_files_nor_command_lines(toy, tmp_path, capsys):
    assert cli.main(["suite", str(toy), "-o", str(tmp_path / "s"), "--hub_token", "hf_SECRET"]) == 2
    told = capsys.readouterr()
    assert "hub_token must not be part of a suite" in told.err and "set HF_TOKEN instead" in told.err
    assert "hf_SECRET" not in told.err + told.out and not (tmp_path / "s").exists()
    assert cli.main(["suite", str(toy), "--dry-run", "--hub-token=hf_SECRET"]) == 2
    toy.parent.joinpath("toy.yaml").write_text(RECIPE.format(model="somewhere") + "hub_token: [hf_SECRET]\n")
    assert cli.main(["suite", str(toy), "--dry-run"]) == 2
    told = capsys.readouterr()
    assert "hub_token in " in told.err and "hf_SECRET" not in told.err + told.out


NO_PLANS = [
    "", "{", "[]", "null", "{}", '{"runs": 3}', '{"suite": "s", "title": "t", "options": {}, "runs": [3]}', "[" * 100_000,
    *(
        json.dumps({"suite": "s", "title": "t", "options": {}, "runs": [run | change]})
        for run in [dict(id="a", command="train", recipe="x", settings={}, model="m", task="t", method="fire", seed=0,
                         learning_rate=1.0, max_steps=3)]
        for change in [{"id": "../a"}, {"id": ""}, {"id": "a/b"}, {"id": 3.5}, {"seed": "x"}, {"learning_rate": None}, {"steps": 1},
                       {"max_steps": 0}, {"command": "rm"}, {"needs": "b"}, {"settings": []}, {"settings": {"hub_token": "hf_X"}}]
    ),
]  # fmt: skip


@pytest.mark.parametrize("text", NO_PLANS)
def test_no_plan_is_refused_in_words(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    if '"id": 3.5' in text:
        assert read_plan(tmp_path / "plan.json").runs[0].id == "3.5"
        return
    with pytest.raises(ValueError, match=r"plan.json is not the plan of a suite: .+"):
        read_plan(tmp_path / "plan.json")


def test_every_built_in_suite_can_be_read():
    studies = [f"study-{name}" for name in ("asdiv", "controls", "noise", "parts", "rates", "steps", "tropd")]
    assert built_in == ["ablation", "lab", "lab-rates", "lr-sweep", *studies, "table-14b", "table1", "table1-subsets"]
    assert all(read_suite(name)[1]["title"] for name in built_in)


def test_a_suite_and_a_run_keep_out_of_each_others_folders(toy, tmp_path, capsys):
    suite = SuiteFolder(tmp_path / "suite")
    suite.widen(make_plan(str(toy)))
    for more in ([], ["--overwrite"]):
        assert cli.main(["train", "lab", "--output_dir", str(suite.folder), *more]) == 2
        assert f"{suite.folder} holds a suite" in capsys.readouterr().err and suite.plan_path.is_file()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ValueError, match="run holds a run; name another --output_dir"):
        SuiteFolder(tmp_path / "run").widen(make_plan(str(toy)))
    recipe = recipes.read_recipe("lab")
    assert "output_dir" not in recipe, "runs/lab is the suite's"


def test_a_folder_that_cannot_be_made_is_refused_with_its_option(toy, capsys):
    """A dry run makes none, and knows a file."""
    for folder, complaint, dry in (
        (toy, f"{toy} is not a folder; name another --output_dir", True),
        (toy / "s", f"output_dir {toy}/s cannot be made (Not a directory): name another one", False),
        (Path("/proc/x"), "output_dir /proc/x cannot be made (No such file or directory): name another one", False),
    ):
        for more in ([], *([["--dry-run"]] if dry else [])):
            assert cli.main(["suite", str(toy), "-o", str(folder), *more]) == 2
            assert f"firedistill suite: {complaint}" in capsys.readouterr().err


def test_output_dir_decides_between_a_built_in_suite_and_a_folder_of_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    SuiteFolder("lab").widen(make_plan("lab", seeds=[0], only=["fire"]))
    told = ["suite", "lab", "--seeds", "0", "--only", "fire"]
    assert cli.main([*told, "--dry_run", "--output_dir", str(tmp_path / "lab")]) == 0
    assert "nothing was run or written" in capsys.readouterr().out
    assert cli.main(["suite", "./lab", "--output_dir", "elsewhere"]) == 2
    assert "./lab is the folder of a suite, which keeps its place: leave out --output_dir" in capsys.readouterr().err


def test_a_plan_grows_and_never_changes_a_run(toy, tmp_path):
    suite = SuiteFolder(tmp_path / "s")
    suite.widen(make_plan(str(toy), seeds=[0], only=["fire"]))
    plan = suite.widen(make_plan(str(toy)))
    assert len(plan.runs) == 8 and read_plan(suite.plan_path) == plan
    with pytest.raises(ValueError, match=r"plans toy-fire-seed0 with other settings \(max_steps 16 there, 3 now"):
        suite.widen(make_plan(str(toy), options={"max_steps": "3"}))
    other = SuiteFolder(tmp_path / "other")
    other.widen(make_plan(str(toy), seeds=[0], options={"max_steps": "3"}))
    with pytest.raises(ValueError, match="other is planned with max_steps 3, now it is 4: leave it out"):
        other.widen(make_plan(str(toy), seeds=[77], options={"max_steps": "4"}))
    recipe = toy.parent / "toy.yaml"
    recipe.write_text(recipe.read_text() + "top_p: 0.9\nmethods: {veto: {max_steps: 3}}\n")
    with pytest.raises(ValueError, match=rf"plans toy-fire-seed0 with other settings \(its recipe {recipe} was edited\)"):
        suite.widen(make_plan(str(toy)))
    with pytest.raises(ValueError, match=rf"plans {plan.runs[0].id} with other settings \(its recipe"):
        refuse_edited_recipes(plan.runs, suite.folder)
    refuse_edited_recipes([replace(run, recipe_digest="") for run in plan.runs], suite.folder)  # of an earlier version
    recipe.write_text(recipe.read_text().replace("top_p: 0.9\n", ""))  # what is for another method does not matter
    assert suite.widen(make_plan(str(toy))) == plan
    with pytest.raises(ValueError, match="holds suite 'suite', not 'other'"):
        merge(plan, Plan("other", "", {}), tmp_path)
    suite.plan_path.write_text("{")
    with pytest.raises(ValueError, match="is not the plan of a suite"):
        assert suite.plan


# ---- Runs, with a stub instead of training -----------------------------------------------------------------------------------

STUB = """\
import json, os, pathlib, signal, sys, time
folder, steps, behaviour = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour == "clumsy":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
with (folder / "calls").open("a") as file:
    file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "-") + "\\n")
if behaviour in ("sleep", "stubborn", "clumsy"):
    time.sleep(60)
if behaviour == "alone":
    if (folder / "busy").exists():
        (folder / "two").touch()
    (folder / "busy").touch()
    time.sleep(0.3)
    (folder / "busy").unlink()
if behaviour == "helper" and (helper := os.fork()) == 0:
    time.sleep(60)
    sys.exit()
if behaviour == "helper":
    (folder / "helper").write_text(str(helper))
if behaviour in ("fail", "helper"):
    print("Traceback: it broke")
    sys.exit(3)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, steps + 1):
        file.write(json.dumps({"step": step}) + "\\n")
(folder / "evals.jsonl").write_text(json.dumps({"step": steps, "accuracy": 0.5, "n": 4}) + "\\n")
(folder / "adapter").mkdir(exist_ok=True)
(folder / "adapter" / "adapter_config.json").touch()
if behaviour != "half-way":
    (folder / "finished.json").write_text(json.dumps({"step": steps}))
if behaviour == "late":
    os.abort()
"""


def stub(behaviour):
    """A command that leaves what a run leaves; `behaviour` maps the id of a run to what it does."""

    def command_of(suite, run, checkpoint=None):
        return [sys.executable, "-c", STUB, str(suite.run_folder(run)), str(run.max_steps), behaviour.get(run.id, "")]

    return command_of


def work(suite, plan, behaviour=None, runs=None, **options):
    events = []
    runner = Runner(
        suite, plan, runs or plan.runs, command=stub(behaviour or {}), on_event=events.append, pause=0.02, **options
    )
    states = runner.work()
    return {name: state.name for name, state in states.items()}, events


def calls(suite, name):
    path = suite.run_folder(name) / "calls"
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def suite(toy, tmp_path):
    suite = SuiteFolder(tmp_path / "s")
    suite.widen(make_plan(str(toy), seeds=[0]))
    return suite


def test_runs_are_made_once_failed_ones_again_on_request_only(suite):
    plan = suite.plan
    broken = plan.runs[1].id
    states, events = work(suite, plan, {broken: "fail"})
    assert states == {run.id: "failed" if run.id == broken else "done" for run in plan.runs}
    assert any(line.startswith(f"{broken}: failed, exit status 3: Traceback: it broke (log: ") for line in events)
    assert "it broke" in suite.log_path(plan.runs[1]).read_text()
    assert work(suite, plan)[0][broken] == "failed"
    assert all(len(calls(suite, run.id)) == 1 for run in plan.runs)
    assert set(work(suite, plan, retry_failed=True)[0].values()) == {"done"}
    assert {run.id: len(calls(suite, run.id)) for run in plan.runs} == {run.id: 1 + (run.id == broken) for run in plan.runs}
    assert not any(is_locked(path) for path in (suite.folder / "state").glob("*.lock"))
    assert not list((suite.folder / "state").glob(".*")), "no unfinished files"
    state = suite.state(plan.runs[0])
    assert (state.step, state.accuracy) == (16, 0.5)
    assert {"host", "since", "seconds"} <= suite.record(plan.runs[0]).keys(), (
        "from which a report knows which runs shared a host"
    )


def test_a_retry_that_fails_again_is_not_tried_for_ever(suite):
    plan = suite.plan
    behaviour = {run.id: "fail" for run in plan.runs}
    work(suite, plan, behaviour)
    assert set(work(suite, plan, behaviour, retry_failed=True)[0].values()) == {"failed"}
    assert all(len(calls(suite, run.id)) == 2 for run in plan.runs)


def test_a_run_that_was_finished_before_anybody_could_write_it_down_is_done(suite):
    plan = suite.plan
    subprocess.run(stub({})(suite, plan.runs[0]), check=True)
    assert suite.state(plan.runs[0]).name == "done"
    work(suite, plan)
    assert len(calls(suite, plan.runs[0].id)) == 1


def test_a_finished_run_whose_checkpoints_were_deleted_is_left_as_it_is(suite):
    """Also where its state file is gone: its results say that it has ended."""
    plan = suite.plan
    work(suite, plan)
    first, second = plan.runs[:2]
    suite.state_path(second).unlink()
    assert not newest_checkpoint(suite.run_folder(first))
    for again in ({}, {"retry_failed": True}):
        assert set(work(suite, plan, **again)[0].values()) == {"done"}
    assert all(len(calls(suite, run.id)) == 1 for run in plan.runs)
    assert not {"--resume", "--overwrite"} & set(run_arguments(suite, second, None)), "what a dry run prints does no harm"


def test_a_run_is_done_when_it_says_so_and_not_before(suite):
    """`os._exit(0)` in a verifier; a kill between the adapter and the last files, with and without its suite process."""
    plan = suite.plan
    first, second = plan.runs[:2]
    subprocess.run(stub({first.id: "half-way"})(suite, first), check=True)
    assert (suite.run_folder(first) / "adapter" / "adapter_config.json").is_file()
    assert (suite.state(first).name, suite.state(first).step) == ("to do", 16)
    states, events = work(suite, plan, {second.id: "half-way"})
    assert states == {run.id: "failed" if run == second else "done" for run in plan.runs}
    assert any("failed, exit status 0 after step 16 of 16, but the run has not reached its end" in line for line in events)
    for nonsense in ("", "{", "[]", "{}", '{"step": "x"}', '{"step": 15}', "\x00", "[" * 100_000):
        (suite.run_folder(second) / "finished.json").write_text(nonsense)
        assert suite.state(second).name == "failed"
    assert set(work(suite, plan, retry_failed=True)[0].values()) == {"done"}


def test_a_run_that_fails_after_its_end_is_done(suite):
    """A library may crash while the interpreter exits."""
    run = suite.plan.runs[0]
    states, events = work(suite, suite.plan, {run.id: "late"}, runs=[run])
    assert states[run.id] == suite.state(run).name == "done"
    assert json.loads(suite.state_path(run).read_text())["exit_code"] == -signal.SIGABRT
    assert any(line.endswith(f"accuracy 50.0%; killed by signal {signal.SIGABRT:d} after its end") for line in events)
    suite.state_path(run).unlink()
    assert suite.state(run).name == "done"


NO_STATES = [
    "", "{", "[1]", '"running"', "null", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "[" * 100_000,
    '{"state": "running"}', '{"state": "running", "host": "x", "since": 1e308, "from_step": 0, "pid": 2}',
    '{"state": "running", "host": "x", "since": 1, "from_step": 0, "pid": -1}', '{"state": "done", "accuracy": "x"}',
    '{"state": "failed", "seconds": []}', '{"state": ["done"]}', '{"state": "done", "steps": 1e999}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_STATES)
def test_a_damaged_state_file_is_no_state(text, suite):
    run = suite.plan.runs[0]
    suite.state_path(run).write_text(text)
    assert suite.states(suite.plan)[run.id] == RunState("to do")
    assert work(suite, suite.plan, runs=[run])[0][run.id] == "done"


def test_a_run_that_was_started_but_not_written_down_is_not_started_again(suite):
    """The suite process was killed in between; the run's process has the lock."""
    run, *others = suite.plan.runs
    trainer = sleeper(suite.state_path(run, "trainer.lock"))
    assert (suite.state(run).name, suite.state(run).note) == ("running", "starting")
    states, _ = work(suite, suite.plan)
    assert states == {run.id: "running"} | {other.id: "done" for other in others} and not calls(suite, run.id)
    trainer.kill()
    trainer.wait()
    assert work(suite, suite.plan)[0][run.id] == "done"


def test_a_full_disk_stops_no_run_that_is_active(suite, monkeypatch):
    plan = suite.plan

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(running, "write_json", full)
    states, events = work(suite, plan)
    assert set(states.values()) == {"done"} and not list((suite.folder / "state").glob("*.json"))
    told = [line for line in events if "its state cannot be written ([Errno 28] No space left on device)" in line]
    assert len(told) == len(plan.runs), "once for each run"


@pytest.mark.parametrize(
    "block, free, reason",
    [
        (Path.mkdir, Path.rmdir, "[Errno 21] Is a directory"),
        pytest.param(
            lambda path: path.symlink_to("/dev/full"),
            Path.unlink,
            "[Errno 28] No space left on device",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, whose writes fail"),
        ),
    ],
    ids=["folder", "full disk"],
)
def test_a_run_whose_log_cannot_be_written_is_not_started_and_the_others_are(suite, capsys, monkeypatch, block, free, reason):
    blocked = suite.plan.runs[1]
    path = suite.log_path(blocked)
    block(path)
    monkeypatch.setattr(command, "Runner", functools.partial(Runner, command=stub({}), pause=0.02))
    assert cli.main(["suite", str(suite.folder)]) == 1
    out = capsys.readouterr().out
    assert f"{blocked.id}: not started ({reason}: '{path}'); the same command tries again" in out and "3 done, 1 to do" in out
    assert f"not executed: {blocked.id}; the same command continues the suite" in out
    free(path)
    assert cli.main(["suite", str(suite.folder)]) == 0


def test_locks_that_cannot_be_written_leave_active_runs_alone(suite, monkeypatch):
    first, *_ = plan_runs = suite.plan.runs

    def no_more(path):
        if first.id in path.name:
            return lock(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(running, "lock", no_more)
    events = []
    with pytest.raises(OSError, match="No space left"):
        Runner(suite, suite.plan, plan_runs, [{}, {}], command=stub({}), on_event=events.append, pause=0.02).work()
    assert suite.state(first).name == "done" and sum("waiting for the runs that are active" in line for line in events) == 1


def test_runs_are_spread_over_the_gpus(suite):
    plan = suite.plan
    work(suite, plan, slots=[{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}])
    used = [calls(suite, run.id)[0] for run in plan.runs]
    assert used[:2] == ["4", "7"] and set(used) == {"4", "7"}


def test_a_killed_suite_is_continued_and_its_run_waited_for(suite):
    """The suite process is killed, the run's is not: the run is neither lost nor executed twice at the same time."""
    plan = suite.plan
    slow = plan.runs[0]
    process = forked(work, suite, plan, {slow.id: "sleep"})
    wait_for(lambda: calls(suite, slow.id) and suite.record(slow).get("pid"))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    child = suite.record(slow)["pid"]
    assert suite.state(slow).name == "running", "its own process is alive"
    events, ended = [], []

    def end_it(states):
        if not ended and any("still running, process " in line for line in events):
            assert states[slow.id].name == "running"
            assert lock(suite.state_path(slow, "lock")) is None, "a third suite process leaves it alone"
            os.kill(child, signal.SIGKILL)
            ended.append(child)

    runner = Runner(suite, plan, plan.runs, command=stub({}), on_event=events.append, on_poll=end_it, pause=0.02)
    states = runner.work()
    assert {state.name for state in states.values()} == {"done"} and len(calls(suite, slow.id)) == 2
    assert all(len(calls(suite, run.id)) == 1 for run in plan.runs[1:])


def test_a_run_that_survived_its_suite_keeps_its_gpu(suite):
    plan, gpus = suite.plan, [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]
    slow, others = plan.runs[1], [run for run in plan.runs if run is not plan.runs[1]]
    process = forked(functools.partial(work, slots=gpus), suite, plan, {slow.id: "sleep"}, [plan.runs[0], slow])
    wait_for(lambda: calls(suite, slow.id) and suite.record(slow).get("pid"))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    child = suite.record(slow)["pid"]

    def end_it(states):
        if all(states[run.id].name == "done" for run in others) and states[slow.id].name == "running":
            os.kill(child, signal.SIGKILL)

    Runner(suite, plan, plan.runs, command=stub({}), slots=gpus, on_event=print, on_poll=end_it, pause=0.02).work()
    assert calls(suite, slow.id)[0] == "7" and {gpu for run in others for gpu in calls(suite, run.id)} == {"4"}


def test_a_run_that_was_asked_to_stop_has_not_failed(suite):
    plan = suite.plan

    def stopped(suite, run, checkpoint):
        return [sys.executable, "-c", "import sys; sys.exit(143)"] if run == plan.runs[0] else stub({})(suite, run)

    events = []
    states = Runner(suite, plan, plan.runs, command=stopped, on_event=events.append, pause=0.02).work()
    assert [state.name for state in states.values()] == ["to do", "done", "done", "done"]
    assert any("stopped after step 0; to be continued" in line for line in events)


@pytest.mark.parametrize("behaviour", ["sleep", "clumsy"])
def test_sigterm_stops_the_runs_and_leaves_them_to_do(behaviour, suite):
    plan = suite.plan
    process = forked(quietly, suite, plan, {plan.runs[0].id: behaviour})
    wait_for(lambda: calls(suite, plan.runs[0].id) and suite.record(plan.runs[0]).get("pid"))
    child = suite.record(plan.runs[0])["pid"]
    process.terminate()
    process.join(10)
    assert process.exitcode == 0 and not exists(child)
    assert suite.state(plan.runs[0]).name == "to do"
    assert not any(is_locked(path) for path in (suite.folder / "state").glob("*.lock"))


def test_a_second_signal_kills_the_runs_that_do_not_stop(suite):
    plan = suite.plan
    process = forked(quietly, suite, plan, {plan.runs[0].id: "stubborn"})
    wait_for(lambda: calls(suite, plan.runs[0].id) and suite.record(plan.runs[0]).get("pid"))
    child = suite.record(plan.runs[0])["pid"]
    process.terminate()
    process.join(1.5)
    assert process.exitcode is None and exists(child), "it has a minute"
    process.terminate()
    process.join(10)
    assert process.exitcode == 0
    assert wait_for(lambda: not exists(child))
    assert suite.state(plan.runs[0]).name == "to do"


def test_repeated_and_different_signals_stop_the_runs_once(suite, monkeypatch):
    runner, now = Runner(suite, suite.plan, suite.plan.runs), [5.0]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in REQUESTS}  # the tests may run under nohup
    try:
        for last in (signal.SIGINT, signal.SIGTERM):
            with runner.counted_signals(), monkeypatch.context() as patched:
                patched.setattr(running.time, "monotonic", lambda: now[0])
                for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGXCPU):
                    os.kill(os.getpid(), number)
                assert runner.stops == 1
                now[0] += 1.5 if last == signal.SIGTERM else 0
                os.kill(os.getpid(), last)
                assert runner.stops == 2
            runner.stops = 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_end_of_the_terminal_stops_a_suite_unless_it_runs_under_nohup(suite):
    plan = suite.plan
    slow = plan.runs[0]
    process = forked(in_a_terminal, suite, plan, {slow.id: "sleep"})
    wait_for(lambda: calls(suite, slow.id) and suite.record(slow).get("pid"))
    os.kill(process.pid, signal.SIGHUP)
    process.join(10)
    assert process.exitcode == 0 and suite.state(slow).name == "to do"
    process = forked(under_nohup, suite, plan, {slow.id: "sleep"})
    wait_for(lambda: len(calls(suite, slow.id)) == 2)
    os.kill(process.pid, signal.SIGHUP)
    process.join(0.5)
    assert process.exitcode is None and suite.state(slow).name == "running"
    process.terminate()
    process.join(10)
    assert process.exitcode == 0


def quietly(*arguments):
    try:
        work(*arguments)
    except KeyboardInterrupt:
        return


def in_a_terminal(*arguments):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    quietly(*arguments)


def under_nohup(*arguments):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    quietly(*arguments)


def forked(target, *arguments):
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc").is_dir() else True


def test_two_processes_never_take_the_same_run(suite):
    plan = suite.plan
    processes = [forked(work, suite, plan) for _ in range(4)]
    [process.join(20) for process in processes]
    assert all(process.exitcode == 0 for process in processes)
    assert all(len(calls(suite, run.id)) == 1 for run in plan.runs)


def test_a_run_directory_never_has_two_trainers_whatever_is_killed(suite):
    """Suite processes are killed at random moments while their runs continue. A stub reports if it finds another one active."""
    plan = suite.plan
    behaviour = {run.id: "alone" for run in plan.runs}
    chance = random.Random(0)
    processes = []
    for _ in range(15):
        processes = [process for process in processes if process.is_alive()]
        processes += [forked(work, suite, plan, behaviour) for _ in range(3 - len(processes))]
        time.sleep(chance.uniform(0, 0.2))
        victim = chance.choice(processes)
        victim.kill()
        victim.join()
    states, _ = work(suite, plan, behaviour)
    [process.join(20) for process in processes]
    assert {suite.state(run).name for run in plan.runs} == {"done"} and set(states.values()) <= {"done", "running"}
    assert not list(suite.folder.glob("runs/*/two"))


def sleeper(path):
    """A process that has inherited a lock."""
    with lock(path) as file:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[file.fileno()])


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_locks_of_the_living_hold_and_those_of_the_dead_do_not(where, suite):
    plan = suite.plan
    run = plan.runs[0]
    trainer = sleeper(suite.state_path(run, "trainer.lock"))
    host = HOST if where == "here" else "another"
    record = {"state": "running", "host": host, "pid": trainer.pid, "since": time.time(), "from_step": 0}
    suite.state_path(run).write_text(json.dumps(record))
    assert suite.state(run).name == "running" and suite.state(run).note == f"process {trainer.pid} on {host}"
    os.utime(suite.state_path(run), (time.time() - 1e4,) * 2)
    assert suite.state(run).name == "running", "the lock of a trainer counts without a heartbeat, on any host"
    with lock(suite.state_path(run, "lock")):
        assert work(suite, plan, runs=[run])[0][run.id] == "running", "a suite process has it"
    trainer.kill()
    assert wait_for(lambda: suite.state(run).name == "to do"), "dead, but not waited for"
    suite.state_path(run).touch()
    if where == "elsewhere":
        states, _ = work(suite, plan)
        assert list(states.values()) == ["running", "done", "done", "done"], "its file system may not share locks"
        os.utime(suite.state_path(run), (time.time() - 1e4,) * 2)
    assert work(suite, plan)[0][run.id] == "done" and len(calls(suite, run.id)) == 1
    trainer.wait()


def test_a_run_that_another_process_starts_is_running(suite):
    run = suite.plan.runs[0]
    with lock(suite.state_path(run, "lock")):
        assert suite.state(run).name == "running" and suite.state(run).note == "starting"
        assert suite.state(run, managed=True).name == "to do"
    assert suite.state(run).name == "to do"


def test_locks_that_the_file_system_refuses(tmp_path, monkeypatch):
    def flock(file, kind):
        raise error

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", flock)
    error = PermissionError("how some network file systems report a lock that is held")
    assert lock(tmp_path / "lock") is None and is_locked(tmp_path / "lock")
    error = OSError("No locks available")
    assert not is_locked(tmp_path / "lock")
    with pytest.raises(OSError, match=r"lock cannot be locked \(No locks available\); the file system must support flock"):
        lock(tmp_path / "lock")


def test_helper_processes_that_outlive_a_run_do_not_block_it(suite):
    plan = suite.plan
    run = plan.runs[0]
    states, _ = work(suite, plan, {run.id: "helper"}, runs=[run])
    helper = int((suite.run_folder(run) / "helper").read_text())
    assert states[run.id] == "failed" and exists(helper)
    assert work(suite, plan, runs=[run], retry_failed=True)[0][run.id] == "done" and exists(helper)
    os.kill(helper, signal.SIGKILL)


def test_heartbeats(suite, monkeypatch):
    monkeypatch.setattr(running, "HEARTBEAT", 0.05)
    plan = suite.plan
    run = plan.runs[0]
    process = forked(quietly, suite, plan, {run.id: "sleep"})
    wait_for(lambda: suite.record(run))
    os.utime(suite.state_path(run), (1, 1))
    wait_for(lambda: suite.record(run)["heartbeat"] > 1)
    process.terminate()
    process.join(10)


def test_state_files_of_earlier_versions_are_read(suite):
    done, failed, stopped, _ = suite.plan.runs
    took = {"exit_code": 0, "seconds": 32.0, "steps": 16, "ended": "2025-01-01 00:00:00", "accuracy": 0.5}
    suite.state_path(done).write_text(json.dumps({"state": "done"} | took))
    suite.state_path(failed).write_text(json.dumps({"state": "failed", "error": "exit status 3"} | took | {"accuracy": None}))
    suite.state_path(stopped, "lock").write_text(json.dumps({"pid": os.getpid(), "pid_started": "1", "host": HOST}))
    assert suite.state(done) == RunState("done", 16, 0.5, 32.0, 16)
    assert (suite.state(failed).name, suite.state(failed).note) == ("failed", "exit status 3")
    assert suite.state(stopped).name == "to do"


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


# ---- Warm starts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def warm(toy):
    (toy.parent / "first.yaml").write_text(RECIPE.format(model="somewhere") + "feedback_share: 0.5\n")
    toy.write_text("blocks: [{recipes: [toy.yaml], methods: [fire, veto], seeds: [0], warmstart: first.yaml}]")
    suite = SuiteFolder(toy.parent / "w")
    suite.widen(make_plan(str(toy), options={"data_dir": str(toy.parent), "max_steps": "5"}))
    return suite


def test_a_shared_warm_start_is_run_once_and_first(warm):
    plan = warm.plan
    first, *others = plan.runs
    assert (first.id, first.command, first.settings) == ("warmstart-first", "warmstart", {"data_dir": str(warm.folder.parent)})
    assert first.max_steps == 16, "the runs' own length is not the warm start's"
    assert [run.needs for run in others] == [first.id] * 2
    assert f"--initial_adapter={warm.run_folder(first).resolve()}/adapter" in run_arguments(warm, others[0], None)
    assert run_arguments(warm, first, None)[0] == "warmstart"
    assert warm.states(plan)[others[0].id].name == "waiting"
    assert set(work(warm, plan, slots=[{}, {}, {}])[0].values()) == {"done"}
    assert [len(calls(warm, run.id)) for run in plan.runs] == [1, 1, 1]


def test_runs_without_their_warm_start_do_not_start(warm):
    plan = warm.plan
    states, _ = work(warm, plan, {"warmstart-first": "fail"})
    assert list(states.values()) == ["failed", "waiting", "waiting"]
    assert warm.states(plan)[plan.runs[1].id].note == "warmstart-first failed"
    part = share(plan.runs, 1, 2)
    assert [run.id for run in part] == ["warmstart-first", "toy-veto-seed0"]


def test_a_run_waits_for_a_warm_start_that_another_process_runs(warm):
    plan = warm.plan
    with lock(warm.state_path(plan.runs[0], "lock")) as file:
        process = forked(work, warm, plan)
        process.join(0.5)
        assert process.exitcode is None and not any(calls(warm, run.id) for run in plan.runs)
        fcntl.flock(file, fcntl.LOCK_UN)  # closing the file is not enough, as the fork has it, too
    process.join(20)
    assert [len(calls(warm, run.id)) for run in plan.runs] == [1, 1, 1]


# ---- Shares, estimates, commands -----------------------------------------------------------------------------------------------


def test_the_parts_of_an_array_cover_the_runs_once(toy):
    runs = make_plan(str(toy)).runs
    parts = [share(runs, index, 3) for index in range(3)]
    assert sorted(run.id for part in parts for run in part) == sorted(run.id for run in runs)
    with pytest.raises(ValueError, match="--index is 3 --of 3; expected 0 to 2"):
        share(runs, 3, 3)


def test_slurm_arrays():
    assert array_part({}) is None
    assert array_part({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}) == (3, 8)
    shifted = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_STEP": "2"}
    assert array_part(shifted | {"SLURM_ARRAY_TASK_COUNT": "4"}) == (2, 4)
    with pytest.raises(ValueError, match="say --index I --of N"):
        array_part({"SLURM_ARRAY_TASK_ID": "3"})


def test_the_time_left(toy):
    plan = make_plan(str(toy), seeds=[0])  # fire, full_context, fire at two other rates; 16 steps each
    fire, full, half, double = (run.id for run in plan.runs)
    states = {run.id: RunState("to do") for run in plan.runs}
    assert seconds_left(plan, states) is None and summary(plan, states) == "4 to do; time left not known yet"
    states[fire] = RunState("done", 16, seconds=32.0, steps=16)
    assert seconds_left(plan, states) == 2.0 * 48, "full_context has not been timed, its recipe has"
    states[full] = RunState("running", 6, seconds=24.0, steps=6)
    assert seconds_left(plan, states) == 4.0 * 10 + 2.0 * 32
    states[half] = RunState("failed", 3)
    states[double] = RunState("running", 8)
    assert seconds_left(plan, states) == (4.0 * 10 + 2.0 * 8) / 2, "two are running"
    assert summary(plan, states) == "1 done, 2 running, 1 failed; about 28 s left"
    done = {run.id: RunState("done", 16) for run in plan.runs}
    assert seconds_left(plan, done) == 0 and summary(plan, done) == "4 done"


def test_durations():
    assert [duration(s) for s in (5, 99.4, 100, 3540, 7500, 200_000)] == [
        "5 s",
        "99 s",
        "2 min",
        "59 min",
        "2 h 05 min",
        "2 d 7 h",
    ]


def test_a_dry_run_writes_nothing_and_shows_every_command(toy, capsys, monkeypatch):
    monkeypatch.chdir(toy.parent)
    before = sorted(toy.parent.rglob("*"))
    assert cli.main(["suite", "suite.yaml", "--dry-run", "--seeds", "0,5", "--only", "full_context", "--max-steps", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("to do    firedistill train ") == 2 and "--seed=5" in out and "--max_steps=4" in out
    assert "2 runs, 8 optimizer steps; nothing was run or written" in out and sorted(toy.parent.rglob("*")) == before


def test_the_command_says_what_happens_and_what_failed(toy, tmp_path, capsys, monkeypatch):
    behaviour = {"toy-fire-seed0": "fail"}
    monkeypatch.setattr(command, "Runner", functools.partial(Runner, command=stub(behaviour), pause=0.02))
    call = ["suite", str(toy), "-o", str(tmp_path / "s"), "--seeds", "0", "--only", "fire", "full_context", "--max_steps", "5"]
    assert cli.main(call) == 1
    out = capsys.readouterr().out
    assert "4 runs in " in out and "toy-fire-seed0: failed, exit status 3: Traceback: it broke" in out and "\x1b" not in out
    assert out.partition("it broke")[2].splitlines()[1] == "  1 failed, 3 to do; time left not known yet"
    assert "3 done, 1 failed\n" in out and "failed: toy-fire-seed0; --retry-failed runs them again" in out
    behaviour.clear()
    assert cli.main(call[:-2]) == 1, "the options for all runs are kept, the failed run is not repeated"
    assert cli.main(["suite", str(tmp_path / "s"), "--retry-failed"]) == 0
    assert "4 done\n" in capsys.readouterr().out
    assert cli.main([*call[:-1], "6"]) == 2
    assert "plans toy-fire-seed0 with other settings (max_steps 5 there, 6 now" in capsys.readouterr().err
    assert cli.main([*call[:-2], "--top_p", "0.9"]) == 2
    assert "toy-fire-seed0 with other settings (top_p None there, 0.9 now)" in capsys.readouterr().err
    assert cli.main(["suite", str(toy), "-o", str(tmp_path / "s"), "--seeds", "7", "--top_p", "0.9", "--dry-run"]) == 0
    assert "--max_steps=5 --top_p=0.9 " in capsys.readouterr().out, "an option is added to those that are stored"
    recipe = toy.parent / "toy.yaml"
    recipe.write_text(recipe.read_text() + "top_p: 0.9\n")
    assert cli.main(["suite", str(tmp_path / "s")]) == 0, "nothing is to do"
    (tmp_path / "s" / "state" / "toy-fire-seed0.json").unlink()
    (tmp_path / "s" / "runs" / "toy-fire-seed0" / "finished.json").unlink()
    assert cli.main(["suite", str(tmp_path / "s")]) == 2
    assert f"plans toy-fire-seed0 with other settings (its recipe {recipe} was edited)" in capsys.readouterr().err
    assert cli.main(["suite", str(tmp_path / "s"), "--status"]) == 0
    assert cli.main(["suite", str(tmp_path / "s"), "--seeds", "8"]) == 2
    assert "plans no run with these seeds and methods" in capsys.readouterr().err


@pytest.mark.parametrize("by_name", [True, False])
def test_status_shows_the_chosen_runs(by_name, toy, tmp_path, capsys):
    suite = SuiteFolder(tmp_path / "s")
    plan = suite.widen(make_plan(str(toy)))
    call = ["suite", *([str(toy), "-o", str(suite.folder)] if by_name else [str(suite.folder)]), "--status"]
    for options, shown in (
        ([], plan.runs),
        (["--only", "fire"], [run for run in plan.runs if run.method == "fire"]),
        (["--seeds", "0"], [run for run in plan.runs if run.seed == 0]),
    ):
        assert cli.main([*call, *options]) == 0
        out = capsys.readouterr().out
        assert [run.id for run in plan.runs if f" {run.id} " in out] == [run.id for run in shown]
        assert f"{len(shown)} to do" in out
    for options, complaint in (
        (["--max_steps", "7"], f"--max_steps would change the runs of {suite.folder}, which are already planned: leave it out"),
        (["--seeds", "99"], "plans no run with these seeds and methods"),
    ):
        assert cli.main([*call, *options]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{toy}", "--seeds", "x"], "--seeds: expected whole numbers, such as 0 or 0,1,2, got 'x'"),
        ([], "name a suite: one of ablation, lab"),
        (["nix"], "no suite 'nix'"),
        (["{toy}", "--only", "fires"], "--only names 'fires'; "),
        (["{toy}", "--index", "1"], "--index and --of must be given together"),
        (["{toy}", "--jobs", "0"], "--jobs is 0; expected 1 or more"),
        (["{toy}", "--seeds", ","], "--seeds: expected values separated by commas, got ','"),
        (["{toy}", "--only", ","], "--only: expected values separated by commas, got ','"),
        (["{toy}", "--index", "0", "--of", "0"], "--of is 0; expected 1 or more"),
        (["{toy}", "--index", "2", "--of", "2"], "--index is 2 --of 2; expected 0 to 1"),
        (["{toy}", "--status", "--jobs", "2"], "--jobs has no effect on --status: leave it out"),
        (["{toy}", "--status", "--dry-run"], "--dry-run/--dry_run: not allowed with argument --status"),
        (["{toy}", "--seed", "1"], "--seed differs between the runs of a suite; use --only, --seeds, -o"),
        (["{toy}", "--resume_from_checkpoint", "x"], "--resume_from_checkpoint differs between the runs of a suite"),
        (["{toy}", "--status", "-o", "{toy}-none"], "is not a suite: it has no plan.json"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, complaint, toy, capsys):
    assert cli.main(["suite", *(a.format(toy=toy) for a in arguments)]) == 2
    assert complaint in capsys.readouterr().err


# ---- The real thing ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_run_killed_on_the_way_ends_like_one_that_was_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")  # a custom task is found here, and no other module
    shutil.copy(TESTS / "tiny.py", "tiny.py")
    Path("yaml.py").write_text("raise RuntimeError('not the library')")
    (tmp_path / "toy.yaml").write_text(RECIPE.format(model=save_checkpoint(tmp_path / "base")))
    (tmp_path / "suite.yaml").write_text("blocks: [{recipes: [toy.yaml], methods: [fire]}]")
    folder = tmp_path / "s"
    suite = SuiteFolder(folder)
    plan = suite.widen(make_plan(str(tmp_path / "suite.yaml")))
    (run,) = plan.runs
    assert run_command(suite, run, None) == [sys.executable, "-P", "-m", "firedistill", *run_arguments(suite, run, None)]
    process = forked(Runner(suite, plan, plan.runs).work)
    metrics = suite.run_folder(run) / "metrics.jsonl"
    wait_for(lambda: len(read_jsonl(metrics)) >= 4, seconds=180)
    child = suite.record(run)["pid"]
    os.kill(process.pid, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    process.join()
    assert wait_for(lambda: suite.state(run).name == "to do")
    at, checkpoint = len(read_jsonl(metrics)), newest_checkpoint(suite.run_folder(run))
    assert 4 <= at < 16 and checkpoint is not None
    capsys.readouterr()
    assert cli.main(["suite", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{run.id}: continued after step {step_of(checkpoint)}" in out and f"{run.id}: done in " in out and "1 done" in out
    assert "--resume" in suite.log_path(run).read_text()
    assert cli.main(["suite", str(tmp_path / "suite.yaml"), "-o", str(folder), "--status"]) == 0
    assert "1 done" in capsys.readouterr().out
    assert cli.main(["train", run.recipe, "--method", "fire", "--seed", "0", "--output_dir", str(tmp_path / "whole")]) == 0
    for name in ("metrics.jsonl", "evals.jsonl"):
        found, expected = read_jsonl(suite.run_folder(run) / name), read_jsonl(tmp_path / "whole" / name)
        assert [row["step"] for row in found] == [row["step"] for row in expected]
        for a, b in zip(found, expected, strict=True):
            same = {k: v for k, v in b.items() if "seconds" not in k}
            assert {k: a[k] for k in same} == pytest.approx(same, rel=1e-4, abs=1e-6, nan_ok=True)
