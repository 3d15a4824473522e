"""Sensitivity to the learning rate: of each variant over the grid of rates that its sweep tried.

LR sensitivity (Wortsman et al. 2023, arXiv 2309.14322): E[min(ℓ(η), ℓ₀) - ℓ*] over the grid of peak rates η, ℓ the
final validation loss, ℓ* its minimum over the grid, ℓ₀ the loss at initialisation. Here ℓ₀ is the training loss of
step 0, which is taken before the first update; a second figure has the best constant predictor's loss in its place,
which does not depend on how weights are drawn. Both are taken for each seed, with the seed's own ℓ*, and averaged.

Three warnings of its authors: it compares nothing where a method changes what a rate means; the grid must hold the
optimum; and it is 0 for a model that is at chance everywhere. So a table has the best rate and loss beside it, and
a figure the curves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qkexp.analysis.cells import Cell, Values, absent, group, label
from qkexp.analysis.stability import ENDED, verdict_rows
from qkexp.analysis.statistics import TooFewSeeds, interval, paired
from qkexp.record.load import Run, Sweep
from qkexp.sweep.bisect import edges
from qkexp.train.outcome import AT_CHANCE

REFERENCE = "none"  # what other variants are compared with
SIZE_KEYS = {"model.width", "model.depth", "model.heads", "model.name", "model.mlp_ratio"}


def lr_sensitivity(losses: np.ndarray, start: np.ndarray | float) -> float:
    """mean over rates of min(ℓ, ℓ₀) - ℓ*, nats.

    Args:
        losses: (rates,) final losses, +inf for a run that ended without one.
        start: ℓ₀, of each run or of all.

    Returns:
        NaN where a loss or ℓ₀ is NaN (a run is missing): an expectation over a part of the grid is another quantity.
    """
    clipped = np.minimum(losses, start)
    return float(np.mean(clipped - np.min(clipped)))


@dataclass(frozen=True)
class Line:
    """One variant, at equal other keys, over the grid of rates and seeds of the sweep.

    ``losses`` and ``starts`` are (seeds, rates): final validation loss (+inf without one, NaN where the run is
    missing), training loss of step 0. ``constant`` is the loss of the best constant predictor.
    """

    variant: str
    others: Values
    rates: np.ndarray
    seeds: list[int]
    losses: np.ndarray
    starts: np.ndarray
    stable: dict[int, bool | None]  # number of the rate -> verdict
    constant: float
    weights: float
    missing: list[str]

    def __str__(self) -> str:
        return label(self.variant, self.others)

    @property
    def whole(self) -> bool:
        return not self.missing

    def sensitivity(self, constant: bool = False) -> np.ndarray:
        """LR sensitivity of each seed, nats; with the constant predictor's loss in place of ℓ₀ if ``constant``."""
        starts = np.full_like(self.starts, self.constant) if constant else self.starts
        return np.array([lr_sensitivity(a, b) for a, b in zip(self.losses, starts, strict=True)])

    @property
    def best(self) -> int:
        """Number of the rate with the smallest median loss over seeds."""
        return int(np.argmin(np.median(self.losses, axis=0)))

    def best_losses(self) -> np.ndarray:
        """(seeds,) loss at the line's own best rate, at most the constant predictor's."""
        return np.minimum(self.losses[:, self.best], self.constant)

    def bracket(self) -> tuple[float, float, str]:
        """Largest stable rate, the next one tried, and how it stands in words; NaN where the grid does not hold it."""
        rates = self.rates
        unknown = [rates[i] for i in range(len(rates)) if self.stable.get(i) is None]
        if unknown:
            return math.nan, math.nan, f"undecided: no verdict at {unknown[0]:g}"
        low, high = edges(self.stable, len(rates))
        if low is None:
            return math.nan, math.nan, f"stable nowhere between {rates[0]:g} and {rates[-1]:g}"
        if high == len(rates):
            return math.nan, math.nan, f"stable up to {rates[-1]:g}, the highest rate tried"
        again = [rates[i] for i, verdict in self.stable.items() if verdict and i > high]
        says = f"stable at {rates[low]:g}, not at {rates[high]:g}" + (f"; again at {again[0]:g}" if again else "")
        return float(rates[low]), float(rates[high]), says


def lines(sweep: Sweep) -> list[Line]:
    """Every variant of a sweep, at equal other keys, over all rates and seeds that any variant has there."""
    members, waiting, verdicts = group(sweep), absent(sweep), verdict_rows(sweep)
    cells = list(dict.fromkeys([*members, *waiting]))
    found = []
    for name, others in dict.fromkeys(cell.line for cell in cells):
        peers = [cell for cell in cells if cell.others == others]
        rates = sorted({cell.lr for cell in peers})
        seeds = {run.seed for cell in peers for run in members.get(cell, [])}
        seeds |= {seed for cell in peers for seed in waiting.get(cell, [])}
        here = [Cell(name, rate, others) for rate in rates]
        table = {(run.seed, cell.lr): run for cell in here for run in members.get(cell, [])}
        found.append(_line(name, others, rates, sorted(seeds), table, [verdicts.get(cell) for cell in here]))
    return found


