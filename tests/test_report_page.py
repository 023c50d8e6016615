"""The report's page: the answer, the charts, rollouts, size, hostile text, and how it looks to a browser where one is installed."""

from __future__ import annotations

import html
import json
import math
import random
import re
import shutil
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from firedistill.cli import main as cli
from firedistill.report.charts import CHARTS, charts_of, running_interval
from firedistill.report.groups import read_study
from firedistill.report.intervals import estimate, evaluated_intervals, wilson
from firedistill.report.log import EVALUATIONS, Log
from firedistill.report.page import write_page
from firedistill.report.plots import MOST_POINTS, literal, names, plots_of
from firedistill.report.rollouts import questions, rollouts_of
from firedistill.report.tables import accuracy_tables, differing_settings, overview, without_constants
from firedistill.report.verdict import listed, verdicts, with_minus
from test_report import HOSTILE, Page, attribution, page_of, write_answers, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# ---- The answer -------------------------------------------------------------------------------------------------------------


def answered(folder, right, **settings):
    """A finished run whose greedy answers to 100 problems are right for the first `right` of them."""
    write_run(folder, (0.5, right / 100), **settings)
    write_answers(folder, [(i, i < right) for i in range(100)])
    return folder


def verdict(*folders):
    (found,) = verdicts(read_study(folders))
    return found


def test_the_best_and_those_that_cannot_be_told_apart_from_it(tmp_path):
    runs = {"fire": 90, "srpo": 89, "veto": 70}
    found = verdict(*(answered(tmp_path / method, right, method=method) for method, right in runs.items()))
    assert (
        found.sentence
        == "FIRE solves 90.0 % of the held-out problems after training, the most of 3 methods; SRPO cannot be told apart from that."
    )
    assert [d.label for d in found.level] == ["SRPO"] and [d.label for d in found.behind] == ["Veto"]
    # Problem 89 alone differs: one of a hundred, whose share in a resample is 0 to 3 problems in 95 of 100 cases.
    (level,) = found.level
    assert (level.mean, level.high) == (pytest.approx(-1), 0) and -4 <= level.low <= -2
    assert found.first == 50 and found.final.mean == 90 and found.unknown == [] and found.collapsed == []


def test_equal_methods_are_named_together_and_none_is_put_first_by_chance(tmp_path):
    found = verdict(
        *(answered(tmp_path / method, right, method=method) for method, right in [("veto", 80), ("fire", 80), ("srpo", 60)])
    )
    assert found.sentence.startswith("Veto and FIRE each solve 80.0 %") and found.best.label == "FIRE"
    assert found.sentence.endswith("the most of 3 methods; SRPO is behind, for these single runs.")


def test_a_method_that_is_ahead_on_what_both_have_is_not_behind(tmp_path):
    """FIRE has the highest mean, thanks to a seed that the other method lacks."""
    runs = [answered(tmp_path / f"fire{seed}", right, seed=seed) for seed, right in enumerate((60, 90))]
    found = verdict(*runs, answered(tmp_path / "veto", 70, method="veto"))
    assert found.best.label == "FIRE" and [d.label for d in found.ahead] == ["Veto"] and found.behind == []
    assert found.sentence.endswith("the most of 2 methods; Veto is ahead on the problems and seeds that both have.")


def test_methods_that_cannot_be_compared_and_other_numbers_of_steps_are_named(tmp_path):
    runs = [answered(tmp_path / "fire", 90), answered(tmp_path / "veto", 89, method="veto", max_steps=20)]
    (tmp_path / "veto" / "rollouts" / "eval_000010.parquet").rename(tmp_path / "veto" / "rollouts" / "eval_000020.parquet")
    found = verdict(*runs, write_run(tmp_path / "srpo", (0.5, 0.2), method="srpo"))
    assert found.answer.endswith(
        "Veto cannot be told apart from that; SRPO cannot be compared: no common seed, or too few saved answers to the same problems."
    )
    assert found.problems == "They were trained for different numbers of steps: 10 for SRPO and FIRE; 20 for Veto."


