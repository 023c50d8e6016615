"""Reports: tables computed by hand, interpolation as in the paper, the collapse rules, and the safety of the page."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
import math
import os
import random
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from firedistill.cli import main as cli
from firedistill.report import figures
from firedistill.report.build import write_report
from firedistill.report.charts import CHARTS, MEASURES, THINNED, charts_of, evaluation_curve, interpolated_curve, step_curve
from firedistill.report.collapse import (
    ACCURACY_POINTS,
    accuracy_drop,
    collapses,
    gradient_bursts,
    gradients_not_finite,
    lasting_fall,
    length_collapse,
    runaway_length,
    sampling_drop,
)
from firedistill.report.curves import plot_runs
from firedistill.report.groups import makes_a_difference, read_study
from firedistill.report.intervals import wilson
from firedistill.report.log import EVALUATIONS, METRICS, Log
from firedistill.report.page import attributions_of, rules, safe_json, write_page
from firedistill.report.paired import Difference, bootstrap_intervals, different_problems, paired_differences, row, signed
from firedistill.report.plots import MOST_POINTS
from firedistill.report.read import at_the_same_time, read_run
from firedistill.report.tables import (
    accuracy_tables,
    csv_text,
    latex,
    latex_text,
    markdown,
    markdown_text,
    mean_and_deviation,
    overview,
)
from firedistill.run.log import json_line
from firedistill.suites.plan import Plan, PlannedRun
from firedistill.suites.run import SuiteFolder
from firedistill.terminal import visible

HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028<!--{{ 7*7 }}"


def write_run(folder, accuracies=(0.5, 0.6), tokens=None, max_steps=10, steps=None, metrics=None, **settings):
    """A run directory with evaluations spread evenly over its steps."""
    folder.mkdir(parents=True)
    config = {"model": "org/small", "task": "gsm8k", "method": "fire", "seed": 0, "learning_rate": 1e-3, "max_steps": max_steps}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"output_dir": str(folder)} | settings))
    steps = max_steps if steps is None else steps
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "grad_norm": 0.5, "generated_tokens": 20, "response_length": 20.0, "truncated_rate": 0.0}
        row |= {"cumulative_generated_tokens": 20 * step, "cumulative_train_seconds": 6.0 * step}
        rows.append(row | {key: values[step - 1] for key, values in (metrics or {}).items()})
    (folder / "metrics.jsonl").write_text("".join(map(json_line, rows)))
    evaluations = []
    for position, accuracy in enumerate(accuracies):
        step = round(max_steps * position / max(len(accuracies) - 1, 1))
        if step > steps:
            break
        generated = tokens[position] if tokens else 20 * step
        row = {"step": step, "cumulative_generated_tokens": generated, "cumulative_train_seconds": 6.0 * step}
        extra = accuracy if isinstance(accuracy, dict) else {"accuracy": accuracy}
        evaluations.append(row | {"stderr": 0.01, "n": 100} | extra)
    (folder / "evals.jsonl").write_text("".join(map(json_line, evaluations)))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Two methods on two tasks with three seeds, one of them unfinished, and a sweep."""
    finals = {
        ("fire", "gsm8k"): [0.60, 0.63, 0.66],
        ("srpo", "gsm8k"): [0.61, 0.59, 0.60],
        ("fire", "asdiv"): [0.8, 0.82, 0.84],
    }
    folders = []
    for (method, task), values in finals.items():
        for seed, value in enumerate(values):
            folder = tmp_path / "runs" / f"{task}-{method}-{seed}"
            folders.append(write_run(folder, (0.5, value), method=method, task=task, seed=seed))
    for seed, (value, steps) in enumerate([(0.9, 10), (0.7, 10), (0.0, 4)]):
        folder = tmp_path / "runs" / f"asdiv-srpo-{seed}"
        folders.append(write_run(folder, (0.5, value), steps=steps, method="srpo", task="asdiv", seed=seed))
    for factor in (0.5, 4):
        folder = tmp_path / "runs" / f"gsm8k-fire-{factor}"
        folders.append(write_run(folder, (0.5, 0.25), learning_rate=1e-3 * factor))
    return folders


# ---- Tables ------------------------------------------------------------------------------------------------------------------


def test_tables_by_hand(runs):
    table, rates = accuracy_tables(read_study(runs))
    assert table.header == ["Algorithm", "GSM8K", "ASDiv", "Avg."]
    rows = {label: cells for label, cells in table.rows}
    assert list(rows) == ["SRPO", "FIRE"], "in the order of the paper, FIRE last"
    # 60, 63, 66: mean 63, deviations -3, 0, 3, so sqrt(18 / 2) = 3. 61, 59, 60: 60 and 1. 90, 70: 80 and sqrt(200).
    found = {label: [number for c in cells for number in (c.mean, c.deviation, c.n)] for label, cells in rows.items()}
    assert found["FIRE"] == pytest.approx([63, 3, 3, 82, 2, 3])
    assert found["SRPO"] == pytest.approx([60, 1, 3, 80, math.sqrt(200), 2])
    assert [[c.best for c in cells] for cells in rows.values()] == [[False, False], [True, True]]
    assert [cell.mean for cell in table.average] == pytest.approx([70, 72.5]) and table.runs is None
    assert rates.header == ["Algorithm, rate", "GSM8K", "ASDiv"] and [label for label, _ in rates.rows] == [
        "FIRE, 0.5×",
        "FIRE, 1×",
        "FIRE, 4×",
    ]
    assert [cells[0].values for _, cells in rates.rows] == [[25], pytest.approx([60, 63, 66]), [25]]


def test_the_formats_of_a_table(runs):
    table, rates = accuracy_tables(read_study(runs))
    assert markdown(table).splitlines()[2:] == [
        "| Algorithm | GSM8K | ASDiv | Avg. |",
        "| --- | ---: | ---: | ---: |",
        "| SRPO | 60.00 ± 1.00 (n=3) | 80.00 ± 14.14 (n=2) | 70.00 |",
        "| FIRE | **63.00 ± 3.00 (n=3)** | **82.00 ± 2.00 (n=3)** | **72.50** |",
    ]
    text = latex(table)
    assert r"FIRE & $\mathbf{63.00}{\pm}3.00$ {\scriptsize($n=3$)} & $\mathbf{82.00}{\pm}2.00$" in text
    assert r"(\%), mean $\pm$ sample" in text and text.count("{") == text.count("}") and text.count("&") == 9
    assert r"FIRE, 0.5$\times$ & $25.00$ {\scriptsize($n=1$)} & -- \\" in latex(rates)
    lines = list(csv.DictReader(csv_text([table, rates]).splitlines()))
    (line,) = [line for line in lines if (line["algorithm"], line["column"]) == ("SRPO", "ASDiv")]
    assert (line["n"], line["mean"], line["values"], line["best"]) == ("2", "80", "90 70", "0")
    assert float(line["sample_standard_deviation"]) == pytest.approx(math.sqrt(200), rel=1e-5)


def test_the_caption_gives_the_number_of_runs_if_all_cells_share_it(tmp_path):
    folders = [write_run(tmp_path / str(seed), (0.5, 0.6), seed=seed) for seed in range(2)]
    (table,) = accuracy_tables(read_study(folders))
    assert "over 2 runs" in table.caption and "(n=" not in markdown(table) and table.average is None
    assert "**" not in markdown(table), "a single method has no best one"


def test_ties_are_all_best(tmp_path):
    for method in ("fire", "srpo", "veto"):
        write_run(tmp_path / method, (0.5, 0.55 if method == "veto" else 0.6), method=method)
    (table,) = accuracy_tables(read_study(sorted(tmp_path.iterdir())))
    assert {label: cells[0].best for label, cells in table.rows} == {"Veto": False, "SRPO": True, "FIRE": True}


def test_categories_have_a_table_of_their_own(tmp_path):
    final = {"accuracy": 0.5, "accuracy_computer_science": 0.25, "accuracy_physics\u202e": 0.75}
    write_run(tmp_path / "a", (final, final))
    _, table = accuracy_tables(read_study([tmp_path / "a"]))
    assert table.columns == ["Computer science", r"Physics\u202e", "Overall"]
    assert [cell.mean for cell in table.rows[0][1]] == [25, 75, 50]


