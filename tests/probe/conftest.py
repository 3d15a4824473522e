"""The metrics written out once more, as plain formulas on full N x M matrices in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def plain_stats(
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cap: float | None = None,
) -> dict[str, Any]:
    """As :func:`qkexp.attention_stats`, ``mask`` bool (True = seen); and ``rows``: entropy of each row (B, H, N)."""
    k = torch.stack([k[:, h // (q.shape[1] // k.shape[1])] for h in range(q.shape[1])], dim=1)
    q, k = q.detach().double().numpy(), k.detach().double().numpy()
    (B, H, N, _), M = q.shape, k.shape[2]
    s = np.broadcast_to(np.asarray(torch.as_tensor(scale).detach().double().reshape(-1)), (H,))
    dots = np.einsum("bhnd,bhmd->bhnm", q, k)
    z = s[:, None, None] * dots + (0.0 if bias is None else bias.double().numpy())
    seen = np.broadcast_to(True if mask is None else mask.numpy(), (B, H, N, M))
    c = z if cap is None else cap * np.tanh(z / cap)
    rows = np.full((B, H, N), np.nan)
    frac, peak, gap, first, bound = (rows.copy() for _ in range(5))
    for b, h, i in np.ndindex(B, H, N):
        keys = seen[b, h, i]
        if not keys.any():
            continue
        row = c[b, h, i, keys]
        p = np.exp(row - row.max())
        p /= p.sum()
        rows[b, h, i] = -sum(x * np.log(x) for x in p if x > 0)
        peak[b, h, i] = p.max()
        gap[b, h, i] = z[b, h, i, keys].max() - z[b, h, i, keys].mean()
        first[b, h, i] = p[0] if keys[0] else 0.0
        bound[b, h, i] = least_entropy(row)
        if keys.sum() > 1:
            frac[b, h, i] = rows[b, h, i] / np.log(keys.sum())
    out: dict[str, list[float]] = {}
    lengths = np.linalg.norm(q, axis=-1), np.linalg.norm(k, axis=-1)
    for h in range(H):
        valid, choice = ~np.isnan(rows[:, h]), ~np.isnan(frac[:, h])
        size = np.where(seen[:, h], np.abs(z[:, h]), -1.0)
        b, i, j = np.unravel_index(size.argmax(), size.shape)
        one = {
            "q_in_norm_mean": lengths[0][:, h].mean(),
            "k_in_norm_mean": lengths[1][:, h].mean(),
            "max_logit": z[:, h][seen[:, h]].max(),
            "max_abs_logit": size.max(),
            "max_pair_q_norm": lengths[0][b, h, i],
            "max_pair_k_norm": lengths[1][b, h, j],
            "max_pair_cos": dots[b, h, i, j] / max(lengths[0][b, h, i] * lengths[1][b, h, j], 1e-300),
            "max_logit_capped": c[:, h][seen[:, h]].max(),
            "logit_gap_mean": gap[:, h][valid].mean(),
            "entropy_mean": rows[:, h][valid].mean(),
            "entropy_p05": np.quantile(rows[:, h][valid], 0.05),
            "entropy_frac": frac[:, h][choice].mean() if choice.any() else np.nan,
            "collapsed_rows": (frac[:, h][choice] < 0.05).mean() if choice.any() else np.nan,
            "attn_max_mean": peak[:, h][valid].mean(),
            "score_scale": s[h],
            "masked_rows": (~valid).sum(),
            "sink_mean": first[:, h][valid].mean(),
            "entropy_bound_mean": bound[:, h][valid].mean(),
        }
        for name, value in one.items():
            out.setdefault(name, []).append(float(value))
    return {name: np.array(values) for name, values in out.items()} | {"rows": rows}


def least_entropy(row: np.ndarray) -> float:
    """Zhai et al. 2023: entropy of the sharpest softmax whose logits have the row's ‖z - mean z‖₂.

    It is that of one logit at S √((n-1)/n) and all others at -S / √(n (n-1)).
    """
    n, S = len(row), np.linalg.norm(row - row.mean())
    if n == 1:
        return 0.0
    worst = np.full(n, -S / np.sqrt(n * (n - 1)))
    worst[0] = S * np.sqrt((n - 1) / n)
    p = np.exp(worst - worst.max())
    p /= p.sum()
    return float(-sum(x * np.log(x) for x in p if x > 0))


@pytest.fixture(scope="session")
def reference() -> Callable[..., dict[str, Any]]:
    return plain_stats
