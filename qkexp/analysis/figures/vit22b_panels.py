"""The panels of ViT-22B's Figure 1 (arXiv 2302.05442), and one of entropy: a norm against none, over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkexp.analysis.figures.selection import (
    DoesNotFit,
    at_highest_rate,
    constant_loss,
    ended_early,
    keys_per_row,
    model_text,
    recipe_text,
    rows_of,
    unfinished_text,
)
from qkexp.analysis.figures.style import (
    GREY,
    LAYER_STYLES,
    LEVEL_STYLE,
    Drawing,
    canvas,
    look,
    plain_log_ticks,
    rank,
    styled,
)
from qkexp.analysis.measures import GRAD_START, grad_growth, onset
from qkexp.record.load import Run, Sweep
from qkexp.train.outcome import ROSE, WINDOW, smooth

SATURATED = 0.9  # attn max of the first layer
EXPLODED = 5.0  # times the running minimum of the gradient norm
NO_LAYER = -1
BANDS = {"first": 0.2, "middle": 0.09, "last": 0.09}  # opacity: six full bands would hide each other
NUMBER_WIDTH = 0.075  # of a panel's width, for the number of an onset


@dataclass(frozen=True)
class Panel:
    """One panel; ``layered`` ones show the first, middle and last layer."""

    metric: str
    title: str
    unit: str
    log: bool
    layered: bool
    smoothed: bool = False


PANELS = (
    Panel("loss", "training loss", f"nats ({WINDOW}-step mean)", False, False, smoothed=True),
    Panel("grad_norm", "gradient norm", f"L2 norm ({WINDOW}-step mean)", True, False, smoothed=True),
    Panel("param_norm", "parameter norm", "L2 norm", False, False),
    Panel("max_abs_logit", "max |logit|", "logit", True, True),
    Panel("attn_max_mean", "attn max", "weight", False, True),
    Panel("entropy_mean", "attention entropy", "nats", False, True),
)


@styled
def vit22b_panels(sweep: Sweep) -> Drawing:
    """Draw six panels over steps at the highest rate: median and range over seeds, and what broke when."""
    rate, variants = at_highest_rate(sweep)
    shown = {name: variants[name] for name in _pair(variants) if any(len(r.scalars) for r in variants[name])}
    if not shown:
        raise DoesNotFit("no run at the highest rate has recorded a step")
    samples = pd.concat([_samples(run) for runs in shown.values() for run in runs], ignore_index=True)
    curves = _curves(samples, shown)
    onsets = _onsets(shown.get("none", []))
    ends = _ends(samples, shown)
    levels = _levels(shown)
    table = pd.concat([_rows(curves, "curve"), _rows(onsets, "onset"), _rows(ends, "ended"), _rows(levels, "level")])
    table.insert(3, "lr", rate)
    drawn = pd.concat([curves, ends, levels])

    handles = _legend(shown, curves, levels, ends)
    sheet = canvas(
        2,
        3,
        panel=(2.95, 2.1),
        paragraphs=_caption(shown, rate, onsets),
        legend_rows=-(-len(handles) // 4),
        sharex=True,
    )
    sheet.axes[0, 0].set_xlim(0, max(run.typed.train.steps for runs in shown.values() for run in runs))
    for letter, panel, axes in zip("abcdef", PANELS, sheet.axes.flat, strict=True):
        _draw(axes, panel, curves[curves.metric == panel.metric])
        _mark_onsets(axes, onsets)
        for row in rows_of(ends[ends.metric == panel.metric]):
            axes.plot(row.step, row.value, "x", color=look(row.variant).colour, ms=6, mew=1.6, zorder=6)
        for level in rows_of(levels[levels.metric == panel.metric]):
            axes.axhline(level.value, color=GREY, lw=0.9, ls=LEVEL_STYLE, zorder=1)
        _scale(axes, panel, drawn[drawn.metric == panel.metric], levels)
        axes.set_title(f"({letter}) {panel.title}", pad=14 if len(onsets) else 5)
    for axes in sheet.axes[-1]:
        axes.set_xlabel("step")
    sheet.legend(handles, 4)
    return Drawing(sheet.figure, table.reset_index(drop=True))


def _pair(variants: dict[str, list[Run]]) -> list[str]:
    """``none`` and ``layernorm``; for one that is missing the next that is there."""
    names = sorted(variants, key=rank)
    bare = [n for n in names if n == "none"]
    normed = ["layernorm"] if "layernorm" in names else [n for n in names if n != "none"][:1]
    return bare + normed


# ---------------------------------------------------------------- data


def shown_layers(layers: np.ndarray) -> dict[int, str]:
    """Layer -> first, middle or last; fewer where there are fewer layers."""
    if not len(layers):
        return {}
    places = {len(layers) // 2: "middle", len(layers) - 1: "last", 0: "first"}
    return {int(layers[i]): name for i, name in sorted(places.items())}


def _samples(run: Run) -> pd.DataFrame:
    """What one run contributes: metric, layer, step, value; values that were not measured are left out."""
    parts = []
    for panel in PANELS:
        if panel.layered:
            steps = run.layers.steps
            for layer in shown_layers(run.layers.layers):
                values = run.layers[panel.metric][:, list(run.layers.layers).index(layer)]
                parts.append(_sample(panel.metric, layer, steps, values))
        else:
            values = run.scalars[panel.metric].to_numpy(float)
            values = smooth(values) if panel.smoothed else values
            parts.append(_sample(panel.metric, NO_LAYER, run.scalars.step.to_numpy(), values))
    table = pd.concat(parts, ignore_index=True)
    table["variant"], table["seed"] = run.variant, run.seed
    return table[np.isfinite(table.value)]


def _sample(metric: str, layer: int, steps: np.ndarray, values: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"metric": metric, "layer": layer, "step": steps, "value": values})


def _curves(samples: pd.DataFrame, shown: dict[str, list[Run]]) -> pd.DataFrame:
    """Median, minimum and maximum over the seeds that have the step, while at least half of them do.

    Fewer would be the curve of the survivors, drawn as if it stood for all.
    """
    groups = samples.groupby(["metric", "variant", "layer", "step"], sort=True).value
    table = groups.agg(value="median", low="min", high="max", seeds="count").reset_index()
    total = table.variant.map({name: len(runs) for name, runs in shown.items()})
    return table[2 * table.seeds >= total]


def _onsets(runs: list[Run]) -> pd.DataFrame:
    """When each link broke, as the median over seeds; one that fewer than half of the seeds reach is left out."""
    found = {"saturates": _saturates, "turns": _turns, "explodes": _explodes}
    rows = []
    for name, find in found.items():
        steps = np.array([math.inf if (at := find(run)) is None else at for run in runs])
        middle = float(np.median(steps)) if len(steps) else math.inf
        if math.isfinite(middle):
            reached = steps[np.isfinite(steps)]
            row = {"metric": name, "step": middle, "low": reached.min(), "high": reached.max(), "seeds": len(reached)}
            rows.append({"variant": "none", **row})
    return pd.DataFrame(rows, columns=["metric", "variant", "step", "low", "high", "seeds"])


def _saturates(run: Run) -> int | None:
    """Step at which the first layer's attn max reaches 0.9."""
    if not len(run.layers.steps):
        return None
    at = onset(run.layers["attn_max_mean"][:, 0], SATURATED)
    return None if at is None else int(run.layers.steps[at])


