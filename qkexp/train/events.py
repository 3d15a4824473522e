"""Events: when something left the run's own healthy stretch, recomputable from the stored tables.

Thresholds are relative to the first 5 % of the run's steps (at least 20): published absolute numbers
are one run's observation, not a rule. The detector sees rows in order, however they were flushed, so
the same history gives the same events.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

LOGIT_GROWTH = 30.0  # times the healthy median of a layer's max |z|
COLLAPSED_FRAC = 0.05  # of log n
COLLAPSED_OF_HEALTHY = 0.1
COLLAPSED_STEPS = 20  # probed steps in a row
AT_BOUND = 1.0 - 1e-4  # of the bound of a learned scale: exp(log x) is not x


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl; ``layer`` and ``head`` are -1 where the event has none."""

    step: int
    kind: str
    layer: int = -1
    head: int = -1
    value: float | None = None
    threshold: float | None = None


def healthy_steps(steps: int) -> int:
    """Length of the healthy stretch: 5 % of the run, at least 20 steps."""
    return max(20, steps // 20)


class Detector:
    """Logit run-away, collapse, and scales at their bound, from the layers' values of every probed step.

    ``logit_runaway``: a layer's max |z| over 30 times its healthy median. ``layer_collapse``: a layer's
    entropy_frac under 0.05 and under 0.1 times its healthy median for 20 probed steps.
    ``all_collapse``: every layer at once. ``scale_bound``: a head's learned scale has reached ``scale_bound``,
    above which it gets no gradient. Each fires once a layer, at the step that completes it.
    """

    def __init__(self, steps: int, scale_bound: float = math.inf):
        self.healthy, self.scale_bound = healthy_steps(steps), scale_bound
        self._history: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._medians: dict[int, tuple[float, float]] = {}
        self._streak: dict[int, int] = defaultdict(int)
        self._seen: set[tuple[str, int]] = set()

    def state_dict(self) -> dict[str, Any]:
        """Plain Python, for a checkpoint: a detector that goes on says what one that never stopped says."""
        return {
            "history": {layer: [list(pair) for pair in pairs] for layer, pairs in self._history.items()},
            "medians": {layer: list(pair) for layer, pair in self._medians.items()},
            "streak": dict(self._streak),
            "seen": [list(key) for key in sorted(self._seen)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._history.update({layer: [(a, b) for a, b in pairs] for layer, pairs in state["history"].items()})
        self._medians.update({layer: (pair[0], pair[1]) for layer, pair in state["medians"].items()})
        self._streak.update(state["streak"])
        self._seen |= {(kind, layer) for kind, layer in state["seen"]}

    def feed(
        self, step: int, max_abs_logit: np.ndarray, entropy_frac: np.ndarray, largest_scale: np.ndarray | None = None
    ) -> list[Event]:
        """One probed step: the layers' values, in forward order (NaN where absent) -> new events.

        ``largest_scale`` is that of a layer's heads.
        """
        scales = [] if largest_scale is None else largest_scale.tolist()
        return self._bounds(step, scales) + self._changes(step, max_abs_logit, entropy_frac)

    def _bounds(self, step: int, scales: list[float]) -> list[Event]:
        events = []
        for layer, scale in enumerate(scales):
            if AT_BOUND * self.scale_bound <= scale < math.inf:
                events += self._once(Event(step, "scale_bound", layer, value=scale, threshold=self.scale_bound))
        return events

    def _changes(self, step: int, max_abs_logit: np.ndarray, entropy_frac: np.ndarray) -> list[Event]:
        if step < self.healthy:
            for layer, pair in enumerate(zip(max_abs_logit, entropy_frac, strict=True)):
                self._history[layer].append((float(pair[0]), float(pair[1])))
            return []
        events = []
        for layer in range(len(max_abs_logit)):
            events += self._layer(step, layer, float(max_abs_logit[layer]), float(entropy_frac[layer]))
        layers = range(len(max_abs_logit))
        if layers and all(self._streak[layer] >= COLLAPSED_STEPS for layer in layers):
            events += self._once(
                Event(step, "all_collapse", value=float(np.max(entropy_frac)), threshold=COLLAPSED_FRAC)
            )
        return events

    def _layer(self, step: int, layer: int, logit: float, frac: float) -> list[Event]:
        if not self._history[layer]:
            return []
        if layer not in self._medians:
            past = np.array(self._history[layer])
            known = [column[~np.isnan(column)] for column in past.T]
            self._medians[layer] = tuple(float(np.median(c)) if len(c) else np.nan for c in known)  # type: ignore[assignment]
        healthy_logit, healthy_frac = self._medians[layer]
        events = []
        limit = LOGIT_GROWTH * healthy_logit
        if logit > limit:
            events += self._once(Event(step, "logit_runaway", layer, value=logit, threshold=limit))
        limit = min(COLLAPSED_FRAC, COLLAPSED_OF_HEALTHY * healthy_frac)
        self._streak[layer] = self._streak[layer] + 1 if frac < limit else 0
        if self._streak[layer] == COLLAPSED_STEPS:
            events += self._once(Event(step, "layer_collapse", layer, value=frac, threshold=limit))
        return events

    def _once(self, event: Event) -> list[Event]:
        key = (event.kind, event.layer)
        if key in self._seen:
            return []
        self._seen.add(key)
        return [event]
