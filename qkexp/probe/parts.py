"""How parts of a step become one: micro-batches of a process, and processes of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import BY_NAME, NAMES


def combine(
    parts: Sequence[Tensor],
    rows: Sequence[int],
    metrics: Sequence[str] = NAMES,
    seen: Sequence[Tensor | None] = (),
) -> Tensor:
    """Micro-batches (metric, layer, head) of so many ``rows`` -> one, by each metric's own reduction.

    ``seen`` (2, layer, head) counts a part's rows with a key and those with a choice of keys; None: all have. What is
    absent in one part is absent in the whole, as if the parts had been one batch; a part that sees no key has no say.
    """
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(list(parts))  # (part, metric, layer, head)
    counts = _counts(stacked[:, 0], rows, seen or [None] * len(parts))
    blind = counts["rows"] == 0
    size = stacked[:, metrics.index("max_abs_logit")]
    worst = torch.where(blind, -1.0, size).argmax(0, keepdim=True)  # NaN counts as the largest
    out = []
    for i, metric in enumerate(BY_NAME[name] for name in metrics):
        part = stacked[:, i]
        if metric.shards == "max":
            unknown = blind & part.isnan()
            most = torch.where(unknown, -math.inf, part).amax(0)
            out.append(torch.where(unknown.all(0), math.nan, most))
        elif metric.shards == "max_pair":
            out.append(part.gather(0, worst)[0])
        elif metric.shards in ("norm", "sum"):
            out.append(part.sum(0) if metric.shards == "sum" else part.square().sum(0).sqrt())
        elif metric.shards == "rms":
            out.append(_mean(part.square(), counts["mean"]).sqrt())
        else:
            out.append(_mean(part, counts[metric.shards]))
    return torch.stack(out)


def _counts(like: Tensor, rows: Sequence[int], seen: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """What the means of parts are weighted by, (part, layer, head) as ``like``: all rows, with a key, with a choice."""
    found = torch.empty(3, *like.shape, device=like.device)
    for part, (count, some) in enumerate(zip(rows, seen, strict=True)):
        found[:, part] = float(count)
        if some is not None:
            found[1:, part, :, -some.shape[-1] :] = some  # head -1, where there is one, stands before
    return dict(zip(("mean", "rows", "choices"), found, strict=True))


def _mean(part: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight == 0.0, 0.0, part * weight).sum(0) / weight.sum(0)


def all_reduce(frame: Frame, group: dist.ProcessGroup | None = None) -> Frame:
    """The frame of all ranks, the same on each; every rank must call it.

    Names and counts travel first, then all values at once. Ranks may have had batches of unlike sizes.

    Raises:
        ValueError: a rank measured other layers.
    """
    layers = [(layer, g, place) for g in frame.groups for place, layer in enumerate(g.layers)]
    layers.sort(key=lambda each: each[0])
    own = [torch.cat([g.values[:, place], _seen(g, place)]) for _, g, place in layers]  # (metric + 2, head) each
    shapes = [x.shape for x in own]
    names = [frame.names[layer] for layer, _, _ in layers]
    everyone: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (names, [tuple(s) for s in shapes], [g.rows for _, g, _ in layers]), group=group)
    described = [e for e in everyone if isinstance(e, tuple)]
    if any(e[:2] != described[0][:2] for e in described):
        raise ValueError("ranks measured unlike layers: their frames cannot be combined")
    mine = torch.cat([x.flatten() for x in own]) if own else torch.empty(0)
    gathered = [torch.empty_like(mine) for _ in described]
    dist.all_gather(gathered, mine, group=group)
    ranks = [x.split([s.numel() for s in shapes]) for x in gathered]  # (rank, layer)
    groups = []
    for i, (layer, _, _) in enumerate(layers):
        rows, parts = [e[2][i] for e in described], [rank[i].view(shapes[i]).unsqueeze(1) for rank in ranks]
        seen = [part[-2:] for part in parts]
        values = combine([part[:-2] for part in parts], rows, frame.metrics, seen)
        groups.append(Group((layer,), values, sum(rows), torch.stack(seen).sum(0)))
    return replace(frame, groups=tuple(groups))


def _seen(group: Group, place: int) -> Tensor:
    """What :func:`combine` takes as ``seen``, of one layer and as wide as its values: (2, head)."""
    found = group.values.new_full((2, group.values.shape[-1]), float(group.rows))
    if group.seen is not None:
        found[:, -group.seen.shape[-1] :] = group.seen[:, place]
    return found
