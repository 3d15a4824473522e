"""Transformer blocks that go into timm's VisionTransformer through its ``block_fn``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qkexp.config import AttentionConfig
from qkexp.model.attention import Attention


class PreNormBlock(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)): the placement of ViT (arXiv 2010.11929).

    Takes timm's keyword arguments of a block. Those that would change attention behind the config's
    back are refused, so that a timm name never brings a second QK norm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        attention: AttentionConfig,
        tokens: int,
        mlp_ratio: float,
        qkv_bias: bool,
        proj_bias: bool,
        norm_layer: Any,
        act_layer: Any,
        mlp_layer: Any,
        **timm: Any,
    ):
        super().__init__()
        refused = {k: v for k, v in timm.items() if k not in _INERT and v}
        if refused:
            raise ValueError(f"the block has no {', '.join(f'{k}={v!r}' for k, v in refused.items())}")
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads, tokens, attention, qkv_bias=qkv_bias, proj_bias=proj_bias)
        self.norm2 = norm_layer(dim)
        self.mlp = mlp_layer(in_features=dim, hidden_features=int(dim * mlp_ratio), act_layer=act_layer, bias=proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# timm passes these to every block; they say nothing about attention here
_INERT = {"attn_layer", "depth", "device", "dtype"}
