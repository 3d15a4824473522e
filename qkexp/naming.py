"""Names of variants and run directories, made of what their configurations say."""

from __future__ import annotations

import dataclasses
from typing import Any

from qkexp.config import AttentionConfig, RunConfig, identity

# keys that make a variant's name, with what each base name stands for
_BASES: dict[tuple[str, bool], tuple[str, dict[str, Any]]] = {
    ("none", False): ("none", {}),
    ("center", False): ("none_centred", {}),
    ("rms", True): ("layernorm", {"gain": "shared"}),
    ("rms", False): ("rmsnorm", {"gain": "shared"}),
    ("l2", False): ("l2", {"scale": "learned"}),
    ("l2", True): ("l2_centred", {"scale": "learned"}),
}
_NOT_NAMED = {"norm", "center", "softcap", "init", "backend"}


def variant(attention: AttentionConfig) -> str:
    """The name of an attention variant, from its keys: ``rmsnorm_softcap``, ``layernorm_axis-all``, …"""
    base, expected = _BASES[attention.norm, attention.center]
    name = base
    if attention.softcap is not None:
        name = "softcap" if base == "none" else f"{base}_softcap"
        if attention.softcap != 50.0:
            name += slug(f"{attention.softcap:g}")
    for f in dataclasses.fields(AttentionConfig):
        value = getattr(attention, f.name)
        if f.name not in _NOT_NAMED and value != expected.get(f.name, f.default):
            name += "_" + slug(f"{f.name.replace('_', '')}-{value}")
    return name


def slug(text: str) -> str:
    """Text -> [a-z0-9_-], for directory names that no other tool trips over."""
    return "".join(c if c.isalnum() or c in "-_" else {".": "p"}.get(c, "") for c in text.lower())


def run_name(cfg: RunConfig, mark: str | None = None) -> str:
    """Directory name of a run: variant, rate, seed and the first six digits of its identity (``mark``, if known)."""
    rate = f"{cfg.optim.lr:.0e}" if float(f"{cfg.optim.lr:.0e}") == cfg.optim.lr else f"{cfg.optim.lr:.3e}"
    return f"{variant(cfg.attention)}-lr{slug(rate)}-seed{cfg.seed}-{(mark or identity(cfg))[:6]}"


def branch_name(arm: str, cfg: RunConfig) -> str:
    """Directory name of a branch: what it changes, the step it begins at, and the first six digits of its identity."""
    return f"{arm}-at{cfg.branch.step}-{identity(cfg)[:6]}"
