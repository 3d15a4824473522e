"""The gradient of the loss with respect to the scores, from what reaches the output of attention."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from qkexp.model.core import Scale, per_head, soft_cap
from qkexp.probe.rows import CHUNK_BYTES, visible
from qkexp.probe.stats import full_float32


@torch.no_grad()
def score_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    scale: Scale,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """‖∂L/∂z‖² of each head (H,), float32: the sum over images, queries and keys.

    With dO = ∂L/∂(p·v) it is ∂L/∂p = dO vᵀ, ∂L/∂c = p ∘ (∂L/∂p − Σ_j p ∂L/∂p), ∂L/∂z = ∂L/∂c · (1 − (c/cap)²), chunk by
    chunk: no (N, M) tensor outlives one, and the graph is not touched.

    Args:
        q, k, v: (B, H, N, d), (B, H_k, M, d) and (B, H_k, M, d_v), as they entered the kernel.
        grad: ∂L/∂(p·v), (B, H, N, d_v).
        scale, bias, mask, cap: as :func:`qkexp.probe.stats.attention_stats` takes them.
    """
    (B, H, N, _), M = q.shape, k.shape[2]
    images, rows = max(1, CHUNK_BYTES // (4 * H * N * M)), min(N, max(1, CHUNK_BYTES // (4 * H * M)))
    bias = None if bias is None else bias.expand(B, H, N, M)
    seen = None if mask is None else visible(mask).expand(B, H, N, M)
    total = torch.zeros(H, device=q.device)
    with full_float32(q.device.type):
        for image, row in itertools.product(range(0, B, images), range(0, N, rows)):
            of = slice(image, image + images)
            at = of, slice(None), slice(row, row + rows)
            keys, values = (x[of].float().repeat_interleave(H // x.shape[1], 1) for x in (k, v))
            z = (q[at].float() * per_head(scale)) @ keys.mT
            z = z if bias is None else z + bias[at]
            c = soft_cap(z, cap)
            p = (c if seen is None else c.masked_fill(~seen[at], -torch.inf)).softmax(-1)
            if seen is not None:  # a row without a key has no weights
                p = p.masked_fill(~seen[at].any(-1, keepdim=True), 0.0)
            dp = grad[at].float() @ values.mT
            dz = p * (dp - (p * dp).sum(-1, keepdim=True))
            dz = dz if cap is None else dz * (1.0 - (c / cap).square())
            total += dz.square().sum((0, 2, 3))
    return total
