"""How a run ended: the one rule by which it is called completed or diverged, from its stored losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qkexp.train.spikes import spike_score

WINDOW = 20  # steps of a running mean, and of "final"
ROSE = 0.2  # of the way from the smoothed minimum to the constant predictor's loss
AT_CHANCE = 0.95  # of the constant predictor's loss


def smooth(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Running mean over the last ``window`` values; over what there is at the start."""
    values = np.asarray(values, dtype=np.float64)
    total = np.cumsum(np.concatenate([[0.0], values]))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def judge(loss: np.ndarray, constant_loss: float, nonfinite: str | None = None) -> tuple[str, str]:
    """Training loss of every step -> (status, reason).

    Diverged when a loss or gradient was not finite (``nonfinite`` says which), when the final loss
    rose over m + 0.2 (ℓ - m), m the smallest smoothed loss and ℓ the loss of the best constant
    predictor, or when it ended at 0.95 ℓ or above. Otherwise completed. "Final" is the mean of the
    last 20 steps.
    """
    if nonfinite is not None:
        return "diverged", f"nonfinite: {nonfinite}"
    final = float(np.mean(loss[-WINDOW:]))
    smoothed = smooth(loss)
    lowest = float(smoothed[min(WINDOW, len(smoothed)) - 1 :].min())
    limit = lowest + ROSE * (constant_loss - lowest)
    if lowest < constant_loss and final > limit:
        return "diverged", f"rose: final loss {final:.3g} > {limit:.3g} after a minimum of {lowest:.3g}"
    if final >= AT_CHANCE * constant_loss:
        return "diverged", f"at_chance: final loss {final:.3g} >= {AT_CHANCE:g} x {constant_loss:.3g}"
    return "completed", f"final loss {final:.3g}"


def final_figures(loss: np.ndarray) -> dict[str, Any]:
    """``loss``: mean of the last 20 steps; ``lowest_loss``: minimum of the smoothed loss, and its step.

    ``spike_score`` is None in runs that are too short for it.
    """
    if not len(loss):
        return dict.fromkeys(("loss", "lowest_loss", "lowest_step", "spike_score"))
    smoothed = smooth(loss)
    spikes = spike_score(loss)
    return {
        "loss": float(np.mean(loss[-WINDOW:])),
        "lowest_loss": float(smoothed.min()),
        "lowest_step": int(smoothed.argmin()),
        "spike_score": None if math.isnan(spikes) else spikes,
    }
