"""Norms of q and k: one formula with separate switches, because the name "QK norm" hides several.

    y = (x - mean) / sqrt(mean((x - mean)²) + eps) · (offset + gain) + bias

with the mean taken out only where ``center`` is set; kind ``center`` takes it out and does nothing else, a
control that bounds no length. LayerNorm is ``rms`` with ``center``; ``l2`` is
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
from torch.nn import functional as F


class RMSNormalise(torch.autograd.Function):
    """x · factor / sqrt(mean(x²) + eps) · gain over the last axis, as one node.

    Arithmetic is in ``dtype``, the result in that of x. PyTorch's ``rms_norm`` has no CPU kernel and its
    composite costs twice as much. Casts happen inside of the products, so that they add neither a node nor
    a pass; a mean in backward is a product with a column, the fastest reduction of short rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float, factor: float, dtype: torch.dtype) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
        inverse = square.mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, gain)
        ctx.factor, ctx.dtype = factor, x.dtype
        y = unit if gain is None else unit * gain.to(dtype)
        return (y if factor == 1.0 else y * factor).to(x.dtype, copy=y is unit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain = ctx.saved_tensors
        # it comes back transposed from (B, H, N, d); products of unlike layouts are three times as slow
        g = torch.empty_like(unit).copy_(grad)
        along, grad_gain = g * unit, None
        column = unit.new_full((unit.shape[-1], 1), 1.0 / unit.shape[-1])
        if gain is not None:
            grad_gain = (along.sum_to_size(gain.shape) * ctx.factor).to(gain.dtype)
            g *= gain
            if gain.dim() == 1:
                column = column * gain.unsqueeze(-1).to(unit.dtype)
            else:
                along *= gain
        g.addcmul_(unit, along @ column, value=-1.0).mul_(inverse if ctx.factor == 1.0 else inverse * ctx.factor)
        return g.to(ctx.dtype), grad_gain, None, None, None


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
        rotary: rotates x before the norm (``rope_first``); None: nothing does. It stands in here so that
            hooks on the norm see the raw projection in either order.
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
        rotary: nn.Module | None = None,
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
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.rotary is None else self.rotary(x)
        y = x.flatten(-2) if self.axis == "all" else x
        gain = self.weight if self.weight is None or not self.gain_offset else self.weight + self.gain_offset
        with torch.autocast(x.device.type, enabled=False):
            if self.kind == "center":
                return (x - x.mean(-1, keepdim=True, dtype=self._arithmetic(x))).to(x.dtype)
            y = self._centred(y, gain) if self.center else self._uncentred(y, gain)
            if self.bias is not None:
                y = (y + self.bias).to(x.dtype)
        return y.view(x.shape)

    def _uncentred(self, y: Tensor, gain: Tensor | None) -> Tensor:
        return RMSNormalise.apply(y, gain, self.eps, self._factor, self._arithmetic(y))

    def _centred(self, y: Tensor, gain: Tensor | None) -> Tensor:
        dtype = y.dtype
        inner = gain if gain is not None and gain.dim() == 1 else None
        # the CPU's kernel takes BF16 with a float32 gain, and then computes in float32 without a pass for casts
        mixed = inner is not None and self.fp32 and y.device.type == "cpu" and dtype.itemsize < 4
        if not mixed:
            y = y.to(self._arithmetic(y))
            inner = None if inner is None else inner.to(y.dtype)
        y = F.layer_norm(y, (self.width,), inner, None, self.eps)
        if gain is not None and inner is None:
            y = y * gain
        return (y if self._factor == 1.0 else y * self._factor).to(dtype)

    @property
    def _factor(self) -> float:
        return self.width**-0.5 if self.kind == "l2" else 1.0

    def _arithmetic(self, y: Tensor) -> torch.dtype:
        # float64 stays: nobody who asks for it wants less
        return torch.float32 if self.fp32 and y.dtype.itemsize < 4 else y.dtype

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{self.kind}, center={self.center}, axis={self.axis}, gain={shape}, eps={self.eps}"