def test_a_gain_is_that_of_runs_with_both_values(tmp_path):
    write_run(tmp_path / "a", (0.5, 0.6))
    write_run(tmp_path / "b", (0.9,), seed=1)
    (tmp_path / "b" / "evals.jsonl").write_text(json.dumps({"step": 10, "accuracy": 0.9, "n": 100}) + "\n")
    assert (
        "75.0 % of the held-out problems after training, +10.0 points since step 0."
        in verdict(tmp_path / "a", tmp_path / "b").answer
    )


def test_without_saved_answers_nothing_is_said_about_chance(tmp_path):
    found = verdict(
        *(write_run(tmp_path / method, (0.5, right), method=method) for method, right in [("fire", 0.6), ("srpo", 0.9)])
    )
    assert found.sentence == (
        "SRPO solves 90.0 % of the held-out problems after training, the most of 2 methods; FIRE cannot be compared: "
        "no common seed, or too few saved answers to the same problems."
    )
    assert [group.label for group in found.unknown] == ["FIRE"]


def test_a_single_method_and_a_run_that_has_just_begun(tmp_path):
    run = write_run(tmp_path / "a", (0.5, 0.6))
    assert verdict(run).sentence == "FIRE solves 60.0 % of the held-out problems after training, +10.0 points since step 0."
    begun = write_run(tmp_path / "b", (0.5, 0.6), steps=1)
    assert verdict(begun).sentence == "No run is finished yet, so no method can be called the best."
    assert "No run is finished yet." in page_of([begun], tmp_path)
    (write_run(tmp_path / "c", (0.5, 0.6)) / "evals.jsonl").unlink()
    assert verdict(tmp_path / "c").sentence == "No finished run was evaluated, so no method can be called the best."


def test_only_the_common_rate_competes_where_several_methods_have_it(tmp_path):
    write_run(tmp_path / "a", (0.5, 0.6)), write_run(tmp_path / "b", (0.5, 0.7), method="srpo")
    write_run(tmp_path / "c", (0.5, 0.9), learning_rate=2e-3)
    assert verdict(*sorted(tmp_path.iterdir())).best.label == "SRPO"
    assert verdict(tmp_path / "a", tmp_path / "c").best.label == "FIRE, 2× rate"


def test_what_collapsed_is_named_with_its_seeds_and_step(tmp_path):
    lengths = [40.0] * 20 + [5.0] * 40
    runs = [
        write_run(tmp_path / f"{seed}", seed=seed, max_steps=60, metrics={"response_length": lengths} if seed else {})
        for seed in range(3)
    ]
    runs.append(write_run(tmp_path / "burst", method="srpo", max_steps=60, metrics={"grad_norm": [0.5] * 59 + [90.0]}))
    found = verdict(*runs)
    assert [(group.label, text) for group, text in found.collapsed] == [
        ("FIRE", "length collapse in 2 of 3 seeds, from step 23")
    ]
    page = page_of(runs, tmp_path)
    assert "length collapse in 2 of 3 seeds" in page and "gradient burst" in page, "a burst is listed below, but is no collapse"


def test_lists_and_signs():
    assert [listed(["A"]), listed(["A", "B"]), listed(["A", "B", "C"]), listed(["A", "B", "C", "D"])] == [
        "A", "A and B", "A, B and C", "A, B and 2 others"]  # fmt: skip
    assert [with_minus(value) for value in (1.25, -0.5, -0.04, 0.0)] == ["+1.2", "−0.5", "0.0", "0.0"]


# ---- Intervals --------------------------------------------------------------------------------------------------------------


