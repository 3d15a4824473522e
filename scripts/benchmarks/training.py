"""The section ``train``: what choices of the training loop cost, and what the loop itself takes."""

from __future__ import annotations

import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.timing import Figure, quartiles, ratio, side_by_side, threads
from benchmarks.workloads import SIZES, Effort, configure, run_loop
from qkexp.config import RunConfig
from qkexp.probe.probe import AttentionProbe
from qkexp.train import loop
from qkexp.train.precision import autocast

CHANGES: dict[str, tuple[str, ...]] = {
    **{f"block_norm={p}": (f"model.block_norm={p}",) for p in ("post", "res_post", "none", "parallel")},
    **{f"precision={p}": (f"precision={p}",) for p in ("fp32", "bf16_pure", "fp16")},
}
ACCUMULATE = 4


def train_figures(effort: Effort, device: str) -> Iterator[Figure]:
    """Steps of the real loop, micro size, without the probe: changed against plain, and its own share."""
    size = SIZES["micro"]
    steps = 6 if effort.quick else 40
    epoch = 22 * size.batch[device]  # of digits: an order of samples is drawn once in so many steps
    pairs = 2 if effort.quick else 7
    with threads(size.threads), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = ("probe.every=0", f"train.steps={steps}", f"data.samples={epoch}")
        plain = configure(size, device, *keys)
        for label, overrides in CHANGES.items():
            changed = configure(size, device, *keys, *overrides)
            over, under = side_by_side(
                partial(a_step, changed, folder / "a"), partial(a_step, plain, folder / "b"), pairs
            )
            yield ratio("train", f"micro {label} / plain", over, under)
        yield accumulation(plain, configure(size, device, *keys, f"train.accumulate={ACCUMULATE}"), folder, pairs)
        longer = configure(size, device, *keys, f"train.steps={effort.block(size)}")  # tables are written as in a run
        yield from shares(longer, folder, pairs)


def a_step(cfg: RunConfig, folder: Path) -> float:
    return run_loop(cfg, folder).a_step()


def accumulation(plain: RunConfig, accumulated: RunConfig, folder: Path, pairs: int) -> Figure:
    over, under = side_by_side(
        partial(a_step, accumulated, folder / "a"), lambda: ACCUMULATE * a_step(plain, folder / "b"), pairs
    )
    label = f"micro accumulate={ACCUMULATE} / {ACCUMULATE} plain steps"
    return ratio("train", label, over, under, target=1.05, side="below")


def shares(cfg: RunConfig, folder: Path, rounds: int) -> Iterator[Figure]:
    """Forward (with the loss), backward and optimiser as shares of a step of the loop, and what is left over."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        with clocks() as spent:
            watch = run_loop(cfg, folder / "shares")
        step = watch.a_step()
        later = {part: sum(times[1:]) / (len(times) - 1) / step for part, times in spent.items()}
        for part, share in {**later, "outside": 1.0 - sum(later.values())}.items():
            found[part].append(share)
    for part, values in found.items():
        low, middle, high = quartiles(values)
        target = 0.05 if part == "outside" else None
        name = "step outside forward, backward, optimiser and probe" if part == "outside" else part
        detail = {"quartiles": [low, high], "rounds": rounds}
        yield Figure("train", f"micro {name} / step", middle, target=target, side="below", detail=detail)


@contextmanager
def clocks() -> Iterator[dict[str, list[float]]]:
    """Seconds of each forward pass (with its casts), loss, backward pass and optimiser step of the loops run inside."""
    spent: dict[str, list[float]] = defaultdict(list)
    began: dict[str, float] = {}

    def start(part: str, *_: Any) -> None:
        began[part] = time.perf_counter()

    def stop(part: str, *_: Any) -> None:
        spent[part].append(time.perf_counter() - began[part])

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if "reduction" in kwargs:  # of an evaluation
                return call(*args, **kwargs)
            start(part)
            result = call(*args, **kwargs)
            stop(part)
            return result

        return inner

    @contextmanager
    def forward(*args: Any) -> Iterator[None]:
        training = torch.is_grad_enabled()
        if training:
            start("forward")
        with autocast(*args):
            yield
        if training:
            stop("forward")

    @contextmanager
    def probing(*args: Any, **kwargs: Any) -> Iterator[None]:
        """The probe's part, though it measures nothing here: what is outside is meant without it."""
        began_at = time.perf_counter()
        with real_step(*args, **kwargs):
            entered = time.perf_counter()
            yield
            left = time.perf_counter()
        spent["probe"].append(entered - began_at + time.perf_counter() - left)

    real_step = AttentionProbe.step
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(AttentionProbe, "step", probing))
        stack.enter_context(mock.patch.object(loop, "autocast", forward))
        stack.enter_context(mock.patch.object(loop, "measure", return_value={}))
        stack.enter_context(mock.patch.object(loop, "objective", timed("loss", loop.objective)))
        stack.enter_context(mock.patch.object(Tensor, "backward", timed("backward", Tensor.backward)))
        torch.optim.Adam([torch.zeros(1)])  # the first instance puts PyTorch's own hooks around the method
        stack.enter_context(mock.patch.object(torch.optim.Adam, "step", timed("optimiser", torch.optim.Adam.step)))
        yield spent
