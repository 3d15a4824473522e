"""What of a QK norm does the work: norm, gain, centring, width of a head and the factor sqrt(d), one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from qkexp.analysis.figures.dots import Arm, Panel, marks, measured, medians, panel_row
from qkexp.analysis.figures.selection import DoesNotFit, constant_loss, model_text, recipe_text
from qkexp.analysis.figures.style import Drawing, canvas, styled
from qkexp.analysis.measures import largest
from qkexp.config import AttentionConfig, RunConfig, head_width
from qkexp.record.load import Run, Sweep

NORMS = {("none", False): "no norm", ("center", False): "centring alone", ("rms", False): "RMS",
         ("rms", True): "LayerNorm", ("l2", False): "L2", ("l2", True): "centred L2"}  # fmt: skip
ALLOWED = {"model.heads", "optim.gain_decay"}
MEASURED = ("first_entropy", "first_logit", "max_abs_logit", "gain", "val_loss")


@styled
def anatomy(sweep: Sweep) -> Drawing:
    """Draw, for each head width and rate, entropy and largest score at the start, the largest score, and the loss."""
    table = _table(sweep)
    if table.empty:
        raise DoesNotFit("no run has ended yet")
    if table.arm.nunique() < 2:
        raise DoesNotFit("needs runs with two or more kinds of norm")
    panels = [
        Panel("first_entropy", "entropy at step 0", "H / ln n, mean over layers", log=False, limits=(0.0, 1.0)),
        Panel("first_logit", "score at step 0", "largest |z|"),
        Panel("max_abs_logit", "score in training", "largest |z|"),
        Panel("val_loss", "final validation loss", "nats", level=constant_loss(sweep.all.values())),
    ]
    arms = _arms(table)
    kinds = sorted({(d, lr) for d, lr in zip(table.head_width, table.lr, strict=True)})
    sheet = canvas(
        len(kinds), len(panels), panel=(2.6, 0.7 + 0.2 * len(arms)), paragraphs=_caption(sweep), legend_rows=1
    )
    for number, (width, rate) in enumerate(kinds):
        rows = table[(table.head_width == width) & (table.lr == rate)]
        panel_row(sheet.axes[number], rows, arms, panels, f"heads of {width} channels, rate {rate:g}")
    sheet.legend(marks(table, panels), 4)
    return Drawing(sheet.figure, table)


def _table(sweep: Sweep) -> pd.DataFrame:
    """Rows of kind run and median, with what each arm is made of as columns."""
    table = measured(
        sweep,
        {
            "norm": lambda run: _norm(run.typed.attention),
            "gain_is": lambda run: _gain(run.typed),
            "scale": lambda run: _scale(run.typed),
            "head_width": lambda run: head_width(run.typed.model),
            "arm": lambda run: arm(run.typed),
            "first_entropy": _first("entropy_frac", np.nanmean),
            "first_logit": _first("max_abs_logit", np.nanmax),
            "max_abs_logit": largest("max_abs_logit"),
            "gain": largest("q_gain_max"),
            "val_loss": lambda run: run.final_val_loss,
        },
        ALLOWED,
    )
    if table.empty:
        return table
    by = ["variant", "arm", "norm", "gain_is", "scale", "head_width", "lr"]
    return medians(table, by, MEASURED)


def arm(cfg: RunConfig) -> str:
    """What distinguishes an arm, but for the head's width: ``RMS, gain frozen``, ``L2, scale learned``, …"""
    gain, scale = _gain(cfg), _scale(cfg)
    parts = [_norm(cfg.attention)]
    parts += [f"gain {gain}"] if cfg.attention.norm == "rms" else []
    parts += [{"learned": "scale learned", "sharper": "no 1/√d", "flatter": "cosine / √d"}.get(scale, "")]
    return ", ".join(part for part in parts if part)


def _norm(a: AttentionConfig) -> str:
    return NORMS[a.norm, a.center]


def _gain(cfg: RunConfig) -> str:
    if cfg.attention.norm != "rms":
        return "none"
    if cfg.attention.gain == "none":
        return "frozen"
    return "decayed" if cfg.optim.gain_decay else "learned"


def _scale(cfg: RunConfig) -> str:
    """Of the start, against √d times the cosine: ``equal``, ``sharper``, ``flatter``; ``learned`` where it moves."""
    a, d = cfg.attention, head_width(cfg.model)
    if a.norm not in ("rms", "l2"):
        return "equal"
    if a.scale.startswith("learned"):
        return "learned"
    factor = {"inv_sqrt_d": d**-0.5, "one": 1.0}.get(a.scale, a.scale_init or math.nan)
    root = factor * (d if a.norm == "rms" else 1.0) / math.sqrt(d)  # of |z| at a cosine of 1
    return "equal" if math.isclose(root, 1.0, rel_tol=0.01) else "sharper" if root > 1 else "flatter"


def _first(metric: str, reduce: Callable[[np.ndarray], float]) -> Callable[[Run], float]:
    """Of a run: a metric of the first probed step, reduced over layers; NaN where it was not measured."""

    def of(run: Run) -> float:
        values = run.layers.values.get(metric)
        if values is None or not len(values) or not np.isfinite(values[0]).any():
            return math.nan
        return float(reduce(values[0]))

    return of


def _arms(table: pd.DataFrame) -> list[Arm]:
    """In the order of the experiment's grid: norms at equal scores first, other scales last."""
    kinds = table[["arm", "variant", "norm", "gain_is", "scale"]].drop_duplicates("arm").to_dict("records")
    norms, scales = list(NORMS.values()), ["equal", "learned", "sharper", "flatter"]
    gains = ["none", "frozen", "learned", "decayed"]
    kinds.sort(
        key=lambda r: (
            r["scale"] in ("sharper", "flatter"),
            norms.index(r["norm"]),
            scales.index(r["scale"]),
            gains.index(r["gain_is"]),
        )
    )
    found: list[Arm] = []
    other = False
    for row in kinds:
        turns = row["scale"] in ("sharper", "flatter") and not other
        other = other or turns
        found.append(Arm(row["arm"], row["variant"], gap=turns and bool(found)))
    return found


def _caption(sweep: Sweep) -> list[str]:
    first = next(iter(sweep.all.values()))
    return [
        f"{model_text(first).split(' (')[0]} on {first.typed.data.name}; {recipe_text(first)}.",
        "Upper arms start with equal scores, √d cos(q, k); arms without a norm with scores of that spread. A frozen "
        "gain is 1. A decayed one is pulled towards 1. Without 1/√d, RMS and LayerNorm are √d times sharper; a cosine "
        "over √d is nearly uniform.",
    ]
