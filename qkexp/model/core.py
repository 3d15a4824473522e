"""The one definition of the attention score, and the kernels that compute it.

Shapes: B images, H heads, N tokens, d the width of a head.

    z = scale * q̂·k̂          the score, before any cap
    c = cap * tanh(z / cap)   soft-capped, or z itself without a cap (Gemma 2, arXiv 2408.00118)
    p = softmax(c)            over keys

The order (scale, then cap, then mask, then softmax) is part of the definition: a cap before the
scale does not bound the score, and a cap after the mask gives masked keys weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Scale = float | Tensor


@dataclass(frozen=True)
class ScoreSpec:
    """What a reader of q̂ and k̂ must know to recompute the score that the kernel used.

    ``cap`` is the soft-cap or None; ``dtype`` is the precision in which the kernel holds scores,
    None where it is that of q̂.
    """

    cap: float | None = None
    dtype: torch.dtype | None = None


def per_head(scale: Scale) -> Scale:
    """View a learned scale, (1,) or (H,), so that it multiplies tensors (B, H, N, d)."""
    return scale.view(-1, 1, 1) if isinstance(scale, Tensor) and scale.dim() == 1 else scale


def soft_cap(z: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(z / cap); z itself where there is no cap."""
    return z if cap is None else cap * torch.tanh(z / cap)


def scale_query(q: Tensor, scale: Scale) -> Tensor:
    """Fold the scale into q: N·d products instead of N·N, and fused kernels take no tensor scale.

    A learned scale is float32; the product is rounded once, to q's dtype.
    """
    return (q * per_head(scale)).to(q.dtype)


# Elements of a BF16 score tensor up to which a softmax is faster through float32 on CPU: the BF16 kernel
# works row by row, and short rows leave it idle. Above, memory traffic decides.
SMALL = 1 << 18


class RoundedSoftmax(torch.autograd.Function):
    """Softmax over the last axis with the rounding of a low-precision kernel, computed in float32.

    Weights are rounded to z's dtype and the gradient is that of the rounded weights, as in PyTorch's own
    BF16 kernel. Unrounded weights would be another arithmetic: saturated rows keep a small gradient that
    BF16 does not have, and collapse is milder (EXPERIMENTS.md).
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        p = z.float().softmax(-1).to(z.dtype)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad.float(), p.float(), -1, torch.float32).to(p.dtype)


def explicit(q: Tensor, k: Tensor, v: Tensor, scale: Scale, spec: ScoreSpec, dropout: float) -> Tensor:
    """Scores as a tensor. On CPU in BF16 this beats PyTorch's fused kernel (see docs/architecture.md)."""
    if spec.dtype is not None:
        q, k = q.to(spec.dtype), k.to(spec.dtype)
        with torch.autocast(q.device.type, enabled=False):
            z = scale_query(q, scale) @ k.transpose(-2, -1)
    else:
        z = scale_query(q, scale) @ k.transpose(-2, -1)
    c = soft_cap(z, spec.cap)
    small = c.device.type == "cpu" and c.dtype.itemsize < 4 and c.numel() <= SMALL
    p = RoundedSoftmax.apply(c) if small else c.softmax(dim=-1)
    if dropout:
        p = F.dropout(p, dropout)
    return p.to(v.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: Scale, spec: ScoreSpec, dropout: float) -> Tensor:
    """PyTorch's fused attention. It has no soft-cap, so a capped score is refused."""
    if spec.cap is not None:
        raise ValueError("backend sdpa cannot soft-cap a score: use explicit or flex")
    return F.scaled_dot_product_attention(scale_query(q, scale), k, v, dropout_p=dropout, scale=1.0)


def flex(q: Tensor, k: Tensor, v: Tensor, scale: Scale, spec: ScoreSpec, dropout: float) -> Tensor:
    """FlexAttention with the soft-cap in its score function (CUDA; it compiles at first use).

    It drops no weights, so dropout is refused.
    """
    if dropout:
        raise ValueError("backend flex cannot drop attention weights: use explicit")
    kernel, score_mod = _flex(spec.cap)
    return kernel(scale_query(q, scale), k, v, score_mod=score_mod, scale=1.0)


@functools.cache
def _flex(cap: float | None) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The compiled kernel and its score function: made once, not at every call."""
    from torch.nn.attention.flex_attention import flex_attention

    def score_mod(z: Tensor, *_index: Tensor) -> Tensor:
        return soft_cap(z, cap)

    return torch.compile(flex_attention, dynamic=False), score_mod


KERNELS = {"explicit": explicit, "sdpa": sdpa, "flex": flex}
DTYPES = {"compute": None, "fp32": torch.float32}


FLEX_MIN_WIDTH = 16  # of a head; FlexAttention refuses less


def choose_backend(
    device: str, softcap: float | None, score_dtype: str, head_dim: int = 64, dropout: float = 0.0
) -> str:
    """The backend for a device type, from measurements (docs/architecture.md), never timed at run time."""
    if device != "cuda" or score_dtype != "compute":
        return "explicit"
    if softcap is None:
        return "sdpa"
    return "flex" if head_dim >= FLEX_MIN_WIDTH and not dropout else "explicit"


class AttentionCore(nn.Module):
    """softmax(cap(scale · q̂·k̂)) v, without parameters.

    Called as ``core(q, k, v, scale)``, all positional, with q, k, v (B, H, N, d) as they enter the
    dot product (after norm and rotation) and ``scale`` a float or a tensor (1,) or (H,). So a
    forward-pre-hook on it sees what the kernel sees, in every variant and under every backend, and
    ``spec`` tells that hook the rest of the score's definition. ``dropout`` is the share of the weights
    p that training drops (the others grow, so that each keeps its expectation).
    """

    def __init__(
        self,
        softcap: float | None = None,
        score_dtype: str = "compute",
        backend: str = "explicit",
        dropout: float = 0.0,
    ):
        super().__init__()
        self.spec = ScoreSpec(softcap, DTYPES[score_dtype])
        self.backend = backend
        self.dropout = dropout

    @property
    def drops(self) -> bool:
        """Whether weights are dropped now."""
        return self.training and self.dropout > 0.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: Scale) -> Tensor:
        return KERNELS[self.backend](q, k, v, scale, self.spec, self.dropout if self.training else 0.0)

    def extra_repr(self) -> str:
        return f"softcap={self.spec.cap}, backend={self.backend}, dropout={self.dropout}"
