"""Benchmarks: each runs at tiny sizes, compares variants that do the same, and reports finite numbers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import stub_parts
import tiny
from firedistill import ops
from firedistill.benchmarks import (
    BENCHMARKS,
    attention,
    fields,
    fire_head,
    gpu,
    harness,
    load_benchmark,
    long_answers,
    missing_package,
    parts,
    prescribed,
    rollouts,
    sampled_step,
    sdpo,
    step,
    teacher_views,
)
from firedistill.benchmarks.gpu import inspection, kernels, layers, models, steps
from firedistill.benchmarks.gpu.page import floor, page, rates_of
from firedistill.benchmarks.gpu.sizes import FULL as FULL_GPU
from firedistill.benchmarks.gpu.sizes import QWEN, Setting
from firedistill.benchmarks.gpu.sizes import TINY as TINY_GPU
from firedistill.benchmarks.gpu.timing import Variant, timed
from firedistill.benchmarks.parts import Part
from firedistill.cli import main as cli
from firedistill.cli.bench import refuse_other_setting
from firedistill.config import SelfDistillConfig
from firedistill.memory import OutOfMemory
from firedistill.prompts import PromptEncoder, student_messages
from firedistill.rollouts.hf import MERGING_PAYS_AFTER, HFRolloutEngine

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
    "attention": attention.Sizes(((4, 2, 16),), ((2, 33, 33), (1, 5, 20)), calls=1, repeats=2),
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
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Where trl is installed, its notice and its use of what transformers has deprecated would be errors.
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        warnings.simplefilter("ignore", FutureWarning)
        for name, sizes in TINY.items():
            patch.setitem(load_benchmark(name).SIZES, "quick", sizes)
        assert cli.main(["bench", "--quick", "-o", str(folder)]) == 0
    made = [name for name in TINY if missing_package(load_benchmark(name)) is None]
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in made for kind in ("json", "png")}
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in made}


SIDES = {
    "fire_head": set(fire_head.EVERY),
    "attention": {"torch", "tiles"},
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
    problem = fire_head.Problem({"tokens": 12, "vocabulary": 60, "fields": 3, "over": 0.5}, 8, "float32", "cpu")
    losses, gradients = [], []
    for variant in (fire_head.LITERAL, fire_head.UNCHUNKED, fire_head.FUSED, fire_head.TWO_PASSES):
        losses.append(fire_head.VARIANTS[variant](problem))
        gradients.append(problem.student.grad.clone())
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-6)
    over = (problem.fire(loo_hidden=problem.views[1:]).chi > 0).float().mean()
    assert over == problem.tokens_over_radius == 0.5


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
    plain = steps.facts(steps.step("full_context", prescribed.ONE_BY_ONE))["teacher_tokens"]
    assert plain == sum(
        steps.teachers[prescribed.ONE_BY_ONE].view_tokens(rollout, "full") for rollout in steps.rollouts_with_feedback()
    )
    assert full["teacher_tokens"] < plain  # the common beginning of the prompts of a micro-batch is read once


def test_a_repeated_step_is_the_same_step():
    steps = prescribed.PrescribedSteps(STEP, MODEL, harness.Options())
    steps.set_over(1.0, of_tokens=True)
    seen = []
    for reading in (prescribed.SHARED, prescribed.ONE_BY_ONE, prescribed.SHARED):
        row = steps.step("fire", reading).row()
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
        (["fire_heads"], "unknown benchmark 'fire_heads'; known are fire_head, attention, teacher_views, step, fields"),
        (["step", "--repeats", "0"], "--repeats is 0"),
    ],
)
def test_user_errors_are_reported_in_one_line(arguments, message, capsys, tmp_path):
    assert cli.main(["bench", *arguments, "-o", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "multiplies", "expected"),
    [([], True, "bfloat16"), ([], False, "float32"), (["--dtype", "bfloat16"], False, "bfloat16")],
)
def test_models_are_of_the_type_that_the_cpu_multiplies(arguments, multiplies, expected, monkeypatch, tmp_path):
    def run(sizes, options):
        model, _ = prescribed.model_of(MODEL, options)
        yield harness.rows({"n": 1}, {"a": lambda: None}, 1, details=lambda _: {"dtype": str(model.dtype)})[0]

    monkeypatch.setattr(step, "run", run)
    monkeypatch.setattr("firedistill.models.attention.multiplies_bfloat16", lambda: multiplies)
    assert cli.main(["bench", "step", "--quick", "-o", str(tmp_path), *arguments]) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    assert found["options"]["dtype"] == expected and found["rows"][0]["details"]["dtype"] == f"torch.{expected}"


# ---- JSON while it runs, wall times on a GPU ----------------------------------------------------------------------------------


def test_what_was_measured_is_kept_when_a_benchmark_fails(monkeypatch, tmp_path):
    def run(sizes, options):
        yield harness.rows({"n": 1}, {"a": lambda: None}, 1)[0]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(step, "run", run)
    with pytest.raises(RuntimeError):
        cli.main(["bench", "step", "--quick", "-o", str(tmp_path)])
    assert [row["case"] for row in json.loads((tmp_path / "step.json").read_text())["rows"]] == [{"n": 1}]


@pytest.mark.parametrize("device, label", [("cpu", "processor seconds"), ("cuda", "seconds")])
def test_figures_show_the_clock_that_says_something(device, label, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: shown.append(self.axes[0].get_xlabel()))
    rows = harness.rows({"n": 1}, {"a": lambda: None}, 1)
    harness.plot({"title": "t", "rows": rows, "options": {"device": device}}, tmp_path / "x.png", {})
    assert shown == [f"{label} (median)"]


def test_steps_read_views_as_training_does():
    steps = prescribed.PrescribedSteps(STEP, MODEL, harness.Options())
    assert steps.teachers[prescribed.OWN].share_prefixes  # on a CPU
    assert not steps.teachers[prescribed.BATCHES].share_prefixes


# ---- Parts in a child process ---------------------------------------------------------------------------------------------------


def run_stubs(folder, *names, budget=60.0, **options):
    """The lines, the records and the missing parts of a call; limits are seconds."""
    lines: list[str] = []
    wanted = [Part(name, f"Title of {name}", 1.0, alone=name == "alone") for name in names]
    missing = parts.run_parts(wanted, folder, budget, stub_parts.measure, ("mark",), say=lines.append, **options)
    return lines, {name: parts.read(folder, name) for name in names}, [part.name for part in missing]


def test_a_part_that_fails_does_not_take_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SMALLEST_LIMIT", 3.0)
    names = ("first", "fails", "dies", "hangs", "skips", "last")
    lines, records, missing = run_stubs(tmp_path, *names)
    assert missing == [] and [line.split(":")[0] for line in lines] == list(names)
    states = {name: record["state"] for name, record in records.items()}
    assert states == dict(zip(names, ("done", "failed", "failed", "failed", "skipped", "done"), strict=True))
    assert {name: len(record["rows"]) for name, record in records.items()} == dict(zip(names, (2, 1, 1, 1, 0, 2), strict=True))
    assert records["fails"]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert "exit code 7" in records["dies"]["error"] and "took too long" in records["hangs"]["error"]
    assert records["skips"]["error"] == "there is no such thing here"
    assert records["first"]["process"] == records["fails"]["process"] != records["dies"]["process"]  # a new one after a failure
    assert records["last"]["mark"] == "mark" and records["last"]["title"] == "Title of last"
    assert "last words" in (tmp_path / "log.txt").read_text()


def test_a_variant_that_does_not_fit_does_not_take_the_others():
    def exhausted():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def limited():
        raise OutOfMemory("out of memory: shorter contexts")

    calls = []
    variants = {"a": Variant(exhausted), "b": Variant(partial(calls.append, 1)), "c": Variant(limited, facts={"size": 2})}
    rows = {row["variant"]: row for row in timed({"case": 1}, variants, repeats=3)}
    assert len(calls) == 4 and rows["b"]["repeats"] == 3 and rows["b"]["details"] == {}
    assert rows["a"]["details"] == {"error": "out of memory"} and "seconds" not in rows["a"]
    assert rows["c"]["details"] == {"size": 2, "error": "out of memory"}
    with pytest.raises(RuntimeError, match="illegal"):
        list(timed({}, {"a": Variant(partial(fail, "an illegal memory access"))}, repeats=1))


def fail(text):
    raise RuntimeError(text)


def test_a_named_part_that_the_budget_interrupts_keeps_its_measurements(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SMALLEST_LIMIT", 0.5)
    parts.write(tmp_path, {"part": "hangs", "state": parts.DONE, "rows": [{"variant": "old"}], "seconds": 0.1})
    lines, records, missing = run_stubs(tmp_path, "hangs", names=["hangs"], budget=3.0)
    assert missing == ["hangs"] and "the budget ended after" in lines[0]  # not "took too long": it is named
    assert records["hangs"]["rows"] == [{"variant": "old"}] and records["hangs"]["state"] == parts.DONE


def test_the_page_names_what_was_not_measured():
    record = {"part": "ceilings", "title": "Ceilings", "state": parts.DONE, "rows": []}
    assert "Every part has a result, and every check holds." in page([record])
    text = page([record], ["decoding", "tests"])
    assert "- not measured: decoding, tests" in text and "Every part has a result" not in text


def test_the_next_call_makes_what_is_missing(tmp_path, monkeypatch):
    _, _, missing = run_stubs(tmp_path, "first", "second", budget=0.5)
    assert missing == ["first", "second"] and not list(tmp_path.glob("*.json"))  # they are expected to take a second each
    assert run_stubs(tmp_path, "first")[2] == []
    lines, records, _ = run_stubs(tmp_path, "first", "second")
    assert [line.split(":")[0] for line in lines] == ["second"] and records["second"]["state"] == "done"
    assert run_stubs(tmp_path, "first", "second")[0] == []
    assert len(run_stubs(tmp_path, "first", "second", names=["first"])[0]) == 1  # named: again
    parts.write(tmp_path, {"part": "first", "state": parts.RUNNING, "rows": []})  # the command was killed
    assert len(run_stubs(tmp_path, "first", "second")[0]) == 1


def test_the_end_of_the_budget_interrupts_a_part_that_is_made_later(tmp_path):
    lines, records, missing = run_stubs(tmp_path, "hangs", "second", budget=3.0)
    assert missing == ["hangs", "second"] and records["hangs"]["state"] == "interrupted" and len(records["hangs"]["rows"]) == 1
    assert "the budget ended" in lines[0] and records["second"] is None
    assert run_stubs(tmp_path, "hangs", budget=2.0)[0] == []  # it is known to take longer
    said = []
    stubs = [parts.Part("hangs", "", 1.0)]
    (missing,) = parts.run_parts(stubs, tmp_path, 2.0, stub_parts.measure, ("",), say=said.append)
    assert missing.seconds == pytest.approx(1.2 * records["hangs"]["seconds"]) and not said


def test_a_part_that_changes_its_process_is_alone(tmp_path):
    _, records, _ = run_stubs(tmp_path, "first", "alone", "last")
    assert len({record["process"] for record in records.values()}) == 3


def test_the_child_ends_with_a_command_that_is_killed(tmp_path):
    program = (
        "import sys; from pathlib import Path; import stub_parts; from firedistill.benchmarks import parts\n"
        "if __name__ == '__main__': parts.run_parts([parts.Part('hangs', '', 1.0)], Path(sys.argv[1]), 99.0, stub_parts.measure, ('',))"
    )
    (tmp_path / "program.py").write_text(program)
    places = os.pathsep.join([str(Path(stub_parts.__file__).parent), *sys.path])
    command = subprocess.Popen([sys.executable, "program.py", "."], cwd=tmp_path, env=os.environ | {"PYTHONPATH": places})
    try:
        until(lambda: (record := parts.read(tmp_path, "hangs")) is not None and record["rows"])
        child = parts.read(tmp_path, "hangs")["process"]
    finally:
        command.kill()
        command.wait()
    until(lambda: not is_running(child))


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())  # nobody may have asked for its exit status


def test_a_file_that_is_no_record_is_named(tmp_path):
    for text in ("{", "[]", '{"rows": []}'):
        (tmp_path / "first.json").write_text(text)
        with pytest.raises(ValueError, match=r"first\.json"):
            run_stubs(tmp_path, "first")


# ---- The parts of `bench gpu` ---------------------------------------------------------------------------------------------------


def record_of(name: str, folder) -> parts.Record:
    (part,) = (part for part in gpu.PARTS if part.name == name)
    return parts.measured(part, folder, gpu.measure, (Setting("cpu", True, folder),))


IN_THIS_PROCESS = ("ceilings", "head-check", "head", "decoding", "step-1.5b", "waits")


@pytest.fixture(scope="module")
def gpu_records(tmp_path_factory):
    """The records of the parts that take a second on a CPU."""
    folder = tmp_path_factory.mktemp("gpu")
    return {name: record_of(name, folder) for name in IN_THIS_PROCESS}


def test_parts_run_on_a_cpu_at_tiny_sizes(gpu_records):
    for name, record in gpu_records.items():
        assert record["state"] == "done" and record["rows"], (name, record.get("error"))
        assert record["hardware"]["revision"]["source"] and record["sizes"]["matrix"] == TINY_GPU.matrix
        for row in record["rows"]:
            assert math.isfinite(row.get("seconds", {"median": 0.0})["median"])
            assert all(operations >= 0 and read >= 0 for operations, read in row.get("work") or [])
    assert "/tmp" not in json.dumps(gpu_records)


def test_every_part_names_a_function_and_a_shape_that_exist():
    for call in gpu.CALLS.values():
        module, function, *shapes = call.split()
        assert callable(getattr(importlib.import_module(f"{gpu.__name__}.{module}"), function)) and {*shapes} <= QWEN.keys()


def test_the_head_is_right_in_both_types(gpu_records):
    rows = gpu_records["head-check"]["rows"]
    assert {row["case"]["type"] for row in rows} == {"float32", "bfloat16"} and {row["case"]["over"] for row in rows} == {
        0.0,
        0.5,
        1.0,
    }
    assert all(row["details"]["within"] for row in rows)


def test_the_head_is_measured_as_in_training(monkeypatch, tmp_path):
    """With the default floor, once more without compiling, and the record says whether it was compiled."""
    assert SelfDistillConfig(output_dir="x", use_cpu=True).log_prob_floor == kernels.FLOOR
    seen, first_pass = Counter(), fire_head.first_pass

    def noted(*arguments, **settings):
        seen[settings["log_prob_floor"], *ops.fire_head.COMPILED_DEVICES] += 1
        return first_pass(*arguments, **settings)

    monkeypatch.setattr(ops.fire_head, "COMPILED_DEVICES", {"cpu"})
    monkeypatch.setattr(ops.fire_head, "COMPILER", "eager")
    monkeypatch.setattr(ops.fire_head, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(fire_head, "first_pass", noted)
    rows = [row for row in record_of("head", tmp_path)["rows"] if row["case"]["over"] == 0.5]
    assert set(seen) == {(kernels.FLOOR, "cpu"), (kernels.FLOOR,)} and len(set(seen.values())) == 1
    told = {row["variant"]: row["details"].get("head_compiled") for row in rows}
    assert told.pop(kernels.NOT_COMPILED) is told.pop(kernels.PRODUCTS_ALONE) is None
    assert len(told) == 2 + len(TINY_GPU.chunks) and set(told.values()) == {True}


def test_a_head_that_is_not_compiled_is_named(monkeypatch, tmp_path, gpu_records):
    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    for name in ("head", "head-check", "step-1.5b"):
        facts = [row["details"] for row in gpu_records[name]["rows"] if row.get("details")]
        assert False in [fact.get("head_compiled") for fact in facts]
        assert "not compiled (" not in page([gpu_records[name]])  # on a CPU, it never is
        assert ": the head is not compiled (" in page([gpu_records[name] | {"device": "cuda"}])
    whole = [row["details"] for row in gpu_records["step-1.5b"]["rows"] if row["variant"] == "whole step"]
    assert all(fact["first_step_seconds"] > 0 for fact in whole)
    torch._dynamo.reset()
    ops.fire_head.compiled.cache_clear()
    monkeypatch.setattr(ops.fire_head, "COMPILED_DEVICES", {"cpu"})
    monkeypatch.setattr(ops.fire_head, "COMPILER", backend)
    rows = record_of("head-check", tmp_path)["rows"]
    assert {row["details"].get("head_compiled") for row in rows} == {False, None} and all(
        row["details"]["within"] for row in rows
    )


def test_a_wrong_head_is_found(monkeypatch, tmp_path):
    right = kernels.fused
    monkeypatch.setattr(kernels, "fused", lambda *arguments: tuple(1.1 * value for value in right(*arguments)))
    record = record_of("head-check", tmp_path)
    assert not any(row["details"]["within"] for row in record["rows"] if row["variant"].startswith("fire_head_loss"))
    assert "head-check: fire_head_loss is wrong" in page([record])


def test_a_step_has_the_radius_that_was_asked_for(gpu_records):
    rows = [row for row in gpu_records["step-1.5b"]["rows"] if row["variant"] == "whole step"]
    whole = {(row["case"]["method"], row["case"].get("over")): row for row in rows}
    full, tenth, every = whole["full_context", None], whole["fire", 0.1], whole["fire", 1.0]
    assert {row["details"]["correct_rate"] for row in rows} == {0.5}
    assert {(row["details"]["merges_adapter"], row["details"]["fused_layers"]) for row in rows} == {(True, 2)}
    assert full["details"]["generated_tokens"] == TINY_GPU.prompts * TINY_GPU.response
    assert full["details"]["step_scale"] == 1.0 < tenth["details"]["step_scale"] < every["details"]["step_scale"]
    assert tenth["details"]["chi_active"] < 0.5 and every["details"]["chi_active"] > 0.9
    assert tenth["details"]["teacher_tokens"] < every["details"]["teacher_tokens"]


@pytest.mark.parametrize("over", [0.0, 1.0])
def test_the_rows_that_are_compiled_compute_what_the_head_computes(over):
    """Gradient, loss, radius, weights and entropy, in float32."""
    case = {"tokens": 7, "vocabulary": 61, "fields": 3, "over": over}
    problem = fire_head.Problem(case, 8, "float32", "cpu")
    settings = {"loo_hidden": problem.views[1:]} if over else {"attribution": False, "projection": False}
    output = problem.fire(**settings)
    problem.backward(output.loss)
    with torch.no_grad():
        z, views = problem.head(problem.student), problem.head(problem.views)
    scale, step_scale = torch.tensor(1 / 7), torch.tensor(problem.step_scale)
    if over:
        gradient, loss, rho, alpha, entropy = kernels.outside_rows(z, views[0], scale, step_scale, views[1:])
        assert torch.allclose(alpha, output.alpha, rtol=1e-3, atol=1e-5)
    else:
        gradient, loss, rho, energy, entropy = kernels.inside_rows(z, views[0], scale)
        rho = rho / step_scale
        assert torch.allclose(energy, output.energy, rtol=1e-3)
    assert torch.allclose(loss, output.token_loss, rtol=1e-3, atol=1e-6) and torch.allclose(rho, output.rho, rtol=1e-4)
    assert torch.allclose(entropy, output.entropy, rtol=1e-4)
    assert torch.allclose(gradient @ problem.embedding, problem.student.grad, rtol=1e-3, atol=1e-6)


def test_the_work_of_a_forward_pass_is_what_pytorch_counts():
    shape = TINY_GPU.shapes["1.5b"]
    model = models.random_model(shape, "cpu")
    model.set_attn_implementation("eager")
    length = 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.base_model(torch.zeros(1, length, dtype=torch.long))
    upper_half = 2 * shape.layers * shape.hidden * length**2  # of attention, which causal kernels leave out
    assert counter.get_total_flops() == pytest.approx(shape.forward([length]) + upper_half, rel=0.01)


def test_the_shapes_are_those_of_qwen():
    published = {"1.5b": 1.31e9, "3b": 2.77e9, "14b": 13.1e9}  # parameters without embeddings, from the model cards
    for name, parameters in published.items():
        assert QWEN[name].in_layers == pytest.approx(parameters, rel=0.01)


def test_random_models_are_as_peaked_as_trained_ones():
    model = models.random_model(dataclasses.replace(TINY_GPU.shapes["1.5b"], vocabulary=20_000), "cpu")
    with torch.no_grad():
        logits = model(torch.randint(3, 20_000, (4, 8))).logits.float()
    best = (logits / 0.8).softmax(-1).topk(128).values.sum(-1)
    assert best.min() > 0.95


def test_products_alone_have_the_chunk_of_the_device(monkeypatch):
    problem, sizes = fire_head.Problem({"tokens": 6, "vocabulary": 40, "fields": 1, "over": 0.0}, 8, "float32", "cpu"), []
    monkeypatch.setattr(fire_head, "default_chunk", lambda vocabulary, gpu: sizes.append((vocabulary, gpu)) or 4)
    project = problem.head.project
    monkeypatch.setattr(problem.head, "project", lambda states: sizes.append(len(states)) or project(states))
    fire_head.run_products(problem)
    assert sizes == [(40, False), 4, 4, 2, 2]


def test_a_compiler_that_fails_leaves_the_other_rows(monkeypatch, tmp_path):
    def failing(*arguments, **settings):
        def fails(*inputs):
            raise RuntimeError("no compiler\nis installed")

        return fails

    monkeypatch.setattr(kernels.torch, "compile", failing)
    record = record_of("rows", tmp_path)
    assert record["state"] == "done"
    errors = [row["details"].get("error") for row in record["rows"] if row["variant"].startswith("torch.compile")]
    assert errors == ["RuntimeError: no compiler is installed"] * 4
    assert sum("seconds" in row for row in record["rows"]) == 2 * 4
    assert "rows: torch.compile (aot_eager): RuntimeError: no compiler is installed" in page([record])


def test_products_with_the_head_are_measured_as_training_makes_them(monkeypatch, tmp_path):
    product, allowed = torch.mm, {}
    flags = torch.backends.cuda.matmul

    def mm(a, b, **settings):
        allowed.setdefault((*a.shape, b.shape[1]), flags.allow_bf16_reduced_precision_reduction)
        return product(a, b, **settings)

    monkeypatch.setattr(torch, "mm", mm)
    before = flags.allow_bf16_reduced_precision_reduction
    record_of("ceilings", tmp_path)
    n, tokens, shape = TINY_GPU.matrix, TINY_GPU.head_tokens, TINY_GPU.shapes["1.5b"]
    assert allowed == {
        (n, n, n): before,
        (tokens, shape.hidden, shape.vocabulary): False,
        (tokens, shape.vocabulary, shape.hidden): False,
    }


def test_a_part_starts_without_the_head_of_another(tmp_path):
    fire_head.output_embedding(40, 8, "float32", "cpu")
    gpu.measure("ceilings", Setting("cpu", True, tmp_path))
    assert fire_head.output_embedding.cache_info().currsize == 0


def test_decoding_is_measured_in_every_mode_of_the_engine():
    model, tokenizer = tiny.random_model(), tiny.byte_tokenizer()
    growing, at_fixed_addresses = (HFRolloutEngine(model, tokenizer, fixed=choice) for choice in (False, True))
    at_fixed_addresses.decoder.captures = True  # as on a GPU

    def state(engine):
        return engine.merge_adapter, engine.fuse_layers, engine.decoder is not None and engine.decoder.captures

    for engine in (growing, at_fixed_addresses):
        before = state(engine)
        seen = {name: state(engine) for name in steps.switched(engine, [*steps.MODES, steps.AS_IN_TRAINING])}
        assert seen.pop("as in training") == before == state(engine)
        assert seen == {name: mode for name, mode in steps.MODES.items() if engine is at_fixed_addresses or not mode[2]}


def test_long_responses_have_a_context_that_holds_them(monkeypatch, tmp_path):
    """At the sizes for a GPU: the tiny ones fit into the default."""
    asked: list[tuple[int, dict]] = []
    monkeypatch.setattr(steps, "steps_of", lambda setting, *more, **given: asked.append((setting.sizes.response, given)) or [])
    assert list(steps.long_responses(Setting("cpu", False, tmp_path))) == []
    assert [response for response, _ in asked] == [1024, 4096]
    prompt = FULL_GPU.prompt + max(FULL_GPU.fields) * len(FULL_GPU.fields)
    for response, given in asked:
        budget = SelfDistillConfig(output_dir=str(tmp_path / "run"), max_new_tokens=response, use_cpu=True, **given).budget
        assert budget.context - response > 1.2 * prompt, "prompts are up to 1.2 times as long as `sizes.prompt`"


@pytest.mark.parametrize("captures", [True, False])
def test_decoding_without_graphs_comes_last_and_once(captures, monkeypatch, tmp_path):
    """Before it, every batch size by graphs, and long prompts with what a GPU does in training."""
    lengths: list[list[int]] = []

    @contextmanager
    def trainer_of(*arguments, **settings):
        with models.trainer_of(*arguments, **settings) as trainer:
            trainer.rollout_engine = engine = HFRolloutEngine(trainer.model, trainer.setup.tokenizer, fixed=True)
            engine.decoder.captures = captures
            engine.generate = lambda prompts, *more, **others: (
                lengths.append([len(prompt) for prompt in prompts]) or [SimpleNamespace(token_ids=[1])]
            )
            yield trainer

    monkeypatch.setattr(steps, "trainer_of", trainer_of)
    monkeypatch.setattr(steps, "per_token", lambda sample, few, *more: ([1.0], {"tokens": sample(few)}))
    found = [(row["case"]["batch"], row["case"]["prompt"], row["variant"]) for row in record_of("decoding", tmp_path)["rows"]]
    by_graph = ["merged, layers not fused, graph", "unmerged, graph"] if captures else []
    expected = [(batch, 40, name) for batch in (1, 3) for name in ("as in training", *by_graph)]
    expected += [(3, 60, "as in training"), (3, 40, "merged, fused layers, no graph")]
    assert found == expected and [len(prompts) for prompts in lengths] == [batch for batch, *_ in expected]
    assert all(prompts[0] == pytest.approx(prompt, abs=2) for prompts, (_, prompt, _) in zip(lengths, expected, strict=True))


def test_captures_that_fail_are_named(monkeypatch, tmp_path):
    """On a CPU they do."""

    @contextmanager
    def trainer_of(*arguments, **settings):
        with models.trainer_of(*arguments, **settings) as trainer:
            trainer.rollout_engine = HFRolloutEngine(trainer.model, trainer.setup.tokenizer, fixed=True)
            trainer.rollout_engine.decoder.captures = True
            yield trainer

    monkeypatch.setattr(steps, "trainer_of", trainer_of)
    record = record_of("decoding", tmp_path)
    captured = {row["variant"]: row["details"].get("captured") for row in record["rows"]}
    of_modes = {name: False if graph else None for name, (_, _, graph) in steps.MODES.items()}
    assert captured == of_modes | {"as in training": False}
    assert "decoding: unmerged, graph: sampled without CUDA graphs (batch 1" in page([record])


def test_an_operation_without_a_kernel_is_recorded_and_passed_over(monkeypatch, tmp_path):
    def refuses(*arguments):
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(layers, "by_products", refuses)
    rows = record_of("one-token", tmp_path)["rows"]
    failed = {row["variant"] for row in rows if "error" in row.get("details", {})}
    assert failed == {"attention, torch.compile"} and {row["variant"] for row in rows} > failed | {
        "rotation and attention, PyTorch"
    }


def test_fused_layers_are_measured_and_tested_within_five_minutes():
    names = [part.name for part in gpu.PARTS]
    last = max(names.index("decoding"), names.index("tests"))
    assert sum(part.seconds for part in gpu.PARTS[: last + 1]) <= 300


def test_prompts_have_several_lengths_and_the_mean_that_was_asked_for():
    tokenizer = prescribed.word_tokenizer()
    task = models.GPUTask(FULL_GPU, tokenizer)
    encoder = PromptEncoder(tokenizer)
    lengths = [len(encoder.encode(student_messages(task, example))) for example in task.examples("train", 32)]
    assert len(set(lengths)) > 4 and sum(lengths) / 32 == pytest.approx(FULL_GPU.prompt, abs=2)
    assert lengths[0] == pytest.approx(FULL_GPU.prompt, abs=2)  # a batch of one


def test_the_wall_time_excludes_the_look_for_child_processes(monkeypatch):
    monkeypatch.setattr(harness, "processor_time", lambda: time.sleep(0.1) or 0.0)
    (row,) = harness.rows({}, {"nothing": lambda: None}, repeats=3)
    assert row["seconds"]["median"] < 0.05


def test_runs_with_the_same_seed_share_nothing(monkeypatch, tmp_path):
    """Neither a process nor what was compiled; the workspace of products is left to the option `deterministic`."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = [inspection.apart(os.getenv, "TORCHINDUCTOR_CACHE_DIR"), inspection.apart(os.getpid)]
    assert found[0] != str(tmp_path) == os.environ["TORCHINDUCTOR_CACHE_DIR"] and found[1] != os.getpid()
    runs = []

    def first_product(function, setting, settings):
        runs.append((function, settings, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return {"factor": np.full(1, len(runs))}, [0.0]

    monkeypatch.setattr(inspection, "apart", first_product)
    rows = list(inspection.same_seed(Setting("cpu", True, tmp_path)))
    assert runs == [
        (inspection.lab_run, settings, None) for settings in ({}, {}, {"deterministic": True}, {"deterministic": True})
    ]
    assert [(row["details"]["equal"], row["details"]["largest_difference"]) for row in rows] == [(False, 1.0)] * 2


def test_the_profile_is_of_merged_decoding():
    assert FULL_GPU.profiled_tokens >= MERGING_PAYS_AFTER


@pytest.mark.parametrize("printed", ["", "7 deselected in 0.01s"])
def test_a_part_without_any_test_fails(printed, monkeypatch, tmp_path):
    ended = SimpleNamespace(stdout=printed, stderr="", returncode=5)
    monkeypatch.setattr(inspection.subprocess, "run", lambda *arguments, **settings: ended)
    with pytest.raises(RuntimeError, match="pytest ran no test"):
        list(inspection.tests(Setting("cuda", True, tmp_path, tests=tmp_path)))
    ended.stdout, ended.returncode = "2 passed, 1 skipped in 0.01s", 0
    (row,) = inspection.tests(Setting("cuda", True, tmp_path, tests=tmp_path))
    assert row["details"] == {"passed": 2, "skipped": 1, "errors": 0, "names_failed": []}


def test_waits_are_counted_by_place():
    with inspection.counted_waits(is_gpu=False) as found, warnings.catch_warnings():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
    ((place, count),) = found.items()
    assert count == 3 and place.startswith("tests/test_bench.py:")
    assert inspection.short_path("/a/site-packages/transformers/masking.py") == "transformers/masking.py"
    assert inspection.short_path("/a/src/firedistill/step.py") == "firedistill/step.py"


@pytest.mark.gpu
def test_a_wait_is_counted():
    number = torch.ones((), device="cuda")
    with inspection.counted_waits(is_gpu=True) as found:
        number.item()
        number.item()
    assert sum(found.values()) == 2


# ---- The page -------------------------------------------------------------------------------------------------------------------

CEILINGS = [
    {"case": {}, "variant": "copy", "seconds": {"median": 2.0, "min": 2.0, "max": 2.0}, "work": [[0, 8e12]]},
    {"case": {}, "variant": "matrix product", "seconds": {"median": 1.0, "min": 1.0, "max": 1.0}, "work": [[5e14, 1]]},
]


def test_a_floor_adds_phases_and_each_takes_what_limits_it():
    rates = rates_of(CEILINGS)
    assert rates == (5e14, 4e12)
    assert floor([[1e15, 4e12], [0.0, 8e12]], rates) == 2.0 + 2.0  # operations, then bytes
    assert floor(None, rates) is None and floor([[1, 1]], None) is None


def test_the_page_names_hardware_floors_and_what_is_slow():
    machine = {"processor": "x", "python": "3", "torch": "2.11.0", "revision": {"commit": "abc", "source": "def"}}
    device = {"name": "H200", "memory_mib": 143771, "driver": "580", "cuda": "13.0"}

    def record(name, rows, **more):
        facts = {"part": name, "title": f"About {name}", "state": "done", "seconds": 3.0, "hardware": machine | {"gpu": device}}
        return {**facts, "rows": rows, **more}

    spread = {"median": 0.004, "min": 0.003, "max": 0.005}
    fast = {"case": {"batch": 1}, "variant": "merged", "seconds": spread, "work": [[0, 8e9]], "peak_mib": 12.3}
    slow = {
        "case": {"batch": 8},
        "variant": "as in training",
        "seconds": spread,
        "work": [[0, 2e9]],
        "details": {"tokens": 112},
    }
    other = slow | {"variant": "a|b"}
    phase = {"case": {"method": "fire"}, "variant": "teacher", "seconds": spread, "work": [[0, 4e9]]}
    failed = record("head", [], state="failed", error="OOM")
    text = page([record("ceilings", CEILINGS), record("decoding", [fast, slow, other]), record("step-3b", [phase]), failed])
    assert "H200 (140 GiB, driver 580, CUDA 13.0); torch 2.11.0" in text and "revision abc, source def" in text
    assert "| batch 1 | merged | 4 ms | 3 ms | 5 ms | 2 ms | 2.00 | 12 |  |" in text
    assert r"| batch 8 | a\|b | 4 ms | 3 ms | 5 ms | 500 µs | **8.00** |  | tokens 112 |" in text
    expected = ["- 8.0: decoding: as in training (batch 8)", "- 4.0: step-3b: teacher (method fire)"]
    assert "2 rows take more than 3 times their floor:\n\n" + "\n".join(expected) + "\n\n## " in text
    assert "- head: failed: OOM" in text
    assert "no floors" in page([record("decoding", [fast])])


# ---- The command ----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["gpu"], ["step", "--device", "cuda"]])
def test_without_a_gpu_one_line_says_what_to_do(arguments, capsys, tmp_path):
    assert cli.main(["bench", *arguments, "-o", str(tmp_path / "out")]) == 2
    assert "there is no GPU that PyTorch" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["warp-drive"], "unknown part warp-drive; known are ceilings, decoding"),
        (["--budget", "0"], "--budget is 0; expected seconds above 0"),
        (["--device", "cpu"], "add --tiny"),
        (["--page"], "holds no measurements"),
    ],
)
def test_mistakes_in_bench_gpu_are_reported_in_one_line(arguments, message, capsys, tmp_path):
    assert cli.main(["bench", "gpu", *arguments, "-o", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_devices_and_sizes_are_not_mixed_in_a_folder(gpu_records, capsys, tmp_path):
    parts.write(tmp_path, gpu_records["ceilings"] | {"device": "cuda"})
    assert cli.main(["bench", "gpu", "--device", "cpu", "--tiny", "-o", str(tmp_path)]) == 2
    assert "holds measurements of cuda at tiny sizes" in " ".join(capsys.readouterr().err.split())


def test_gpus_are_not_mixed_in_a_folder(tmp_path, monkeypatch):
    """A record of a CPU may name the GPU of its machine."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    facts = {"state": "done", "rows": [], "device": "cuda", "tiny": False}
    for part, name in (("ceilings", "NVIDIA H200"), ("decoding", "NVIDIA A100-SXM4-80GB")):
        refuse_other_setting(tmp_path, Setting("cuda", False, tmp_path))
        parts.write(tmp_path, facts | {"part": part, "hardware": {"gpu": {"name": name}}})
    with pytest.raises(ValueError, match="measurements of NVIDIA A100-SXM4-80GB, and the GPU here is NVIDIA H200: .* --output"):
        refuse_other_setting(tmp_path, Setting("cuda", False, tmp_path))
    for part in ("ceilings", "decoding"):
        parts.write(tmp_path, parts.read(tmp_path, part) | {"device": "cpu"})
    refuse_other_setting(tmp_path, Setting("cpu", False, tmp_path))


@pytest.mark.slow
def test_bench_gpu_runs_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parts, "SMALLEST_LIMIT", 600.0)  # other tests may share the processors
    elsewhere = {*IN_THIS_PROCESS, "step-3b", "step-14b", "vllm"} - {"ceilings"}
    monkeypatch.setattr(gpu, "PARTS", tuple(part for part in gpu.PARTS if part.name not in elsewhere))
    arguments = ["bench", "gpu", "--device", "cpu", "--tiny", "--tests", "", "--budget", "3000", "-o", str(tmp_path)]
    assert cli.main(arguments) == 0
    records = {part.name: parts.read(tmp_path, part.name) for part in gpu.PARTS}
    errors = {name: record.get("error") for name, record in records.items() if record["state"] != "done"}
    assert errors.keys() == {"tests"}, errors
    assert records["same-seed"]["rows"][0]["details"]["equal"]
    assert (tmp_path / "profile-update.trace.json.gz").stat().st_size > 0
    text = (tmp_path / "gpu.md").read_text()
    assert f"To look at:\n\n- tests: skipped: {errors['tests']}\n" in text and ": failed" not in text
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert cli.main(arguments) == 0 and cli.main([*arguments, "--page"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}


FAKE_PROGRAM = """
import json, pathlib, sys
def main():
    command, name, *words = sys.argv[1:]
    output, cost = pathlib.Path(words[words.index("-o") + 1]), {cost}
    output.mkdir(exist_ok=True)
    spread = dict(median=cost, min=0, max=9)
    rows = [
        dict(case=dict(over=0.1), variant="fire", seconds=spread, processor_seconds=spread),
        dict(case=dict(over=0.1), variant="fire", peak_mib=100 * cost),
        dict(case={extra}, variant="fire", peak_mib=None, processor_seconds=spread),
    ]
    (output / f"{{name}}.json").write_text(json.dumps(dict(rows=rows, seen=[command, *words])))
"""


def test_revisions_are_compared_in_turns(tmp_path, monkeypatch, capsys):
    """Two trees with a program of other costs, under other names, and one case that only the first one has."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    import compare_revisions

    for name, module, cost, extra in (("old", "fake.cli", 4, "dict(fields=2)"), ("new", "fake.program", 3, "dict()")):
        package = tmp_path / name / "src" / Path(*module.split(".")[:-1])
        package.mkdir(parents=True)
        (package / f"{module.split('.')[-1]}.py").write_text(FAKE_PROGRAM.format(cost=cost, extra=extra))
        (tmp_path / name / "pyproject.toml").write_text(f'[project]\nscripts = {{ firedistill = "{module}:main" }}\n')
    monkeypatch.setattr(compare_revisions, "tree_of", lambda revision, folder: tmp_path / revision)
    found: list = []
    monkeypatch.setattr(compare_revisions, "table", lambda revisions, turns: found.extend([revisions, turns]))
    monkeypatch.setattr(sys, "argv", ["compare_revisions.py", "old", "new", "step", "--turns", "2", "--model", "smollm2"])
    compare_revisions.main()
    revisions, turns = found
    key, memory = ("over 0.1", "fire", "processor_seconds"), ("over 0.1", "fire", "peak_mib")
    assert revisions == ["old", "new"] and len(turns) == 2
    assert turns[0] == [{key: 4, memory: 400, ("fields 2", *key[1:]): 4}, {key: 3, memory: 300, ("", *key[1:]): 3}]
    monkeypatch.undo()
    rows = list(zip(*(column.cells for column in compare_revisions.table(revisions, turns).columns), strict=True))
    assert rows == [
        ("over 0.1", "fire", "CPU seconds", "4", "3", "0.750"),
        ("over 0.1", "fire", "peak MiB", "400", "300", "0.750"),
    ]


def test_a_revision_that_does_not_exist_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    import compare_revisions

    with pytest.raises(SystemExit, match="no-such-revision"):
        compare_revisions.tree_of("no-such-revision", tmp_path)
