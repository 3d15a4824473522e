"""Statistics of attention from q̂ and k̂: pure tensor functions, no hooks, no logging, no synchronising.

Everything is float32 outside autocast, on detached inputs. Shapes: B images, H heads, N queries,
M keys, d the width of a head; "rows" are queries (:mod:`qkexp.probe.rows`). Keys may have fewer heads than
queries (grouped-query attention): query head h pairs with key head h // (H / H_k).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qkexp.model.core import soft_cap
from qkexp.probe.metrics import COLLAPSED, SCORE_GROUPS, names
from qkexp.probe.rows import MASKED, SHORT, Rows, joined, pairs_of, row_stats, visible


@torch.no_grad()
def attention_stats(
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cap: float | None = None,
    groups: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Statistics of softmax(mask(cap(scale · q·k + bias))) per head.

    Args:
        q, k: (B, H, N, d) and (B, H_k, M, d), as they enter the dot product; H is a multiple of H_k, and query
            head h pairs with key head h // (H / H_k).
        scale: a number, or a tensor (1,) or (H,).
        bias: added to the score, broadcastable to (B, H, N, M).
        mask: broadcastable to (B, H, N, M): bool, True where a key may be attended to; or additive,
            where 0 shows a key, -1e4 and below hide it, and other values are refused (pass them as bias).
        cap: soft-cap of the score, None for none.
        groups: further metrics, any of :data:`qkexp.probe.metrics.SCORE_GROUPS`.

    Returns:
        Metric name -> (H,) float32, on q's device; the names are those of
        :data:`qkexp.probe.metrics.METRICS` that need no raw projections, and those of the groups. A head
        whose inputs are not finite has NaN there and a count under ``nonfinite``; where no row has two keys
        there is nothing to be spread over, and ``entropy_frac`` and ``collapsed_rows`` are NaN.

    Raises:
        ValueError: a mask that is neither bool nor additive, heads that cannot be paired, or an unknown group.
    """
    if mask is not None and not _is_mask(mask):
        raise ValueError("mask must be bool, or additive with 0 (seen) and -1e4 or below (hidden); use bias else")
    if q.shape[1] % k.shape[1] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)}: (B, H, N, d) and (B, H / n, M, d) are meant")
    if not set(groups) <= set(SCORE_GROUPS):
        raise ValueError(f"groups {tuple(groups)}: of q and k alone there are {', '.join(SCORE_GROUPS)}")
    out = layer_stats([q], [k], [scale], bias=bias, mask=mask, cap=cap, groups=groups)
    return {name: out[name][0] for name in names(groups) if name in out}


