"""Attention that no other adapter knows: what calls PyTorch's function, and what looks like attention."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle

from qkexp.probe.adapters.base import Listener, Sink
from qkexp.probe.adapters.watch import watch

NAMED = re.compile(r"attention|attn|m?h?sa$", re.IGNORECASE)
PROJECTIONS = (
    {"qkv"},
    {"to_qkv"},
    {"q_proj", "k_proj"},
    {"query", "key"},
    {"to_q", "to_k"},
    {"wq", "wk"},
    {"qk", "v"},
    {"c_attn"},
)


def looks_like_attention(module: nn.Module) -> bool:
    """By the name of its class, or of its projections."""
    children = {name for name, _ in module.named_children()}
    return (bool(children) and bool(NAMED.search(type(module).__name__))) or any(p <= children for p in PROJECTIONS)


class LookalikeAdapter:
    """Innermost modules that look like attention, watched while their forward pass runs.

    The score may be written out (product, scale, bias, mask, softmax, product) or be a call of
    ``F.scaled_dot_product_attention``. Modules that only call the latter need not look like attention:
    the probe discovers them (:mod:`qkexp.probe.adapters.kernels`).
    """

    tentative = True

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        like = {name: m for name, m in model.named_modules() if looks_like_attention(m)}
        inner = (m for m in like.items() if not any(n != m[0] and n.startswith(f"{m[0]}.") for n in like))
        return (
            (name, m)
            for name, m in inner
            if name and not any(isinstance(x, nn.MultiheadAttention) for x in m.modules())
        )

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        return watch(module, listener, sink)
