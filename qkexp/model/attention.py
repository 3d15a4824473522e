"""Multi-head self-attention: projections -> q/k norm and rotation -> core -> gate -> output projection.

Parameter names are timm's (``qkv``, ``q_norm``, ``k_norm``, ``gate``, ``proj``), so its weights load as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkexp.config import AttentionConfig, ConfigError
from qkexp.model.core import AttentionCore, Scale
from qkexp.model.qk_norm import QKNorm


def default_scale(tokens: int) -> float:
    """log2(N² − N): QKNorm's start of the learned scale, N all tokens a query attends to (arXiv 2010.04245)."""
    if tokens < 2:
        raise ValueError("log2(N² - N) needs at least 2 tokens: set attention.scale_init")
    return math.log2(tokens**2 - tokens)


def temperature_at(cfg: AttentionConfig, step: int) -> float:
    """What the score is divided by at a step: ``temperature`` from its first step until its last, else 1."""
    ended = cfg.temperature_until is not None and step >= cfg.temperature_until
    return 1.0 if ended or step < cfg.temperature_from else cfg.temperature


class Gate(nn.Module):
    """σ(W x + b), (B, N, C) -> (B, N, H, 1 or d): a factor on what each head, or each of its channels, hands on.

    It starts at 1/2 for every token, because W starts at 0: no random number is drawn, and so variants with and
    without a gate start with the same weights elsewhere. Gated attention: arXiv 2505.06708.
    """

    def __init__(self, dim: int, heads: int, width: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.zeros(heads * width, dim))
        self.bias = nn.Parameter(torch.zeros(heads * width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).sigmoid().unflatten(-1, (self.heads, -1))


class Attention(nn.Module):
    """Self-attention on (B, N, C) whose variants differ only between the projections and v.

    ``q_norm`` and ``k_norm`` are ``nn.Identity`` where there is no norm and always receive the raw
    projections as (B, N, H, d): hooks on them see the magnitudes before the norm. ``rotary`` turns q and k,
    after the norm or, with ``rope_order=rope_first``, before it.

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
        rotary: nn.Module | None = None,
        projections: bool = True,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
    ):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias) if projections else nn.Identity()
        first = cfg.rope_order == "rope_first" and cfg.norm != "none"
        self.q_norm = self._norm(cfg, rotary if first else None)
        self.k_norm = self._norm(cfg, rotary if first else None)
        self.rotary = nn.Identity() if rotary is None or first else rotary
        self.scale_log, self.scale_max = cfg.scale_log, cfg.scale_max
        self.fixed_scale, self.logit_scale = self._scale(cfg, tokens)
        self.temperature = 1.0  # the loop sets it, step by step
        self.core = AttentionCore(cfg.softcap, cfg.score_dtype, cfg.backend, cfg.dropout)
        width = {"none": 0, "head": 1, "channel": self.head_dim}[cfg.gate]
        self.gate = Gate(dim, heads, width, qkv_bias) if width else None
        self.proj = nn.Linear(dim, dim, bias=proj_bias) if projections else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop) if proj_drop else nn.Identity()

    def _norm(self, cfg: AttentionConfig, rotary: nn.Module | None) -> nn.Module:
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
            rotary=rotary,
        )

    def _scale(self, cfg: AttentionConfig, tokens: int) -> tuple[float, nn.Parameter | None]:
        """The factor that stays, and the learned one, s or log s."""
        if cfg.scale == "inv_sqrt_d":
            return self.head_dim**-0.5, None
        if cfg.scale == "one":
            return 1.0, None
        ssmax = cfg.scale == "ssmax"
        if ssmax and tokens < 2:
            raise ValueError("attention.scale=ssmax needs at least 2 tokens")
        start = cfg.scale_init
        if start is None:
            start = 1.0 / math.log(tokens) if ssmax else default_scale(tokens)
        if cfg.scale == "fixed":
            return start, None
        if cfg.scale_max is not None and start > cfg.scale_max:
            raise ConfigError("attention.scale_max", cfg.scale_max, f"at least the scale's start, {start:g}")
        # never 0-dimensional: sharding refuses that
        count = 1 if cfg.scale == "learned" else self.heads
        learned = nn.Parameter(torch.full((count,), math.log(start) if cfg.scale_log else start))
        return math.log(tokens) * self.head_dim**-0.5 if ssmax else 1.0, learned

    @property
    def scale(self) -> Scale:
        """The factor on q̂·k̂: a float, or a learned tensor (1,) or (H,)."""
        scale = self._untempered
        return scale if self.temperature == 1.0 else scale / self.temperature

    @property
    def _untempered(self) -> Scale:
        if self.logit_scale is None:
            return self.fixed_scale
        s: Tensor = self.logit_scale
        if self.scale_max is not None:  # before exp, which would overflow and make its gradient NaN
            s = s.clamp(max=math.log(self.scale_max) if self.scale_log else self.scale_max)
        if self.scale_log:
            s = s.exp()
        return s if self.fixed_scale == 1.0 else s * self.fixed_scale

    @property
    def scale_bound(self) -> float:
        """What :attr:`scale` cannot exceed; +inf where it is fixed or may grow."""
        return math.inf if self.scale_max is None else self.scale_max * self.fixed_scale

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, self.head_dim).unbind(2)
        q = self.rotary(self.q_norm(q)).transpose(1, 2)
        k = self.rotary(self.k_norm(k)).transpose(1, 2)
        y = self.core(q, k, v.transpose(1, 2), self.scale).transpose(1, 2)
        if self.gate is not None:
            y = y * self.gate(x)
        return self.proj_drop(self.proj(y.reshape(B, N, self.dim)))
