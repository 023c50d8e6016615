"""Metrics of a step: means, maxima, totals and seconds, joined over stages and processes."""

from __future__ import annotations

import pickle
import random
import time
from typing import ClassVar

import numpy
import pytest
import torch

from firedistill.metrics import Metrics, over_processes

CPU = torch.device("cpu")


def metrics(seconds: dict[str, float] | None = None, totals: dict[str, int] | None = None, **means) -> Metrics:
    found = Metrics()
    found.mean(**means)
    found.total(**(totals or {}))
    found.seconds.update(seconds or {})
    return found


def test_every_element_counts_once_in_a_mean():
    found = Metrics()
    found.mean(x=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), y=2.0)
    found.mean(x=10.0, flags=torch.tensor([True, False, False, False]), counts=torch.tensor([1, 2]))
    assert found.row() == {"x": 4.0, "y": 2.0, "flags": 0.25, "counts": 1.5}


def test_a_mask_chooses_what_counts():
    found = Metrics()
    found.mean(
        where=torch.tensor([True, False, True]), x=torch.tensor([1.0, torch.nan, 5.0]), none=torch.tensor([True, True, False])
    )
    found.mean(where=torch.tensor([False, True]), x=torch.tensor([torch.inf, 12.0]))
    found.mean(where=torch.tensor([False, False]), x=torch.tensor([7.0, 8.0]), y=torch.tensor([1.0, 2.0]))
    expected = {"x": 6.0, "none": 0.5}
    assert found.row() == expected, "y has no value"
    assert over_processes([found.on_host(), Metrics()]).row() == expected
    found.mean(x=torch.tensor([1.0, torch.nan]), where=torch.tensor([True, True]))
    assert numpy.isnan(found.row()["x"]), "nothing but the mask hides a value"


def test_maxima_and_totals():
    found = Metrics()
    found.maximum(m=torch.tensor([3.0, -5.0]), least=torch.tensor([-3.0, -5.0]))
    found.maximum(m=torch.tensor([[4.0], [1.0]]))
    found.total(rollouts=3, tokens=7)
    found.total(tokens=True, none=0)
    assert found.row() == {"rollouts": 3, "tokens": 8, "none": 0, "m": 4.0, "least": -3.0}
    assert all(isinstance(found.row()[name], int) for name in ("rollouts", "tokens", "none"))


def test_numbers_of_any_kind_keep_their_values():
    found = Metrics()
    found.maximum(m=1.5)
    found.total(a=torch.tensor(0.75), b=numpy.float32(0.75), whole=numpy.int64(2))
    found.total(whole=torch.tensor(3))
    assert found.row() == {"a": 0.75, "b": 0.75, "whole": 5, "m": 1.5}
    assert type(found.row()["whole"]) is int and type(found.row()["b"]) is float


def test_no_values_make_no_column():
    found = Metrics()
    found.mean(x=torch.empty(0), y=torch.empty(0, 3))
    found.maximum(m=torch.empty(0))
    assert found.row() == {} and Metrics().merge([found, Metrics()]).row() == {}


def test_values_are_detached_and_summed_in_float32():
    found, loss = Metrics(), torch.ones(300, dtype=torch.bfloat16, requires_grad=True)
    found.mean(x=loss * 1)
    found.maximum(m=loss * 1)
    assert found.row() == {"x": 1.0, "m": 1.0}, "a sum of 300 ones in bfloat16 is 256"
    tensors = [*found.sums["x"], *found.maxima.values()]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_blocks_are_timed_and_times_add_up():
    found = Metrics()
    for _ in range(2):
        with found.timed("seconds_score", CPU):
            time.sleep(0.02)
    assert found.row()["seconds_score"] >= 0.04


class Clock:
    """An event of a device that has not got there until the host waits for it."""

    recorded: ClassVar[list[Clock]] = []

    def __init__(self, enable_timing):
        self.reached = False

    def record(self, stream):
        assert stream == "the current one of cuda:1"
        self.recorded.append(self)

    def synchronize(self):
        for clock in self.recorded[: self.recorded.index(self) + 1]:
            clock.reached = True

    def elapsed_time(self, other):
        assert self.reached and other.reached
        return 250.0 * (self.recorded.index(other) - self.recorded.index(self))  # milliseconds


