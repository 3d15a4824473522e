"""The contract between attention modules and statistics: a :class:`Capture`, and what makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qkexp.model.core import Scale, ScoreSpec

NO_CAP = ScoreSpec()


@dataclass
class Capture:
    """What one forward pass of one attention layer showed; tensors are detached, nothing large is copied.

    z = scale · q·k + bias, and the softmax runs over the capped z of the pairs that ``mask`` shows.
    """

    q: Tensor  # (B, H, N, d) as it enters the dot product
    k: Tensor  # (B, H_k, M, d); query head h meets key head h // (H / H_k)
    q_length: Tensor | None  # (B, N, H) ‖q‖₂ of the projection, before any norm; None: it is q itself
    k_length: Tensor | None  # (B, M, H_k)
    scale: Scale  # the factor on q·k: a number, or (1,) or (H,)
    spec: ScoreSpec = NO_CAP  # cap and precision of the score
    bias: Tensor | None = None  # added to the score, finite, broadcastable to (B, H, N, M)
    mask: Tensor | None = None  # broadcastable to (B, H, N, M): bool, True where a key may be attended to, or additive
    # For the self-check, given where the listener is ``checking``:
    v: Tensor | None = None  # (B, H_k, M, d_v)
    output: Tensor | None = None  # what the module made of p·v
    finish: Callable[[Tensor], Tensor] | None = None  # (B, H, N, d_v) float32 -> as ``output``; None: as it is
    hiding: float | None = None  # what is added to a pair that ``mask`` hides; None: it has no weight at all
    dropout: bool = False  # weights were dropped: the output cannot be recomputed
    # For the gradient of the scores, given where the listener wants ``gradients``:
    grad: Tensor | None = None  # (B, H, N, d_v) ∂L/∂(p·v), when backward has reached it; with ``v``
    handle: RemovableHandle | None = field(default=None, init=False)
    versions: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        untracked = torch.compiler.is_compiling() or self.q.is_inference()
        self.versions = None if untracked else self._versions()

    def overwritten(self) -> bool:
        """Whether an in-place operation has changed q or k since they were captured."""
        return self.versions is not None and self.versions != self._versions()

    def await_gradient(self, output: Tensor, cut: Callable[[Tensor], Tensor]) -> None:
        """Keep the gradient that reaches p·v, made (B, H, N, d_v) by ``cut``; several backward passes add up."""

        def hook(grad: Tensor) -> None:
            mine = cut(grad)
            self.grad = mine if self.grad is None else self.grad + mine

        if output.requires_grad:
            self.handle = output.register_hook(hook)

    def forget(self) -> None:
        """Wait for no gradient any more: the graph shall not keep what was captured."""
        if self.handle is not None:
            self.handle.remove()

    def _versions(self) -> tuple[int, int]:
        return self.q._version, self.k._version


Sink = Callable[[Capture], None]


class Hook:
    """A hook of one live model: copied or pickled with its module, it is silent in the copy."""

    def __init__(self, call: Callable[..., None]):
        self.call = call

    def __call__(self, *args: Any) -> None:
        # inside backward, activation checkpointing runs the forward pass again (a compiled one runs no hooks there)
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Silent, ()


class Silent:
    """What a :class:`Hook` becomes in a copy of the model."""

    def __call__(self, *args: Any) -> None:
        return None


class Listener(Protocol):
    """What an adapter's hooks need of the probe."""

    active: bool  # whether to look at all
    checking: bool  # whether this step is self-checked: then give v and output as well
    gradients: bool  # whether the gradient of the scores is wanted: then give v, and await that of the output

    def take(self, x: Tensor) -> Tensor:
        """Detach, and keep the images (first axis) that are measured."""
        ...


class Adapter(Protocol):
    """One kind of attention module. Ten lines: docs/probe.md.

    Three attributes are optional. ``in_graph``: its hooks can be compiled into a graph, so they stay on the
    module; those of other adapters are there while a step is probed, and that step runs in eager mode.
    ``tentative``: what it finds may not be attention at all; it is one if it fires. ``by_kernel``: nothing is
    attached; what its modules call of PyTorch's attention functions is their attention.

    Two methods are optional, each of the module and of the one that holds it (None: it is the model); without them,
    and where they return None, the metrics that need them are absent. ``projections(module, parent)``: where W_q, W_k
    and W_v of each head are (:class:`qkexp.probe.weights.Projections`). ``block(module, parent)``: the module that
    takes and gives the residual stream; a hook must be allowed to stand on it.
    """

    @staticmethod
    def find(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Names and modules, in forward order."""
        ...

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        """Hooks that call ``sink`` with a :class:`Capture` at each forward pass while the listener is active."""
        ...


def frozen(x: Tensor) -> Tensor:
    """Detached; a copy where it is a view of a parameter, which the optimiser will change in place."""
    base = x if x._base is None else x._base
    return x.detach().clone() if base.is_leaf and base.requires_grad else x.detach()


def kind(module: nn.Module) -> set[str]:
    """Full names of a module's class and of the classes it extends without a forward of its own.

    So classes of other packages are recognised without importing these.
    """
    cls = type(module)
    return {f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__ if c.__dict__.get("forward") is cls.forward}
