"""Layer x head maps of one frame: entropy of attention, and the largest logit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkexp.analysis.figures.maps import COLUMNS, bars, cells, layer_ticks, norms
from qkexp.analysis.figures.style import Drawing, canvas, styled


@styled
def heads(table: pd.DataFrame, caption: Sequence[str]) -> Drawing:
    """Draw a frame's table (a row a layer and head); a layer with fewer heads than others leaves cells empty."""
    table = table[table["head"] >= 0]  # of a layer as a whole there is nothing to draw
    layers = np.unique(table["layer"])
    width = int(table["head"].max()) + 1
    scales = norms(table)
    height = min(6.0, 1.3 + 0.16 * len(layers))
    sheet = canvas(
        1, 2, panel=(3.7, height), paragraphs=[*caption, "Hatched: no such head, or no value."], legend_rows=0
    )
    for column, (metric, (title, _, _)) in enumerate(COLUMNS.items()):
        axes = sheet.axes[0, column]
        values = np.full((len(layers), width), np.nan)
        values[np.searchsorted(layers, table["layer"]), table["head"]] = table[metric]
        cells(axes, np.arange(width + 1) - 0.5, np.append(layers, layers[-1] + 1) - 0.5, values, metric, scales[metric])
        axes.set_title(title, loc="center")
        axes.set_xlabel("head")
        axes.set_xticks(range(0, width, -(-width // 8)))
        layer_ticks(axes, layers)
    bars(sheet, scales)
    return Drawing(sheet.figure, table)
