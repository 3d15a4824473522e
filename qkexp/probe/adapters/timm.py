"""timm's attention classes, fused or not: each is watched while its forward pass runs.

- ``Attention`` (every plain ViT, DeiT), ``AttentionRope``, ``EvaAttention``: q̂, k̂ after ``q_norm``, ``k_norm`` and
  rotation; scale 1/√d; ``attn_mask`` and ``is_causal`` as they come.
- ``ParallelScalingBlock``: the same, of a block that is its own attention.
- BEiT's ``Attention``, ``RelPosAttention``: the relative position bias is the bias.
- ``AttentionPoolLatent``: as many queries as ``latent_len``, whatever the image.
- Swin's ``WindowAttention``: windows count as images; relative position bias; -100 in a shifted window's mask hides.
- Swin V2's: the same, and q̂, k̂ have length 1, and the scale is exp of the clamped temperature, one a head.

The fused path ignores ``attn.scale``: what counts is what the call was given.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle

from qkexp.probe.adapters.base import Listener, Sink, kind
from qkexp.probe.adapters.watch import watch

PLAIN = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
    "timm.models.beit.Attention",
    "timm.models.vision_transformer_relpos.RelPosAttention",
    "timm.layers.attention_pool.AttentionPoolLatent",
}
PARALLEL = {"timm.models.vision_transformer.ParallelScalingBlock"}
WINDOWS = {
    "timm.models.swin_transformer.WindowAttention",
    "timm.models.swin_transformer_v2.WindowAttention",
}
SWIN_HIDES = -50.0  # its mask is -100 where a pair belongs to unlike parts of the image; a bias may stand on it


def _of(model: nn.Module, names: set[str]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, m) for name, m in model.named_modules() if kind(m) & names)


class TimmAdapter:
    """Plain attention, parallel blocks, relative positions, rotation, pooling."""

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return _of(model, PLAIN | PARALLEL)

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        return watch(module, listener, sink, heads_first=not kind(module) & PARALLEL)


class TimmWindowAdapter:
    """Swin and Swin V2."""

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return _of(model, WINDOWS)

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        return watch(module, listener, sink, hidden=SWIN_HIDES, masks=["mask"])
