"""How every figure looks: one colour and marker for a variant everywhere, sizes, the caption strip, saving.

Colours are Okabe & Ito's, which colour-blind readers can tell apart; line styles and markers carry
the same information again, so that a grey print can be read.
"""

from __future__ import annotations

import functools
import math
import textwrap
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib

matplotlib.use("Agg")  # never a window system: a stale DISPLAY must not stop a figure

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

DPI = 160
GREY = "#666666"
LEVEL_STYLE = (0, (6, 2, 1, 2))  # chance, uniform attention, limits
LAYER_STYLES: dict[str, Any] = {"first": "-", "middle": (0, (4, 1.5)), "last": (0, (1, 1.2))}

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # text stays text in a vector editor
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Look:
    """What stands for a variant in every figure."""

    label: str
    colour: str
    marker: str


# dark and light colours alternate, so that neighbours in a legend differ in grey as well
LOOKS = {
    "none": Look("no norm", "#D55E00", "o"),
    "layernorm": Look("LayerNorm", "#0072B2", "s"),
    "rmsnorm": Look("RMSNorm", "#009E73", "D"),
    "l2": Look("L2 + learned scale", "#CC79A7", "^"),
    "softcap": Look("soft-cap 50", "#E69F00", "P"),
    "layernorm_softcap": Look("LayerNorm + soft-cap 50", "#56B4E9", "p"),
    "rmsnorm_softcap": Look("RMSNorm + soft-cap 50", "#000000", "h"),
    "l2_softcap": Look("L2 + soft-cap 50", "#882255", "<"),
    # published systems whose keys are none of the above, under the names that their keys give
    "rmsnorm_gainoffset-1": Look("Gemma 3: RMSNorm, gain 1 + w", "#40B0A6", "X"),
    "rmsnorm_axis-all_eps-1e-05": Look("OLMo 2: RMSNorm of all heads", "#4B0092", "v"),
    "rmsnorm_gain-none_eps-1e-05_ropeorder-rope_first": Look("Llama 4: RMSNorm, no gain", "#6B8E23", "*"),
    "layernorm_gain-per_head_eps-1e-05": Look("Command R+: LayerNorm, a gain a head", "#1A85FF", ">"),
    "layernorm_gain-per_head_bias-true_eps-1e-05": Look("Chameleon: the same with bias", "#D41159", "d"),
    "layernorm_bias-true": Look("timm: LayerNorm with bias", "#8A6D3B", "H"),
    "l2_scale-learned_per_head_scaleinit-10p0_scalelog-true_scalemax-100p0": Look(
        "Swin V2: cosine, a temperature a head", "#B66DFF", "8"
    ),
}
ORDER = list(LOOKS)
_OTHER_COLOURS = ("#332288", "#44AA99", "#117733", "#999933", "#661100", "#6699CC", "#AA4466", "#888888")
_OTHER_MARKERS = ("8", ">", "d", "*", "H")


