"""Rotary position embedding of images: q and k are turned by the place of their patch (arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.layers import build_rotary_pos_embed
from torch import Tensor, nn

from qkexp.config import ConfigError

TEMPERATURE = 100.0  # of axial frequencies in ViTs (RoPE-ViT, arXiv 2403.13298)


class AxialRotary(nn.Module):
    """Rotate q or k, (B, N, H, d), by the column and row of each token's patch; lengths stay as they are.

    Neighbouring channels are a pair, and turn by position · frequency: the first half of the pairs by
    the column, the second by the row, as in timm's ``vit_*_rope_*`` models. So a score depends on how far two
    patches are apart in each direction. Class and register tokens, which come first, do not turn.

    Tables are float32 and so is the product, which is rounded once to the type of x.

    Args:
        head_dim: d, a multiple of 4.
        grid: rows and columns of patches.
        prefix: tokens before the patches.

    Raises:
        ConfigError: d is no multiple of 4.
    """

    sin: Tensor
    cos: Tensor

    def __init__(self, head_dim: int, grid: Sequence[int], prefix: int):
        super().__init__()
        if head_dim % 4:
            accepted = f"none with heads of {head_dim} channels (two axes of pairs need a multiple of 4)"
            raise ConfigError("model.rope", "axial", accepted)
        tables = build_rotary_pos_embed(
            list(grid), dim=head_dim, temperature=TEMPERATURE, in_pixels=False, grid_indexing="xy"
        )
        sin, cos = (table[:, ::2] for table in tables)  # a pair has one angle
        sin = torch.cat((sin.new_zeros(prefix, head_dim // 2), sin))
        cos = torch.cat((cos.new_ones(prefix, head_dim // 2), cos))
        self.register_buffer("sin", sin.unsqueeze(1), persistent=False)  # (N, 1, d/2)
        self.register_buffer("cos", cos.unsqueeze(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        turned = torch.stack((even * self.cos - odd * self.sin, odd * self.cos + even * self.sin), dim=-1)
        return turned.flatten(-2).to(x.dtype)