def _line(
    name: str,
    others: Values,
    rates: list[float],
    seeds: list[int],
    table: dict[tuple[int, float], Run],
    said: list[Any],
) -> Line:
    shape = len(seeds), len(rates)
    losses, starts = np.full(shape, math.nan), np.full(shape, math.nan)
    missing = []
    for i, seed in enumerate(seeds):
        for j, rate in enumerate(rates):
            run = table.get((seed, rate))
            if run is None or run.status not in ENDED:
                missing.append(f"{rate:g} seed {seed} ({'not run' if run is None else run.status})")
            elif run.scalars.empty:
                missing.append(f"{rate:g} seed {seed} (no loss at initialisation)")
            else:
                losses[i, j], starts[i, j] = run.final_val_loss, run.scalars.loss.iloc[0]
    ran = list(table.values())
    known = [r.outcome["constant_loss"] for r in ran if r.outcome and r.outcome.get("constant_loss") is not None]
    return Line(
        name,
        others,
        np.array(rates),
        seeds,
        losses,
        starts,
        {j: row["stable"] for j, row in enumerate(said) if row is not None},
        float(np.median(known)) if known else math.nan,
        weights(ran[0]) if ran else math.nan,
        missing,
    )


def weights(run: Run) -> float:
    """Weights in the blocks' matrices, 12 · depth · width² (for an MLP four times as wide); NaN where timm decides."""
    model = run.typed.model
    if not model.depth or not model.width:
        return math.nan
    return float((4 + 2 * (model.mlp_ratio or 4)) * model.depth * model.width**2)


def summary(sweep: Sweep) -> pd.DataFrame:
    """A row a line: LR sensitivity, best rate and quality there, largest stable rate with its bracket, headroom.

    Returns:
        ``variant``, the other keys that vary, ``weights`` (in the blocks), ``rates`` and ``seeds`` (numbers of them),
        ``lrs, lrs_low, lrs_high`` (mean over seeds, nats, and its interval), ``lrs_constant``, ``best_lr, best_at_edge,
        best_val_loss, best_low, best_high`` (median over seeds at that rate), ``at_chance``, ``largest_stable``,
        ``first_unstable``, ``headroom`` (largest stable rate over the line's best one), ``bracket`` (words),
        ``missing`` (runs; then only the bracket stands), ``note`` (what has too few seeds).
    """
    return pd.DataFrame([_row(line) for line in lines(sweep)])


def _row(line: Line) -> dict[str, Any]:
    stable, unstable, says = line.bracket()
    row: dict[str, Any] = {"variant": line.variant, **dict(line.others), "weights": line.weights}
    row |= {"rates": len(line.rates), "seeds": len(line.seeds)}
    names = ("lrs", "lrs_low", "lrs_high", "lrs_constant", "best_lr", "best_at_edge")
    row |= dict.fromkeys([*names, "best_val_loss", "best_low", "best_high", "at_chance"], math.nan)
    note = ""
    if line.whole:
        each, best = line.sensitivity(), line.best
        row |= {"lrs": each.mean(), "lrs_constant": line.sensitivity(constant=True).mean()}
        row |= {"best_lr": line.rates[best], "best_at_edge": best in (0, len(line.rates) - 1)}
        row["best_val_loss"] = float(np.median(line.losses[:, best]))
        row["at_chance"] = bool(row["best_val_loss"] >= AT_CHANCE * line.constant)
        try:
            row["lrs_low"], row["lrs_high"] = interval(each)
            row["best_low"], row["best_high"] = interval(line.best_losses(), np.median)
        except TooFewSeeds as reason:
            note = str(reason)
    row |= {"largest_stable": stable, "first_unstable": unstable, "headroom": stable / row["best_lr"]}
    return {**row, "bracket": says, "missing": ", ".join(line.missing), "note": note}


def comparisons(sweep: Sweep) -> pd.DataFrame:
    """Each variant against the reference (no norm, where there is one), paired by seed, at equal other keys.

    Of LR sensitivity, and of the loss at each one's own best rate (which was chosen on the same seeds). p values are
    not corrected for the number of comparisons.

    Returns:
        ``variant, against``, the other keys, ``measure`` (lrs, best_val_loss), ``seeds``, ``difference, low, high``
        (mean, nats, and its t interval), ``t_p``, ``flip_p``, ``refused``.
    """
    rows = []
    found = lines(sweep)
    for others in dict.fromkeys(line.others for line in found):
        peers = {line.variant: line for line in found if line.others == others}
        against = peers.get(REFERENCE, next(iter(peers.values())))
        for line in peers.values():
            if line is not against:
                rows += [_pair(line, against, measure) for measure in ("lrs", "best_val_loss")]
    return pd.DataFrame(rows)


def _pair(line: Line, against: Line, measure: str) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": line.variant, "against": against.variant, **dict(line.others), "measure": measure}
    missing = [*line.missing, *against.missing]
    if missing:
        empty = dict.fromkeys(("difference", "low", "high", "t_p", "flip_p"), math.nan)
        return {**row, "seeds": len(line.seeds), **empty, "refused": f"missing: {', '.join(missing)}"}
    a, b = ((x.sensitivity() if measure == "lrs" else x.best_losses()) for x in (line, against))
    p = paired(a, b)
    row |= {"seeds": p.pairs, "difference": p.difference, "low": p.t_low, "high": p.t_high, "t_p": p.t_p}
    return {**row, "flip_p": p.flip_p, "refused": p.refused}
