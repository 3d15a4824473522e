"""AttentionProbe: what the adapters capture in a step -> a frame of metrics."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qkexp.probe.adapters import ADAPTERS, Adapter, Capture, Sink
from qkexp.probe.adapters.kernels import Kernels
from qkexp.probe.beside import HOOKED, Beside, with_room, write
from qkexp.probe.check import Coverage, CoverageError, SelfCheckError, self_check
from qkexp.probe.frame import Frame, Group
from qkexp.probe.layers import Layer, find_layers, nested, plain_name, unwrapped
from qkexp.probe.metrics import GROUPS, besides, names
from qkexp.probe.reduce import Reducer
from qkexp.probe.rows import CHUNK_BYTES

log = logging.getLogger(__name__)


class AttentionProbe:
    """Measures every attention layer of a model, per head, while it trains.

    Hooks keep detached references to what enters the softmax; statistics are computed when the step
    ends (on CPU, of large layers at once, because autograd may not keep q and k), without gradients,
    random numbers, synchronisation or a second forward pass, so losses are bit-identical with and
    without a probe. The first probed step is checked: attention recomputed from what was captured must
    equal what each layer produced.

        probe = AttentionProbe(model, every=50)
        for step, batch in enumerate(loader):
            with probe.step(step):
                loss = train_step(model, batch)
            if probe.frame is not None:
                log(probe.frame.scalars())

    Args:
        model: any PyTorch model; bare, or wrapped by DistributedDataParallel or torch.compile.
        every: probe each so many steps; 0 never.
        images: measure the first so many images of a batch, or ``"all"``.
        queries: measure so many rows of each image, evenly spread, or ``"all"``; always against all keys
            (:mod:`qkexp.probe.sample`). A frame of a part is ``subsampled``.
        groups: further metrics, any of :data:`qkexp.probe.metrics.GROUPS`.
        optimizer: yours, or several, for the group ``adam``.
        adapters: your own, asked before the built-in ones (docs/probe.md).
        strict: a module that looks like attention and shows none is an error, not a warning.
        allow_missing: a layer that does not fire in a step (LayerDrop, an optional branch) is absent from its frame
            instead of an error; a step without a forward pass has no frame.

    Attributes:
        frame: this step's :class:`~qkexp.probe.frame.Frame`; None on steps that were not probed.
        names: layers in the order in which the model registers them; wrappers leave no trace in a name.
        coverage: what the first probed step found and checked; None before.
        spent: seconds of this step that it took beside what it does when the step ends.

    Raises:
        CoverageError: the model has no attention, or, after the first probed step, a layer did not fire.
        SelfCheckError: a layer's output is not what the captured tensors give.
        TypeError: the model is in DataParallel, whose replicas share hooks.
        ValueError: an unknown group.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 1,
        images: int | str = "all",
        queries: int | str = "all",
        groups: Sequence[str] = (),
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = (),
        adapters: Sequence[type[Adapter] | Adapter] = (),
        strict: bool = False,
        allow_missing: bool = False,
    ):
        _check_arguments(every, images, queries, groups)
        self.every, self.groups, self.strict, self.allow_missing = every, tuple(groups), strict, allow_missing
        self._reducer = Reducer(images, queries, self.groups)
        self.optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
        self.gradients = "gradients" in self.groups
        self.spent = 0.0
        self.frame: Frame | None = None
        self.coverage: Coverage | None = None
        self.active = self.checking = self._stepped = False
        base = unwrapped(model)
        self._model_name = type(base).__name__
        self._modules = {id(m): plain_name(name) for name, m in base.named_modules()}
        self._layers = self._in_order(find_layers(base, (*adapters, *ADAPTERS)))
        if not self._layers and all(type(m).__module__.startswith("torch.nn.modules.") for m in base.modules()):
            raise CoverageError(f"{self._model_name} has no attention layer that this probe knows")
        self._by_module = {id(layer.module): layer for layer in self._layers}
        self._unknown: dict[str, str] = {}
        self._kernels = Kernels(self, self._sink_of)
        # A model that was compiled before does not run hooks which came later.
        self._in_graph = model is base
        self._handles = [
            handle
            for layer in self._layers
            if layer.in_graph and layer.adapter is not None
            for handle in layer.adapter.attach(layer.module, self, self._sink(layer))
        ]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self._layers)

    @contextmanager
    def step(self, step: int, phase: str = "train", *, loss_scale: float | Tensor = 1.0) -> Iterator[None]:
        """Forward passes inside belong to ``step``; those outside are not measured.

        Backward belongs inside for the group ``gradients``; ``loss_scale`` is what the loss was multiplied by, and the
        gradients still are when this ends. The optimiser's step may be inside, or after it (:meth:`updated`).
        """
        self.frame = None
        for layer in self._layers:
            layer.beside = None
        self._reducer.turn, self.spent = step // max(self.every, 1), 0.0
        if not (self.every > 0 and step % self.every == 0):
            yield
            return
        if self.active:
            raise RuntimeError(f"step {step} begins within another step of the same probe")
        try:
            with self._listening():
                yield
            self.active = False
            self._check_coverage()
            if self.allow_missing and not any(layer.fired for layer in self._layers):
                return
            values = self._with_besides(self._reducer.reduce(self._layers), loss_scale)
            self.frame = Frame(step, phase, self.names, values, names(self.groups), self._reducer.subsampled)
            if self._stepped or any(layer.beside is not None and layer.beside.was_updated() for layer in self._layers):
                self.updated()
        finally:
            self._forget()

    def updated(self) -> None:
        """Say that the optimiser has stepped, where it does so after ``with probe.step(...)``: completes ``frame``.

        Needed by the groups ``update`` and ``adam`` only, and without effect after a step that was not probed.
        """
        if self.frame is None or all(layer.beside is None for layer in self._layers):
            return
        began = time.perf_counter()
        for layer in self._layers:
            if layer.beside is not None:
                layer.beside.updated(self.optimizers)
        self.frame = replace(self.frame, groups=self._written(self.frame.groups))
        for layer in self._layers:
            layer.beside = None
        self.spent += time.perf_counter() - began

    def take(self, x: Tensor) -> Tensor:
        """The measured images of an activation, detached (for adapters)."""
        return self._reducer.take(x)

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------ finding and listening

    def _in_order(self, layers: list[Layer]) -> list[Layer]:
        place = {name: i for i, name in enumerate(self._modules.values())}
        return sorted(layers, key=lambda layer: place.get(layer.name, len(place)))

    def _sink_of(self, module: nn.Module, inside: bool) -> Sink | None:
        """Who wants the attention that a module computes by a function of PyTorch's; None: no one, or a hook."""
        layer = self._by_module.get(id(module))
        if layer is None:
            name = self._modules.get(id(module))
            if name is None or any(name.startswith(f"{known.name}.") for known in self._layers):
                return None  # of another model, as an average of this one, or a part of a layer
            layer = self._by_module[id(module)] = Layer(name, module, None)
            self._layers.append(layer)
        by_kernel = layer.adapter is None or getattr(layer.adapter, "by_kernel", False)
        return self._sink(layer) if by_kernel or (inside and layer.tentative) else None

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Captures arrive inside: hooks that are not always there are attached, functions listened to."""
        self.active = True
        self.checking = not all(layer.checked for layer in self._layers) or self.coverage is None
        with ExitStack() as stack:
            if self.coverage is None or not self._graphs():
                stack.enter_context(_eager())
                stack.enter_context(self._kernels.listening())
            for layer in self._layers:
                if layer.adapter is not None and not layer.in_graph:
                    for handle in layer.adapter.attach(layer.module, self, self._sink(layer)):
                        stack.callback(handle.remove)
            self._stepped = False
            if besides(self.groups):  # fused optimisers leave no trace in a weight's version
                stack.callback(register_optimizer_step_post_hook(self._notice).remove)
            for layer in self._layers if besides(self.groups) else ():
                layer.beside = Beside(self.groups, layer.ask("projections"), layer.ask("block"), self.take)
                for handle in layer.beside.begin():
                    stack.callback(handle.remove)
            yield

    def _notice(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._stepped |= any(layer.beside is not None and layer.beside.has(weights) for layer in self._layers)

    def _graphs(self) -> bool:
        """Whether probed steps may run compiled: every layer's hooks stand on it and can be compiled."""
        return self._in_graph and not HOOKED & set(self.groups) and all(layer.in_graph for layer in self._layers)

    def _forget(self) -> None:
        self.active = self.checking = self._reducer.subsampled = False
        for layer in self._layers:
            for capture in layer.captures:
                capture.forget()
            layer.captures.clear()
            layer.done.clear()

    def _sink(self, layer: Layer) -> Sink:
        """Where a layer's captures go: measured at once, or kept until the step ends, as its first pass was."""

        def sink(capture: Capture) -> None:
            if not layer.done and (layer.captures or not self._at_once(capture)):
                layer.captures.append(capture)
                return
            began = time.perf_counter()
            layer.done.append(self._reducer.measure([capture], sum(part.images for part in layer.done)))
            self.spent += time.perf_counter() - began

        return sink

    def _at_once(self, c: Capture) -> bool:
        """Whether a layer's q and k are not kept: it shares no call, and where autograd does not keep them we need not.

        A device works behind the host's clock, and its fused kernels keep q and k for the backward pass anyway. A step
        that is checked, or whose scores' gradient is wanted, needs them.
        """
        large = self._reducer.score_bytes(c) > CHUNK_BYTES
        kept = self.checking or self.gradients
        return large and not kept and c.q.device.type == "cpu" and not torch.compiler.is_compiling()

    # ------------------------------------------------------------ trust

    def _check_coverage(self) -> None:
        """Every layer fired and shows what its module computed; the first step says what is covered."""
        if self.allow_missing and not any(layer.fired for layer in self._layers):
            return
        first = self.coverage is None
        if first:
            self._settle()
        if all(layer.tentative and not layer.fired for layer in self._layers):
            raise CoverageError(f"{self._model_name} showed no attention in this step{self._advice()}")
        silent = [layer.name for layer in self._layers if not layer.fired]
        if silent and not self.allow_missing and (first or len(silent) < len(self._layers)):
            raise CoverageError(
                f"{len(silent)} of {len(self._layers)} attention layers did not fire in this step: "
                f"{', '.join(silent)}; they may be unused, called as module.forward(x), belong to a copy of the model, "
                "or have been compiled before the probe was attached"
            )
        if silent and self._graphs() and "torch._dynamo" in sys.modules:  # no forward pass, or one without our hooks
            self._in_graph = False
            warnings.warn(
                "no attention layer fired in this step. If the model was compiled before the probe was attached, "
                "its graph has no hooks: probed steps run in eager mode from now on",
                stacklevel=5,
            )
        for layer in self._layers:
            if any(c.overwritten() for c in layer.captures):
                raise CoverageError(f"q or k of {layer.name} was changed in place after its softmax saw it")
        if self.checking:
            self._self_check()
        if first:
            names = self.names
            unchecked = {layer.name: layer.why_not for layer in self._layers if not layer.checked}
            checked, fired = (tuple(n for n in names if n not in out) for out in (unchecked, silent))
            self.coverage = Coverage(names, names, fired, checked, unchecked, self._unknown)
            self._announce()

    def _settle(self) -> None:
        """After the first step: guesses that did not fire are no layers, and discoveries take their place."""
        fired = [layer.name for layer in self._layers if layer.fired]
        guesses = [layer for layer in self._layers if layer.tentative and not layer.fired]
        # what is around or inside a layer that fired may well look like attention
        strange = [layer for layer in guesses if not any(nested(layer.name, name) for name in fired)]
        self._unknown = {layer.name: type(layer.module).__name__ for layer in strange}
        if self.strict and self._unknown:
            raise CoverageError(f"no adapter knows the attention of this model{self._advice()}")
        if fired:  # else there was perhaps no forward pass
            self._layers = self._in_order([layer for layer in self._layers if layer not in guesses])

    def _advice(self) -> str:
        if not self._unknown:
            return ""
        named = ", ".join(f"{name} ({cls})" for name, cls in self._unknown.items())
        return f": {named}; write an adapter of ten lines for AttentionProbe(model, adapters=[...]), see docs/probe.md"

    def _self_check(self) -> None:
        for layer in self._layers:
            if layer.checked:
                continue
            for capture in layer.captures:
                fault, reason = self_check(capture)
                if fault is not None:
                    raise SelfCheckError(
                        f"{layer.name} ({type(layer.module).__name__}): {fault}. The adapter that reads it misses "
                        "something of its score: a bias, a mask, the scale, a cap, or what is done to q and k"
                    )
                layer.checked, layer.why_not = reason is None, reason or ""

    def _announce(self) -> None:
        if self._unknown:
            warnings.warn(str(self.coverage), stacklevel=6)
        else:
            log.info("%s", self.coverage)

    # ------------------------------------------------------------ reducing

    def _with_besides(self, groups: tuple[Group, ...], loss_scale: float | Tensor) -> tuple[Group, ...]:
        """Room for the metrics that stand beside the scores, and what is known of them by now."""
        if not besides(self.groups):
            return groups
        for group in groups:
            scales = group.values[self._reducer.metrics.index("score_scale")]
            for scale, layer in zip(scales, (self._layers[i] for i in group.layers), strict=True):
                if layer.beside is None:  # it was discovered in this step
                    layer.beside = Beside(self.groups, None, None, self.take)
                layer.beside.end(layer.captures, scale, loss_scale)
                self.spent += layer.beside.spent
        metrics = names(self.groups)
        return self._written(replace(group, values=with_room(group.values, metrics)) for group in groups)

    def _written(self, groups: Iterable[Group]) -> tuple[Group, ...]:
        """Copies of groups, with what stands beside the scores as far as it is known."""
        out = []
        for group in groups:
            values = group.values.clone()
            for place, number in enumerate(group.layers):
                beside = self._layers[number].beside
                write(values[:, place], names(self.groups), {} if beside is None else beside.values)
            out.append(replace(group, values=values))
        return tuple(out)


def _check_arguments(every: int, images: int | str, queries: int | str, groups: Sequence[str]) -> None:
    def whole(x: object, least: int) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= least

    if not whole(every, 0):
        raise ValueError(f"every={every!r}: a whole number of steps, 0 for never")
    for name, count in (("images", images), ("queries", queries)):
        if count != "all" and not whole(count, 1):
            raise ValueError(f"{name}={count!r}: a whole number of at least 1, or 'all'")
    if isinstance(groups, str) or not set(groups) <= set(GROUPS):
        raise ValueError(f"groups={groups!r}: a list of any of {', '.join(GROUPS)}")


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled code runs as it was written: only then do hooks and functions see it."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing it takes a second
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield
