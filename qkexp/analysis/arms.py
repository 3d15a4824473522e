"""Arms of one experiment: runs that differ in one thing only, and what their comparison says about the cause.

Only here is the word "caused" used: what came first in one run may be a sign of something else, but a run that goes on
unchanged and fails, beside the same run without learned queries and keys that does not, shows what it hung on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkexp.analysis.links import chance_loss
from qkexp.config import OptimConfig
from qkexp.record.load import Run, load_run
from qkexp.train.outcome import ROSE

UNCHANGED, NORM, FROZEN, SLOW_QK, SLOW = "unchanged", "norm", "frozen_qk", "slow_qk", "slow"
OF_ATTENTION = (NORM, FROZEN, SLOW_QK)  # arms that change nothing but how queries and keys act or learn
WORDS = {
    UNCHANGED: "unchanged",
    NORM: "with a norm of q and k",
    FROZEN: "with Q and K frozen",
    SLOW_QK: "with a smaller rate of Q and K",
    SLOW: "with a smaller rate of everything",
}
DEFAULT_LR = OptimConfig().lr
STARTS = ("attention.init",)  # how an arm starts is made to fit its norm: no other thing


@dataclass(frozen=True)
class Comparison:
    """Arms with their final losses, which of them trained, and what follows; ``cause`` as in :func:`compare`."""

    finals: dict[str, float]
    trained: tuple[str, ...]
    cause: str | None
    text: str


def compare(arms: Sequence[tuple[str, Run]]) -> Comparison | None:
    """Finished arms of one run, by name -> what the unchanged one's end hung on.

    An arm trained if its final training loss is at most ℓ + 0.2 (chance - ℓ), ℓ the smallest of the arms: the rule by
    which a sweep calls a rate stable. ``cause`` is ``attention`` where the unchanged arm did not train and one that
    changes only queries and keys did, ``rate`` where only a smaller rate of everything helped, ``elsewhere`` where
    nothing did, None where the unchanged arm trained or is the only one.
    """
    ended = [(name, run) for name, run in arms if run.status in ("completed", "diverged")]
    by_name: dict[str, list[float]] = {}
    for name, run in ended:
        by_name.setdefault(name, []).append(final_loss(run))
    finals = {name: min(values) for name, values in by_name.items()}
    chance = next((c for _, run in ended if math.isfinite(c := chance_loss(run))), math.nan)
    if UNCHANGED not in finals or len(finals) < 2 or not math.isfinite(chance):
        return None
    best = min(finals.values())
    trained = tuple(n for n, v in finals.items() if v <= best + ROSE * (chance - best) and v < chance)
    ends = "; ".join(f"{WORDS.get(n, n)} {v:.3g}" for n, v in finals.items())
    told = f"final training loss: {ends} (chance {chance:.3g})"
    helped = [n for n in OF_ATTENTION if n in trained]
    if UNCHANGED in trained:
        return Comparison(
            finals, trained, None, f"{told}: the unchanged arm trains as well, so there is nothing to explain"
        )
    if helped:
        failed = [n for n in OF_ATTENTION if n in finals and n not in trained]
        but = f" ({', '.join(WORDS[n] for n in failed)} it fails too)" if failed else ""
        same = " and ".join(WORDS[n] for n in helped)
        text = f"{told}: caused by what queries and keys learn, for {same} the same run trains{but}"
        return Comparison(finals, trained, "attention", text)
    tried = [n for n in OF_ATTENTION if n in finals]
    if SLOW in trained:
        also = f", and {' or '.join(WORDS[n] for n in tried)} it fails too: not caused by attention" if tried else ""
        return Comparison(finals, trained, "rate", f"{told}: a smaller rate of everything is enough{also}")
    if tried and not trained:
        text = f"{told}: {' or '.join(WORDS[n] for n in tried)} it fails too: not caused by queries and keys"
        return Comparison(finals, trained, "elsewhere", text)
    return Comparison(finals, trained, None, told)


def final_loss(run: Run) -> float:
    """Mean training loss of the last 20 steps, of the outcome; infinite where a run was not finite, NaN without one."""
    outcome = run.outcome or {}
    if str(outcome.get("reason")).startswith("nonfinite"):
        return math.inf
    value = outcome.get("final", {}).get("loss")
    return math.nan if value is None else float(value)


def arms_of(run: Run, runs: Iterable[Run]) -> list[tuple[str, Run]]:
    """The run and its controls among others: same keys and seed but for one thing, named as branches are."""
    mine = run.chosen
    named = [(_arm(mine, other.chosen), other) for other in runs if other.directory != run.directory]
    return [(UNCHANGED, run), *((name, other) for name, other in named if name is not None)]


def _arm(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    changed = _changed(mine, theirs)
    if changed and all(k.startswith("attention.") for k in changed):
        return NORM if "attention.norm" in theirs and "attention.norm" not in mine else None
    if changed == {"optim.qk_lr_scale"}:
        scale = theirs.get("optim.qk_lr_scale", 1.0)
        return FROZEN if scale == 0 else SLOW_QK if scale < mine.get("optim.qk_lr_scale", 1.0) else None
    if changed == {"optim.lr"}:
        return SLOW if theirs.get("optim.lr", DEFAULT_LR) < mine.get("optim.lr", DEFAULT_LR) else None
    return None


def other_arm(run: Run, runs: Iterable[Run]) -> Run | None:
    """The run that this one is measured by: of those that completed and differ in nothing but how attention scores
    (norm, cap, scale) or how fast Q and K learn, the one that ended lowest; None where there is none.
    """
    mine = run.chosen
    found = []
    for other in runs:
        changed = _changed(mine, other.chosen)
        attention = all(k.startswith("attention.") or k == "optim.qk_lr_scale" for k in changed)
        if changed and attention and other.status == "completed":
            found.append(other)
    return min(found, key=final_loss) if found else None


def _changed(mine: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    return {k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)} - set(STARTS)


def branches_of(run: Run) -> list[tuple[str, Run]]:
    """Branches of a run, ``RUN/branches/NAME-at…``, by the names of their arms."""
    folder = run.directory / "branches"
    paths: list[Path] = sorted(p.parent for p in folder.glob("*/config.yaml"))
    return [(path.name.split("-at")[0], load_run(path)) for path in paths]
