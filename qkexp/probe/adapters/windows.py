"""Swin and Swin V2, timm's and torchvision's: attention within windows.

Windows count as images. The relative position bias is the bias. A shifted window's mask adds -100 to a pair of unlike
parts of the image: the metrics leave it out. Where scores grow beyond 100 the model no longer does.
V2: q̂ and k̂ have length 1, and the scale is exp of the clamped temperature, one a head.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle

from qkexp.probe.adapters.base import Listener, Sink, kind
from qkexp.probe.adapters.watch import watch
from qkexp.probe.weights import Projections, named_projections

WINDOWS = {
    "timm.models.swin_transformer.WindowAttention",
    "timm.models.swin_transformer_v2.WindowAttention",
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention",
    "torchvision.models.swin_transformer.ShiftedWindowAttention",
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2",
}
HIDES = -100.0


class WindowAdapter:
    """What is added to the score hides a pair far above where other models' masks do."""

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return ((name, m) for name, m in model.named_modules() if kind(m) & WINDOWS)

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        return watch(module, listener, sink, hiding=HIDES, masks=["mask"])

    @staticmethod
    def projections(module: nn.Module, parent: nn.Module | None) -> Projections | None:
        return named_projections(module)

    @staticmethod
    def block(module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
        return parent
