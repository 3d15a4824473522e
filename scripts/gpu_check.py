"""Is CUDA right, and how fast? Every attention variant on the GPU against the CPU, then the benchmark.

    python scripts/gpu_check.py --json gpu.json     # a few minutes on one GPU; exit 1 if a check fails
    python scripts/gpu_check.py --tiny              # the same code with the CPU in the GPU's place

A check takes one variant and precision: from the same weights and batch, two training steps on each device
must agree in loss, and the first in gradient norm and in the probe's frame; the GPU must use the backend that
the table says; and forward pass, hooks and reduction must not make the CPU wait for the GPU. Exit 2: no CUDA.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import report
from bench import row as figure_row
from benchmarks.sections import probe_figures, step_figures
from benchmarks.timing import Figure, threads
from benchmarks.workloads import SIZES, Effort, configure, one_batch, our_model
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from qkexp.compose import options
from qkexp.config import RunConfig
from qkexp.model.core import choose_backend
from qkexp.model.vit import attention_layers
from qkexp.probe.frame import Frame
from qkexp.probe.metrics import METRICS
from qkexp.probe.probe import AttentionProbe
from qkexp.sweep.job import prepare_cpu
from qkexp.train.optim import Updater
from qkexp.train.precision import autocast, resolve

STEPS = 2
EPS = {"fp32": torch.finfo(torch.float32).eps, "bf16": torch.finfo(torch.bfloat16).eps}
# Tolerances, in units of EPS, for a model of four blocks at its start. In float32 devices differ by the order
# in which they add: two kernels on one CPU differ by 1 (loss) and 6 (frame), a GPU may by ten times that. In
# BF16 each device rounds at other places (CUDA keeps norms and fused scores in float32), so that a maximum or
# a percentile may be off by one rounding, while losses and gradients average it out: two kernels on one CPU,
# and BF16 against float32, differ by up to 0.02 (loss), 0.4 (gradient) and 1 (frame).
LOSS = {"fp32": 64, "bf16": 0.25}
METRIC = {"fp32": 512, "bf16": 4}
SYNCHRONISED = "called a synchronizing CUDA operation"


@dataclass
class Check:
    """One variant in one precision. Differences are relative; ``error`` says why there are none."""

    variant: str
    precision: str
    backend: str = ""
    loss: float = math.nan
    gradient: float = math.nan
    metric: float = math.nan
    metric_name: str = ""
    waits: tuple[str, ...] = ()  # places where the CPU waited for the GPU
    error: str = ""

    @property
    def ok(self) -> bool:
        loss, metric = LOSS[self.precision] * EPS[self.precision], METRIC[self.precision] * EPS[self.precision]
        close = self.loss <= loss and self.gradient <= metric and self.metric <= metric  # NaN compares false
        return close and not self.waits and not self.error

    def as_json(self) -> dict[str, Any]:
        """Plain values; what was not measured is null."""
        known = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}
        return {**known, "ok": self.ok}


class Side:
    """A model on one device, stepped as the training loop steps it."""

    def __init__(self, cfg: RunConfig):
        self.cfg = cfg
        self.model = our_model(cfg).train()
        self.images, self.labels = one_batch(cfg)
        self.probe = AttentionProbe(self.model)
        self.updater = Updater(self.model, cfg.optim, STEPS)

    @property
    def backends(self) -> set[str]:
        return {layer.core.backend for layer in attention_layers(self.model).values()}

    def forward(self, step: int) -> Tensor:
        """The loss; the probe's reduction ends with it."""
        with self.probe.step(step):
            with autocast(self.cfg.precision, self.cfg.device):
                logits = self.model(self.images)
            return F.cross_entropy(logits.float(), self.labels)

    def update(self, step: int, loss: Tensor) -> tuple[float, float]:
        """Backward and optimiser: the loss and the gradient's norm, read."""
        self.updater.clear()
        loss.backward()
        norm = self.updater.grad_norms([float(n) for n in self.updater.measure()])["grad_norm"]
        self.updater.step(step)
        return loss.item(), norm


