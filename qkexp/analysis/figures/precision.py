"""Precision × QK norm × eps: FP16 overflows above 65,504, BF16 loses resolution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.dots import Arm, Panel, marks, measured, medians, panel_row, refuse_others
from qkexp.analysis.figures.selection import DoesNotFit, constant_loss, model_text, recipe_text
from qkexp.analysis.figures.style import GREY, LEVEL_STYLE, Drawing, canvas, look, rank, styled
from qkexp.analysis.measures import largest
from qkexp.config import PrecisionConfig
from qkexp.record.heads import load_heads
from qkexp.record.load import Run, Sweep

FP16_MAX = 65504.0
STYLES: dict[str, Any] = {"fp32": "-", "bf16": (0, (4, 1.5)), "bf16_pure": (0, (6, 1.5, 1, 1.5)), "fp16": (0, (1, 1.2))}
ALLOWED = {"precision.autocast", "precision.weights"}
MEASURED = ("max_abs_logit", "resolution", "ulp", "steps_beyond", "val_loss")


@styled
def precision(sweep: Sweep) -> Drawing:
    """Draw the largest score over steps in each precision without a norm, its resolution, and every run's result."""
    table = _table(sweep)
    if table.empty:
        raise DoesNotFit("no run has ended yet")
    rates = sorted(table.lr.unique())
    panels = [
        Panel("max_abs_logit", "largest score", "|z|, before any cap", level=FP16_MAX),
        Panel("ulp", "spacing of scores there", "in the score's dtype"),
        Panel("val_loss", "final validation loss", "nats", level=constant_loss(sweep.all.values())),
    ]
    arms = _arms(table)
    rows = len(rates)
    sheet = canvas(
        rows, len(panels) + 1, panel=(2.6, 0.7 + 0.19 * len(arms)), paragraphs=_caption(sweep), legend_rows=3
    )
    curves = _curves(sweep)
    for number, rate in enumerate(rates):
        panel_row(sheet.axes[number, :-1], table[table.lr == rate], arms, panels, f"rate {rate:g}")
        _draw_curves(sheet.axes[number, -1], curves[curves.lr == rate])
    sheet.legend([*marks(table, panels), *_styles(table)], 4)
    return Drawing(sheet.figure, pd.concat([table, curves], ignore_index=True))


# ---------------------------------------------------------------- data


def _table(sweep: Sweep) -> pd.DataFrame:
    """Rows of kind run and median.

    ``overflows``: the run ended because something was not finite; ``steps_beyond``: probed steps with a score over
    65,504 (z, not |z|: one of -inf only has no weight); ``ulp``: the largest spacing of scores at a head's
    largest one; ``resolution``: spacing over score, median over steps, layers and heads;
    ``skipped``: attempts of FP16 whose gradient overflowed.
    """
    refuse_others(sweep, ALLOWED)
    if len({name(run.typed.precision) for run in sweep.all.values()}) < 2:
        raise DoesNotFit("needs runs in two or more precisions")
    table = measured(
        sweep,
        {
            "precision": lambda run: name(run.typed.precision),
            "max_abs_logit": largest("max_abs_logit"),
            "ulp": _spacing,
            "resolution": _resolution,
            "val_loss": lambda run: run.final_val_loss,
            "overflows": lambda run: str((run.outcome or {}).get("reason", "")).startswith("nonfinite"),
            "steps_beyond": _steps_beyond,
            "skipped": _skipped,
        },
        ALLOWED,
    )
    if table.empty:
        return table
    table["arm"] = table.variant.map(_label) + ", " + table.precision
    return medians(table, ["variant", "precision", "arm", "lr"], MEASURED)


def name(precision: PrecisionConfig) -> str:
    """As its preset is called."""
    if precision.weights == "bf16":
        return "bf16_pure"
    return "fp32" if precision.autocast == "none" else precision.autocast


def _spacing(run: Run) -> float:
    values = load_heads(run.directory, ["score_ulp"]).values.get("score_ulp")
    return float(np.nanmax(values)) if values is not None and np.isfinite(values).any() else math.nan


def _resolution(run: Run) -> float:
    found = load_heads(run.directory, ["score_ulp", "max_abs_logit"]).values
    if len(found) < 2:
        return math.nan
    largest_score = found["max_abs_logit"].astype(np.float64)
    known = (largest_score > 0) & np.isfinite(found["score_ulp"])
    return float(np.median(found["score_ulp"][known] / largest_score[known])) if known.any() else math.nan


