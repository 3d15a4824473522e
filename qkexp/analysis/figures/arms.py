"""How the arms of an intervention look, and what is drawn of each run."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkexp.analysis.figures.style import Look, look
from qkexp.record.load import Run
from qkexp.train.outcome import WINDOW, smooth

# An arm that changes nothing has its variant's colour, as in every figure; these are none of a variant's.
_ARMS = {
    "norm": Look("calibrated RMSNorm inserted", "#117733", "D"),
    "frozen_qk": Look("Q and K frozen", "#332288", "s"),
    "slow_qk": Look("rate of Q and K × 0.1", "#6699CC", "^"),
    "slow": Look("all rates × 0.1", "#888888", "v"),
}
_OTHERS = ("#AA4466", "#999933", "#661100", "#44AA99")


def arm_look(arm: str, variant: str) -> Look:
    """The look of an arm; one that changes nothing is drawn as its variant."""
    if arm in ("unchanged", "trained"):
        return Look(arm, look(variant).colour, "o")
    number = zlib.crc32(arm.encode())
    return _ARMS.get(arm) or Look(arm.replace("_", " "), _OTHERS[number % len(_OTHERS)], "P")


@dataclass(frozen=True)
class Panel:
    """What is drawn over steps: a number of the whole run, or the worst layer's."""

    metric: str
    title: str
    unit: str
    log: bool
    values: Callable[[Run], tuple[np.ndarray, np.ndarray]]


def _scalar(name: str) -> Callable[[Run], tuple[np.ndarray, np.ndarray]]:
    return lambda run: (run.scalars.step.to_numpy(), smooth(run.scalars[name].to_numpy()))


def _layers(name: str, worst: Callable[..., np.ndarray]) -> Callable[[Run], tuple[np.ndarray, np.ndarray]]:
    def values(run: Run) -> tuple[np.ndarray, np.ndarray]:
        found = run.layers[name]
        known = ~np.isnan(found).all(axis=1)
        return run.layers.steps[known], worst(found[known], axis=1)

    return values


PANELS = {
    "loss": Panel("loss", "training loss", f"nats ({WINDOW}-step mean)", False, _scalar("loss")),
    "max_abs_logit": Panel(
        "max_abs_logit", "max |logit|, largest layer", "logit", True, _layers("max_abs_logit", np.nanmax)
    ),
    "entropy_frac": Panel(
        "entropy_frac", "entropy, smallest layer", "share of log n", True, _layers("entropy_frac", np.nanmin)
    ),
    "grad_norm": Panel("grad_norm", "gradient norm", f"L2 norm ({WINDOW}-step mean)", True, _scalar("grad_norm")),
}


def curve(run: Run, panel: Panel, **columns: object) -> pd.DataFrame:
    """One run in one panel as tidy rows: step, value, and the columns given."""
    steps, values = panel.values(run)
    return pd.DataFrame({"kind": "curve", **columns, "metric": panel.metric, "step": steps, "value": values})