def test_wilsons_interval_solves_its_equation():
    """Its ends are the shares p with (share - p)² = z² p (1 - p) / n; none is known without a share or a count."""
    shares, counts = np.array([0.0, 0.3, 0.925, 1.0]), np.array([5.0, 20.0, 200.0, 7.0])
    for end in wilson(shares, counts):
        assert (shares - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / counts, abs=1e-12)
    counts = np.arange(1.0, 500)
    for share in (0.0, 1.0):
        low, high = wilson(np.full_like(counts, share), counts)
        assert not np.signbit(low).any() and (high <= 1).all(), "an end that rounding puts outside would be printed as -0.0"
    low, high = wilson(np.array([math.nan, 0.5, 2.0]), np.array([10.0, 0.0, 10.0]))
    assert np.isnan(low).all() and np.isnan(high).all()


def test_a_mean_over_samples_has_the_interval_of_its_own_error():
    rows = [{"step": 1, "n": 100, "accuracy": 0.5, "sampled_accuracy": 0.5, "sampled_stderr": 0.025, "pass_at_4": 0.5}]
    log = Log.of(rows, EVALUATIONS)
    width = {
        key: float(np.diff(np.ravel(evaluated_intervals(log, key)))[0]) for key in ("accuracy", "sampled_accuracy", "pass_at_4")
    }
    assert width["accuracy"] == width["pass_at_4"] == pytest.approx(2 * 0.0962, abs=1e-3)
    assert width["sampled_accuracy"] == pytest.approx(2 * 1.96 * 0.025, rel=0.01), "the error is half that of 100 answers"


def test_a_further_task_that_is_all_right_has_no_interval_of_other_problems():
    row = {
        "step": 1,
        "n": 200,
        "accuracy": 0.5,
        "also_easy": 1.0,
        "also_easy_stderr": 0.0,
        "also_hard": 0.5,
        "also_hard_stderr": 0.1,
    }
    log = Log.of([row], EVALUATIONS)
    ends = {key: np.ravel(evaluated_intervals(log, key)) for key in ("also_easy", "also_hard")}
    assert np.isnan(ends["also_easy"]).all() and ends["also_hard"] == pytest.approx([0.317, 0.683], abs=2e-3)


def test_only_shares_of_problems_have_an_interval_of_problems():
    log = Log.of(
        [{"step": 1, "n": 100, "sampled_entropy": 0.3, "distinct_answers": 1.0, "also_arithmetic:hard": 0.3}], EVALUATIONS
    )
    known = {key: bool(np.isfinite(evaluated_intervals(log, key)).all()) for key in log.columns}
    assert known.pop("also_arithmetic:hard") and not known["sampled_entropy"] and not known["distinct_answers"]


def test_a_seed_without_evaluations_is_left_out_of_the_answer(tmp_path):
    runs = [write_run(tmp_path / str(seed), (0.5, 0.6), seed=seed) for seed in range(2)]
    (runs[1] / "evals.jsonl").unlink()
    study = read_study(runs)
    (found,) = verdicts(study)
    assert found.first == 50 and found.final.values == [60]
    assert [row["Accuracy at step 0 (%)"] for row in overview(study)] == ["50.00"]
    assert plots_of(study.settings[0], charts_of(study.runs))[0]


def test_the_estimate_of_a_group_is_the_mean_of_its_finished_runs(tmp_path):
    runs = [write_run(tmp_path / str(seed), (0.5, value), seed=seed) for seed, value in enumerate([0.6, 0.7])]
    runs.append(write_run(tmp_path / "2", (0.5, 0.0), seed=2, steps=3))
    (group,) = read_study(runs).settings[0].groups
    found = estimate(group)
    ends = [wilson(np.array([value]), np.array([100])) for value in (0.6, 0.7)]
    assert found.mean == pytest.approx(65) and found.values == pytest.approx([60, 70])
    assert [found.low, found.high] == pytest.approx([50 * sum(float(end[side][0]) for end in ends) for side in (0, 1)])
    assert found.seeds == "2 seeds: 60.0, 70.0"


