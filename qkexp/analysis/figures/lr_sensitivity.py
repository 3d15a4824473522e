"""Final validation loss against the learning rate (the axes of Wortsman et al. 2023, Figure 1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.selection import (
    Cells,
    DoesNotFit,
    cells,
    constant_loss,
    model_text,
    recipe_text,
    rows_of,
    unfinished,
)
from qkexp.analysis.figures.style import (
    GREY,
    LEVEL_STYLE,
    Drawing,
    canvas,
    columns_that_fit,
    look,
    plain_log_ticks,
    rank,
    rate_ticks,
    styled,
)
from qkexp.analysis.stability import MIN_SEEDS, stability
from qkexp.record.load import Run, Sweep
from qkexp.train.outcome import ROSE

WIDTH = 6.4  # inches
DODGE = 0.022  # decades between neighbouring variants: dots of one rate must not hide each other
COLUMNS = ["kind", "variant", "lr", "seed", "val_loss", "status", "failed", "collapsed_layers", "seeds", "stable"]


@styled
def lr_sensitivity(sweep: Sweep) -> Drawing:
    """Draw a line (median over seeds) per variant, every run as a dot, failures at the top edge."""
    found = cells(sweep)
    if len({lr for _, lr in found}) < 2:
        raise DoesNotFit("needs runs at two or more learning rates")
    table = _table(sweep, found)
    if table.empty:
        raise DoesNotFit("no run has ended yet")
    variants = sorted(table.variant.dropna().unique(), key=rank)
    handles = _legend(table, variants)
    columns = columns_that_fit(handles, WIDTH, 3)
    rows = -(-len(handles) // columns)
    sheet = canvas(1, 1, panel=(WIDTH, 3.9), paragraphs=_caption(sweep, table), legend_rows=rows)
    axes = sheet.axes[0, 0]
    edge = _scales(axes, table)
    for place, variant in enumerate(variants):
        shift = 10 ** (DODGE * (place - (len(variants) - 1) / 2))
        _draw_variant(axes, table[table.variant == variant], variant, shift, edge)
    for level in rows_of(table[table.kind.isin(["chance", "limit"])]):
        axes.axhline(level.val_loss, color=GREY, lw=0.9, ls=LEVEL_STYLE if level.kind == "chance" else ":", zorder=1)
    sheet.legend(handles, columns)
    return Drawing(sheet.figure, table)


# ---------------------------------------------------------------- data


def _table(sweep: Sweep, found: Cells) -> pd.DataFrame:
    """Rows of kind run, median, chance and limit; ``val_loss`` is inf where a run has none."""
    rows = [_run_row(run) for runs in found.values() for run in runs if run.status != "unfinished"]
    rows = [row for row in rows if row["status"] != "interrupted"]
    verdicts = stability(sweep)
    order = {cell: place for place, cell in enumerate(found)}
    for v in sorted(verdicts.to_dict("records"), key=lambda v: order[v["variant"], v["lr"]]):
        row = {"kind": "median", "val_loss": v["median_val_loss"], "failed": math.isinf(v["median_val_loss"])}
        rows.append({**row, **{name: v[name] for name in ("variant", "lr", "seeds", "stable")}})
    if rows:
        rows += [{"kind": k, "val_loss": x} for k, x in levels(sweep, verdicts).items()]
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype({"seed": "Int64", "collapsed_layers": "Int64", "seeds": "Int64", "failed": "boolean"})


def _run_row(run: Run) -> dict[str, object]:
    collapsed = run.events[run.events.kind == "layer_collapse"].layer.nunique()
    return {
        "kind": "run",
        "variant": run.variant,
        "lr": run.lr,
        "seed": run.seed,
        "val_loss": run.final_val_loss,
        "status": run.status,
        "failed": math.isinf(run.final_val_loss),
        "collapsed_layers": collapsed,
    }


def levels(sweep: Sweep, verdicts: pd.DataFrame) -> dict[str, float]:
    """The loss of the best constant predictor, and the largest median that counts as stable."""
    chance = constant_loss(sweep.all.values())
    enough = verdicts[verdicts.seeds >= MIN_SEEDS].median_val_loss
    if chance is None:
        return {}
    if enough.empty or not math.isfinite(enough.min()):
        return {"chance": chance}
    best = float(enough.min())
    return {"chance": chance, "limit": best + ROSE * (chance - best)}


# ---------------------------------------------------------------- drawing


def _scales(axes: Axes, table: pd.DataFrame) -> float:
    """Set both axes; returns the height at which failed runs are drawn."""
    rates = sorted(table.lr.dropna().unique())
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.45, rates[-1] * 1.45)
    rate_ticks(axes, rates)
    axes.set_xlabel("peak learning rate")
    finite = table.val_loss[np.isfinite(table.val_loss) & (table.val_loss > 0)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.1, 1.0)
    top = high * (high / low) ** 0.06 * 1.05
    edge = top * 1.1
    failed = bool(table.failed.fillna(False).any())
    axes.set_yscale("log")
    axes.set_ylim(low / 1.15, edge * 1.12 if failed else top)
    plain_log_ticks(axes.yaxis, low, top)
    axes.set_ylabel("final validation loss, nats")
    if failed:  # a strip of its own: these runs have no loss
        axes.axhspan(top, edge * 1.12, color="#EEEEEE", lw=0, zorder=0)
        axes.text(0.006, edge, "no final loss", size=6.5, color=GREY, va="center", transform=axes.get_yaxis_transform())
    return edge


def _draw_variant(axes: Axes, rows: pd.DataFrame, variant: str, shift: float, edge: float) -> None:
    here = look(variant)
    medians = rows[rows.kind == "median"].sort_values("lr")
    heights = np.minimum(medians.val_loss.to_numpy(float), edge)
    axes.plot(medians.lr * shift, heights, color=here.colour, lw=1.4, zorder=3)
    for row, height in zip(rows_of(medians), heights, strict=True):
        mark = _median_mark(here.colour, here.marker, _verdict(row.stable))
        axes.plot(row.lr * shift, height, ls="", zorder=5, **mark)
    for row in rows_of(rows[rows.kind == "run"]):
        height = min(float(row.val_loss), edge)
        kind = _kind(bool(row.failed), str(row.status), int(row.collapsed_layers))
        axes.plot(row.lr * shift, height, ls="", zorder=4 if kind == "plain" else 6, **_run_mark(here.colour, kind))


def _kind(failed: bool, status: str, collapsed: int) -> str:
    if failed:
        return "crashed" if status == "failed" else "failed"
    return "collapsed" if collapsed else "plain"


def _verdict(value: Any) -> bool | None:
    """A cell of a column that mixes bool and absent values."""
    return None if pd.isna(value) else bool(value)


def _median_mark(colour: str, marker: str, stable: bool | None) -> dict[str, Any]:
    """Filled: stable; hollow: not stable; pale: too few seeds to say."""
    fill = {True: colour, False: "white", None: _pale(colour)}[stable]
    return {"marker": marker, "ms": 6.5, "mfc": fill, "mec": colour, "mew": 1.3}


def _run_mark(colour: str, kind: str) -> dict[str, Any]:
    return {
        "plain": {"marker": ".", "ms": 6.5, "mfc": colour, "mec": "none", "alpha": 0.75},
        "collapsed": {"marker": "v", "ms": 4.2, "mfc": "white", "mec": colour, "mew": 0.9},
        "failed": {"marker": "x", "ms": 5.5, "mec": colour, "mew": 1.5},
        "crashed": {"marker": "+", "ms": 6.0, "mec": colour, "mew": 1.2},
    }[kind]


def _pale(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (1 + red) / 2, (1 + green) / 2, (1 + blue) / 2


# ---------------------------------------------------------------- legend and caption


def _legend(table: pd.DataFrame, variants: list[str]) -> list[Artist]:
    looks = [look(v) for v in variants]
    lines: list[Artist] = [Line2D([], [], color=k.colour, marker=k.marker, ms=5.5, label=k.label) for k in looks]
    return lines + _marks(table)


def _marks(table: pd.DataFrame) -> list[Artist]:
    """Legend entries of the marks that occur."""
    marks: list[Artist] = []
    medians, runs = table[table.kind == "median"], table[table.kind == "run"]
    verdicts = [(True, "stable"), (False, "not stable"), (None, f"fewer than {MIN_SEEDS} seeds: no verdict")]
    for stable, label in verdicts:
        if stable in {_verdict(value) for value in medians.stable}:
            marks.append(Line2D([], [], ls="", label=f"median, {label}", **_median_mark("#444444", "o", stable)))
    labels = {
        "plain": "one run",
        "collapsed": "one run, a layer's attention collapsed",
        "failed": "one run, ended early (not finite)",
        "crashed": "one run, crashed (not counted)",
    }
    kinds = {_kind(bool(r.failed), str(r.status), int(r.collapsed_layers)) for r in rows_of(runs)}
    marks += [Line2D([], [], ls="", label=labels[k], **_run_mark("#444444", k)) for k in labels if k in kinds]
    for level in rows_of(table[table.kind.isin(["chance", "limit"])]):
        style = LEVEL_STYLE if level.kind == "chance" else ":"
        label = "chance" if level.kind == "chance" else "stability limit"
        marks.append(Line2D([], [], color=GREY, lw=0.9, ls=style, label=f"{label}, {level.val_loss:.2f}"))
    return marks


def _caption(sweep: Sweep, table: pd.DataFrame) -> list[str]:
    first = next(iter(sweep.all.values()))
    running = sum(unfinished(r) and r.status != "failed" for r in sweep.all.values())
    return [
        f"{model_text(first)}; {recipe_text(first)}. Points of one rate are set apart sideways.",
        f"Stable: the median over at least {MIN_SEEDS} seeds of the final validation loss is at most "
        f"ℓ* + {ROSE:g} (ℓ − ℓ*), with ℓ* the smallest such median of all variants and rates, ℓ the loss of the best "
        "constant predictor (chance). A run without a final loss counts as infinite.",
        "Collapsed: in some layer the entropy stayed under 0.05 ln n and under 0.1 of its healthy value for 20 probed "
        "steps." if (table.collapsed_layers.fillna(0) > 0).any() else "",
        f"Left out: {running} {'run' if running == 1 else 'runs'} not finished yet." if running else "",
    ]  # fmt: skip
