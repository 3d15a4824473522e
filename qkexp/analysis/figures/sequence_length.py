"""What the number of tokens does: to logits at the start, and to training with and without a norm and log-N scaling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from qkexp.analysis.figures.grouping import finished, groups
from qkexp.analysis.figures.selection import DoesNotFit, keys_per_row, model_text, recipe_text, unfinished_text
from qkexp.analysis.figures.style import GREY, LEVEL_STYLE, Drawing, canvas, look, styled
from qkexp.record.load import Run, Sweep

SCALES = {"inv_sqrt_d": ("1/√d", "-"), "ssmax": ("s ln N / √d (SSMax)", (0, (4, 1.5)))}
DRAWN = ("final_val_loss", "max_abs_logit", "entropy_frac")
NOISE = {"keys": tuple(2**n for n in range(2, 13)), "width": 64, "rows": 2000}


@styled
def sequence_length(sweep: Sweep) -> Drawing:
    """Draw the spread of independent logits against N, and what training made of each N, norm and scale."""
    found = groups(sweep, "model.patch", "data.image_size", "attention.norm", "attention.scale", "optim.lr")
    if len({key[:2] for key in found}) < 2 or len({key[-1] for key in found}) > 1:
        raise DoesNotFit("needs runs at one rate with two or more numbers of tokens")
    rows = [_row(run) for runs in found.values() for run in finished(runs) if keys_per_row(run)]
    if not rows:
        raise DoesNotFit("no run has ended yet")
    trained = pd.DataFrame(rows).sort_values(["norm", "scale", "tokens", "seed"], ignore_index=True)
    noise = spread_at_start(**NOISE)  # type: ignore[arg-type]
    runs = [run for each in found.values() for run in each]
    sheet = canvas(2, 2, panel=(3.6, 2.2), paragraphs=_caption(runs), legend_rows=2)
    _draw_noise(sheet.axes[0, 0], noise)
    titles = {
        "final_val_loss": ("(b) final validation loss", "nats"),
        "max_abs_logit": ("(c) largest logit of the run", "max |z|, any layer"),
        "entropy_frac": ("(d) entropy at the end, sharpest layer", "H / ln N"),
    }
    for axes, metric in zip(sheet.axes.flat[1:], DRAWN, strict=True):
        _draw(axes, trained, metric)
        axes.set_title(titles[metric][0])
        axes.set_ylabel(titles[metric][1])
        axes.set_xlabel("tokens N")
        if metric != "entropy_frac":
            axes.set_yscale("log")
    sheet.axes[1, 1].set_ylim(0, 1.05)
    sheet.legend(_legend(trained), 3)
    return Drawing(sheet.figure, pd.concat([noise.assign(kind="start"), trained.assign(kind="run")], ignore_index=True))


def spread_at_start(keys: tuple[int, ...], width: int, rows: int) -> pd.DataFrame:
    """Independent Gaussian q and k of d = ``width`` channels: a row a number of keys N.

    ``std`` is that of a row's logits about their mean, ``largest`` the mean over rows of their maximum; over std it is
    to be compared with √(2 ln N), which it approaches from below.
    """
    draw = np.random.default_rng(0)
    out = []
    for n in keys:
        q = draw.standard_normal((rows, width)) / width**0.25
        k = draw.standard_normal((n, width)) / width**0.25
        q *= width**0.5 / np.linalg.norm(q, axis=1, keepdims=True) / width**0.25  # every query of equal length
        z = q @ k.T
        row: dict[str, Any] = {"tokens": n, "std": float(z.std(axis=1).mean()), "largest": float(z.max(axis=1).mean())}
        out.append({**row, "sqrt_2_ln_n": math.sqrt(2 * math.log(n))})
    table = pd.DataFrame(out)
    return table.assign(largest_over_limit=table.largest / table["std"] / table.sqrt_2_ln_n)


def _row(run: Run) -> dict[str, Any]:
    cfg = run.typed.attention
    logits, entropy = run.layers["max_abs_logit"], run.layers["entropy_frac"]
    return {
        "tokens": keys_per_row(run),
        "norm": cfg.norm,
        "scale": cfg.scale,
        "variant": run.variant,
        "seed": run.seed,
        "final_val_loss": run.final_val_loss,
        "final_loss": (run.outcome or {}).get("final", {}).get("loss"),
        "start_gap": float(run.layers["logit_gap_mean"][0, 0]),
        "start_entropy_frac": float(entropy[0].mean()),
        "max_abs_logit": float(np.nanmax(logits)),
        "entropy_frac": float(np.nanmin(np.nanmean(entropy[-20:], axis=0))),
    }


def _draw_noise(axes: Axes, noise: pd.DataFrame) -> None:
    axes.plot(noise.tokens, noise["std"], color="#0072B2", marker="o", ms=4)
    axes.plot(noise.tokens, noise.largest, color="#D55E00", marker="s", ms=4)
    axes.plot(noise.tokens, noise.sqrt_2_ln_n, color=GREY, ls=LEVEL_STYLE, lw=0.9)
    for name, text, at in (("std", "standard deviation", 0.12), ("largest", "mean maximum of a row", -0.62)):
        axes.annotate(text, (noise.tokens.iloc[5], noise[name].iloc[5] + at), size=6.5)
    axes.annotate(
        "√(2 ln N)", (noise.tokens.iloc[3], noise.sqrt_2_ln_n.iloc[3] + 0.15), size=6.5, color=GREY, ha="right"
    )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, None)
    axes.set_title("(a) independent logits, no training")
    axes.set_ylabel("logit")
    axes.set_xlabel("keys N")


def _arms(trained: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    return {(norm, scale): part for (norm, scale), part in trained.groupby(["norm", "scale"])}  # type: ignore[misc]


def _variant(norm: str) -> str:
    return {"rms": "rmsnorm"}.get(norm, norm)


def _draw(axes: Axes, trained: pd.DataFrame, metric: str) -> None:
    for place, ((norm, scale), part) in enumerate(_arms(trained).items()):
        here, shift = look(_variant(norm)), 1.0 + 0.03 * (place - 1.5)  # dots of one N must not hide each other
        middle = part.groupby("tokens")[metric].median()
        axes.plot(middle.index * shift, middle, color=here.colour, ls=SCALES[scale][1])
        fill = here.colour if scale == "inv_sqrt_d" else "white"
        axes.plot(
            part.tokens * shift, part[metric], ls="", marker=here.marker, ms=4, mfc=fill, mec=here.colour, mew=0.8
        )
    ticks = sorted(trained.tokens.unique())
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xticks([], minor=True)


def _legend(trained: pd.DataFrame) -> list[Line2D]:
    out = []
    for norm, scale in _arms(trained):
        here, (words, style) = look(_variant(norm)), SCALES[scale]
        fill = here.colour if scale == "inv_sqrt_d" else "white"
        marks: dict[str, Any] = {"marker": here.marker, "ms": 4, "mfc": fill, "mec": here.colour}
        out.append(Line2D([], [], color=here.colour, ls=style, label=f"{here.label}, {words}", **marks))
    return out


def _caption(runs: list[Run]) -> list[str]:
    one, noise = runs[0], NOISE
    patches = ", ".join(sorted({str(run.typed.model.patch) for run in runs}))
    return [
        f"a: {noise['rows']} queries and N keys with independent Gaussian channels, d = {noise['width']}: the spread "
        "of a row does not depend on N, its maximum grows like √(2 ln N).",
        f"b–d: {model_text(one)}, patches of {patches} pixels; peak learning rate {one.lr:g}; "
        f"{recipe_text(one)}. Points: runs; line: their median. SSMax starts as plain attention: s = 1 / ln N.",
        unfinished_text(runs),
    ]
