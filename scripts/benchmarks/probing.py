"""What the probe costs a ViT-S/16 in BF16, against plain hooks and against the floor of any such measurement."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.timing import Figure, quartiles, threads
from benchmarks.workloads import SIZES, Effort, configure, make_step, our_model
from qkexp import AttentionProbe
from qkexp.config import RunConfig
from qkexp.model.core import per_head
from qkexp.model.vit import attention_layers
from qkexp.sweep.job import prepare_cpu

BATCH = 8
EVERY = 50
# side of an image in pixels -> most that everything at every step may add to a step
SIDES = {224: 0.12, 512: 0.20}


class PlainHooks:
    """What a user writes: scores in float32, p · log(p + eps), numbers read in each layer; none by head."""

    def __init__(self, model: nn.Module):
        self.rows: list[dict[str, float]] = []
        self.on = False
        for layer in attention_layers(model).values():
            layer.core.register_forward_pre_hook(self.hook)

    @torch.no_grad()
    def hook(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        q, k, _, scale = args
        with torch.autocast(q.device.type, enabled=False):
            z = q.float() @ k.float().transpose(-2, -1) * per_head(scale)
            p = z.softmax(-1)
            entropy = -(p * (p + 1e-9).log()).sum(-1)
            found = {"entropy": entropy.mean(), "max_logit": z.max(), "max_abs_logit": z.abs().max()}
            found |= {"attn_max": p.amax(-1).mean(), "gap": (z.amax(-1) - z.mean(-1)).mean()}
            for name, x in (("q", q), ("k", k)):
                norm = x.float().norm(dim=-1)
                found |= {f"{name}_norm_mean": norm.mean(), f"{name}_norm_max": norm.max()}
        self.rows.append({name: value.item() for name, value in found.items()})

    @contextmanager
    def step(self, _step: int) -> Iterator[None]:
        self.on = True
        self.rows.clear()
        yield
        self.on = False


def setting(side: int) -> RunConfig:
    size = SIZES["vit_s"]
    keys = (f"data.image_size={side}", f"train.batch_size={BATCH}", f"data.samples={BATCH}")
    return configure(size, "cpu", *keys)


def cost_figures(effort: Effort) -> Iterator[Figure]:
    """Shares of a training step, by clock; peaks of memory; the distance to the floor."""
    for side, bound in SIDES.items():
        with threads(SIZES["vit_s"].threads):
            yield from _shares(side, bound, effort)
            if side == max(SIDES) or effort.quick:
                yield _memory(side)
        if effort.quick:
            return


def _shares(side: int, bound: float, effort: Effort) -> Iterator[Figure]:
    cfg = setting(side)
    model = our_model(cfg)
    step = make_step(model, cfg)
    probes = {"everything": AttentionProbe(model), "images=2": AttentionProbe(model, images=2)}
    probes["queries=64"] = AttentionProbe(model, queries=64)
    plain, idle = PlainHooks(model), AttentionProbe(model, every=0)
    ways: dict[str, Callable[[], Any]] = {
        "off": nullcontext,
        **{name: partial(probe.step, 0) for name, probe in probes.items()},
        "plain hooks": partial(plain.step, 0),
        "idle": partial(idle.step, 1),
    }
    rounds = 2 if effort.quick else 7 if side < max(SIDES) else 3
    clock: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began, used = time.perf_counter(), time.process_time()
            with way():
                step()
            if number:  # the first of each does not count
                clock[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
    own, below = {}, []
    for name, probe in probes.items():
        spent = []
        for _ in range(rounds):  # the floor beside it: both depend on the machine's mood
            below.append(floor(model, cfg))
            spent.append(spent_in(probe, step))
        own[name] = statistics.median(spent)
    lowest = statistics.median(below)

    def figure(name: str, label: str, target: float | None, factor: float = 1.0) -> Figure:
        shares = [factor * (a / b - 1.0) for a, b in zip(clock[name], clock["off"], strict=True)]
        low, middle, high = quartiles(shares)
        detail = {
            "quartiles": [low, high],
            "cpu_share": factor * (statistics.median(cpu[name]) / statistics.median(cpu["off"]) - 1.0),
            "seconds": [statistics.median(clock[name]), statistics.median(clock["off"])],
        }
        if name in own:
            detail["statistics_cpu_share"] = factor * own[name] / statistics.median(cpu["off"])
        return Figure("probe", f"ViT-S/16 at {side}, {label}", middle, "of a step", target, "below", detail)

    yield figure("everything", "everything at every step", bound)
    yield figure("images=2", "images=2", 0.04)
    yield figure("queries=64", "queries=64", None)
    yield figure("everything", f"every={EVERY}, on average", 0.01, 1.0 / EVERY)
    yield figure("idle", "hooks of a step that is not probed", None)
    yield figure("plain hooks", "plain hooks", None)
    ours, theirs = (
        [a - b for a, b in zip(cpu[name], cpu["off"], strict=True)] for name in ("everything", "plain hooks")
    )
    cheaper = statistics.median(theirs) / statistics.median(ours)
    yield Figure("probe", f"ViT-S/16 at {side}, plain hooks / ours (CPU time)", cheaper, "x", 1.5)
    detail = {"floor_seconds": lowest, "statistics_seconds": own["everything"]}
    distance = own["everything"] / lowest
    yield Figure("probe", f"ViT-S/16 at {side}, statistics / floor", distance, "x", None, detail=detail)


def spent_in(probe: AttentionProbe, step: Callable[[], None]) -> float:
    """Seconds of CPU of the statistics of a step alone, without the hooks."""
    spent, measure = [], probe._reducer.measure

    def timed(*args: Any) -> Any:
        began = time.process_time()
        found = measure(*args)
        spent.append(time.process_time() - began)
        return found

    with mock.patch.object(probe._reducer, "measure", timed), probe.step(0):
        step()
    return sum(spent)


def floor(model: nn.Module, cfg: RunConfig) -> float:
    """Seconds of CPU of one float32 product and one exponential of each score of a step, in cache."""
    layers = list(attention_layers(model).values())
    tokens = (cfg.data.image_size or 0) // 16
    N, H, d = tokens**2 + 1, layers[0].heads, layers[0].head_dim
    rows = min(N, 3 * 2**18 // N)
    q, k, z = torch.randn(rows, d), torch.randn(N, d), torch.empty(rows, N)
    y = -20.0 * torch.rand(rows, N)
    repeats, began = 40, time.process_time()
    for _ in range(repeats):
        torch.mm(q, k.t(), out=z)
        torch.exp(y, out=z)
    return (time.process_time() - began) / (repeats * z.numel()) * len(layers) * BATCH * H * N * N


# ---------------------------------------------------------------- memory


def _memory(side: int) -> Figure:
    """Peak of resident memory of a step beyond that of one that measures nothing: ours against plain hooks."""
    peaks = {}
    context = multiprocessing.get_context("spawn")
    for way in ("off", "ours", "plain"):
        with context.Pool(1) as pool:  # a process each: a peak is never taken back
            peaks[way] = pool.apply(peak_of, (side, way))
    ours, theirs = (max(0, peaks[way] - peaks["off"]) for way in ("ours", "plain"))
    detail = {"bytes": peaks}
    return Figure("probe", f"ViT-S/16 at {side}, peak memory, ours / plain", ours / theirs, "x", 0.10, "below", detail)


def peak_of(side: int, way: str) -> int:
    """Bytes: the most that this process has held after a step."""
    prepare_cpu()
    cfg = setting(side)
    model = our_model(cfg)
    step = make_step(model, cfg)
    ways: dict[str, Callable[[], Any]] = {
        "off": nullcontext,
        "ours": lambda: AttentionProbe(model).step(0),
        "plain": lambda: PlainHooks(model).step(0),
    }
    with ways[way]():
        step()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
