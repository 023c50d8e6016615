"""What the host waits for, where the time goes, whether a seed decides every bit, and the tests that need a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from firedistill.benchmarks import harness
from firedistill.benchmarks.gpu.models import EveryStep, MeasuredTrainer, PrescribedEngine, random_model, trainer_of
from firedistill.benchmarks.gpu.sizes import Setting
from firedistill.benchmarks.gpu.timing import row_of
from firedistill.benchmarks.parts import Skipped
from firedistill.config import SelfDistillConfig
from firedistill.prompts import student_messages
from firedistill.recipes import build_config
from firedistill.rollout import Sampling

# ---- What the host waits for, and where the time goes ----------------------------------------------------------------------------


def waits(setting: Setting) -> Iterator[harness.Row]:
    """Operations that made the host wait for the device in a FIRE step, by the line of Python that called them.

    Explicit synchronization, as at the end of a step, is not counted by PyTorch.
    """
    sizes, stack = setting.sizes, ExitStack()
    found: list[Counter[str]] = []

    def after(step: int) -> None:
        if step == sizes.warm_up_steps - 1:
            found.append(stack.enter_context(counted_waits(setting.is_gpu)))
        elif step == sizes.warm_up_steps:
            stack.close()

    model = random_model(sizes.shapes["1.5b"], setting.device)
    steps = sizes.warm_up_steps + 1
    with stack, trainer_of(setting, model, callback=EveryStep(after=after), max_steps=steps) as trainer:
        trainer.over = 0.1
        trainer.train(preflight=False)
    case = {"prompts": sizes.prompts, "response": sizes.response}
    (places,) = found
    sampling = sum(count for place, count in places.items() if "rollouts/" in place or "generation/" in place)
    total = sum(places.values())
    facts = {"waits": total, "in_sampling": sampling, "in_sampling_per_token": sampling / sizes.response}
    yield row_of(case, "all", details=facts)
    for place, count in places.most_common(20):
        yield row_of(case, place, details={"waits": count})


@contextmanager
def counted_waits(is_gpu: bool) -> Iterator[Counter[str]]:
    """Counts PyTorch's warnings of synchronizing operations inside the block, by file and line."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = warnings.showwarning

        def count(message: Any, category: Any, filename: str, line: int, file: Any = None, text: str | None = None) -> None:
            if "synchronizing CUDA operation" in str(message):
                found[f"{short_path(filename)}:{line}"] += 1
            else:
                shown(message, category, filename, line, file, text)

        warnings.showwarning = cast(Any, count)
        if is_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if is_gpu:
                torch.cuda.set_sync_debug_mode("default")


def short_path(path: str) -> str:
    """A file of a package without the folders above the package."""
    parts = Path(path).parts
    roots = [i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages", "src")]
    return "/".join(parts[roots[-1] + 1 :] if roots else parts[-2:])


def profile(setting: Setting) -> Iterator[harness.Row]:
    """A trace for chrome://tracing or Perfetto, a table of all operators, and a row for each of the most expensive ones."""
    sizes, shape = setting.sizes, setting.sizes.shapes["1.5b"]
    model = random_model(shape, setting.device)
    stack, profilers = ExitStack(), []

    def before(step: int) -> None:  # after sampling
        if step == sizes.warm_up_steps:
            profilers.append(stack.enter_context(profiled(setting)))

    def after(step: int) -> None:
        if step == sizes.warm_up_steps:
            stack.close()

    steps = sizes.warm_up_steps + 1
    with stack, trainer_of(setting, model, callback=EveryStep(before, after), max_steps=steps) as trainer:
        trainer.over = 0.1
        prompts = [
            trainer.encoder.encode(student_messages(trainer.task, e)) for e in trainer.setup.train_examples[: sizes.prompts]
        ]
        engine, trainer.rollout_engine = trainer.rollout_engine, PrescribedEngine(shape.vocabulary)
        sampling = Sampling(0.8, 0.95, sizes.profiled_tokens)
        engine.generate(prompts, sampling, seed=0)
        with profiled(setting) as decoding_profile:
            engine.generate(prompts, sampling, seed=0)
        yield from operators(setting, decoding_profile, "decoding", sizes.profiled_tokens)
        trainer.train(preflight=False)
    yield from operators(setting, profilers[0], "update", 1)


@contextmanager
def profiled(setting: Setting) -> Iterator[Any]:
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setting.is_gpu else [])
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        yield profiler
        harness.synchronize()
        profiler.wall = time.perf_counter() - start


