"""Which runs of a sweep a figure shows, and the sentences about them that captions share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from qkexp.analysis.cells import group
from qkexp.analysis.figures.style import rank
from qkexp.config import RunConfig
from qkexp.record.load import Run, Sweep


class DoesNotFit(Exception):
    """A figure cannot be drawn from these runs; the message says why."""


Cells = dict[tuple[str, float], list[Run]]


def cells(sweep: Sweep) -> Cells:
    """(variant, learning rate) -> its runs by seed; variants in the house's order, rates as numbers.

    Raises:
        DoesNotFit: runs that differ in more than variant, rate and seed would be mixed.
    """
    found: Cells = {}
    for cell, runs in sorted(group(sweep).items(), key=lambda item: (rank(item[0].variant), item[0].lr)):
        if cell.others:
            raise DoesNotFit(f"runs differ in {', '.join(key for key, _ in cell.others)} as well")
        if len({run.seed for run in runs}) < len(runs):
            raise DoesNotFit("runs differ in their seeds of model and data as well")
        found[cell.variant, cell.lr] = runs
    return found


def at_highest_rate(sweep: Sweep) -> tuple[float, dict[str, list[Run]]]:
    """The largest learning rate of the sweep, and variant -> its runs there, by seed."""
    found = cells(sweep)
    highest = max(lr for _, lr in found)
    return highest, {variant: runs for (variant, lr), runs in found.items() if lr == highest}


def ended_early(run: Run) -> bool:
    """Whether training itself ended the run before its last step (loss or gradient not finite)."""
    outcome = run.outcome or {}
    return outcome.get("status") == "diverged" and outcome.get("final", {}).get("val_loss") is None


def unfinished(run: Run) -> bool:
    """Alive, interrupted or crashed: what it shows is no result yet."""
    return run.status not in ("completed", "diverged")


def constant_loss(runs: Iterable[Run]) -> float | None:
    """Loss, nats, of the best predictor that ignores the image; None while no run has ended."""
    known = [r.outcome["constant_loss"] for r in runs if r.outcome and r.outcome.get("constant_loss") is not None]
    return float(np.median(known)) if known else None


def keys_per_row(run: Run) -> int | None:
    """Number of keys n that a query attends to, from entropy_mean / entropy_frac = ln n; None where not measured."""
    fraction, entropy = run.layers["entropy_frac"], run.layers["entropy_mean"]
    usable = (
        np.isfinite(fraction) & np.isfinite(entropy) & (fraction > 0.01)
    )  # float32: a ratio of small numbers is rough
    if not usable.any():
        return None
    return round(math.exp(float(np.median(entropy[usable] / fraction[usable]))))


def rows_of(table: pd.DataFrame) -> Iterator[Any]:
    """Rows as named tuples, whose fields pandas' stubs would type as anything but what they are."""
    return iter(table.itertuples())


# ---------------------------------------------------------------- sentences of captions


def model_text(run: Run, n: int | None = None) -> str:
    """The model and data of a run in words."""
    m, data = run.typed.model, run.typed.data
    size = f"ViT of width {m.width} and depth {m.depth}" if m.width and m.depth else m.name
    inside = [f"{m.heads} heads"] if m.heads else []
    inside += [f"{n} tokens"] if n else []
    inside += [f"{_millions(12 * m.depth * m.width**2)} weights in its blocks"] if m.width and m.depth else []
    return size + (f" ({', '.join(inside)})" if inside else "") + f" on {data.name}"


def recipe_text(run: Run) -> str:
    """Optimiser, batch, clipping, precision and schedule of a run in words (not the peak rate)."""
    cfg = run.typed
    o, t = cfg.optim, cfg.train
    optimiser = {"adamw": "AdamW"}.get(o.name, o.name)
    decay = f"{o.decay} weight decay {o.weight_decay:g}" if o.weight_decay else "no weight decay"
    clip = "no clipping" if t.clip_norm is None else f"clipping at {t.clip_norm:g}"
    precision = "FP32" if cfg.precision.autocast == "none" else f"{cfg.precision.autocast.upper()} autocast"
    return f"{optimiser}, batch {t.batch_size}, {decay}, {clip}, {precision}; {schedule_text(cfg)}"


def schedule_text(cfg: RunConfig) -> str:
    """The course of the learning rate in words."""
    warmup, steps = cfg.optim.warmup, cfg.train.steps
    if warmup >= steps:
        part = "" if warmup == steps else f" (it would reach the peak at step {warmup:,})"
        return f"the learning rate rises linearly from 0 over the whole run of {steps:,} steps{part}"
    after = {"cosine": "a cosine to 0", "constant": "a constant rate"}.get(cfg.optim.schedule, cfg.optim.schedule)
    start = f"{warmup:,} steps of linear warm-up, then {after}" if warmup else after
    return f"{start}, {steps:,} steps"


def unfinished_text(runs: Iterable[Run]) -> str:
    """A warning where runs are not finished; empty where all are."""
    count = sum(unfinished(r) for r in runs)
    return f"Not finished: {count} {'run' if count == 1 else 'runs'}, drawn as far as recorded." if count else ""


def _millions(count: float) -> str:
    return f"{count / 1e9:.2g} B" if count >= 1e9 else f"{count / 1e6:.2g} M" if count >= 1e5 else f"{count:,.0f}"
