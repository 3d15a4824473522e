"""Spikes of the loss and of the gradient norm, against a window that neither NaN nor the spike itself poisons."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from qkexp.train.events import Event

WINDOW = 128  # values that a new one is compared with
ENOUGH = 64  # values before anything is judged
DEVIATIONS = 6.0  # robust standard deviations over the median
LARGER = 1.5  # ... and so many times the median: tiny noise around a converged loss is no spike
SETTLED = 32  # values in a row that would be spikes are a new level
MAD_TO_STD = 1.4826  # of a normal distribution
AT_ONCE = 2048  # values of a score that are judged together: each with its window, they fill memory


class SpikeDetector:
    """One series -> events ``<name>_spike``, one at the first step of each spike.

    A value is a spike when it is over the median of the last 128 accepted values by 6 robust standard
    deviations (1.4826 times the median absolute deviation) and half the median. Spikes and values that
    are not finite never enter the window; 32 spikes in a row are a new level, from which the window starts
    again. Nothing is judged before ``start`` and before 64 values are known: a warm-up raises no alarm.

    The window follows OLMo-core's (128 values, 6 deviations, active after 64); its mean and standard
    deviation are replaced by median and absolute deviation, which one spike cannot move.
    """

    def __init__(self, name: str, start: int):
        self.kind, self.start = f"{name}_spike", start
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._above: list[float] = []

    def feed(self, step: int, value: float) -> list[Event]:
        """One step's value, in order -> new events."""
        if not math.isfinite(value):
            return []
        limit = self._limit() if step >= self.start and len(self._window) >= ENOUGH else math.inf
        if value <= limit:
            self._above.clear()
            self._window.append(value)
            return []
        self._above.append(value)
        if len(self._above) >= SETTLED:
            self._window.clear()
            self._window.extend(self._above)
            self._above.clear()
            return []
        return [Event(step, self.kind, value=value, threshold=limit)] if len(self._above) == 1 else []

    def _limit(self) -> float:
        values = np.array(self._window)
        median = float(np.median(values))
        deviation = MAD_TO_STD * float(np.median(np.abs(values - median)))
        return max(median + DEVIATIONS * deviation, LARGER * median)

    def state_dict(self) -> dict[str, Any]:
        return {"window": list(self._window), "above": list(self._above)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.extend(state["window"])
        self._above.extend(state["above"])


def spike_score(values: np.ndarray, window: int = 1000, deviations: float = 7.0) -> float:
    """Percentage of values at least 7 standard deviations over the mean of the 1,000 before them (OLMo 2).

    Values without so many before them, at least half of them finite, are not judged; NaN where none can be. A
    value that is not finite is a spike. Only rises count: a fall is no spike.
    """
    values = np.asarray(values, dtype=np.float64)
    judged = spikes = 0
    for first in range(window, len(values), AT_ONCE):
        now = values[first : first + AT_ONCE]
        past = np.lib.stride_tricks.sliding_window_view(values[first - window : first + len(now) - 1], window)
        known = np.isfinite(past)
        count = np.maximum(known.sum(axis=1), 1)
        mean = np.where(known, past, 0.0).sum(axis=1) / count
        std = np.sqrt(np.square(np.where(known, past - mean[:, None], 0.0)).sum(axis=1) / count)
        enough = known.sum(axis=1) >= window // 2
        judged += int(enough.sum())
        spikes += int((enough & (~np.isfinite(now) | (now - mean >= deviations * np.maximum(std, 1e-10)))).sum())
    return 100.0 * spikes / judged if judged else math.nan
