"""Layer x step maps of attention entropy and of the largest logit, a row a variant."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from qkexp.analysis.figures.maps import COLUMNS, bars, cells, layer_ticks, norms
from qkexp.analysis.figures.selection import (
    DoesNotFit,
    at_highest_rate,
    ended_early,
    model_text,
    recipe_text,
    unfinished_text,
)
from qkexp.analysis.figures.style import Drawing, canvas, look, styled
from qkexp.record.load import Run, Sweep


@styled
def heatmaps(sweep: Sweep) -> Drawing:
    """Draw, for every variant at the highest rate, its first seed's layers over steps."""
    rate, variants = at_highest_rate(sweep)
    runs = {name: cell[0] for name, cell in variants.items() if len(cell[0].layers.steps)}
    if not runs:
        raise DoesNotFit("no probed steps at the highest rate")
    table = _table(runs, rate)
    scales = norms(table)
    rows = len(runs)
    height = 0.85 + 0.7 / rows  # the axis and the colour bar below the last row take about 0.7 inches
    sheet = canvas(rows, 2, panel=(3.7, height), paragraphs=_caption(runs, rate), legend_rows=0)
    for row, (name, run) in enumerate(runs.items()):
        for column, metric in enumerate(COLUMNS):
            _map(sheet.axes[row, column], run, metric, scales[metric], last=row == rows - 1)
        sheet.axes[row, 0].set_title(look(name).label, size=8, weight="bold", pad=3)
    for column, (title, _, _) in enumerate(COLUMNS.values()):
        sheet.axes[0, column].set_title(f"{title}\n", loc="center", pad=3)  # a line above the row's own title
    bars(sheet, scales)
    return Drawing(sheet.figure, table)


def _table(runs: dict[str, Run], rate: float) -> pd.DataFrame:
    """A row a variant, step and layer: exactly the cells of the maps."""
    parts = []
    for name, run in runs.items():
        steps, layers = np.meshgrid(run.layers.steps, run.layers.layers, indexing="ij")
        values = {metric: run.layers[metric].ravel() for metric in COLUMNS}
        keys = {"variant": name, "lr": rate, "seed": run.seed, "step": steps.ravel(), "layer": layers.ravel()}
        parts.append(pd.DataFrame({**keys, **values}))
    return pd.concat(parts, ignore_index=True)


def _map(axes: Axes, run: Run, metric: str, norm: Normalize, *, last: bool) -> None:
    steps, layers = run.layers.steps, run.layers.layers
    # a cell reaches from its step to the next probed one: nothing is interpolated
    gap = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    edges = np.append(steps, steps[-1] + gap)
    cells(axes, edges, np.append(layers, layers[-1] + 1) - 0.5, run.layers[metric].T, metric, norm)
    axes.set_xlim(0, max(run.typed.train.steps, edges[-1]))
    layer_ticks(axes, layers)
    if last:
        axes.set_xlabel("step")
    else:
        axes.tick_params(labelbottom=False)


def _caption(runs: dict[str, Run], rate: float) -> list[str]:
    first = next(iter(runs.values()))
    seeds = sorted({run.seed for run in runs.values()})
    which = f"seed {seeds[0]}" if len(seeds) == 1 else "first seed of each"
    early = [look(name).label for name, run in runs.items() if ended_early(run)]
    return [
        f"Peak learning rate {rate:g}, {which}. {model_text(first)}; {recipe_text(first)}.",
        "Heads of a layer: mean of the entropy, maximum of the logit. Layer 0 is nearest to the input. "
        "Hatched: no value." + (f" Ended early because not finite: {', '.join(early)}." if early else ""),
        "Low entropy alone is no fault: a layer may be meant to be sharp; read it next to the loss.",
        unfinished_text(runs.values()),
    ]
