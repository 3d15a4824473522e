"""Attention metrics of a run as arrays (step, layer, head), a few columns at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qkexp.record.load import read_tables

PLACES = ("step", "phase", "layer", "head")


@dataclass(frozen=True)
class Heads:
    """Metrics of the probed training steps; rows without a head (−1) are left out.

    Attributes:
        steps: (T,), rising.
        layers: (L,) indices in forward order; a layer with fewer heads than others has NaN in their place.
        values: metric -> (T, L, H) float32, NaN where absent; metrics that the run did not measure are not there.
    """

    steps: np.ndarray
    layers: np.ndarray
    values: dict[str, np.ndarray]


def load_heads(directory: Path, metrics: Sequence[str]) -> Heads:
    """Read some metrics of a run, finished or alive; a run that was not probed has no steps."""
    tables = read_tables(directory, "attention", [*PLACES, *metrics])
    if not tables:
        return Heads(np.zeros(0, np.int32), np.zeros(0, np.int32), {})
    table = pa.concat_tables(tables, promote_options="default")
    kept = pc.and_(pc.equal(table["phase"].cast(pa.string()), "train"), pc.greater_equal(table["head"], 0))
    table = table.filter(kept)
    step, layer, head = (table[name].to_numpy() for name in ("step", "layer", "head"))
    steps, layers = np.unique(step), np.unique(layer)
    width = int(head.max(initial=-1)) + 1
    shape = (len(steps), len(layers), width)
    place = (np.searchsorted(steps, step) * len(layers) + np.searchsorted(layers, layer)) * width + head
    values = {}
    for metric in metrics:
        if metric in table.column_names:
            cells = np.full(np.prod(shape, dtype=int), np.nan, np.float32)
            cells[place] = table[metric].to_numpy()
            values[metric] = cells.reshape(shape)
    return Heads(steps, layers, values)
