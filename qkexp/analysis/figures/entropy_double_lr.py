"""Loss and attention entropy by layer at a rate and at twice it (the panels of Zhai et al. 2023, Figure 1)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from qkexp.analysis.figures.curves import DEPTHS, Arm, Panel, curves, draw, handles, some_layers
from qkexp.analysis.figures.grouping import finished, groups
from qkexp.analysis.figures.selection import (
    DoesNotFit,
    constant_loss,
    keys_per_row,
    model_text,
    recipe_text,
    unfinished_text,
)
from qkexp.analysis.figures.style import GREY, LEVEL_STYLE, Drawing, canvas, styled
from qkexp.record.load import Run, Sweep
from qkexp.train.outcome import WINDOW

LOSS = Panel("loss", "training loss", f"nats ({WINDOW}-step mean)")


@styled
def entropy_double_lr(sweep: Sweep) -> Drawing:
    """Draw loss and entropies at two rates, side by side, on the same axes."""
    found = groups(sweep, "variant", "optim.lr")
    rates = sorted({lr for _, lr in found})
    if len(found) != 2 or len(rates) != 2 or not math.isclose(rates[1], 2 * rates[0]):
        raise DoesNotFit("needs runs of one variant at a rate and at twice it")
    cells = {lr: [run for run in runs if len(run.layers.steps)] for (_, lr), runs in sorted(found.items())}
    if not all(cells.values()):
        raise DoesNotFit("no probed steps at one of the rates")
    one = cells[rates[0]][0]
    layers = some_layers(one)
    panels = [Panel("entropy_mean", "attention entropy", "nats", layer) for layer in layers]
    sheet = canvas(2, 2, panel=(3.6, 2.0), paragraphs=_caption(cells), legend_rows=1, sharex=True)
    tables, top = [], 0.0
    for column, (rate, runs) in enumerate(cells.items()):
        arm = Arm("loss", runs, "#333333", marker="")
        depth = [Arm(f"layer {layer}", runs, *look) for layer, look in zip(layers, DEPTHS, strict=False)]
        loss = curves([arm], [LOSS])
        entropy = pd.concat([curves([a], [p]) for a, p in zip(depth, panels, strict=True)])
        tables += [part.assign(lr=rate) for part in (loss, entropy, _dips(runs))]
        draw(sheet.axes[0, column], LOSS, loss, [arm])
        for arm, panel in zip(depth, panels, strict=True):
            draw(sheet.axes[1, column], panel, entropy, [arm])
        sheet.axes[0, column].set_title(f"({'ab'[column]}) training loss, rate {rate:g}")
        sheet.axes[1, column].set_title(f"({'cd'[column]}) attention entropy, rate {rate:g}")
        top = max(top, float(loss.high.max()))
    for axes in sheet.axes[0]:
        axes.set_ylim(0, 1.05 * top)
        axes.set_xlabel("")
        if (chance := constant_loss(cells[rates[0]])) is not None:
            axes.axhline(chance, color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)
    if n := keys_per_row(one):
        for axes in sheet.axes[1]:
            axes.set_ylim(0, 1.05 * math.log(n))
            axes.axhline(math.log(n), color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)
    sheet.legend(handles(depth), len(depth))
    table = pd.concat(tables, ignore_index=True)
    return Drawing(sheet.figure, table[["lr", *(c for c in table.columns if c != "lr")]])


def _dips(runs: list[Run]) -> pd.DataFrame:
    """A row a seed and layer: entropy at the start, the lowest (of 20-step means), and at the end, in nats."""
    rows = []
    for run in finished(runs):
        values = pd.DataFrame(run.layers["entropy_mean"]).rolling(WINDOW, min_periods=1).mean().to_numpy()
        for layer, series in zip(run.layers.layers, values.T, strict=True):
            start, lowest, end = float(series[0]), float(np.nanmin(series)), float(series[-1])
            at = int(run.layers.steps[int(np.nanargmin(series))])
            row = {"kind": "dip", "seed": run.seed, "layer": int(layer), "start": start, "lowest": lowest, "end": end}
            final = (run.outcome or {}).get("final", {}).get("loss")
            rows.append({**row, "step": at, "rise": end - lowest, "final_loss": final})
    return pd.DataFrame(rows)


def _caption(cells: dict[float, list[Run]]) -> list[str]:
    runs = [run for cell in cells.values() for run in cell]
    seeds = max(len(cell) for cell in cells.values())
    return [
        f"{model_text(runs[0])}; {recipe_text(runs[0])}. Line: median of {seeds} seeds; band: their range. "
        "Dash-dotted: chance above, uniform attention below. Layer 0 is nearest to the input.",
        "Entropy is the mean over heads and rows. Low entropy in a layer is no divergence by itself: read it beside "
        "the loss, and see whether it comes back.",
        unfinished_text(runs),
    ]
