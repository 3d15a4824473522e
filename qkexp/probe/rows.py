"""Statistics of each query's row of scores, chunk by chunk: no N×M tensor outlives a chunk.

A softmax is shifted by its row's maximum and an entropy is log S − T / S with S = Σ e^y, T = Σ y e^y,
y = c − max c ≤ 0: never log(p + eps), never negative, exact at one-hot and at uniform.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Bytes of scores computed at once: small enough to stay in cache, large enough to amortise the calls.
CHUNK_BYTES = 3 << 20
# Rows of at most so many keys are reduced over the first axis of their tensor.
SHORT = 64
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


def row_stats(
    q: Tensor, k: Tensor, *, bias: Tensor | None = None, mask: Tensor | None = None, cap: float | None = None
) -> Rows:
    """Row statistics of softmax(mask(cap(q·k + bias))), chunk by chunk over images and heads.

    Args:
        q: (B, H, N, d) float32, multiplied by the scale already.
        k: (B, H, M, d) float32.
        bias, mask, cap: as :func:`attention_stats` takes them.
    """
    B, H, N, _ = q.shape
    M = k.shape[2]
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    bias = None if bias is None else bias.expand(B, H, N, M)
    seen = None if mask is None else visible(mask).expand(B, H, N, M)
    heads = max(1, min(B * H, CHUNK_BYTES // (4 * N * M)))  # of all images, at once
    queries = min(N, max(1, CHUNK_BYTES // (4 * M)))  # N, unless one head's scores are too many
    buffers = q.new_empty(2, heads * queries * M)
    everything = torch.arange(B * H if bias is not None or seen is not None else 0, device=q.device)
    parts = []
    for at, row in itertools.product(range(0, B * H, heads), range(0, N, queries)):
        take, span = slice(at, at + heads), slice(row, row + queries)
        size, length = min(heads, B * H - at), min(queries, N - row)
        scores, spare = buffers[:, : size * length * M].view(2, size, length, M)
        z, dim = torch.bmm(q[take, span], k[take].transpose(1, 2), out=scores), -1
        if bias is not None:
            z += pairs_of(bias, everything[take], span)
        hidden = None if seen is None else ~pairs_of(seen, everything[take], span)
        if M <= SHORT:  # keys first: reductions of short rows idle, reductions over the first axis do not
            z, spare, dim = spare.view(M, size, length).copy_(z.permute(2, 0, 1)), scores.view(M, size, length), 0
            hidden = None if hidden is None else hidden.permute(2, 0, 1)
        parts.append([x.flatten() for x in _chunk(z, spare, hidden, cap, dim)])
    entropy, peak, top, mean, low, broken = (torch.cat(p).view(B, H, N) for p in zip(*parts, strict=True))
    keys = float(M) if seen is None else seen.sum(-1).float()
    return Rows(
        entropy=entropy,
        peak=peak,
        gap=top - mean,
        keys=keys,
        valid=keys > 0 if isinstance(keys, Tensor) else None,
        top=top,
        low=low,
        nonfinite=broken.sum(-1),
    )


def visible(mask: Tensor) -> Tensor:
    """A mask in any encoding -> bool, True where a key may be attended to."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def pairs_of(x: Tensor, at: Tensor, queries: Tensor | slice) -> Tensor:
    """Of an expanded (B, H, N, M), heads ``at`` (counted over images) and queries, and no more of it copied."""
    H = x.shape[1]
    return x[:, :, queries][at // H, at % H] if isinstance(queries, slice) else x[at // H, at % H, queries]


def _capped(z: Tensor, cap: float) -> Tensor:
    """cap · tanh(z / cap) - cap, in place: softmax ignores the offset, and tanh costs three exponentials.

    Its error is some 1e-7 of the cap.
    """
    return z.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0 * cap)


def _chunk(z: Tensor, buffer: Tensor, hidden: Tensor | None, cap: float | None, dim: int) -> tuple[Tensor, ...]:
    """Statistics of scores, which are overwritten; keys stand on axis ``dim``, ``hidden`` marks masked pairs.

    Returns (b, N) each: entropy, largest weight, max z, mean z, min z, non-finite values.
    """
    low = (z if hidden is None else z.masked_fill(hidden, math.inf)).amin(dim)
    if hidden is None:
        mean = z.mean(dim)
    else:
        mean = z.masked_fill(hidden, 0.0).sum(dim) / (~hidden).sum(dim)
        z.masked_fill_(hidden, -math.inf)
    top = z.amax(dim)
    broken = torch.zeros_like(top)
    if z.is_cuda or not math.isfinite(low.sum() + top.sum()):  # a sum is finite only if its terms are
        strange = z.isfinite().logical_not_()
        broken = (strange if hidden is None else strange & ~hidden).sum(dim).to(top.dtype)
    shift = top
    if cap is not None:
        z, shift = _capped(z, cap), _capped(top.clone(), cap)
        if hidden is not None:
            z.masked_fill_(hidden, -math.inf)
    y = z.sub_(shift.unsqueeze(dim)).clamp_min_(UNDERFLOW)
    e = torch.exp(y, out=buffer)
    total = e.sum(dim)
    if hidden is not None:
        y.masked_fill_(hidden, 0.0)  # 0 · -inf
    entropy = F.threshold(total.log() - e.mul_(y).sum(dim) / total, ZERO, 0.0)
    return entropy, 1.0 / total, top, mean, low, broken
