"""The run directory: rows that survive a kill, valid JSON, rollout files that form one table, and figures made from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from huggingface_hub import ModelCard

from firedistill import Example, FeedbackField, Verdict
from firedistill.evaluation import answer_examples, summarize
from firedistill.prompts import PromptEncoder, TokenBudget
from firedistill.report.curves import plot_runs
from firedistill.report.read import running_mean
from firedistill.rollout import Response, Rollout, Sampling
from firedistill.run import log as run_log
from firedistill.run.card import model_card
from firedistill.run.log import RunLog, json_line, read_jsonl, rollout_row
from tiny import ToyTask, byte_tokenizer

PNG = b"\x89PNG\r\n\x1a\n"


def rollout(text: str = "abc", submitted: str | None = None, feedback: tuple = (), category: str | None = None) -> Rollout:
    verdict = Verdict(submitted == "4", submitted, "4", well_formed=submitted is not None, lenient_correct=submitted == "4")
    example = Example("toy/train/0", "2 + 2?", "4", category=category)
    return Rollout(example, [5, 6], Response([7] * len(text), text, True), verdict, feedback)


# ---- Rows ------------------------------------------------------------------------------------------------------------------


def test_lenient_and_truncated_answers_are_told_from_others():
    right, lenient = rollout("ab", "4"), rollout("abc")
    verdict, response = replace(lenient.verdict, lenient_correct=True), replace(lenient.response, finished=False)
    lenient = replace(lenient, verdict=verdict, response=response)
    summary = summarize([right, lenient, rollout("a"), rollout("a")])
    assert (summary["accuracy"], summary["lenient_accuracy"], summary["truncated_rate"]) == (0.25, 0.5, 0.25)
    row = rollout_row(lenient, 1, "p", False)
    assert (row["correct"], row["lenient_correct"], row["finished"], row["trained"]) == (False, True, False, False)


def test_every_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = RunLog(tmp_path / "deep" / "run")
    for step in (1, 2):
        log.metrics({"step": step, "loss": 0.5})
        assert [row["step"] for row in read_jsonl(tmp_path / "deep" / "run" / "metrics.jsonl")] == list(range(1, step + 1))
    log.evaluation({"step": 0, "accuracy": 1.0})
    assert (tmp_path / "deep" / "run" / "evals.jsonl").read_text() == '{"step": 0, "accuracy": 1.0}\n'


def test_a_last_line_cut_off_by_a_kill_is_left_out_and_gone_after_resumption(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.metrics({"step": step, "loss": 0.25})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        (tmp_path / "metrics.jsonl").write_bytes(whole[: -cut - 1])
        assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    log.start(2)
    log.metrics({"step": 3, "loss": 0.75})
    assert [row["loss"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0.25, 0.25, 0.75]


def test_no_file_is_no_rows(tmp_path):
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_start_drops_only_what_will_be_written_again(tmp_path):
    log = RunLog(tmp_path)
    for step in range(1, 6):
        log.metrics({"step": step})
        log.rollouts(step, [rollout_row(rollout(), step, "p", True)])
    for step in (0, 2, 4):
        log.evaluation({"step": step})
        log.rollouts(step, [rollout_row(rollout(), step, "p", False)], prefix="eval")
    own = ["mine_2024.parquet", "notes.parquet", "table_1b.parquet"]
    for name in own:
        (tmp_path / "rollouts" / name).write_text("the user's own")
    log.start(3)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read_jsonl(tmp_path / "evals.jsonl")] == [0, 2]
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    steps = [f"step_{step:06d}.parquet" for step in (1, 2, 3)]
    assert left == sorted(["eval_000000.parquet", "eval_000002.parquet", *own, *steps])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evals.jsonl", "metrics.jsonl", "rollouts"]
    log.start(0)
    assert read_jsonl(tmp_path / "metrics.jsonl") == read_jsonl(tmp_path / "evals.jsonl") == []
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == own


def test_undefined_values_are_null_on_disk_and_nan_when_read(tmp_path):
    log = RunLog(tmp_path)
    log.metrics({"step": 1, "grad_norm": math.inf, "loss": math.nan, "beta": 0.5})
    line = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(line, parse_constant=refuse) == {"step": 1, "grad_norm": None, "loss": None, "beta": 0.5}
    log.start(1)  # rewritten rows stay valid
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert math.isnan(row["grad_norm"]) and math.isnan(row["loss"]) and row["beta"] == 0.5
    assert (tmp_path / "metrics.jsonl").read_text() == line


def test_rows_with_nan_are_read_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert math.isnan(read_jsonl(tmp_path / "metrics.jsonl")[0]["loss"])


@pytest.mark.parametrize("text", ["a\u2028b\u2029c\x85d", "line\nbreak\r\n", "\x1b[31m", "naïve 😀 漢字"])
def test_any_text_stays_on_one_line(text, tmp_path):
    RunLog(tmp_path).metrics({"step": 1, "name": text})
    assert json_line({"name": text}).count("\n") == 1
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "name": text}]


# ---- Rollouts --------------------------------------------------------------------------------------------------------------


def test_the_rollout_files_of_a_run_are_one_table(tmp_path):
    log = RunLog(tmp_path)
    field = FeedbackField("outcome", "wrong\u2028 [bold]")
    log.rollouts(
        1, [rollout_row(rollout("x\u2028y"), 1, "prompt", True)]
    )  # no answer, no feedback: nothing to infer types from
    log.rollouts(2, [rollout_row(rollout("4", "4", (field,)), 2, "prompt", False)])
    log.rollouts(3, [])
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    first, second = pq.read_table(tmp_path / "rollouts").sort_by("step").to_pylist()
    assert first == {
        "step": 1,
        "uid": "toy/train/0",
        "prompt": "prompt",
        "response": "x\u2028y",
        "expected": "4",
        "submitted": None,
        "correct": False,
        "lenient_correct": False,
        "well_formed": False,
        "finished": True,
        "response_tokens": 3,
        "prefix_tokens": 0,
        "draft_tokens": 0,
        "trained": True,
        "feedback": [],
    }
    assert second["submitted"] == "4" and second["feedback"] == [{"name": "outcome", "text": "wrong\u2028 [bold]"}]


def rows_by_file(folder) -> dict[str, list[int]]:
    """The steps in each rollout file."""
    paths = sorted((folder / "rollouts").iterdir())
    return {path.name: [row["step"] for row in pq.read_table(path, partitioning=None).to_pylist()] for path in paths}


def filled(folder, steps) -> RunLog:
    """A log with two rollouts in each of the steps."""
    log = RunLog(folder)
    for step in steps:
        log.rollouts(step, [rollout_row(rollout(str(step)), step, "prompt", True)] * 2)
    return log


def test_a_hundred_steps_share_a_file(tmp_path):
    filled(tmp_path, range(1, 203)).rollouts(50, [rollout_row(rollout(), 50, "p", False)], prefix="eval")
    assert rows_by_file(tmp_path) == {
        "eval_000050.parquet": [50],
        "step_000001-000100.parquet": sorted([*range(1, 101)] * 2),
        "step_000101-000200.parquet": sorted([*range(101, 201)] * 2),
        "step_000201.parquet": [201, 201],
        "step_000202.parquet": [202, 202],
    }
    assert pq.read_table(tmp_path / "rollouts").num_rows == 2 * 202 + 1, "they are one table"


@pytest.mark.parametrize("step", [0, 1, 9, 10, 15, 20, 21])
def test_resumption_splits_a_shared_file(step, tmp_path, monkeypatch):
    """After it, a run that is continued has the files of one that was not interrupted."""
    monkeypatch.setattr(run_log, "STEPS_PER_FILE", 10)
    filled(tmp_path / "a", range(1, 23)).start(step)
    filled(tmp_path / "a", range(step + 1, 26))
    filled(tmp_path / "b", range(1, 26))
    assert rows_by_file(tmp_path / "a") == rows_by_file(tmp_path / "b")


def test_a_damaged_shared_file_is_named(tmp_path):
    log = filled(tmp_path, range(1, 102))
    (tmp_path / "rollouts" / "step_000001-000100.parquet").write_bytes(b"PAR1 junk")
    with pytest.raises(ValueError, match=r"step_000001-000100.parquet is damaged .*: move it away to resume"):
        log.start(50)


def test_resumption_keeps_the_answers_of_evaluations_within_a_shared_file(tmp_path):
    log = filled(tmp_path, range(1, 103))
    for kind in ("eval", "sampled"):
        log.rollouts(50, [rollout_row(rollout(), 50, "p", False)], prefix=kind)
    log.start(101)
    names = ["eval_000050.parquet", "sampled_000050.parquet", "step_000001-000100.parquet", "step_000101.parquet"]
    assert list(rows_by_file(tmp_path)) == names


def test_an_interrupted_join_loses_and_repeats_nothing(tmp_path, monkeypatch):
    log, unlinked, unlink = filled(tmp_path, range(1, 100)), [], Path.unlink

    def die_at_the_second(path, *arguments, **options):
        unlinked.append(path)
        if len(unlinked) == 2:
            raise KeyboardInterrupt
        unlink(path, *arguments, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", die_at_the_second)
        log.rollouts(100, [rollout_row(rollout(), 100, "p", True)])
    assert len(rows_by_file(tmp_path)) > 90
    RunLog(tmp_path).start(100)
    assert list(rows_by_file(tmp_path)) == ["step_000001-000100.parquet"]


def test_rows_that_were_lost_before_a_resumption_are_named(tmp_path, caplog):
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.metrics({"step": step})
    RunLog(tmp_path).start(3)
    assert caplog.text == ""
    RunLog(tmp_path).start(5)
    assert f"{tmp_path / 'metrics.jsonl'} has rows of 3 of the 5 steps before" in caplog.text


def test_files_that_cannot_be_joined_stay(tmp_path, caplog):
    log = filled(tmp_path, range(1, 100))
    (tmp_path / "rollouts" / "step_000007.parquet").write_text("junk")
    log.rollouts(100, [rollout_row(rollout(), 100, "p", True)])
    assert len(list((tmp_path / "rollouts").iterdir())) == 100 and log.failed_writes == 1
    assert "could not be joined and stay as they are" in caplog.text


def test_a_custom_verifier_may_submit_numbers(tmp_path):
    row = replace(rollout(), verdict=Verdict(True, 4, 4))
    RunLog(tmp_path).rollouts(1, [rollout_row(row, 1, "p", True)])
    assert pq.read_table(tmp_path / "rollouts").to_pylist()[0]["submitted"] == "4"


# ---- The summary of an evaluation --------------------------------------------------------------------------------------------


def test_the_summary_of_an_evaluation():
    rollouts = [rollout("abcd", "4", category="number theory"), rollout("ab", "5", category="number theory"), rollout("ab")]
    summary = summarize(rollouts)
    assert summary["accuracy"] == summary["lenient_accuracy"] == pytest.approx(1 / 3)
    assert summary["well_formed_rate"] == pytest.approx(2 / 3) and summary["n"] == 3
    assert summary["stderr"] == pytest.approx(math.sqrt(2 / 27)) and summary["truncated_rate"] == 0
    assert summary["response_length"] == pytest.approx(8 / 3) and summary["accuracy_number_theory"] == 0.5


def test_the_summary_of_nothing_has_the_same_columns():
    empty, full = summarize([]), summarize([rollout()])
    assert empty.keys() == full.keys() and empty["n"] == 0
    assert all(math.isnan(value) for name, value in empty.items() if name != "n")


class Echo:
    """An engine that answers with the prompt."""

    def generate(self, prompts, sampling, seed, progress=None, limits=None):
        return [Response(prompt, byte_tokenizer().decode(prompt, skip_special_tokens=True), True) for prompt in prompts]


def test_every_example_gets_its_own_prompt_even_if_uids_repeat(caplog):
    examples = [Example("same", question, "even") for question in ("one", "two", "long " * 50)]
    encoder = PromptEncoder(byte_tokenizer())
    budget = TokenBudget(prompt=150, feedback=10, context=400)
    rollouts, skipped = answer_examples(Echo(), ToyTask(), encoder, examples, Sampling(max_new_tokens=5), budget)
    assert ["one" in r.response.text for r in rollouts] == [True, False] and "two" in rollouts[1].response.text
    assert skipped == examples[2:] and "same left out" in caplog.text


# ---- Pictures --------------------------------------------------------------------------------------------------------------


def write_run(folder, steps=range(1, 9), **columns):
    log = RunLog(folder)
    (folder / "config.yaml").write_text(
        f"{{model: m, task: t, learning_rate: 1.0e-3, max_steps: 8, temperature: {len(columns)}}}"
    )
    for step in steps:
        log.metrics({"step": step, "loss": 1 / step, **{name: values[step % len(values)] for name, values in columns.items()}})
        if step % 4 == 0:
            log.evaluation({"step": step, "accuracy": 0.5, "stderr": 0.1, "n": 20})
    return folder


def test_a_picture_of_several_runs_with_gaps(tmp_path, recwarn):
    """Columns that a method lacks, skipped steps, undefined values, an evaluation without answers."""
    first = write_run(tmp_path / "a", grad_norm=[1.0, math.nan, math.inf, 0.0], correct_rate=[0.5, 0.25], chi_active=[0.1])
    second = write_run(tmp_path / "b", grad_norm=[0.0], response_length=[12.0])
    third = write_run(tmp_path / "c", steps=range(1, 3), loss=[math.nan])
    (tmp_path / "a" / "evals.jsonl").open("a").write('{"step": 9, "accuracy": null, "n": 0, "stderr": null}\n{"step": 10, "acc')
    for runs in ([first], [first, second, third]):
        picture = plot_runs(runs, tmp_path / "new" / "curves.png")
        assert picture.read_bytes().startswith(PNG) and picture.stat().st_size > 20_000
    assert not [warning for warning in recwarn if "matplotlib" in str(warning.filename)]
    assert plot_runs([first], tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert plot_runs([first], tmp_path / "curves") == tmp_path / "curves.png" and (tmp_path / "curves.png").is_file()


def test_runs_of_a_method_are_told_apart_by_their_settings(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", grad_norm=[1.0])]
    picture = plot_runs(runs, tmp_path / "curves.svg").read_text()
    assert all(f"FIRE (temperature {value})" in picture for value in (0, 1))


def test_a_folder_without_a_run_has_no_picture(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run directory \(it has no config.yaml\)"):
        plot_runs([tmp_path], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_smoothing_keeps_length_and_level():
    def smooth(values):
        return running_mean(np.array(values), 5).tolist()

    assert smooth([]) == [] and smooth([3.0]) == [3.0] and smooth([2.0] * 7) == [2.0] * 7
    assert smooth([0.0, 0.0, 5.0, 0.0, 0.0]) == pytest.approx([5 / 3, 1.25, 1.0, 1.25, 5 / 3])
    assert smooth([1e90, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])[-1] == pytest.approx(1 / 3), "a large value affects its own window only"


@pytest.mark.parametrize("base", ["Qwen/Qwen2.5-0.5B-Instruct", "/somewhere/base"])
def test_the_model_card_is_one_that_the_hub_accepts(base, tmp_path):
    row = {"step": 4, "n": 10, "accuracy": 0.5, "stderr": 0.16, "lenient_accuracy": 0.6, "well_formed_rate": 1.0}
    (tmp_path / "evals.jsonl").write_text(json.dumps(row | {"step": 0, "accuracy": 0.4}) + "\n" + json.dumps(row) + "\n")
    config = SimpleNamespace(task="gsm8k", method="fire", max_steps=4, learning_rate=1e-5, seed=0, model_revision="v1")
    text = model_card(config, tmp_path, base, 7)
    data = ModelCard(text).data
    assert data.base_model == (base if base.startswith("Qwen") else None) and data.library_name == "peft"
    assert [(result.dataset_name, result.metric_value) for result in data.eval_results] == [("gsm8k", 0.5)]
    assert ', revision="v1")' in text
    assert "/somewhere" not in text and "| 0 | 0.400 " in text and "PeftModel.from_pretrained" in text


def test_the_model_card_of_a_warm_start_on_ones_own_data_names_neither_distillation_nor_folders(tmp_path):
    settings = {"learning_rate": 1e-5, "seed": 0, "model_revision": None}
    config = SimpleNamespace(task=str(tmp_path / "problems.csv"), method="supervised", **settings)
    text = model_card(config, tmp_path, "Qwen/Qwen2.5-0.5B-Instruct", 1)
    assert "trained by supervised fine-tuning on gold solutions (`supervised`) with firedistill: 1 optimizer step, peak" in text
    assert "# Qwen/Qwen2.5-0.5B-Instruct on problems.csv, supervised" in text
    config.task = f"code:{tmp_path}/programs.jsonl"
    assert (
        "on code:programs.jsonl, supervised" in (of_code := model_card(config, tmp_path, "x", 1))
        and str(tmp_path) not in of_code
    )
    assert "distillation" not in " ".join(ModelCard(text).data.tags) and str(tmp_path) not in text


def test_the_licence_of_the_base_comes_from_its_card(tmp_path):
    config = SimpleNamespace(task="gsm8k", method="fire", max_steps=4, learning_rate=1e-5, seed=0, model_revision=None)
    assert ModelCard(model_card(config, tmp_path, str(tmp_path), 7)).data.license is None
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    assert ModelCard(model_card(config, tmp_path, str(tmp_path), 7)).data.license == "apache-2.0"
    (tmp_path / "README.md").write_text("---\n: [\n---\n")
    assert ModelCard(model_card(config, tmp_path, str(tmp_path), 7)).data.license is None
