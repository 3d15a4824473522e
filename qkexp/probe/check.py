"""Trust: which layers were found, fired and were self-checked, and the check itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qkexp.model.core import per_head, soft_cap
from qkexp.probe.adapters.base import Capture
from qkexp.probe.rows import visible
from qkexp.probe.stats import spacing

IMAGES = 4  # of a batch are checked: the check keeps all their scores at once
ULPS = 8.0  # a score may be so many of its dtype's spacings off: q·scale, k and the sum are rounded


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
        is what the spacing of the score's dtype at max |z| can do to the output.
    """
    if c.v is None or c.output is None:
        return None, "its output was not captured"
    if c.dropout:
        return None, "attention dropout is active"
    dtype = max((c.spec.dtype or c.q.dtype, c.output.dtype, c.v.dtype), key=lambda t: torch.finfo(t).eps)
    with torch.autocast(c.q.device.type, enabled=False):
        q, k, v = (x[:IMAGES].float() for x in (c.q, c.k, c.v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if not (q.isfinite().all() and k.isfinite().all() and v.isfinite().all()):
            return None, "q, k or v is not finite"
        shape = (*q.shape[:3], k.shape[2])
        z = per_head(c.scale) * (q @ k.transpose(-2, -1))
        typical = _typical(q, k, c.scale)
        if c.bias is not None:
            z = z + _first(c.bias).float()
        seen = None if c.mask is None else visible(_first(c.mask)).expand(shape)
        size = (z if seen is None else z.masked_fill(~seen, 0.0)).abs().amax()
        z = soft_cap(z, c.spec.cap)
        if seen is not None:
            z = z.masked_fill(~seen, -math.inf)
        p = z.softmax(-1).nan_to_num(0.0)  # a row without a key
        y = p @ v
        rows = torch.ones(shape[:3], dtype=torch.bool, device=y.device) if seen is None else seen.any(-1)
        reach = v.abs().amax()
        if c.finish is not None:
            y, rows = c.finish(y), rows.all(1)
            reach = torch.maximum(reach, y.abs().amax())
        output = c.output[:IMAGES].float()
        if output.shape != y.shape:
            return f"its output has shape {tuple(output.shape)}, the recomputed one {tuple(y.shape)}", None
        error = (output - y).abs().amax(-1)[rows]
        rounding = ULPS * spacing(torch.maximum(size, typical), dtype)
        tolerance = float((2 * rounding.expm1() + ULPS * torch.finfo(dtype).eps) * reach)
        worst = float(error.amax()) if error.numel() else 0.0
    if not worst <= tolerance:
        return f"its output is {worst:.3g} away from the recomputed one (tolerance {tolerance:.3g})", None
    if tolerance > float(reach):
        return None, f"scores of {float(size):.3g} in {dtype} are too coarse to check"
    return None, None


def _typical(q: Tensor, k: Tensor, scale: float | Tensor) -> Tensor:
    """The size of the terms that make up a score: sums of large terms are rounded though they are small."""
    lengths = q.norm(dim=-1).amax(-1, keepdim=True) * k.norm(dim=-1).amax(-1, keepdim=True)
    scale = per_head(scale)
    factor = scale.abs().squeeze(-1) if isinstance(scale, Tensor) and scale.dim() == 3 else abs(scale)
    return (lengths * factor).amax() / math.sqrt(q.shape[-1])


def _first(x: Tensor) -> Tensor:
    return x[:IMAGES] if x.dim() == 4 and x.shape[0] > 1 else x
