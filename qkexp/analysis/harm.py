"""Harm: whether, how and since when a run's training went wrong, from its losses and gradient norms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qkexp.analysis.onsets import ROOM, running_means
from qkexp.train.outcome import AT_CHANCE, ROSE, WINDOW

FAR = 2.0  # times chance: a loss that exploded
SURE = 0.6  # of chance, for a rise that came back: near chance a loss goes up and down
EPISODE = 0.4  # of the way back to chance
RECENT = 10  # steps before a jump that say what was usual
CALM = 3.0  # times the usual gradient norm: more is a precursor


@dataclass(frozen=True)
class Losses:
    """Training loss of every recorded step, nats, and what it is judged by; ``chance`` is the constant predictor's."""

    steps: np.ndarray
    loss: np.ndarray
    norm: np.ndarray  # of the gradient
    chance: float
    reason: str = ""  # the outcome's
    ended: int = 0  # the outcome's step

    @property
    def nonfinite(self) -> bool:
        return self.reason.startswith("nonfinite")

    @property
    def smoothed(self) -> np.ndarray:
        return running_means(self.loss)

    @property
    def final(self) -> float:
        """Mean of the last 20 steps; infinite where the run ended because it was not finite."""
        if self.nonfinite:
            return math.inf
        return float(np.mean(self.loss[-WINDOW:])) if len(self.loss) else math.nan

    @property
    def lowest(self) -> float:
        """Least running mean over 20 whole steps."""
        return float(np.nanmin(self.smoothed[min(WINDOW, len(self.loss)) - 1 :])) if len(self.loss) else math.nan

    def behind(self, other: Losses) -> float:
        """Share of the way from the other's final loss to chance; NaN where the other learned nothing."""
        return (self.final - other.final) / (self.chance - other.final) if other.final < self.chance else math.nan


@dataclass(frozen=True)
class Harm:
    """What went wrong with the training itself, and between which steps it began.

    ``kind``: nonfinite; rose (it ended over its minimum by a fifth of the way to chance); at_chance; episode (it rose
    by two fifths of the way, or to twice chance, and came back); behind (it ended over another arm by a fifth of it).
    """

    kind: str
    early: int
    late: int
    text: str


@dataclass(frozen=True)
class Jump:
    """From one step to the next, out of a calm, the loss was worse than chance, or the run's end."""

    step: int
    before: float  # median loss of the 10 steps before, nats
    loss: float  # infinite where it was not finite
    back: int | None  # steps until half of the jump was gone; None: not within the run


def find_harm(mine: Losses, healthy: int, other: Losses | None = None, name: str = "") -> Harm | None:
    """The gravest harm of a run; None where there is none, or fewer than twice the healthy steps were recorded.

    Args:
        mine: the run's losses.
        healthy: length of its healthy stretch, steps.
        other: those of another arm, by ``name``.
    """
    if not len(mine.loss):
        return None
    if mine.nonfinite:
        return Harm("nonfinite", *_rise(mine, mine.ended), mine.reason)
    if not math.isfinite(mine.chance) or len(mine.loss) < 2 * healthy:
        return None
    lowest, final, chance = mine.lowest, mine.final, mine.chance
    if lowest < chance and final > lowest + ROSE * (chance - lowest):
        text = f"the loss fell to {lowest:.3g} and rose to {final:.3g} (chance {chance:.3g})"
        return Harm("rose", *_rise(mine, int(mine.steps[-1])), text)
    if final >= AT_CHANCE * chance:  # never better: only a loss far over chance dates it
        far = mine.steps[mine.smoothed > FAR * chance]
        late = int(far[0]) if len(far) else int(mine.steps[-1])
        return Harm("at_chance", int(mine.steps[0]), late, f"the loss ended at {final:.3g}: chance is {chance:.3g}")
    episode = _episode(mine)
    if episode is None and other is not None and mine.behind(other) > ROSE:
        text = f"the loss ended at {final:.3g}, that of {name} with the same seed at {other.final:.3g}"
        return Harm("behind", *_lag(mine, other), text)
    return episode


