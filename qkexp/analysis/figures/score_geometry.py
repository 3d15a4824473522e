"""What lengths, bounds, gains, caps and softmax do to a score, without training: probe and model beside formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.selection import DoesNotFit, rows_of
from qkexp.analysis.figures.style import GREY, Drawing, canvas, styled
from qkexp.record.load import Sweep

COLOURS = ("#0072B2", "#D55E00", "#009E73")
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
SEEN = 1e-9  # nats: what is below is drawn no more


class Panel(NamedTuple):
    """One relation: its name in the table, its title and axes, which axes are logarithmic, and what is marked."""

    name: str
    title: str
    x: str
    y: str
    log: str
    marks: tuple[tuple[str, float], ...] = ()  # (curve, x)


PANELS = (
    Panel("one_hot", "longer vectors, same directions", "‖q‖ = ‖k‖", "entropy, nats", "x"),
    Panel("length_bound", "largest score of two lengths", "‖q‖ = ‖k‖", "max |z|", "xy", (("q·k", 40.0),)),
    Panel("gain_bound", "RMSNorm: a grown gain", "gain g of one channel", "max |z|", "xy", (("d = 128", 1.0),)),
    Panel(
        "entropy_floor", "least entropy of a bounded score", "bound B of |z|", "entropy, nats", "y",
        (("N = 17", 4.0), ("N = 257", 11.31)),
    ),
    Panel("cap_gradient", "what a soft-cap passes back", "z", "∂c/∂z", "y", (("cap 50", 50.0), ("cap 50", 200.0))),
    Panel("softmax_gradient", "what softmax passes back", "gap of two scores", "∂p/∂z = p (1 − p)", ""),
)  # fmt: skip

CAPTION = (
    "Lines: closed forms. Points: what the probe (a, b, d) or model and automatic differentiation (c, e, f) compute. "
    "N keys, d channels of a head, score scale 1/√d where nothing else is said.",
    "a: one key at cosine 0.5 to the query, the others at right angles: growth of length alone makes attention "
    "one-hot. b: parallel vectors of length 40 reach 1600. c: √128 ≈ 11.31 at gain 1; a learned gain moves the bound "
    "with its square. d: a bound is no bound against one-hot: 0.048 nats at B = 4 with 17 keys, 9e-7 at B = 11.31 "
    "with 257. e: far beyond a cap of 50 almost no gradient comes back (1.3e-3 at z = 200). f: nor does it through a "
    "one-hot softmax, on either side.",
)


@styled
def score_geometry(sweep: Sweep) -> Drawing:
    """Draw six relations of the score; of a sweep with runs there is nothing to draw."""
    if sweep.all:
        raise DoesNotFit("it shows formulas, not runs: qkexp reproduce score_geometry")
    table = _table()
    sheet = canvas(2, 3, panel=(2.95, 2.15), paragraphs=CAPTION, legend_rows=1)
    for letter, panel, axes in zip("abcdef", PANELS, sheet.axes.flat, strict=True):
        _draw(axes, panel, table[table.panel == panel.name])
        axes.set_title(f"({letter}) {panel.title}")
    handles = [
        Line2D([], [], color="#333333", label="closed form"),
        Line2D([], [], color="#333333", ls="", marker="o", ms=3, label="computed by probe or model"),
        Line2D([], [], color="#333333", ls="", marker="*", ms=8, label="named in the text"),
    ]
    sheet.legend(handles, 3)
    return Drawing(sheet.figure, table)


def _table() -> pd.DataFrame:
    """Rows of kind curve and mark; ``error`` is |value - closed|, of a score over the score."""
    from qkexp.analysis import geometry as g  # imports torch, which other figures do without

    grids: dict[str, tuple[Callable[[np.ndarray], pd.DataFrame], np.ndarray]] = {
        "one_hot": (g.lengths_to_one_hot, np.geomspace(1.0, 100.0, 41)),
        "length_bound": (g.length_bound, np.geomspace(1.0, 100.0, 21)),
        "gain_bound": (g.gain_bound, np.geomspace(0.25, 8.0, 21)),
        "entropy_floor": (g.bounded_entropy, np.linspace(0.0, 15.0, 46)),
        "cap_gradient": (g.capped_gradient, np.linspace(0.0, 400.0, 41)),
        "softmax_gradient": (g.softmax_gradient, np.linspace(-12.0, 12.0, 49)),
    }
    parts = []
    for panel in PANELS:
        function, grid = grids[panel.name]
        parts.append(function(grid).assign(panel=panel.name, kind="curve"))
        for curve, x in panel.marks:
            row = function(np.array([x]))
            parts.append(row[row.curve == curve].assign(panel=panel.name, kind="mark"))
    table = pd.concat(parts, ignore_index=True)
    relative = table.panel.isin(["length_bound", "gain_bound"])
    table["error"] = (table.value - table.closed).abs() / table.closed.abs().where(relative, 1.0)
    return table[["panel", "kind", "curve", "x", "value", "closed", "error"]]


def _draw(axes: Axes, panel: Panel, rows: pd.DataFrame) -> None:
    curves = rows[rows.kind == "curve"]
    for place, (name, part) in enumerate(curves.groupby("curve", sort=False)):
        part = part[part.closed > SEEN] if "y" in panel.log else part
        colour, every = COLOURS[place], max(1, len(part) // 10)
        axes.plot(part.x, part.closed, color=colour, ls=STYLES[place], label=str(name))
        seen = part.iloc[place :: 1 if len(part) < 12 else every]
        axes.plot(seen.x, seen.value, ls="", marker="o", ms=3, color=colour)
    for row in rows_of(rows[rows.kind == "mark"]):
        colour = COLOURS[list(curves.curve.unique()).index(row.curve)]
        axes.plot(row.x, row.value, marker="*", ms=9, color=colour, mec="white", mew=0.5, zorder=5)
        closed = float(row.closed)
        text = f"{closed:.4g}" if closed >= 1e-2 else f"{closed:.1e}"
        shift, side = {"length_bound": ((-6, 4), "right"), "gain_bound": ((-6, 4), "right")}.get(
            panel.name, ((-6, -9), "right") if row.curve == "N = 17" else ((5, 6), "left")
        )
        axes.annotate(text, (row.x, row.value), shift, textcoords="offset points", size=6.5, ha=side)
    if "x" in panel.log:
        axes.set_xscale("log")
    if "y" in panel.log:
        axes.set_yscale("log")
    if panel.name == "gain_bound":
        ticks = [0.25, 0.5, 1, 2, 4, 8]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    if panel.name == "one_hot":
        axes.axhline(0.0, color=GREY, lw=0.6)
        axes.set_ylim(-0.2, 1.05 * math.log(257))
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if curves.curve.nunique() > 1:
        low = panel.name in ("one_hot", "entropy_floor", "cap_gradient")
        axes.legend(loc="lower left" if low else "upper left", fontsize=6.5, handlelength=2.2, borderaxespad=0.2)