def _turns(run: Run) -> int | None:
    """Step of the smallest smoothed loss, where the loss then rose by the rule that judges a run."""
    loss, limit = run.scalars.loss.to_numpy(float), constant_loss([run])
    if not len(loss) or limit is None:
        return None
    smoothed = smooth(loss)
    lowest = float(np.nanmin(smoothed))
    rose = lowest < limit and float(np.mean(loss[-WINDOW:])) > lowest + ROSE * (limit - lowest)
    return int(run.scalars.step.iloc[int(np.nanargmin(smoothed))]) if rose else None


def _explodes(run: Run) -> int | None:
    """Step at which the smoothed gradient norm reaches 5 times its running minimum."""
    at = onset(grad_growth(run.scalars.grad_norm.to_numpy(float)), EXPLODED)
    return None if at is None else int(run.scalars.step.iloc[at])


def _ends(samples: pd.DataFrame, shown: dict[str, list[Run]]) -> pd.DataFrame:
    """Last value of every curve of a run that ended early: where its marker stands."""
    early = [(run.variant, run.seed) for runs in shown.values() for run in runs if ended_early(run)]
    chosen = samples[[pair in early for pair in zip(samples.variant, samples.seed, strict=True)]]
    return chosen.sort_values("step").groupby(["metric", "variant", "layer", "seed"], as_index=False).last()


