"""One probed step: metrics of every layer and head, still on the device until it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from qkexp.probe.metrics import BY_NAME, NAMES, headless

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Group:
    """Layers of one shape: their indices in forward order, and metrics (metric, layer, head) over so many rows.

    ``seen`` (2, layer, head) counts the rows with an unmasked key, and those with a choice of keys; None: all have.
    Where a metric of the frame has no heads, the first place of the last axis is head -1.
    """

    layers: tuple[int, ...]
    values: Tensor
    rows: int = 1
    seen: Tensor | None = None


@dataclass(frozen=True)
class Frame:
    """All metrics of one step. NaN stands for "not measured" and leaves as an absent value.

    ``metrics`` are the rows of each group's values: what is always measured, then what was asked for beside it.
    ``subsampled`` says that images or queries were left out: a maximum is then one over fewer pairs.
    """

    step: int
    phase: str
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    metrics: tuple[str, ...] = NAMES
    subsampled: bool = False

    def scalars(self) -> dict[str, float]:
        """``attn/L00/<metric>`` -> the layer's value (heads reduced); absent ones are left out."""
        out = {}
        for group in self.groups:
            values = layer_values(to_numpy(group.values), self.metrics)
            for place, layer in enumerate(group.layers):
                for metric, value in zip(self.metrics, values[:, place], strict=True):
                    if np.isfinite(value):
                        out[f"attn/L{layer:02d}/{metric}"] = float(value)
        return out

    def all_reduce(self, group: ProcessGroup | None = None) -> Frame:
        """The frame of all ranks, each metric by its own reduction, the same on each; every rank must call it.

        Raises:
            ValueError: a rank measured other layers.
        """
        from qkexp.probe.parts import all_reduce  # not at import: who reads run directories does not wait for torch

        places = sorted(
            (layer, place, g) for g, each in enumerate(self.groups) for place, layer in enumerate(each.layers)
        )
        shards = []
        for layer, place, g in places:
            own = self.groups[g]
            seen = None if own.seen is None else own.seen[:, place]
            shards.append((self.names[layer], own.values[:, place], own.rows, seen))
        whole = all_reduce(shards, self.metrics, group)
        reduced = (Group((layer,), *found) for (layer, *_), found in zip(places, whole, strict=True))
        return replace(self, groups=tuple(reduced))

    def to_pandas(self) -> pd.DataFrame:
        """A row a layer and head: step, phase, layer, module, head, the metrics, and ``subsampled`` where it is."""
        import pandas as pd  # not at import: it starts threads, and runs are forked

        return pd.DataFrame(columns([self]) if self.groups else empty_columns(self.metrics))


def to_numpy(x: Tensor) -> np.ndarray:
    """Device tensor of any dtype -> float32 NumPy: the one place where telemetry synchronises."""
    return x.detach().float().cpu().numpy()


def columns(frames: Sequence[Frame]) -> dict[str, np.ndarray | list[str]]:
    """Frames of one probe -> columns of attention.parquet, ordered by step, layer and head.

    ``subsampled`` is a column only where a frame is.
    """
    import torch  # not at import: who only reads run directories does not wait for it

    steps, phases, layers, modules, heads, values, parts = [], [], [], [], [], [], []
    for frame in frames:
        by_layer = {layer: (g, i) for g in frame.groups for i, layer in enumerate(g.layers)}
        for layer, (group, place) in sorted(by_layer.items()):
            count = group.values.shape[2]
            steps.append(np.full(count, frame.step, np.int32))
            layers.append(np.full(count, layer, np.int32))
            heads.append(np.arange(count, dtype=np.int32) - headless(frame.metrics))
            phases += [frame.phase] * count
            parts += [frame.subsampled] * count
            modules += [frame.names[layer]] * count
            values.append(group.values[:, place])
    table = to_numpy(torch.cat(values, dim=1))
    return {
        "step": np.concatenate(steps),
        "phase": phases,
        "layer": np.concatenate(layers),
        "module": modules,
        "head": np.concatenate(heads),
        **{name: table[i] for i, name in enumerate(frames[0].metrics)},
        **({"subsampled": np.array(parts)} if any(parts) else {}),
    }


def empty_columns(metrics: Sequence[str]) -> dict[str, list]:
    """The columns of a frame in which nothing was measured."""
    return {name: [] for name in ("step", "phase", "layer", "module", "head", *metrics)}


def layer_values(values: np.ndarray, names: Sequence[str] = NAMES) -> np.ndarray:
    """Reduce heads as each of the metrics declares: (metric, ..., head) -> (metric, ...).

    A head that was not measured is left out; a layer of which no head was measured is NaN.
    """
    out = np.full(values.shape[:-1], np.nan, values.dtype)
    worst = np.zeros((*values.shape[1:-1], 1), np.int64)
    if any(BY_NAME[name].heads == "max_pair" for name in names):
        size = values[names.index("max_abs_logit")]
        worst = np.where(np.isnan(size), -1.0, size).argmax(-1)[..., None]
    with np.errstate(all="ignore"):
        for i, metric in enumerate(BY_NAME[name] for name in names):
            absent = np.isnan(values[i])
            all_there = not absent.any()
            if metric.heads == "max":
                out[i] = (values[i] if all_there else np.where(absent, -np.inf, values[i])).max(-1)
            elif metric.heads == "max_pair":
                out[i] = np.take_along_axis(values[i], worst, -1)[..., 0]
            elif all_there:
                out[i] = values[i].sum(-1) / absent.shape[-1]
            else:
                out[i] = np.where(absent, 0.0, values[i]).sum(-1) / (~absent).sum(-1)
            if not all_there:
                out[i] = np.where(absent.all(-1), np.nan, out[i])
    return out
