"""This project's own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qkexp.model.attention import Attention
from qkexp.model.core import Scale
from qkexp.probe.adapters.base import Capture, Hook, Listener, Sink
from qkexp.probe.stats import vector_norms
from qkexp.probe.weights import Projections, fused


class QkexpAdapter:
    """q̂, k̂ and scale from the core's arguments, cap and precision from its ``spec``, ‖q‖ and ‖k‖ before the norms."""

    in_graph = True

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return ((name, m) for name, m in model.named_modules() if isinstance(m, Attention))

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        assert isinstance(module, Attention)
        normed = {n: m for n, m in (("q", module.q_norm), ("k", module.k_norm)) if not isinstance(m, nn.Identity)}
        lengths: dict[str, Tensor] = {}

        def measure(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
                if listener.active:  # at once: the projection is still in cache
                    lengths[name] = vector_norms(listener.take(args[0]))

            return hook

        def core_hook(core: nn.Module, args: tuple[Tensor, Tensor, Tensor, Scale]) -> None:
            if listener.active and len(lengths) == len(normed):  # else a norm was passed by: the layer did not fire
                q, k, v, scale = args
                # a learned scale is updated in place, perhaps before the step is measured
                scale = scale.detach().clone() if isinstance(scale, Tensor) else scale
                lq, lk = lengths.pop("q", None), lengths.pop("k", None)
                capture = Capture(listener.take(q), listener.take(k), lq, lk, scale, module.core.spec)
                if not torch.compiler.is_compiling() and (listener.checking or listener.gradients):
                    capture.v = listener.take(v).clone() if listener.checking else listener.take(v)
                    capture.dropout = module.core.drops
                    _once(core, lambda y: show(capture, y))
                sink(capture)

        def show(capture: Capture, output: Tensor) -> None:
            if listener.checking:
                capture.output = listener.take(output).clone()  # what follows may write into it
            if listener.gradients:
                capture.await_gradient(output, listener.take)

        handles = [norm.register_forward_pre_hook(Hook(measure(name))) for name, norm in normed.items()]
        return [*handles, module.core.register_forward_pre_hook(Hook(core_hook))]

    @staticmethod
    def projections(module: nn.Module, parent: nn.Module | None) -> Projections | None:
        """Rows of the module's own ``qkv``, or the last ones of what its block has fused."""
        assert isinstance(module, Attention)
        linear = module.qkv if isinstance(module.qkv, nn.Linear) else getattr(parent, "in_proj", None)
        if not isinstance(linear, nn.Linear):
            return None
        norms = module.q_norm, module.k_norm
        plain = all(isinstance(m, nn.Identity) for m in (*norms, module.rotary))  # else W_qᵀW_k is not the score's form
        source = linear if plain else None
        start = linear.out_features - 3 * module.dim
        return Projections(*fused(linear.weight, linear.bias, module.heads, start), *norms, source)

    @staticmethod
    def block(module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
        return parent


def _once(module: nn.Module, call: Callable[[Tensor], None]) -> None:
    """Hand over the output of the forward pass that is about to run, and of no other."""

    def hook(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        handle.remove()
        call(output)

    handle = module.register_forward_hook(Hook(hook))
