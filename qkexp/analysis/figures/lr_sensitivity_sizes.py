"""Final loss against learning rate for several sizes, and LR sensitivity against size (arXiv 2309.14322, Figure 1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.selection import DoesNotFit, recipe_text, rows_of
from qkexp.analysis.figures.style import (
    GREY,
    LEVEL_STYLE,
    Drawing,
    canvas,
    look,
    plain_log_ticks,
    rank,
    rate_ticks,
    styled,
)
from qkexp.analysis.sensitivity import REFERENCE, SIZE_KEYS, Line, lines
from qkexp.analysis.stability import MIN_SEEDS
from qkexp.analysis.statistics import METHOD, TooFewSeeds, bootstrap_seeds, interval
from qkexp.record.load import Sweep

MIN_SIZES, MIN_RATES = 2, 3
STYLES: tuple[Any, ...] = ((0, (1, 1.2)), (0, (4, 1.5)), "-", (0, (6, 1.5, 1, 1.5)), (0, (2, 2)))
COLUMNS = ["kind", "variant", "weights", "lr", "seed", "val_loss", "lrs", "lrs_low", "lrs_high", "lrs_constant",
           "best_lr", "best_val_loss", "ratio", "over_smaller", "enough"]  # fmt: skip


@styled
def lr_sensitivity_sizes(sweep: Sweep) -> Drawing:
    """Draw a panel a variant with a curve a size, and one of LR sensitivity against the number of weights."""
    found = sorted(lines(sweep), key=lambda line: (rank(line.variant), line.weights))
    other = sorted({key for line in found for key, _ in line.others} - SIZE_KEYS)
    if other:
        raise DoesNotFit(f"runs differ in {', '.join(other)} as well")
    sizes = sorted({line.weights for line in found})
    if any(math.isnan(size) for size in sizes) or len(sizes) < MIN_SIZES:
        raise DoesNotFit(f"needs runs of {MIN_SIZES} or more sizes, by model.width and model.depth")
    if len(found[0].rates) < MIN_RATES:
        raise DoesNotFit(f"needs runs at {MIN_RATES} or more learning rates")
    table = _table(found)
    if table[table.kind == "median"].empty:
        raise DoesNotFit("no run has ended yet")
    variants = sorted({line.variant for line in found}, key=rank)
    sheet = canvas(
        1, len(variants) + 1, panel=(3.1, 2.9), paragraphs=_caption(sweep, table), legend_rows=-(-(len(sizes) + 4) // 4)
    )
    chance = max(line.constant for line in found)
    top, low = _heights(table, chance)
    for axes, variant in zip(sheet.axes[0], variants, strict=False):
        _curves(axes, table[table.variant == variant], variant, sizes, top)
        axes.axhline(chance, color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)
        axes.set_ylim(low, top * 1.06)
        plain_log_ticks(axes.yaxis, low, top)
    sheet.axes[0, 0].set_ylabel("final validation loss, nats")
    _against_size(sheet.axes[0, -1], table[table.kind == "line"], variants)
    sheet.legend(_legend(sizes, variants, chance), 4)
    return Drawing(sheet.figure, table)


# ---------------------------------------------------------------- data


def _table(found: list[Line]) -> pd.DataFrame:
    """Rows of kind run, median and line (LR sensitivity of a variant at a size).

    ``ratio`` is the reference's LR sensitivity over this variant's at the same size, ``over_smaller`` its own over
    that of the next smaller size; ``enough``: there are three seeds or more.
    """
    rows: list[dict[str, Any]] = []
    for line in found:
        base = {"variant": line.variant, "weights": line.weights}
        for (i, j), loss in np.ndenumerate(line.losses):
            if not math.isnan(loss):
                rows.append({"kind": "run", **base, "lr": line.rates[j], "seed": line.seeds[i], "val_loss": loss})
        for j, rate in enumerate(line.rates):
            column = line.losses[:, j]
            if not np.isnan(column).any():
                rows.append({"kind": "median", **base, "lr": rate, "val_loss": float(np.median(column))})
        rows.append({"kind": "line", **base, **_sensitivity(line)})
    table = pd.DataFrame(rows, columns=COLUMNS)
    whole = table[table.kind == "line"]
    reference = whole[whole.variant == REFERENCE].set_index("weights").lrs
    table.loc[whole.index, "ratio"] = whole.weights.map(reference) / whole.lrs
    table.loc[whole.index, "over_smaller"] = whole.lrs / whole.groupby("variant").lrs.shift()
    return table.astype({"seed": "Int64"})


def _sensitivity(line: Line) -> dict[str, float]:
    if not line.whole:
        return {}
    each = line.sensitivity()
    row = {"lrs": float(each.mean()), "lrs_constant": float(line.sensitivity(constant=True).mean())}
    row["enough"] = len(line.seeds) >= MIN_SEEDS
    row |= {"best_lr": float(line.rates[line.best]), "best_val_loss": float(np.median(line.losses[:, line.best]))}
    try:
        row["lrs_low"], row["lrs_high"] = interval(each)
    except TooFewSeeds:  # then the span of the seeds, which is no interval, is drawn
        row["lrs_low"], row["lrs_high"] = float(each.min()), float(each.max())
    return row


# ---------------------------------------------------------------- drawing


def _heights(table: pd.DataFrame, chance: float) -> tuple[float, float]:
    """Top of the panels (failed runs stand there) and their bottom."""
    losses = table.val_loss[np.isfinite(table.val_loss)]
    return max(float(losses.max()), chance) * 1.12, float(losses.min()) / 1.15


def _curves(axes: Axes, rows: pd.DataFrame, variant: str, sizes: list[float], top: float) -> None:
    here = look(variant)
    for number, size in enumerate(sizes):
        part = rows[rows.weights == size]
        medians = part[part.kind == "median"].sort_values("lr")
        alpha = 0.45 + 0.55 * (number + 1) / len(sizes)
        axes.plot(
            medians.lr, np.minimum(medians.val_loss, top), color=here.colour, ls=STYLES[number % len(STYLES)],
            marker=here.marker, ms=2.5 + 1.5 * number, alpha=alpha, zorder=3,
        )  # fmt: skip
        for run in rows_of(part[part.kind == "run"]):
            failed = math.isinf(run.val_loss)
            mark: dict[str, Any] = (
                {"marker": "x", "ms": 5, "mew": 1.3} if failed else {"marker": ".", "ms": 3.5, "mec": "none"}
            )
            axes.plot(run.lr, min(run.val_loss, top), ls="", color=here.colour, alpha=0.6, zorder=2, **mark)
    rates = sorted(rows.lr.dropna().unique())
    axes.set_xscale("log")
    axes.set_yscale("log")
    rate_ticks(axes, rates)
    axes.set_xlabel("peak learning rate")
    axes.set_title(here.label)


def _against_size(axes: Axes, rows: pd.DataFrame, variants: list[str]) -> None:
    for variant in variants:
        here, part = look(variant), rows[rows.variant == variant].sort_values("weights")
        axes.plot(part.weights, part.lrs, color=here.colour, marker=here.marker, ms=5)
        axes.vlines(part.weights, part.lrs_low, part.lrs_high, color=here.colour, lw=1.0, alpha=0.7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted(rows.weights.unique())
    axes.set_xticks(sizes, [_short(size) for size in sizes])
    axes.set_xticks([], minor=True)
    known = rows[["lrs_low", "lrs_high"]].to_numpy(float)
    if np.isfinite(known).any():
        plain_log_ticks(axes.yaxis, float(np.nanmin(known)), float(np.nanmax(known)))
    axes.set_xlabel("weights in the blocks")
    axes.set_ylabel("LR sensitivity, nats")
    axes.set_title("sensitivity against size")


def _short(count: float) -> str:
    return f"{count / 1e6:.2g} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


def _legend(sizes: list[float], variants: list[str], chance: float) -> list[Artist]:
    looks = [look(v) for v in variants]
    entries: list[Artist] = [Line2D([], [], color=k.colour, marker=k.marker, ms=5, label=k.label) for k in looks]
    entries += [
        Line2D([], [], color="#444444", ls=STYLES[i % len(STYLES)], marker="o", ms=2.5 + 1.5 * i, label=_short(size))
        for i, size in enumerate(sizes)
    ]
    entries.append(Line2D([], [], ls="", marker="x", ms=5, color="#444444", label="ended early (not finite)"))
    return [*entries, Line2D([], [], color=GREY, lw=0.9, ls=LEVEL_STYLE, label=f"chance, {chance:.2f}")]


def _caption(sweep: Sweep, table: pd.DataFrame) -> list[str]:
    first = next(iter(sweep.all.values()))
    seeds = table.seed.nunique()
    bars = (
        METHOD["interval"] if seeds >= bootstrap_seeds() else f"Bars span the {seeds} seeds, too few for an interval."
    )
    bars = bars if seeds > 1 else "One seed."
    return [
        f"ViTs on {first.typed.data.name}; {recipe_text(first)}. Curves are medians over seeds, dots runs.",
        "LR sensitivity (Wortsman et al. 2023): mean over the rates of min(ℓ, ℓ₀) − ℓ*, ℓ₀ the training loss before "
        f"the first update; of each seed, then the mean. {bars}",
    ]
