"""Rate × precision × clipping, with and without QK norm: how often loss and gradient spike, and which comes first."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from qkexp.analysis.figures.dots import Arm, Panel, marks, measured, medians, panel_row
from qkexp.analysis.figures.precision import name
from qkexp.analysis.figures.selection import DoesNotFit, constant_loss, model_text, recipe_text
from qkexp.analysis.figures.style import Drawing, canvas, look, rank, styled
from qkexp.analysis.stability import ended
from qkexp.record.load import Run, Sweep
from qkexp.train.spikes import spike_score

SCORE_WINDOW = 100  # OLMo 2's has 1,000 steps before a value, which runs of some hundred steps do not have
MIN_PAIRS = 5  # of spikes, below which nothing is said of their order
NEAR = 10  # steps within which a spike of the gradient belongs to one of the loss
ALLOWED = {"precision.autocast", "precision.weights", "train.clip_norm"}
MEASURED = ("loss_score", "grad_score", "val_loss")


@styled
def spikes(sweep: Sweep) -> Drawing:
    """Draw, for each rate, every run's spike scores, the lag between its spikes, and its loss."""
    table = _table(sweep)
    if table.empty:
        raise DoesNotFit("no run has ended yet")
    if table.arm.nunique() < 2:
        raise DoesNotFit("needs runs that differ in norm, precision or clipping")
    panels = [
        Panel("loss_score", "loss: spike score", "% of steps", log=False, share=True),
        Panel("grad_score", "gradient norm: spike score", "% of steps", log=False, share=True),
        Panel(
            "lag",
            "loss spike after gradient spike",
            "steps, median of the run's",
            log=False,
            level=0.0,
            limits=(-NEAR, NEAR),
            blank=True,
        ),
        Panel("val_loss", "final validation loss", "nats", level=constant_loss(sweep.all.values())),
    ]
    arms = _arms(table)
    rates = sorted(table.lr.unique())
    height = 0.7 + 0.2 * len(arms)
    sheet = canvas(len(rates), len(panels), panel=(2.6, height), paragraphs=_caption(sweep), legend_rows=1)
    for number, rate in enumerate(rates):
        panel_row(sheet.axes[number], table[table.lr == rate], arms, panels, f"rate {rate:g}")
    sheet.legend(marks(table, panels), 4)
    return Drawing(sheet.figure, table)


# ---------------------------------------------------------------- data


def _table(sweep: Sweep) -> pd.DataFrame:
    """Rows of kind run and median.

    ``loss_score, grad_score``: percentage of steps 7 standard deviations over the mean of the 100 before;
    ``loss_spikes, grad_spikes``: events of the run; ``matched``: spikes of the loss that have one of the gradient near
    them, ``lag`` the median number of steps that these come later (NaN where there is none). Rows of kind pool have
    both over all runs of a variant at a rate, and ``gradient_first``, the share of them with a lag over 0.
    """
    table = measured(
        sweep,
        {
            "precision": lambda run: name(run.typed.precision),
            "clipping": lambda run: run.typed.train.clip_norm or math.inf,
            "loss_score": _score("loss"),
            "grad_score": _score("grad_norm"),
            "loss_spikes": lambda run: len(steps_of(run, "loss_spike")),
            "grad_spikes": lambda run: len(steps_of(run, "grad_spike")),
            "matched": lambda run: len(lags(steps_of(run, "loss_spike"), steps_of(run, "grad_spike"))),
            "lag": _lag,
            "val_loss": lambda run: run.final_val_loss,
        },
        ALLOWED,
    )
    if table.empty:
        return table
    clipped = np.where(np.isinf(table.clipping), "no clipping", "clipped at " + table.clipping.map("{:g}".format))
    table["arm"] = table.variant.map(lambda v: look(v).label) + ", " + table.precision + ", " + clipped
    by = ["variant", "precision", "clipping", "arm", "lr"]
    return pd.concat([medians(table, by, MEASURED), _pools(sweep)], ignore_index=True)


def _pools(sweep: Sweep) -> pd.DataFrame:
    found: dict[tuple[str, float], list[np.ndarray]] = {}
    for run in ended(sweep.all.values()):
        pairs = lags(steps_of(run, "loss_spike"), steps_of(run, "grad_spike"))
        found.setdefault((run.variant, run.lr), []).append(pairs)
    rows = []
    for (variant, lr), runs in found.items():
        pairs = np.concatenate(runs)
        row = {"kind": "pool", "variant": variant, "lr": lr, "matched": len(pairs), "enough": len(pairs) >= MIN_PAIRS}
        if len(pairs):
            row |= {"lag": float(np.median(pairs)), "gradient_first": float(np.mean(pairs > 0))}
        rows.append(row)
    return pd.DataFrame(rows)


def steps_of(run: Run, kind: str) -> np.ndarray:
    """Steps of a run's events of one kind."""
    return run.events[run.events.kind == kind].step.to_numpy(int)


def lags(loss: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """Of each spike of the loss that has one of the gradient within 10 steps: steps since the nearest of these.

    Positive: the gradient came first. Of two that are equally near, the earlier counts.
    """
    found = []
    for step in loss:
        near = sorted((abs(step - other), other) for other in grad if abs(step - other) <= NEAR)
        if near:
            found.append(step - near[0][1])
    return np.array(found, dtype=int)


def _lag(run: Run) -> float:
    found = lags(steps_of(run, "loss_spike"), steps_of(run, "grad_spike"))
    return float(np.median(found)) if len(found) else math.nan


def _score(column: str) -> Callable[[Run], float]:
    return lambda run: spike_score(run.scalars[column].to_numpy(float), window=SCORE_WINDOW)


# ---------------------------------------------------------------- drawing


def _arms(table: pd.DataFrame) -> list[Arm]:
    runs = table[table.kind == "run"]
    kinds = runs[["variant", "precision", "clipping", "arm"]].drop_duplicates().to_dict("records")
    kinds.sort(key=lambda r: (rank(r["variant"]), r["precision"], -r["clipping"]))
    variants = [None, *(row["variant"] for row in kinds)]
    return [
        Arm(row["arm"], row["variant"], gap=before not in (None, row["variant"]))
        for row, before in zip(kinds, variants, strict=False)
    ]


def _caption(sweep: Sweep) -> list[str]:
    first = next(iter(sweep.all.values()))
    recipe = ", ".join(recipe_text(first).split(", ")[:3])
    return [
        f"{model_text(first)}; {recipe}.",
        f"Spike score: percentage of steps at least 7 standard deviations over the mean of the {SCORE_WINDOW} before "
        "(OLMo 2's score takes 1,000). Lag: of spikes by the run's own detector (docs/training.md), those of the loss "
        f"that have one of the gradient norm within {NEAR} steps; positive: the gradient came first. No mark: no such "
        "pair.",
    ]
