"""timm's attention classes, fused or not: each is watched while its forward pass runs.

- ``Attention`` (every plain ViT, DeiT), ``AttentionRope``, ``EvaAttention``: q̂, k̂ after ``q_norm``, ``k_norm`` and
  rotation; scale 1/√d; ``attn_mask`` and ``is_causal`` as they come.
- ``ParallelScalingBlock``: the same, of a block that is its own attention.
- BEiT's ``Attention``, ``RelPosAttention``: the relative position bias is the bias.
- ``AttentionPoolLatent``: as many queries as ``latent_len``, whatever the image.

The fused path ignores ``attn.scale``: what counts is what the call was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from qkexp.probe.adapters.base import Listener, Sink, kind
from qkexp.probe.adapters.watch import watch
from qkexp.probe.weights import Projections, fused, named_projections

PLAIN = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
    "timm.models.beit.Attention",
    "timm.models.vision_transformer_relpos.RelPosAttention",
}
POOL = {"timm.layers.attention_pool.AttentionPoolLatent"}
PARALLEL = {"timm.models.vision_transformer.ParallelScalingBlock"}


class TimmAdapter:
    """Plain attention, parallel blocks, relative positions, rotation, pooling."""

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return ((name, m) for name, m in model.named_modules() if kind(m) & (PLAIN | PARALLEL | POOL))

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        return watch(module, listener, sink, heads_first=not kind(module) & PARALLEL)

    @staticmethod
    def projections(module: Any, parent: nn.Module | None) -> Projections | None:
        if not kind(module) & PARALLEL:
            return named_projections(module)
        linear, (start, *_) = module.in_proj, module.in_split
        rows = fused(linear.weight, linear.bias, module.num_heads, start)
        return Projections(*rows, module.q_norm, module.k_norm)

    @staticmethod
    def block(module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
        """What holds a pool is no block: it takes images."""
        kinds = kind(module)
        return module if kinds & PARALLEL else None if kinds & POOL else parent
