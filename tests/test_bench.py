"""Benchmarks: each runs at tiny sizes, compares variants that do the same, and reports finite numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import platform

import pytest
import torch

from firedistill.benchmarks import (
    BENCHMARKS,
    fields,
    fire_head,
    harness,
    load_benchmark,
    long_answers,
    missing_package,
    prescribed,
    rollouts,
    sampled_step,
    sdpo,
    step,
    teacher_views,
)
from firedistill.cli import main as cli

MODEL = prescribed.ModelSizes(layers=2, width=64, vocabulary=100)
STEP = prescribed.StepSizes(prompt=30, fields=(5, 9), responses=tuple(range(4, 14)), micro_batch=2)
TINY = {
    "fire_head": fire_head.Sizes(
        tokens=6,
        vocabulary=50,
        width=8,
        fields=2,
        over=(0.5, 1.0),
        token_sweep=(6,),
        vocabulary_sweep=(50,),
        field_sweep=(2,),
        whole_step=9,
        literal_tokens=(),
        repeats=2,
    ),
    "teacher_views": teacher_views.Sizes(prompt=30, orders=((5, 9), (9, 5)), responses=(7,), model=MODEL, repeats=2),
    "step": step.Sizes(step=STEP, over=(0.1,), model=MODEL, repeats=1),
    "rollouts": rollouts.Sizes(batches=(3,), prompts=(3, 9), new_tokens=5, model=MODEL, repeats=2),
    "sdpo": sdpo.Sizes(dataclasses.replace(STEP, checkpointing=True), (2,), MODEL, repeats=1, memory=False),
    "sampled_step": sampled_step.Sizes(
        dataclasses.replace(STEP, checkpointing=True), (5,), 0.5, MODEL, repeats=1, memory=False
    ),
    "long_answers": long_answers.Sizes(30, (5, 5), (5, 9), (2, 7), 0.5, MODEL, memory=False),
    "fields": fields.Sizes(prompt=30, field_words=5, fields=(1, 2), responses=(6, 6), model=MODEL, repeats=1, memory=False),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The JSON files of `firedistill bench --quick`, by benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in TINY.items():
            patch.setitem(load_benchmark(name).SIZES, "quick", sizes)
        assert cli.main(["bench", "--quick", "-o", str(folder)]) == 0
    made = [name for name in TINY if missing_package(load_benchmark(name)) is None]
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in made for kind in ("json", "png")}
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in made}


SIDES = {
    "fire_head": set(fire_head.EVERY),
    "teacher_views": {"one pass per view", "shared prefixes"},
    "step": {"full context", "fire"},
    "fields": {"full context", "fire", "fire, one pass per view"},
    "rollouts": {
        "generate, unmerged",
        "generate, merged",
        "own loop, unmerged",
        "own loop, merged",
        "bare forwards, merged",
    },
    "sdpo": {"trl", "full context"},
    "sampled_step": {"trl", "full_context", "fire"},
    "long_answers": {"full_context", "fire"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_benchmark_writes_finite_medians_of_all_variants(results, name):
    assert set(TINY) == set(BENCHMARKS)
    if name not in results:
        pytest.skip(f"{missing_package(load_benchmark(name))} is not installed")
    timed = [row for row in results[name]["rows"] if "seconds" in row]
    assert {row["variant"] for row in timed} == SIDES[name]
    for row in timed:
        for times in (row["seconds"], row["processor_seconds"]):
            assert 0 <= times["min"] <= times["median"] <= times["max"] < math.inf
        assert row["seconds"]["median"] > 0
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("relative", "relative_processor"))
    cases = {harness.case_name(row["case"]) for row in timed}
    for case in cases:  # all variants, the baseline first
        of_case = [row for row in timed if harness.case_name(row["case"]) == case]
        assert len(of_case) == len(SIDES[name]) and of_case[0]["relative"] == 1.0


@pytest.mark.slow
def test_the_hardware_is_recorded_without_the_name_of_the_machine(results):
    for result in results.values():
        hardware = result["hardware"]
        assert hardware["threads"] == torch.get_num_threads() and hardware["torch"] == torch.__version__
        assert hardware["processor"] is not None and hardware["processors"] >= 1
        text = json.dumps(result)
        assert str(prescribed.__file__) not in text and "/tmp" not in text
        assert platform.node() not in text or len(platform.node()) < 4


@pytest.mark.slow
def test_peak_memory_is_measured_in_a_new_process(results):
    peaks = [row["peak_mib"] for row in results["fire_head"]["rows"] if "peak_mib" in row]
    assert len(peaks) == 3  # two variants, and the whole step
    assert all(peak is None or 0 <= peak < 500 for peak in peaks)
    held = harness.peak_mib(hold, 64, 16)
    assert held == {64: None, 16: None} or (60 < held[64] < 90 and 12 < held[16] < 40)


def hold(*sizes: int):
    """Functions that fill and free the given numbers of MiB."""
    return {mib: lambda mib=mib: float(torch.ones(mib, 2**18).sum()) for mib in sizes}


def test_all_variants_of_the_head_compute_the_same_loss_and_gradient():
    setting = fire_head.Setting({"tokens": 12, "vocabulary": 60, "fields": 3, "over": 0.5}, 8, "float32", "cpu")
    losses, gradients = [], []
    for variant in (fire_head.LITERAL, fire_head.UNCHUNKED, fire_head.FUSED, fire_head.TWO_PASSES):
        losses.append(fire_head.VARIANTS[variant](setting))
        gradients.append(setting.student.grad.clone())
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-6)
    over = (setting.fire(loo_hidden=setting.views[1:]).chi > 0).float().mean()
    assert over == setting.tokens_over_radius == 0.5


def test_the_step_scale_leaves_one_response_in_ten_over_the_radius():
    steps = prescribed.PrescribedSteps(STEP, MODEL, harness.Options())
    steps.set_over(0.1)
    assert steps.step_scale >= 1
    counts = [int((tokens > 1 / steps.step_scale).sum()) for tokens in steps.excess()]
    assert sum(count > 0 for count in counts) == 1
    fire = steps.facts(steps.step("fire"))
    assert fire["tokens_over_radius"] == pytest.approx(sum(counts) / sum(STEP.responses))
    full = steps.facts(steps.step("full_context"))
    steps.set_over(1.0, of_tokens=True)
    all_over = steps.facts(steps.step("fire"))
    assert all_over["tokens_over_radius"] == 1
    # Beyond the full view, FIRE reads two views of one response in ten, then of all ten.
    one, all_ten = (facts["teacher_tokens"] - full["teacher_tokens"] for facts in (fire, all_over))
    assert 5 * one < all_ten < 20 * one
    plain = steps.facts(steps.step("full_context", share_prefixes=False))["teacher_tokens"]
    assert plain == sum(steps.teachers[False].view_tokens(rollout, "full") for rollout in steps.rollouts_with_feedback())
    assert full["teacher_tokens"] < plain  # the common beginning of the prompts of a micro-batch is read once


def test_a_repeated_step_is_the_same_step():
    steps = prescribed.PrescribedSteps(STEP, MODEL, harness.Options())
    steps.set_over(1.0, of_tokens=True)
    seen = []
    for share_prefixes in (True, False, True):
        row = steps.step("fire", share_prefixes).row()
        seen.append((row["loss"], row["grad_norm"], row["teacher_tokens"]))
    assert seen[0] == seen[2] and seen[0][1] > 0
    assert seen[1][:2] == pytest.approx(seen[0][:2], rel=0.05)  # one pass per view gives the same up to bfloat16
    assert seen[1][2] > seen[0][2]


def test_the_relative_time_compares_runs_of_the_same_turn(monkeypatch):
    """In every turn the second variant takes half the time of the first; the second turn is slower."""
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 28.0, 30.0, 34.0])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))
    first, second = harness.rows({}, {"a": lambda: None, "b": lambda: None}, 2, warm_up=False)
    assert first["seconds"] == {"median": 5.0, "min": 2.0, "max": 8.0} and first["relative"] == 1.0
    assert second["seconds"] == {"median": 2.5, "min": 1.0, "max": 4.0} and second["relative"] == 0.5


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["fire_heads"], "unknown benchmark 'fire_heads'; known are fire_head, teacher_views, step, fields"),
        (["step", "--repeats", "0"], "--repeats is 0"),
    ],
)
def test_user_errors_are_reported_in_one_line(arguments, message, capsys, tmp_path):
    assert cli.main(["bench", *arguments, "-o", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
