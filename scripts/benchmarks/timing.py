"""Ratios measured side by side in one process: absolute times depend on the machine's mood."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from qkexp.sweep.launch import cores

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One measured number. ``target`` is a bound on it from ``side`` (above or below); None: for information."""

    section: str
    name: str
    value: float
    unit: str = "x"
    target: float | None = None
    side: str = "above"
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.side == "above" else self.value <= self.target


def synchronise(device: str) -> None:
    """Wait until the device has finished: a clock that is read earlier measures only the launch."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], repeat: int, device: str) -> float:
    """Time of one ``work()``, the mean of ``repeat`` in a row."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    synchronise(device)
    return (time.perf_counter() - start) / repeat


def side_by_side(a: Callable[[], T], b: Callable[[], T], pairs: int) -> tuple[list[T], list[T]]:
    """Measure A B A B …, after one of each that does not count: what A returned, and B."""
    a(), b()
    rounds = [(a(), b()) for _ in range(pairs)]
    return [first for first, _ in rounds], [second for _, second in rounds]


def ratio(section: str, name: str, over: list[float], under: list[float], **more: Any) -> Figure:
    """Median over pairs of ``over / under``, with its quartiles and both medians."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = quartiles(ratios)
    detail = {
        "quartiles": [low, high],
        "pairs": len(ratios),
        "seconds": [statistics.median(over), statistics.median(under)],
        **more.pop("detail", {}),
    }
    return Figure(section, name, middle, detail=detail, **more)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Compute on ``count`` CPU threads; None: on all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or cores())
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
