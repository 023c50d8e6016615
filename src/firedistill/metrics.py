"""Diagnostics of a training step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Metrics:
    """Means, maxima, totals and seconds, by the name of their column in `metrics.jsonl`.

    Every stage of a step returns its own; `merge` joins them. Tensors stay on their device until `on_host` or `row`, so that adding a
    value does not wait for it. Sums are added in the order in which the values came, however they are grouped into stages.
    """

    def __init__(self) -> None:
        self.sums: dict[str, list[Tensor]] = defaultdict(list)
        self.counts: dict[str, int | Tensor] = defaultdict(int)
        self.maxima: dict[str, Tensor] = {}
        self.totals: dict[str, Any] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # of a device, not in `seconds` yet

    def mean(self, where: Tensor | None = None, **values: Tensor | float) -> None:
        """Add values to means; every element of a tensor counts once.

        Args:
            where: which elements count; all by default.
        """
        count = None if where is None else where.sum()
        for name, value in values.items():
            value = torch.as_tensor(value)
            if value.numel():
                numbers = value.detach().float()
                self.sums[name].append(numbers.sum() if where is None else numbers.where(where, 0.0).sum())
                self.counts[name] += value.numel() if count is None else count

    def maximum(self, **values: Tensor | float) -> None:
        """Add values to maxima."""
        for name, value in values.items():
            value = torch.as_tensor(value)
            if value.numel():
                largest = value.detach().float().max()
                self.maxima[name] = torch.maximum(largest, self.maxima[name]) if name in self.maxima else largest

    def total(self, **amounts: float) -> None:
        """Add amounts to totals over the step and all processes; whole numbers stay whole."""
        for name, amount in amounts.items():
            self.totals[name] += amount.item() if hasattr(amount, "item") else amount  # numbers of PyTorch and NumPy

    @contextmanager
    def timed(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the wall time of the block, the work of the device included. The slowest process counts.

        On a GPU, the device reads the clock when it gets there, so that the host need not wait for it; `settle` reads the times.
        """
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            yield
            end.record(stream)
            self.spans.append((name, start, end))
        else:
            began = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - began

    def settle(self) -> Metrics:
        """Add the times that devices have measured, for which the host waits, to `seconds`; returns `self`."""
        for name, start, end in self.spans:
            end.synchronize()
            self.seconds[name] += start.elapsed_time(end) / 1000
        self.spans = []
        return self

    def on_host(self) -> Metrics:
        """A copy of CPU numbers that can be sent to another process."""
        copy = Metrics().merge([self]).settle()
        copy.sums = defaultdict(list, {name: [sum_in_order(parts).cpu()] for name, parts in self.sums.items()})
        copy.counts = defaultdict(int, {name: int(count) for name, count in self.counts.items()})
        copy.maxima = {name: value.cpu() for name, value in self.maxima.items()}
        return copy

    def merge(self, others: Iterable[Metrics]) -> Metrics:
        """Add what other stages of this process found; returns `self`."""
        for other in others:
            for name, parts in other.sums.items():
                self.sums[name].extend(parts)
                self.counts[name] += other.counts[name]
            self.maximum(**other.maxima)
            self.total(**other.totals)
            self.spans += other.spans
            for name, seconds in other.seconds.items():
                self.seconds[name] += seconds
        return self

    def row(self) -> dict[str, float]:
        """The values as numbers, by column."""
        means = {
            name: float(sum_in_order(parts)) / int(self.counts[name]) for name, parts in self.sums.items() if self.counts[name]
        }
        return {**self.settle().seconds, **self.totals, **means, **{name: float(value) for name, value in self.maxima.items()}}


def over_processes(parts: Iterable[Metrics]) -> Metrics:
    """The metrics of all processes, each of them `on_host`, as one: seconds are those of the slowest process."""
    parts = list(parts)
    joined = Metrics().merge(parts)
    joined.seconds = defaultdict(float, {name: max(part.seconds[name] for part in parts) for name in joined.seconds})
    return joined


def sum_in_order(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], start=parts[0])


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock reads what the work took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
