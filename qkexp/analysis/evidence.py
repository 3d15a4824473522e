"""What a run shows that a verdict may rest on: onsets, collapse, harm, jumps, the size of updates.

Which verdict follows from it is said in :mod:`qkexp.analysis.diagnose`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qkexp.analysis.harm import Harm, Jump, Losses, find_harm, find_jump
from qkexp.analysis.links import Attention, Scores, chance_loss, onsets, scores
from qkexp.analysis.onsets import BY_LINK, Onset, apart, healthy_reference, split_growth
from qkexp.record.load import Run
from qkexp.train.events import COLLAPSED_FRAC, COLLAPSED_OF_HEALTHY, COLLAPSED_STEPS, healthy_steps
from qkexp.train.outcome import WINDOW

PAIR = ("max_abs_logit", "score_scale", "max_pair_q_norm", "max_pair_k_norm", "max_pair_cos")
SHARP = 0.3  # entropy_frac: attention that starts under it is sharp by design
DIP = 0.5  # of the healthy entropy: lower and back again is a dip


@dataclass(frozen=True)
class Collapse:
    """Entropy under 0.05 · ln n and under a tenth of its healthy value for 20 steps, as in events.

    ``layers`` collapsed at any time, ``step`` and ``layer`` say where first, ``lasting`` are still so at the end.
    """

    step: int
    layer: int
    layers: tuple[int, ...]
    lasting: tuple[int, ...]


@dataclass(frozen=True)
class Evidence:
    """What the rules look at; None or NaN where it was not measured."""

    run: Run
    steps: int  # recorded
    healthy: int
    chance: float
    final_loss: float = math.nan
    lowest_loss: float = math.nan
    probed: int = 0
    subsampled: bool = False
    onsets: dict[str, Onset] = field(default_factory=dict)
    start_entropy: float = math.nan  # entropy_frac of the healthy stretch, least of layers
    least_entropy: float = math.nan
    dipped: tuple[int, ...] = ()
    peak_logit: float = math.nan
    collapse: Collapse | None = None
    harm: Harm | None = None
    jump: Jump | None = None
    update: float = math.nan  # ‖Δθ‖ / ‖θ‖ of a step: median of the 20 before the harm, or of the whole run
    output: float = math.nan  # largest |output logit| until the harm had begun, and through the healthy stretch
    drift: float = math.nan  # its growth since the first step
    body: float = math.nan  # growth of raw ‖q‖ or ‖k‖ since the first probe, largest of layers, up to there
    growth: dict[str, Any] = field(default_factory=dict)  # of the pair that attains max |z|
    other: Run | None = None
    parted: dict[str, Onset] = field(default_factory=dict)  # onsets against the other arm

    @property
    def sharp(self) -> bool:
        """Sharp attention from the start."""
        return self.start_entropy < SHARP


def gather(run: Run, other: Run | None = None) -> Evidence:
    """Read a run, and compare it with another arm where one is given (the same run but for what its attention is).

    The evidence holds runs anew, without the tables that were read for it: of a thousand runs they would fill memory.
    """
    name, other = (other.name, Run(other.directory)) if other is not None else ("", None)
    kept, run = Run(run.directory), Run(run.directory)
    mine, theirs = losses(run), losses(other) if other is not None else None
    base = Evidence(kept, len(mine.loss), healthy_steps(run.typed.train.steps), mine.chance)
    if not len(mine.loss):
        return base
    attention = Attention.of(run.attention)
    links = scores(run, attention, base.healthy, mine.chance)
    found = onsets(run, links)
    harm = find_harm(mine, base.healthy, theirs, name)
    table = run.scalars
    until = max(harm.late, base.healthy) if harm else int(mine.steps[-1])
    return replace(
        base,
        final_loss=mine.final,
        lowest_loss=mine.lowest,
        probed=len(attention.steps),
        subsampled=attention.subsampled,
        onsets=found,
        **_entropy(attention, base.healthy),
        harm=harm,
        jump=find_jump(mine),
        update=_update(run, harm.early if harm else None),
        **_output(table.out_logit_absmax[table.step <= until].to_numpy(np.float64)),
        body=_body(attention, until),
        growth=_growth(attention, found.get("logit"), base.healthy),
        other=Run(other.directory) if other is not None else None,
        parted=_parted(base, links, other) if other is not None else {},
    )


def losses(run: Run) -> Losses:
    """Losses and gradient norms of a run, as :mod:`.harm` judges them."""
    table, outcome = run.scalars.dropna(subset=["loss"]), run.outcome or {}
    ended = outcome.get("step")
    return Losses(
        table.step.to_numpy(np.int64),
        table.loss.to_numpy(np.float64),
        table.grad_norm.to_numpy(np.float64),
        chance=chance_loss(run),
        reason=str(outcome.get("reason") or ""),
        ended=len(table) if ended is None else int(ended),
    )


def _parted(base: Evidence, mine: dict[str, Scores], other: Run) -> dict[str, Onset]:
    theirs = scores(other, Attention.of(other.attention), base.healthy, chance_loss(other))
    shared = [n for n in mine if n in theirs and mine[n].layers == theirs[n].layers]
    return {
        n: apart(BY_LINK[n], mine[n].steps, mine[n].values, theirs[n].steps, theirs[n].values, mine[n].layers)
        for n in shared
    }


# ---------------------------------------------------------------- attention


def _entropy(attention: Attention, healthy: int) -> dict[str, Any]:
    """Where entropy started, how low it went, which layers collapsed, which dipped and came back."""
    share, steps = attention.whole["entropy_frac"], attention.steps
    if not np.isfinite(share).any():
        return {}
    usual = healthy_reference(steps, share, healthy)
    late = share[steps >= steps[0] + 0.8 * (steps[-1] - steps[0])]
    end, least = _columns(np.median, late), _columns(np.min, share)
    limit = np.fmin(COLLAPSED_FRAC, COLLAPSED_OF_HEALTHY * usual)
    starts = {i: at for i in range(share.shape[1]) if (at := _streak(steps, share[:, i] < limit[i])) is not None}
    first = min(starts, key=lambda i: starts[i]) if starts else None
    names = attention.layers
    back = (least < DIP * usual) & (end > 2 * least) & (end > DIP * usual)
    return {
        "start_entropy": float(np.nanmin(usual)) if np.isfinite(usual).any() else math.nan,
        "least_entropy": float(np.nanmin(share)),
        "peak_logit": float(np.nanmax(np.where(np.isfinite(z := attention.whole["max_abs_logit"]), z, -np.inf))),
        "dipped": tuple(names[i] for i in np.flatnonzero(back)),
        "collapse": None
        if first is None
        else Collapse(
            starts[first],
            names[first],
            tuple(names[i] for i in starts),
            tuple(names[i] for i in starts if end[i] < 2 * limit[i]),
        ),
    }


def _columns(reduce: Any, values: np.ndarray) -> np.ndarray:
    return np.array([reduce(known) if len(known := c[np.isfinite(c)]) else np.nan for c in values.T])


def _streak(steps: np.ndarray, below: np.ndarray) -> int | None:
    """First step of a stretch that lasts 20 probed steps, or where probes are rare three that span 20 steps."""
    start = None
    for i, here in enumerate(below):
        start = (i if start is None else start) if here else None
        if start is not None:
            rows = i - start + 1
            if rows >= COLLAPSED_STEPS or (rows >= 3 and steps[i] - steps[start] >= COLLAPSED_STEPS):
                return int(steps[start])
    return None


def _output(absmax: np.ndarray) -> dict[str, Any]:
    """Since the first step: a head whose rate is far too high has drifted before the healthy stretch is over."""
    seen = absmax[np.isfinite(absmax)]
    if not len(seen):
        return {}
    return {"output": float(seen.max()), "drift": float(seen.max() / max(seen[0], np.finfo(np.float32).tiny))}


def _body(attention: Attention, until: int) -> float:
    """Raw projections tell how far weights went where a norm hides it from the scores."""
    rows = attention.steps <= until
    values = np.concatenate([attention.whole[name] for name in ("q_norm_mean", "k_norm_mean")], axis=1)[rows]
    if not len(values) or not np.isfinite(values[0]).any():
        return math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        grown = values / values[0]
    return float(np.nanmax(grown)) if np.isfinite(grown).any() else math.nan


def _growth(attention: Attention, logit: Onset | None, healthy: int) -> dict[str, Any]:
    """The split of max |z| of one head: from the middle of its healthy stretch to its severest crossing, or peak."""
    if logit is None or not len(attention.steps):
        return {}
    size = attention.heads["max_abs_logit"]
    if logit.layer >= 0 and logit.head >= 0:
        at = attention.layers.index(logit.layer), logit.head
    else:
        at = np.unravel_index(int(np.nanargmax(size)), size.shape)[1:]  # type: ignore[assignment]
    column = size[:, at[0], at[1]]
    rows = np.flatnonzero((attention.steps < healthy) & np.isfinite(column))
    known = [c for c in logit.crossings if c is not None and c.row >= 0]
    if not len(rows):
        return {}
    start = int(rows[np.argsort(column[rows])[(len(rows) - 1) // 2]])
    end = known[-1].row if known else int(np.nanargmax(column))
    pick = [{name: float(attention.heads[name][row, at[0], at[1]]) for name in PAIR} for row in (start, end)]
    split = split_growth(*pick)
    if not split:
        return {}
    place = {"layer": attention.layers[at[0]], "head": int(at[1])}
    return {**place, "from_step": int(attention.steps[start]), "to_step": int(attention.steps[end]), **split}


def _update(run: Run, until: int | None) -> float:
    """‖Δθ‖ / ‖θ‖ of a step, median over the 20 steps before ``until`` (None: over the run); NaN where not known."""
    groups = run.provenance.get("parameter_groups") or {}
    count = sum(groups[name]["parameters"] for name in ("decayed", "not_decayed") if name in groups)
    table = run.scalars
    if until is not None:
        table = table[table.step <= max(until, WINDOW)].tail(WINDOW)
    moved = (table.lr * table.update_rms * math.sqrt(count) / table.param_norm).to_numpy(np.float64)
    moved = moved[np.isfinite(moved)]
    return float(np.median(moved)) if count and len(moved) else math.nan
