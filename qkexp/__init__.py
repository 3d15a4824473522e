"""qkexp: train Vision Transformers until their attention breaks, see how it broke, and which remedy held.

The public names are loaded when they are first used: importing the package costs nothing, and run
processes fork from a server that must not have started pandas' or pyarrow's threads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkexp.model.vit import build_vit
    from qkexp.probe.probe import AttentionProbe
    from qkexp.probe.stats import attention_stats
    from qkexp.record.load import load_run, load_sweep

_HOME = {
    "AttentionProbe": "qkexp.probe.probe",
    "attention_stats": "qkexp.probe.stats",
    "build_vit": "qkexp.model.vit",
    "load_run": "qkexp.record.load",
    "load_sweep": "qkexp.record.load",
}

__all__ = ["AttentionProbe", "attention_stats", "build_vit", "load_run", "load_sweep"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qkexp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
