"""Block norm × QK norm × soft-cap: which scale each of them controls."""

from __future__ import annotations

import pandas as pd

from qkexp.analysis.figures.dots import Arm, Panel, marks, measured, medians, panel_row
from qkexp.analysis.figures.selection import DoesNotFit, constant_loss, model_text, recipe_text
from qkexp.analysis.figures.style import Drawing, canvas, look, rank, styled
from qkexp.analysis.measures import largest
from qkexp.record.load import Run, Sweep

KEY = "model.block_norm"
PLACES = {
    "pre": "block norm before",
    "post": "block norm after the sum",
    "res_post": "block norm after the branch",
    "none": "no block norm",
    "parallel": "block norm parallel",
}
METRICS = {
    "residual": "block_out_rms",
    "raw_logit": "max_abs_logit",
    "capped_logit": "max_logit_capped",
    "length": "q_in_norm_mean",
}


@styled
def three_places(sweep: Sweep) -> Drawing:
    """Draw, for each combination and rate, the largest residual stream, raw score and capped score, and the loss."""
    table = _table(sweep)
    if table.empty:
        raise DoesNotFit("no run has ended yet")
    if table["block_norm"].nunique() < 2 or table.variant.nunique() < 2:
        raise DoesNotFit("needs runs that differ in model.block_norm and in the attention's norm or cap")
    chance = constant_loss(sweep.all.values())
    panels = [
        Panel("residual", "residual stream", "largest RMS of a block's output"),
        Panel("raw_logit", "raw score", "largest |z|, before any cap"),
        Panel("capped_logit", "what softmax sees", "largest score after the cap", level=50.0),
        Panel("val_loss", "final validation loss", "nats", level=chance),
    ]
    arms = _arms(table)
    rates = sorted(table.lr.unique())
    sheet = canvas(
        len(rates), len(panels), panel=(2.6, 0.7 + 0.2 * len(arms)), paragraphs=_caption(sweep), legend_rows=1
    )
    for number, rate in enumerate(rates):
        panel_row(sheet.axes[number], table[table.lr == rate], arms, panels, f"rate {rate:g}")
    sheet.legend(marks(table, panels), 4)
    return Drawing(sheet.figure, table)


def _table(sweep: Sweep) -> pd.DataFrame:
    """Rows of kind run and median: a metric's largest value over steps and layers, and the final validation loss."""
    columns = {name: largest(metric) for name, metric in METRICS.items()}
    table = measured(sweep, {"block_norm": _block_norm, **columns, "val_loss": lambda run: run.final_val_loss}, {KEY})
    if table.empty:
        return table
    table["arm"] = [f"{PLACES[b]}, {look(v).label}" for b, v in zip(table.block_norm, table.variant, strict=True)]
    return medians(table, ["variant", "block_norm", "arm", "lr"], [*METRICS, "val_loss"])


def _block_norm(run: Run) -> str:
    return run.typed.model.block_norm


def _arms(table: pd.DataFrame) -> list[Arm]:
    kinds = table[["block_norm", "variant", "arm"]].drop_duplicates()
    places = list(PLACES)
    ordered = sorted(kinds.to_dict("records"), key=lambda r: (places.index(r["block_norm"]), rank(r["variant"])))
    found, before = [], None
    for row in ordered:
        found.append(Arm(row["arm"], row["variant"], gap=before not in (None, row["block_norm"])))
        before = row["block_norm"]
    return found


def _caption(sweep: Sweep) -> list[str]:
    first = next(iter(sweep.all.values()))
    return [
        f"{model_text(first)}; {recipe_text(first)}. Largest: over probed steps and layers.",
        "The block norm acts on what the residual stream hands to a branch, the QK norm on the lengths that enter the "
        "dot product, the cap on the score that softmax sees (a raw score behind it may still run away).",
    ]
