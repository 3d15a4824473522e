"""Intervals and tests over seeds, with what each assumes; refused below the seeds that it needs.

A seed is one draw of initial weights and sample order; whatever is said holds for such draws and for nothing else
(not for other data, sizes or rates).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 9999
T_PAIRS = 3  # two differences have one degree of freedom: an interval of 12.7 standard errors says nothing

METHOD = {
    "interval": f"{LEVEL:.0%} percentile bootstrap over seeds ({RESAMPLES:,} resamples, fixed generator). Assumes that "
    "seeds are independent draws; with few of them it is too narrow.",
    "t": "Paired t test of the differences of one seed. Assumes that differences are normally distributed.",
    "flip": "Exact sign-flip test of the mean difference. Assumes only that without an effect a difference is as "
    "likely positive as negative (symmetric about 0).",
}


class TooFewSeeds(ValueError):
    """An interval or a test asks for more seeds than there are."""

    def __init__(self, what: str, needed: int, found: int):
        super().__init__(f"{what} needs at least {needed} seeds, there are {found}")
        self.needed, self.found = needed, found


def bootstrap_seeds(level: float = LEVEL) -> int:
    """Fewest seeds n for a percentile bootstrap: the most extreme resample has probability n^-n in each tail."""
    return next(n for n in range(2, 100) if n**-n <= (1.0 - level) / 2)


def flip_pairs(level: float = LEVEL) -> int:
    """Fewest pairs n for a sign-flip test: its smallest two-sided p is 2 / 2^n."""
    return next(n for n in range(2, 100) if 2.0 ** (1 - n) <= 1.0 - level)


def interval(
    values: Sequence[float] | np.ndarray, of: Callable[..., np.ndarray] = np.mean, level: float = LEVEL
) -> tuple[float, float]:
    """Percentile bootstrap over seeds.

    Args:
        values: one a seed, finite.
        of: the statistic, called with ``axis``.

    Raises:
        TooFewSeeds: fewer than :func:`bootstrap_seeds`.
    """
    values = _finite(values)
    if len(values) < bootstrap_seeds(level):
        raise TooFewSeeds(f"a {level:.0%} bootstrap interval", bootstrap_seeds(level), len(values))
    if np.ptp(values) == 0.0:
        return float(values[0]), float(values[0])
    found = stats.bootstrap(
        (values,),
        of,
        confidence_level=level,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


@dataclass(frozen=True)
class Paired:
    """Differences a - b of the same seeds: their mean, and where they are enough an interval and p of each test."""

    pairs: int
    difference: float
    t_low: float
    t_high: float
    t_p: float
    flip_p: float
    refused: str  # which test needs more seeds; empty where none does


def paired(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> Paired:
    """Both paired tests, two-sided; what is refused is NaN, and the reason says how many seeds it needs.

    Args:
        a, b: values of the same seeds in the same order, finite.
    """
    differences = _finite(a) - _finite(b)
    refused = []
    low = high = t_p = flip_p = math.nan
    try:
        low, high, t_p = t_test(differences)
    except TooFewSeeds as reason:
        refused.append(str(reason))
    try:
        flip_p = flip_test(differences)
    except TooFewSeeds as reason:
        refused.append(str(reason))
    mean = float(differences.mean()) if len(differences) else math.nan
    return Paired(len(differences), mean, low, high, t_p, flip_p, "; ".join(refused))


def t_test(differences: np.ndarray) -> tuple[float, float, float]:
    """Interval of the mean difference and two-sided p; p is NaN where differences do not vary.

    Raises:
        TooFewSeeds: fewer than 3.
    """
    if len(differences) < T_PAIRS:
        raise TooFewSeeds("a paired t test", T_PAIRS, len(differences))
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        return float(differences[0]), float(differences[0]), math.nan
    found = stats.ttest_1samp(differences, 0.0)
    between = found.confidence_interval(LEVEL)
    return float(between.low), float(between.high), float(found.pvalue)


def flip_test(differences: np.ndarray) -> float:
    """Two-sided p of the mean under all 2^n changes of sign (9,999 random ones beyond 13 pairs).

    Raises:
        TooFewSeeds: so few that no result could have p <= 0.05.
    """
    if len(differences) < flip_pairs():
        raise TooFewSeeds(f"a sign-flip test at {1 - LEVEL:.0%}", flip_pairs(), len(differences))
    found = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        alternative="two-sided",
        rng=np.random.default_rng(0),
        vectorized=True,
    )
    return float(found.pvalue)


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("values must be finite: clip losses at chance first")
    return values
