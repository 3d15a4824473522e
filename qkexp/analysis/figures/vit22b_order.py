"""The order of events over a grid of thresholds: an order that one choice of them shows may hang on the choice."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.selection import (
    DoesNotFit,
    at_highest_rate,
    constant_loss,
    model_text,
    recipe_text,
    rows_of,
)
from qkexp.analysis.figures.style import GREY, Drawing, canvas, styled
from qkexp.analysis.measures import GRAD_START, grad_growth, onset
from qkexp.record.load import Run, Sweep
from qkexp.train.outcome import ROSE, smooth

# the grids: first layer's attn max; how far the loss has risen from its minimum back to chance; growth of the gradient
ATTENTION = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
TURN = (0.0, 0.05, 0.1, 0.2, 0.4)
GRADIENT = (2.0, 3.0, 5.0, 10.0, 30.0)
LINKS = {"attention": ATTENTION, "loss": TURN, "gradient": GRADIENT}
WORDS = {"attention": "attn max of the first layer", "loss": "loss turned", "gradient": "gradient norm grown"}
COLOURS = {"attention": "#009E73", "loss": "#0072B2", "gradient": "#D55E00"}
PAIRS = (("attention", "loss"), ("loss", "gradient"), ("attention", "gradient"))
SHOWN = 12  # seeds that are drawn; the table has all of them
PUBLISHED = "attention < loss < gradient"


@styled
def vit22b_order(sweep: Sweep) -> Drawing:
    """Draw, for the arm without norm at the highest rate, when each link reaches each threshold, a line a seed."""
    rate, variants = at_highest_rate(sweep)
    runs = [run for run in variants.get("none", []) if len(run.scalars) and len(run.layers.steps)]
    if not runs:
        raise DoesNotFit("no run without a norm at the highest rate")
    table = pd.concat([_table(run) for run in runs], ignore_index=True)
    shown = runs[:SHOWN]
    if table.step.isna().all():
        raise DoesNotFit("no link of the chain reaches any threshold")
    rows = len(shown)
    sheet = canvas(1, 1, panel=(7.0, 0.9 + 0.62 * rows), paragraphs=_caption(runs, rate, table), legend_rows=1)
    axes = sheet.axes[0, 0]
    for place, run in enumerate(shown):
        _draw(axes, table[table.seed == run.seed], place)
    axes.set_yticks(range(rows), [f"seed {run.seed}" for run in shown])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * table.step.max() + 1)
    axes.set_xlabel("step at which a threshold is reached")
    handles = [Line2D([], [], color=COLOURS[k], marker="o", ms=5, label=WORDS[k]) for k in LINKS]
    sheet.legend(handles, 3)
    return Drawing(sheet.figure, table)


def _table(run: Run) -> pd.DataFrame:
    """Rows of kind onset (a threshold each), order (a triple of thresholds each) and share (of the grid).

    ``holds`` is absent where a link of the order never comes.
    """
    steps = onsets(run)
    rows = [{"kind": "onset", "link": link, "threshold": t, "step": at} for (link, t), at in steps.items()]
    orders: list[dict[str, Any]] = []
    for a, b, c in itertools.product(ATTENTION, TURN, GRADIENT):
        at = {"attention": steps["attention", a], "loss": steps["loss", b], "gradient": steps["gradient", c]}
        here = {"attention": a, "loss": b, "gradient": c}
        known = all(math.isfinite(step) for step in at.values())
        holds = float(at["attention"] < at["loss"] < at["gradient"]) if known else math.nan
        orders.append({"kind": "order", "link": PUBLISHED, **here, "holds": holds})
    pairs = {PUBLISHED: [float(row["holds"]) for row in orders]}
    for one, other in PAIRS:
        both = [(steps[one, s], steps[other, t]) for s, t in itertools.product(LINKS[one], LINKS[other])]
        pairs[f"{one} < {other}"] = [float(s < t) for s, t in both if math.isfinite(s) and math.isfinite(t)]
    shares = []
    for name, held in pairs.items():
        sure = [h for h in held if not math.isnan(h)]
        share = float(np.mean(sure)) if sure else math.nan
        shares.append({"kind": "share", "link": name, "share": share, "combinations": len(sure)})
    columns = ["kind", "seed", "link", "threshold", "step", *LINKS, "holds", "share", "combinations"]
    return pd.DataFrame([*rows, *orders, *shares]).assign(seed=run.seed)[columns]


def onsets(run: Run) -> dict[tuple[str, float], float]:
    """(link, threshold) -> the step at which it is reached; NaN: never.

    The loss turns at its smallest smoothed value (threshold 0), where it later rose by the rule that judges runs, and
    has turned by a share f at the first step after that at which it is over m + f (chance - m), m that value.
    """
    found: dict[tuple[str, float], float] = {}
    first = run.layers["attn_max_mean"][:, 0]
    for t in ATTENTION:
        at = onset(first, t)
        found["attention", t] = math.nan if at is None else float(run.layers.steps[at])
    step, chance = run.scalars.step.to_numpy(), constant_loss([run])
    loss = smooth(run.scalars.loss.to_numpy(float))
    lowest = int(np.nanargmin(loss))
    turned = chance is not None and np.nanmax(loss[lowest:]) > loss[lowest] + ROSE * (chance - loss[lowest])
    for t in TURN:
        at = lowest if t == 0.0 else None
        if turned and t > 0.0:
            assert chance is not None
            at = onset(loss, loss[lowest] + t * (chance - loss[lowest]), lowest)
        found["loss", t] = float(step[at]) if turned and at is not None else math.nan
    growth = grad_growth(run.scalars.grad_norm.to_numpy(float))
    for t in GRADIENT:
        at = onset(growth, t)
        found["gradient", t] = math.nan if at is None else float(step[at])
    return found


def _draw(axes: Axes, rows: pd.DataFrame, place: int) -> None:
    for offset, (link, grid) in zip((-0.24, 0.0, 0.24), LINKS.items(), strict=True):
        here = rows[(rows.kind == "onset") & (rows.link == link)]
        seen = here[here.step.notna()]
        axes.plot(seen.step, np.full(len(seen), place + offset), color=COLOURS[link], lw=0.8, zorder=2)
        for row in rows_of(seen):  # a stricter threshold is a larger point
            size = 2.2 + 1.1 * grid.index(row.threshold)
            axes.plot(row.step, place + offset, "o", ms=size, color=COLOURS[link], mec="white", mew=0.4, zorder=3)
        if len(seen) < len(grid):
            text = f"{len(grid) - len(seen)} of {len(grid)} never"
            at = float(seen.step.max()) if len(seen) else 0.0
            axes.annotate(text, (at, place + offset), (8, -2), textcoords="offset points", size=6, color=GREY)
    share = rows[(rows.kind == "share") & (rows.link == PUBLISHED)].iloc[0]
    text = "no order" if math.isnan(share.share) else f"holds in {share.share:.0%}\nof {share.combinations:.0f}"
    axes.text(0.995, place, text, size=7, ha="right", va="center", transform=axes.get_yaxis_transform())


def _caption(runs: list[Run], rate: float, table: pd.DataFrame) -> list[str]:
    shares = table[table.kind == "share"].groupby("link", sort=False).share.agg(["min", "max"])
    said = "; ".join(f"{name}: {row['min']:.0%} to {row['max']:.0%}" for name, row in shares.iterrows())
    return [
        f"No norm, peak learning rate {rate:g}. {model_text(runs[0])}; {recipe_text(runs[0])}.",
        f"Thresholds, small points to large: attn max {_list(ATTENTION)}; loss risen by {_list(TURN)} of the way from "
        f"its smallest smoothed value to chance (0: the turn itself); gradient norm {_list(GRADIENT)} times its "
        f"running minimum from step {GRAD_START}.",
        f"On the right: the share of all combinations of thresholds, among those that all three links reach, in which "
        f"the published order (attention, loss, gradient) holds. Over seeds: {said}."
        + (f" Drawn: the first {SHOWN} of {len(runs)} seeds." if len(runs) > SHOWN else ""),
    ]


def _list(grid: tuple[float, ...]) -> str:
    return ", ".join(f"{x:g}" for x in grid)
