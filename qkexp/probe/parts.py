"""How parts of a step become one: micro-batches of a process, and processes of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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


Shard = tuple[str, Tensor, int, Tensor | None]  # a layer's name, values (metric, head), rows, and ``seen`` (2, head)


def all_reduce(
    layers: Sequence[Shard], metrics: Sequence[str], group: dist.ProcessGroup | None = None
) -> list[tuple[Tensor, int, Tensor]]:
    """Layers of this rank -> those of all ranks, the same on each: (metric, 1, head), rows, (2, 1, head).

    Every rank must call it. Names and counts travel first, then all values at once. Ranks may have had batches of
    unlike sizes.

    Raises:
        ValueError: a rank measured other layers.
    """
    own = [torch.cat([values, _seen(values, rows, seen)]) for _, values, rows, seen in layers]  # (metric + 2, head)
    shapes = [x.shape for x in own]
    facts = [name for name, *_ in layers], [tuple(s) for s in shapes], [rows for _, _, rows, _ in layers]
    everyone: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    described = [e for e in everyone if isinstance(e, tuple)]
    if any(e[:2] != described[0][:2] for e in described):
        raise ValueError("ranks measured unlike layers: their frames cannot be combined")
    mine = torch.cat([x.flatten() for x in own]) if own else torch.empty(0)
    gathered = [torch.empty_like(mine) for _ in described]
    dist.all_gather(gathered, mine, group=group)
    ranks = [x.split([s.numel() for s in shapes]) for x in gathered]  # (rank, layer)
    out = []
    for i in range(len(layers)):
        rows, parts = [e[2][i] for e in described], [rank[i].view(shapes[i]).unsqueeze(1) for rank in ranks]
        seen = [part[-2:] for part in parts]
        out.append((combine([part[:-2] for part in parts], rows, metrics, seen), sum(rows), torch.stack(seen).sum(0)))
    return out


def _seen(values: Tensor, rows: int, seen: Tensor | None) -> Tensor:
    """What :func:`combine` takes as ``seen``, of one layer and as wide as its values: (2, head)."""
    found = values.new_full((2, values.shape[-1]), float(rows))
    if seen is not None:
        found[:, -seen.shape[-1] :] = seen
    return found
