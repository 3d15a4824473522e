"""How the probe reads an attention module: one small class for each kind of module.

An adapter finds its modules in a model and attaches hooks that hand over what the softmax saw. The
contract of :class:`Capture` is all that the statistics know of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qkexp.model.attention import Attention
from qkexp.model.core import Scale, ScoreSpec
from qkexp.probe.stats import vector_norms


@dataclass
class Capture:
    """What one forward pass of one attention layer showed; tensors are detached, nothing large is copied."""

    q: Tensor  # (B, H, N, d) as it enters the dot product
    k: Tensor  # (B, H, M, d)
    q_length: Tensor | None  # (B, N, H) ‖q‖₂ of the projection, before any norm; None: it is q itself
    k_length: Tensor | None  # (B, M, H)
    scale: Scale  # the factor on q·k
    spec: ScoreSpec  # cap and precision of the score
    versions: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        untracked = torch.compiler.is_compiling() or self.q.is_inference()
        self.versions = None if untracked else self._versions()

    def overwritten(self) -> bool:
        """Whether an in-place operation has changed q or k since they were captured."""
        return self.versions is not None and self.versions != self._versions()

    def _versions(self) -> tuple[int, int]:
        return self.q._version, self.k._version


class Hook:
    """A hook of one live model: copied or pickled with its module, it is silent in the copy."""

    def __init__(self, call: Callable[..., None]):
        self.call = call

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # inside backward, activation checkpointing runs the forward pass again (a compiled one runs no hooks there)
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.call(module, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Silent, ()


class Silent:
    """What a :class:`Hook` becomes in a copy of the model."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        return None


class Listener(Protocol):
    """What an adapter's hooks need of the probe."""

    active: bool  # whether to look at all

    def take(self, x: Tensor) -> Tensor:
        """Detach, and keep the images (first axis) that are measured."""
        ...


class QkexpAdapter:
    """This project's own attention: q̂, k̂ and scale from the core's arguments, raw ones from the norms' inputs."""

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Names and modules, in forward order."""
        return ((name, m) for name, m in model.named_modules() if isinstance(m, Attention))

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Callable[[Capture], None]) -> list[RemovableHandle]:
        """Hooks that call ``sink`` with a :class:`Capture` at each forward pass while the listener is active."""
        assert isinstance(module, Attention)
        normed = {n: m for n, m in (("q", module.q_norm), ("k", module.k_norm)) if not isinstance(m, nn.Identity)}
        lengths: dict[str, Tensor] = {}

        def measure(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
                if listener.active:  # at once: the projection is still in cache
                    lengths[name] = vector_norms(listener.take(args[0]))

            return hook

        def core_hook(_module: nn.Module, args: tuple[Tensor, Tensor, Tensor, Scale]) -> None:
            if listener.active and len(lengths) == len(normed):  # else a norm was passed by: the layer did not fire
                q, k, _, scale = args
                # a learned scale is updated in place, perhaps before the step is measured
                scale = scale.detach().clone() if isinstance(scale, Tensor) else scale
                lq, lk = lengths.pop("q", None), lengths.pop("k", None)
                sink(Capture(listener.take(q), listener.take(k), lq, lk, scale, module.core.spec))

        handles = [norm.register_forward_pre_hook(Hook(measure(name))) for name, norm in normed.items()]
        return [*handles, module.core.register_forward_pre_hook(Hook(core_hook))]


ADAPTERS = (QkexpAdapter,)