@torch.no_grad()
def layer_stats(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    scale: Sequence[float | Tensor],
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    mask: Tensor | Sequence[Tensor | None] | None = None,
    cap: float | None = None,
    score_dtype: torch.dtype | None = None,
    groups: Sequence[str] = (),
) -> dict[str, Tensor]:
    """:func:`attention_stats` of several layers of one shape in one call: metric -> (layers, H).

    ``score_dtype`` is the kernel's, None for that of q. A bias or mask is that of every layer, or one a layer in a
    list. A non-finite value of a key counts in every head that the key serves. Beside the
    metrics stand ``q_length_mean``, ``q_length_max`` and those of k, which the other's non-finite values do not spoil;
    and under a mask ``seen`` (2, layers, H), rows with an unmasked key, and rows with more than one.
    """
    L, (B, H, *_) = len(q), q[0].shape
    served = H // k[0].shape[1]  # query heads of a key head
    biases, masks = _a_layer(bias, L), _a_layer(mask, L)
    with full_float32(q[0].device.type):
        (qf, kf), (q_norm, k_norm), (q_bad, k_bad) = zip(*(_magnitudes(x) for x in (q, k)), strict=True)
        scales = torch.stack([_scale(s, H, qf.device) for s in scale])  # (L, H)
        qf.view(L, B, H, -1).mul_(scales.view(L, 1, H, 1))
        rows = _rows(qf, kf, biases, masks, cap, groups)
        if served > 1:
            k_norm, k_bad = k_norm.repeat_interleave(served, 1), k_bad.repeat_interleave(served, 1)
        out = _reduce_rows(rows, L)
        out |= _max_pair(rows, qf, kf, q_norm, k_norm, scales, biases, masks, score_dtype or q[0].dtype)
        out |= {
            "q_in_norm_mean": _head_mean(q_norm, L),
            "k_in_norm_mean": _head_mean(k_norm, L),
            "max_logit_capped": soft_cap(out["max_logit"], cap),
        }
        broken = (q_bad + k_bad + rows.nonfinite).view(L, B, H).sum(1).float()
        largest = [x.amax(-1).view(L, B, H).amax(1) for x in (q_norm, k_norm)]
        lengths = torch.stack([out["q_in_norm_mean"], largest[0], out["k_in_norm_mean"], largest[1]])
        lengths = torch.where(lengths.isfinite(), lengths, math.nan)
    masked_rows, seen = out.pop("masked_rows"), out.pop("seen", None)
    # one pass over all of them: what non-finite inputs spoil is absent
    values = torch.stack(list(out.values()))
    values = torch.where((broken == 0) & values.isfinite(), values, math.nan)
    out = dict(zip(out, values.unbind(), strict=True))
    out |= dict(zip(("q_length_mean", "q_length_max", "k_length_mean", "k_length_max"), lengths.unbind(), strict=True))
    out |= {"masked_rows": masked_rows, "nonfinite": broken, "score_scale": scales}
    return out if seen is None else {**out, "seen": seen}


def _a_layer(x: Tensor | Sequence[Tensor | None] | None, layers: int) -> list[Tensor | None]:
    """What one layer has, of each."""
    return [x] * layers if x is None or isinstance(x, Tensor) else list(x)


def _rows(
    q: Tensor,
    k: Tensor,
    biases: list[Tensor | None],
    masks: list[Tensor | None],
    cap: float | None,
    groups: Sequence[str],
) -> Rows:
    """Row statistics of all layers: in one call where no layer has a bias or mask of its own."""
    if all(x is None for x in (*biases, *masks)):
        return row_stats(q, k, cap=cap, groups=groups)
    each = zip(q.chunk(len(biases)), k.chunk(len(biases)), biases, masks, strict=True)
    return joined([row_stats(a, b, bias=bias, mask=mask, cap=cap, groups=groups) for a, b, bias, mask in each])


@contextmanager
def full_float32(device: str) -> Iterator[None]:
    """Outside autocast, and products of float32 in float32: TF32 or BF16, where training asked for it, errs by 1e-3."""
    cpu: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, cpu.matmul)
    kept = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, kept, strict=True):
            backend.fp32_precision = precision


