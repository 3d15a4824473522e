"""Curves over steps, a line an arm: what figures that compare a few arms have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.grouping import over_seeds
from qkexp.analysis.figures.selection import ended_early
from qkexp.analysis.figures.style import plain_log_ticks
from qkexp.analysis.measures import series
from qkexp.probe.metrics import BY_NAME
from qkexp.record.load import Run

# layers from the input to the output: dark to light, so that depth can be read in grey too
DEPTHS: tuple[tuple[str, Any, str], ...] = (
    ("#332288", "-", "o"),
    ("#0072B2", (0, (4, 1.5)), "s"),
    ("#009E73", (0, (6, 2, 1, 2)), "D"),
    ("#E69F00", (0, (1, 1.2)), "^"),
)


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seeds alone, and how they look."""

    name: str
    runs: Sequence[Run]
    colour: str
    style: Any = "-"
    marker: str = "o"


@dataclass(frozen=True)
class Panel:
    """One metric over steps; ``layer`` is that of :func:`qkexp.analysis.measures.series`."""

    metric: str
    title: str
    unit: str
    layer: Any = None
    log: bool = False


def some_layers(run: Run) -> list[int]:
    """Places of the layers that are drawn, evenly from the first to the last."""
    return np.unique(np.linspace(0, len(run.layers.layers) - 1, len(DEPTHS)).round().astype(int)).tolist()


def samples(run: Run, metric: str, layer: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric of one run; loss and gradient norm are running means over 20 steps."""
    values = series(run, metric, layer)
    return (run.layers.steps if metric in BY_NAME else run.scalars.step.to_numpy()), values


def curves(arms: Sequence[Arm], panels: Sequence[Panel]) -> pd.DataFrame:
    """A row a metric, layer, arm and step: median over seeds, range, and how many they are."""
    parts = []
    for panel in panels:
        for arm in arms:
            found = over_seeds([samples(run, panel.metric, panel.layer) for run in arm.runs])
            parts.append(found.assign(metric=panel.metric, layer=panel.layer, arm=arm.name))
    table = pd.concat(parts, ignore_index=True).assign(kind="curve")
    return table[["kind", "metric", "layer", "arm", "step", "value", "low", "high", "seeds"]]


def draw(axes: Axes, panel: Panel, table: pd.DataFrame, arms: Sequence[Arm]) -> None:
    """One panel: lines are medians, bands ranges, a cross the end of a run that was not finite."""
    mine = table[(table.metric == panel.metric) & (table.layer.eq(panel.layer) | table.layer.isna())]
    for arm in arms:
        line(axes, mine[mine.arm == arm.name], arm)
    axes.set_title(panel.title)
    axes.set_ylabel(panel.unit)
    axes.set_xlabel("step")
    if panel.log:
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis, *axes.get_ylim())
    else:
        axes.set_ylim(bottom=0)


def line(axes: Axes, rows: pd.DataFrame, arm: Arm) -> None:
    """One arm's curve, with its band and the marks at which its runs ended early."""
    if rows.empty:
        return
    if (rows.seeds > 1).any():
        axes.fill_between(rows.step, rows.low, rows.high, color=arm.colour, alpha=0.16, lw=0)
    marks = {"marker": arm.marker, "ms": 3.2, "mec": "white", "mew": 0.4, "markevery": max(1, len(rows) // 6)}
    axes.plot(rows.step, rows.value, color=arm.colour, ls=arm.style, lw=1.3, **marks)  # type: ignore[arg-type]
    if any(ended_early(run) for run in arm.runs):
        last = rows.iloc[-1]
        axes.plot(last.step, last.value, "x", color=arm.colour, ms=6, mew=1.6, zorder=6)


def seeds_text(arms: Sequence[Arm]) -> str:
    """What lines and bands stand for."""
    count = max(len(arm.runs) for arm in arms)
    return "One seed each." if count == 1 else f"Line: median of {count} seeds; band: their range."


def handles(arms: Sequence[Arm]) -> list[Line2D]:
    """Legend entries."""
    ended = any(ended_early(run) for arm in arms for run in arm.runs)
    cross = [Line2D([], [], ls="", marker="x", mew=1.6, color="#333333", label="run ended: not finite")]
    lines = [Line2D([], [], color=a.colour, ls=a.style, marker=a.marker, ms=4, label=a.name) for a in arms]
    return lines + (cross if ended else [])
