"""Loss against a forced size of the logits (the idea of Wortsman et al. 2023, Figure 10)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.grouping import finished, groups
from qkexp.analysis.figures.selection import DoesNotFit, constant_loss, model_text, recipe_text, unfinished_text
from qkexp.analysis.figures.style import GREY, LEVEL_STYLE, Drawing, canvas, styled
from qkexp.config import head_width
from qkexp.record.load import Run, Sweep

COLOURS = {"final_loss": "#0072B2", "val_loss": "#D55E00", "max_abs_logit": "#009E73", "entropy_frac": "#882255"}
LABELS = {"final_loss": "training loss", "val_loss": "validation loss"}


@styled
def forced_logits(sweep: Sweep) -> Drawing:
    """Draw final losses, the largest logit and the entropy at the end, against the forced bound kappa."""
    found = groups(sweep, "attention.norm", "attention.gain", "attention.scale", "attention.scale_init", "optim.lr")
    forced = {
        scale: runs
        for (norm, gain, kind, scale, _), runs in found.items()
        if (norm, gain, kind) == ("rms", "none", "fixed")
    }
    if len(forced) < 2 or len(forced) != len(found):
        raise DoesNotFit("needs runs with a weightless RMSNorm at two or more fixed scales, and no others")
    table = pd.DataFrame([_row(run) for runs in forced.values() for run in finished(runs)])
    if table.empty:
        raise DoesNotFit("no run has ended yet")
    table = table.sort_values(["kappa", "seed"], ignore_index=True)
    runs = [run for each in forced.values() for run in each]
    chance = constant_loss(runs)
    sheet = canvas(1, 3, panel=(2.75, 2.5), paragraphs=_caption(runs, chance), legend_rows=1)
    loss, logit, entropy = sheet.axes[0]
    for metric in LABELS:
        _line(loss, table, metric)
    if chance is not None:
        loss.axhline(chance, color=GREY, lw=0.9, ls=LEVEL_STYLE)
    loss.set_ylabel("nats, at the end")
    loss.set_title("(a) loss")
    _line(logit, table, "max_abs_logit")
    edges = table.kappa.min(), table.kappa.max()
    logit.plot(edges, edges, color=GREY, lw=0.9, ls=LEVEL_STYLE)
    logit.set_ylabel("max |z|, of the whole run")
    logit.set_title("(b) largest logit")
    _line(entropy, table, "entropy_frac")
    entropy.set_ylim(0, 1.05)
    entropy.set_ylabel("H / ln n, sharpest layer, at the end")
    entropy.set_title("(c) entropy")
    for axes in sheet.axes[0]:
        axes.set_xscale("log")
        axes.set_xlabel("forced bound κ of |z|")
    loss.set_yscale("log")
    logit.set_yscale("log")
    handles = [Line2D([], [], color=COLOURS[m], marker="o", ms=4, label=label) for m, label in LABELS.items()]
    handles.append(Line2D([], [], color=GREY, lw=0.9, ls=LEVEL_STYLE, label="chance (a), |z| = κ (b)"))
    sheet.legend(handles, 3)
    return Drawing(sheet.figure, table)


def kappa(run: Run) -> float:
    """The bound of |z| that a weightless RMSNorm and a fixed scale force: scale · d."""
    assert run.typed.attention.scale_init is not None
    return run.typed.attention.scale_init * head_width(run.typed.model)


def _row(run: Run) -> dict[str, float]:
    logits, entropy = run.layers["max_abs_logit"], run.layers["entropy_frac"]
    final = (run.outcome or {}).get("final", {})
    return {
        "kappa": kappa(run),
        "scale_init": run.typed.attention.scale_init or math.nan,
        "seed": run.seed,
        "final_loss": final.get("loss", math.nan),
        "val_loss": run.final_val_loss,
        "max_abs_logit": float(np.nanmax(logits)) if logits.size else math.nan,
        "reached": float(np.nanmax(logits)) / kappa(run) if logits.size else math.nan,
        "entropy_frac": float(np.nanmin(np.nanmean(entropy[-20:], axis=0))) if entropy.size else math.nan,
    }


def _line(axes: Axes, table: pd.DataFrame, metric: str) -> None:
    """Every run a dot, the median a line."""
    middle = table.groupby("kappa")[metric].median()
    axes.plot(middle.index, middle, color=COLOURS[metric])
    axes.plot(table.kappa, table[metric], ls="", marker="o", ms=3.5, mfc=COLOURS[metric], mec="white", mew=0.4)


def _caption(runs: list[Run], chance: float | None) -> list[str]:
    one = runs[0]
    level = "" if chance is None else f" Chance is {chance:.2f} nats."
    return [
        f"q and k of every layer pass a weightless RMSNorm, and the score is their product times κ / d: |z| cannot "
        f"exceed κ, and comes near it. {model_text(one)}; peak learning rate {one.lr:g}; {recipe_text(one)}. Points: "
        f"runs; line: their median.{level}",
        "At the smallest κ attention is uniform: what the model reaches without choosing. Wortsman et al. force "
        "g(z) = √κ z / RMS(z) on q and k of a 10 M language model, and find the loss worse from about κ = 1e3 on.",
        unfinished_text(runs),
    ]
