"""Statistics of each query's row of scores, chunk by chunk: no N×M tensor outlives a chunk.

A softmax is shifted by its row's maximum and an entropy is log S − T / S with S = Σ e^y, T = Σ y e^y,
y = c − max c ≤ 0: never log(p + eps), never negative, exact at one-hot and at uniform.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

# Bytes of scores computed at once: small enough to stay in cache, large enough to amortise the calls.
CHUNK_BYTES = 3 << 20
# Rows of at most so many keys are reduced over the first axis of their tensor.
SHORT = 64
# Scores of longer rows are held in units of log 2: exp2 takes a third of the time of exp on CPU. (Short rows are
# spared the products that this costs, and keep their bits.)
LOG2E = 1.0 / math.log(2.0)
# e^y of smaller y is not a normal float32: it adds nothing to a sum of at least 1, and costs ten times as much.
UNDERFLOW = -87.0
# Entropies up to this, nats, are what UNDERFLOW and rounding leave of 0.
ZERO = 1e-30
# An additive mask at or below this hides a key, whatever its encoding: -inf, finfo.min, -1e4 (-9984 in BF16).
MASKED = -9.9e3


@dataclass
class Rows:
    """Statistics of each query (B, H, N), and a count of each image and head (B, H)."""

    entropy: Tensor
    peak: Tensor  # the largest weight
    gap: Tensor  # max z - mean z
    keys: Tensor | float  # unmasked keys n of the row
    valid: Tensor | None  # rows with at least one key; None: all
    top: Tensor  # max z
    low: Tensor  # min z
    nonfinite: Tensor  # (B, H) how many values of z are not finite
    extra: dict[str, Tensor] = field(default_factory=dict)  # of the groups of metrics that were asked for


def row_stats(
    q: Tensor,
    k: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cap: float | None = None,
    groups: Sequence[str] = (),
) -> Rows:
    """Row statistics of softmax(mask(cap(q·k + bias))), chunk by chunk over images and heads.

    Args:
        q: (B, H, N, d) float32, multiplied by the scale already.
        k: (B, H_k, M, d) float32, H a multiple of H_k. The queries that share a key head are its rows, one
            head's after the other's, so keys are not copied.
        bias, mask, cap: as :func:`attention_stats` takes them.
        groups: which of ``sink`` and ``bound`` (:mod:`qkexp.probe.metrics`) to add.
    """
    (B, H, N, d), (_, keyed, M, _) = q.shape, k.shape
    length = H // keyed * N  # rows of a key head
    q, k = q.reshape(B * keyed, length, d), k.flatten(0, 1)
    bias = None if bias is None else bias.expand(B, H, N, M)
    seen = None if mask is None else visible(mask).expand(B, H, N, M)
    heads = max(1, min(B * keyed, CHUNK_BYTES // (4 * length * M)))  # of all images, at once
    queries = min(length, max(1, CHUNK_BYTES // (4 * M)))  # all, unless one head's scores are too many
    buffers = q.new_empty(2, heads * queries * M)
    unit = 1.0 if M <= SHORT else LOG2E
    parts = []
    for at, row in itertools.product(range(0, B * keyed, heads), range(0, length, queries)):
        take, span = slice(at, at + heads), slice(row, row + queries)
        size, rows = min(heads, B * keyed - at), min(queries, length - row)
        scores, spare = buffers[:, : size * rows * M].view(2, size, rows, M)
        z, dim = _product(q[take, span], k[take].transpose(1, 2), unit, scores), -1
        if bias is not None:
            z.add_(_pairs(bias, keyed, take, span), alpha=unit)
        hidden = None if seen is None else ~_pairs(seen, keyed, take, span)
        if M <= SHORT:  # keys first: reductions of short rows idle, reductions over the first axis do not
            z, spare, dim = spare.view(M, size, rows).copy_(z.permute(2, 0, 1)), scores.view(M, size, rows), 0
            hidden = None if hidden is None else hidden.permute(2, 0, 1)
        parts.append(_chunk(z, spare, hidden, cap, dim, unit, groups))
    out = {name: torch.cat([part[name].flatten() for part in parts]).view(B, H, N) for name in parts[0]}
    keys = float(M) if seen is None else seen.sum(-1).float()
    if "spread" in out:
        out["entropy_bound"] = entropy_bound(out.pop("spread"), torch.as_tensor(keys, device=q.device))
    return Rows(
        entropy=out.pop("entropy"),
        peak=out.pop("peak"),
        gap=out["top"] - out.pop("mean"),
        keys=keys,
        valid=keys > 0 if isinstance(keys, Tensor) else None,
        top=out.pop("top"),
        low=out.pop("low"),
        nonfinite=out.pop("broken").sum(-1),
        extra=out,
    )


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several layers -> those of one tensor (L·B, H, N); a layer without a mask has all its keys."""
    if len(parts) == 1:
        return parts[0]
    out = {}
    for name in ("entropy", "peak", "gap", "top", "low", "nonfinite"):
        out[name] = torch.cat([getattr(part, name) for part in parts])
    masked = any(part.valid is not None for part in parts)
    keys = torch.cat([torch.as_tensor(p.keys, device=p.top.device).expand(p.top.shape) for p in parts])
    extra = {name: torch.cat([part.extra[name] for part in parts]) for name in parts[0].extra}
    return Rows(**out, keys=keys if masked else parts[0].keys, valid=keys > 0 if masked else None, extra=extra)


