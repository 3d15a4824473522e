"""Statistics of attention from q̂ and k̂: pure tensor functions, no hooks, no logging, no synchronising.

Everything is float32 outside autocast, on detached inputs. Shapes: B images, H heads, N queries,
M keys, d the width of a head; "rows" are queries. No N×M tensor outlives one chunk.

A softmax is shifted by its row's maximum and an entropy is log S − T / S with S = Σ e^y, T = Σ y e^y,
y = c − max c ≤ 0: never log(p + eps), never negative, exact at one-hot and at uniform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkexp.model.core import soft_cap
from qkexp.probe.metrics import COLLAPSED

# Bytes of scores computed at once: small enough to stay in cache, large enough to amortise the calls.
CHUNK_BYTES = 3 << 20
# Rows of at most so many keys are reduced over the first axis of their tensor.
SHORT = 64
# An additive mask at or below this hides a key, whatever its encoding (-inf, finfo.min, -1e4).
MASKED = -1e4


@dataclass
class Rows:
    """Statistics of each query (B, H, N), and of each image and head (B, H)."""

    entropy: Tensor
    peak: Tensor  # the largest weight
    gap: Tensor  # max z - mean z
    keys: Tensor | float  # unmasked keys n of the row
    valid: Tensor | None  # rows with at least one key; None: all
    max: Tensor  # (B, H) max z
    min: Tensor  # (B, H) min z
    nonfinite: Tensor  # (B, H) how many values of z are not finite


@torch.no_grad()
def attention_stats(
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cap: float | None = None,
) -> dict[str, Tensor]:
    """Statistics of softmax(mask(cap(scale · q·k + bias))) per head.

    Args:
        q, k: (B, H, N, d) and (B, H, M, d), as they enter the dot product.
        scale: a number, or a tensor (1,) or (H,).
        bias: added to the score, broadcastable to (B, H, N, M).
        mask: broadcastable to (B, H, N, M): bool, True where a key may be attended to; or additive,
            where values at or below -1e4 hide the key and others are refused (pass them as bias).
        cap: soft-cap of the score, None for none.

    Returns:
        Metric name -> (H,) float32, on q's device; the names are those of
        :data:`qkexp.probe.metrics.METRICS` that need no raw projections. A head whose inputs are not
        finite has NaN there and a count under ``nonfinite``.
    """
    out = layer_stats([q], [k], [scale], bias=bias, mask=mask, cap=cap)
    return {name: value[0] for name, value in out.items()}


@torch.no_grad()
def layer_stats(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    scale: Sequence[float | Tensor],
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cap: float | None = None,
    score_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """:func:`attention_stats` of several layers of one shape in one call: metric -> (layers, H).

    ``score_dtype`` is the kernel's, None for that of q. A bias or mask is for a single layer.
    """
    L, (B, H, *_) = len(q), q[0].shape
    with torch.autocast(q[0].device.type, enabled=False):
        (qf, kf), (q_norm, k_norm), (q_bad, k_bad) = zip(*(_magnitudes(x) for x in (q, k)), strict=True)
        scales = torch.stack([_scale(s, H, qf.device) for s in scale])  # (L, H)
        qf.view(L, B, H, -1).mul_(scales.view(L, 1, H, 1))
        rows = row_stats(qf, kf, bias=bias, mask=mask, cap=cap)
        out = _reduce_rows(rows, L)
        out |= {
            "q_in_norm_mean": _head_mean(q_norm, L),
            "k_in_norm_mean": _head_mean(k_norm, L),
            "max_logit_capped": soft_cap(out["max_logit"], cap),
            **_max_pair(rows, qf, kf, q_norm, k_norm, scales, bias, mask),
        }
        broken = (q_bad + k_bad + rows.nonfinite).view(L, B, H).sum(1).float()
    # one pass over all of them: what non-finite inputs spoil is absent
    values = torch.stack(list(out.values()))
    values = torch.where((broken == 0) & values.isfinite(), values, math.nan)
    out = dict(zip(out, values.unbind(), strict=True))
    out["score_ulp"] = spacing(out["max_abs_logit"], score_dtype or q[0].dtype)
    return out | {"nonfinite": broken, "score_scale": scales}


def _magnitudes(x: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Layers (B, H, N, d) -> float32 (L·B, H, N, d), lengths (L·B, H, N), non-finite counts (L·B, H)."""
    stacked = _stack(x)
    norms = ((stacked * stacked) @ stacked.new_ones(stacked.shape[-1], 1)).sqrt_().squeeze(-1)
    # a length is finite only if its terms are; the exact count is paid for where it is needed
    if not norms.is_cuda and norms.isfinite().all():
        return stacked, norms, torch.zeros(norms.shape[:2], dtype=torch.int64)
    return stacked, norms, stacked.isfinite().logical_not_().flatten(2).sum(-1)