def _levels(shown: dict[str, list[Run]]) -> pd.DataFrame:
    """Horizontal lines: chance in the loss, uniform attention in the entropy."""
    runs = [run for runs in shown.values() for run in runs]
    chance, n = constant_loss(runs), _keys(runs)
    rows = [{"metric": "loss", "value": chance}] if chance is not None else []
    rows += [{"metric": "entropy_mean", "value": math.log(n)}] if n else []
    return pd.DataFrame(rows, columns=["metric", "value"])


def _keys(runs: Iterable[Run]) -> int | None:
    return next((n for run in runs if len(run.layers.steps) and (n := keys_per_row(run))), None)


def _rows(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    columns = ["metric", "variant", "layer", "step", "value", "low", "high", "seeds", "seed"]
    table = table.reindex(columns=columns)
    table.insert(0, "kind", kind)
    return table.astype({"layer": "Int64", "seeds": "Int64", "seed": "Int64"})


# ---------------------------------------------------------------- drawing


def _draw(axes: Axes, panel: Panel, curves: pd.DataFrame) -> None:
    # the norm first, so that the arm that breaks lies on top
    for variant in sorted(curves.variant.unique(), key=rank, reverse=True):
        names = shown_layers(np.sort(curves.layer.unique())) if panel.layered else {NO_LAYER: "first"}
        for layer, name in names.items():
            part = curves[(curves.variant == variant) & (curves.layer == layer)]
            _curve(axes, part, variant, name)


def _curve(axes: Axes, part: pd.DataFrame, variant: str, layer: str) -> None:
    here = look(variant)
    if (part.seeds > 1).any():
        axes.fill_between(part.step, part.low, part.high, color=here.colour, alpha=BANDS[layer], lw=0)
    every = max(1, len(part) // 5)
    start = every // 2 + {"first": 0, "middle": every // 6, "last": every // 3}[layer]
    marks: dict[str, Any] = {"marker": here.marker, "ms": 3.4, "mec": "white", "mew": 0.5, "markevery": (start, every)}
    axes.plot(
        part.step, part.value, color=here.colour, ls=LAYER_STYLES[layer], lw=1.3 if layer == "first" else 1.0, **marks
    )


def _scale(axes: Axes, panel: Panel, values: pd.DataFrame, levels: pd.DataFrame) -> None:
    axes.set_ylabel(panel.unit)
    if values.empty or values.value.isna().all():
        axes.text(0.5, 0.5, "not measured", color=GREY, ha="center", va="center", transform=axes.transAxes)
        return
    shown = values[["value", "low", "high"]].to_numpy(float)
    chance = levels.value[levels.metric == "loss"]
    exploded = panel.metric == "loss" and len(chance) and np.nanmax(shown) > 4 * chance.iloc[0]
    if panel.log or exploded:  # a loss that leaves for the sky would press all else onto the axis
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis, *axes.get_ylim())
    elif panel.metric == "attn_max_mean":
        axes.set_ylim(0, 1.03)
    else:
        axes.set_ylim(0, 1.06 * np.nanmax(shown))


def _mark_onsets(axes: Axes, onsets: pd.DataFrame) -> None:
    """A thin line at each onset, numbered above the panel; numbers that would overlap move apart."""
    steps = onsets.step.to_numpy(float)
    places = spread(steps, NUMBER_WIDTH * (axes.get_xlim()[1] - axes.get_xlim()[0]))
    for number, (step, place) in enumerate(zip(steps, places, strict=True), 1):
        axes.axvline(step, color="#333333", lw=0.7, zorder=2.5)
        axes.annotate(
            str(number),
            xy=(step, 1.0),
            xytext=(place, 1.06),
            xycoords=axes.get_xaxis_transform(),
            textcoords=axes.get_xaxis_transform(),
            ha="center",
            va="center",
            size=5.5,
            color="white",
            bbox={"boxstyle": "circle,pad=0.22", "fc": "#333333", "ec": "none"},
            arrowprops={"arrowstyle": "-", "lw": 0.7, "color": "#333333", "shrinkA": 0, "shrinkB": 0},
        )


def spread(wanted: np.ndarray, gap: float) -> np.ndarray:
    """Places at least ``gap`` apart, as near to the wanted ones as pushing neighbours apart evenly gets."""
    order = np.argsort(wanted, kind="stable")
    places = wanted[order].astype(float)
    for _ in range(50):
        for i in range(len(places) - 1):
            lack = gap - (places[i + 1] - places[i])
            if lack > 1e-9:
                places[i] -= lack / 2
                places[i + 1] += lack / 2
    out = np.empty_like(places)
    out[order] = places
    return out


# ---------------------------------------------------------------- legend and caption


def _legend(
    shown: dict[str, list[Run]], curves: pd.DataFrame, levels: pd.DataFrame, ends: pd.DataFrame
) -> list[Artist]:
    looks = [look(v) for v in shown]
    handles: list[Artist] = [Line2D([], [], color=k.colour, marker=k.marker, ms=4.5, label=k.label) for k in looks]
    names = shown_layers(np.unique(curves.layer[curves.layer != NO_LAYER]))
    handles += [
        Line2D([], [], color="#333333", ls=LAYER_STYLES[name], label=f"{name} layer ({layer}), d–f")
        for layer, name in names.items()
    ]
    if (curves.seeds > 1).any():
        handles.append(Patch(color=GREY, alpha=0.25, lw=0, label="range over seeds"))
    words = {"loss": "chance {:.2f} (a)", "entropy_mean": "uniform {:.2f} (f)"}
    if len(levels):
        text = ", ".join(words[row.metric].format(row.value) for row in rows_of(levels))
        handles.append(Line2D([], [], color=GREY, lw=0.9, ls=LEVEL_STYLE, label=text))
    if len(ends):
        handles.append(Line2D([], [], ls="", marker="x", mew=1.6, color="#333333", label="run ended: not finite"))
    return handles


def _caption(shown: dict[str, list[Run]], rate: float, onsets: pd.DataFrame) -> list[str]:
    runs = [run for cell in shown.values() for run in cell]
    n = _keys(runs)
    return [
        _onset_text(shown, onsets),
        f"{model_text(runs[0], n)}, peak learning rate {rate:g}; {recipe_text(runs[0])}. {_seed_text(shown)}",
        "Of a layer: max |logit| is the maximum over heads and pairs, before any cap; attn max the mean over heads and "
        "rows of the largest weight (how the published figure reduces it is not known); entropy the mean over both.",
        "What this size shows: which link breaks first, in which layer, and whether a norm of q and k prevents it. "
        "What it does not: the rate, step or logit at which a large model breaks (the published one has 8 B parameters)"
        + (f"; entropy here cannot exceed ln {n}." if n else "."),
        unfinished_text(runs),
    ]


def _onset_text(shown: dict[str, list[Run]], onsets: pd.DataFrame) -> str:
    if onsets.empty:
        return ""
    words = {
        "saturates": f"attention saturates (first layer's attn max ≥ {SATURATED:g})",
        "turns": "loss turns (smallest smoothed loss)",
        "explodes": f"gradient explodes (≥ {EXPLODED:g} × its running minimum from step {GRAD_START})",
    }
    total = len(shown["none"])
    parts = []
    for number, row in enumerate(rows_of(onsets), 1):
        some = f", {row.seeds} of {total} seeds" if row.seeds < total else ""
        parts.append(f"{'①②③'[number - 1]}\u00a0{words[row.metric]}, step {row.step:.0f}{some}")
    median = " (median over seeds)" if total > 1 else ""
    return f"Vertical lines, {look('none').label}{median}: {'; '.join(parts)}."


def _seed_text(shown: dict[str, list[Run]]) -> str:
    counts = {len(runs) for runs in shown.values()}
    if counts == {1}:
        return "One seed each."
    number = str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"Line: median of {number} seeds; band: their range."