def test_the_band_of_a_running_mean_by_hand():
    low, high = running_interval(np.array([0.0, 1.0, 0.0]), 3)
    # The middle window: mean 1/3 within squares (1/9, 4/9, 1/9), whose running mean over its own window is 2/9.
    assert 0 <= low[1] <= 1 / 3 <= high[1] <= 1
    # The first window has two values: mean 2.5 of 2 and 3 within squares (1/4, 0, ...), whose mean over this window is 1/8.
    low, high = running_interval(np.array([2.0, 3.0, 4.0, -50.0, 50.0]), 3)
    assert [low[0], high[0]] == pytest.approx([2.5 - 1.959964 * 8**-0.5, 2.5 + 1.959964 * 8**-0.5])
    assert running_interval(np.array([2.0] * 9), 3)[0].tolist() == [2.0] * 9


# ---- Charts -----------------------------------------------------------------------------------------------------------------


def plots(*folders):
    study = read_study(folders)
    found, constant = plots_of(study.settings[0], charts_of(study.runs))
    return {plot["name"]: plot for plot in found}, constant


def test_what_has_two_points_or_one_value_is_no_chart(tmp_path):
    run = write_run(tmp_path / "a", (0.5, 0.6), metrics={"grad_norm": list(range(1, 11))})
    found, constant = plots(run)
    assert list(found) == ["final-accuracy", "gradient-norm"], "accuracy at two steps is in the first chart and in the tables"
    assert constant == ["Generated tokens per step: 20 (tokens)", "Response length: 20 (tokens per response)"]
    again = write_run(tmp_path / "b", (0.5, 0.6, 0.7), metrics={"grad_norm": list(range(1, 11))}, seed=1)
    assert {"accuracy", "tokens-accuracy", "time-accuracy"} <= plots(again)[0].keys()


def test_every_dot_of_the_final_accuracies_has_its_interval(tmp_path):
    sampled = {"accuracy": 0.8, "sampled_accuracy": 0.7, "sampled_stderr": 0.02}
    runs = [
        write_run(tmp_path / method, (0.5, sampled if method == "fire" else 0.6), method=method) for method in ("fire", "srpo")
    ]
    found, _ = plots(*runs)
    dots = [trace for trace in found["final-accuracy"]["traces"] if trace["role"] == "dot"]
    assert [dot["x"] for dot in dots] == [[60], [70], [80]] and all(
        dot["error_x"]["array"][0] > 0 < dot["error_x"]["arrayminus"][0] for dot in dots
    )
    assert "sampled answers" in found["final-accuracy"]["notes"][0] and [
        trace["x"] for trace in found["final-accuracy"]["traces"]
    ][0] == [50]


def test_a_curve_has_a_band_over_seeds_or_that_of_its_evaluation(tmp_path):
    rates = {"correct_rate": [0.1 * i for i in range(10)]}
    one = write_run(tmp_path / "0", (0.5, 0.6, 0.7), metrics=rates)
    found, _ = plots(one)
    for name in ("accuracy", "tokens-accuracy", "sampled-answers"):
        assert [trace["role"] for trace in found[name]["traces"]] == ["low", "high", "line"], name
        assert found[name]["traces"][1]["fill"] == "tonexty"
    assert found["accuracy"]["notes"][0] == "one seed, band 95 % interval over problems"
    two = write_run(tmp_path / "1", (0.5, 0.4, 0.9), metrics=rates, seed=1)
    found, _ = plots(one, two)
    low, high, line, *seeds = found["accuracy"]["traces"]
    assert line["y"] == [50, 50, 80] and [seed["y"] for seed in seeds] == [[50, 60, 70], [50, 40, 90]]
    assert high["y"][2] - 80 == pytest.approx(math.sqrt(200), abs=0.01), "sample standard deviation of 70 and 90"
    assert found["accuracy"]["notes"][0] == "mean over seeds, band ± sample standard deviation over seeds"