@torch.no_grad()
def vector_norms(x: Tensor) -> Tensor:
    """‖x‖₂ over the last axis, float32."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)


@torch.no_grad()
def raw_norms(name: str, lengths: Sequence[Tensor]) -> dict[str, Tensor]:
    """Mean and maximum of ‖q‖ or ‖k‖, given (B, N, H) a layer -> metric: (layers, H)."""
    norms = torch.stack(list(lengths))
    values = torch.stack([norms.mean((1, 2)), norms.amax((1, 2))])
    mean, largest = torch.where(values.isfinite(), values, math.nan).unbind()
    return {f"{name}_norm_mean": mean, f"{name}_norm_max": largest}


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Layers (B, H, N, d) of any strides -> one contiguous float32 tensor (L·B, H, N, d)."""
    first = tensors[0]
    out = torch.empty((len(tensors), *first.shape), dtype=torch.float32, device=first.device)
    for place, tensor in zip(out, tensors, strict=True):
        place.copy_(tensor)
    return out.flatten(0, 1)


def _scale(scale: float | Tensor, heads: int, device: torch.device) -> Tensor:
    return torch.as_tensor(scale, dtype=torch.float32, device=device).detach().reshape(-1).expand(heads)


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at magnitude x (0.25 at 50 in BF16)."""
    exponent = torch.frexp(x).exponent - 1
    return torch.ldexp(torch.full_like(x, torch.finfo(dtype).eps), exponent)


# ---------------------------------------------------------------- rows


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
    bias = None if bias is None else bias.expand(B, H, N, M).flatten(0, 1)
    seen = None if mask is None else visible(mask).expand(B, H, N, M).flatten(0, 1)
    chunk = max(1, min(B * H, CHUNK_BYTES // (4 * N * M)))
    buffers = q.new_empty(3, chunk, N, M)
    parts = []
    for at in range(0, B * H, chunk):
        take, size = slice(at, at + chunk), min(chunk, B * H - at)
        scores, weights, spare = buffers[:, :size]
        z = torch.bmm(q[take], k[take].transpose(1, 2), out=scores)
        if bias is not None:
            z += bias[take]
        hidden = None if seen is None else ~seen[take]
        dim = -1
        if M <= SHORT:  # keys first: reductions of short rows idle, reductions over the first axis do not
            z, weights, dim = spare.view(M, size, N).copy_(z.permute(2, 0, 1)), weights.view(M, size, N), 0
            hidden = None if hidden is None else hidden.permute(2, 0, 1)
        parts.append(_chunk(z, weights, hidden, cap, dim))
    entropy, peak, top, mean, low, broken = (torch.cat(p).view(B, H, N) for p in zip(*parts, strict=True))
    keys = float(M) if seen is None else seen.sum(-1).view(B, H, N).float()
    return Rows(
        entropy=entropy,
        peak=peak,
        gap=top - mean,
        keys=keys,
        valid=keys > 0 if isinstance(keys, Tensor) else None,
        max=top.amax(-1),
        min=low.amin(-1),
        nonfinite=broken.sum(-1),
    )


def visible(mask: Tensor) -> Tensor:
    """A mask in any encoding -> bool, True where a key may be attended to."""
    return mask if mask.dtype == torch.bool else mask > MASKED


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
    if z.is_cuda or not (low.isfinite().all() and top.isfinite().all()):
        strange = z.isfinite().logical_not_()
        broken = (strange if hidden is None else strange & ~hidden).sum(dim).to(top.dtype)
    shift = top
    if cap is not None:
        z.div_(cap).tanh_().mul_(cap)
        shift = soft_cap(top, cap)
        if hidden is not None:
            z.masked_fill_(hidden, -math.inf)
    y = z.sub_(shift.unsqueeze(dim))
    e = torch.exp(y, out=buffer)
    total = e.sum(dim)
    if hidden is not None:
        y.masked_fill_(hidden, 0.0)  # 0 · -inf
    entropy = (total.log() - e.mul_(y).sum(dim) / total).clamp_min_(0.0)
    return entropy, 1.0 / total, top, mean, low, broken


# ---------------------------------------------------------------- rows -> heads


def _head_mean(rows: Tensor, layers: int) -> Tensor:
    """(L·B, H, N) -> mean over images and rows (L, H)."""
    return rows.view(layers, -1, *rows.shape[1:]).mean((1, 3))


def _reduce_rows(rows: Rows, layers: int) -> dict[str, Tensor]:
    by_image = (layers, -1, rows.max.shape[-1])
    out = {
        "max_logit": rows.max.view(by_image).amax(1),
        "max_abs_logit": torch.maximum(rows.max, -rows.min).view(by_image).amax(1),
    }
    if rows.valid is None:
        frac = rows.entropy / math.log(rows.keys) if rows.keys > 1 else torch.full_like(rows.entropy, math.nan)
        names = ("entropy_mean", "entropy_frac", "collapsed_rows", "attn_max_mean", "logit_gap_mean")
        parts = torch.stack([rows.entropy, frac, (frac < COLLAPSED).float(), rows.peak, rows.gap])
        means = _head_mean(parts.flatten(0, 1), layers * len(names)).view(len(names), layers, -1)
        return out | {
            **dict(zip(names, means.unbind(), strict=True)),
            "entropy_p05": percentile(_by_head(rows.entropy, layers), 0.05),
            "masked_rows": torch.zeros_like(out["max_logit"]),
        }
    nan = torch.tensor(math.nan, device=rows.entropy.device)
    assert isinstance(rows.keys, Tensor)

    def mean(x: Tensor, where: Tensor) -> Tensor:
        return _by_head(torch.where(where, x, nan), layers).nanmean(-1)

    choice = rows.keys > 1
    frac = rows.entropy / rows.keys.log()
    entropy = torch.where(rows.valid, rows.entropy, nan)
    return out | {
        "entropy_mean": mean(rows.entropy, rows.valid),
        "entropy_p05": _by_head(entropy, layers).nanquantile(0.05, dim=-1),
        "entropy_frac": mean(frac, choice),
        "collapsed_rows": mean((frac < COLLAPSED).float(), choice),
        "attn_max_mean": mean(rows.peak, rows.valid),
        "logit_gap_mean": mean(rows.gap, rows.valid),
        "masked_rows": _by_head(~rows.valid, layers).sum(-1).float(),
    }


def _by_head(rows: Tensor, layers: int) -> Tensor:
    """(L·B, H, N) -> (L, H, B·N)."""
    return rows.view(layers, -1, *rows.shape[1:]).transpose(1, 2).flatten(2)


def percentile(x: Tensor, fraction: float) -> Tensor:
    """Linearly interpolated percentile over the last axis, of any length (torch.quantile has a limit)."""
    place = fraction * (x.shape[-1] - 1)
    below = math.floor(place)
    smallest = x.topk(min(below + 2, x.shape[-1]), dim=-1, largest=False).values
    return torch.lerp(smallest[..., below], smallest[..., -1], place - below)


def _max_pair(
    rows: Rows,
    q: Tensor,
    k: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
) -> dict[str, Tensor]:
    """Lengths and cosine of the pair that attains max |z|, per layer and head.

    The image is known from the row statistics; only its scores are computed again.
    """
    (L, H), N, M, d = scales.shape, q.shape[2], k.shape[2], q.shape[3]
    B = q.shape[0] // L
    size = torch.maximum(rows.max, -rows.min).view(L, B, H)
    image = size.argmax(1)  # (L, H)
    layer = torch.arange(L, device=q.device).view(L, 1)
    head = torch.arange(H, device=q.device).view(1, H)
    at = (layer * B + image, head)  # index of the image's queries in (L·B, H)
    dots = q[at] @ k[at].transpose(-2, -1)  # (L, H, N, M), scaled, no bias
    z = dots if bias is None else dots + bias.expand(B, H, N, M)[image[0], head[0]]
    z = z.abs()
    if mask is not None:
        z = z.masked_fill(~visible(mask).expand(B, H, N, M)[image[0], head[0]], -1.0)
    row = z.amax(-1).argmax(-1)  # (L, H)
    column = z[layer, head, row].argmax(-1)
    q_length, k_length = q_norm[at][layer, head, row], k_norm[at][layer, head, column]
    dot = dots[layer, head, row, column] / scales
    cosine = torch.where(q_length * k_length > 0, dot / (q_length * k_length), 0.0)
    return {"max_pair_q_norm": q_length, "max_pair_k_norm": k_length, "max_pair_cos": cosine}