def test_mean_and_sample_deviation():
    assert mean_and_deviation([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_and_deviation([4.0])[0] == 4.0 and all(
        math.isnan(x) for x in mean_and_deviation([4.0])[1:] + mean_and_deviation([])
    )


def test_names_are_text_in_every_format():
    assert markdown_text("a|b *c* <d>_") == r"a\|b \*c\* \<d\>\_"
    assert (
        latex_text(r"50% of a_b & {c} \d ^~") == r"50\% of a\_b \& \{c\} \textbackslash{}d \textasciicircum{}\textasciitilde{}"
    )


# ---- Runs and groups -----------------------------------------------------------------------------------------------------------


def test_only_runs_that_differ_in_nothing_but_their_seed_are_averaged(tmp_path):
    write_run(tmp_path / "a", seed=0, per_device_train_batch_size=8, gradient_accumulation_steps=1, save_steps=5)
    write_run(tmp_path / "b", seed=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, save_steps=50)
    write_run(tmp_path / "c", seed=0, per_device_train_batch_size=8, temperature=0.5)
    write_run(tmp_path / "d", seed=1, per_device_train_batch_size=8)
    study = read_study([tmp_path / name for name in "abcd"])
    groups = {group.label: [run.name for run in group.runs] for group in study.settings[0].groups}
    assert groups == {"FIRE (temperature 0.8)": ["a", "b"], "FIRE (temperature 0.5)": ["c"]}
    assert study.notes == ["d is excluded: b has the same settings and the same seed."]

    assert len({group.line for group in study.settings[0].groups}) == 2


def test_runs_on_several_processes_are_grouped_by_the_prompts_of_a_step(tmp_path):
    for name, seed, size, prompts in [("a", 0, 8, 8), ("b", 1, 1, 8), ("c", 2, 8, 16), ("older", 3, 8, math.nan)]:
        metrics = {"prompts": [prompts] * 9 + [math.nan]}
        write_run(tmp_path / name, seed=seed, per_device_train_batch_size=size, metrics=metrics)
    groups = read_study(sorted(tmp_path.iterdir())).settings[0].groups
    assert {group.label: [run.name for run in group.runs] for group in groups} == {
        "FIRE (prompts_per_step 8)": ["a", "b", "older"],
        "FIRE (prompts_per_step 16)": ["c"],
    }


def test_of_two_equal_runs_the_finished_one_stays(tmp_path):
    write_run(tmp_path / "a", steps=5)
    write_run(tmp_path / "b")
    study = read_study([tmp_path / "a", tmp_path / "b"])
    assert [run.name for _, group in study.groups for run in group.runs] == ["b"]
    assert "a is excluded: b has the same settings and the same seed." in study.notes


def test_runs_of_the_same_name_have_the_names_of_their_folders(tmp_path):
    folders = [write_run(tmp_path / part, steps=5, seed=seed) for seed, part in enumerate(["x/fire", "y/fire", "x/other"])]
    for folder in folders:
        (folder / "attribution").mkdir()
        (folder / "attribution" / "step_000005.json").write_text(json.dumps(attribution()))
    study = read_study([*folders, folders[0]])
    names = [str(folders[0]), str(folders[1]), "other"]
    assert [run.name for run in study.runs] == names
    assert study.notes == [f"{name} is not finished: step 5 of 10." for name in names]
    data = Page(page_of(folders, tmp_path)).data
    assert [found["run"] for found in data["attributions"]] == [run["name"] for run in data["runs"]] == names


def test_settings_that_make_no_difference():
    assert not any(
        map(makes_a_difference, ("seed", "output_dir", "save_steps", "rollout_batch_size", "gradient_checkpointing"))
    )
    assert all(map(makes_a_difference, ("learning_rate", "method", "temperature", "a setting of a later version")))


def test_the_rate_of_the_comparison(tmp_path):
    for method, rate in [("fire", 2e-3), ("fire", 1e-3), ("srpo", 1e-3), ("veto", 4e-3)]:
        write_run(tmp_path / f"{method}{rate}", method=method, learning_rate=rate)
    (setting,) = read_study(sorted(tmp_path.iterdir())).settings
    assert [group.label for group in setting.groups] == ["Veto, 4× rate", "SRPO", "FIRE", "FIRE, 2× rate"]
    assert [group.label for group in setting.sweep(setting.compared[-1])] == ["FIRE", "FIRE, 2× rate"]


def test_every_optimizer_has_a_rate_of_its_own(tmp_path):
    for method, rate in [("fire", 1e-3), ("fire", 4e-3), ("srpo", 1e-3)]:
        write_run(tmp_path / f"{method}{rate}", method=method, learning_rate=rate)
    for rate in (0.3, 1.2):
        write_run(tmp_path / f"sgd{rate}", learning_rate=rate, optim="sgd")
    (setting,) = read_study(sorted(tmp_path.iterdir())).settings
    assert [(group.method, group.factor) for group in setting.groups if "sgd" in group.apart] == [("fire", 1), ("fire", 4)]
    assert len(setting.compared) == 3


def test_a_path_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run directory \(it has no config.yaml\) and not a suite"):
        read_study([tmp_path])
    write_run(tmp_path / "a", steps=0, accuracies=())
    with pytest.raises(ValueError, match="has not completed a step yet"):
        read_study([tmp_path / "a"])
    (tmp_path / "a" / "config.yaml").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a mapping of settings, not list"):
        read_run(tmp_path / "a")


def test_unfinished_runs_are_in_the_report_but_not_in_the_tables(runs):
    study = read_study(runs)
    assert study.notes == ["asdiv-srpo-2 is not finished: step 4 of 10."]
    (row,) = [row for row in overview(study) if row["Setting"] == "small, ASDiv" and row["Algorithm"] == "SRPO"]
    assert row["Runs finished"] == "2 of 3" and row["Final accuracy (%)"] == "80.00 ± 14.14"
    assert row["Accuracy at step 0 (%)"] == "50.00 ± 0.00" and row["Gradient norm, maximum"] == "0.5"


def test_a_run_that_lacks_rows_is_named(tmp_path):
    log = write_run(tmp_path / "a") / "metrics.jsonl"
    rows = log.read_text().splitlines(keepends=True)
    log.write_text("".join([rows[0], *rows[3:]]))
    (note,) = read_study([tmp_path / "a"]).notes
    assert note == f"a, metrics.jsonl: rows of {len(rows) - 2} of {len(rows)} steps; curves, means and totals lack the others."


def test_a_sweep_whose_recipe_leaves_the_nominal_rate_out_is_one(tmp_path):
    """`suite` sets it for the other rates only."""
    for factor in (0.5, 1, 2):
        nominal = {} if factor == 1 else {"nominal_learning_rate": 1e-3}
        write_run(tmp_path / str(factor), learning_rate=factor * 1e-3, **nominal)
    groups = read_study(sorted(tmp_path.iterdir())).settings[0].groups
    assert [group.label for group in groups] == ["FIRE", "FIRE, 2× rate", "FIRE, 4× rate"]
    _, written = write_report(sorted(tmp_path.iterdir()), tmp_path / "out")
    assert "learning-rates.svg" in {path.name for path in written}


def test_the_rate_of_a_suite_is_the_reference_also_where_all_blocks_have_labels(tmp_path):
    suite = SuiteFolder(tmp_path / "s")
    variants = {
        f"{label}{f' {factor:g}x' if factor != 1 else ''}": factor for label in ("small", "large") for factor in (0.5, 1, 2)
    }
    runs = [
        PlannedRun(v.replace(" ", "-"), "train", "x", {}, "m", "t", "fire", 0, f * 1e-3, 10, v) for v, f in variants.items()
    ]
    suite.widen(Plan("mine", "My suite", {}, runs))
    for run in runs:
        write_run(suite.run_folder(run.id), learning_rate=run.learning_rate, lora_r=8 if "small" in run.variant else 64)
    factors = {group.learning_rate: group.factor for group in read_study([suite.folder]).settings[0].groups}
    assert factors == {0.5e-3: 0.5, 1e-3: 1, 2e-3: 2}


def test_a_run_that_a_callback_has_ended_is_finished(tmp_path):
    run = write_run(tmp_path / "a", (0.5,), steps=4)
    evaluation = {
        "step": 4,
        "accuracy": 0.75,
        "stderr": 0.01,
        "n": 100,
        "cumulative_generated_tokens": 80,
        "cumulative_train_seconds": 24.0,
    }
    with (run / "evals.jsonl").open("a") as file:
        file.write(json_line(evaluation))
    assert not read_run(run).finished
    (run / "finished.json").write_text('{"step": 4}')
    assert read_run(run).finished and read_run(run).final("accuracy") == 0.75
    assert read_study([run]).notes == ["a was ended by a callback after step 4 of 10."]


def test_a_run_without_its_last_evaluation_is_said_to_lack_it(tmp_path):
    evaluations = (write_run(tmp_path / "a") / "evals.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a" / "evals.jsonl").write_text(evaluations[0])
    assert read_study([tmp_path / "a"]).notes == ["a is not finished: the evaluation after its last step is missing."]


def test_an_unfinished_suite(tmp_path):
    suite = SuiteFolder(tmp_path / "s")
    names = ["x-fire-seed0", "x-fire-lr2x-seed0", "x-srpo-seed0", "x-veto-seed0"]
    planned = [
        PlannedRun(n, "train", "x", {}, "m", "t", n.split("-")[1], 0, 1e-3, 10, "2x" if "2x" in n else "") for n in names
    ]
    suite.widen(Plan("mine", "My suite", {}, planned))
    write_run(suite.run_folder(names[0]), (0.5, 0.7))
    write_run(suite.run_folder(names[1]), (0.5, 0.3), learning_rate=2e-3)
    write_run(suite.run_folder(names[2]), (0.5, 0.7), steps=5, method="srpo")
    for name in names[:2]:
        (suite.run_folder(name) / "finished.json").write_text('{"step": 10}')
    study, written = write_report([suite.folder], tmp_path / "out")
    # The logs have 6 seconds per step; 5 and 10 steps are left.
    assert study.title == "My suite" and study.notes[0] == "Suite mine: 2 done, 2 to do; about 90 s left."
    assert [group.label for group in study.settings[0].groups] == ["SRPO", "FIRE", "FIRE, 2× rate"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "2 of 3 runs finished" in page and "still in progress or were stopped" in page
    names = {path.name for path in written}
    assert {
        "learning-rates.svg",
        "learning-rates-gradient-norm.png",
        "gradient-norm.svg",
        "accuracy.csv",
        "overview.md",
    } <= names
    assert all(path.stat().st_size for path in written)


# ---- Curves ----------------------------------------------------------------------------------------------------------------------


def test_interpolation_on_the_jointly_covered_grid(tmp_path):
    """By hand: one run is a straight line from 0 to 200 tokens, the other reaches from 100 to 400 with a bend at 150."""
    first = read_run(write_run(tmp_path / "a", (0.2, 0.6), tokens=[0, 200]))
    second = read_run(write_run(tmp_path / "b", (0.1, 0.5, 0.7), tokens=[100, 150, 400], seed=1))
    curve = interpolated_curve([first, second], "cumulative_generated_tokens", points=3)
    assert curve.x == [100, 150, 200]
    # First: 0.4, 0.5, 0.6. Second: 0.1, 0.5, then 0.5 + 0.2 * 50 / 250 = 0.54.
    assert curve.mean == pytest.approx([0.25, 0.5, 0.57])
    deviation = [0.3 / math.sqrt(2), 0, 0.06 / math.sqrt(2)]
    assert [h - m for h, m in zip(curve.high, curve.mean, strict=True)] == pytest.approx(deviation)
    assert [m - low for low, m in zip(curve.low, curve.mean, strict=True)] == pytest.approx(deviation)


def test_runs_without_a_trajectory_or_a_shared_range(tmp_path):
    complete = read_run(write_run(tmp_path / "a", (0.2, 0.6)))
    started = read_run(write_run(tmp_path / "b", (0.2, 0.6), steps=1, seed=1))
    assert (
        interpolated_curve([complete, started], "cumulative_train_seconds").x
        == interpolated_curve([complete], "cumulative_train_seconds").x
    )
    later = read_run(write_run(tmp_path / "c", (0.2, 0.6), tokens=[500, 600], seed=2))
    assert interpolated_curve([complete, later], "cumulative_generated_tokens").x == []
    assert interpolated_curve([started], "cumulative_generated_tokens").x == []
    curve = interpolated_curve([complete], "cumulative_train_seconds")
    assert (curve.x[0], curve.x[-1], len(curve.x)) == (0.0, 60.0, 100)
    low, high = wilson(np.array([0.2, 0.6]), np.array([100, 100]))
    assert [curve.low[0], curve.low[-1]] == pytest.approx(low) and [curve.high[0], curve.high[-1]] == pytest.approx(high)


def test_curves_over_steps_end_where_the_first_run_ends(tmp_path):
    a = read_run(write_run(tmp_path / "a", max_steps=4, metrics={"grad_norm": [1.0, math.nan, 3.0, 9.0]}))
    b = read_run(write_run(tmp_path / "b", max_steps=4, steps=3, metrics={"grad_norm": [3.0, math.nan, math.inf]}))
    curve = step_curve([a, b], "grad_norm")
    assert (curve.x, curve.mean, curve.low, curve.high) == ([1, 3], [2.0, 3.0], [1.0, 3.0], [3.0, 3.0])
    assert evaluation_curve([a, b]).x == [0]


def test_a_column_has_no_rows_without_a_finite_value():
    rows = [
        {"step": 1, "a": 5},
        {"step": 2, "a": math.nan},
        {"step": 3},
        {"step": 4, "a": math.inf},
        {"step": 5, "a": 0.5, "b": 9},
    ]
    log = Log.of(rows, ["step", "a", "b"])
    found = [[side.tolist() for side in log.column(*names)] for names in (("a",), ("a", "b"), ("c",))]
    assert found == [[[1, 5], [5, 0.5]], [[9], [0.5]], [[], []]]


def test_noisy_columns_become_running_means_of_each_run(tmp_path):
    rates = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    run = read_run(write_run(tmp_path / "a", max_steps=8, metrics={"correct_rate": rates}))
    same = read_run(write_run(tmp_path / "b", max_steps=8, metrics={"correct_rate": [0.5] * 8}, seed=1))
    (chart,) = (chart for chart in CHARTS if chart.name == "sampled-answers")
    # Windows of 11 steps are cut at the ends: those of steps 1 to 3 hold 6 to 8 values. In percent.
    expected = [100 / 6, 100 / 7, 100 / 8, 100 / 8, 100 / 8, 100 / 8, 100 / 7, 100 / 6]
    points = chart.points(run)
    assert (points.x, points.mean) == (list(range(1, 9)), pytest.approx(expected)) and not points.thinned
    curve = chart.curve([run, same])
    assert curve.low == pytest.approx(expected) and curve.high == pytest.approx([50] * 8)
    assert curve.mean == pytest.approx([(50 + value) / 2 for value in expected])


def test_the_overview_covers_finished_runs_if_there_are_any(tmp_path):
    write_run(tmp_path / "a", (0.5, 0.6))
    write_run(tmp_path / "b", (0.4, 0.7), steps=4, seed=1, metrics={"grad_norm": [9.0] * 10})
    (row,) = overview(read_study([tmp_path / "a", tmp_path / "b"]))
    assert row["Runs finished"] == "1 of 2" and row["Gradient norm, maximum"] == "0.5"
    assert row["Accuracy at step 0 (%)"] == "50.00" and row["Generated tokens"] == "200"
    (row,) = overview(read_study([tmp_path / "b"]))
    assert row["Final accuracy (%)"] == "–" and row["Gradient norm, maximum"] == "9" and row["Generated tokens"] == "80"


# ---- What went wrong ---------------------------------------------------------------------------------------------------------------


def test_a_length_collapse_lasts():
    steps = list(range(1, 61))
    fallen = [40.0] * 20 + [10.0] * 40
    event = length_collapse(steps, fallen)
    # The median of five steps falls at the third short one, step 23.
    assert (event.step, event.rule) == (23, "length collapse") and event.text == "response length fell from 40 to 10 tokens"
    assert length_collapse(steps, [40.0] * 60) is None and length_collapse(steps, [40.0] * 20 + [21.0] * 40) is None
    assert length_collapse(steps, [40.0] * 20 + [10.0] * 9 + [40.0] * 31) is None, "it recovers"
    assert length_collapse(steps[:27], fallen[:27]).step == 23, "to the end of the run"
    assert length_collapse(steps[:26], fallen[:26]) is None, "too few steps so far"
    assert length_collapse(steps[:9], [40.0] * 4 + [1.0] * 5) is None, "too short a run"


def test_a_runaway_length():
    steps = list(range(1, 41))
    assert runaway_length(steps, [0.0] * 20 + [0.75] * 20).step == 23
    assert runaway_length(steps, [0.5] * 20 + [1.0] * 20) is None, "true from the first step"


def test_gradient_bursts():
    norms = [0.5] * 20 + [60.0, 0.5, 30.0] + [0.5] * 20 + [4.0, 0.5, 6.0] + [0.5] * 4
    events = gradient_bursts(list(range(1, len(norms) + 1)), norms)
    assert [(event.step, event.value) for event in events] == [(21, 60.0), (46, 6.0)]
    assert events[0].text == "gradient norm 60, the median before it 0.5; 2 steps"
    assert gradient_bursts(list(range(40)), [0.01] * 20 + [0.9] + [0.01] * 19) == [], "below the clipping threshold"
    assert gradient_bursts(list(range(4)), [0.1, 0.1, 50.0, 0.1]) == [], "too few norms to compare with"
    assert [e.step for e in gradient_bursts([7, 8, 9, 10, 11, 12], [0.1] * 5 + [0.5], threshold=0.2)] == []
    gone = gradients_not_finite([1, 2, 3, 20], [0.1, math.nan, math.inf, math.nan])
    assert [(event.step, event.text) for event in gone] == [
        (2, "the gradient was not finite; 2 steps"),
        (20, "the gradient was not finite"),
    ]


def test_an_accuracy_drop_lasts():
    steps, errors = [0, 25, 50, 75, 100], [0.02] * 5
    event = accuracy_drop(steps, [0.5, 0.6, 0.4, 0.3, 0.35], errors)
    assert event.step == 50 and event.text == "accuracy 60.0% at step 25, 40.0% at step 50, 35.0% in the end"
    assert accuracy_drop(steps, [0.5, 0.6, 0.4, 0.6, 0.6], errors) is None, "it recovers"
    # Two standard errors of the difference: 2 * sqrt(2) * 0.02 = 0.057.
    assert accuracy_drop(steps, [0.6, 0.6, 0.6, 0.6, 0.545], errors) is None
    assert accuracy_drop(steps, [0.6, 0.6, 0.6, 0.6, 0.54], errors).step == 100
    assert accuracy_drop(steps, [0.6, 0.6, 0.6, 0.6, 0.551], [0.0] * 5) is None, "less than five points"
    assert accuracy_drop([], [], []) is None


def test_a_sampling_drop_compares_whole_blocks_and_lasts():
    def alternating(*means):
        """Twenty steps around each mean: standard error 0.05 / sqrt(19), three of the difference's are 0.0487."""
        return [mean + side for mean in means for side in [0.05, -0.05] * 10]

    steps = list(range(1, 101))
    event = sampling_drop(steps, alternating(0.5, 0.9, 0.9, 0.8, 0.6))
    assert (event.step, event.key, event.rule) == (61, "correct_rate", "sampling drop")
    assert event.text == ("sampled answers right: 90.0% in the 20 steps to 40, 80.0% in those from 61 on, 60.0% in the last 20")
    assert sampling_drop(steps, alternating(0.5, 0.9, 0.6, 0.9, 0.9)) is None, "it recovers"
    assert sampling_drop(steps, alternating(0.9, 0.9, 0.9, 0.9, 0.851)) is None, "less than five points"
    assert sampling_drop(steps, alternating(0.9, 0.9, 0.9, 0.9, 0.849)).step == 81
    noisy = [0.9 + side for side in [0.5, -0.5] * 10] * 4 + [0.6 + side for side in [0.5, -0.5] * 10]
    assert sampling_drop(steps, noisy) is None, "within the noise of the steps"
    odd = [0.0] * 7 + alternating(0.9, 0.5)
    assert sampling_drop(list(range(1, 48)), odd).step == 28, (
        "the last block ends with the last step; the first one has the steps that are left over"
    )
    assert sampling_drop(steps[:24], alternating(0.9, 0.5)[:24]) is None, "a single block"
    early = sampling_drop(steps[:30], [0.5, 1.0] * 5 + [0.0, 0.1] * 10)
    assert early.step == 11 and early.text.startswith(
        "sampled answers right: 75.0% in the 10 steps to 10, 5.0% in those from 11 on"
    )
    assert sampling_drop([], []) is None


def test_the_events_of_a_run_in_order():
    metrics = [
        {"step": s, "grad_norm": 50.0 if s == 30 else 0.5, "response_length": 40.0 if s <= 20 else 5.0} for s in range(1, 61)
    ]
    metrics[4]["grad_norm"] = math.nan
    evaluations = [{"step": 0, "accuracy": 0.6, "stderr": 0.01, "n": 9}, {"step": 60, "accuracy": 0.1, "stderr": 0.01, "n": 9}]
    found = [(event.step, event.rule) for event in collapses(Log.of(metrics), Log.of(evaluations, EVALUATIONS))]
    assert found == [(5, "gradient not finite"), (23, "length collapse"), (30, "gradient burst"), (60, "accuracy drop")]
    assert collapses(Log.of([]), Log.of([])) == [] and collapses(Log.of([{"step": 1, "loss": 0.5}]), Log.of([])) == []


def test_files_of_an_earlier_report_stay_and_are_named(tmp_path):
    run, out = write_run(tmp_path / "run"), tmp_path / "out"
    study, _ = write_report([run], out)
    assert study.notes == []
    for name in ("tables/accuracy-large.md", "figures/policy-kl.svg"):
        (out / name).write_text("earlier")
    study, written = write_report([run], out)
    assert study.notes == [
        f"{out} holds files that this report did not write, such as those of an earlier one: figures/policy-kl.svg, "
        "tables/accuracy-large.md."
    ]
    assert (out / "tables" / "accuracy-large.md").read_text() == "earlier" and out / "tables" / "overview.md" in written


def test_the_page_reads_the_rules_from_their_docstring():
    assert len(rules()) == 5 and all(rule.endswith(".") and "*" not in rule for rule in rules())


# ---- The page ------------------------------------------------------------------------------------------------------------------------


def page_of(paths, folder):
    study = read_study(paths)
    return write_page(study, accuracy_tables(study), folder / "index.html").read_text()


class Page(HTMLParser):
    """Elements of the page, the text of its scripts, and the data that the last one of them reads."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.within, self.text = [], [], None, ""
        self.feed(text)
        self.data = json.loads(self.unpacked(1), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def unpacked(self, script):
        return gzip.decompress(base64.b64decode(self.scripts[script])).decode()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.within = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.within = None

    def handle_data(self, data):
        if self.within == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def attribution(**changes):
    example = {
        "uid": f"u{HOSTILE}",
        "prompt": HOSTILE,
        "correct": False,
        "submitted": HOSTILE,
        "expected": HOSTILE,
        "fields": [{"name": HOSTILE, "text": HOSTILE}],
        "tokens": [HOSTILE, "\ud800"],
        **{name: [0.5, 1.0] for name in ("rho", "gradient_norm", "chi", "alpha_full", "eta", "beta")},
        "alpha": [[0.5, 0.0]],
        "energy": [[0.123456789, 0.0]],
    }
    return {"step": 10, "examples": [example | changes]}


@pytest.fixture
def hostile(tmp_path):
    """A run in which every text that a user, a model or a dataset can write is hostile."""
    run = write_run(
        tmp_path / "run", task=HOSTILE, model=f"a/{HOSTILE}", method=f"m:{HOSTILE}", metrics={"grad_norm": [math.nan] * 10}
    )
    (run / "attribution").mkdir()
    (run / "attribution" / "step_000010.json").write_text(json.dumps(attribution()))
    return run


def test_no_text_can_break_out_of_the_page(hostile, tmp_path):
    write_report([hostile], tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 3 and "img" not in dict(page.elements)
    assert text.count("</script") == 3 and "<!--" not in text.partition("<body>")[2]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert visible(HOSTILE) in page.text, "shown literally, the braces of the template too"
    example = page.data["attributions"][0]["examples"][0]
    assert example["prompt"] == example["tokens"][0] == example["fields"][0]["name"] == HOSTILE
    assert example["energy"] == [[0.123457, 0.0]]
    for name in (path.name for path in (tmp_path / "out" / "tables").iterdir()):
        assert "/" not in name and "<" not in name


def test_the_page_is_self_contained(hostile, tmp_path):
    text = page_of([hostile], tmp_path)
    page = Page(text)
    assert not any({"src", "srcset"} & set(attributes) for _, attributes in page.elements)
    assert all(attributes["href"].startswith("#") for tag, attributes in page.elements if "href" in attributes)
    assert "url(" not in text and "@import" not in text and ".innerHTML =" not in page.scripts[2]
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    own, library = (
        base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (page.scripts[2], page.unpacked(0))
    )
    assert f"script-src 'sha256-{own}' 'sha256-{library}';" in policy, "no other script runs"
    assert policy.startswith("default-src 'none';") and "eval" not in policy and "http" not in policy
    assert "showSendToCloud: false" in page.scripts[2], "no button of the library sends a chart anywhere"


def test_the_page_can_be_used_by_keyboard_and_screen_reader(runs, tmp_path):
    page = Page(page_of(runs, tmp_path))
    regions = [attributes for _, attributes in page.elements if attributes.get("class") == "scroll"]
    assert regions and all(attributes["tabindex"] == "0" and attributes["aria-label"] for attributes in regions)
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {a["href"][1:] for tag, a in page.elements if tag == "a"} <= ids
    wanted = set(re.findall(r'byId\("([a-z-]+)"\)', page.scripts[2])) - {
        "source", "example", "mode", "mode-text", "judged", "question", "prompt", "fields", "response", "numbers",
        "rollout-run", "rollout-step", "rollout-right", "rollout-field", "rollout-count", "rollout-list", "rollout-more",
    }  # fmt: skip
    assert wanted <= ids
    assert next(attributes for tag, attributes in page.elements if tag == "html")["lang"] == "en"


def test_json_of_the_page():
    assert json.loads(safe_json({"a": [1.23456789, math.nan, math.inf, True, 7, "x"]})) == {
        "a": [1.23457, None, None, True, 7, "x"]
    }
    assert not set("<>&\u2028\u2029") & set(safe_json("</script>&\u2028\u2029<!--"))
    assert json.loads(safe_json("</script>&\u2028<!--")) == "</script>&\u2028<!--"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"step": 1}),
        json.dumps(attribution(rho=[1.0])),
        json.dumps(attribution(alpha=[])),
        json.dumps(attribution(energy=[[1.0]])),
        json.dumps(attribution(chi=["x", "y"])),
    ],
)
def test_an_invalid_attribution_file_is_left_out_with_a_note(content, tmp_path):
    run = write_run(tmp_path / "run")
    (run / "attribution").mkdir()
    (run / "attribution" / "step_000001.json").write_text(content)
    notes = []
    assert attributions_of(read_run(run), notes) == ([], 0) and "is left out because it is not an attribution file" in notes[0]


# ---- Runs of nonsense ----------------------------------------------------------------------------------------------------------


def damaged(run, name, text):
    (run / name).unlink(missing_ok=True)
    (run / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))


NO_ROWS = {  # lines among those of a good log, and what the report says of them
    "[1, 2]": "1 line left out: not a JSON object",
    "17": "1 line left out: not a JSON object",
    '{"grad_norm": 1.0}': "1 line left out: without a whole number as step",
    '{"step": -1}': "1 line left out: without a whole number as step",
    '{"step": 2.5}': "1 line left out: without a whole number as step",
    '{"step": true}': "1 line left out: without a whole number as step",
    '{"step": NaN}\n{"step": 1e999}': "2 lines left out: without a whole number as step",
    '{"step": ' + "9" * 300 + "}": "1 line left out: without a whole number as step",
    '{"step": ' + "9" * 5000 + "}": "1 line left out: not JSON",
    "{" * 100_000: "1 line left out: not JSON",
    '{"step": 3, "grad_norm"': "1 line left out: not JSON",
    "\x00\x01": "1 line left out: not JSON",
    b"\xff\xfe{": "1 line left out: not JSON",
    '{"step": 4, "x": "' + "x" * 2**20 + '"}': "1 line left out: longer than 1 MiB",
    '{"step": 11, "grad_norm": "high"}': "1 value left out: grad_norm is not a number",
    '{"step": 11, "entropy": {}}': "1 value left out: entropy is not a number",
    '{"step": 10, "grad_norm": 0.5}': "1 row left out: a later one has the same step",
    '{"step": 0, "grad_norm": 0.5}': "the rows are not in the order of their steps",
    '{"step": 1000000000, "grad_norm": 0.5}': "rows of 11 of 1000000000 steps; curves, means and totals lack the others",
    '{"step": 11, "grad_norm": 1e308, "entropy": 5e-324, "generated_tokens": -1e308, "correct_rate": 1e999}': "",
    '{"step": 11, "grad_norm": ' + "9" * 400 + "}": "1 value left out: grad_norm is not a number",
}


@pytest.mark.parametrize("lines", NO_ROWS)
def test_lines_that_are_no_rows_are_left_out_and_named(lines, tmp_path):
    run = write_run(tmp_path / "run", metrics={"entropy": [0.5] * 10, "correct_rate": [0.5] * 10})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write((lines if isinstance(lines, bytes) else lines.encode()) + b"\n" + b'{"step": 11, "cut off by a kill')
    study, notes = read_study([run]), []
    assert study.notes == ([f"run, metrics.jsonl: {NO_ROWS[lines]}."] if NO_ROWS[lines] else []) and overview(study)
    assert plot_runs([run], tmp_path / "curves.png", notes=notes).is_file()
    assert notes == study.notes


def test_the_report_names_what_it_leaves_out_and_draws_the_rest(tmp_path, capsys, recwarn):
    """All of these lines in one run, and a good run."""
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad", (0.5, 0.6), seed=1)
    lines = [line if isinstance(line, bytes) else line.encode() for line in NO_ROWS]
    for name in ("metrics.jsonl", "evals.jsonl"):
        damaged(
            bad,
            name,
            b"\n".join([(bad / name).read_bytes(), *lines, b'{"step": 12, "accuracy": "x", "n": [], "stderr": -1}\n']),
        )
    assert cli.main(["report", str(good), str(bad), "-o", str(tmp_path / "out")]) == 0
    told, page = capsys.readouterr().out, (tmp_path / "out" / "index.html").read_text()
    for said in (
        "bad, metrics.jsonl: 2 lines left out: not a JSON object.",
        "bad, evals.jsonl: 1 line left out: longer than 1 MiB.",
    ):
        assert said in told and said in page
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


NO_RUNS = {  # content of config.yaml
    "": "must hold a mapping of settings, not NoneType",
    "[1, 2]": "must hold a mapping of settings, not list",
    "a: [": "is not valid YAML",
    b"\xff\xfe\x00": "is not valid YAML",
    "\n".join(["x0: &x0 [lol]", *(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12))]): "has aliases",
    "[" * 100_000: "nested more than 30 levels deep",
    "x: " + "y" * 2**20: "longer than 256 KiB",
    "learning_rate: 1": "max_steps in config.yaml is None: expected a whole number",
    "{learning_rate: [1], max_steps: 3}": "learning_rate in config.yaml is [1]: expected a number",
    "{learning_rate: .nan, max_steps: 3}": "learning_rate in config.yaml is nan: expected a number",
    "{learning_rate: 0, max_steps: 3}": "learning_rate in config.yaml is 0: expected a number from 1e-30 to 1e+30",
    "{learning_rate: 1, max_steps: .inf}": "max_steps in config.yaml is inf: expected a whole number",
    "{learning_rate: 1, max_steps: 3, seed: x}": "seed in config.yaml is 'x': expected a whole number",
    "{learning_rate: 1, max_steps: 3, per_device_train_batch_size: []}": "per_device_train_batch_size in config.yaml is []",
}


@pytest.mark.parametrize("config", NO_RUNS)
def test_a_bad_run_is_left_out_and_named_and_the_others_are_shown(config, tmp_path, capsys):
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad", seed=1)
    damaged(bad, "config.yaml", config)
    study = read_study([bad, good])
    (note,) = study.notes
    assert note.startswith(f"{bad} is left out: ") and NO_RUNS[config] in note and [run.name for run in study.runs] == ["good"]
    assert cli.main(["report", str(bad), "-o", str(tmp_path / "out")]) == 2
    assert NO_RUNS[config] in capsys.readouterr().err


def test_paths_that_are_no_runs_are_left_out_and_named(tmp_path):
    good = write_run(tmp_path / "good")
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text("[]")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    study = read_study([tmp_path / "nowhere", tmp_path / "plan", tmp_path / "loop", tmp_path / "good" / "config.yaml", good])
    assert [run.name for run in study.runs] == ["good"]
    for name in ("nowhere", "plan", "loop", "config.yaml"):
        assert sum(f"{name} is left out" in note for note in study.notes) == 1


def test_files_that_are_no_files_are_left_out_and_named(tmp_path):
    """Reading a pipe would wait for ever, reading a device would not end."""
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad", seed=1)
    for name in ("evals.jsonl", "metrics.jsonl"):
        (bad / name).unlink()
    os.mkfifo(bad / "evals.jsonl")
    (bad / "metrics.jsonl").symlink_to("/dev/zero")
    (good / "attribution").mkdir()
    os.mkfifo(good / "attribution" / "step_000001.json")
    study, _ = write_report([good, bad], tmp_path / "out")
    assert [run.name for run in study.runs] == ["good"]
    for said in (
        "bad, evals.jsonl is left out: it is not a regular file.",
        "bad, metrics.jsonl is left out: it is not a regular file.",
        "step_000001.json is left out because it is not an attribution file that can be shown: ValueError it is not a regular file",
    ):
        assert any(said in note for note in study.notes)
    (bad / "config.yaml").unlink()
    os.mkfifo(bad / "config.yaml")
    assert [run.name for run in read_study([good, bad]).runs] == ["good"]


def test_a_bad_run_of_a_suite_is_left_out_and_named(tmp_path):
    suite = SuiteFolder(tmp_path / "s")
    names = ["x-fire-seed0", "x-fire-seed1", "x-fire-seed2"]
    suite.widen(
        Plan(
            "mine",
            "My\x1b[31m \ud800suite",
            {},
            [PlannedRun(n, "train", "x", {}, "m", "t", "fire", 0, 1e-3, 10) for n in names],
        )
    )
    for seed, name in enumerate(names):
        damaged(write_run(suite.run_folder(name), seed=seed), "finished.json", '{"step": 10}')
    damaged(suite.run_folder(names[0]), "config.yaml", "[")
    damaged(suite.run_folder(names[1]), "metrics.jsonl", "[1, 2]\n")
    study, _ = write_report([suite.folder], tmp_path / "out")
    assert [run.name for run in study.runs] == names[2:] and study.title == r"My\x1b[31m \ud800suite"
    assert any(note.startswith("x-fire-seed0 is left out: ") for note in study.notes)
    assert "x-fire-seed1, metrics.jsonl: 1 line left out: not a JSON object." in study.notes
    assert "x-fire-seed1 has not completed a step yet." in study.notes


def test_names_that_no_encoding_has_and_names_that_are_too_long(tmp_path):
    folders = [
        write_run(tmp_path / "a\udcff", model="a/" + "x" * 1000, task="\ud800", lora_target_modules=["y" * 5000, "1"]),
        write_run(tmp_path / "b", model="a/" + "x" * 1000, task="\ud800", lora_target_modules=["y" * 5000, "2"]),
        write_run(tmp_path / "c", model="b/same"),
        write_run(tmp_path / "d", model="c/same"),
    ]
    study, written = write_report(folders, tmp_path / "out")
    assert len({path for path in written}) == len(written), "no file is written over another one"
    assert all(len(path.name) < 120 and path.is_file() for path in written)
    assert study.runs[0].name == r"a\udcff" and len({group.label for _, group in study.groups[:2]}) == 2
    first = study.settings[0].groups
    assert len(first) == 2 and all(len(group.label) < 300 for group in first), "long values are shortened, groups stay apart"


def test_categories_without_end(tmp_path):
    run = write_run(tmp_path / "run", ({"accuracy": 0.5} | {f"accuracy_{i}": 0.5 for i in range(1000)},) * 2)
    study = read_study([run])
    assert len(accuracy_tables(study)[1].columns) == 101
    assert study.notes == [
        "run, evals.jsonl: 900 columns left out: beyond the first 100 of categories, pass@k and further tasks."
    ]


# ---- Long runs -----------------------------------------------------------------------------------------------------------------


def test_long_curves_are_thinned_out_and_say_so(tmp_path):
    count = 20_000
    norms = [0.5 + i % 7 / 100 for i in range(count)]
    norms[12_345], norms[777] = 50.0, 0.001
    run = write_run(tmp_path / "run", max_steps=count, metrics={"grad_norm": norms, "correct_rate": [0.5] * count})
    study, _ = write_report([run], tmp_path / "out")
    (chart,) = (chart for chart in CHARTS if chart.name == "gradient-norm")
    curve = chart.curve(study.runs)
    assert curve.thinned and curve.of == count and len(curve.x) <= 1002
    assert (curve.x[0], curve.x[-1]) == (1, count) and curve.x == sorted(set(curve.x))
    assert curve.high[curve.x.index(12_346)] == 50.0 and curve.low[curve.x.index(778)] == 0.001, "extremes stay"
    assert all(mean == norms[int(x) - 1] for x, mean in zip(curve.x, curve.mean, strict=True))
    plots = {plot["name"]: plot for plot in Page((tmp_path / "out" / "index.html").read_text()).data["settings"][0]["plots"]}
    (line,) = (trace for trace in plots["gradient-norm"]["traces"] if trace["role"] == "line")
    assert len(line["x"]) == len(line["y"]) <= MOST_POINTS and THINNED in plots["gradient-norm"]["notes"][0]
    assert THINNED in (tmp_path / "out" / "figures" / "gradient-norm.svg").read_text()
    assert THINNED not in (tmp_path / "out" / "figures" / "accuracy.svg").read_text()
    assert THINNED in plot_runs([run], tmp_path / "curves.svg").read_text()
    short = chart.curve([read_run(write_run(tmp_path / "short", max_steps=2000))])
    assert not short.thinned and len(short.x) == 2000


def test_events_without_end_are_counted():
    steps = list(range(1, 10_001))
    norms = [math.nan if step % 10 == 0 else 50.0 if step % 10 == 5 else 0.5 for step in steps]
    for events, rule in (
        (gradients_not_finite(steps, norms), "gradient not finite"),
        (gradient_bursts(steps, norms), "gradient burst"),
    ):
        assert len(events) == 20 and {event.rule for event in events} == {rule}
        assert re.search(r"; 9[78]\d more up to step (10000|9995)$", events[-1].text) and "more" not in events[-2].text


def test_a_fall_is_found_as_by_trying_every_position():
    """The definition, literally, on random curves."""

    def literally(values, errors, times):
        def below(later, best):
            margin = max(ACCURACY_POINTS, times * math.hypot(errors[later], errors[best]))
            return values[later] < values[best] - margin

        for first in range(1, len(values)):
            best = max(range(first), key=lambda position: values[position])
            if all(below(later, best) for later in range(first, len(values))):
                return best, first
        return None

    chance = random.Random(0)
    found = []
    for _ in range(300):
        values = [round(chance.random(), 1) * (1 if i < 6 else chance.choice([1, 0.5])) for i in range(chance.randrange(12))]
        errors = [chance.choice([0.0, 0.02, 0.1]) for _ in values]
        found.append(lasting_fall(values, errors, 2.0))
        assert found[-1] == literally(values, errors, 2.0)
    assert sum(fall is not None for fall in found) > 30


def test_the_columns_that_charts_need_are_read():
    assert {chart.y for chart in MEASURES} <= {*METRICS, *EVALUATIONS}
    assert {chart.y for chart in [*CHARTS, *figures.PANELS_OF_ONE] if chart.over_steps} <= set(METRICS)
    assert {chart.x for chart in CHARTS if not chart.over_steps} <= set(EVALUATIONS)


# ---- Differences on the same problems ------------------------------------------------------------------------------------------------


def write_answers(folder, correct, kind="eval", step=10, prompt="What is"):
    """The rollouts of an evaluation, of which only these columns are read."""
    (folder / "rollouts").mkdir(exist_ok=True)
    columns = {"uid": [f"gsm8k/test/{uid}" for uid, _ in correct], "correct": [right for _, right in correct]}
    columns |= {"prompt": [f"{prompt} {uid}" for uid, _ in correct], "expected": ["7"] * len(correct)}
    pq.write_table(pa.table(columns), folder / "rollouts" / f"{kind}_{step:06d}.parquet")


def test_differences_pair_the_same_problems_and_seeds(tmp_path):
    # FIRE answers problems 0 to 23, the other 3 to 26: 21 in common. Seed 2 has no partner.
    for seed in (0, 1, 2):
        folder = write_run(tmp_path / f"fire{seed}", seed=seed)
        write_answers(folder, [(i, i < 12) for i in range(24)])
    for seed, wins in ((0, range(3, 18)), (1, range(3, 12))):
        folder = write_run(tmp_path / f"srpo{seed}", seed=seed, method="srpo")
        write_answers(folder, [(i, i in wins) for i in range(3, 27)])
    (found,) = paired_differences(read_study(sorted(tmp_path.iterdir())))
    assert (found.label, found.reference, found.kind, found.problems) == ("SRPO", "FIRE", "greedy", 21)
    assert found.by_seed == pytest.approx({0: 100 * 2 / 7, 1: 0.0}) and found.mean == pytest.approx(100 / 7)
    # By hand: six problems differ by 100 for seed 0, and nothing does for seed 1. Both are drawn.
    draw, values = np.random.default_rng(7), np.array([[100.0] * 6 + [0.0] * 15, [0.0] * 21])
    draws = [values[np.ix_(draw.integers(2, size=2), draw.integers(21, size=21))].mean() for _ in range(20_000)]
    assert [found.low, found.high] == pytest.approx(np.quantile(draws, [0.025, 0.975]).tolist(), abs=100 / 42 + 1e-9)
    assert not found.told_apart and found.low == 0
    assert found.sentence.startswith("SRPO and FIRE cannot be told apart (+14.3 points, 95 % interval 0.0 to +")


def test_equal_uids_of_different_problems_are_not_paired(tmp_path):
    for method, prompt in (("fire", "What is"), ("srpo", "What is not")):
        write_answers(write_run(tmp_path / method, method=method), [(i, True) for i in range(30)], prompt=prompt)
    study = read_study([tmp_path / "fire", tmp_path / "srpo"])
    assert paired_differences(study) == []
    assert different_problems(study.settings[0], study.notes).startswith(
        "The runs were evaluated on different held-out problems or prompts: "
    )


def test_few_common_problems_allow_no_judgement(tmp_path):
    for method, right in (("fire", True), ("srpo", False)):
        write_answers(write_run(tmp_path / method, method=method), [(i, right) for i in range(19)])
    (found,) = paired_differences(read_study([tmp_path / "fire", tmp_path / "srpo"]))
    assert (found.low, found.high, found.problems) == (-100, -100, 19) and not found.told_apart
    assert found.sentence == (
        "SRPO and FIRE share 19 problems, too few for a judgement (-100.0 points, 95 % interval -100.0 to -100.0)."
    )
    assert row(found)[-1] == "too few problems"


def test_a_difference_on_all_problems_is_told_apart_and_samples_count_by_their_share(tmp_path):
    for method, share in (("fire", 0.75), ("srpo", 0.25)):
        folder = write_run(tmp_path / method, method=method)
        write_answers(folder, [(i, k < 4 * share) for i in range(20) for k in range(4)], kind="sampled")
    study, written = write_report([tmp_path / "fire", tmp_path / "srpo"], tmp_path / "report")
    (found,) = paired_differences(study)
    assert (found.kind, found.mean, found.low, found.high) == ("sampled", -50, -50, -50) and found.told_apart
    text = (tmp_path / "report" / "tables" / "differences.md").read_text()
    assert "SRPO is less accurate than FIRE (-50.0 points, 95 % interval -50.0 to -50.0, for these single runs)." in text
    assert 'id="differences"' in (tmp_path / "report" / "index.html").read_text()


def test_differences_that_round_to_zero_have_no_sign():
    assert [signed(value) for value in (-0.04, -0.0, 0.04, -0.06, 12.34)] == ["0.0", "0.0", "0.0", "-0.1", "+12.3"]
    found = Difference("s", "greedy", "SRPO", "FIRE", -0.01, -0.04, 0.02, {0: -0.0, 1: 0.0}, 90)
    assert found.sentence == "SRPO and FIRE cannot be told apart (0.0 points, 95 % interval 0.0 to 0.0)."
    assert row(found)[4:7] == ["0.0", "0.0 to 0.0", "0.0, 0.0"]


SAID = "small, GSM8K: The runs were evaluated on different held-out problems or prompts: 40 for Veto, SRPO; 200 for FIRE."


def test_runs_with_different_held_out_problems_are_said_to_have_them(tmp_path, capsys):
    sizes = {"fire": 200, "srpo": 40, "veto": 40}
    for method, size in sizes.items():
        evaluations = [{"accuracy": accuracy, "n": size} for accuracy in (0.5, 0.6)]
        write_run(tmp_path / method, evaluations, method=method, eval_size=size)
    runs = [str(tmp_path / method) for method in sizes]
    for output in ("report", "curves.svg"):
        assert cli.main(["report", *runs, "-o", str(tmp_path / output)]) == 0
        assert SAID in capsys.readouterr().out.splitlines()
    tables = tmp_path / "report" / "tables"
    assert all(markdown_text(SAID) in (tables / f"{name}.md").read_text() for name in ("overview", "accuracy-small"))
    page = (tmp_path / "report" / "index.html").read_text()
    verdict = page.partition('<p class="verdict">')[2].partition("</p>")[0].replace("\u2011", "-")
    assert "each solve 60.0 %" in verdict and verdict.endswith(SAID.partition(": ")[2])


@pytest.mark.parametrize(
    ("changes", "answered", "differ"),
    [
        ([{}, {}], None, False),
        ([{"eval_size": 200}, {"eval_size": 300}], None, False),  # the task has as many as were counted
        ([{"eval_subset_seed": 0}, {"eval_subset_seed": 7}], None, True),
        ([{"eval_split": "eval"}, {"eval_split": "test"}], None, True),
        ([{"eval_subset_seed": 0}, {"eval_subset_seed": 7}], [range(9), range(9)], False),  # both had the whole split
        ([{}, {}], [range(9), range(1, 10)], True),
        ([{}, {"seed": 1}], None, False),
        ([{"eval_subset_seed": 10_000}, {"seed": 1, "eval_subset_seed": 10_001}], None, True),
    ],
)
def test_held_out_problems_are_known_from_answers_or_else_from_settings(changes, answered, differ, tmp_path):
    for place, (method, change) in enumerate(zip(("fire", "srpo"), changes, strict=True)):
        folder = write_run(tmp_path / method, method=method, **change)
        if answered:
            write_answers(folder, [(i, True) for i in answered[place]])
    study = read_study([tmp_path / "fire", tmp_path / "srpo"])
    assert bool(different_problems(study.settings[0], study.notes)) == differ


def test_seeds_with_subsets_of_their_own_have_the_same_problems_as_those_of_other_methods(tmp_path):
    for method in ("fire", "srpo"):
        for seed in (0, 1):
            write_run(tmp_path / f"{method}{seed}", method=method, seed=seed, eval_subset_seed=seed + 10_000)
    study = read_study(sorted(tmp_path.iterdir()))
    assert different_problems(study.settings[0], study.notes) == ""


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        values = generator.choice([100.0, 0.0, -100.0], p=[0.3, 0.5, 0.2], size=80)
        ((low, high),) = bootstrap_intervals([{0: dict(enumerate(values))}], resamples=500)
        covered += low <= 10.0 <= high
    assert 0.9 <= covered / 200 <= 0.99


def test_the_interval_covers_differences_between_seeds():
    """Ten seeds of two equal methods, whose differences vary from seed to seed by more than problems explain."""
    generator, covered, of_problems = np.random.default_rng(4), 0, 0
    for _ in range(100):
        shifts = generator.normal(0, 30, size=10)
        values = shifts[:, None] + generator.normal(0, 40, size=(10, 60))
        by_seed = {seed: dict(enumerate(row)) for seed, row in enumerate(values)}
        mean_of_seeds = {0: dict(enumerate(values.mean(0)))}
        (low, high), (narrow_low, narrow_high) = bootstrap_intervals([by_seed, mean_of_seeds], resamples=500)
        covered, of_problems = covered + (low <= 0 <= high), of_problems + (narrow_low <= 0 <= narrow_high)
    assert covered >= 85 and of_problems < 50


def test_answers_that_cannot_be_read_are_named(tmp_path):
    for method in ("fire", "srpo"):
        folder = write_run(tmp_path / method, method=method)
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "eval_000010.parquet").write_text("no parquet")
    study = read_study([tmp_path / "fire", tmp_path / "srpo"])
    assert paired_differences(study) == [] and len(study.notes) == 2 and "eval_000010.parquet is left out" in study.notes[0]


def test_runs_with_the_authors_held_out_problems_are_seeds_of_one_group(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path / f"theirs{seed}", seed=seed, eval_subset_seed=seed + 10_000)
        write_run(tmp_path / f"ours{seed}", seed=seed)
    write_run(tmp_path / "other", seed=0, eval_subset_seed=7, eval_split="test")
    groups = {group.label: len(group.runs) for group in read_study(sorted(tmp_path.iterdir())).settings[0].groups}
    assert groups == {
        "FIRE (eval_subset_seed 0, eval_split eval)": 3,
        "FIRE (eval_subset_seed seed + 10000, eval_split eval)": 3,
        "FIRE (eval_subset_seed 7, eval_split test)": 1,
    }


def test_figures_of_gradient_norms_leave_out_on_policy_sft_as_the_paper_does(tmp_path):
    for method in ("fire", "on_policy_sft"):
        write_run(tmp_path / method, method=method)
    _, written = write_report([tmp_path / "fire", tmp_path / "on_policy_sft"], tmp_path / "report")
    norms, lengths = (
        (tmp_path / "report" / "figures" / f"{name}.svg").read_text() for name in ("gradient-norm", "response-length")
    )
    assert "without On-Policy SFT, as in the paper" in norms and ">On-Policy SFT<" not in norms
    assert ">On-Policy SFT<" in lengths and "as in the paper" not in lengths


def test_the_measures_that_a_run_has_are_charts(tmp_path):
    evaluation = {"accuracy": 0.5, "sampled_accuracy": 0.4, "pass_at_4": 0.8, "also_asdiv": 0.3, "also_asdiv_stderr": 0.1}
    plain = write_run(tmp_path / "plain", seed=1)
    measured = write_run(tmp_path / "measured", (evaluation, evaluation), metrics={"policy_kl": [1e-3] * 10})
    assert charts_of(read_study([plain]).runs) == CHARTS
    added = [chart for chart in charts_of(read_study([plain, measured]).runs) if chart not in CHARTS]
    assert [chart.y for chart in added] == ["policy_kl", "sampled_accuracy", "also_asdiv", "pass_at_4"]
    write_report([plain, measured], tmp_path / "report")
    assert (tmp_path / "report" / "figures" / "policy-kl.svg").is_file()
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Held-out accuracy on asdiv" in page and "solved by one of 4 samples" in page


def test_runs_of_a_suite_that_shared_their_machine():
    records = {
        "a": {"host": "h", "since": 0.0, "seconds": 100.0},
        "b": {"host": "h", "since": 50.0, "seconds": 10.0},
        "c": {"host": "h", "since": 99.5, "seconds": 10.0},  # the next one starts while the last one ends
        "d": {"host": "other", "since": 0.0, "seconds": 500.0},
        "e": {"state": "to do"},
    }
    assert at_the_same_time(records) == {"a", "b"}
    assert at_the_same_time(records | {"f": {"host": "h", "since": 20.0, "seconds": 500.0}}) == {"a", "b", "c", "f"}


# ---- The command ---------------------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_folder_or_a_picture(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=4)
    assert cli.main(["report", str(run), "-o", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "run is not finished: step 4 of 10." in out and f"wrote {tmp_path / 'out' / 'index.html'}" in out
    assert cli.main(["report", str(run), "-o", str(tmp_path / "curves.svg")]) == 0
    assert (tmp_path / "curves.svg").is_file() and not (tmp_path / "curves.svg").is_dir()
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    for name in ("x.html", "x.jpg"):
        assert cli.main(["report", str(run), "-o", name]) == 2
        told = capsys.readouterr().err
        assert (
            f"-o is {name}: expected a folder, or a picture that ends with .png, .svg or .pdf; {name}/ makes a folder" in told
        )
    for name, folder in {"/proc/x": "/proc/x", "/proc/x/curves.png": "/proc/x"}.items():
        assert cli.main(["report", str(run), "-o", name]) == 2
        told = capsys.readouterr().err
        assert told == f"firedistill report: -o {folder} cannot be made (No such file or directory): name another one\n"
    assert cli.main(["report", str(run), "-o", f"{tmp_path}/x.html/"]) == 0 and (tmp_path / "x.html" / "index.html").is_file()


def test_a_learning_rate_has_the_same_colour_in_all_panels(tmp_path):
    rates = {"fire": (0.5e-3, 1e-3, 4e-3), "srpo": (1e-3, 4e-3), "veto": (1e-3, 2e-3)}
    folders = [
        write_run(tmp_path / f"{method}{rate}", method=method, learning_rate=rate) for method in rates for rate in rates[method]
    ]
    folders.append(write_run(tmp_path / "sft", method="on_policy_sft"))
    (chart,) = (chart for chart in CHARTS if chart.name == "gradient-norm")
    figure = figures.rate_step_figure(read_study(folders), chart)
    assert figure.get_suptitle().endswith("; without On-Policy SFT, as in the paper")
    colours = {}
    for axes in figure.axes:
        for line in axes.lines:
            colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert sorted(colours) == ["0.5× rate", "1× rate", "2× rate", "4× rate"]
    assert all(len(found) == 1 for found in colours.values()) and len(set.union(*colours.values())) == 4
    (legend,) = figure.legends
    shown = {text.get_text(): line.get_color() for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    assert {name: {colour} for name, colour in shown.items()} == colours


def test_titles_fit_the_width_of_their_figure(tmp_path):
    rates = {"correct_rate": [0.1 * i for i in range(10)]}
    for name, method, seed in [("a", "fire", 0), ("b", "fire", 1), ("c", "srpo", 0)]:
        write_run(tmp_path / name, method=method, seed=seed, metrics=rates)
    (chart,) = (chart for chart in CHARTS if chart.name == "sampled-answers")
    figure = figures.method_figure(read_study(sorted(tmp_path.iterdir())), chart)
    (title,) = figure.texts
    text = " ".join(title.get_text().split())
    assert text.startswith("Sampled answers right mean over seeds, band") and text.endswith("running means of 11 steps")
    place = title.get_window_extent()
    assert figure.bbox.x0 <= place.x0 < place.x1 <= figure.bbox.x1


def test_the_same_runs_give_the_same_figures(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "charts_of", lambda runs: CHARTS[:1])
    for name in ("one", "two"):
        figures.write_figures(read_study(runs[:4]), tmp_path / name)
    (svg,) = (tmp_path / "one").glob("*.svg")
    text = svg.read_text()
    assert text == (tmp_path / "two" / svg.name).read_text()
    # Axes with names, a legend with every method, and what the band is.
    for label in ("optimizer step", "gradient norm", "FIRE", "SRPO", "small, GSM8K", "lowest to highest seed"):
        assert label in text


def test_runs_whose_folder_or_evaluation_is_missing_are_named(tmp_path):
    suite = SuiteFolder(tmp_path / "s")
    planned = [PlannedRun(f"x-fire-seed{i}", "train", "x", {}, "m", "t", "fire", i, 1e-3, 10, "") for i in range(3)]
    suite.widen(Plan("mine", "My suite", {}, planned))
    for run in planned:
        write_run(suite.run_folder(run), (0.5, 0.7), seed=run.seed, eval_size=100)
        suite.state_path(run).parent.mkdir(exist_ok=True)
        suite.state_path(run).write_text(json.dumps({"state": "done"}))
    (suite.run_folder(planned[1]) / "evals.jsonl").write_text("")
    shutil.rmtree(suite.run_folder(planned[2]))
    assert read_study([suite.folder]).notes == [
        "x-fire-seed2 is left out: the suite has finished it, but its run directory is missing.",
        "x-fire-seed1 has no evaluation, and counts in no accuracy.",
    ]


def test_a_curve_leaves_out_runs_without_its_column(tmp_path):
    """One run was evaluated with samples, the other without."""
    first = write_run(tmp_path / "a", [{"accuracy": 0.5, "sampled_accuracy": 0.4}, {"accuracy": 0.6, "sampled_accuracy": 0.5}])
    runs = [read_run(first), read_run(write_run(tmp_path / "b", seed=1))]
    curve = evaluation_curve(runs, "sampled_accuracy")
    assert curve.x == [0, 10] and curve.mean == [0.4, 0.5] and evaluation_curve(runs[1:] * 2, "sampled_accuracy").x == []


def test_nominal_rates_that_do_not_follow_the_rate_are_named(tmp_path):
    pairs = [(1e-3, 1e-3), (2e-3, 2e-3), (4e-3, 1e-3), (4e-3, 4e-3)]
    for index, (rate, nominal) in enumerate(pairs):
        write_run(tmp_path / str(index), learning_rate=rate, nominal_learning_rate=nominal)
    labels = [group.label for group in read_study(sorted(tmp_path.iterdir())).settings[0].groups]
    assert (
        len(set(labels)) == 4
        and "FIRE, 4× rate (nominal_learning_rate 0.004)" in labels
        and not any("( #" in x for x in labels)
    )
    for index in (2,):
        shutil.rmtree(tmp_path / str(index))
    labels = [group.label for group in read_study(sorted(tmp_path.iterdir())).settings[0].groups]
    assert sorted(labels) == ["FIRE", "FIRE, 2× rate", "FIRE, 4× rate"]
