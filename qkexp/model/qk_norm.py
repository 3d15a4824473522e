"""Norms of q and k: one formula with separate switches, because the name "QK norm" hides several.

    y = (x - mean) / sqrt(mean((x - mean)²) + eps) · (offset + gain) + bias

with the mean taken out only where ``center`` is set. LayerNorm is ``rms`` with ``center``; ``l2`` is
``rms`` divided by sqrt(n), n the number of normalised channels, so that every norm treats small
activations alike: the same eps stands at the same place (on the mean square).

Sources: LayerNorm per head with one gain for all heads, ViT-22B (arXiv 2302.05442); L2, QKNorm
(arXiv 2010.04245); RMS over the whole projection, OLMo 2 (arXiv 2501.00656).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Normalise(torch.autograd.Function):
    """(x - mean) · factor / sqrt(mean((x - mean)²) + eps) · gain over the last axis, as one node.

    The mean is 0 unless ``center``. PyTorch's ``rms_norm`` has no CPU kernel, and its composite (as its
    ``layer_norm`` on rows of 16 channels) costs twice as much; here a row's mean is a product with a
    vector of ones, the fastest reduction of short rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float, factor: float, center: bool) -> Tensor:
        width = x.shape[-1]
        average = x.new_full((width, 1), 1.0 / width)
        if center:
            x = x - x @ average
        inverse = ((x * x) @ average).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, gain, average)
        ctx.factor, ctx.center = factor, center
        y = unit if gain is None else unit * gain
        return y if factor == 1.0 else y * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain, average = ctx.saved_tensors
        # it comes back transposed from (B, H, N, d); products of unlike layouts are three times as slow
        grad = grad.contiguous() if ctx.factor == 1.0 else grad.contiguous() * ctx.factor
        grad_gain = None
        along = grad * unit
        if gain is not None:
            grad_gain = along.sum_to_size(gain.shape)
            grad, along = grad * gain, along * gain
        grad_x = (grad - unit * (along @ average)) * inverse
        if ctx.center:
            grad_x -= grad_x @ average
        return grad_x, grad_gain, None, None, None


class QKNorm(nn.Module):
    """Normalise q or k, (B, N, H, d), and return the same shape and dtype.

    Args:
        heads, head_dim: H and d.
        kind: ``rms`` or ``l2``.
        center: subtract the mean first (LayerNorm).
        axis: ``head`` (statistics over d) or ``all`` (over H·d, which couples the heads).
        gain: ``none``, ``shared`` (d,) or ``per_head`` (H, d); with ``axis=all`` either is (H·d,).
        gain_offset: 0 (gain starts at 1) or 1 (gain is 1 + w and w starts at 0).
        bias: add a learned bias of the gain's shape; (d,) where there is no gain.
        eps: added to the mean square, before the root: the gradient at zero is bounded by 1/sqrt(eps).
        dtype: ``fp32`` (the norm's arithmetic; the result is cast back) or ``compute``.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        kind: str = "rms",
        center: bool = False,
        axis: str = "head",
        gain: str = "shared",
        gain_offset: int = 0,
        bias: bool = False,
        eps: float = 1e-6,
        dtype: str = "fp32",
    ):
        super().__init__()
        self.kind, self.center, self.axis, self.eps = kind, center, axis, eps
        self.gain_offset = gain_offset
        self.fp32 = dtype == "fp32"
        width = heads * head_dim if axis == "all" else head_dim
        self.width = width
        shape = (heads, head_dim) if (gain == "per_head" and axis == "head") else (width,)
        self.weight = None if gain == "none" else nn.Parameter(torch.full(shape, 1.0 - gain_offset))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(-2) if self.axis == "all" else x
        gain = self.weight if self.weight is None or not self.gain_offset else self.weight + self.gain_offset
        with torch.autocast(x.device.type, enabled=False):
            y = self._normalise(y.float() if self.fp32 else y, gain)
        return y.to(x.dtype).view_as(x)

    def _normalise(self, y: Tensor, gain: Tensor | None) -> Tensor:
        gain = None if gain is None else gain.to(y.dtype)
        factor = self.width**-0.5 if self.kind == "l2" else 1.0
        y = Normalise.apply(y, gain, self.eps, factor, self.center)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{self.kind}, center={self.center}, axis={self.axis}, gain={shape}, eps={self.eps}"
