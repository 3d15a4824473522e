"""The same curves of a run that breaks and of two that do not, on the same axes: what to look for (docs/reading.md)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from qkexp.analysis.figures.curves import DEPTHS, Arm, Panel, curves, draw, handles, some_layers
from qkexp.analysis.figures.selection import (
    DoesNotFit,
    cells,
    constant_loss,
    keys_per_row,
    model_text,
    recipe_text,
    unfinished_text,
)
from qkexp.analysis.figures.style import GREY, LEVEL_STYLE, Drawing, canvas, look, plain_log_ticks, rank, styled
from qkexp.record.load import Run, Sweep
from qkexp.train.outcome import WINDOW

WHOLE = (Panel("loss", "training loss", "nats"), Panel("grad_norm", "gradient norm", "L2"))
LAYERED = (
    Panel("max_abs_logit", "max |logit|", "before any cap"),
    Panel("attn_max_mean", "attn max", "weight"),
    Panel("entropy_mean", "attention entropy", "nats"),
)
LOG = ("grad_norm", "max_abs_logit")
ALL = Arm("all layers", (), "#333333", marker="")


@styled
def side_by_side(sweep: Sweep) -> Drawing:
    """Draw one run a column: a norm and no norm at the highest rate, and no norm at the lowest."""
    columns = _columns(sweep)
    one = next(iter(columns.values()))
    layers = some_layers(one)
    sheet = canvas(
        len(WHOLE) + len(LAYERED),
        len(columns),
        panel=(2.5, 1.35),
        paragraphs=_caption(columns),
        legend_rows=1,
        sharex=True,
    )
    depth = [Arm(f"layer {layer}", (), *DEPTHS[i]) for i, layer in enumerate(layers)]
    parts = []
    for column, (title, run) in enumerate(columns.items()):
        arm = Arm(ALL.name, [run], ALL.colour, marker=ALL.marker)
        deep = [Arm(each.name, [run], each.colour, each.style, each.marker) for each in depth]
        for row, panel in enumerate((*WHOLE, *LAYERED)):
            axes = sheet.axes[row, column]
            if panel in WHOLE:
                found = curves([arm], [panel])
                draw(axes, panel, found, [arm])
            else:
                pairs = [(a, Panel(panel.metric, "", panel.unit, place)) for a, place in zip(deep, layers, strict=True)]
                found = pd.concat([curves([a], [p]) for a, p in pairs], ignore_index=True)
                for a, p in pairs:
                    draw(axes, p, found, [a])
            parts.append(found.assign(run=title))
            axes.set_title("")
            axes.set_title(title if row == 0 else "", loc="center")
            axes.set_ylabel(f"{panel.title},\n{panel.unit}" if column == 0 else "")
            axes.set_xlabel("step" if row == len(WHOLE) + len(LAYERED) - 1 else "")
    table = pd.concat(parts, ignore_index=True)
    for axes_row, panel in zip(sheet.axes, (*WHOLE, *LAYERED), strict=True):
        _same_scale(axes_row, panel, table[table.metric == panel.metric].value.to_numpy())
    _levels(sheet.axes, one)
    sheet.legend(handles(depth), len(depth))
    return Drawing(sheet.figure, table[["run", *(c for c in table.columns if c != "run")]])


def _columns(sweep: Sweep) -> dict[str, Run]:
    found = cells(sweep)
    rates = sorted({lr for _, lr in found})
    normed = sorted({name for name, _ in found if name not in ("none", "softcap")}, key=rank)
    if len(rates) < 2 or not normed:
        raise DoesNotFit("needs a norm and none, at two or more rates")
    wanted = [(normed[0], rates[-1]), ("none", rates[0]), ("none", rates[-1])]
    chosen = [next((run for run in found.get(key, ()) if len(run.layers.steps)), None) for key in wanted]
    if not all(chosen):
        raise DoesNotFit("needs probed runs of a norm and none at the highest rate, and of none at the lowest")
    titles = [f"{look(name).label}, rate {lr:g}" for name, lr in wanted]
    return {title: run for title, run in zip(titles, chosen, strict=True) if run is not None}


def _same_scale(row: np.ndarray, panel: Panel, values: np.ndarray) -> None:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    for axes in row:
        if panel.metric in LOG:
            axes.set_yscale("log")
            axes.set_ylim(low / 1.3, high * 1.3)
            plain_log_ticks(axes.yaxis, low, high)
        else:
            axes.set_ylim(0, 1.08 * high)


def _levels(axes: np.ndarray, run: Run) -> None:
    chance, n = constant_loss([run]), keys_per_row(run)
    for panel in axes[0] if chance is not None else ():
        panel.axhline(chance, color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)
    for panel in axes[-1] if n else ():
        assert n is not None
        panel.set_ylim(0, 1.08 * math.log(n))
        panel.axhline(math.log(n), color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)


def _caption(columns: dict[str, Run]) -> list[str]:
    runs = list(columns.values())
    seeds = ", ".join(sorted({str(run.seed) for run in runs}))
    return [
        f"One run a column, seed {seeds}; rates are those at the peak. {model_text(runs[0])}; {recipe_text(runs[0])}.",
        f"Loss and gradient norm are {WINDOW}-step means. Layer 0 is nearest to the input. Dash-dotted: chance in the "
        "loss, uniform attention in the entropy. Rows share their axes.",
        unfinished_text(runs),
    ]
