"""Stability at a learning rate: a property of a sweep, not of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkexp.analysis.cells import Cell, group
from qkexp.record.load import Run, Sweep, load_run
from qkexp.train.outcome import ROSE

MIN_SEEDS = 3
TOO_FEW = "too few seeds"
COLUMNS = ["variant", "lr", "seeds", "median_val_loss", "limit", "stable", "reason"]
ENDED = ("completed", "diverged")
TASK = ("data.", "train.loss", "train.label_smoothing")  # keys that change what a loss means


def stability(sweep: Sweep) -> pd.DataFrame:
    """Whether each variant is stable at each rate: a row per cell (:mod:`qkexp.analysis.cells`), by rate.

    Stable: the median over at least 3 seeds of the final validation loss is at most ℓ* + 0.2 (ℓ - ℓ*),
    ℓ* the smallest such median over the sweep's cells of the same task (data and loss), ℓ the loss of the
    best constant predictor. A run that ended early or was not finite counts as +inf; an unfinished one does
    not count as a seed.

    Returns:
        Columns ``variant, lr``, those of other keys that vary, ``seeds, median_val_loss, limit, stable, reason``;
        ``stable`` is None below 3 seeds, and the reason says so.
    """
    rows = [{"variant": c.variant, "lr": c.lr, **dict(c.others), **row} for c, row in verdict_rows(sweep).items()]
    table = pd.DataFrame(rows, columns=list(rows[0]) if rows else COLUMNS)
    return table.astype({"stable": object})


def verdict_rows(sweep: Sweep) -> dict[Cell, dict[str, Any]]:
    """Cell -> what :func:`stability` says of it; cells without a run that has ended are not there."""
    cells = {cell: ended(runs) for cell, runs in group(sweep).items()}
    cells = {cell: runs for cell, runs in cells.items() if runs}
    medians = {cell: float(np.median([r.final_val_loss for r in runs])) for cell, runs in cells.items()}
    rows = {}
    for cell, runs in cells.items():
        peers = [other for other in cells if task(other) == task(cell)]
        best = min((medians[c] for c in peers if len(cells[c]) >= MIN_SEEDS), default=math.nan)
        limit = _limit(best, constant_loss(run for c in peers for run in cells[c]))
        stable, reason = _verdict(len(runs), medians[cell], limit)
        said = {"seeds": len(runs), "median_val_loss": medians[cell], "limit": limit}
        rows[cell] = {**said, "stable": stable, "reason": reason}
    return rows


def verdicts(directory: Path, names: Sequence[str]) -> dict[tuple[str, float], bool | None]:
    """:func:`stability` of some runs of a directory alone: (variant, rate) -> stable.

    None also where the runs of a variant and rate differ in more than their seeds: they are no repetitions.
    """
    runs = {name: load_run(directory / name) for name in names if (directory / name / "config.yaml").exists()}
    found: dict[tuple[str, float], bool | None] = {}
    for cell, row in verdict_rows(Sweep(directory, runs)).items():
        key = cell.variant, cell.lr
        found[key] = None if key in found else row["stable"]
    return found


def task(cell: Cell) -> tuple[Any, ...]:
    """What two cells must share for their losses to mean the same."""
    return tuple(item for item in cell.others if item[0].startswith(TASK))


def constant_loss(runs: Iterable[Run]) -> float:
    """Loss, nats, of the best predictor that ignores the image; NaN while no run has ended."""
    known = [r.outcome["constant_loss"] for r in runs if r.outcome and r.outcome.get("constant_loss") is not None]
    return float(np.median(known)) if known else math.nan


def ended(runs: Iterable[Run]) -> list[Run]:
    """Those whose result stands."""
    return [run for run in runs if run.status in ENDED]


def _limit(best: float, constant: float) -> float:
    return best + ROSE * (constant - best)


def _verdict(seeds: int, value: float, limit: float) -> tuple[bool | None, str]:
    if seeds < MIN_SEEDS:
        return None, TOO_FEW
    stable = value <= limit
    return stable, f"median {value:.3g} {'<=' if stable else '>'} {limit:.3g}"
