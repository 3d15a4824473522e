"""Attention metrics of a run as arrays (step, layer), each column read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from qkexp.probe.frame import layer_values
from qkexp.probe.metrics import BY_NAME

Read = Callable[[Sequence[str]], pa.Table]
PLACES = ("step", "phase", "layer", "head")


class Layers:
    """Metrics of the training steps: heads reduced as each metric declares.

    Attributes:
        steps: the probed steps, in order.
        layers: indices in forward order.
        values: metric -> (steps, layers) float64, NaN where absent; ``layers[metric]`` is the same.
    """

    def __init__(self, names: Sequence[str], read: Read):
        """``names`` are the columns that there are, ``read`` gives some of them: rows in the same order each time."""
        places = read(PLACES)
        phase = places["phase"].dictionary_encode().unify_dictionaries().combine_chunks()
        training = np.isin(phase.indices.to_numpy(), np.flatnonzero(np.array(phase.dictionary) == "train"))
        step, layer, head = (places[name].to_numpy().astype(np.int64) for name in ("step", "layer", "head"))
        kept = np.arange(len(places))
        if not training.all():
            kept = np.flatnonzero(training)
            step, layer, head = step[kept], layer[kept], head[kept]
        span = (int(layer.max(initial=0)) + 1, int(head.max(initial=0)) + 2)  # heads begin at -1
        key = (step * span[0] + layer) * span[1] + head
        if (key[1:] < key[:-1]).any():  # as a rule they are written in order
            order = key.argsort(kind="stable")
            kept, step, layer = kept[order], step[order], layer[order]
        self.steps, self.layers = step[np.diff(step, prepend=-1) > 0], _distinct(layer)
        heads = len(_distinct(head + 1))
        blocks: list[tuple[slice | np.ndarray, slice | int, np.ndarray, int]] = []  # steps, layers, rows, heads
        if len(kept) == len(self.steps) * len(self.layers) * heads:
            blocks.append((slice(None), slice(None), kept, heads))
        else:  # layers of different numbers of heads
            for place, each in enumerate(self.layers):
                own = layer == each
                at = np.searchsorted(self.steps, np.unique(step[own]))
                blocks.append((at, place, kept[own], own.sum() // len(at)))
        in_place = len(blocks) == 1 and np.array_equal(kept, np.arange(len(places)))
        self._blocks = [(at, place, None if in_place else rows, count) for at, place, rows, count in blocks]
        self.values: Mapping[str, np.ndarray] = _Values([n for n in BY_NAME if n in set(names)], self._reduce)
        self._read = read

    @classmethod
    def of(cls, table: pa.Table) -> Layers:
        """Rows of attention.parquet that are in memory."""
        return cls(table.column_names, table.select)

    def __getitem__(self, metric: str) -> np.ndarray:
        return self.values[metric]

    def _reduce(self, metric: str) -> np.ndarray:
        needs = list(dict.fromkeys([metric, *(["max_abs_logit"] if BY_NAME[metric].heads == "max_pair" else [])]))
        if not len(self.steps):
            return np.empty((0, 0))
        table = self._read(needs)
        columns = np.array([table[name].to_numpy() for name in needs], np.float64)
        out = np.full((len(self.steps), len(self.layers)), np.nan)
        for at, place, rows, heads in self._blocks:
            part = columns if rows is None else columns[:, rows]
            shape = (len(self.steps), len(self.layers)) if isinstance(place, slice) else (-1,)
            out[at, place] = layer_values(part.reshape(len(needs), *shape, heads), needs)[0]
        return out


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """What of small integers from 0 on there is, in order: counting them is ten times as quick as sorting them."""
    return np.flatnonzero(np.bincount(numbers))


class _Values(Mapping[str, np.ndarray]):
    """Metric -> array, made once, when it is first asked for."""

    def __init__(self, names: Sequence[str], make: Callable[[str], np.ndarray]):
        self._names, self._make = names, make
        self._made: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
