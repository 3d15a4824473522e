"""Long series made short so that no extreme is lost, and small so that a hundred runs fit a page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST = 200  # stretches of a series: about as many as a panel has pixels to show
FEWEST = 6  # below, a curve says nothing and is left out
STEPS = 512  # codes to an octave
ABSENT, ZERO, INFINITE = 0, 1, 65535


@dataclass(frozen=True)
class Stretches:
    """Rows of a table in runs of neighbours: ``starts`` indexes the first row of each; ``rows`` are there in all."""

    starts: np.ndarray
    rows: int

    @classmethod
    def of(cls, rows: int, most: int) -> Stretches:
        """At most ``most`` stretches, of equal length to within a row."""
        count = min(rows, most)
        return cls(np.arange(count) * rows // max(count, 1), rows)

    def spans(self, steps: np.ndarray) -> dict[str, list[int]]:
        """First and last step of each."""
        ends = np.append(self.starts[1:], self.rows) - 1
        return {"first": steps[self.starts].tolist(), "last": steps[ends].tolist()} if self.rows else NOTHING

    def extremes(self, values: np.ndarray) -> np.ndarray:
        """Values (rows, ...) -> smallest and largest of each stretch, (..., stretches, 2); NaN where all are NaN."""
        if not self.rows:
            return np.zeros((*values.shape[1:], 0, 2))
        low = np.fmin.reduceat(values, self.starts, axis=0)
        high = np.fmax.reduceat(values, self.starts, axis=0)
        return np.moveaxis(np.stack([low, high], axis=-1), 0, -2)


NOTHING: dict[str, list[int]] = {"first": [], "last": []}


def fitting(rows: int, series: int, size: int) -> int:
    """Stretches that each of ``series`` may have within ``size`` bytes; 0 where they would be too few to show."""
    most = min(MOST, size // max(4 * series, 1))
    return most if most >= min(FEWEST, rows) else 0


def encode(values: np.ndarray) -> np.ndarray:
    """Numbers >= 0 -> 16-bit codes of their logarithm: within 0.07 %, from 2⁻⁶⁴ to 2⁶⁴, powers of two exactly.

    0 stands for absent (NaN), 1 for zero (and less than 2⁻⁶⁴), 65535 for infinity (and more than 2⁶⁴).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        code = np.rint(np.log2(values.astype(np.float64)) * STEPS) + 32768
    code = np.clip(code, ZERO, INFINITE)
    return np.where(np.isnan(code), ABSENT, code).astype("<u2")
