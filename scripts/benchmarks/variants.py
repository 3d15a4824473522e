"""The section ``variants``: time, memory and FLOPs of a step with each preset, beside one without a norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.timing import Figure, ratio, seconds, side_by_side, threads
from benchmarks.workloads import SIZES, Effort, Size, configure, make_step, one_batch, our_model
from qkexp.compose import options
from qkexp.config import RunConfig, identity
from qkexp.train.precision import autocast

TIME, FLOPS = 1.25, 0.01  # of a step without a norm: at most so many times its time; at most so much more work
# operations on an element of kernels that are more than one; all others count one
OPERATIONS = {"native_layer_norm": 8, "native_layer_norm_backward": 12, "_softmax": 4, "_softmax_backward_data": 4}
MOVES = {"copy_", "_to_copy", "clone", "empty_like", "zeros_like", "fill_", "zero_", "cat", "stack", "select_backward"}


def variant_figures(names: Sequence[str], effort: Effort, device: str) -> Iterator[Figure]:
    """Three ratios to ``none`` for each preset that sets different keys."""
    for name in names:
        size = SIZES[name]
        with threads(size.threads) as used:
            plain = configure(size, device, "attention=none")
            base = our_model(plain)
            without, least = make_step(base, plain), work(base, plain)
            for label, cfg in list(presets(size, device).items())[: 2 if effort.quick else None]:
                model = our_model(cfg)
                a, b = (partial(seconds, s, effort.inner(size), device) for s in (make_step(model, cfg), without))
                ours, theirs = side_by_side(a, b, effort.pairs(size))
                here = f"{name} {label}"
                target = TIME if name == "vit_s" and device == "cpu" else None
                detail = {"threads": used, "batch": cfg.train.batch_size, "backend": cfg.attention.backend}
                yield ratio("variants", f"{here}: step", ours, theirs, target=target, side="below", detail=detail)
                flops, kept = work(model, cfg)
                more = flops / least[0] - 1.0
                target = FLOPS if name == "vit_s" else None
                detail = {"flops": [flops, least[0]]}
                yield Figure("variants", f"{here}: further FLOPs", more, "of a step", target, "below", detail)
                detail = {"bytes": [kept, least[1]]}
                yield Figure("variants", f"{here}: kept for backward", kept / least[1], detail=detail)


def presets(size: Size, device: str) -> dict[str, RunConfig]:
    """Configurations of all presets but ``none``, once each, under the names that set it."""
    found: dict[str, tuple[list[str], RunConfig]] = {}
    for name in options("attention"):
        if name != "none":
            cfg = configure(size, device, f"attention={name}")
            found.setdefault(identity(cfg), ([], cfg))[0].append(name)
    return {" = ".join(names): cfg for names, cfg in found.values()}


def work(model: nn.Module, cfg: RunConfig) -> tuple[int, int]:
    """FLOPs of forward and backward, and bytes that forward keeps for backward beside the parameters."""
    images, labels = one_batch(cfg)
    model.train()
    with Operations() as counted, keeping(model) as kept:
        with autocast(cfg.precision, cfg.device):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
    with counted:
        loss.backward()
    model.zero_grad(set_to_none=True)
    return counted.flops, sum(kept.values())


class Operations(TorchDispatchMode):
    """Matrix products as PyTorch counts them, and each other operation once for every element of its largest tensor.

    Views and copies are free; LayerNorm and softmax count what they do to an element (``OPERATIONS``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        elif not func.is_view and name not in MOVES:
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            sizes = [x.numel() for x in (*args, *outputs) if isinstance(x, Tensor) and x.is_floating_point()]
            self.flops += OPERATIONS.get(name, 1) * max(sizes, default=0)
        return out


@contextmanager
def keeping(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of the memories that autograd keeps, by address, without those of the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in own:
            found[memory.data_ptr()] = memory.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield found
