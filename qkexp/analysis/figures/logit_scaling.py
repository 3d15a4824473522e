"""Largest attention logit against size at fixed rates, its fit and what it predicts (arXiv 2309.14322, Figure 9)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from qkexp.analysis.cells import group
from qkexp.analysis.figures.selection import DoesNotFit, recipe_text, rows_of
from qkexp.analysis.figures.style import Drawing, canvas, styled
from qkexp.analysis.sensitivity import SIZE_KEYS, weights
from qkexp.analysis.stability import MIN_SEEDS, ended
from qkexp.record.load import Run, Sweep
from qkexp.train.outcome import WINDOW

MARKERS = ("o", "s", "D", "^", "v", "P")
FITTED = 4  # sizes: one more than the parabola's coefficients
COLUMNS = ["kind", "lr", "weights", "seed", "logit", "status", "predicted", "factor", "slope", "curvature", "residual",
           "enough"]  # fmt: skip


@styled
def logit_scaling(sweep: Sweep) -> Drawing:
    """Draw every run's logit against its number of weights, and a rate's fit to all sizes but the largest."""
    cells = {cell: ended(runs) for cell, runs in group(sweep).items()}
    runs = [run for members in cells.values() for run in members]
    other = sorted({key for cell in cells for key, _ in cell.others} - SIZE_KEYS)
    if other:
        raise DoesNotFit(f"runs differ in {', '.join(other)} as well")
    if len({run.variant for run in runs}) != 1:
        raise DoesNotFit("needs runs of one variant that have ended")
    sizes = sorted({weights(run) for run in runs})
    if any(math.isnan(size) for size in sizes) or len(sizes) <= FITTED:
        raise DoesNotFit(f"needs more than {FITTED} sizes, by model.width and model.depth")
    table = _table(runs)
    if table[table.kind == "prediction"].empty:
        raise DoesNotFit("no rate has all sizes")
    sheet = canvas(1, 1, panel=(5.6, 3.7), paragraphs=_caption(runs[0], sizes), legend_rows=2)
    axes = sheet.axes[0, 0]
    rates = sorted(table.lr.unique())
    for number, rate in enumerate(rates):
        part, colour = table[table.lr == rate], _colour(number, len(rates))
        fit = part[part.kind == "fit"].sort_values("weights")
        axes.plot(fit.weights, fit.predicted, color=colour, lw=1.2)
        for run in rows_of(part[part.kind == "run"]):
            hollow = run.weights == sizes[-1]
            mark = {"mfc": "white" if hollow else colour, "mec": colour, "alpha": 1.0 if hollow else 0.75}
            marker = "x" if run.status == "diverged" else MARKERS[number % len(MARKERS)]
            axes.plot(run.weights, run.logit, ls="", marker=marker, ms=4.5, mew=1.1, zorder=3, **mark)
        for p in rows_of(part[part.kind == "prediction"]):
            axes.plot(p.weights, p.predicted, ls="", marker="_", ms=16, mew=2.0, color=colour, zorder=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size / 1e3:.0f} k" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("weights in the blocks")
    axes.set_ylabel("largest |logit| of the first block")
    sheet.legend(_legend(rates), 3)
    return Drawing(sheet.figure, table)


# ---------------------------------------------------------------- data


def _table(runs: list[Run]) -> pd.DataFrame:
    """Rows of kind run, fit (its curve) and prediction (of the largest size, from all others).

    Of a prediction: ``factor`` is the measured logit (geometric mean over seeds) over the predicted one, ``slope`` and
    ``curvature`` those of the parabola in log-log axes at the middle of the fitted sizes, ``residual`` the RMS of
    log10 (run / fit); ``enough``: every size has three seeds or more.
    """
    rows: list[dict[str, Any]] = [
        {"kind": "run", "lr": r.lr, "weights": weights(r), "seed": r.seed, "logit": late_logit(r), "status": r.status}
        for r in runs
    ]
    table = pd.DataFrame(rows, columns=COLUMNS)
    known = table[np.isfinite(table.logit)]
    largest = table.weights.max()
    found = []
    for rate, part in known.groupby("lr"):
        small, large = part[part.weights < largest], part[part.weights == largest]
        if small.weights.nunique() < FITTED or large.empty:
            continue
        fit = Parabola.of(np.log10(small.weights.to_numpy()), np.log10(small.logit.to_numpy()))
        for size in np.geomspace(small.weights.min(), largest, 41):
            found.append({"kind": "fit", "lr": rate, "weights": size, "predicted": 10 ** fit(math.log10(size))})
        predicted = 10 ** fit(math.log10(largest))
        row = {"kind": "prediction", "lr": rate, "weights": largest, "predicted": predicted}
        row |= {"logit": float(10 ** np.log10(large.logit).mean())}
        row |= {"factor": row["logit"] / predicted, "slope": fit.slope, "curvature": fit.curvature}
        fewest = part.groupby("weights").seed.nunique().min()
        found.append({**row, "residual": fit.residual, "enough": fewest >= MIN_SEEDS})
    return pd.concat([table, pd.DataFrame(found, columns=COLUMNS)], ignore_index=True).astype({"seed": "Int64"})


def late_logit(run: Run) -> float:
    """Largest |z| of the first block: the median of the last 20 probed steps, so that one step's outlier is none."""
    values = run.layers["max_abs_logit"]
    late = values[-WINDOW:, 0] if values.size else np.array([])
    late = late[np.isfinite(late)]
    return float(np.median(late)) if len(late) else math.nan


class Parabola:
    """Least squares y = a + b (x - m) + c (x - m)², m the mean of x."""

    def __init__(self, middle: float, coefficients: np.ndarray, residual: float):
        self.middle, self.coefficients, self.residual = middle, coefficients, residual

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> Parabola:
        middle = float(x.mean())
        coefficients = np.polynomial.polynomial.polyfit(x - middle, y, 2)
        errors = np.polynomial.polynomial.polyval(x - middle, coefficients) - y
        return cls(middle, coefficients, float(np.sqrt(np.mean(errors**2))))

    @property
    def slope(self) -> float:
        return float(self.coefficients[1])

    @property
    def curvature(self) -> float:
        return float(2 * self.coefficients[2])

    def __call__(self, x: float) -> float:
        return float(np.polynomial.polynomial.polyval(x - self.middle, self.coefficients))


# ---------------------------------------------------------------- drawing


def _colour(number: int, count: int) -> Any:
    """A rate is no variant: a scale of its own, readable without colour."""
    return colormaps["viridis"](0.1 + 0.75 * number / max(count - 1, 1))


def _legend(rates: list[float]) -> list[Artist]:
    entries: list[Artist] = [
        Line2D([], [], color=_colour(i, len(rates)), marker=MARKERS[i % len(MARKERS)], ms=4.5, label=f"rate {rate:g}")
        for i, rate in enumerate(rates)
    ]
    grey = "#444444"
    return [
        *entries,
        Line2D([], [], ls="", marker="o", mfc="white", mec=grey, ms=4.5, label="the size that is predicted: runs"),
        Line2D([], [], ls="", marker="_", ms=14, mew=2, color=grey, label="... and prediction from the others"),
        Line2D([], [], ls="", marker="x", ms=4.5, color=grey, label="diverged"),
    ]


def _caption(run: Run, sizes: list[float]) -> list[str]:
    return [
        f"ViTs of depth {run.typed.model.depth} on {run.typed.data.name}, {len(sizes)} widths, no QK norm; "
        f"{recipe_text(run)}. Marks: runs, median of the last {WINDOW} probed steps; curves: quadratic in log-log "
        "axes, fitted to all sizes but the largest.",
    ]
