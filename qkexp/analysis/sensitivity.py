"""Stability at a learning rate: a property of a sweep, not of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from qkexp.config import keys
from qkexp.record.load import Sweep, load_run
from qkexp.train.outcome import ROSE, smooth

MIN_SEEDS = 3
GRAD_START = 100  # step at which the running minimum of the gradient norm starts
TOO_FEW = "too few seeds"


def stability(sweep: Sweep) -> pd.DataFrame:
    """Whether each variant is stable at each rate: a row per (variant, lr), by rate within a variant.

    Stable: the median over at least 3 seeds of the final validation loss is at most ℓ* + 0.2 (ℓ - ℓ*),
    ℓ* the smallest such median over variants and rates, ℓ the loss of the best constant predictor. A
    run that ended early or was not finite counts as +inf; an unfinished one does not count as a seed.

    Returns:
        Columns ``variant, lr, seeds, median_val_loss, stable, reason``; ``stable`` is None, and the
        reason says so, below 3 seeds and where runs differ in more than their seeds.
    """
    runs = sweep.runs
    runs = runs[runs.status.isin(["completed", "diverged"])]
    constant = [
        run.outcome["constant_loss"] for run in sweep.all.values() if run.outcome and "constant_loss" in run.outcome
    ]
    rows = []
    for (name, lr), group in runs.groupby(["variant", "optim.lr"], sort=True):
        rows.append(
            {
                "variant": name,
                "lr": float(lr),  # type: ignore[arg-type]
                "seeds": len(group),
                "median_val_loss": float(np.median(group.final_val_loss)),
                "mixed": ", ".join(_varied(group)),
            }
        )
    table = pd.DataFrame(rows, columns=["variant", "lr", "seeds", "median_val_loss", "mixed"])
    enough = table[(table.seeds >= MIN_SEEDS) & (table.mixed == "")]
    best = float(enough.median_val_loss.min()) if len(enough) else math.nan
    limit = best + ROSE * (float(np.median(constant)) - best) if constant else math.nan
    verdicts = [_verdict(int(r.seeds), float(r.median_val_loss), limit, str(r.mixed)) for r in table.itertuples()]  # type: ignore[arg-type]
    table["stable"] = pd.Series([v[0] for v in verdicts], dtype=object)
    table["reason"] = [v[1] for v in verdicts]
    return table.drop(columns="mixed")


def verdicts(directory: Path, names: Sequence[str]) -> dict[tuple[str, float], bool | None]:
    """:func:`stability` of some runs of a directory alone: (variant, rate) -> stable."""
    runs = {name: load_run(directory / name) for name in names if (directory / name / "config.yaml").exists()}
    table = stability(Sweep(directory, runs))
    return {(r.variant, r.lr): r.stable for r in table.itertuples()}  # type: ignore[misc]


def _varied(group: pd.DataFrame) -> list[str]:
    """Identity keys other than seeds in which runs differ: such runs are no repetitions of one another."""
    names = [k.name for k in keys() if k.meta["identity"] and not k.name.endswith("seed")]
    return [name for name in names if group[name].astype(str).nunique() > 1]


def _verdict(seeds: int, value: float, limit: float, mixed: str) -> tuple[bool | None, str]:
    if mixed:
        return None, f"runs differ in {mixed}"
    if seeds < MIN_SEEDS:
        return None, TOO_FEW
    stable = value <= limit
    return stable, f"median {value:.3g} {'<=' if stable else '>'} {limit:.3g}"


def grad_growth(grad_norm: np.ndarray) -> np.ndarray:
    """Smoothed gradient norm over its running minimum from step 100 on; 1 before."""
    smoothed = smooth(grad_norm)
    out = np.ones_like(smoothed)
    if len(smoothed) > GRAD_START:
        tail = smoothed[GRAD_START:]
        out[GRAD_START:] = tail / np.minimum.accumulate(tail)
    return out


def onset(values: np.ndarray, threshold: float, start: int = 0) -> int | None:
    """Index of the first value at or above ``threshold`` from index ``start`` on; None where there is none."""
    above = np.flatnonzero(np.asarray(values)[start:] >= threshold)
    return int(above[0]) + start if len(above) else None
