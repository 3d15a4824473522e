"""Do the learned Q and K projections break the training? Loss and logits with Q and K trained, slowed and frozen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.arms import PANELS, Panel, arm_look, curve
from qkexp.analysis.figures.selection import (
    DoesNotFit,
    constant_loss,
    model_text,
    recipe_text,
    rows_of,
    unfinished,
    unfinished_text,
)
from qkexp.analysis.figures.style import GREY, LEVEL_STYLE, Drawing, canvas, look, rank, styled
from qkexp.analysis.stability import MIN_SEEDS
from qkexp.config import identity_keys
from qkexp.record.load import Run, Sweep

ROWS = (PANELS["loss"], PANELS["max_abs_logit"])
VARIED = {"optim.qk_lr_scale", "attention.init", "seed", "model.seed", "data.seed"}
_WORDS = {"trained": "trained", "slow_qk": "× 0.1", "frozen_qk": "frozen"}
RUN_COLUMNS = ["final_loss", "final_val_loss", "max_abs_logit", "entropy_frac"]


@styled
def cause(sweep: Sweep) -> Drawing:
    """Draw a column a start and variant: training loss and largest |logit| over steps, a line a seed."""
    cells = _cells(sweep)
    table = _table(cells)
    chance = constant_loss(sweep.all.values())
    handles = _legend(cells, chance)
    sheet = canvas(
        len(ROWS),
        len(cells),
        panel=(2.3, 1.9),
        paragraphs=_caption(sweep, table),
        legend_rows=-(-len(handles) // 4),
        sharex=True,
    )
    for column, (init, variant) in enumerate(cells):
        for row, panel in enumerate(ROWS):
            rows = table[(table.kind == "curve") & (table.metric == panel.metric)]
            axes = sheet.axes[row, column]
            _draw(axes, panel, rows[(rows.init == init) & (rows.variant == variant)])
            _scale(axes, panel, rows, chance)
            if column:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel(f"{panel.title}\n{panel.unit}")
        sheet.axes[0, column].set_title(f"{look(variant).label}, init={init}")
        sheet.axes[-1, column].set_xlabel("step")
    sheet.legend(handles, 4)
    return Drawing(sheet.figure, table)


Cells = dict[tuple[str, str], list[Run]]


def _cells(sweep: Sweep) -> Cells:
    """(start, variant) -> its runs, by the factor on the rate of Q and K (the largest first) and seed.

    Raises:
        DoesNotFit: one factor only, or runs that differ in something else.
    """
    runs = [run for run in sweep.all.values() if len(run.scalars)]
    if len({run.typed.optim.qk_lr_scale for run in runs}) < 2:
        raise DoesNotFit("needs runs at two or more values of optim.qk_lr_scale")
    found: Cells = {}
    for run in sorted(runs, key=lambda r: (rank(r.variant), r.typed.attention.init, -_factor(r), r.seed)):
        found.setdefault((run.typed.attention.init, run.variant), []).append(run)
    for runs in found.values():
        kept = [{k: v for k, v in identity_keys(run.typed).items() if k not in VARIED} for run in runs]
        if any(other != kept[0] for other in kept):
            raise DoesNotFit("runs of a variant differ in more than optim.qk_lr_scale, attention.init and seed")
    return found


def _factor(run: Run) -> float:
    return run.typed.optim.qk_lr_scale


def arm(factor: float) -> str:
    """The name of an arm by its factor on the rate of Q and K."""
    return {1.0: "trained", 0.1: "slow_qk", 0.0: "frozen_qk"}.get(factor, f"qk_rate_x_{factor:g}")


# ---------------------------------------------------------------- data


def _table(cells: Cells) -> pd.DataFrame:
    """Rows of kind curve, run (its ends) and median (over seeds, where they are enough)."""
    curves, ends = [], []
    for (init, variant), runs in cells.items():
        for run in runs:
            place = {"init": init, "variant": variant, "arm": arm(_factor(run)), "qk_lr_scale": _factor(run)}
            curves += [curve(run, panel, **place, seed=run.seed) for panel in ROWS]
            if not unfinished(run):
                ends.append({"kind": "run", **place, "seed": run.seed, **_ends(run)})
    last = pd.DataFrame(ends, columns=["kind", "init", "variant", "arm", "qk_lr_scale", "seed", *RUN_COLUMNS])
    arms = last.groupby(["init", "variant", "arm", "qk_lr_scale"], as_index=False)
    medians = arms[RUN_COLUMNS].median().assign(kind="median", seeds=arms.size()["size"])
    tables = [*curves, last, medians[medians.seeds >= MIN_SEEDS]]
    return pd.concat([t for t in tables if len(t)], ignore_index=True).astype({"seed": "Int64"})


def _ends(run: Run) -> dict[str, Any]:
    """Mean of the last 20 steps: training loss, largest |logit| and smallest entropy of the layers."""
    final = (run.outcome or {}).get("final", {})
    logits, entropy = (PANELS[name].values(run)[1][-20:] for name in ("max_abs_logit", "entropy_frac"))
    return {
        "final_loss": final.get("loss"),
        "final_val_loss": run.final_val_loss,
        "max_abs_logit": float(np.mean(logits)) if len(logits) else np.nan,
        "entropy_frac": float(np.mean(entropy)) if len(entropy) else np.nan,
    }


# ---------------------------------------------------------------- drawing


def _draw(axes: Axes, panel: Panel, rows: pd.DataFrame) -> None:
    for (name, _), line in rows.groupby(["arm", "seed"], sort=False):
        here = arm_look(str(name), str(line.variant.iloc[0]))
        axes.plot(line.step, line.value, color=here.colour, lw=0.9, alpha=0.9)
        end = line.iloc[-1]
        axes.plot(end.step, end.value, here.marker, color=here.colour, ms=3.5, clip_on=False, zorder=5)


def _scale(axes: Axes, panel: Panel, rows: pd.DataFrame, chance: float | None) -> None:
    """The same axis in every column."""
    axes.grid(axis="y", color="#EEEEEE", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlim(0, rows.step.max() + 1)
    values = rows.value[np.isfinite(rows.value)]
    if panel.log:
        axes.set_yscale("log")
        axes.set_ylim(values[values > 0].min() / 1.4, values.max() * 1.6)
        return
    axes.set_ylim(0, max(values.max(), chance or 0.0) * 1.05)
    if chance is not None:
        axes.axhline(chance, color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)


def _legend(cells: Cells, chance: float | None) -> list[Any]:
    handles: list[Any] = []
    for variant in dict.fromkeys(variant for _, variant in cells):
        here = arm_look("trained", variant)
        label = f"Q and K trained, {look(variant).label}"
        handles.append(Line2D([], [], color=here.colour, marker=here.marker, ms=4, label=label))
    factors = sorted({_factor(run) for runs in cells.values() for run in runs if _factor(run) != 1.0}, reverse=True)
    for name in (arm(factor) for factor in factors):
        here = arm_look(name, "none")
        handles.append(Line2D([], [], color=here.colour, marker=here.marker, ms=4, label=here.label))
    if chance is not None:
        handles.append(Line2D([], [], color=GREY, lw=0.9, ls=LEVEL_STYLE, label=f"chance, {chance:.2f}"))
    return handles


def _caption(sweep: Sweep, table: pd.DataFrame) -> list[str]:
    first = next(iter(sweep.all.values()))
    rates = sorted({run.lr for run in sweep.all.values()})
    medians = table[table.kind == "median"].sort_values(
        ["variant", "init", "qk_lr_scale"], ascending=[True, True, False]
    )
    said = []
    for (variant, init), rows in medians.groupby(["variant", "init"]):
        parts = [f"{_WORDS.get(row.arm, row.arm)} {row.final_loss:.2g}" for row in rows_of(rows)]
        said.append(f"{look(str(variant)).label}, {init}: {', '.join(parts)}")
    return [
        f"{model_text(first)}; {recipe_text(first)}; peak rate {', '.join(f'{r:g}' for r in rates)}. A line a seed, "
        "with a mark where it ends.",
        "Frozen: W_q and W_k keep their initial bits. init=match scales W_q and W_k of the arm without norm to the "
        "spread of logits that RMSNorm starts with; it changes nothing under a norm.",
        f"Median final training loss (last 20 steps): {'; '.join(said)}." if said else "",
        unfinished_text(sweep.all.values()),
    ]
