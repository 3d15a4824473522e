"""Where computing happens and in which arithmetic."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext

import torch

from qkexp.config import ConfigError, PrecisionConfig, RunConfig, head_width
from qkexp.model.core import choose_backend

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


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


def check_machine(cfg: RunConfig) -> None:
    """Refuse what this machine cannot do, before a run starts.

    Raises:
        ConfigError: cuda without a device, or ``compile`` on a CPU without a C++ compiler.
    """
    device = choose_device(cfg.device)
    if cfg.compile and device == "cpu":
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        if not any(c and shutil.which(c) for c in compilers):
            raise ConfigError("compile", True, "false (torch.compile needs a C++ compiler on CPU: g++ or clang++)")


def warnings(cfg: RunConfig) -> list[str]:
    """What a user should know of this precision on this machine before the first step."""
    found = []
    if cfg.precision.weights == "bf16":
        found.append("precision.weights=bf16: updates under 1/256 of a weight are rounded away (docs/training.md)")
    native = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}
    wanted = "bf16" if cfg.precision.weights == "bf16" else cfg.precision.autocast
    if choose_device(cfg.device) == "cpu" and wanted in native and not getattr(torch.ops.mkldnn, native[wanted])():
        found.append(f"this CPU has no {wanted} instructions: steps will take several times as long as in fp32")
    return found


def resolve(cfg: RunConfig) -> None:
    """Replace ``auto`` by what this machine makes of it; the run directory records the result."""
    cfg.device = choose_device(cfg.device)
    a = cfg.attention
    if a.backend == "auto":
        a.backend = choose_backend(cfg.device, a.softcap, a.score_dtype, head_width(cfg.model), a.dropout)


def autocast(cfg: PrecisionConfig, device: str) -> AbstractContextManager:
    """Around forward and loss only: gradients, optimiser and weights keep the type of the weights."""
    return nullcontext() if cfg.autocast == "none" else torch.autocast(device, AUTOCAST[cfg.autocast])


def loss_scaler(cfg: PrecisionConfig, device: str) -> torch.amp.GradScaler:
    """PyTorch's scaler of the loss for fp16, whose gradients underflow; for every other type it does nothing."""
    return torch.amp.GradScaler(device, enabled=cfg.autocast == "fp16")