def _rise(mine: Losses, end: int) -> tuple[int, int]:
    """Steps after the lowest smoothed loss at which it was a tenth, and a fifth, of the way to chance; else ``end``."""
    smoothed = mine.smoothed
    start = min(WINDOW, len(smoothed)) - 1
    bottom = start + int(np.argmin(smoothed[start:]))
    way = max(mine.chance - smoothed[bottom], ROOM * mine.chance)
    found = [np.flatnonzero(smoothed[bottom:] > smoothed[bottom] + part * way) for part in (0.5 * ROSE, ROSE)]
    early, late = (int(mine.steps[bottom + rows[0]]) if len(rows) else end for rows in found)
    return max(int(mine.steps[bottom]), early - WINDOW + 1), late


def _lag(mine: Losses, other: Losses) -> tuple[int, int]:
    """Since when the smoothed loss has been over the other's for good, by a tenth and a fifth of the way to chance."""
    steps, a, b = np.intersect1d(mine.steps, other.steps, return_indices=True)
    theirs = other.smoothed[b]
    lead = (mine.smoothed[a] - theirs) / np.maximum(mine.chance - theirs, ROOM * mine.chance)
    found = []
    for part in (0.5 * ROSE, ROSE):
        under = np.flatnonzero(lead < part)
        found.append(int(steps[min(under[-1] + 1, len(steps) - 1)]) if len(under) else int(steps[0]))
    return max(int(steps[0]), found[0] - WINDOW + 1), found[1]


def _episode(mine: Losses) -> Harm | None:
    smoothed, steps = mine.smoothed, mine.steps
    lowest = np.minimum.accumulate(smoothed)
    over = (lowest < SURE * mine.chance) & (smoothed > lowest + EPISODE * (mine.chance - lowest))
    over |= (smoothed > FAR * mine.chance) & (np.arange(len(smoothed)) >= WINDOW)
    if not over.any():
        return None
    row = int(over.argmax())
    top = row + int(np.argmax(smoothed[row:]))
    text = (
        f"the loss rose from {lowest[row]:.3g} to {smoothed[top]:.3g} by step {steps[top]}, and ended at "
        f"{mine.final:.3g} (chance {mine.chance:.3g})"
    )
    return Harm("episode", int(steps[max(0, row - WINDOW + 1)]), int(steps[row]), text)


def find_jump(mine: Losses) -> Jump | None:
    """The first step on which the loss left for worse than chance while everything before it was calm."""
    loss, chance = mine.loss, mine.chance
    if not math.isfinite(chance):
        return None
    for row in np.flatnonzero(loss > chance):
        usual = float(np.median(loss[row - RECENT : row])) if row >= RECENT else math.inf
        if usual < SURE * chance and loss[row] > chance + 0.5 * usual and _calm(mine, int(row)):
            back = np.flatnonzero(loss[row + 1 :] < 0.5 * (usual + loss[row]))
            return Jump(int(mine.steps[row]), usual, float(loss[row]), int(back[0]) + 1 if len(back) else None)
    if mine.nonfinite and len(loss) >= RECENT:
        usual = float(np.median(loss[-RECENT:]))
        if usual < 1.2 * chance and _calm(mine, len(loss)):
            return Jump(mine.ended, usual, math.inf, None)
    return None


def _calm(mine: Losses, row: int) -> bool:
    """Whether loss and gradient just before a row were what they had been in the steps before."""
    past, recent = slice(max(0, row - 4 * RECENT), row), slice(max(0, row - 3), row)
    usual = float(np.median(mine.loss[past]))
    still = mine.loss[recent].max() < usual + 0.5 * max(mine.chance - usual, 0.0)
    return bool(still and mine.norm[recent].max() < CALM * np.median(mine.norm[past]))
