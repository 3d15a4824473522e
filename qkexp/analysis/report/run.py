"""What the report knows of one run: words for its page and numbers for its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkexp.analysis.compare import facts
from qkexp.analysis.report.series import MOST, Stretches, encode, fitting
from qkexp.config import flatten
from qkexp.probe.frame import layer_values
from qkexp.record.heads import load_heads
from qkexp.record.load import Run
from qkexp.sweep.status import State
from qkexp.train.outcome import smooth

SCALARS = ("loss", "grad_norm", "loss_mean", "grad_norm_mean", "param_norm")  # *_mean: over 20 steps
LAYERED = ("max_abs_logit", "attn_max_mean", "entropy_frac", "q_in_norm_mean", "k_in_norm_mean")
MOST_EVENTS = 400


@dataclass(frozen=True)
class Budget:
    """Bytes that one run's curves may take: those of its layers, and those of its heads."""

    layers: int
    heads: int


@dataclass(frozen=True)
class Part:
    """``facts`` go into the page's JSON; each of ``arrays`` is little-endian bytes, found by its name."""

    facts: dict[str, Any]
    arrays: dict[str, bytes]


def describe(run: Run, state: State, budget: Budget) -> Part:
    """Read one run directory, finished or alive."""
    outcome = run.outcome or {}
    final = outcome.get("final") or {}
    events, arrays = run.events, {}
    curves, arrays["scalars"] = _scalars(run)
    attention, more, extremes = _attention(run, budget)
    collapsed = sorted({int(layer) for layer in events.layer[events.kind == "layer_collapse"]})
    return Part(
        {
            "name": run.name,
            "variant": run.variant,
            "lr": run.lr,
            "seed": run.seed,
            "status": state.status,
            "reason": " ".join(str(outcome.get("reason") or state.reason).split()),
            "step": max(state.step, len(run.scalars)),  # what stopped without a word may have told fewer
            "steps": run.typed.train.steps,
            "final_loss": number(final.get("loss")),
            "lowest_loss": number(final.get("lowest_loss")),
            "val_loss": number(final.get("val_loss")),
            "val_accuracy": number(final.get("val_accuracy")),
            **extremes,
            "collapsed_layers": collapsed if len(run.events) or attention else None,
            "wall_seconds": number(outcome.get("wall_seconds")),
            "config": {name: plain(value) for name, value in flatten(run.typed).items()},
            "provenance": {name: plain(value) for name, value in facts(run).items()},
            "events": [[plain(v) for v in row] for row in events.head(MOST_EVENTS).itertuples(index=False, name=None)],
            "events_in_all": len(events),
            "curves": curves,
            "attention": attention,
        },
        arrays | more,
    )


def _scalars(run: Run) -> tuple[dict[str, Any] | None, bytes]:
    """Spans of steps, and float32 (scalars, stretches, 2)."""
    table = run.scalars
    if table.empty:
        return None, b""
    loss, norm = (table[name].to_numpy(np.float64) for name in ("loss", "grad_norm"))
    columns = {"loss_mean": smooth(loss), "grad_norm_mean": smooth(norm)}
    values = [columns[n] if n in columns else table[n].to_numpy(np.float64) for n in SCALARS]
    stretches = Stretches.of(len(table), MOST)
    found = stretches.extremes(np.stack(values, axis=1)).astype("<f4")
    measured = table[table.val_loss.notna()]
    validation = [[int(s), number(v)] for s, v in zip(measured.step, measured.val_loss, strict=True)]
    return {"spans": stretches.spans(table.step.to_numpy()), "validation": validation}, found.tobytes()


def _attention(run: Run, budget: Budget) -> tuple[dict[str, Any] | None, dict[str, bytes], dict[str, Any]]:
    """Spans and shapes, codes (metric, layer, stretch, 2) and (metric, layer, head, stretch, 2), and extremes."""
    cube = load_heads(run.directory, LAYERED)
    absent = {"max_abs_logit": None, "lowest_entropy": None}
    if not len(cube.steps):
        return None, {}, absent
    missing = np.full((len(cube.steps), len(cube.layers), 1), np.nan, np.float32)
    heads = [cube.values.get(name, missing) for name in LAYERED]
    width = max(values.shape[2] for values in heads)
    each = np.stack([np.broadcast_to(values, (*values.shape[:2], width)) for values in heads])  # (M, T, L, H)
    layers = layer_values(each, LAYERED)  # (M, T, L)
    known: dict[str, Any] = {"layers": cube.layers.tolist(), "heads": width, "steps": len(cube.steps)}
    arrays = {}
    for name, values, size in (("layers", layers, budget.layers), ("each", each, budget.heads)):
        count = fitting(len(cube.steps), int(values[:, 0].size), size)
        stretches = Stretches.of(len(cube.steps), count)
        known[f"{name}_spans"] = stretches.spans(cube.steps) if count else None
        if count:
            arrays[name] = encode(stretches.extremes(np.moveaxis(values, 1, 0))).tobytes()
    logit, entropy = (layers[LAYERED.index(name)] for name in ("max_abs_logit", "entropy_frac"))
    found = {"max_abs_logit": _extreme(np.fmax, logit), "lowest_entropy": _extreme(np.fmin, entropy)}
    return known, arrays, found


def _extreme(reduce: np.ufunc, values: np.ndarray) -> float | None:
    return number(reduce.reduce(values, axis=None))


def number(value: Any) -> float | None:
    """A finite number, or None: JSON knows no others, and what was not measured is absent."""
    return float(value) if value is not None and math.isfinite(value) else None


def plain(value: Any) -> Any:
    """A value as JSON has it; a number that is not finite as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