def test_the_host_does_not_wait_for_the_times_of_a_gpu(monkeypatch):
    for name, value in {
        "Event": Clock,
        "current_stream": lambda device: f"the current one of {device}",
        "synchronize": None,
        "recorded": [],
    }.items():
        monkeypatch.setattr(Clock if name == "recorded" else torch.cuda, name, value)
    found, gpu = Metrics(), torch.device("cuda", 1)
    with found.timed("seconds_rollout", gpu), found.timed("seconds_score", gpu):
        pass
    other = Metrics()
    with other.timed("seconds_score", gpu):
        pass
    joined = metrics({"seconds_score": 1.0}).merge([found, other])
    assert not any(clock.reached for clock in Clock.recorded) and joined.seconds == {"seconds_score": 1.0}
    expected = {"seconds_rollout": 0.75, "seconds_score": 1.0 + 0.25 + 0.25}
    assert pickle.loads(pickle.dumps(joined.on_host())).row() == expected
    assert joined.settle().seconds == joined.settle().seconds == expected == joined.row()


def test_merging_in_any_grouping_gives_identical_bits():
    """Values of very different size, whose sum in float32 depends on the order and on the grouping."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    values = [torch.randn(3, generator=generator) * 10.0 ** draw.randint(-4, 4) for _ in range(40)]

    def stage(part: list[torch.Tensor]) -> Metrics:
        found = Metrics()
        for value in part:
            found.mean(x=value)
            found.maximum(m=value)
            found.total(n=1)
        return found

    expected = stage(values).row()
    assert expected["n"] == 40
    grouped_sums = set()
    for _ in range(20):
        cuts = [0, *sorted(draw.sample(range(1, 40), draw.randint(0, 6))), 40]
        stages = [stage(values[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        grouped_sums.add(float(sum(sum(part.sums["x"]) for part in stages)))
        while len(stages) > 1:  # join neighbours, in any order
            i = draw.randrange(len(stages) - 1)
            stages[i : i + 2] = [stages[i].merge([stages[i + 1]])]
        assert stages[0].row() == expected
        assert over_processes([stages[0].on_host()]).row() == expected
    assert len(grouped_sums) > 1, "the test must be able to fail"


def test_merging_adds_to_the_first_and_leaves_the_others():
    first = metrics({"seconds_score": 1.0}, {"n": 2}, x=torch.tensor([1.0, 2.0]))
    second = metrics({"seconds_score": 0.5}, {"n": 3, "more": 1}, x=6.0, y=4.0)
    assert first.merge([second, metrics(y=2.0)]) is first
    assert first.row() == {"seconds_score": 1.5, "n": 5, "more": 1, "x": 3.0, "y": 3.0}
    assert second.row() == {"seconds_score": 0.5, "n": 3, "more": 1, "x": 6.0, "y": 4.0}


def test_the_copy_for_other_processes_is_complete_and_independent():
    first = metrics({"seconds_score": 1.0}, {"n": 2}, x=torch.tensor([1.0, 2.0]))
    first.maximum(m=torch.tensor([1.0]))
    sent = pickle.loads(pickle.dumps(first.on_host()))
    row = first.row()
    assert sent.row() == row == {"seconds_score": 1.0, "n": 2, "x": 1.5, "m": 1.0}
    sent.merge([metrics({"seconds_score": 1.0}, {"n": 1}, x=9.0)])
    sent.maximum(m=torch.tensor([7.0]))
    assert first.row() == row


def test_processes_add_up_and_the_slowest_counts():
    first = metrics({"seconds_score": 1.0, "seconds_rollout": 3.0}, {"n": 2}, x=torch.tensor([1.0, 2.0]))
    second = metrics({"seconds_rollout": 4.0, "seconds_update": 5.0}, {"n": 3, "failed_verdicts": 1}, x=6.0, y=torch.empty(0))
    first.maximum(m=torch.tensor([3.0, 5.0]))
    second.maximum(m=torch.tensor([4.0]), own=torch.tensor([-1.0]))
    row = over_processes(part.on_host() for part in (first, second)).row()
    seconds = {"seconds_score": 1.0, "seconds_rollout": 4.0, "seconds_update": 5.0}
    assert row == seconds | {"n": 5, "failed_verdicts": 1, "x": 3.0, "m": 5.0, "own": -1.0}


@pytest.mark.gpu
def test_tensors_stay_on_their_device_until_they_are_read():
    found = Metrics()
    found.mean(x=torch.ones(3, device="cuda"))
    found.maximum(m=torch.ones(3, device="cuda"))
    assert found.sums["x"][0].is_cuda and found.maxima["m"].is_cuda
    assert not any(tensor.is_cuda for tensor in [*found.on_host().sums["x"], *found.on_host().maxima.values()])
    assert found.row() == {"x": 1.0, "m": 1.0}
