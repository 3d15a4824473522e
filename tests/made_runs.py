"""Run directories of made-up numbers, written as the training loop writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkexp.config import to_typed
from qkexp.naming import run_name
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.run import MEASURED, RunWriter
from qkexp.train.events import Event

CHANCE = math.log(10)
ATTENTION = {
    "none": {},
    "layernorm": {"norm": "rms", "center": True, "gain": "shared"},
    "rmsnorm_softcap": {"norm": "rms", "gain": "shared", "softcap": 50.0},
}


def make_run(
    sweep: Path,
    variant: str = "none",
    *,
    lr: float = 1e-2,
    seed: int = 0,
    steps: int = 30,
    scalars: Mapping[str, np.ndarray] | None = None,
    attention: Mapping[str, np.ndarray] | None = None,
    every: int = 1,
    events: tuple[Event, ...] = (),
    ended: str | None = "completed",
    reason: str = "",
    val_loss: float | None = 0.5,
    provenance: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """One run; returns its directory.

    Args:
        scalars: column -> (rows,); rows may be fewer than steps: the run ended early.
        attention: metric -> (probed steps, layers, heads), probed every ``every`` steps; None: not probed.
        ended: the outcome's status, or None: no outcome, parts only.
        keys: further configuration, nested.
    """
    given = {"seed": seed, "attention": ATTENTION[variant], "optim": {"lr": lr}, "train": {"steps": steps}}
    extra = {group: {**given.get(group, {}), **more} for group, more in (keys or {}).items()}  # type: ignore[dict-item]
    cfg = to_typed({**given, "model": {"width": 64, "depth": 3, "heads": 2, "patch": 2}, **extra})
    writer = RunWriter(sweep / run_name(cfg), cfg, dict(provenance or {}))
    columns = {"loss": np.linspace(2.0, 1.0, steps), "grad_norm": np.ones(steps), **(scalars or {})}
    rows = min(len(values) for values in columns.values())
    for step in range(rows):
        known = {name: float(values[step]) for name, values in columns.items() if not np.isnan(values[step])}
        writer.row({**{name: 0.0 for name in MEASURED if not name.startswith("val_")}, "step": step, **known})
        if attention is not None and step % every == 0:
            writer.frame(_frame(step, {name: values[step // every] for name, values in attention.items()}))
    for event in events:
        writer.event(event)
    if ended is None:
        writer.flush()
    else:
        loss = columns["loss"][:rows]
        ends = {"loss": float(np.mean(loss[-20:])), "lowest_loss": float(np.min(loss))}
        final = {**{n: v if math.isfinite(v) else None for n, v in ends.items()}, "val_loss": val_loss}
        writer.finish(
            {
                "status": ended,
                "reason": reason,
                "step": rows,
                "steps": steps,
                "constant_loss": CHANCE,
                "final": {**final, "val_accuracy": None if val_loss is None else 0.9},
                "best": {"val_loss": val_loss},
                "wall_seconds": 12.5,
            }
        )
    return writer.directory


def _frame(step: int, values: Mapping[str, np.ndarray]) -> Frame:
    layers, heads = next(iter(values.values())).shape
    table = torch.full((len(NAMES), layers, heads), math.nan)
    for name, value in values.items():
        table[NAMES.index(name)] = torch.from_numpy(np.asarray(value, np.float32))
    return Frame(step, "train", tuple(f"blocks.{i}" for i in range(layers)), (Group(tuple(range(layers)), table),))


def make_plan(sweep: Path, missing: tuple[str, ...] = (), steps: int = 30) -> None:
    """A plan of the runs that are there, and of some that are not."""
    names = [p.parent.name for p in sorted(sweep.glob("*/config.yaml"))]
    runs = [{"name": name, "config": {"train": {"steps": steps}}} for name in (*names, *missing)]
    (sweep / "plan.json").write_text(json.dumps({"runs": runs}))
