"""Branches of one run: what went on after the step at which each changed something, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.arms import PANELS, Panel, arm_look, curve
from qkexp.analysis.figures.selection import DoesNotFit, model_text, recipe_text, unfinished_text
from qkexp.analysis.figures.style import GREY, Drawing, canvas, look, plain_log_ticks, styled
from qkexp.record.load import Run, Sweep

MOST = 4  # branch steps in one figure
ORDER = ("unchanged", "norm", "frozen_qk", "slow_qk", "slow")


@styled
def branches(sweep: Sweep) -> Drawing:
    """Draw a row a branch step: loss, largest |logit|, smallest entropy and gradient norm of every arm."""
    cells = _cells(sweep)
    table = _table(cells)
    arms = {run.arm: run for runs in cells.values() for run in runs}
    handles = _legend(arms)
    panels = list(PANELS.values())
    sheet = canvas(
        len(cells),
        len(panels),
        panel=(2.35, 1.95),
        paragraphs=_caption(sweep, cells),
        legend_rows=-(-len(handles) // 4),
    )
    for row, (step, runs) in enumerate(cells.items()):
        for column, panel in enumerate(panels):
            axes = sheet.axes[row, column]
            shown = table[(table.metric == panel.metric) & (table.branch_step == step)]
            _draw(axes, panel, shown, runs, step)
            if row == 0:
                axes.set_title(panel.title)
            axes.set_ylabel(panel.unit if column else f"at step {step}\n{panel.unit}")
            axes.set_xlabel("step")
    sheet.legend(handles, 4)
    return Drawing(sheet.figure, table)


Cells = dict[int, list[Run]]


def _cells(sweep: Sweep) -> Cells:
    """Branch step -> its arms, the one that changes nothing first.

    Raises:
        DoesNotFit: no branches of one run, or too many steps.
    """
    runs = [run for run in sweep.all.values() if run.arm is not None and len(run.scalars)]
    if not runs:
        raise DoesNotFit("no branches (qkexp branch RUN --at STEP)")
    if len({run.typed.branch.parent for run in runs}) > 1:
        raise DoesNotFit("branches of more than one run")
    found: Cells = {}
    place = {name: number for number, name in enumerate(ORDER)}
    for run in sorted(runs, key=lambda r: (r.typed.branch.step, place.get(r.arm or "", len(ORDER)), r.arm)):
        found.setdefault(int(run.typed.branch.step or 0), []).append(run)
    if len(found) > MOST:
        raise DoesNotFit(f"branches at more than {MOST} steps")
    return found


def _table(cells: Cells) -> pd.DataFrame:
    """Tidy rows of every arm from its branch step on, and of what they share before it (arm ``shared``)."""
    rows = []
    for step, runs in cells.items():
        for panel in PANELS.values():
            before = curve(runs[0], panel, branch_step=step, arm="shared")
            rows.append(before[before.step < step])
            for run in runs:
                after = curve(run, panel, branch_step=step, arm=run.arm)
                rows.append(after[after.step >= step - 1])  # they leave the shared line where it ends
    return pd.concat(rows, ignore_index=True)


def _draw(axes: Axes, panel: Panel, rows: pd.DataFrame, runs: list[Run], step: int) -> None:
    shared = rows[rows.arm == "shared"]
    axes.plot(shared.step, shared.value, color="#222222", lw=1.2)
    axes.axvline(step, color=GREY, lw=0.9, ls=":", zorder=1)
    for run in runs:
        line = rows[rows.arm == run.arm]
        here = arm_look(run.arm or "", runs[0].variant)
        axes.plot(line.step, line.value, color=here.colour, lw=1.1, zorder=3)
        if len(line):
            early = (run.outcome or {}).get("final", {}).get("val_loss") is None
            mark: dict[str, Any] = {"marker": "x", "ms": 6, "mew": 1.6} if early else {"marker": here.marker, "ms": 4}
            axes.plot(line.step.iloc[-1], line.value.iloc[-1], color=here.colour, zorder=5, clip_on=False, **mark)
    axes.set_xlim(0, runs[0].typed.train.steps)
    values = rows.value[np.isfinite(rows.value)]
    if panel.log and (values > 0).any():
        axes.set_yscale("log")
        low, high = values[values > 0].min() / 1.4, values.max() * 1.6
        axes.set_ylim(low, high)
        plain_log_ticks(axes.yaxis, low, high)
    else:
        axes.set_ylim(0, max(values.max(), 1e-9) * 1.05)


def _legend(arms: dict[str | None, Run]) -> list[Any]:
    variant = next((run.variant for run in arms.values() if run.arm == "unchanged"), "none")
    handles = [Line2D([], [], color="#222222", lw=1.2, label="the run before the step")]
    for name in sorted(arms, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n or "")):
        here = arm_look(name or "", variant)
        label = f"{here.label} ({look(variant).label})" if name == "unchanged" else here.label
        handles.append(Line2D([], [], color=here.colour, marker=here.marker, ms=4, label=label))
    return handles


def _caption(sweep: Sweep, cells: Cells) -> list[str]:
    first = next(iter(cells.values()))[0]
    return [
        f"Branches of one run: {model_text(first)}; {recipe_text(first)}; peak rate {first.lr:g}, seed {first.seed}.",
        "Dotted: the step at which the arms part; before it they share every row, after it every batch. A cross: ended "
        "early, not finite. Smoothed curves carry up to 20 steps from before it.",
        unfinished_text(sweep.all.values()),
    ]
