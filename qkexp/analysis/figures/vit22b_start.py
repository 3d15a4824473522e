"""What the start of W_q and W_k changes: no norm from timm's own start and from a matched one, beside a norm."""

from __future__ import annotations

import pandas as pd

from qkexp.analysis.figures.curves import Arm, Panel, curves, draw, handles, seeds_text
from qkexp.analysis.figures.grouping import groups
from qkexp.analysis.figures.selection import DoesNotFit, model_text, recipe_text, unfinished_text
from qkexp.analysis.figures.style import Drawing, canvas, look, styled
from qkexp.record.load import Sweep
from qkexp.train.outcome import WINDOW

PANELS = (
    Panel("loss", "(a) training loss", f"nats ({WINDOW}-step mean)"),
    Panel("grad_norm", "(b) gradient norm", f"L2 norm ({WINDOW}-step mean)", log=True),
    Panel("max_abs_logit", "(c) max |logit|, first layer", "logit", 0, log=True),
    Panel("attn_max_mean", "(d) attn max, first layer", "weight", 0),
)
STARTS = {"timm": ("timm's start", (0, (4, 1.5))), "match": ("matched start", "-")}


@styled
def vit22b_start(sweep: Sweep) -> Drawing:
    """Draw loss, gradient, logits and attn max of each variant and start."""
    found = groups(sweep, "variant", "attention.init", "optim.lr")
    if len({start for _, start, _ in found}) < 2 or len({lr for *_, lr in found}) > 1:
        raise DoesNotFit("needs runs at one rate from two starts (attention.init)")
    arms = []
    for (variant, start, _), runs in found.items():
        probed = [run for run in runs if len(run.layers.steps)]
        words, style = STARTS[start]
        if probed:
            arms.append(
                Arm(f"{look(variant).label}, {words}", probed, look(variant).colour, style, look(variant).marker)
            )
    table = curves(arms, PANELS)
    runs = [run for arm in arms for run in arm.runs]
    caption = [
        f"{model_text(runs[0])}, peak learning rate {runs[0].lr:g}; {recipe_text(runs[0])}. {seeds_text(arms)}",
        "timm's start is std 0.02 for every weight, which leaves un-normed attention uniform at first; the matched one "
        "scales W_q and W_k of un-normed variants so that logits spread as under RMSNorm.",
        unfinished_text(runs),
    ]
    sheet = canvas(2, 2, panel=(3.6, 2.0), paragraphs=caption, legend_rows=-(-len(arms) // 2), sharex=True)
    for panel, axes in zip(PANELS, sheet.axes.flat, strict=True):
        draw(axes, panel, table, arms)
    for axes in sheet.axes[0]:
        axes.set_xlabel("")
    sheet.legend(handles(arms), 2)
    return Drawing(sheet.figure, pd.DataFrame(table))
