"""Trust: which layers were found, fired and were self-checked, and the check itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qkexp.model.core import per_head, soft_cap
from qkexp.probe.adapters.base import Capture
from qkexp.probe.rows import CHUNK_BYTES, visible
from qkexp.probe.stats import full_float32, spacing

IMAGES = 4  # of a batch are checked: the check keeps all their scores at once
ULPS = 2.0  # a score may be so many of its dtype's spacings off: q·scale, the sum and a bias are rounded
OUTPUT_ULPS = 8.0  # and an output so many: weights, their sum and the product with v are


class CoverageError(RuntimeError):
    """An attention layer did not show what it does: measured too little is an error, not an empty table."""


class SelfCheckError(CoverageError):
    """What was captured does not give what the module produced: its numbers would be wrong."""


@dataclass(frozen=True)
class Coverage:
    """What the first probed step showed; ``str()`` is the report."""

    found: tuple[str, ...]  # layers known before the step, and those it discovered
    attached: tuple[str, ...]
    fired: tuple[str, ...]
    checked: tuple[str, ...]
    unchecked: dict[str, str]  # layer -> why
    unknown: dict[str, str]  # module -> class: looks like attention, and did not show any

    def __str__(self) -> str:
        counts = f"{len(self.found)} found, {len(self.attached)} attached, {len(self.fired)} fired"
        lines = [f"attention layers: {counts}, {len(self.checked)} self-checked"]
        lines += [f"  {name}: not self-checked: {why}" for name, why in self.unchecked.items()]
        lines += [f"  {name} ({cls}) looks like attention that no adapter knows" for name, cls in self.unknown.items()]
        if self.unknown:
            lines.append("  (write an adapter of ten lines, docs/probe.md, or ignore it if it is no softmax attention)")
        return "\n".join(lines)


@torch.no_grad()
def self_check(c: Capture) -> tuple[str | None, str | None]:
    """Recompute softmax(mask(cap(scale · q·k + bias)))·v in float32 and compare it with the module's output.

    Returns:
        (fault, reason): what is wrong, or why nothing can be said; (None, None) where it agrees. The tolerance
        is what the spacing of the score's dtype at max |z| can do to the output: at worst to one value, and on
        average to a head's.
    """
    if c.v is None or c.output is None:
        return None, "its output was not captured"
    if c.dropout:
        return None, "attention dropout is active"
    heads = c.q.shape[1]
    if c.q.shape[0] != c.v.shape[0] or heads % c.k.shape[1] or heads % c.v.shape[1] or c.k.shape[2] != c.v.shape[2]:
        return f"q {tuple(c.q.shape)}, k {tuple(c.k.shape)} and v {tuple(c.v.shape)} do not fit", None
    with full_float32(c.q.device.type):
        q, k, v = (x[:IMAGES].float() for x in (c.q, c.k, c.v))
        if not (q.isfinite().all() and k.isfinite().all() and v.isfinite().all()):
            return None, "q, k or v is not finite"
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        y, rows, size = _attend(c, q, k, v)
        if not size.isfinite():
            return None, "its scores are not finite"
        y = y if c.finish is None else c.finish(y)
        rows = rows if c.finish is None else rows.all(1)
        output = c.output[:IMAGES].float()
        if output.shape != y.shape:
            return f"its output has shape {tuple(output.shape)}, the recomputed one {tuple(y.shape)}", None
        error = (output - y).masked_fill(~rows.unsqueeze(-1), 0.0)
        if y.isfinite().all() and not error.isfinite().all():
            return None, "its output is not finite, though q, k, v and the scores are: its kernel's type overflows"
        dtype = _precision(c)
        rounding = spacing(size, dtype)
        rounded = OUTPUT_ULPS * torch.finfo(dtype).eps
        reach = torch.maximum(v.abs().amax(), y.abs().amax())
        worst, bound = error.abs().amax(), (2 * (ULPS * rounding).expm1() + rounded) * reach
        # over images, rows and width: roundings average out, what was forgotten does not
        rms = error.square().mean((0, -2, -1)).sqrt().amax()
        rms_bound = (rounding.expm1() + rounded) * torch.maximum(v.square().mean().sqrt(), y.square().mean().sqrt())
        found = torch.stack([worst, bound, rms, rms_bound, size, reach]).tolist()
    worst, bound, rms, rms_bound, size, reach = found
    if not (worst <= bound and rms <= rms_bound):
        far = f"{worst:.3g} at most and {rms:.3g} on average (RMS) away from the recomputed one"
        return f"its output is {far}; its precision explains {bound:.3g} and {rms_bound:.3g}", None
    if rms_bound > reach:
        return None, f"scores of {size:.3g} in {dtype} are too coarse to check"
    return None, None


def _attend(c: Capture, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, N, d_v) recomputed; (B, H, N) rows with a key; and how large scores, or the terms they sum, are."""
    (B, H, N, _), M = q.shape, k.shape[2]
    bias, mask = (None if x is None else _first(x).expand(B, H, N, M) for x in (c.bias, c.mask))
    size, y = _typical(q, k, c.scale), q.new_empty(B, H, N, v.shape[-1])
    rows = torch.ones(B, H, N, dtype=torch.bool, device=q.device)
    length = max(1, CHUNK_BYTES // (4 * B * H * M))
    for span in (slice(at, at + length) for at in range(0, N, length)):  # no N×M tensor outlives a chunk
        z = per_head(c.scale) * (q[:, :, span] @ k.transpose(-2, -1))
        z = z if bias is None else z + bias[:, :, span].float()
        capped = soft_cap(z, c.spec.cap)
        if mask is not None:
            seen = visible(mask[:, :, span])
            z, rows[:, :, span] = z.masked_fill(~seen, 0.0), seen.any(-1)
            capped = torch.where(seen, capped, -math.inf if c.hiding is None else capped + c.hiding)
        size = torch.maximum(size, z.abs().amax())
        y[:, :, span] = capped.softmax(-1) @ v
    return y.masked_fill(~rows.unsqueeze(-1), 0.0), rows, size


def _precision(c: Capture) -> torch.dtype:
    """The coarsest type that score, weights, output or this check went through."""
    assert c.v is not None
    assert c.output is not None
    dtypes = [c.spec.dtype or c.q.dtype, c.output.dtype, c.v.dtype, torch.float32]
    reduced = {"high": torch.float16, "medium": torch.bfloat16}.get(torch.get_float32_matmul_precision())
    dtypes += [reduced] if reduced is not None else []  # TF32 has the mantissa of FP16
    return max(dtypes, key=lambda t: torch.finfo(t).eps)


def _typical(q: Tensor, k: Tensor, scale: float | Tensor) -> Tensor:
    """The size of the terms that make up a score: sums of large terms are rounded though they are small."""
    lengths = q.norm(dim=-1).amax(-1, keepdim=True) * k.norm(dim=-1).amax(-1, keepdim=True)
    scale = per_head(scale)
    factor = scale.abs().squeeze(-1) if isinstance(scale, Tensor) and scale.dim() == 3 else abs(scale)
    return (lengths * factor).amax() / math.sqrt(q.shape[-1])


def _first(x: Tensor) -> Tensor:
    return x[:IMAGES] if x.dim() == 4 and x.shape[0] > 1 else x
