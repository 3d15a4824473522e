"""What maps of attention have in common: which metrics, their colours, scales and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from qkexp.analysis.figures.style import Canvas, plain_log_ticks

COLUMNS = {
    "entropy_frac": ("attention entropy, H / ln n", "0 = one-hot, 1 = uniform", "viridis"),
    "max_abs_logit": ("max |logit|", "before any cap, log scale", "magma"),
}
ABSENT: dict[str, Any] = {"facecolor": "white", "edgecolor": "#AAAAAA", "hatch": "////", "linewidth": 0.0}


def norms(table: pd.DataFrame) -> dict[str, Normalize]:
    """Metric -> scale of its colours, from all values that are shown."""
    return {"entropy_frac": Normalize(0.0, 1.0), "max_abs_logit": log_norm(table["max_abs_logit"].to_numpy())}


def log_norm(values: np.ndarray) -> LogNorm:
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 10.0)
    return LogNorm(low, max(high, 1.001 * low))


def cells(
    axes: Axes, x: Sequence[float] | np.ndarray, y: np.ndarray, values: np.ndarray, metric: str, norm: Normalize
) -> None:
    """Values (y, x) between the edges ``x`` and ``y``; what is not finite is hatched."""
    axes.patch.set(**ABSENT)
    axes.pcolormesh(x, y, np.ma.masked_invalid(values), norm=norm, cmap=COLUMNS[metric][2], rasterized=True)
    axes.tick_params(length=2)


def layer_ticks(axes: Axes, layers: Sequence[int] | np.ndarray) -> None:
    axes.set_yticks(layers[:: -(-len(layers) // 6)])
    axes.set_ylabel("layer")


def bars(sheet: Canvas, scales: Mapping[str, Normalize]) -> None:
    """Below each column of panels the bar of its metric."""
    for column, (metric, (_, text, colours)) in enumerate(COLUMNS.items()):
        bar = sheet.figure.colorbar(
            ScalarMappable(scales[metric], colours),
            ax=list(sheet.axes[:, column]),
            location="bottom",
            aspect=45,
            fraction=0.05,
            pad=0.02,
        )
        bar.set_label(text)
        if metric == "max_abs_logit":
            plain_log_ticks(bar.ax.xaxis, scales[metric].vmin or 1.0, scales[metric].vmax or 1.0)
        bar.outline.set_visible(False)