def test_marks_lie_on_the_curve_where_a_run_went_wrong(tmp_path):
    run = write_run(tmp_path / "a", max_steps=40, metrics={"grad_norm": [0.5 + i % 3 for i in range(29)] + [90.0] + [0.5] * 10})
    (mark,) = (trace for trace in plots(run)[0]["gradient-norm"]["traces"] if trace["role"] == "mark")
    assert (mark["x"], mark["y"]) == ([30], [90.0]) and mark["text"][0].startswith("FIRE, seed 0, step 30: gradient burst<br>")


def test_what_lies_beyond_the_curve_is_marked_at_its_last_point(tmp_path):
    norms = [0.5 + i % 3 for i in range(29)] + [math.nan] * 11
    run = write_run(tmp_path / "a", max_steps=40, metrics={"grad_norm": norms})
    (mark,) = (trace for trace in plots(run)[0]["gradient-norm"]["traces"] if trace["role"] == "mark")
    assert (mark["x"], mark["y"]) == ([29], [1.5]) and mark["text"][0].startswith("FIRE, seed 0, step 30: gradient not finite")


def test_logarithmic_charts_leave_out_what_has_no_logarithm(tmp_path):
    runs = [
        write_run(tmp_path / str(seed), seed=seed, metrics={"grad_norm": [0.0, 1.0, 2.0 + seed] * 3 + [1.0]})
        for seed in range(2)
    ]
    low, high, line, *_ = plots(*runs)[0]["gradient-norm"]["traces"]
    assert line["y"][0] is None and line["y"][1] == 1 and min(low["y"]) > 0 and len(low["x"]) == len(high["x"]) == 7


def test_three_learning_rates_are_a_chart_and_two_are_a_table(tmp_path):
    runs = [write_run(tmp_path / str(rate), (0.5, 0.5 + 100 * rate), learning_rate=rate) for rate in (5e-4, 1e-3, 2e-3)]
    assert plots(*runs)[0]["learning-rates"]["layout"]["xaxis"]["ticktext"] == ["0.0005", "0.001", "0.002"]
    assert "learning-rates" not in plots(*runs[:2])[0]


# ---- Tables -----------------------------------------------------------------------------------------------------------------


def test_columns_that_say_the_same_in_every_row_become_a_line(tmp_path):
    rows = [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}]
    assert without_constants(rows) == ([{"a": "1"}, {"a": "2"}], {"b": "x"})
    assert without_constants(rows[:1]) == (rows[:1], {}) and without_constants([]) == ([], {})
    page = Page(page_of([write_run(tmp_path / m, (0.5, v), method=m) for m, v in (("fire", 0.6), ("srpo", 0.7))], tmp_path))
    assert "The same in every row: Setting small, GSM8K; Runs finished 1 of 1;" in " ".join(page.text.split())


def test_the_settings_that_differ_with_the_runs_that_have_them(tmp_path):
    write_run(tmp_path / "a", temperature=0.5)
    write_run(tmp_path / "b", temperature=1.0, save_steps=7)
    write_run(tmp_path / "c", temperature=1.0, method="srpo")
    found = differing_settings(read_study(sorted(tmp_path.iterdir())))
    fire = "FIRE (temperature {})"
    assert found[0] == ("temperature", True, [("1.0", f"SRPO, {fire.format(1)}"), ("0.5", fire.format(0.5))])
    assert found[1][:2] == ("save_steps", False) and ("7", fire.format(1)) in found[1][2]
    assert "does not change training" in page_of(sorted(tmp_path.iterdir()), tmp_path)


def test_settings_differ_by_their_values_not_by_how_these_are_shown(tmp_path):
    long = "x" * 300
    write_run(tmp_path / "a", format_instruction=f"{long}1", columns=None, temperature=1)
    write_run(tmp_path / "b", format_instruction=f"{long}2", columns={}, temperature=1.0)
    assert [name for name, _, _ in differing_settings(read_study(sorted(tmp_path.iterdir())))] == ["format_instruction"]