@functools.cache
def composed(variant: str, extra: tuple[str, ...]) -> RunConfig:
    return configure(SIZES["micro"], "cpu", f"attention={variant}", "attention.init=match", *extra)


def placed(of: Check, device: str, extra: tuple[str, ...]) -> RunConfig:
    """The configuration of a check on a device, with the backend that the table gives it there."""
    cfg = copy.deepcopy(composed(of.variant, extra))
    cfg.device, cfg.attention.backend = device, "auto"
    cfg.precision.autocast = "none" if of.precision == "fp32" else of.precision
    resolve(cfg)
    return cfg


def check(variant: str, precision: str, device: str, extra: tuple[str, ...]) -> Check:
    """Compare ``device`` with the CPU; whatever goes wrong is an error of this check and of no other."""
    result = Check(variant, precision)
    try:
        _compare(result, device, extra)
    except Exception as error:
        result.error = f"{type(error).__name__}: {str(error)[:300]} ({_place(error)})"
    return result


def _compare(result: Check, device: str, extra: tuple[str, ...]) -> None:
    cpu, gpu = (Side(placed(result, where, extra)) for where in ("cpu", device))
    gpu.model.load_state_dict(cpu.model.state_dict())
    attention = gpu.cfg.attention
    result.backend = "+".join(sorted(gpu.backends))
    expected = choose_backend(device, attention.softcap, attention.score_dtype)
    if gpu.backends != {expected} or cpu.backends != {"explicit"}:
        raise ValueError(f"backend {result.backend} on {device}, {cpu.backends} on cpu; expected {expected}, explicit")

    losses, gradients = [], []
    for step in range(STEPS):
        a = cpu.update(step, cpu.forward(step))
        if step:  # the first step compiles and fills caches, which may wait
            loss, result.waits = waits(lambda step=step: gpu.forward(step), device)  # type: ignore[misc]
        else:
            loss = gpu.forward(step)
        b = gpu.update(step, loss)
        losses.append(relative(a[0], b[0]))
        gradients.append(relative(a[1], b[1]))
        if not step:  # the same weights; Adam then turns rounding of vanishing gradients into whole steps
            result.metric, result.metric_name = frame_difference(cpu.probe.frame, gpu.probe.frame)
    result.loss, result.gradient = float(np.max(losses)), gradients[0]


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def frame_difference(a: Frame | None, b: Frame | None) -> tuple[float, str]:
    """Largest difference of any metric, layer and head, in the metric's own measure, and its name.

    Logits are measured by their head's max |z|, lengths by themselves, entropies and fractions by 1. The
    pair that attains max |z| may be another where two nearly tie, so its parts are compared as the product
    that they promise: scale · ‖q̂‖ · ‖k̂‖ · |cos| = max |z|. ``score_ulp`` is a power of two of max |z|.
    """
    assert a is not None
    assert b is not None
    x, y = a.to_pandas(), b.to_pandas()
    largest = x["max_abs_logit"].to_numpy()
    differences = {}
    for metric in METRICS:
        if metric.heads == "max_pair" or metric.name == "score_ulp":
            continue
        one, other = x[metric.name].to_numpy(np.float64), y[metric.name].to_numpy(np.float64)
        measure = largest if metric.unit == "logit" else np.abs(one) if "norm" in metric.name else 1.0
        differences[metric.name] = float(np.max(np.abs(one - other) / measure))
    for name, table in (("pair", x), ("pair on device", y)):
        product = table.score_scale * table.max_pair_q_norm * table.max_pair_k_norm * table.max_pair_cos.abs()
        differences[name] = float(np.max(np.abs(product.to_numpy() / table.max_abs_logit.to_numpy() - 1.0)))
    worst = max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
    return differences[worst], worst


