"""Layer × head maps of single steps as small pictures, without a drawing library: they are made next to training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from qkexp.record.load import Run
from qkexp.record.mirror.rows import read

if TYPE_CHECKING:
    from PIL.Image import Image

PARTS = 4  # a run's stretches, with a map at each end
CELL = 16  # pixels
ABSENT = (200, 200, 200)
DECADES = 6.0  # of the logits' scale, from 1
# metric -> what a caption says of it; the scales are fixed, so that pictures of runs and steps compare
PICTURES = {
    "entropy_frac": "H / ln n: dark 0 = one-hot, light 1 = uniform",
    "max_abs_logit": f"max |logit|, log scale: dark 1, light 1e{DECADES:.0f} and more",
}
# every ninth of matplotlib's viridis and magma, as in the figures
_VIRIDIS = "440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725"
_MAGMA = "000004 180f3d 440f76 721f81 9e2f7f cd4071 f1605d fd9668 feca8d fcfdbf"
_COLOURS = {"entropy_frac": _VIRIDIS, "max_abs_logit": _MAGMA}


def map_steps(config: dict[str, Any]) -> set[int]:
    """The probed steps of which pictures are sent: first, last and three between."""
    every, last = config["probe"]["every"], config["train"]["steps"] - 1
    if not every:
        return set()
    return {last * part // PARTS // every * every for part in range(PARTS + 1)}


def head_maps(run: Run, steps: Iterable[int]) -> dict[int, dict[str, np.ndarray]]:
    """step -> metric -> values (layer, head), NaN where there is none; without steps that were not probed.

    Raises:
        TablesChanged: while they were read.
    """
    out = {}
    for step in steps:
        table = read(run.directory, "attention", step, 1)
        if table is not None:
            out[step] = _maps(table.select(["phase", "layer", "head", *PICTURES]).to_pydict())
    return {step: maps for step, maps in out.items() if maps}


def _maps(rows: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    kept = [i for i, phase in enumerate(rows["phase"]) if phase == "train" and rows["head"][i] >= 0]
    if not kept:
        return {}
    layers, places = np.unique([rows["layer"][i] for i in kept], return_inverse=True)
    heads = [rows["head"][i] for i in kept]
    maps = {}
    for metric in PICTURES:
        values = np.full((len(layers), max(heads) + 1), np.nan)
        values[places, heads] = [np.nan if (v := rows[metric][i]) is None else v for i in kept]
        maps[metric] = values
    return maps


def picture(values: np.ndarray, metric: str) -> Image:
    """Values (layer, head) -> a picture: a row a layer, the first on top, a column a head; grey is no value."""
    from PIL import Image

    known = np.isfinite(values)
    filled = np.where(known, values, 1.0)
    scaled = np.log10(np.maximum(filled, 1.0)) / DECADES if metric == "max_abs_logit" else filled
    anchors = np.array([[int(code[i : i + 2], 16) for i in (0, 2, 4)] for code in _COLOURS[metric].split()])
    at = np.clip(scaled, 0.0, 1.0) * (len(anchors) - 1)
    colours = np.stack([np.interp(at, np.arange(len(anchors)), channel) for channel in anchors.T], axis=-1)
    colours = np.where(known[..., None], np.rint(colours), ABSENT).astype(np.uint8)
    return Image.fromarray(colours.repeat(CELL, axis=0).repeat(CELL, axis=1))


def caption(step: int, metric: str) -> str:
    return f"step {step} · {PICTURES[metric]} · a row a layer, first on top; a column a head"
