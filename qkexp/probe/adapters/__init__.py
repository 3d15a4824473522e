"""How the probe reads an attention module: one file for each kind of module.

==================  ==========================================================================
``qkexp.py``        this project's ViT
``windows.py``      Swin and Swin V2, timm's and torchvision's
``timm.py``         timm's other attention classes, fused or not
``torch_nn.py``     ``nn.MultiheadAttention``, its native fast path included
``generic.py``      whatever else calls ``F.scaled_dot_product_attention`` or looks like attention
``watch.py``        how a module is watched while its forward pass runs
``score.py``        how its score is followed from q·k to the softmax and to the output
``kernels.py``      how PyTorch's attention functions are listened to while a step is probed
==================  ==========================================================================

Adapters are asked in this order; the first that finds a module has it. A user's own go first. Models of
Hugging Face will stand beside ``timm.py``.
"""

from __future__ import annotations

from qkexp.probe.adapters.base import Adapter, Capture, Hook, Listener, Sink
from qkexp.probe.adapters.generic import LookalikeAdapter
from qkexp.probe.adapters.qkexp import QkexpAdapter
from qkexp.probe.adapters.timm import TimmAdapter
from qkexp.probe.adapters.torch_nn import MultiheadAdapter
from qkexp.probe.adapters.windows import WindowAdapter

ADAPTERS: tuple[type[Adapter], ...] = (
    QkexpAdapter,
    WindowAdapter,
    TimmAdapter,
    MultiheadAdapter,
    LookalikeAdapter,
)

__all__ = ["ADAPTERS", "Adapter", "Capture", "Hook", "Listener", "Sink"]