def visible(mask: Tensor) -> Tensor:
    """A mask in any encoding -> bool, True where a key may be attended to."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def pairs_of(x: Tensor, at: Tensor, queries: Tensor) -> Tensor:
    """Of an expanded (B, H, N, M), heads ``at`` (counted over images) and a query of each -> (heads, M)."""
    return x[at // x.shape[1], at % x.shape[1], queries]


def _pairs(x: Tensor, keyed: int, take: slice, span: slice) -> Tensor:
    """Of an expanded (B, H, N, M), key heads (counted over images) and rows of them, and no more of it copied."""
    B, H, N, _ = x.shape
    at = torch.arange(B * keyed, device=x.device)[take]
    if keyed == H:
        return x[:, :, span][at // H, at % H]
    rows = torch.arange(H // keyed * N, device=x.device)[span]
    heads = (at % keyed * (H // keyed)).unsqueeze(-1) + rows // N
    return x[(at // keyed).unsqueeze(-1), heads, rows % N]


def _product(q: Tensor, k: Tensor, unit: float, out: Tensor) -> Tensor:
    if unit == 1.0:
        return torch.bmm(q, k, out=out)
    return torch.baddbmm(out, q, k, beta=0, alpha=unit, out=out)  # beta 0: what stood there does not count


def _capped(z: Tensor, cap: float, unit: float) -> Tensor:
    """cap · tanh(z / cap) - cap, in place: softmax ignores the offset, and tanh costs three exponentials.

    Its error is some 1e-7 of the cap. Scores stand in units of 1 / ``unit`` before and after.
    """
    return _exp(z.mul_(2.0 / cap), unit, out=z).add_(1.0).reciprocal_().mul_(-2.0 * cap * unit)


def _exp(z: Tensor, unit: float, out: Tensor) -> Tensor:
    return torch.exp(z, out=out) if unit == 1.0 else torch.exp2(z, out=out)


def _chunk(
    z: Tensor, buffer: Tensor, hidden: Tensor | None, cap: float | None, dim: int, unit: float, groups: Sequence[str]
) -> dict[str, Tensor]:
    """Statistics of scores, which are overwritten; keys stand on axis ``dim``, ``hidden`` marks masked pairs.

    Scores are those times ``unit``. Returns (b, N) each: entropy, peak (the largest weight), top, mean and low (of
    z), broken (values that are not finite); sink (weight of the first key), spread (‖c - mean c‖₂) where asked for.
    """
    low = (z if hidden is None else z.masked_fill(hidden, math.inf)).amin(dim)
    mean = _mean(z, hidden, dim)
    if hidden is not None:
        z.masked_fill_(hidden, -math.inf)
    top = z.amax(dim)
    broken, shift, out = _nonfinite(z, low, top, hidden, dim), top, {}
    if cap is not None:
        z, shift = _capped(z, cap, unit), _capped(top.clone(), cap, unit)
        if hidden is not None:
            z.masked_fill_(hidden, -math.inf)
    if "bound" in groups:
        center = mean if cap is None else _mean(z, hidden, dim)
        apart = torch.sub(z, center.unsqueeze(dim), out=buffer)
        apart = apart if hidden is None else apart.masked_fill_(hidden, 0.0)
        out["spread"] = torch.linalg.vector_norm(apart, dim=dim) / unit
    y = z.sub_(shift.unsqueeze(dim)).clamp_min_(UNDERFLOW * unit)
    e = _exp(y, unit, out=buffer)
    total = e.sum(dim)
    if "sink" in groups:
        first = e.select(dim, 0)
        out["sink"] = (first if hidden is None else first.masked_fill(hidden.select(dim, 0), 0.0)) / total
    if hidden is not None:
        y.masked_fill_(hidden, 0.0)  # 0 · -inf
    mean_y = e.mul_(y).sum(dim) / total
    if unit != 1.0:
        mean_y, top, mean, low = (x / unit for x in (mean_y, top, mean, low))
    entropy = F.threshold(total.log() - mean_y, ZERO, 0.0)
    return {"entropy": entropy, "peak": 1.0 / total, "top": top, "mean": mean, "low": low, "broken": broken, **out}


def _nonfinite(z: Tensor, low: Tensor, top: Tensor, hidden: Tensor | None, dim: int) -> Tensor:
    """How many scores of a row that are not hidden are not finite."""
    if not z.is_cuda and math.isfinite(low.sum() + top.sum()):  # a sum is finite only if its terms are
        return torch.zeros_like(top)
    strange = z.isfinite().logical_not_()
    return (strange if hidden is None else strange & ~hidden).sum(dim).to(top.dtype)


def _mean(z: Tensor, hidden: Tensor | None, dim: int) -> Tensor:
    if hidden is None:
        return z.mean(dim)
    return z.masked_fill(hidden, 0.0).sum(dim) / (~hidden).sum(dim)


def entropy_bound(spread: Tensor, keys: Tensor) -> Tensor:
    """The least entropy, nats, of a row of ``keys`` scores with ‖c - mean c‖₂ = ``spread``; 0 of a single key.

    Zhai et al. 2023 (arXiv 2303.06296), theorem 3.1, which needs no more of a row than this length: with
    β = exp(-S √(n/(n-1))) the entropy is at least log(1 + (n-1) β) + S √(n (n-1)) β / (1 + (n-1) β), and some
    row attains it.
    """
    n = keys.clamp_min(2.0)
    S = spread.clamp_max(200.0)  # there β is 0 in float32, and S · β shall not be ∞ · 0
    beta = torch.exp(-S * (n / (n - 1.0)).sqrt())
    tail = (n - 1.0) * beta
    bound = tail.log1p() + S * (n * (n - 1.0)).sqrt() * beta / (1.0 + tail)
    return torch.where(keys > 1.0, bound, 0.0)