def test_settings_in_which_runs_of_one_group_differ_are_listed_and_other_numbers_of_samples_are_noted(tmp_path):
    folders = []
    for method, seed, samples in [("fire", 0, 4), ("fire", 1, 8), ("srpo", 0, 8), ("veto", 0, 0)]:
        final = {"accuracy": 0.5, "distinct_answers": 2.0, "eval_samples": samples} if samples else {"accuracy": 0.5}
        settings = {"method": method, "seed": seed, "eval_samples": samples, "eval_subset_seed": seed + 10_000}
        folders.append(write_run(tmp_path / f"{method}{seed}", (final, final), **settings))
    study = read_study(folders)
    values = [("4", "FIRE"), ("8", "SRPO, FIRE"), ("0", "Veto")]
    assert [(name, matters, sorted(found)) for name, matters, found in differing_settings(study)] == [
        ("eval_samples", False, sorted(values))
    ]
    assert study.notes == [
        "small, GSM8K: the runs have different numbers of samples per held-out problem (4 for FIRE; 8 for SRPO, FIRE). Their numbers "
        "of different answers cannot be compared, because these grow with the samples."
    ]


def test_final_values_of_all_measures_are_in_a_table(tmp_path):
    evaluation = {"accuracy": 0.5, "sampled_accuracy": 0.4, "pass_at_4": 0.8, "also_asdiv": 0.3}
    (row,) = overview(read_study([write_run(tmp_path / "a", (evaluation, evaluation))]))
    assert row["Held-out accuracy, sampled (%)"] == "40.00" and row["Held-out accuracy on asdiv (%)"] == "30.00"


# ---- Rollouts ---------------------------------------------------------------------------------------------------------------


def write_rollouts(folder, name, steps, count=4, question="How many?", **columns):
    (folder / "rollouts").mkdir(exist_ok=True)
    rows = [
        {
            "step": step,
            "uid": f"u{i}",
            "prompt": f"<user>\nSolve.\n\n{question} {i}<end>\n<assistant>",
            "response": f"{step}-{i}",
            "expected": "1",
            "submitted": None if i else "1",
            "correct": not i,
            "feedback": [{"name": "verifier", "text": f"wrong {i}"}] if i else [],
        }
        | columns
        for step in steps
        for i in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / f"{name}.parquet")


def shown_rollouts(found):
    texts = found["texts"]
    return [
        dict(zip(found["columns"], row, strict=True)) | {"question": texts[row[5]], "response": texts[row[6]]}
        for row in found["rows"]
    ]


def test_rollouts_of_evaluations_and_of_steps_between_the_first_and_the_last(tmp_path):
    run = write_run(tmp_path / "a", max_steps=200)
    write_rollouts(run, "step_000001-000100", range(1, 101))
    for step in (101, 200):
        write_rollouts(run, f"step_{step:06d}", [step])
    for step in (0, 100, 200):
        write_rollouts(run, f"eval_{step:06d}", [step])
    (run / "rollouts" / "notes.txt").write_text("no rollouts")
    notes = []
    rows = shown_rollouts(rollouts_of([*read_study([run]).runs], notes))
    assert notes == [] and {(row["kind"], row["step"]) for row in rows} >= {
        ("held-out", 0),
        ("held-out", 200),
        ("training", 1),
        ("training", 200),
    }
    assert len({row["step"] for row in rows if row["kind"] == "training"}) > 3 and ("held-out", 100) not in {
        (r["kind"], r["step"]) for r in rows
    }
    assert rows[0]["question"] == "How many? 0" and rows[0]["correct"] and not rows[1]["correct"]


