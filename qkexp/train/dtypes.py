"""Where each arithmetic really is: measured by a dry pass, not derived from the settings.

Autocast decides operation by operation, differently on CPU and CUDA, and kernels round where no setting says so. So
the operations of one forward pass of a whole batch (kernels are also chosen by size) are watched as they reach
their kernels.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qkexp.config import RunConfig
from qkexp.model.core import AttentionCore
from qkexp.model.qk_norm import QKNorm
from qkexp.train.precision import autocast

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"}
_NORMS = {"native_layer_norm", "linalg_vector_norm", "_fused_rms_norm", "rms_norm", "rsqrt"}


def name(dtype: torch.dtype) -> str:
    """``float32``, ``bfloat16``, …"""
    return str(dtype).removeprefix("torch.")


class _Watch(TorchDispatchMode):
    """Logs each operation with the module it ran in and the types of its inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.log: list[tuple[str, str, list[torch.dtype], list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.inside:
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            entry = [[x.dtype for x in tensors if isinstance(x, Tensor)] for tensors in (args, outputs)]
            self.log.append((self.inside[-1], func.overloadpacket.__name__, *entry))
        return out


def measure(model: nn.Module, images: Tensor, cfg: RunConfig) -> dict[str, str]:
    """Part of the model -> the type of its arithmetic, in one pass of images (B, C, S, S).

    Weights, gradients and random state are left as they are. What a fused kernel does inside cannot be
    seen; it is named instead.
    """
    watch = _Watch()
    handles = [handle for path, module in model.named_modules() for handle in _mark(path, module, watch)]
    kept = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # else backward would add to it
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if cfg.device == "cuda" else []):
            with watch, autocast(cfg.precision, cfg.device):
                output = model(images)
            output.float().sum().backward()
        gradients = {name(p.grad.dtype) for p in model.parameters() if p.grad is not None}
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in zip(model.parameters(), kept, strict=True):
            parameter.grad = grad
    return {
        "weights": _joined({name(p.dtype) for p in model.parameters()}),
        "gradients": _joined(gradients),
        "linear": _found(watch, "linear", _PRODUCTS),
        "block_norm": _found(watch, "block_norm", _NORMS, last=True),
        "qk_norm": _found(watch, "qk_norm", _NORMS, last=True),
        **_attention(watch),
        "output": name(output.dtype),
    }


def _mark(path: str, module: nn.Module, watch: _Watch) -> list[Any]:
    """Hooks that tell the watch which kind of module it is in."""
    kinds: list[tuple[type | tuple[type, ...], str]] = [
        ((nn.Linear, PatchEmbed), "linear"),
        (QKNorm, "qk_norm"),
        (AttentionCore, "core"),
    ]
    kind = next((label for types, label in kinds if isinstance(module, types)), None)
    if re.fullmatch(r"blocks\.\d+\.(norm1|norm2|in_norm)", path) and not isinstance(module, nn.Identity):
        kind = "block_norm"
    if kind is None:
        return []

    def enter(*_: Any) -> None:
        watch.inside.append(kind)

    def leave(*_: Any) -> None:
        watch.inside.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _found(watch: _Watch, kind: str, operations: set[str], *, last: bool = False) -> str:
    """Type of the first (or last) result of such operations in such modules; a norm's last are its statistics."""
    found = [outs for where, op, _, outs in watch.log if where == kind and op in operations]
    return _joined({name(outs[-1 if last else 0]) for outs in found}) or "-"


def _attention(watch: _Watch) -> dict[str, str]:
    """Scores, softmax and weights as the core computed them."""
    ops = [(op, ins, outs) for where, op, ins, outs in watch.log if where == "core"]
    fused = next(((op, ins) for op, ins, _ in ops if "scaled_dot_product" in op or "flex_attention" in op), None)
    if fused is not None:
        inside = f"inside {fused[0].strip('_')} of {name(fused[1][0])}"
        return dict.fromkeys(("scores", "softmax", "attention_weights"), inside)
    products = [(ins, outs) for op, ins, outs in ops if op in _PRODUCTS]
    softmax = [outs for op, _, outs in ops if op in ("_softmax", "_safe_softmax")]
    return {
        "scores": name(products[0][1][0]),
        "softmax": _joined({name(outs[0]) for outs in softmax}) or "-",
        "attention_weights": name(products[1][0][0]),
    }


def _joined(names: set[str]) -> str:
    return ", ".join(sorted(names))
