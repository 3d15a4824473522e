"""Captures of a step -> metrics: of which images and queries, and how many layers a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkexp.probe.adapters import Capture
from qkexp.probe.frame import Group
from qkexp.probe.layers import Layer, Part
from qkexp.probe.metrics import SCORE_GROUPS, names
from qkexp.probe.parts import combine
from qkexp.probe.rows import CHUNK_BYTES
from qkexp.probe.sample import of_rows, spread
from qkexp.probe.stats import layer_stats, raw_norms


@dataclass
class Reducer:
    """What is measured of each forward pass; the arguments are those of :class:`qkexp.probe.probe.AttentionProbe`."""

    images: int | str
    queries: int | str
    groups: tuple[str, ...]
    turn: int = 0  # counts probed steps: which queries are measured, where not all are, depends on it
    subsampled: bool = False  # whether something of this step was left out

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that captures show."""
        return names([group for group in self.groups if group in SCORE_GROUPS])

    def take(self, x: Tensor) -> Tensor:
        """The measured images of an activation, detached."""
        if self.images == "all" or x.shape[0] <= int(self.images):
            return x.detach()
        self.subsampled = True
        return x.detach()[: int(self.images)]

    def rows(self, there: int) -> int:
        """How many of an image's queries are measured."""
        return there if self.queries == "all" else min(there, int(self.queries))

    def score_bytes(self, c: Capture) -> int:
        """Size of all measured scores of a capture."""
        B, H, N, _ = c.q.shape
        return 4 * B * H * self.rows(N) * c.k.shape[2]

    def reduce(self, layers: Sequence[Layer]) -> tuple[Group, ...]:
        """All layers; those of one shape and score share calls where that is faster."""
        groups: dict[tuple, list[int]] = defaultdict(list)
        out = []
        for place, layer in enumerate(layers):
            if layer.captures:
                groups[(len(layer.captures), *(_signature(c) for c in layer.captures))].append(place)
            elif layer.done:
                out.append(self._group((place,), layer.done))
        for places in groups.values():
            for together in self._calls(places, layers[places[0]].captures[0]):
                parts: list[Part] = []
                for captures in zip(*(layers[place].captures for place in together), strict=True):
                    parts.append(self.measure(captures, sum(part.images for part in parts)))
                out.append(self._group(tuple(together), parts))
        return tuple(out)

    def _group(self, layers: tuple[int, ...], parts: Sequence[Part]) -> Group:
        """Forward passes of a step as one."""
        rows = [part.rows for part in parts]
        values = combine([part.values for part in parts], rows, self.metrics, [part.seen for part in parts])
        if all(part.seen is None for part in parts):
            return Group(layers, values, sum(rows))
        seen = [part.values.new_full((2, *values.shape[1:]), float(part.rows)) if part.seen is None else part.seen
                for part in parts]  # fmt: skip
        return Group(layers, values, sum(rows), torch.stack(seen).sum(0))

    def measure(self, captures: Sequence[Capture], before: int) -> Part:
        """One forward pass of several layers, after those of ``before`` images."""
        spec, (B, _, N, _) = captures[0].spec, captures[0].q.shape
        q, k, scales = [c.q for c in captures], [c.k for c in captures], [c.scale for c in captures]
        bias, mask = [c.bias for c in captures], [c.mask for c in captures]
        if self.rows(N) < N:
            self.subsampled = True
            chosen = spread(N, self.rows(N), B, self.turn + before, q[0].device)
            q = [of_rows(x, chosen) for x in q]
            bias, mask = ([x if x is None else of_rows(_four(x), chosen) for x in each] for each in (bias, mask))
        stats = layer_stats(
            q, k, scales, bias=bias, mask=mask, cap=spec.cap, score_dtype=spec.dtype, groups=self.groups
        )
        stats |= raw_norms("q", [c.q_length for c in captures], stats)
        stats |= raw_norms("k", [c.k_length for c in captures], stats)
        values = torch.stack([stats[name] for name in self.metrics])
        return Part(values, B, B * self.rows(N), stats.get("seen"))

    def _calls(self, places: list[int], first: Capture) -> Iterator[list[int]]:
        """Share a call between as many layers as fit a chunk: small layers save overhead, large ones cache."""
        together = max(1, CHUNK_BYTES // self.score_bytes(first))
        for at in range(0, len(places), together):
            yield places[at : at + together]


def _four(x: Tensor) -> Tensor:
    """What is broadcastable to (B, H, N, M), with all four axes."""
    return x[(None,) * (4 - x.dim())]


def _signature(c: Capture) -> tuple:
    score = (c.spec, c.bias is None, c.mask is None, c.q_length is None, c.k_length is None)
    return (c.q.shape, c.k.shape, c.q.dtype, c.q.device, *score)