def waits(work: Callable[[], Tensor], device: str) -> tuple[Tensor, tuple[str, ...]]:
    """Run ``work``: its result, and the places where the CPU waited for the GPU (none are seen on a CPU).

    PyTorch's mode "error" would stop at the first; "warn" names them all.
    """
    if device != "cuda":
        return work(), ()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            out = work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if SYNCHRONISED in str(w.message)]
    return out, tuple(sorted({f"{Path(w.filename).name}:{w.lineno}" for w in found}))


def check_detector(device: str) -> Check:
    """A check of :func:`waits`: it must see a wait that is there."""
    result = Check("(a wait is seen)", "fp32", loss=0.0, gradient=0.0, metric=0.0)
    x = torch.ones((), device=device)
    _, seen = waits(lambda: x * x.item(), device)
    if device == "cuda" and not seen:
        result.error = ".item() was not noticed: the checks below cannot see a wait"
    return result


def _place(error: BaseException) -> str:
    """File and line of the package where an error arose, or of whatever raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "qkexp" in Path(f.filename).parts] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


# ---------------------------------------------------------------- command line


def check_row(c: Check) -> tuple[str, ...]:
    eps = EPS[c.precision]
    bounds = LOSS[c.precision] * eps, METRIC[c.precision] * eps
    numbers = (
        f"loss {c.loss:.1e}/{bounds[0]:.1e}  gradient {c.gradient:.1e}/{bounds[1]:.1e}  "
        f"frame {c.metric:.1e}/{bounds[1]:.1e} {c.metric_name}"
    )
    stops = f"waits at {', '.join(c.waits)}" if c.waits else "no waits"
    return f"{c.variant} {c.precision} {c.backend}", c.error or f"{numbers}  {stops}", "ok" if c.ok else "FAILED"


def figure_cells(f: Figure) -> tuple[str, ...]:
    what, value, quartiles, *_ = figure_row(f)
    return what, f"{value}  ({quartiles})", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="CPU against CPU on a tiny model: finds typing errors only")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    console = Console(width=160)
    if not args.tiny and not torch.cuda.is_available():
        console.print("PyTorch sees no CUDA device here: nothing was checked (--tiny runs the same code on the CPU)")
        return 2
    prepare_cpu()
    torch.backends.cudnn.allow_tf32 = False  # or the patch embedding is not float32
    device = "cpu" if args.tiny else "cuda"
    name = "cpu in the place of a GPU" if args.tiny else torch.cuda.get_device_name()
    extra = ("model.depth=2", "train.batch_size=8") if args.tiny else ()
    sizes = ["micro"] if args.tiny else list(SIZES)
    start = time.perf_counter()

    table = Table(title=f"{name}, PyTorch {torch.__version__}: difference/tolerance", title_justify="left")
    for title in ("check", "result", "verdict"):
        table.add_column(title, overflow="fold")
    checks = [check_detector(device)]
    for precision in EPS:
        for variant in options("attention"):
            with threads(1):  # a micro step gains nothing from more, and loses where the cores are taken
                checks.append(check(variant, precision, device, extra))
            console.print(*check_row(checks[-1]), style="dim", highlight=False)
    figures, failure = [], ""
    try:
        for measure in (step_figures, probe_figures):
            figures += list(measure(sizes, Effort(quick=args.tiny), device))
    except Exception as error:
        failure = f"{type(error).__name__}: {error} ({_place(error)})"
    for cells in [*map(check_row, checks), *map(figure_cells, figures)]:
        table.add_row(*cells)
    if failure:
        table.add_row("benchmark", failure, "FAILED")
    console.print(table)

    ok = all(c.ok for c in checks) and not failure
    if args.json is not None:
        facts = {"device": device, "name": name, "ok": ok, "failure": failure, "seconds": time.perf_counter() - start}
        content = report(figures, **facts) | {"checks": [c.as_json() for c in checks]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