def _magnitudes(x: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Layers (B, H, N, d) -> float32 (L·B, H, N, d), lengths (L·B, H, N), non-finite counts (L·B, H)."""
    stacked = _stack(x)
    if stacked.shape[2] > SHORT:
        norms = vector_norms(stacked)
    else:  # a product is faster than many short sums, while its square stays in cache
        norms = ((stacked * stacked) @ stacked.new_ones(stacked.shape[-1], 1)).sqrt_().squeeze(-1)
    # a sum is finite only if its terms are; the exact count is paid for where it is needed
    if not norms.is_cuda and math.isfinite(norms.sum()):
        return stacked, norms, torch.zeros(norms.shape[:2], dtype=torch.int64)
    return stacked, norms, stacked.isfinite().logical_not_().flatten(2).sum(-1)


@torch.no_grad()
def vector_norms(x: Tensor) -> Tensor:
    """‖x‖₂ over the last axis, float32."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)


@torch.no_grad()
def raw_norms(name: str, lengths: Sequence[Tensor | None], stats: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mean and maximum of ‖q‖ or ‖k‖ of the projections -> metric: (layers, H).

    ``lengths`` are (B, N, H) a layer (of keys, H_k: each head has those of the key head it reads), or None where
    the projections are what enters the dot product: then its ``stats`` have been measured already.
    """
    given = [x for x in lengths if x is not None]
    if not given:
        mean, largest = stats[f"{name}_length_mean"], stats[f"{name}_length_max"]
    else:
        norms = torch.stack(given)
        values = torch.stack([norms.mean((1, 2)), norms.amax((1, 2))])
        served = stats["score_scale"].shape[1] // values.shape[-1]
        values = values if served == 1 else values.repeat_interleave(served, -1)
        mean, largest = torch.where(values.isfinite(), values, math.nan).unbind()
    return {f"{name}_norm_mean": mean, f"{name}_norm_max": largest}


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Layers (B, H, N, d) of any strides -> one contiguous float32 tensor (L·B, H, N, d)."""
    first = tensors[0]
    out = torch.empty((len(tensors), *first.shape), dtype=torch.float32, device=first.device)
    for place, tensor in zip(out, tensors, strict=True):
        if tensor.shape[2] > SHORT and tensor.stride(1) < tensor.stride(2):
            # (B, N, H, d) in memory, and no longer in cache: read in that order, then rearranged
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        place.copy_(tensor)
    return out.flatten(0, 1)


def _scale(scale: float | Tensor, heads: int, device: torch.device) -> Tensor:
    """A scale as (H,) on the device; filling copies nothing from the host, which would wait for the device."""
    if isinstance(scale, Tensor):
        return scale.detach().to(device, torch.float32).reshape(-1).expand(heads)
    return torch.full((heads,), float(scale), device=device)


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at magnitude x, finite and >= 0 (0.25 at 50 in BF16)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.clamp_min(info.tiny)).exponent - 1  # below tiny the distance stays
    return torch.ldexp(torch.full_like(x, info.eps), exponent)


def _is_mask(mask: Tensor) -> bool:
    """Whether a mask is bool, or additive with two values only (a look at the values: this synchronises)."""
    if mask.dtype == torch.bool:
        return True
    return mask.is_floating_point() and bool(((mask == 0) | (mask <= MASKED)).all())


# ---------------------------------------------------------------- rows -> heads


def _head_mean(rows: Tensor, layers: int) -> Tensor:
    """(L·B, H, N) -> mean over images and rows (L, H)."""
    return rows.view(layers, -1, *rows.shape[1:]).mean((1, 3))


def _reduce_rows(rows: Rows, layers: int) -> dict[str, Tensor]:
    if rows.valid is None:
        several = rows.keys > 1
        frac = rows.entropy / math.log(rows.keys) if several else torch.full_like(rows.entropy, math.nan)
        collapsed = (frac < COLLAPSED).float() if several else frac
        names = ["entropy_mean", "entropy_frac", "collapsed_rows", "attn_max_mean", "logit_gap_mean"]
        names += [f"{name}_mean" for name in rows.extra]
        parts = torch.stack([rows.entropy, frac, collapsed, rows.peak, rows.gap, *rows.extra.values()])
        means = _head_mean(parts.flatten(0, 1), layers * len(names)).view(len(names), layers, -1)
        return {
            **dict(zip(names, means.unbind(), strict=True)),
            "entropy_p05": percentile(_by_head(rows.entropy, layers), 0.05),
            "masked_rows": torch.zeros_like(means[0]),
        }
    nan = torch.full((), math.nan, device=rows.entropy.device)
    assert isinstance(rows.keys, Tensor)

    def mean(x: Tensor, where: Tensor) -> Tensor:
        return _by_head(torch.where(where, x, nan), layers).nanmean(-1)

    choice = rows.keys > 1
    frac = rows.entropy / rows.keys.log()
    entropy = torch.where(rows.valid, rows.entropy, nan)
    return {
        "entropy_mean": mean(rows.entropy, rows.valid),
        "entropy_p05": _by_head(entropy, layers).nanquantile(0.05, dim=-1),
        "entropy_frac": mean(frac, choice),
        "collapsed_rows": mean((frac < COLLAPSED).float(), choice),
        "attn_max_mean": mean(rows.peak, rows.valid),
        "logit_gap_mean": mean(rows.gap, rows.valid),
        **{f"{name}_mean": mean(value, rows.valid) for name, value in rows.extra.items()},
        "masked_rows": _by_head(~rows.valid, layers).sum(-1).float(),
        "seen": torch.stack([_by_head(x, layers).sum(-1).float() for x in (rows.valid, choice)]),
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
    biases: list[Tensor | None],
    masks: list[Tensor | None],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """max z, max |z| and its spacing in ``dtype``, and lengths and cosine of the pair that attains it.

    ``q_norm`` and ``k_norm`` are (L·B, H, ·). Its query is known from the row statistics; only that query's scores
    are computed again.
    """
    (L, H), N, M = scales.shape, q.shape[2], k.shape[2]
    B, served = q.shape[0] // L, H // k.shape[1]
    top, low = rows.top.amax(-1), rows.low.amin(-1)  # (L·B, H)
    size, image = torch.maximum(top, -low).view(L, B, H).max(1)  # (L, H) each
    first = torch.arange(L, device=q.device).view(L, 1) * (B * H) + torch.arange(H, device=q.device)
    at = (first + image * H).flatten()  # of each layer and head, the image's place in (L·B·H)
    query = torch.maximum(rows.top.view(-1, N)[at], -rows.low.view(-1, N)[at]).argmax(-1)
    query_at = at * N + query
    dots = torch.bmm(k.view(-1, M, k.shape[-1])[at // served], q.view(-1, q.shape[-1])[query_at].unsqueeze(-1)).squeeze(
        -1
    )
    z = _sizes(dots, biases, masks, at, query, (B, H, N, M))
    key = z.argmax(-1, keepdim=True)
    dot = dots.gather(-1, key).view(L, H)  # scaled, no bias
    q_length = q_norm.take(query_at).view(L, H)
    k_length = k_norm.take(at * M + key.squeeze(-1)).view(L, H)
    cosine = (dot / (scales * q_length * k_length)).nan_to_num_(0.0, 0.0, 0.0)  # 0 of a zero vector or scale
    out = {
        "max_pair_q_norm": q_length,
        "max_pair_k_norm": k_length,
        "max_pair_cos": cosine,
        "score_ulp": spacing(size, dtype),
    }
    if rows.valid is not None:  # a head without any unmasked pair
        out = {name: torch.where(size > -math.inf, value, math.nan) for name, value in out.items()}
    return {**out, "max_logit": top.view(L, B, H).amax(1), "max_abs_logit": size}


def _sizes(
    dots: Tensor,
    biases: list[Tensor | None],
    masks: list[Tensor | None],
    at: Tensor,
    query: Tensor,
    shape: tuple[int, int, int, int],
) -> Tensor:
    """|z| of one query of each layer and head, from its scaled products (L·H, M); -1 where masked."""
    B, H = shape[:2]
    if all(x is None for x in (*biases, *masks)):
        return dots.abs()
    out = []
    for layer, (bias, mask) in enumerate(zip(biases, masks, strict=True)):
        own = slice(layer * H, (layer + 1) * H)
        place = at[own] - layer * B * H, query[own]
        z = dots[own] if bias is None else dots[own] + pairs_of(bias.expand(shape), *place)
        z = z.abs()
        out.append(z if mask is None else z.masked_fill(~pairs_of(visible(mask).expand(shape), *place), -1.0))
    return torch.cat(out)
