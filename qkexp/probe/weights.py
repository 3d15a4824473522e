"""The projections of an attention layer, head by head: spectral norm, gains, change, and Adam's averages of them.

Shapes: H heads, d the width of a head, C the width of the input. W_q of a head is (d, C): q = W_q x.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkexp.probe.stats import full_float32

# A matrix is squared so often, so that it stands for 2¹⁰ steps of the power iteration.
SQUARINGS = 10


@dataclass(frozen=True)
class HeadRows:
    """The rows of a parameter that make q, k or v: those of head h begin at ``start + h · width``."""

    weight: Tensor
    bias: Tensor | None
    heads: int
    width: int
    start: int = 0

    def of(self, x: Tensor) -> Tensor:
        """Of a tensor shaped as the weight (or bias), these rows as (H, d, C) (or (H, d, 1)), detached."""
        return x.detach().narrow(0, self.start, self.heads * self.width).reshape(self.heads, self.width, -1)

    def affine(self) -> Tensor:
        """(H, d, C), or (H, d, C + 1) with the bias as what multiplies a channel of ones."""
        parts = [self.weight] if self.bias is None else [self.weight, self.bias]
        return torch.cat([self.of(x) for x in parts], dim=-1)


@dataclass(frozen=True)
class Projections:
    """Where an adapter finds W_q, W_k and W_v of its module, and what stands between them and the score."""

    q: HeadRows
    k: HeadRows
    v: HeadRows
    q_norm: nn.Module | None = None  # the norms, whose ``weight`` is the gain
    k_norm: nn.Module | None = None
    # The module whose input x is, where z = scale · (W_q x)·(W_k x), biases of the projections included, and no more:
    # no norm, rotation, additive bias or mask. Else None.
    source: nn.Module | None = None


def fused(weight: Tensor, bias: Tensor | None, heads: int, start: int = 0) -> tuple[HeadRows, HeadRows, HeadRows]:
    """Rows of one matrix that holds W_q, W_k and W_v one after the other, from row ``start`` to its end."""
    width = (weight.shape[0] - start) // (3 * heads)
    q, k, v = (HeadRows(weight, bias, heads, width, start + i * heads * width) for i in range(3))
    return q, k, v


def named_projections(module: nn.Module) -> Projections | None:
    """By the usual names: ``qkv``, or ``q_proj``, ``k_proj`` and ``v_proj``, linear layers of ``num_heads`` heads."""
    heads, whole = getattr(module, "num_heads", None), getattr(module, "qkv", None)
    norms = [getattr(module, f"{name}_norm", None) for name in ("q", "k")]
    if not isinstance(heads, int):
        return None
    if isinstance(whole, nn.Linear):
        return Projections(*fused(whole.weight, whole.bias, heads), *norms)
    parts = [getattr(module, f"{name}_proj", None) for name in ("q", "k", "v")]
    linear = [part for part in parts if isinstance(part, nn.Linear)]
    if len(linear) < 3 or len({part.out_features for part in linear}) > 1:  # keys that several heads share
        return None
    q, k, v = (HeadRows(part.weight, part.bias, heads, part.out_features // heads) for part in linear)
    return Projections(q, k, v, *norms)


def head_norms(q: Tensor, k: Tensor) -> Tensor:
    """‖W_qᵀ W_k‖₂ (H,) of weights (H, d, C): in float64, for W_q and W_k may nearly cancel each other."""
    wide = torch.float32 if q.device.type == "mps" else torch.float64
    return product_norm(q.to(wide), k.to(wide))


@torch.no_grad()
def product_norm(a: Tensor, b: Tensor, squarings: int = SQUARINGS) -> Tensor:
    """‖aᵀ b‖₂ of a and b (..., d, C), float32 or wider, -> (...) float32: of W_q and W_k the largest x·W_qᵀW_k·x'.

    The squared singular values are the eigenvalues of (a aᵀ)(b bᵀ), which is (d, d). Squared again and again it is a
    power iteration of 2^squarings steps from every unit vector at once, so no start can be blind to the largest, and
    no random number is drawn. Of its longest column the quotient is taken: never above the norm, and below it by no
    more than rounding unless many singular values lie within 2^-squarings of the largest.
    """
    with full_float32(a.device.type):
        (a, a_size), (b, b_size) = _unit(a), _unit(b)
        left, right = a @ a.mT, b @ b.mT
        power = left @ right
        for _ in range(squarings):
            power = _unit(power)[0]
            power = power @ power
        power = _unit(power)[0]
        longest = torch.linalg.vector_norm(power, dim=-2, keepdim=True).argmax(-1, keepdim=True)
        x = power.take_along_dim(longest, -1)  # (..., d, 1)
        y = right @ x
        square = (y.mT @ left @ y) / (x.mT @ y).clamp_min(torch.finfo(x.dtype).tiny)
        return (square.sqrt() * a_size * b_size)[..., 0, 0].float()


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices over their largest size, so that products neither overflow nor vanish, and that size; NaN stays."""
    size = x.abs().amax((-2, -1), keepdim=True)
    return x / size.clamp_min(torch.finfo(x.dtype).tiny), size


def largest_gain(norm: nn.Module | None, rows: HeadRows) -> Tensor | None:
    """max |γ| of each head (H,) of a norm whose gain is (d,), (H, d) or (H · d,); None: it has none."""
    gain = getattr(norm, "weight", None)
    if not isinstance(gain, Tensor) or gain.numel() not in (rows.width, rows.heads * rows.width):
        return None
    gain = gain.detach().float() + getattr(norm, "gain_offset", 0)
    return gain.view(-1, rows.width).abs().amax(-1).expand(rows.heads)


def norm(parts: Iterable[Tensor]) -> Tensor:
    """‖·‖_F of each head (H,) of the parts (H, d, ·) together, float32."""
    lengths = [torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float32) for part in parts]
    return torch.linalg.vector_norm(torch.stack(lengths), dim=0)


def second_moment(optimizers: Iterable[torch.optim.Optimizer], weight: Tensor) -> tuple[Tensor, float] | None:
    """Adam's v̂ of a parameter (bias corrected, in its shape) and eps; None: no optimiser keeps one, or not yet.

    The parameter may be a piece of the one that an optimiser has: it shares its memory.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for whole in group["params"]:
                at = _place(weight, whole)
                if at is None or "exp_avg_sq" not in optimizer.state.get(whole, {}):
                    continue
                state = optimizer.state[whole]
                v = state.get("max_exp_avg_sq", state["exp_avg_sq"]).flatten()[at : at + weight.numel()]
                return v.view(weight.shape) / (1.0 - group["betas"][1] ** state["step"]), group["eps"]
    return None


def _place(weight: Tensor, whole: Tensor) -> int | None:
    """Where in ``whole`` the elements of ``weight`` stand, one after the other; None: elsewhere."""
    if weight.device != whole.device or weight.dtype != whole.dtype or not weight.is_contiguous():
        return None
    at, odd = divmod(weight.data_ptr() - whole.data_ptr(), weight.element_size())
    inside = not odd and at >= 0 and at + weight.numel() <= whole.numel() and whole.is_contiguous()
    return at if inside else None
