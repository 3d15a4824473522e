"""How parts of a step become one: micro-batches of a process, and processes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import BY_NAME, NAMES


def combine(parts: Sequence[Tensor], rows: Sequence[int], metrics: Sequence[str] = NAMES) -> Tensor:
    """Micro-batches (metric, layer, head) of so many ``rows`` -> one, by each metric's own reduction.

    What is absent in one part is absent in the whole, as if the parts had been one batch.
    """
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(list(parts))  # (part, metric, layer, head)
    worst = stacked[:, metrics.index("max_abs_logit")].argmax(0, keepdim=True)  # NaN counts as the largest
    share = stacked.new_tensor(rows).view(-1, 1, 1) / sum(rows)
    out = []
    for i, metric in enumerate(BY_NAME[name] for name in metrics):
        part = stacked[:, i]
        if metric.shards == "max":
            out.append(part.amax(0))
        elif metric.shards == "max_pair":
            out.append(part.gather(0, worst)[0])
        elif metric.shards in ("norm", "rms"):
            out.append((part.square() * (1.0 if metric.shards == "norm" else share)).sum(0).sqrt())
        else:
            out.append(part.sum(0) if metric.shards == "sum" else (part * share).sum(0))
    return torch.stack(out)


def all_reduce(frame: Frame, group: dist.ProcessGroup | None = None) -> Frame:
    """The frame of all ranks, the same on each; every rank must call it.

    Names and counts travel first, then all values at once. Ranks may have had batches of unlike sizes.

    Raises:
        ValueError: a rank measured other layers.
    """
    layers = [(layer, g, place) for g in frame.groups for place, layer in enumerate(g.layers)]
    layers.sort(key=lambda each: each[0])
    shapes = [g.values[:, place].shape for _, g, place in layers]
    names = [frame.names[layer] for layer, _, _ in layers]
    everyone: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (names, [tuple(s) for s in shapes], [g.rows for _, g, _ in layers]), group=group)
    described = [e for e in everyone if isinstance(e, tuple)]
    if any(e[:2] != described[0][:2] for e in described):
        raise ValueError("ranks measured unlike layers: their frames cannot be combined")
    mine = torch.cat([g.values[:, place].flatten() for _, g, place in layers]) if layers else torch.empty(0)
    gathered = [torch.empty_like(mine) for _ in described]
    dist.all_gather(gathered, mine, group=group)
    parts = [x.split([s.numel() for s in shapes]) for x in gathered]  # (rank, layer)
    groups = []
    for i, (layer, _, _) in enumerate(layers):
        rows = [e[2][i] for e in described]
        values = combine([p[i].view(shapes[i]).unsqueeze(1) for p in parts], rows, frame.metrics)
        groups.append(Group((layer,), values, sum(rows)))
    return replace(frame, groups=tuple(groups))