def look(variant: str) -> Look:
    """The look of a variant: a function of its name alone, so that it is the same in every figure."""
    if variant in LOOKS:
        return LOOKS[variant]
    number = zlib.crc32(variant.encode())
    colour = _OTHER_COLOURS[number % len(_OTHER_COLOURS)]
    return Look(variant.replace("_", " "), colour, _OTHER_MARKERS[number // 8 % len(_OTHER_MARKERS)])


def rank(variant: str) -> tuple[int, str]:
    """Sort key: the order of the table, then by name."""
    return (ORDER.index(variant) if variant in LOOKS else len(ORDER), variant)


# ---------------------------------------------------------------- canvas


@dataclass(frozen=True)
class Drawing:
    """A figure and exactly the data that it plots, tidy."""

    figure: Figure
    table: pd.DataFrame


@dataclass(frozen=True)
class Canvas:
    """Panels above a strip that holds the legend and the caption, so that neither covers data."""

    figure: Figure
    axes: np.ndarray  # (rows, columns) of Axes
    legend_bottom: float  # in figure fractions

    def legend(self, handles: Sequence[Artist], columns: int) -> None:
        self.figure.legend(
            handles=list(handles),
            loc="lower center",
            bbox_to_anchor=(0.5, self.legend_bottom),
            ncols=columns,
            borderaxespad=0.0,
            handlelength=2.6,
            columnspacing=1.6,
        )


_Build = TypeVar("_Build", bound=Callable[..., Drawing])


def styled(build: _Build) -> _Build:
    """Decorator: a builder runs under the house's settings, whatever the caller's are."""

    @functools.wraps(build)
    def inner(*args: Any, **kwargs: Any) -> Drawing:
        with matplotlib.rc_context(RC):
            return build(*args, **kwargs)

    return inner  # type: ignore[return-value]


def canvas(
    rows: int,
    columns: int,
    *,
    panel: tuple[float, float],
    paragraphs: Sequence[str],
    legend_rows: int,
    sharex: bool = False,
    size: float = 7.0,
) -> Canvas:
    """A grid of panels over a strip for legend and caption.

    Args:
        panel: width and height of one panel, inches.
        paragraphs: the caption's; wrapped to the figure's width.
        legend_rows: lines to keep free for the legend.
        size: of the caption's letters, points.
    """
    width = columns * panel[0]
    letters = int((width - 0.3) * 72 / (size * 0.53))  # 0.53 em: DejaVu's mean letter
    lines = [line for p in paragraphs if p for line in textwrap.wrap(p, letters)]
    caption = (len(lines) * size * 1.3) / 72 + 0.12
    strip = caption + legend_rows * 0.19 + 0.12
    height = rows * panel[1] + strip
    figure = Figure(figsize=(width, height), layout="constrained")
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0.005, strip / height, 0.99, 1 - strip / height - 0.005), w_pad=0.05, h_pad=0.05)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex)
    figure.text(
        0.15 / width,
        (caption - 0.04) / height,
        "\n".join(lines),
        size=size,
        va="top",
        linespacing=1.25,
        color="#222222",
    )
    return Canvas(figure, axes, (caption + 0.05) / height)


def columns_that_fit(handles: Sequence[Artist], width: float, most: int) -> int:
    """The largest number of legend columns, at most ``most``, that ``width`` inches hold: entries run down columns."""
    size = float(RC["legend.fontsize"])
    wide = [TextPath((0, 0), str(h.get_label()), size=size).get_extents().width + 4.0 * size for h in handles]
    for columns in range(most, 1, -1):
        rows = -(-len(wide) // columns)
        needed = sum(max(wide[i : i + rows]) for i in range(0, len(wide), rows)) + 1.6 * size * (columns - 1)
        if needed <= 72 * width:
            return columns
    return 1


def plain_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Plain digits at 1, 2, 5 on a log axis that spans less than two decades; powers of ten read worse there."""
    if high >= 100 * low:
        return
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def rate_ticks(axes: Axes, rates: Sequence[float]) -> None:
    """A tick a rate on a log axis whose limits are set, with its number where that has room beside the one before."""
    (low, high), figure = np.log10(axes.get_xlim()), axes.get_figure(root=True)
    assert figure is not None
    inches = axes.get_position().width * figure.get_figwidth() / (high - low)  # a decade
    letter, end, labels = 0.64 * float(RC["xtick.labelsize"]) / 72, -math.inf, []
    for rate in rates:
        text = f"{rate:.3g}"
        place, half = math.log10(rate) * inches, letter * len(text) / 2
        room = place - half > end + letter
        labels.append(text if room else "")
        end = place + half if room else end
    axes.set_xticks(rates, labels)
    axes.set_xticks([], minor=True)


def save(drawing: Drawing, folder: Path, name: str) -> Path:
    """Write ``<folder>/<name>.{pdf,png,csv}``; returns the PNG. Files carry no time stamp."""
    folder.mkdir(parents=True, exist_ok=True)
    png = folder / f"{name}.png"
    with matplotlib.rc_context(RC):
        drawing.figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None}, dpi=2 * DPI)
        drawing.figure.set_layout_engine("none")  # is laid out; again would take as long as to draw it
        drawing.figure.savefig(png, dpi=DPI)
    drawing.table.to_csv(folder / f"{name}.csv", index=False)
    return png
