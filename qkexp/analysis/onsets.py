"""When each link of the chain broke: arrays -> onsets, each an interval over a grid of thresholds.

No single threshold is the right one, so every link is asked at three (mild, clear, severe), and its onset is the
interval that holds all three crossings. An order between two links is claimed only where the last crossing of the
one lies before the first of the other: then it holds whatever thresholds of the grid one picks.

All links are turned into scores that grow as things get worse (:data:`LINKS` has the formulas), against the run's own
healthy stretch or, by :func:`apart`, against another run's score at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qkexp.train.outcome import WINDOW, smooth

HOLD = 3  # rows in a row that must be over a threshold: one batch is no onset
GRAD_START = 100  # step at which the running minimum of the gradient norm starts
ROOM = 0.1  # of the constant predictor's loss: the least way from a minimum to chance that a rise is measured by


@dataclass(frozen=True)
class Link:
    """One link of the chain: a column, how it becomes a score, and the grid of thresholds, mild to severe.

    ``kind``: ``growth`` value / reference; ``to_one`` (value - reference) / (1 - reference); ``fall`` reference /
    value; ``rise`` (loss - its running minimum) / (constant predictor's loss - that minimum).
    """

    name: str
    column: str
    kind: str
    grid: tuple[float, float, float]
    short: str
    verb: str
    per_layer: bool = False

    @property
    def words(self) -> str:
        return f"{self.short} {self.verb}"


LINKS: tuple[Link, ...] = (
    Link("q_in", "q_in_norm_mean", "growth", (2.0, 3.0, 5.0), "‖q̂‖", "grows", True),
    Link("k_in", "k_in_norm_mean", "growth", (2.0, 3.0, 5.0), "‖k̂‖", "grows", True),
    Link("logit", "max_abs_logit", "growth", (4.0, 10.0, 30.0), "max |logit|", "grows", True),
    Link("attn_max", "attn_max_mean", "to_one", (0.5, 0.7, 0.9), "attn max", "goes to 1", True),
    Link("entropy", "entropy_frac", "fall", (2.5, 5.0, 10.0), "entropy", "falls", True),
    Link("grad_qk", "grad_norm_qk", "growth", (5.0, 10.0, 20.0), "gradient of q, k", "grows"),
    Link("grad_vo", "grad_norm_vo", "growth", (5.0, 10.0, 20.0), "gradient of v, o", "grows"),
    Link("grad_mlp", "grad_norm_mlp", "growth", (5.0, 10.0, 20.0), "gradient of the MLP", "grows"),
    Link("grad_rest", "grad_norm_rest", "growth", (5.0, 10.0, 20.0), "gradient of the rest", "grows"),
    Link("out_logit", "out_logit_absmax", "growth", (4.0, 10.0, 30.0), "output logits", "grow"),
    Link("loss", "loss", "rise", (0.1, 0.2, 0.4), "training loss", "rises"),
    Link("val_loss", "val_loss", "rise", (0.1, 0.2, 0.4), "validation loss", "rises"),
)
BY_LINK = {link.name: link for link in LINKS}


@dataclass(frozen=True)
class Crossing:
    """The first row at or over a threshold: the true onset lies within ``early`` … ``late`` (steps).

    ``early`` is the step after the last one measured before it, or, of a running mean, the first step in its window
    whose own value is over the threshold. ``place`` indexes the layers; -1 where there are none.
    """

    early: int
    late: int
    place: int
    row: int


@dataclass(frozen=True)
class Onset:
    """A link's onset over its grid: a crossing for each threshold, None where it was never reached."""

    link: str
    grid: tuple[float, ...]
    crossings: tuple[Crossing | None, ...]
    layer: int = -1
    head: int = -1

    @property
    def reached(self) -> int:
        """How many thresholds of the grid were reached."""
        return sum(c is not None for c in self.crossings)

    @property
    def early(self) -> int | None:
        """First step of the interval; None where even the mildest threshold was not reached."""
        known = [c.early for c in self.crossings if c is not None]
        return min(known) if known else None

    @property
    def late(self) -> int | None:
        """Last step of the interval; None where not every threshold was reached: then it is open."""
        known = [c.late for c in self.crossings if c is not None]
        return max(known) if len(known) == len(self.crossings) else None

    @property
    def named(self) -> Crossing | None:
        """The crossing whose layer and head stand for the onset: of the clear threshold, else of the mild one."""
        known = [c for c in self.crossings if c is not None]
        return known[min(1, len(known) - 1)] if known else None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that crossed first, one for each threshold that was reached."""
        return tuple(c.place for c in self.crossings if c is not None)


def precedes(a: Onset, b: Onset) -> bool:
    """Whether ``a`` came before ``b`` at every pair of thresholds of the two grids."""
    return a.late is not None and b.early is not None and a.late < b.early


def order(onsets: Sequence[Onset]) -> list[tuple[str, str]]:
    """Every pair (first, then) whose order holds over the whole grid."""
    return [(a.link, b.link) for a in onsets for b in onsets if a is not b and precedes(a, b)]


# ---------------------------------------------------------------- references and scores


def healthy_reference(steps: np.ndarray, values: np.ndarray, healthy: int) -> np.ndarray:
    """Median of each column over the rows before step ``healthy``: (rows, P) -> (P,).

    A run that was first measured later has its first row for reference; NaN where nothing was measured.
    """
    rows = values[: max(1, int(np.searchsorted(steps, healthy)))]
    return np.array([np.median(known) if len(known := c[np.isfinite(c)]) else np.nan for c in rows.T])


def score(kind: str, values: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Values (rows, P) against a reference (P,) or (rows, P) -> scores that grow as things get worse."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == "growth":
            return values / reference
        if kind == "to_one":
            return (values - reference) / np.maximum(1.0 - reference, 1e-6)
        if kind == "fall":
            return reference / np.maximum(values, 1e-9)
    raise ValueError(kind)


def gradient_reference(steps: np.ndarray, norm: np.ndarray, healthy: int) -> np.ndarray:
    """What a smoothed gradient norm (rows,) is compared with at each row.

    The healthy stretch's median; from step 100 on the running minimum, where that is smaller.
    """
    usual = healthy_reference(steps, norm[:, None], healthy)[0]
    out = np.full(len(norm), usual)
    late = steps >= GRAD_START
    if late.any():
        out[late] = np.fmin(usual, np.fmin.accumulate(norm[late]))
    return out


def rise(smoothed: np.ndarray, raw: np.ndarray, constant_loss: float) -> tuple[np.ndarray, np.ndarray]:
    """How far the loss (rows,) has risen over its running minimum, in ways from there to chance: smoothed, raw.

    Where the minimum is near or over chance, the way is a tenth of the constant predictor's loss.
    """
    lowest = np.fmin.accumulate(np.where(np.isfinite(smoothed), smoothed, np.inf))
    way = np.maximum(constant_loss - lowest, ROOM * constant_loss)
    with np.errstate(invalid="ignore"):
        return (smoothed - lowest) / way, (raw - lowest) / way


def running_means(values: np.ndarray) -> np.ndarray:
    """Means (rows,) of the last 20 finite values among the last 20 rows; NaN where there is none."""
    known = np.isfinite(values)
    count = smooth(known.astype(float))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(count > 1e-9, smooth(np.where(known, values, 0.0)) / count, np.nan)


# ---------------------------------------------------------------- crossings


def crossing(
    steps: np.ndarray, scores: np.ndarray, threshold: float, hold: int = HOLD, raw: np.ndarray | None = None
) -> Crossing | None:
    """The first row from which ``hold`` rows in a row are at or over the threshold.

    Args:
        steps: (rows,), rising.
        scores: (rows, P); NaN is under every threshold.
        threshold: of the score.
        hold: rows; at the end of a run those that are left.
        raw: (rows, P), the same before smoothing, where ``scores`` is a running mean over 20 rows.

    Returns:
        Steps and place; of several places that cross in one row the one with the largest score. None: never.
    """
    over = np.where(np.isnan(scores), -np.inf, scores) >= threshold
    held = over.copy()
    for shift in range(1, hold):
        held[:-shift] &= over[shift:]
    rows = np.flatnonzero(held.any(axis=1))
    if not len(rows):
        return None
    row = int(rows[0])
    place = int(np.argmax(np.where(held[row], scores[row], -np.inf)))
    early = int(steps[row - 1]) + 1 if row else int(steps[0])
    if raw is not None:
        window = np.arange(max(0, row - WINDOW + 1), row + 1)
        alone = window[np.where(np.isnan(raw[window, place]), -np.inf, raw[window, place]) >= threshold]
        early = int(steps[alone[0]]) if len(alone) else int(steps[row])
    return Crossing(early, int(steps[row]), place, row)


def onset(
    link: Link,
    steps: np.ndarray,
    scores: np.ndarray,
    raw: np.ndarray | None = None,
    layers: Sequence[int] = (-1,),
    hold: int = HOLD,
) -> Onset:
    """A link's onset from its scores (rows, layers), as :func:`crossing` takes them; running means need no hold."""
    found = [crossing(steps, scores, t, 1 if raw is not None else hold, raw) for t in link.grid]
    named = tuple(None if c is None else replace(c, place=int(layers[c.place])) for c in found)
    made = Onset(link.name, link.grid, named)
    return replace(made, layer=made.named.place) if made.named else made


def apart(
    link: Link, steps: np.ndarray, mine: np.ndarray, other_steps: np.ndarray, other: np.ndarray, layers: Sequence[int]
) -> Onset:
    """Onset of a link against another run: its scores (rows, layers) relative to the other's at the same step.

    A ratio of growths or falls, a difference of shares; steps that only one of them measured are left out.
    """
    shared, left, right = np.intersect1d(steps, other_steps, return_indices=True)
    a, b = mine[left], other[right]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = a - b if link.kind in ("to_one", "rise") else a / np.maximum(b, 1e-12)
    return onset(link, shared, relative, layers=layers)


# ---------------------------------------------------------------- length or alignment


def split_growth(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """What made max |z| grow between two steps, exactly: of the pair that attains it, in natural logarithms.

    log max|z| = log scale + log‖q̂‖ + log‖k̂‖ + log|cos|, without additive bias; so their changes add up.

    Args:
        before, after: ``max_abs_logit, score_scale, max_pair_q_norm, max_pair_k_norm, max_pair_cos`` of one head.

    Returns:
        ``total`` and its parts ``scale, q, k, cos`` (changes of logarithms), ``shares`` of the total (None where it
        grew less than twofold: shares of nothing), and ``rest``, what they leave unexplained. Empty where not measured.
    """
    names = {"scale": "score_scale", "q": "max_pair_q_norm", "k": "max_pair_k_norm", "cos": "max_pair_cos"}
    values = [(abs(before.get(c, math.nan)), abs(after.get(c, math.nan))) for c in ("max_abs_logit", *names.values())]
    if not all(math.isfinite(v) and v > 0 for pair in values for v in pair):
        return {}
    total, *parts = (math.log(b / a) for a, b in values)
    named = dict(zip(names, parts, strict=True))
    shares = {name: part / total for name, part in named.items()} if total >= math.log(2) else None
    return {"total": total, **named, "shares": shares, "rest": total - sum(parts)}
