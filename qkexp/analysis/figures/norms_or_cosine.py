"""How much of the growth of the largest logit is length, how much alignment (Wortsman et al. 2023, appendix E.1)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pandas as pd

from qkexp.analysis.figures.curves import Arm, Panel, draw, handles
from qkexp.analysis.figures.grouping import over_seeds
from qkexp.analysis.figures.selection import (
    DoesNotFit,
    at_highest_rate,
    model_text,
    recipe_text,
    rows_of,
    unfinished_text,
)
from qkexp.analysis.figures.style import Drawing, canvas, styled
from qkexp.analysis.measures import onset
from qkexp.record.load import Run, Sweep
from qkexp.train.events import healthy_steps

SATURATED = 0.9  # attn max of the layer: up to there growth of logits still sharpens attention
PARTS: dict[str, tuple[str, str, Any, str]] = {
    "growth": ("growth of max |z|", "#333333", "-", "o"),
    "lengths": ("of it ‖q̂‖ · ‖k̂‖", "#0072B2", (0, (4, 1.5)), "s"),
    "alignment": ("of it |cos|", "#D55E00", (0, (1, 1.2)), "D"),
}
MEANS: dict[str, tuple[str, str, Any, str]] = {
    "mean_q": ("mean ‖q̂‖", "#56B4E9", "-", "^"),
    "mean_k": ("mean ‖k̂‖", "#009E73", (0, (4, 1.5)), "v"),
    "mean_cosine_gap": ("mean gap of a row in cosines", "#CC79A7", (0, (1, 1.2)), "P"),
}


@styled
def norms_or_cosine(sweep: Sweep) -> Drawing:
    """Draw, for the arm without norm at the highest rate, the exact parts of the growth in the first and last layer."""
    rate, variants = at_highest_rate(sweep)
    runs = [run for run in variants.get("none", []) if len(run.layers.steps) > healthy_steps(run.typed.train.steps)]
    if not runs:
        raise DoesNotFit("no run without a norm at the highest rate")
    places = {"first": 0, "last": len(runs[0].layers.layers) - 1}
    curves, summary = [], []
    for name, layer in places.items():
        found = [parts(run, layer) for run in runs]
        for metric in (*PARTS, *MEANS):
            rows = over_seeds([(t.step.to_numpy(), t[metric].to_numpy()) for t in found])
            curves.append(rows.assign(kind="curve", metric=metric, layer=name, arm={**PARTS, **MEANS}[metric][0]))
        summary += [row for run, table in zip(runs, found, strict=True) for row in _summary(run, table, layer, name)]
    table = pd.concat([*curves, pd.DataFrame(summary)], ignore_index=True)
    if not np.isfinite(table.loc[table.metric.isin([*PARTS, *MEANS]), "high"]).any():
        raise DoesNotFit("its runs have no logits, or only zeros, to take logarithms of")
    sheet = canvas(2, 2, panel=(3.6, 2.1), paragraphs=_caption(runs, rate, table), legend_rows=2, sharex=True)
    for column, name in enumerate(places):
        for row, kinds in enumerate((PARTS, MEANS)):
            axes = sheet.axes[row, column]
            for metric, (label, *look) in kinds.items():
                draw(axes, Panel(metric, "", "", name), table, [Arm(label, runs, *look)])
            axes.axhline(0.0, color="#999999", lw=0.6, zorder=1)
            axes.set_ylabel("change of log₁₀ since the start")
            axes.set_title(f"({'abcd'[2 * row + column]}) {name} layer, {('largest pair', 'means')[row]}")
            axes.set_xlabel("step" if row else "")
    for row, kinds in zip(sheet.axes, (PARTS, MEANS), strict=True):  # the layers on one scale
        shown = table[table.metric.isin(kinds)]
        for axes in row:
            if np.isfinite(shown.high).any():
                axes.set_ylim(min(-0.2, shown.low.min()), 1.05 * shown.high.max())
    sheet.legend(handles([Arm(label, [], *look) for label, *look in {**PARTS, **MEANS}.values()]), 3)
    return Drawing(sheet.figure, table)


def parts(run: Run, layer: int) -> pd.DataFrame:
    """A row a probed step: how log10 of each factor of max |z| of a layer differs from its healthy mean.

    log max |z| = log |scale| + log ‖q̂‖ + log ‖k̂‖ + log |cos| of the pair that attains it, exactly (without bias).
    The healthy mean is that of the first 5 % of steps, at least 20. ``mean_cosine_gap`` is the mean over rows of
    (max z - mean z), over scale and mean lengths: what alignment does to softmax, on average.
    """
    value = {name: np.abs(run.layers[name][:, layer]) for name in (
        "max_abs_logit", "max_pair_q_norm", "max_pair_k_norm", "max_pair_cos", "score_scale", "q_in_norm_mean",
        "k_in_norm_mean", "logit_gap_mean",
    )}  # fmt: skip
    with np.errstate(divide="ignore", invalid="ignore"):
        log = {name: np.log10(x) for name, x in value.items()}
    lengths = log["max_pair_q_norm"] + log["max_pair_k_norm"]
    means = log["q_in_norm_mean"] + log["k_in_norm_mean"]
    with np.errstate(invalid="ignore"):
        gap = log["logit_gap_mean"] - log["score_scale"] - means
    columns = {
        "growth": log["max_abs_logit"],
        "lengths": lengths,
        "alignment": log["max_pair_cos"],
        "scale": log["score_scale"],
        "mean_q": log["q_in_norm_mean"],
        "mean_k": log["k_in_norm_mean"],
        "mean_cosine_gap": gap,
    }
    healthy = run.layers.steps < healthy_steps(run.typed.train.steps)
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a mean of nothing is absent
        table = pd.DataFrame({name: x - np.nanmean(x[healthy]) for name, x in columns.items()})
    return table.assign(step=run.layers.steps, cosine=value["max_pair_cos"])


def _summary(run: Run, table: pd.DataFrame, layer: int, name: str) -> list[dict[str, Any]]:
    """The split when the layer's attention saturates, and at the end (mean of 20 probed steps each)."""
    ends = {"end": len(table)}
    at = onset(run.layers["attn_max_mean"][:, layer], SATURATED)
    if at is not None:
        ends["saturation"] = at + 1
    rows = []
    for when, stop in ends.items():
        mean = table.iloc[max(0, stop - 20) : stop].mean()
        row: dict[str, Any] = {
            "kind": "split",
            "layer": name,
            "seed": run.seed,
            "when": when,
            "step": int(table.step.iloc[stop - 1]),
        }
        row |= {metric: float(mean[metric]) for metric in (*PARTS, *MEANS, "cosine")}
        row["cosine_start"] = float(table.cosine[table.step < healthy_steps(run.typed.train.steps)].mean())
        row["share_of_lengths"] = row["lengths"] / row["growth"] if row["growth"] else math.nan
        row["residual"] = abs(row["growth"] - row["lengths"] - row["alignment"] - float(mean["scale"]))
        rows.append(row)
    return rows


def _caption(runs: list[Run], rate: float, table: pd.DataFrame) -> list[str]:
    split = table[(table.kind == "split")].groupby(["layer", "when"], sort=False).median(numeric_only=True)
    said = [
        f"{row.layer} layer, {row.when}: max |z| grew by 10^{row.growth:.1f}, {row.share_of_lengths:.0%} of it "
        f"lengths; |cos| of that pair {row.cosine_start:.2f} → {row.cosine:.2f}"
        for row in rows_of(split.reset_index())
    ]
    return [
        f"No norm, peak learning rate {rate:g}. {model_text(runs[0])}; {recipe_text(runs[0])}. Line: median of "
        f"{len(runs)} seeds; band: their range.",
        "a, b: of the pair that attains max |z|, log max |z| = log scale + log ‖q̂‖ + log ‖k̂‖ + log |cos|, exactly. "
        "c, d: mean lengths, and the mean over rows of (max − mean) of z over scale and mean lengths. The start is the "
        "mean of the first 5 % of steps.",
        f"Medians over seeds: {'; '.join(said)}. Saturation: the layer's attn max ≥ {SATURATED:g}.",
        unfinished_text(runs),
    ]
