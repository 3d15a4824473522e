"""AttentionProbe: forward hooks -> device tensors -> a frame of metrics a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qkexp.probe.adapters import ADAPTERS, Capture
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import BY_NAME, GROUPS, NAMES, names
from qkexp.probe.rows import CHUNK_BYTES
from qkexp.probe.sample import of_rows, spread
from qkexp.probe.stats import layer_stats, raw_norms


class CoverageError(RuntimeError):
    """An attention layer did not show what it does: measured too little is an error, not an empty table."""


class AttentionProbe:
    """Measures every attention layer of a model, per head, while it trains.

    Hooks keep detached references to what enters the softmax; statistics are computed when the step
    ends (on CPU, of large layers at once, because autograd may not keep q and k), without gradients,
    random numbers, synchronisation or a second forward pass, so losses are bit-identical with and
    without a probe.

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
        queries: measure so many rows of each image, evenly spread, or ``"all"``; always against all keys
            (:mod:`qkexp.probe.sample`). A frame of a part is ``subsampled``.
        groups: further metrics, any of :data:`qkexp.probe.metrics.GROUPS`.

    Attributes:
        frame: this step's :class:`~qkexp.probe.frame.Frame`; None on steps that were not probed.
        spent: seconds of this step that hooks took to measure at once.

    Raises:
        CoverageError: the model has no attention layer that is known, or, after the first probed
            step, one of them did not fire.
        ValueError: an unknown group.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 1,
        images: int | str = "all",
        queries: int | str = "all",
        groups: Sequence[str] = (),
    ):
        if not set(groups) <= set(GROUPS):
            raise ValueError(f"groups={tuple(groups)}: there are {', '.join(GROUPS)}")
        self.every, self.images, self.queries, self.groups = every, images, queries, tuple(groups)
        self.subsampled = False  # whether something of this step was left out
        self.spent = 0.0
        self._turn = 0  # counts probed steps: which queries are measured, where not all are, depends on it
        self.frame: Frame | None = None
        self.active = False
        self._covered = False
        self._captures: dict[int, list[Capture]] = defaultdict(list)
        self._done: dict[int, list[tuple[Tensor, int, int]]] = defaultdict(list)  # measured at once; of images, of rows
        found = [(name, module, adapter) for adapter in ADAPTERS for name, module in adapter.find(model)]
        if not found:
            raise CoverageError(f"{type(model).__name__} has no attention layer that this probe knows")
        self.names = tuple(name for name, _, _ in found)
        self._handles = [
            handle
            for layer, (_, module, adapter) in enumerate(found)
            for handle in adapter.attach(module, self, self._sink(layer))
        ]

    @contextmanager
    def step(self, step: int, phase: str = "train") -> Iterator[None]:
        """Forward passes inside belong to ``step``; those outside are not measured."""
        self.frame = None
        self.active = self.every > 0 and step % self.every == 0
        self._turn, self.spent = step // max(self.every, 1), 0.0
        try:
            yield
            if self.active:
                self.active = False
                self._check_coverage()
                values = self._reduce()
                self.frame = Frame(step, phase, self.names, values, names(self.groups), self.subsampled)
        finally:
            self._forget()

    def take(self, x: Tensor) -> Tensor:
        """The measured images of an activation, detached (for adapters)."""
        if self.images == "all" or x.shape[0] <= int(self.images):
            return x.detach()
        self.subsampled = True
        return x.detach()[: int(self.images)]

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forget(self) -> None:
        self.active = self.subsampled = False
        for captures in self._captures.values():
            captures.clear()
        for done in self._done.values():
            done.clear()

    def _sink(self, layer: int) -> Callable[[Capture], None]:
        """Where a layer's captures go: measured at once, or kept until the step ends, as its first pass was."""
        captures, done = self._captures[layer], self._done[layer]

        def sink(capture: Capture) -> None:
            if not done and (captures or not self._at_once(capture)):
                captures.append(capture)
                return
            began = time.perf_counter()
            B, _, N, _ = capture.q.shape
            before = sum(images for _, images, _ in done)
            done.append((self._measure([capture], self._turn + before), B, B * self._rows(N)))
            self.spent += time.perf_counter() - began

        return sink

    def _at_once(self, c: Capture) -> bool:
        """Whether a layer's q and k are not kept: it shares no call, and where autograd does not keep them we need not.

        A device works behind the host's clock, and its fused kernels keep q and k for the backward pass anyway.
        """
        B, H, N, _ = c.q.shape
        large = 4 * B * H * self._rows(N) * c.k.shape[2] > CHUNK_BYTES
        return large and c.q.device.type == "cpu" and not torch.compiler.is_compiling()

    def _check_coverage(self) -> None:
        silent = [name for layer, name in enumerate(self.names) if not self._captures[layer] and not self._done[layer]]
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
        measured = names(self.groups)
        out = []
        for layer, done in self._done.items():
            if done:
                out.append(Group((layer,), combine([x for x, _, _ in done], [rows for *_, rows in done], measured)))
        for layers in groups.values():
            for together in self._calls(layers):
                parts, rows, images = [], [], 0
                for one_pass in zip(*(self._captures[layer] for layer in together), strict=True):
                    B, _, N, _ = one_pass[0].q.shape
                    parts.append(self._measure(one_pass, self._turn + images))
                    rows.append(B * self._rows(N))
                    images += B
                out.append(Group(tuple(together), combine(parts, rows, measured)))
        return tuple(out)

    def _rows(self, there: int) -> int:
        return there if self.queries == "all" else min(there, int(self.queries))

    def _calls(self, layers: list[int]) -> Iterator[list[int]]:
        """Share a call between as many layers as fit a chunk: small layers save overhead, large ones cache."""
        first = self._captures[layers[0]][0]
        B, H, N, _ = first.q.shape
        together = max(1, CHUNK_BYTES // (4 * B * H * self._rows(N) * first.k.shape[2]))
        for at in range(0, len(layers), together):
            yield layers[at : at + together]

    def _measure(self, captures: Sequence[Capture], turn: int) -> Tensor:
        """One forward pass of several layers -> (metric, layer, head)."""
        spec, (B, _, N, _) = captures[0].spec, captures[0].q.shape
        q, k, scales = [c.q for c in captures], [c.k for c in captures], [c.scale for c in captures]
        if self._rows(N) < N:
            self.subsampled = True
            chosen = spread(N, self._rows(N), B, turn, q[0].device)
            q = [of_rows(x, chosen) for x in q]
        stats = layer_stats(q, k, scales, cap=spec.cap, score_dtype=spec.dtype, groups=self.groups)
        stats |= raw_norms("q", [c.q_length for c in captures], stats)
        stats |= raw_norms("k", [c.k_length for c in captures], stats)
        return torch.stack([stats[name] for name in names(self.groups)])


def _signature(c: Capture) -> tuple:
    return (c.q.shape, c.k.shape, c.q.dtype, c.q.device, c.spec, c.q_length is None, c.k_length is None)


def combine(parts: Sequence[Tensor], rows: Sequence[int], metrics: Sequence[str] = NAMES) -> Tensor:
    """Micro-batches (metric, layer, head) of so many ``rows`` -> one, by each metric's own reduction.

    What is absent in one part is absent in the whole, as if the parts had been one batch.
    """
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(list(parts))  # (part, metric, layer, head)
    worst = stacked[:, metrics.index("max_abs_logit")].argmax(0, keepdim=True)  # NaN counts as the largest
    share = stacked.new_tensor(rows).view(-1, 1, 1) / sum(rows)
    out = []
    for i, metric in enumerate(BY_NAME[name] for name in metrics):
        part = stacked[:, i]
        if metric.shards == "max":
            out.append(part.amax(0))
        elif metric.shards == "max_pair":
            out.append(part.gather(0, worst)[0])
        else:
            out.append(part.sum(0) if metric.shards == "sum" else (part * share).sum(0))
    return torch.stack(out)
