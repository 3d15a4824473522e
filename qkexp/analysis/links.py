"""The links of the chain in one run: its tables -> a score of each link over steps, as :mod:`.onsets` takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkexp.analysis.onsets import (
    BY_LINK,
    LINKS,
    Crossing,
    Link,
    Onset,
    gradient_reference,
    healthy_reference,
    onset,
    rise,
    running_means,
    score,
)
from qkexp.config import DATA_SETS
from qkexp.probe.frame import layer_values
from qkexp.probe.metrics import NAMES
from qkexp.record.load import Run


@dataclass(frozen=True)
class Attention:
    """Attention metrics over probed steps: metric -> (rows, layers, heads), and (rows, layers) with heads reduced.

    NaN stands for a head that a layer does not have, and for what was not measured.
    """

    steps: np.ndarray
    layers: tuple[int, ...]
    heads: dict[str, np.ndarray]
    whole: dict[str, np.ndarray]
    subsampled: bool

    @classmethod
    def of(cls, table: pd.DataFrame) -> Attention:
        """Rows of attention.parquet -> arrays; of a row that stands twice the first counts."""
        subsampled = "subsampled" in table and bool((table.subsampled == True).any())  # noqa: E712 (it may be absent)
        table = table[(table.phase == "train") & (table["head"] >= 0)].drop_duplicates(["step", "layer", "head"])
        steps, row = np.unique(table.step.to_numpy(np.int64), return_inverse=True)
        layers, column = np.unique(table.layer.to_numpy(np.int64), return_inverse=True)
        width = int(table["head"].max()) + 1 if len(table) else 0
        cube = np.full((len(NAMES), len(steps), len(layers), width), np.nan)
        for i, name in enumerate(NAMES):
            cube[i, row, column, table["head"].to_numpy(np.int64)] = table[name].to_numpy(np.float64)
        whole = layer_values(cube) if width else cube[..., 0:0].reshape(len(NAMES), 0, 0)
        names = [int(layer) for layer in layers]
        return cls(
            steps, tuple(names), dict(zip(NAMES, cube, strict=True)), dict(zip(NAMES, whole, strict=True)), subsampled
        )

    def keys(self) -> int:
        """Keys n of a row, from entropy_mean / entropy_frac = ln n; 2 where it cannot be told."""
        mean, share = self.heads["entropy_mean"], self.heads["entropy_frac"]
        usable = np.isfinite(mean) & np.isfinite(share) & (share > 0.01)
        return max(2, round(math.exp(float(np.median(mean[usable] / share[usable]))))) if usable.any() else 2


@dataclass(frozen=True)
class Scores:
    """A link's scores (rows, layers); ``raw`` the same before smoothing, ``heads`` (rows, layers, heads)."""

    steps: np.ndarray
    values: np.ndarray
    layers: tuple[int, ...] = (-1,)
    raw: np.ndarray | None = None
    heads: np.ndarray | None = None


def scores(run: Run, attention: Attention, healthy: int, chance: float) -> dict[str, Scores]:
    """Every link that was measured, by name.

    Args:
        run: its scalars are read.
        attention: its attention metrics.
        healthy: length of the healthy stretch, steps.
        chance: the best constant predictor's loss, nats; NaN where it is not known.
    """
    found = {}
    for link in LINKS:
        made = _of_attention(link, attention, healthy) if link.per_layer else _of_scalars(link, run, healthy, chance)
        if made is not None and np.isfinite(made.values).any():
            found[link.name] = made
    return found


def _of_attention(link: Link, attention: Attention, healthy: int) -> Scores | None:
    if not len(attention.steps):
        return None
    steps, values, heads = attention.steps, attention.whole[link.column], attention.heads[link.column]
    usual = healthy_reference(steps, values, healthy)
    own = healthy_reference(steps, heads.reshape(len(steps), -1), healthy).reshape(heads.shape[1:])
    if link.name == "logit":  # logits within ln n cannot make a row of n keys sharp
        least = math.log(attention.keys())
        usual, own = np.maximum(usual, least), np.maximum(own, least)
    return Scores(steps, score(link.kind, values, usual), attention.layers, heads=score(link.kind, heads, own))


def _of_scalars(link: Link, run: Run, healthy: int, chance: float) -> Scores | None:
    table = run.scalars[["step", link.column]].dropna()
    steps, raw = table.step.to_numpy(np.int64), table[link.column].to_numpy(np.float64)
    if not np.isfinite(raw).any() or (link.kind == "rise" and not math.isfinite(chance)):
        return None
    sparse = link.name == "val_loss"  # evaluations are means already, and rare
    smoothed = raw if sparse else running_means(raw)
    if link.kind == "rise":
        values, single = rise(smoothed, raw, chance)
    else:
        usual = np.broadcast_to(healthy_reference(steps, smoothed[:, None], healthy), smoothed.shape)
        reference = gradient_reference(steps, smoothed, healthy) if link.name.startswith("grad") else usual
        values, single = score(link.kind, smoothed, reference), score(link.kind, raw, reference)
    return Scores(steps, values[:, None], raw=None if sparse else single[:, None])


def onsets(run: Run, found: dict[str, Scores]) -> dict[str, Onset]:
    """Onset of each link; what ended a run because it was not finite is an onset at every threshold."""
    made = {name: _onset(BY_LINK[name], part) for name, part in found.items()}
    reason, step = str((run.outcome or {}).get("reason")), (run.outcome or {}).get("step")
    if reason.startswith("nonfinite") and step is not None:
        end = Crossing(int(step), int(step), -1, -1)
        broken = [n for n in BY_LINK if n.startswith("grad")] if "grad_norm" in reason else ["loss"]
        for name in broken:
            grid = BY_LINK[name].grid
            before = made[name].crossings if name in made else (None,) * len(grid)
            made[name] = Onset(name, grid, tuple(c or end for c in before))
    return made


def _onset(link: Link, found: Scores) -> Onset:
    """The onset, and in its layer the head that was furthest when the layer crossed."""
    hold = {"hold": 1} if link.name == "val_loss" else {}
    made = onset(link, found.steps, found.values, found.raw, found.layers, **hold)
    at = made.named
    if at is None or found.heads is None:
        return made
    heads = found.heads[at.row, found.layers.index(made.layer)]
    head = int(np.nanargmax(heads)) if np.isfinite(heads).any() else -1
    return Onset(made.link, made.grid, made.crossings, made.layer, head)


def chance_loss(run: Run) -> float:
    """Loss of the best constant predictor, nats: the outcome's; of an unfinished run ln(classes); NaN if unknown."""
    known = (run.outcome or {}).get("constant_loss")
    if known is not None:
        return float(known)
    data = run.typed.data
    classes = data.classes or DATA_SETS[data.name].classes
    return math.log(classes) if classes and run.typed.train.loss == "ce" else math.nan