def _steps_beyond(run: Run) -> int:
    values = run.layers.values.get("max_logit", np.zeros((0, 1)))
    return int((np.nan_to_num(values, nan=-math.inf).max(axis=1, initial=-math.inf) > FP16_MAX).sum())


def _skipped(run: Run) -> float:
    """FP16: attempts whose gradient overflowed, over the run; NaN in other precisions."""
    values = run.scalars.skipped_steps.to_numpy(float)
    return float(np.nansum(values)) if np.isfinite(values).any() else math.nan


def _curves(sweep: Sweep) -> pd.DataFrame:
    """Rows of kind curve: largest |z| of a run without norm at each probed step, of the smallest seed."""
    runs = [r for r in sweep.all.values() if r.variant == "none" and r.outcome]
    first = min((r.seed for r in runs), default=0)
    found = []
    for run in runs:
        if run.seed == first and run.layers.values["max_abs_logit"].size:
            values = np.nanmax(run.layers["max_abs_logit"], axis=1, initial=-math.inf)
            values = np.where(np.isfinite(values), values, math.nan)
            part = pd.DataFrame({"step": run.layers.steps, "max_abs_logit": values})
            facts: dict[str, Any] = {
                "kind": "curve",
                "variant": "none",
                "precision": name(run.typed.precision),
                "lr": run.lr,
            }
            found.append(part.assign(seed=run.seed, status=run.status, **facts))
    columns = ["kind", "variant", "precision", "lr", "seed", "status", "step", "max_abs_logit"]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


# ---------------------------------------------------------------- drawing


def _draw_curves(axes: Axes, curves: pd.DataFrame) -> None:
    colour = look("none").colour
    axes.axhline(FP16_MAX, color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)
    for kind, style in STYLES.items():
        part = curves[curves.precision == kind]
        known = part[np.isfinite(part.max_abs_logit.to_numpy(float))]
        axes.plot(known.step, known.max_abs_logit, color=colour, ls=style, lw=1.1)
        if len(known) and known.iloc[-1].status == "diverged" and known.step.max() < curves.step.max():
            end = known.iloc[-1]
            axes.plot(end.step, end.max_abs_logit, marker="x", ms=6, mew=1.6, color="black", zorder=5)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title("no norm: largest |z|")


def _arms(table: pd.DataFrame) -> list[Arm]:
    kinds = table[["variant", "precision", "arm"]].drop_duplicates().to_dict("records")
    order = list(STYLES)
    kinds.sort(key=lambda r: (rank(r["variant"]), order.index(r["precision"])))
    found: list[Arm] = []
    for row, before in zip(kinds, [None, *kinds], strict=False):
        found.append(Arm(row["arm"], row["variant"], gap=before is not None and before["variant"] != row["variant"]))
    return found


def _label(variant: str) -> str:
    eps = {"rmsnorm": "RMSNorm, eps 1e-6", "none": "no norm"}
    if variant in eps:
        return eps[variant]
    text = look(variant).label
    for code, word in (
        ("rmsnorm", "RMSNorm,"),
        ("normdtype-compute", "in its own dtype"),
        ("eps-", "eps "),
        ("0p", "0."),
    ):
        text = text.replace(code, word)
    return text.replace("e-0", "e-")


def _styles(table: pd.DataFrame) -> list[Artist]:
    colour = look("none").colour
    entries: list[Artist] = [
        Line2D([], [], color=colour, ls=style, lw=1.1, label=f"no norm, {kind}")
        for kind, style in STYLES.items()
        if (table.precision == kind).any()
    ]
    return [*entries, Line2D([], [], color=GREY, ls=LEVEL_STYLE, lw=0.9, label="65,504, or chance")]


def _caption(sweep: Sweep) -> list[str]:
    first = next(iter(sweep.all.values()))
    recipe = recipe_text(first).replace(", BF16 autocast", "").replace(", FP32", "").replace(", FP16 autocast", "")
    return [
        f"{model_text(first)}; {recipe}. Scores and softmax are in the compute type.",
        "65,504 is FP16's largest number; × in a curve: ended, not finite. The spacing is that of two neighbouring "
        "scores at the largest |z|: differences below it are lost.",
    ]
