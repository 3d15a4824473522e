"""AttentionProbe: forward hooks -> device tensors -> a frame of metrics a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qkexp.probe.adapters import ADAPTERS, Capture
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import METRICS, NAMES
from qkexp.probe.rows import CHUNK_BYTES
from qkexp.probe.stats import layer_stats, raw_norms


class CoverageError(RuntimeError):
    """An attention layer did not show what it does: measured too little is an error, not an empty table."""


class AttentionProbe:
    """Measures every attention layer of a model, per head, while it trains.

    Hooks keep detached references to what enters the softmax; statistics are computed when the step
    ends, without gradients, random numbers, synchronisation or a second forward pass, so losses are
    bit-identical with and without a probe.

        probe = AttentionProbe(model, every=50)
        for step, batch in enumerate(loader):
            with probe.step(step):
                loss = train_step(model, batch)
            if probe.frame is not None:
                log(probe.frame.scalars())

    Args:
        model: a model of this project (:func:`qkexp.build_vit`), or one that holds its attention.
        every: probe each so many steps; 0 never.
        images: measure the first so many images of a batch, or ``"all"``.

    Attributes:
        frame: this step's :class:`~qkexp.probe.frame.Frame`; None on steps that were not probed.

    Raises:
        CoverageError: the model has no attention layer that is known, or, after the first probed
            step, one of them did not fire.
    """

    def __init__(self, model: nn.Module, every: int = 1, images: int | str = "all"):
        self.every, self.images = every, images
        self.frame: Frame | None = None
        self.active = False
        self._covered = False
        self._captures: dict[int, list[Capture]] = defaultdict(list)
        found = [(name, module, adapter) for adapter in ADAPTERS for name, module in adapter.find(model)]
        if not found:
            raise CoverageError(f"{type(model).__name__} has no attention layer that this probe knows")
        self.names = tuple(name for name, _, _ in found)
        self._handles = [
            handle
            for layer, (_, module, adapter) in enumerate(found)
            for handle in adapter.attach(module, self, self._captures[layer].append)
        ]

    @contextmanager
    def step(self, step: int, phase: str = "train") -> Iterator[None]:
        """Forward passes inside belong to ``step``; those outside are not measured."""
        self.frame = None
        self.active = self.every > 0 and step % self.every == 0
        try:
            yield
            if self.active:
                self.active = False
                self._check_coverage()
                self.frame = Frame(step, phase, self.names, self._reduce())
        finally:
            self._forget()

    def take(self, x: Tensor) -> Tensor:
        """The measured images of an activation, detached (for adapters)."""
        return x.detach() if self.images == "all" else x.detach()[: int(self.images)]

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forget(self) -> None:
        self.active = False
        for captures in self._captures.values():
            captures.clear()

    def _check_coverage(self) -> None:
        silent = [name for layer, name in enumerate(self.names) if not self._captures[layer]]
        if silent and (not self._covered or len(silent) < len(self.names)):
            raise CoverageError(
                f"{len(silent)} of {len(self.names)} attention layers did not fire in this step: {', '.join(silent)}; "
                "they may be unused, called as module.forward(x), or belong to a copy of the model"
            )
        self._covered = True

    def _reduce(self) -> tuple[Group, ...]:
        """Captures -> metrics; layers of one shape and score share calls where that is faster."""
        groups: dict[tuple, list[int]] = defaultdict(list)
        for layer in range(len(self.names)):
            captures = self._captures[layer]
            if any(c.overwritten() for c in captures):
                raise CoverageError(f"q or k of {self.names[layer]} was changed in place after its softmax saw it")
            if captures:
                groups[(len(captures), *(_signature(c) for c in captures))].append(layer)
        out = []
        for layers in groups.values():
            for together in _calls(layers, self._captures[layers[0]][0]):
                passes = zip(*(self._captures[layer] for layer in together), strict=True)
                parts = [self._measure(captures) for captures in passes]
                rows = [c.q.shape[0] * c.q.shape[2] for c in self._captures[together[0]]]
                out.append(Group(tuple(together), combine(parts, rows)))
        return tuple(out)

    def _measure(self, captures: Sequence[Capture]) -> Tensor:
        """One forward pass of several layers -> (metric, layer, head)."""
        spec = captures[0].spec
        q, k, scales = [c.q for c in captures], [c.k for c in captures], [c.scale for c in captures]
        stats = layer_stats(q, k, scales, cap=spec.cap, score_dtype=spec.dtype)
        stats |= raw_norms("q", [c.q_length for c in captures], stats)
        stats |= raw_norms("k", [c.k_length for c in captures], stats)
        return torch.stack([stats[name] for name in NAMES])


def _signature(c: Capture) -> tuple:
    return (c.q.shape, c.k.shape, c.q.dtype, c.q.device, c.spec, c.q_length is None, c.k_length is None)


def _calls(layers: list[int], c: Capture) -> Iterator[list[int]]:
    """Share a call between as many layers as fit a chunk: small layers save overhead, large ones cache."""
    B, H, N, _ = c.q.shape
    together = max(1, CHUNK_BYTES // (4 * B * H * N * c.k.shape[2]))
    for at in range(0, len(layers), together):
        yield layers[at : at + together]


def combine(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Micro-batches (metric, layer, head) of so many ``rows`` -> one, by each metric's own reduction.

    What is absent in one part is absent in the whole, as if the parts had been one batch.
    """
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(list(parts))  # (part, metric, layer, head)
    worst = stacked[:, NAMES.index("max_abs_logit")].argmax(0, keepdim=True)  # NaN counts as the largest
    share = stacked.new_tensor(rows).view(-1, 1, 1) / sum(rows)
    out = []
    for i, metric in enumerate(METRICS):
        part = stacked[:, i]
        if metric.shards == "max":
            out.append(part.amax(0))
        elif metric.shards == "max_pair":
            out.append(part.gather(0, worst)[0])
        else:
            out.append(part.sum(0) if metric.shards == "sum" else (part * share).sum(0))
    return torch.stack(out)
