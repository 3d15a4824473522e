"""What a run shows that a verdict may rest on: onsets, collapse, harm, jumps, the size of updates.

Which verdict follows from it is said in :mod:`qkexp.analysis.diagnose`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qkexp.analysis.links import Attention, Scores, chance_loss, onsets, scores
from qkexp.analysis.onsets import BY_LINK, ROOM, Onset, apart, healthy_reference, running_means, split_growth
from qkexp.record.load import Run
from qkexp.train.events import COLLAPSED_FRAC, COLLAPSED_OF_HEALTHY, COLLAPSED_STEPS, healthy_steps
from qkexp.train.outcome import AT_CHANCE, ROSE, WINDOW

PAIR = ("max_abs_logit", "score_scale", "max_pair_q_norm", "max_pair_k_norm", "max_pair_cos")
SURE = 0.6  # of chance, for a rise that came back: near chance a loss goes up and down
FAR = 2.0  # times chance: a loss that exploded
EPISODE = 0.4  # of the way back to chance
SHARP = 0.3  # entropy_frac: attention that starts under it is sharp by design
DIP = 0.5  # of the healthy entropy: lower and back again is a dip
RECENT = 10  # steps before a jump that say what was usual
CALM = 3.0  # times the usual gradient norm: more is a precursor


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
class Harm:
    """What went wrong with the training itself, and between which steps it began.

    ``kind``: nonfinite; rose (it ended over its minimum by a fifth of the way to chance); at_chance; behind (so much
    over another arm's end); episode (it rose by two fifths of the way, and came back).
    """

    kind: str
    early: int
    late: int
    text: str


@dataclass(frozen=True)
class Jump:
    """From one step to the next, out of a calm, the loss was worse than chance, or the run's end."""

    step: int
    before: float  # median loss of the 10 steps before, nats
    loss: float  # infinite where it was not finite
    back: int | None  # steps until half of the jump was gone; None: not within the run


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
    output: float = math.nan  # largest |output logit| up to the harm's late end
    growth: dict[str, Any] = field(default_factory=dict)  # of the pair that attains max |z|
    other: Run | None = None
    parted: dict[str, Onset] = field(default_factory=dict)  # onsets against the other arm

    @property
    def sharp(self) -> bool:
        """Sharp attention from the start."""
        return self.start_entropy < SHARP

    @property
    def behind(self) -> float:
        """Share of the way from the other arm's final loss to chance; NaN without another arm."""
        if self.other is None or not math.isfinite(self.chance):
            return math.nan
        theirs = final_loss(self.other)
        return (self.final_loss - theirs) / (self.chance - theirs) if theirs < self.chance else math.nan


def gather(run: Run, other: Run | None = None) -> Evidence:
    """Read a run, and compare it with another arm where one is given (the same run but for what its attention is)."""
    planned, chance = run.typed.train.steps, chance_loss(run)
    table = run.scalars.dropna(subset=["loss"])
    steps, loss = table.step.to_numpy(np.int64), table.loss.to_numpy(np.float64)
    base = Evidence(run, len(loss), healthy_steps(planned), chance, other=other)
    if not len(loss):
        return base
    attention = Attention.of(run.attention)
    links = scores(run, attention, base.healthy, chance)
    base = replace(
        base,
        final_loss=float(np.mean(loss[-WINDOW:])),
        lowest_loss=float(np.nanmin(running_means(loss)[min(WINDOW, len(loss)) - 1 :])),
        probed=len(attention.steps),
        subsampled=attention.subsampled,
        onsets=onsets(run, links),
        **_entropy(attention, base.healthy),
    )
    if other is not None:
        base = replace(base, parted=_parted(base, links, other))
    harm = _harm(base, steps, loss)
    until = harm.late if harm else int(steps[-1])
    return replace(
        base,
        harm=harm,
        jump=_jump(base, steps, loss, table.grad_norm.to_numpy(np.float64)),
        update=_update(run, harm.early if harm else None),
        output=float(table.out_logit_absmax[table.step <= until].max()),
        growth=_growth(attention, base.onsets.get("logit"), base.healthy),
    )


def final_loss(run: Run) -> float:
    """Mean training loss of the last 20 steps; infinite where a run was not finite, NaN where there is none."""
    if str((run.outcome or {}).get("reason")).startswith("nonfinite"):
        return math.inf
    loss = run.scalars.loss.dropna().to_numpy(np.float64)
    return float(np.mean(loss[-WINDOW:])) if len(loss) else math.nan


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
    # of rows that were not measured at all there is nothing to reduce
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
    place = {"layer": attention.layers[at[0]], "head": int(at[1])}
    return {**place, "from_step": int(attention.steps[start]), "to_step": int(attention.steps[end]), **split} if split else {}


# ---------------------------------------------------------------- loss


def _harm(base: Evidence, steps: np.ndarray, loss: np.ndarray) -> Harm | None:
    outcome = base.run.outcome or {}
    reason, last, chance = str(outcome.get("reason")), int(steps[-1]), base.chance
    risen = base.onsets.get("loss")
    early = risen.early if risen and risen.early is not None else None
    clear = risen.crossings[1].late if risen and risen.crossings[1] else None
    if reason.startswith("nonfinite"):
        end = int(outcome.get("step", last))
        return Harm("nonfinite", end if early is None else early, end if clear is None else clear, reason)
    if not math.isfinite(chance) or len(loss) < 2 * base.healthy:
        return None
    lowest, final = base.lowest_loss, base.final_loss
    if lowest < chance and final > lowest + ROSE * (chance - lowest):
        return _rose(base, steps, loss)
    if base.behind > ROSE:
        return _behind(base, steps, loss)
    if final >= AT_CHANCE * chance:  # never better: only a loss far over chance dates it
        far = steps[running_means(loss) > FAR * chance]
        text = f"the loss ended at {final:.3g}: chance is {chance:.3g}"
        return Harm("at_chance", int(steps[0]), int(far[0]) if len(far) else last, text)
    return _episode(base, steps, loss)


def _rose(base: Evidence, steps: np.ndarray, loss: np.ndarray) -> Harm:
    """From the lowest smoothed loss on: when it was over it by a tenth, and by a fifth of the way to chance."""
    smoothed = running_means(loss)
    bottom = int(np.argmin(smoothed[WINDOW - 1 :])) + WINDOW - 1
    way = base.chance - smoothed[bottom]
    early, late = (bottom + int((smoothed[bottom:] > smoothed[bottom] + part * way).argmax()) for part in (0.5 * ROSE, ROSE))
    text = (
        f"the loss fell to {smoothed[bottom]:.3g} at step {steps[bottom]} and rose to {base.final_loss:.3g} "
        f"(chance {base.chance:.3g})"
    )
    return Harm("rose", int(steps[max(bottom, early - WINDOW + 1)]), int(steps[late]), text)


def _behind(base: Evidence, steps: np.ndarray, loss: np.ndarray) -> Harm:
    """Since when the loss has been over the other arm's for good, by a tenth and by a fifth of the way to chance."""
    assert base.other is not None
    table = base.other.scalars.dropna(subset=["loss"])
    _, mine, theirs = np.intersect1d(steps, table.step.to_numpy(np.int64), return_indices=True)
    a, b = running_means(loss)[mine], running_means(table.loss.to_numpy(np.float64))[theirs]
    lead = (a - b) / np.maximum(base.chance - b, ROOM * base.chance)
    early, late = (int(steps[mine[0 if not len(under := np.flatnonzero(lead < part)) else min(under[-1] + 1, len(mine) - 1)]])
                   for part in (0.5 * ROSE, ROSE))  # fmt: skip
    text = (
        f"the loss ended at {base.final_loss:.3g}, that of {base.other.name} with the same seed at "
        f"{final_loss(base.other):.3g}"
    )
    return Harm("behind", max(int(steps[0]), early - WINDOW + 1), late, text)


def _episode(base: Evidence, steps: np.ndarray, loss: np.ndarray) -> Harm | None:
    """A rise by two fifths of the way to chance of a run that had learned something, and that came back."""
    smoothed = running_means(loss)
    lowest = np.minimum.accumulate(smoothed)
    over = (lowest < SURE * base.chance) & (smoothed > lowest + EPISODE * (base.chance - lowest))
    if not over.any():
        return None
    row = int(over.argmax())
    top = row + int(np.argmax(smoothed[row:]))
    text = f"the loss rose from {lowest[row]:.3g} to {smoothed[top]:.3g} by step {steps[top]}, and came back"
    return Harm("episode", int(steps[max(0, row - WINDOW + 1)]), int(steps[row]), text)


def _jump(base: Evidence, steps: np.ndarray, loss: np.ndarray, norm: np.ndarray) -> Jump | None:
    """The first step on which the loss left for worse than chance while everything before it was calm."""
    outcome, chance = base.run.outcome or {}, base.chance
    if not math.isfinite(chance):
        return None
    for row in range(RECENT, len(loss)):
        usual = float(np.median(loss[row - RECENT : row]))
        if loss[row] > chance + 0.5 * usual and usual < 0.6 * chance and _calm(loss, norm, row, chance):
            half = 0.5 * (usual + loss[row])
            back = np.flatnonzero(loss[row + 1 :] < half)
            return Jump(int(steps[row]), usual, float(loss[row]), int(back[0]) + 1 if len(back) else None)
    if str(outcome.get("reason")).startswith("nonfinite") and len(loss) >= RECENT:
        usual = float(np.median(loss[-RECENT:]))
        if _calm(loss, norm, len(loss), chance) and usual < 1.2 * chance:
            return Jump(int(outcome.get("step", steps[-1] + 1)), usual, math.inf, None)
    return None


def _calm(loss: np.ndarray, norm: np.ndarray, row: int, chance: float) -> bool:
    """Whether loss and gradient just before a row were what they had been in the steps before."""
    past, recent = slice(max(0, row - 4 * RECENT), row), slice(max(0, row - 3), row)
    usual = float(np.median(norm[past]))
    still = loss[recent].max() < np.median(loss[past]) + 0.5 * (chance - min(chance, np.median(loss[past])))
    return bool(norm[recent].max() < CALM * usual and still)


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
