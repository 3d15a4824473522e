"""One run's chain of links over its steps: each link's score, its grid of thresholds and its onset interval."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qkexp.analysis.diagnose import ATTENTION, HARMLESS, HEALTHY, INCONCLUSIVE, Diagnosis, diagnose, interval
from qkexp.analysis.figures.selection import DoesNotFit, model_text, recipe_text, unfinished_text
from qkexp.analysis.figures.style import GREY, Drawing, canvas, look, styled
from qkexp.analysis.links import Attention, Scores, chance_loss, scores
from qkexp.analysis.onsets import BY_LINK, LINKS, Onset
from qkexp.record.load import Run, Sweep

HARM, WHEN = "#CC79A7", "#F0E442"  # the harm's beginning, an onset
LEAST = 1e-2  # scores under it are drawn at it: a score at or under 0 has no logarithm
MOST = 12  # runs of a sweep that are looked through for the one to draw, diverged ones first


@styled
def timeline(sweep: Sweep) -> Drawing:
    """Draw the run of a sweep that says most: with broken attention, else another harm, else the first."""
    runs = sorted(sweep.all.values(), key=lambda r: (r.status != "diverged", not r.outcome, r.name))[:MOST]
    found = [d for d in (diagnose(run, sweep) for run in runs) if d.evidence.steps]
    if not found:
        raise DoesNotFit("no run has recorded a step")
    return of_run(min(found, key=_rank), len(sweep.all))


def _rank(d: Diagnosis) -> int:
    return {ATTENTION: 0, INCONCLUSIVE: 3, HARMLESS: 2, HEALTHY: 4}.get(d.verdict, 1)


@styled
def of_run(d: Diagnosis, among: int = 1) -> Drawing:
    """Draw a diagnosed run; ``among`` so many of its sweep."""
    e = d.evidence
    mine = _scores(e.run, e.healthy)
    if not mine:
        raise DoesNotFit(f"{d.name}: nothing was recorded that has an onset")
    theirs = _scores(e.other, e.healthy) if e.other is not None else {}
    links = [link.name for link in LINKS if link.name in mine]
    sheet = canvas(len(links), 1, panel=(7.6, 0.52), paragraphs=_caption(d, among), legend_rows=2, sharex=True)
    rows = []
    for name, axes in zip(links, sheet.axes[:, 0], strict=True):
        rows += _strip(axes, name, mine[name], theirs.get(name), d)
    last = sheet.axes[-1, 0]
    end = max(int(s.steps[-1]) for s in mine.values())
    last.set_xlim(0, end * 1.22)  # room for the onsets in words
    last.set_xticks([t for t in MaxNLocator(6, integer=True).tick_values(0, end) if 0 <= t <= end + 1])
    last.set_xlabel("step", x=0.41)
    here = look(e.run.variant)
    handles = [
        Line2D([], [], color=here.colour, label=f"score, {here.label}"),
        Line2D([], [], color="#333333", lw=0.6, ls=":", label="thresholds"),
        Patch(color=WHEN, alpha=0.8, lw=0, label="onset"),
        Patch(color=GREY, alpha=0.18, lw=0, label="healthy stretch"),
    ]
    if theirs and e.other is not None:
        handles.insert(
            1, Line2D([], [], color=GREY, lw=0.9, ls="--", label=f"other arm: {look(e.other.variant).label}")
        )
    if e.harm is not None or e.jump is not None:
        handles.append(Patch(color=HARM, alpha=0.5, lw=0, label="harm begins"))
    sheet.legend(handles, 4)
    return Drawing(sheet.figure, pd.DataFrame(rows))


def _scores(run: Run, healthy: int) -> dict[str, Scores]:
    if not len(run.scalars):
        return {}
    found = scores(run, Attention.of(run.attention), healthy, chance_loss(run))
    # of a few points, such as one evaluation at the end, there is no curve
    return {name: s for name, s in found.items() if np.isfinite(s.values).any(axis=1).sum() >= 3}


def _strip(axes: Axes, name: str, mine: Scores, other: Scores | None, d: Diagnosis) -> list[dict[str, object]]:
    e, link = d.evidence, BY_LINK[name]
    onset = e.onsets.get(name)
    layer = onset.layer if onset is not None and onset.layer in mine.layers else mine.layers[0]
    curve = _curve(mine, layer)
    axes.axvspan(0, e.healthy, color=GREY, alpha=0.18, lw=0)
    if e.harm is not None:
        axes.axvspan(e.harm.early, max(e.harm.late, e.harm.early + 1), color=HARM, alpha=0.35, lw=0)
    if e.jump is not None:
        axes.axvline(e.jump.step, color=HARM, lw=1.2)
    if onset is not None and onset.early is not None:
        end = max(c.late for c in onset.crossings if c is not None)
        axes.axvspan(onset.early, max(end, onset.early + 1), color=WHEN, alpha=0.7, lw=0)
    for threshold in link.grid:
        axes.hlines(threshold, 0, mine.steps[-1], color="#333333", lw=0.5, ls=":", zorder=1)
    if other is not None and layer in other.layers:
        axes.plot(other.steps, _curve(other, layer), color=GREY, lw=0.8, ls="--", zorder=2)
    axes.plot(mine.steps, curve, color=look(e.run.variant).colour, lw=1.1, zorder=3)
    axes.set_yscale("log")
    top = float(np.nanmax(curve[np.isfinite(curve)], initial=link.grid[-1]))
    axes.set_ylim(max(LEAST, float(np.nanmin(curve)) * 0.7), top * 2)
    axes.set_yticks([link.grid[-1]], [f"{link.grid[-1]:g}"])
    axes.minorticks_off()
    axes.set_ylabel(_title(name), rotation=0, ha="right", va="center", size=7)
    axes.text(0.995, 0.5, _where(onset), transform=axes.transAxes, ha="right", va="center", size=6.5)
    rows: list[dict[str, object]] = [
        {"kind": "score", "link": name, "layer": layer, "step": int(s), "value": float(v)}
        for s, v in zip(mine.steps, curve, strict=True)
    ]
    if onset is not None:
        rows += [
            {
                "kind": "onset",
                "link": name,
                "layer": onset.layer,
                "head": onset.head,
                "threshold": t,
                "early": c.early,
                "step": c.late,
            }
            for t, c in zip(onset.grid, onset.crossings, strict=True)
            if c is not None
        ]
    return rows


def _curve(found: Scores, layer: int) -> np.ndarray:
    return np.maximum(found.values[:, found.layers.index(layer)], LEAST)


def _title(name: str) -> str:
    unit = {"growth": "× healthy", "to_one": "of the way to 1", "fall": "healthy / now", "rise": "of the way to chance"}
    return f"{BY_LINK[name].words}\n({unit[BY_LINK[name].kind]})"


def _where(onset: Onset | None) -> str:
    if onset is None or onset.early is None:
        return "never"
    place = f"layer {onset.layer}, head {onset.head}\n" if onset.layer >= 0 else ""
    return place + interval(onset).replace(" (", "\n(")


def _caption(d: Diagnosis, among: int) -> list[str]:
    e = d.evidence
    which = f" (the one of {among} runs that says most)" if among > 1 else ""
    firsts = {b: [BY_LINK[a].short for a, then in d.order if then == b] for b in ("entropy", "grad_qk", "loss")}
    held = [f"{', '.join(names)} before {BY_LINK[b].short}" for b, names in firsts.items() if names]
    return [
        f"{d.name}{which}: {d.verdict.replace('_', ' ')}. " + "; ".join(d.words) + ".",
        "Held over the whole grid of thresholds: " + "; ".join(held) + "." if held else "",
        f"{model_text(e.run)}, peak learning rate {e.run.lr:g}; {recipe_text(e.run)}.",
        "A score is a number over its healthy median (first 5 % of the run, at least 20 steps), or as the axis says; "
        "three thresholds, mild to severe; an onset holds the first crossings of all three. The layer is the one that "
        "crossed first, the head in it the one furthest then.",
        unfinished_text([e.run]) if not math.isnan(e.final_loss) else "",
    ]
