"""Multi-head self-attention: projections -> q/k norm -> core -> output projection.

Parameter names outside the norms are timm's (``qkv``, ``proj``), so its weights load as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkexp.config import AttentionConfig
from qkexp.model.core import AttentionCore, Scale
from qkexp.model.qk_norm import QKNorm


def default_scale(tokens: int) -> float:
    """log2(N² − N): QKNorm's start of the learned scale, N all tokens a query attends to (arXiv 2010.04245)."""
    if tokens < 2:
        raise ValueError("log2(N² - N) needs at least 2 tokens: set attention.scale_init")
    return math.log2(tokens**2 - tokens)


class Attention(nn.Module):
    """Self-attention on (B, N, C) whose variants differ only between the projections and v.

    ``q_norm`` and ``k_norm`` are ``nn.Identity`` where there is no norm and always receive the raw
    projections as (B, N, H, d): hooks on them see the magnitudes before the norm.

    With ``projections=False`` a block has fused them into its own: then the input is (B, N, 3C), q, k and v
    one after another, and the output that of the heads.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        tokens: int,
        cfg: AttentionConfig,
        *,
        projections: bool = True,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
    ):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias) if projections else nn.Identity()
        self.q_norm = self._norm(cfg)
        self.k_norm = self._norm(cfg)
        self.fixed_scale, self.logit_scale = self._scale(cfg, tokens)
        self.core = AttentionCore(cfg.softcap, cfg.score_dtype, cfg.backend)
        self.proj = nn.Linear(dim, dim, bias=proj_bias) if projections else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop) if proj_drop else nn.Identity()

    def _norm(self, cfg: AttentionConfig) -> nn.Module:
        if cfg.norm == "none":
            return nn.Identity()
        return QKNorm(
            self.heads,
            self.head_dim,
            kind=cfg.norm,
            center=cfg.center,
            axis=cfg.axis,
            gain=cfg.gain,
            gain_offset=cfg.gain_offset,
            bias=cfg.bias,
            eps=cfg.eps,
            dtype=cfg.norm_dtype,
        )

    def _scale(self, cfg: AttentionConfig, tokens: int) -> tuple[float, nn.Parameter | None]:
        if cfg.scale == "inv_sqrt_d":
            return self.head_dim**-0.5, None
        if cfg.scale == "one":
            return 1.0, None
        start = default_scale(tokens) if cfg.scale_init is None else cfg.scale_init
        if cfg.scale == "fixed":
            return start, None
        # never 0-dimensional: sharding refuses that
        count = self.heads if cfg.scale == "learned_per_head" else 1
        return start, nn.Parameter(torch.full((count,), start))

    @property
    def scale(self) -> Scale:
        """The factor on q̂·k̂: a float, or the learned tensor (1,) or (H,)."""
        return self.fixed_scale if self.logit_scale is None else self.logit_scale

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, self.head_dim).unbind(2)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        y = self.core(q, k, v.transpose(1, 2), self.scale)
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(B, N, self.dim)))
