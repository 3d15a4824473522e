"""Attention made sharper by force, during and after warm-up (the intervention of Zhai et al. 2023)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from qkexp.analysis.figures.curves import Arm, Panel, curves, draw, handles, seeds_text
from qkexp.analysis.figures.grouping import finished, groups
from qkexp.analysis.figures.selection import DoesNotFit, model_text, recipe_text, unfinished_text
from qkexp.analysis.figures.style import GREY, Drawing, canvas, styled
from qkexp.record.load import Run, Sweep
from qkexp.train.outcome import WINDOW

PANELS = (
    Panel("loss", "(a) training loss", f"nats ({WINDOW}-step mean)"),
    Panel("grad_norm", "(b) gradient norm", f"L2 norm ({WINDOW}-step mean)", log=True),
    Panel("entropy_mean", "(c) attention entropy, first layer", "nats", "first"),
    Panel("entropy_mean", "(d) attention entropy, last layer", "nats", "last"),
)
LOOKS: tuple[tuple[str, Any, str], ...] = (
    ("#666666", "-", ""),
    ("#D55E00", (0, (4, 1.5)), "s"),
    ("#0072B2", (0, (1, 1.2)), "D"),
    ("#009E73", (0, (6, 2, 1, 2)), "^"),
)


@styled
def temperature_shock(sweep: Sweep) -> Drawing:
    """Draw a run without and runs with a temperature, an arm for each step at which it begins."""
    found = groups(sweep, "variant", "attention.temperature", "attention.temperature_from", "optim.lr")
    plain = [runs for (_, tau, *_), runs in found.items() if tau == 1.0]
    with_tau = [(start, tau, runs) for (_, tau, start, _), runs in found.items() if tau != 1.0]
    shocked = sorted(with_tau, key=lambda arm: arm[0])
    if len(plain) != 1 or not 1 <= len(shocked) < len(LOOKS):
        raise DoesNotFit("needs one arm without attention.temperature and one to three with it, at one rate")
    plain, shocked = [_probed(runs) for runs in plain], [(start, tau, _probed(runs)) for start, tau, runs in shocked]
    if not plain[0] or not all(runs for *_, runs in shocked):
        raise DoesNotFit("an arm has no probed steps")
    arms = [Arm("no shock", plain[0], *LOOKS[0])]
    for look, (start, tau, runs) in zip(LOOKS[1:], shocked, strict=False):
        when = "in warm-up" if start < runs[0].typed.optim.warmup else "after warm-up"
        arms.append(Arm(f"τ = {tau:g} from step {start} ({when})", runs, *look))
    table = pd.concat([curves(arms, PANELS), _ends(arms)], ignore_index=True)
    runs = [run for arm in arms for run in arm.runs]
    sheet = canvas(2, 2, panel=(3.6, 2.0), paragraphs=_caption(arms, runs), legend_rows=-(-len(arms) // 3), sharex=True)
    for panel, axes in zip(PANELS, sheet.axes.flat, strict=True):
        draw(axes, panel, table[table.kind == "curve"], arms)
        for arm, (start, *_) in zip(arms[1:], shocked, strict=True):
            axes.axvline(start, color=arm.colour, lw=0.7, zorder=1)
        axes.axvline(runs[0].typed.optim.warmup, color=GREY, lw=0.7, ls=":", zorder=1)
    for axes in sheet.axes[0]:
        axes.set_xlabel("")
    sheet.legend(handles(arms), 3)
    return Drawing(sheet.figure, table)


def _probed(runs: list[Run]) -> list[Run]:
    return [run for run in runs if len(run.layers.steps)]


def _ends(arms: list[Arm]) -> pd.DataFrame:
    """A row a run: losses at the end, and how low the entropies of the layers came after the shock."""
    rows = []
    for arm in arms:
        for run in finished(list(arm.runs)):
            start = run.typed.attention.temperature_from
            after = run.layers["entropy_mean"][run.layers.steps >= start]
            row = {"kind": "end", "arm": arm.name, "seed": run.seed, "start": start, "status": run.status}
            row |= {"final_loss": (run.outcome or {}).get("final", {}).get("loss"), "val_loss": run.final_val_loss}
            row["lowest_entropy"] = float(np.nanmin(after.mean(axis=1))) if len(after) else math.nan
            row["last_entropy"] = float(after[-WINDOW:].mean()) if len(after) else math.nan
            rows.append(row)
    return pd.DataFrame(rows)


def _caption(arms: list[Arm], runs: list[Run]) -> list[str]:
    one = runs[0]
    return [
        f"{model_text(one)}, peak learning rate {one.lr:g}; {recipe_text(one)}. {seeds_text(arms)} "
        "Vertical lines: where scores begin to be "
        "divided by τ, for the rest of the run (dotted: the end of the warm-up).",
        unfinished_text(runs),
    ]