def test_rollouts_share_the_room_of_the_page(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    for run in runs:
        write_rollouts(run, "eval_000010", [10], count=500, response="x" * 100 + run.name)
    found = rollouts_of(read_study(runs).runs, [], room=6000)
    counts = [sum(row[0] == position for row in found["rows"]) for position in range(3)]
    assert all(counts) and sum(map(len, found["texts"])) < 7000


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense", b"\x00" * 1000])
def test_rollouts_that_cannot_be_read_are_named(content, tmp_path):
    run = write_run(tmp_path / "a")
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000001.parquet").write_bytes(content)
    pq.write_table(pa.table({"step": [10]}), run / "rollouts" / "eval_000010.parquet")
    notes = []
    write_rollouts(run, "eval_000000", [0], feedback=["text"])
    assert rollouts_of(read_study([run]).runs, notes)["rows"] == [] and len(notes) == 3
    assert all("is left out of the browser of rollouts" in note for note in notes)


def test_the_question_is_what_prompts_do_not_share():
    start, end = "<|user|>\nSolve the task.\n\n", "<|end|>\n<|assistant|>\n"
    asked = ["A lunch box costs $8. How many?", "A lunch box costs $9.\nHow many?", "Ann has 3 [big] boxes."]
    assert list(questions(start + text + end for text in asked).values()) == asked
    assert questions([start]) == {start: start} and questions([]) == {}
    assert set(questions(["same\n", "same\nx"]).values()) == {"same\n", "x"}


# ---- Size -------------------------------------------------------------------------------------------------------------------


def test_the_page_of_sixty_long_runs_is_small(tmp_path):
    """Twelve methods with five seeds, 1,000 steps each, every column of the charts measured, rollouts and attribution saved."""
    chance = random.Random(0)
    columns = (
        "grad_norm",
        "correct_rate",
        "entropy",
        "response_length",
        "generated_tokens",
        "policy_kl",
        "policy_kl_max",
        "weight_step_relative",
    )
    methods = [
        "full_context", "on_policy_sft", "veto", "top_d", "tropd", "srpo",
        "demopsd", "scope", "no_attribution", "no_projection", "hard_gradient_excision", "fire",
    ]  # fmt: skip
    folders = []
    for method in methods:
        for seed in range(5):
            evaluations = [
                {"accuracy": chance.random(), "sampled_accuracy": chance.random(), "pass_at_4": 0.9} for _ in range(21)
            ]
            metrics = {column: [chance.random() for _ in range(1000)] for column in columns}
            folder = write_run(
                tmp_path / f"{method}{seed}", evaluations, max_steps=1000, metrics=metrics, method=method, seed=seed
            )
            write_rollouts(
                folder, "eval_001000", [1000], count=200, response="".join(chance.choices("0123456789 +-*/=\n", k=60))
            )
            folders.append(folder)
    (folders[-1] / "attribution").mkdir()
    (folders[-1] / "attribution" / "step_001000.json").write_text(json.dumps(attribution()))
    study = read_study(folders)
    path = write_page(study, accuracy_tables(study), tmp_path / "index.html")
    page = Page(path.read_text())
    assert path.stat().st_size < 6_000_000
    (setting,) = page.data["settings"]
    assert len(setting["groups"]) == 12 and sum(group["chosen"] for group in setting["groups"]) == 6
    assert len(setting["plots"]) == 1 + 4 + 8, "final accuracies, four charts of evaluations, eight of steps"
    assert setting["constant"] == ["Held-out problems solved by one of 4 samples: 90 (%)"]
    assert all(len(trace["x"]) <= MOST_POINTS for plot in setting["plots"] for trace in plot["traces"])
    assert {row[0] for row in page.data["rollouts"]["rows"]} == set(range(60)), "every run has some rollouts"


# ---- Hostile text, and a browser --------------------------------------------------------------------------------------------

LABEL = '<b>x</b> <a href="https://x.y">z</a> &lt;i&gt; %{y} <img src=x onerror=alert(1)>'


def test_labels_of_the_chart_library_hold_no_tag_but_its_own(tmp_path):
    assert html.unescape(literal(LABEL)) == LABEL and not set("<>") & set(literal(LABEL))
    assert all(not set("<>") & set(line) for lines in names(LABEL) for line in lines) and names("")[0] == [" "]
    rates = {"grad_norm": [0.5] * 5 + [90.0] * 5, "correct_rate": [0.1 * i for i in range(10)]}
    evaluation = {"accuracy": 0.5, f"also_{LABEL}": 0.3}
    runs = [
        write_run(
            tmp_path / str(seed),
            (evaluation,) * 2 + ({"accuracy": 0.7, f"also_{LABEL}": 0.4},),
            metrics=rates,
            seed=seed,
            method=f"m:{LABEL}",
            task=LABEL,
            model=LABEL,
        )
        for seed in range(2)
    ]
    found = Page(page_of(runs, tmp_path)).data["settings"][0]
    texts = [plot["heading"] for plot in found["plots"]]
    for plot in found["plots"]:
        texts += [axis["title"]["text"] for axis in plot["layout"].values()]
        texts += [
            text
            for trace in plot["traces"]
            for text in [trace.get("meta", ""), trace.get("hovertemplate", ""), *trace.get("text", [])]
        ]
    texts += [line for group in found["groups"] for lines in group["names"] for line in lines]
    tags = {tag for text in texts for tag in re.findall(r"<[^>]*>", text)}
    assert tags == {"<b>", "</b>", "<br>", "<extra>", "</extra>"} and any("&lt;a href=" in text for text in texts)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_the_page_and_complains_of_nothing(tmp_path):
    rates = {"grad_norm": [0.5 + i % 3 for i in range(10)]}
    runs = [
        write_run(tmp_path / str(i), (0.5, 0.6, 0.7), metrics=rates, seed=i, method=f"m:{LABEL}", task=HOSTILE)
        for i in range(2)
    ]
    (runs[0] / "attribution").mkdir()
    # chromium cannot print a lone surrogate
    (runs[0] / "attribution" / "step_000010.json").write_text(json.dumps(attribution(tokens=[HOSTILE, LABEL])))
    write_rollouts(runs[0], "eval_000010", [10], response=HOSTILE)
    page_of(runs, tmp_path)
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1440,6000"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--timeout=60000", "--dump-dom"),
        f"file://{tmp_path / 'index.html'}#show=m%3A&seeds=1&section=dynamics",
    ]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, errors="replace")
    if "<html" not in told.stdout:
        pytest.skip(f"chromium does not run here: {told.stderr[-200:]}")
    assert "CONSOLE" not in told.stderr, [line for line in told.stderr.splitlines() if "CONSOLE" in line]
    drawn = told.stdout.partition("<main>")[2].partition('<script type="application/gzip"')[0]
    assert drawn.count('class="main-svg"') >= 4 and "cannot be drawn" not in drawn
    assert "<img" not in drawn and not re.search(r'<a [^>]*href="https', drawn) and "onerror=alert" in html.unescape(drawn)


# ---- The picture ------------------------------------------------------------------------------------------------------------


def test_a_picture_of_a_suite_and_of_several_tasks(tmp_path, capsys):
    runs = [
        write_run(tmp_path / f"{task}{method}", (0.5, 0.6, 0.7), task=task, method=method, metrics={"correct_rate": [0.5] * 10})
        for task in ("gsm8k", "asdiv")
        for method in ("fire", "srpo")
    ]
    assert cli.main(["report", *map(str, runs), "-o", str(tmp_path / "picture.svg")]) == 0
    text = (tmp_path / "picture.svg").read_text()
    for label in (
        "small, GSM8K: held-out accuracy",
        "small, ASDiv: gradient norm before clipping",
        "FIRE",
        "SRPO",
        "95 % interval over problems",
    ):
        assert label in text
    assert CHARTS[0].title.lower() in text
