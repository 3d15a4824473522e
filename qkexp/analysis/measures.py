"""Numbers that claims are about: one run, one metric, one layer, one reduction.

A metric is a column of scalars.parquet, a metric of the attention table (a layer's value), or one of
:data:`DERIVED`. Loss and gradient norm are running means over 20 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from qkexp.config import UserError
from qkexp.probe.metrics import BY_NAME, COLLAPSED
from qkexp.record.load import Run
from qkexp.train.outcome import smooth

SMOOTHED = ("loss", "grad_norm")
GRAD_START = 100  # step at which the running minimum of the gradient norm starts


def grad_growth(grad_norm: np.ndarray) -> np.ndarray:
    """Smoothed gradient norm over its running minimum from step 100 on; 1 before."""
    smoothed = smooth(grad_norm)
    out = np.ones_like(smoothed)
    if len(smoothed) > GRAD_START:
        tail = smoothed[GRAD_START:]
        out[GRAD_START:] = tail / np.minimum.accumulate(tail)
    return out


def onset(values: np.ndarray, threshold: float, start: int = 0) -> int | None:
    """Index of the first value at or above ``threshold`` from index ``start`` on; None where there is none."""
    above = np.flatnonzero(np.asarray(values)[start:] >= threshold)
    return int(above[0]) + start if len(above) else None


def _collapsed_share(run: Run) -> np.ndarray:
    """Share of the probed steps after a layer first fell under 0.05 · log N that it spent there, (1, layers)."""
    frac = run.layers["entropy_frac"]
    shares = np.zeros((1, frac.shape[1]))
    for layer in range(frac.shape[1]):
        below = frac[:, layer] < COLLAPSED
        if below.any():
            shares[0, layer] = below[below.argmax() :].mean()
    return shares


DERIVED: dict[str, Callable[[Run], np.ndarray]] = {
    "grad_growth": lambda run: grad_growth(run.scalars.grad_norm.to_numpy()),
    "collapsed_share": _collapsed_share,
}

REDUCTIONS: dict[str, Callable[[np.ndarray], float]] = {
    "min": lambda x: float(np.nanmin(x)),
    "max": lambda x: float(np.nanmax(x)),
    "final": lambda x: float(np.nanmean(x[-20:])),
    "first": lambda x: float(x[0]),
    "last": lambda x: float(x[-1]),
}


def series(run: Run, metric: str, layer: Any = None) -> np.ndarray:
    """A metric over the run's steps: (steps,), or (steps, layers) for all layers of an attention metric.

    Args:
        layer: ``first``, ``middle``, ``last``, an index, or None for all.

    Raises:
        UserError: no such metric.
    """
    if metric in BY_NAME or metric == "collapsed_share":
        if metric in BY_NAME and metric not in run.layers.values:
            raise UserError(f"{metric} was not measured in this run: train it again with its group in probe.groups")
        values = DERIVED[metric](run) if metric in DERIVED else run.layers[metric]
        return values if layer is None else values[:, layer_index(layer, values.shape[1])]
    if metric in DERIVED:
        return DERIVED[metric](run)
    if metric not in run.scalars.columns:
        raise UserError(f"no metric {metric!r}; there are {', '.join([*run.scalars.columns, *DERIVED, *BY_NAME])}")
    values = run.scalars[metric].to_numpy(dtype=np.float64)
    return smooth(values) if metric in SMOOTHED else values


def largest(metric: str) -> Callable[[Run], float]:
    """Of a run: the largest value of an attention metric over probed steps and layers; NaN where not measured."""

    def of(run: Run) -> float:
        values = run.layers.values.get(metric)
        return float(np.nanmax(values)) if values is not None and np.isfinite(values).any() else math.nan

    return of


def layer_index(layer: Any, layers: int) -> int:
    """``first``, ``middle``, ``last`` or a number -> index."""
    named = {"first": 0, "middle": layers // 2, "last": layers - 1}
    return named[layer] if layer in named else int(layer)


def measure(run: Run, spec: dict[str, Any]) -> Any:
    """The number (or status) that a claim's ``metric``, ``layer`` and ``reduce`` name, of one run; NaN where absent."""
    metric = spec["metric"]
    if metric == "status":
        return run.status
    if metric in ("final_loss", "final_val_loss"):
        final = (run.outcome or {}).get("final", {})
        return run.final_val_loss if metric == "final_val_loss" else final.get("loss", math.nan)
    if "before" in spec:
        return _lead(run, spec)
    values = series(run, metric, spec.get("layer"))
    if not np.isfinite(values).any():
        return math.nan
    value = REDUCTIONS[spec.get("reduce", "max")](values)
    if "over" in spec:  # a ratio to the same measure elsewhere in the run
        value /= measure(run, {**{k: v for k, v in spec.items() if k != "over"}, **spec["over"]})
    return value


def _lead(run: Run, spec: dict[str, Any]) -> float:
    """Steps from ``metric`` reaching ``above`` to ``before`` doing so, from ``after`` on; NaN if one never does."""
    start = int(spec.get("after", 0))
    mine = _onset_step(run, spec, start)
    other = _onset_step(run, spec["before"], start)
    return math.nan if mine is None or other is None else float(other - mine)


def _onset_step(run: Run, spec: dict[str, Any], start: int) -> int | None:
    """The step, not the row: a probed step stands for itself."""
    metric = spec["metric"]
    steps = run.layers.steps if metric in BY_NAME else run.scalars.step.to_numpy()
    found = onset(series(run, metric, spec.get("layer")), float(spec["above"]), int(np.searchsorted(steps, start)))
    return None if found is None else int(steps[found])
