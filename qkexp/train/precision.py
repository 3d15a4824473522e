"""Where computing happens and in which arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from qkexp.config import ConfigError, PrecisionConfig, RunConfig, head_width
from qkexp.model.core import choose_backend


def choose_device(name: str) -> str:
    """``auto`` -> cuda where there is one, else cpu.

    Raises:
        ConfigError: cuda is asked for and absent.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "auto | cpu (PyTorch sees no CUDA device here)")
    return name


def resolve(cfg: RunConfig) -> None:
    """Replace ``auto`` by what this machine makes of it; the run directory records the result."""
    cfg.device = choose_device(cfg.device)
    a = cfg.attention
    if a.backend == "auto":
        a.backend = choose_backend(cfg.device, a.softcap, a.score_dtype, head_width(cfg.model))


def autocast(cfg: PrecisionConfig, device: str) -> AbstractContextManager:
    """Around forward and loss only: gradients, optimiser and weights stay float32."""
    return torch.autocast(device, torch.bfloat16) if cfg.autocast == "bf16" else nullcontext()
