"""Transformer blocks that go into timm's VisionTransformer through its ``block_fn``.

    pre       x + f(norm(x))                                  ViT (arXiv 2010.11929)
    post      norm(x + f(x))                                  the original Transformer (arXiv 1706.03762)
    res_post  x + norm(f(x))                                  Swin V2 (arXiv 2111.09883), OLMo 2 (arXiv 2501.00656)
    none      x + f(x)
    parallel  x + attn(norm(x)) + mlp(norm(x)), projections fused, no QKV bias    ViT-22B (arXiv 2302.05442)

Parameter names are timm's, so weights of its Block, ResPostBlock and ParallelScalingBlock load as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

from qkexp.config import AttentionConfig
from qkexp.model.attention import Attention

# timm passes these to every block; they say nothing about attention here
_INERT = {"attn_layer", "depth", "device", "dtype"}


class Block(nn.Module):
    """Attention and MLP on (B, N, C), each with its norm, layer scale and stochastic depth.

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
        rotary: nn.Module | None,
        mlp_ratio: float,
        qkv_bias: bool,
        proj_bias: bool,
        proj_drop: float,
        drop_path: float,
        init_values: float | None,
        norm_layer: Any,
        act_layer: Any,
        mlp_layer: Any,
        **timm: Any,
    ):
        super().__init__()
        _refuse(timm)
        hidden = _hidden(dim, mlp_ratio)
        self.norm1 = norm_layer(dim)
        self.attn = Attention(
            dim,
            num_heads,
            tokens,
            attention,
            rotary=rotary,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            proj_drop=proj_drop,
        )
        self.ls1 = _layer_scale(dim, init_values)
        self.drop_path1 = _drop_path(drop_path)
        self.norm2 = norm_layer(dim)
        self.mlp = mlp_layer(
            in_features=dim,
            hidden_features=hidden,
            act_layer=act_layer,
            bias=proj_bias,
            drop=proj_drop,
        )
        self.ls2 = _layer_scale(dim, init_values)
        self.drop_path2 = _drop_path(drop_path)

    def roles(self, name: str) -> tuple[int, list[tuple[str, int | None]]]:
        """What the rows of a parameter are for, in order: (axis, [(role, how many; None: all)]).

        Roles: ``q k v o`` the projections (``o`` with the gate), ``qk`` gains and scales between projection and
        score, ``mlp``, ``rest``.
        """
        dim = self.attn.dim
        if name.startswith("attn.qkv."):
            return 0, [("q", dim), ("k", dim), ("v", dim)]
        if name.startswith(("attn.proj.", "attn.gate.")):
            return 0, [("o", None)]
        if name.startswith("attn."):
            return 0, [("qk", None)]
        return 0, [("mlp" if name.startswith("mlp.") else "rest", None)]


class PreNormBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PostNormBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path1(self.ls1(self.attn(x))))
        return self.norm2(x + self.drop_path2(self.ls2(self.mlp(x))))


class ResPostNormBlock(Block):
    """A layer scale is the start of the norm's gain, as in timm: a second factor would say the same."""

    def __init__(self, *args: Any, init_values: float | None, **kwargs: Any):
        super().__init__(*args, init_values=None, **kwargs)
        if init_values:
            nn.init.constant_(self.norm1.weight, init_values)
            nn.init.constant_(self.norm2.weight, init_values)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.norm1(self.attn(x)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class NoNormBlock(Block):
    def __init__(self, *args: Any, norm_layer: Any, **kwargs: Any):
        super().__init__(*args, norm_layer=lambda _dim: nn.Identity(), **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(x)))
        return x + self.drop_path2(self.ls2(self.mlp(x)))


class ParallelBlock(nn.Module):
    """ViT-22B's block: one norm, one product into (MLP, q, k, v), one product out of (heads, MLP).

    The QKV part has no bias; the MLP and the output keep theirs.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        attention: AttentionConfig,
        tokens: int,
        rotary: nn.Module | None,
        mlp_ratio: float,
        qkv_bias: bool,  # set for every ViT of timm; this block has none
        proj_bias: bool,
        proj_drop: float,
        drop_path: float,
        init_values: float | None,
        norm_layer: Any,
        act_layer: Any,
        mlp_layer: Any,
        **timm: Any,
    ):
        super().__init__()
        if mlp_layer is not Mlp:
            timm["mlp_layer"] = getattr(mlp_layer, "__name__", mlp_layer)
        _refuse(timm)
        self.dim, self.hidden = dim, _hidden(dim, mlp_ratio)
        self.in_norm = norm_layer(dim)
        self.in_proj = nn.Linear(dim, self.hidden + 3 * dim, bias=False)
        self.mlp_bias = nn.Parameter(torch.zeros(self.hidden))
        self.attn = Attention(dim, num_heads, tokens, attention, rotary=rotary, projections=False)
        self.mlp_act = act_layer()
        self.mlp_drop = nn.Dropout(proj_drop)
        self.out_proj = nn.Linear(dim + self.hidden, dim, bias=proj_bias)
        self.ls = _layer_scale(dim, init_values)
        self.drop_path = _drop_path(drop_path)

    def roles(self, name: str) -> tuple[int, list[tuple[str, int | None]]]:
        """As :meth:`Block.roles`."""
        if name == "in_proj.weight":
            return 0, [("mlp", self.hidden), ("q", self.dim), ("k", self.dim), ("v", self.dim)]
        if name == "out_proj.weight":
            return 1, [("o", self.dim), ("mlp", self.hidden)]
        if name.startswith("attn."):
            return 0, [("qk", None)]
        return 0, [("mlp" if name == "mlp_bias" else "rest", None)]

    def forward(self, x: Tensor) -> Tensor:
        hidden, qkv = self.in_proj(self.in_norm(x)).split([self.hidden, 3 * self.dim], dim=-1)
        hidden = self.mlp_drop(self.mlp_act(hidden + self.mlp_bias))
        y = self.out_proj(torch.cat((self.attn(qkv), hidden), dim=-1))
        return x + self.drop_path(self.ls(y))


BLOCKS: dict[str, type[Block] | type[ParallelBlock]] = {
    "pre": PreNormBlock,
    "post": PostNormBlock,
    "res_post": ResPostNormBlock,
    "none": NoNormBlock,
    "parallel": ParallelBlock,
}
BLOCK_TYPES = tuple(BLOCKS.values())


def _refuse(timm: dict[str, Any]) -> None:
    refused = {k: v for k, v in timm.items() if k not in _INERT and v}
    if refused:
        raise ValueError(f"the block has no {', '.join(f'{k}={v!r}' for k, v in refused.items())}")


def _hidden(dim: int, ratio: float) -> int:
    hidden = int(dim * ratio)
    if hidden < 1:
        raise ValueError(f"model.mlp_ratio={ratio:g} leaves the MLP no channels")
    return hidden


def _layer_scale(dim: int, init_values: float | None) -> nn.Module:
    return LayerScale(dim, init_values=init_values) if init_values else nn.Identity()


def _drop_path(rate: float) -> nn.Module:
    return DropPath(rate) if rate else nn.Identity()