def operators(setting: Setting, profiler: Any, what: str, divisor: int) -> Iterator[harness.Row]:
    events = profiler.key_averages()
    column = "self_device_time_total" if setting.is_gpu else "self_cpu_time_total"
    table = events.table(sort_by=column, row_limit=60, max_name_column_width=90)
    (setting.folder / f"profile-{what}.txt").write_text(table, encoding="utf-8")
    profiler.export_chrome_trace(str(setting.folder / f"profile-{what}.trace.json.gz"))
    # On a GPU the kernels; the time of operators is that of their kernels once more.
    kind = torch.autograd.DeviceType.CUDA if setting.is_gpu else torch.autograd.DeviceType.CPU
    timed_events = [e for e in events if e.device_type == kind and not getattr(e, "is_user_annotation", False)]
    busy = sum(getattr(event, column) for event in timed_events) * 1e-6
    calls = sum(event.count for event in events if event.key.startswith("aten::"))
    case = {"what": what}
    facts = {"busy_seconds": busy, "busy_share": busy / profiler.wall, "operators": calls / divisor}
    yield row_of(case, "whole", [profiler.wall], details=facts)
    for event in sorted(timed_events, key=lambda event: -getattr(event, column))[:15]:
        yield row_of(case, event.key[:120], [getattr(event, column) * 1e-6], details={"calls": event.count})


# ---- Equal bits, tests -----------------------------------------------------------------------------------------------------------


def same_seed(setting: Setting) -> Iterator[harness.Row]:
    """Two runs of the lab model with one seed: is every number of the adapter the same, is every loss?

    Measured again with the package's option `deterministic`. Every run has a process of its own, and compiles anew.
    """
    for deterministic in (False, True):
        runs = [apart(lab_run, setting, {"deterministic": True} if deterministic else {}) for _ in range(2)]
        (first, losses), (second, other_losses) = runs
        different = [name for name in first if not np.array_equal(first[name], second[name])]
        facts = {
            "equal": not different and losses == other_losses,
            "steps": len(losses),
            "first_different_loss": next(
                (i for i, (a, b) in enumerate(zip(losses, other_losses, strict=True)) if a != b), None
            ),
            "tensors": len(first),
            "different_tensors": len(different),
            "largest_difference": max((float(abs(first[n] - second[n]).max()) for n in different), default=0.0),
        }
        yield row_of({"deterministic": deterministic}, "second run against the first", details=facts)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, which finds nothing that was compiled before."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ProcessPoolExecutor(1, get_context("spawn"), use_cache, (folder,)) as process,
    ):
        return process.submit(function, *arguments).result()


def use_cache(folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def lab_run(setting: Setting, settings: dict[str, Any]) -> tuple[dict[str, np.ndarray], list[float]]:
    """The adapter after a few steps of the recipe `lab`, in float32, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "output_dir": str(Path(folder) / "run"),
            "max_steps": setting.sizes.lab_steps,
            "eval_size": 0,
            "attribution_examples": 0,
            "log_rollouts": False,
            "save_strategy": "no",
            "use_cpu": not setting.is_gpu,
        }
        if setting.tiny:
            given |= {"max_new_tokens": 8, "per_device_train_batch_size": 2}
        trainer = MeasuredTrainer(args=build_config(SelfDistillConfig, "lab", given | settings))
        trainer.train(preflight=False)
        losses = [row["loss"] for row in trainer.rows]
        trained = {name: p.detach().float().cpu() for name, p in trainer.model.named_parameters() if p.requires_grad}
        return {name: p.numpy().copy() for name, p in trained.items()}, losses


def tests(setting: Setting) -> Iterator[harness.Row]:
    """The tests that are marked `gpu`. A test module that needs a package which is not installed counts as an error."""
    if setting.tests is None:
        raise Skipped("the test suite is not at hand: it is part of the repository, not of the installed package")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--continue-on-collection-errors", str(setting.tests)]
    start = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, cwd=setting.tests.parent)
    print(ended.stdout, ended.stderr, flush=True)
    if ended.returncode not in (0, 1, 5):  # passed, failed, none collected
        raise RuntimeError(f"pytest ended with {ended.returncode}: {' '.join((ended.stdout + ended.stderr).split())[-300:]}")
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", ended.stdout)}
    if not counts:
        raise RuntimeError(f"pytest ran no test: {' '.join((ended.stdout + ended.stderr).split())[-300:]}")
    counts["errors"] = counts.pop("error", 0) + counts.get("errors", 0)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    yield row_of({"marked": "gpu"}, "pytest", [time.perf_counter() - start], details={**counts, "names_failed": failed})
