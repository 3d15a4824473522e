"""Method × learning rate, stable or not, and the headroom (the axes of NVIDIA's Table 3, arXiv 2410.16682)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from qkexp.analysis.figures.maps import ABSENT
from qkexp.analysis.figures.selection import DoesNotFit, model_text, recipe_text, rows_of
from qkexp.analysis.figures.style import GREY, Drawing, canvas, look, rank, styled
from qkexp.analysis.sensitivity import Line, lines
from qkexp.analysis.stability import MIN_SEEDS, stability
from qkexp.record.load import Sweep
from qkexp.train.outcome import ROSE

MIN_RATES = 3
COLOURS = "cividis_r"
COLUMNS = ["kind", "variant", "lr", "seeds", "enough", "val_loss", "stable", "collapsed", "best_lr", "best_val_loss",
           "stable_from", "stable_to", "largest_stable", "first_unstable", "headroom", "lrs", "bracket"]  # fmt: skip


@styled
def max_lr(sweep: Sweep) -> Drawing:
    """Draw a cell a method and rate, coloured by its median loss, with + where stable and × where not."""
    found = lines(sweep)
    keys = dict.fromkeys(key for line in found for key, _ in line.others)
    if keys:
        raise DoesNotFit(f"runs differ in {', '.join(keys)} as well")
    if len(found[0].rates) < MIN_RATES:
        raise DoesNotFit(f"needs runs at {MIN_RATES} or more learning rates")
    found.sort(key=lambda line: rank(line.variant))
    table = _table(sweep, found)
    cells = table[table.kind == "cell"]
    if cells.empty:
        raise DoesNotFit("no run has ended yet")
    height = 0.75 + 0.235 * len(found)
    sheet = canvas(1, 1, panel=(7.4, height), paragraphs=_caption(sweep), legend_rows=2)
    axes = sheet.axes[0, 0]
    norm = _draw(axes, table, found)
    bar = sheet.figure.colorbar(axes.images[0], ax=axes, location="right", aspect=30, fraction=0.04, pad=0.01)
    bar.set_label("median final validation loss, nats")
    ticks = [t for t in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if (norm.vmin or 0) <= t <= (norm.vmax or 0)]
    bar.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    sheet.legend(_legend(), 4)
    return Drawing(sheet.figure, table)


# ---------------------------------------------------------------- data


def _table(sweep: Sweep, found: list[Line]) -> pd.DataFrame:
    """Rows of kind cell (a method at a rate) and line (a method).

    ``stable_from`` and ``stable_to`` are the lowest stable rate and the last before one that is not; the latter may
    be the edge of the grid, ``largest_stable`` never is. ``enough``: there are seeds enough for verdicts.
    ``collapsed``: runs in which a layer's attention collapsed.
    """
    rows: list[dict[str, Any]] = []
    verdicts = {(v["variant"], v["lr"]): v for v in stability(sweep).to_dict("records")}
    collapsed = {
        run.name: bool((run.events.kind == "layer_collapse").any()) for run in sweep.all.values() if run.outcome
    }
    for line in found:
        for rate in line.rates:
            verdict = verdicts.get((line.variant, rate))
            if verdict is None:
                continue
            here = [r.name for r in sweep.all.values() if (r.variant, r.lr) == (line.variant, rate)]
            row = {"kind": "cell", "variant": line.variant, "lr": rate, "seeds": verdict["seeds"]}
            row |= {"val_loss": verdict["median_val_loss"], "stable": verdict["stable"]}
            rows.append({**row, "collapsed": sum(collapsed.get(name, False) for name in here)})
        rows.append(_line_row(line))
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype({"seeds": "Int64", "collapsed": "Int64"})


def _line_row(line: Line) -> dict[str, Any]:
    largest, unstable, says = line.bracket()
    row: dict[str, Any] = {"kind": "line", "variant": line.variant, "seeds": len(line.seeds), "bracket": says}
    row["enough"] = len(line.seeds) >= MIN_SEEDS
    steady = [i for i in range(len(line.rates)) if line.stable.get(i)]
    if steady:
        end = next((i for i in range(steady[0], len(line.rates)) if not line.stable.get(i)), len(line.rates))
        row |= {"stable_from": line.rates[steady[0]], "stable_to": line.rates[end - 1]}
    row |= {"largest_stable": largest, "first_unstable": unstable}
    if line.whole:
        row |= {"best_lr": line.rates[line.best], "best_val_loss": float(np.median(line.losses[:, line.best]))}
        row |= {"headroom": largest / line.rates[line.best], "lrs": float(line.sensitivity().mean())}
    return row


# ---------------------------------------------------------------- drawing


def _draw(axes: Axes, table: pd.DataFrame, found: list[Line]) -> LogNorm:
    cells = table[table.kind == "cell"]
    rates = [float(rate) for rate in found[0].rates]
    names = [line.variant for line in found]
    values = np.full((len(names), len(rates)), math.nan)
    for cell in rows_of(cells):
        values[names.index(cell.variant), rates.index(cell.lr)] = cell.val_loss
    finite = values[np.isfinite(values)]
    chance = np.nanmax([line.constant for line in found])
    norm = LogNorm(float(finite.min()), max(float(finite.min()) * 1.01, float(min(finite.max(), 1.1 * chance))))
    axes.imshow(np.ma.masked_invalid(values), norm=norm, cmap=COLOURS, aspect="auto", interpolation="nearest")
    for cell in rows_of(cells):
        x, y = rates.index(cell.lr), names.index(cell.variant)
        dark = math.isfinite(cell.val_loss) and norm(cell.val_loss) > 0.55
        colour = "white" if dark else "black"
        mark = "?" if pd.isna(cell.stable) else "+" if cell.stable else "×"
        axes.text(x - 0.18, y, mark, ha="center", va="center", color=colour, size=10, fontweight="bold")
        axes.text(x + 0.17, y, _short(cell.val_loss), ha="center", va="center", color=colour, size=6.5)
        if cell.collapsed:
            axes.plot(x - 0.41, y, marker="v", ms=3.6, mfc="none", mec=colour, mew=0.8)
    for line in rows_of(table[table.kind == "line"]):
        y = names.index(line.variant)
        if not math.isnan(line.best_lr):
            x = rates.index(line.best_lr)
            axes.add_patch(_box(x, y))
        axes.text(len(rates) - 0.42, y, _headroom(line, rates), size=7, va="center")
    axes.text(len(rates) - 0.42, -0.78, "headroom", size=7, color=GREY, va="center")
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(names)), [look(name).label for name in names])
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_color(look(name).colour)
    axes.set_xlim(-0.5, len(rates) + 0.35)
    axes.set_xlabel("peak learning rate", x=len(rates) / (2 * len(rates) + 1.7), ha="center")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.patch.set(**ABSENT)
    axes.axvspan(len(rates) - 0.5, len(rates) + 0.35, color="white", lw=0, zorder=0)
    return norm


def _box(x: int, y: int) -> Patch:
    return Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, fill=False, ec="#D55E00", lw=1.4)


def _short(loss: float) -> str:
    if not math.isfinite(loss):
        return "no loss"
    return f"{loss:.2f}" if loss < 10 else f"{loss:.0f}"


def _headroom(line: Any, rates: list[float]) -> str:
    if not math.isnan(line.headroom):
        return f"{line.headroom:.3g} ×"
    if not math.isnan(line.stable_to) and line.stable_to == rates[-1] and not math.isnan(line.best_lr):
        return f"≥ {line.stable_to / line.best_lr:.3g} ×"
    return "–"


def _legend() -> list[Artist]:
    return [
        Line2D([], [], ls="", marker="+", ms=7, mew=2, color="black", label="stable"),
        Line2D([], [], ls="", marker="x", ms=5.5, mew=2, color="black", label="not stable"),
        Line2D([], [], ls="", marker="$?$", ms=6, color="black", label=f"fewer than {MIN_SEEDS} seeds"),
        Line2D([], [], ls="", marker="s", ms=8, mfc="none", mec="#D55E00", mew=1.4, label="the method's best rate"),
        Line2D(
            [], [], ls="", marker="v", ms=4.5, mfc="none", mec="black", label="attention of a layer collapsed in a run"
        ),
    ]


def _caption(sweep: Sweep) -> list[str]:
    first = next(iter(sweep.all.values()))
    return [
        f"{model_text(first)}; {recipe_text(first)}.",
        f"Stable: the median over at least {MIN_SEEDS} seeds of the final validation loss is at most ℓ* + {ROSE:g} "
        "(ℓ − ℓ*), ℓ* the smallest such median, ℓ chance. Headroom: largest stable rate over the method's own best "
        "rate; ≥ where it is stable at the highest rate tried. Hatched: not run, or no loss.",
    ]
