"""What is timed: models of two sizes, a bare step, and the real training loop."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkexp.compose import compose_sweep
from qkexp.config import RunConfig
from qkexp.model.vit import build_vit
from qkexp.record.run import RunWriter
from qkexp.train import data as datasets
from qkexp.train.batches import training_batches
from qkexp.train.loop import train
from qkexp.train.precision import autocast, resolve

CLASSES = 10


@dataclass(frozen=True)
class Size:
    """A model size and how often it is measured."""

    overrides: tuple[str, ...]
    image_size: int
    batch: dict[str, int]  # device -> images a step
    threads: int | None  # None: all cores
    variants: tuple[str, ...]  # whose probe is measured
    pairs: int  # timings of each side
    inner: int  # steps a timing
    blocks: int  # runs of the training loop, each side
    block: int  # steps of such a run; as long as the loop collects before it writes, or nearly
    step_target: float
    probe_target: float


SIZES = {
    "micro": Size(
        ("model=vit_micro",),
        image_size=8,
        batch={"cpu": 64, "cuda": 64},
        threads=1,  # as the runs of a sweep
        variants=("none", "rmsnorm", "softcap"),
        pairs=15,
        inner=10,
        blocks=9,
        block=120,
        step_target=3.0,
        probe_target=1.20,
    ),
    "vit_s": Size(
        ("model=vit_small",),
        image_size=224,
        batch={"cpu": 16, "cuda": 128},
        threads=None,
        variants=("none",),
        pairs=7,
        inner=1,
        blocks=5,
        block=4,
        step_target=1.2,
        probe_target=1.12,
    ),
}


@dataclass(frozen=True)
class Effort:
    """How much to measure; ``--quick`` proves only that everything runs."""

    quick: bool = False

    def pairs(self, size: Size) -> int:
        return 2 if self.quick else size.pairs

    def variants(self, size: Size) -> tuple[str, ...]:
        return size.variants[:1] if self.quick else size.variants

    def blocks(self, size: Size) -> int:
        return 2 if self.quick else size.blocks

    def inner(self, size: Size) -> int:
        return 1 if self.quick else size.inner

    def block(self, size: Size) -> int:
        return min(size.block, 6) if self.quick else size.block


def configure(size: Size, device: str, *overrides: str) -> RunConfig:
    """A run of a size on synthetic images."""
    common = ("data=synthetic", f"data.image_size={size.image_size}", f"data.classes={CLASSES}", "tracker=none")
    batch = size.batch[device]
    own = (f"device={device}", f"train.batch_size={batch}", f"data.samples={batch}", "optim.lr=1e-4")
    cfg = compose_sweep([*size.overrides, *common, *own, *overrides], single=True).runs[0][1]
    resolve(cfg)
    return cfg


def one_batch(cfg: RunConfig) -> tuple[Tensor, Tensor]:
    """Images and labels of one step, on the configured device."""
    return next(training_batches(datasets.load(cfg.data), cfg, first_step=0))


def our_model(cfg: RunConfig) -> nn.Module:
    images = datasets.load(cfg.data).train.plain(np.arange(cfg.train.batch_size))
    model = build_vit(cfg, image_size=image_side(cfg), channels=3, classes=CLASSES, like=images)
    return model.to(cfg.device)


def both_models(cfg: RunConfig) -> tuple[nn.Module, nn.Module]:
    """timm's model with timm's attention, fused as by default, and ours."""
    m = cfg.model
    sizes: dict[str, Any] = {"embed_dim": m.width, "depth": m.depth, "num_heads": m.heads, "patch_size": m.patch}
    overrides = {key: value for key, value in sizes.items() if value is not None}
    theirs = timm.create_model(m.name, img_size=image_side(cfg), in_chans=3, num_classes=CLASSES, **overrides)
    return theirs.to(cfg.device), our_model(cfg)


def image_side(cfg: RunConfig) -> int:
    assert cfg.data.image_size is not None
    return cfg.data.image_size


def make_step(model: nn.Module, cfg: RunConfig) -> Callable[[], None]:
    """One training step: forward under autocast, loss, backward, optimiser."""
    images, labels = one_batch(cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.optim.lr, fused=True)
    model.train()

    def step() -> None:
        with autocast(cfg.precision, cfg.device):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Stopwatch(RunWriter):
    """The real recorder of a run, which notes when the first step had ended and when the last was stored.

    A step's own clock (``step_seconds``, ``probe_seconds``) leaves out events and tables, which telemetry
    costs too; the time between these two moments holds everything, but for the evaluation.
    """

    begin = end = math.nan

    def __init__(self, directory: Path, cfg: RunConfig):
        super().__init__(directory, cfg, {})
        self.rows: list[dict[str, float]] = []

    def row(self, row: dict[str, float]) -> None:
        if not self.rows:
            self.begin = time.perf_counter()
        self.rows.append(row)
        super().row(row)

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Keep no checkpoint; the loop comes here after it has stored the last rows."""
        self.end = time.perf_counter()

    def a_step(self) -> float:
        evaluation = sum(row.get("eval_seconds", 0.0) for row in self.rows)
        return (self.end - self.begin - evaluation) / (len(self.rows) - 1)

    def measuring(self) -> float:
        """Median of a step by its own clock: hooks and statistics are in it, events and tables are not."""
        return statistics.median(row["step_seconds"] + row["probe_seconds"] for row in self.rows[1:])


def run_loop(cfg: RunConfig, folder: Path) -> Stopwatch:
    """One run of the training loop, stored in a folder where the last one was."""
    watch = Stopwatch(folder, cfg)
    train(cfg, datasets.load(cfg.data), watch, lambda: None)
    return watch
