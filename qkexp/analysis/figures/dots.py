"""Dot charts: a row an arm, a panel a measure, a dot a run; runs without a number stand in a strip at the right."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from qkexp.analysis.cells import group
from qkexp.analysis.figures.selection import DoesNotFit, rows_of
from qkexp.analysis.figures.style import GREY, LEVEL_STYLE, look, plain_log_ticks
from qkexp.analysis.stability import MIN_SEEDS, ended
from qkexp.record.load import Run, Sweep

NARROW = 4.0  # high over low, below which a logarithmic axis takes ticks as a linear one does
STRIP = 0.09  # of a panel's width, where runs without a number stand


@dataclass(frozen=True)
class Panel:
    """A column of the table as a panel; ``level`` is a line that says what a value means."""

    column: str
    title: str
    unit: str
    log: bool = True
    level: float | None = None
    limits: tuple[float, float] | None = None  # of the axis, where values have natural ones
    share: bool = False  # percentages: the axis begins at 0 and reaches 1 at least
    blank: bool = False  # a run without a number has none to have, and nothing is drawn


@dataclass(frozen=True)
class Arm:
    """A row: what it is called, and the variant whose colour it has. ``gap`` leaves room above it."""

    name: str
    variant: str
    gap: bool = False


def measured(sweep: Sweep, columns: dict[str, Callable[[Run], Any]], varied: Collection[str] = ()) -> pd.DataFrame:
    """A row a run that has ended: variant, lr, seed, status, and what ``columns`` compute.

    Args:
        varied: keys beside variant, rate and seeds that may vary, because columns or names tell them.

    Raises:
        DoesNotFit: others vary as well; said before anything is measured, which of a thousand runs takes minutes.
    """
    refuse_others(sweep, varied)
    rows = []
    for cell, runs in group(sweep).items():
        for run in ended(runs):
            row = {"variant": cell.variant, "lr": cell.lr, "seed": run.seed, "status": run.status}
            rows.append({**row, **{name: compute(run) for name, compute in columns.items()}})
    return pd.DataFrame(rows)


def refuse_others(sweep: Sweep, varied: Collection[str]) -> None:
    """Raise :class:`DoesNotFit` where other keys than these vary: their runs would be mixed."""
    if other := sorted({key for cell in group(sweep) for key, _ in cell.others} - set(varied)):
        raise DoesNotFit(f"runs differ in {', '.join(other)} as well")


def medians(table: pd.DataFrame, by: Sequence[str], columns: Iterable[str]) -> pd.DataFrame:
    """Rows of kind run, and of kind median over a group's seeds, with their number and whether it is ``enough`` (3).

    A loss of +inf (a run that ended early) counts as such; where a run has no number, the median is absent.
    """
    known = table.assign(kind="run", seeds=1)
    rows = []
    for values, part in table.groupby(list(by), sort=False, dropna=False):
        row = dict(zip(by, values if isinstance(values, tuple) else (values,), strict=True))
        row |= {column: float(np.median(part[column])) for column in columns}
        rows.append({**row, "kind": "median", "seeds": len(part), "enough": len(part) >= MIN_SEEDS})
    whole = pd.concat([known, pd.DataFrame(rows)], ignore_index=True)
    return whole.astype({"seed": "Int64"})


def panel_row(row: np.ndarray, table: pd.DataFrame, arms: Sequence[Arm], panels: Sequence[Panel], side: str) -> None:
    """Draw one row of panels from a table with the columns ``kind`` and ``arm``.

    Args:
        row: (panels,) of Axes.
        side: what the row has in common, written over its first panel.
    """
    table, heights = table[table.kind.isin(["run", "median"])], _heights(arms)
    for axes, panel in zip(row, panels, strict=True):
        low, edge = _scale(axes, table[panel.column], panel)
        if panel.level is not None and low <= panel.level <= edge:
            axes.axvline(panel.level, color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)
        for arm in arms:
            rows, here = table[table.arm == arm.name], look(arm.variant)
            y = heights[arm.name]
            for run in rows_of(rows[rows.kind == "run"]):
                value = getattr(run, panel.column)
                if math.isfinite(value):
                    axes.plot(value, y, ls="", zorder=3, **_dot(here.colour, run.status == "diverged"))
                elif not panel.blank:
                    axes.plot(edge, y, ls="", marker="x", ms=4.5, mew=1.3, color=here.colour, zorder=3, clip_on=False)
            for middle in rows_of(rows[rows.kind == "median"]):
                value = getattr(middle, panel.column)
                if math.isfinite(value):
                    axes.plot(value, y, ls="", marker="|", ms=10, mew=1.8, color=here.colour, zorder=4)
            axes.axhline(y, color="#DDDDDD", lw=0.5, zorder=0)
        axes.set_ylim(max(heights.values()) + 0.7, -0.7)
        axes.set_yticks([])
        axes.set_title(panel.title)
        axes.set_xlabel(panel.unit)
    first = row[0]
    first.set_yticks([heights[arm.name] for arm in arms], [arm.name for arm in arms])
    first.tick_params(axis="y", length=0)
    first.set_ylabel(side, fontweight="bold")


def marks(table: pd.DataFrame, panels: Sequence[Panel]) -> list[Artist]:
    """Legend entries of the marks that occur."""
    grey, runs = "#444444", table[table.kind == "run"]
    found: list[Artist] = [
        Line2D([], [], ls="", **_dot(grey, diverged=False), label="one run"),
        Line2D([], [], ls="", marker="|", ms=10, mew=1.8, color=grey, label="median over seeds"),
    ]
    if (runs.status == "diverged").any():
        found.insert(1, Line2D([], [], ls="", **_dot(grey, diverged=True), label="one that diverged"))
    if not np.isfinite(runs[[p.column for p in panels if not p.blank]].to_numpy(float)).all():
        label = "no number (ended early, not finite)"
        found.append(Line2D([], [], ls="", marker="x", ms=4.5, mew=1.3, color=grey, label=label))
    return found


def _dot(colour: str, diverged: bool) -> dict[str, Any]:
    if diverged:
        return {"marker": "o", "ms": 3.4, "mfc": "white", "mec": colour, "mew": 1.0}
    return {"marker": ".", "ms": 6, "mfc": colour, "mec": "none", "alpha": 0.7}


def _heights(arms: Sequence[Arm]) -> dict[str, float]:
    found, y = {}, -1.0
    for arm in arms:
        y += 1.55 if arm.gap else 1.0
        found[arm.name] = y
    return found


def _scale(axes: Axes, values: pd.Series, panel: Panel) -> tuple[float, float]:
    """Set the axis; returns its lower end and where runs without a number stand."""
    known = values[np.isfinite(values) & ((values > 0) | (not panel.log))]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.1, 1.0)
    low, high = panel.limits or (low, high)
    if panel.log:
        spread = max(high / low, 1.3)
        low, high = low / spread**0.06, high * spread**0.06
        edge = high * (high / low) ** (STRIP / 2)
        axes.set_xscale("log")
        axes.set_xlim(low, high * (high / low) ** STRIP)
        plain_log_ticks(axes.xaxis, low, high)
        if high < NARROW * low:  # 1, 2, 5 would give one tick or none
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_minor_locator(NullLocator())
    else:
        low, high = (0.0, max(high, 1.0)) if panel.share else (low, high)
        spread = max(high - low, 0.1)
        low, high = low - 0.06 * spread, high + 0.06 * spread
        edge = high + STRIP / 2 * (high - low)
        axes.set_xlim(low, high + STRIP * (high - low))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    if not panel.blank and not np.isfinite(values).all():
        axes.axvspan(high, axes.get_xlim()[1], color="#EEEEEE", lw=0, zorder=0)
    return low, edge
