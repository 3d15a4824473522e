"""Which queries of an image are measured where not all are: evenly spread, and without a random number."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def spread(rows: int, wanted: int, images: int, turn: int, device: torch.device | str = "cpu") -> Tensor:
    """Rows ⌊i·N/m⌋ + φ (modulo N) of each image -> (images, wanted), a circular systematic sample.

    Image b has phase φ = (turn + b) · s modulo N, s coprime to N and near the golden section of it: neighbouring
    images and turns see other rows, and in N turns an image sees every phase once. Over the phases each
    row is taken ``wanted`` times, so that a mean over the sample is an unbiased estimate of that over all rows.

    Args:
        rows: N, how many there are.
        wanted: m, at most N.
        turn: counts up, from one probed step to the next.
    """
    stride = coprime_near(rows, 0.618 * rows)
    start = torch.arange(turn % rows, turn % rows + images, device=device) % rows * stride
    steps = torch.arange(wanted, device=device) * rows // wanted
    return (start.unsqueeze(-1) + steps) % rows


@functools.cache
def coprime_near(number: int, place: float) -> int:
    """The whole number nearest to ``place`` that shares no divisor with ``number``."""
    return min(range(1, max(2, number)), key=lambda s: (math.gcd(s, number) > 1, abs(s - place)))


def of_rows(x: Tensor, chosen: Tensor) -> Tensor:
    """Rows ``chosen`` (B, m) of x, (B or 1, H, N or 1, ·) -> (B, H, m, ·); x itself where all rows are one."""
    if x.shape[-2] == 1:
        return x
    images = torch.arange(len(chosen), device=x.device).unsqueeze(-1)
    return x.expand(len(chosen), -1, -1, -1)[images, :, chosen].transpose(1, 2)
