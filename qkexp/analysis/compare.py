"""What differs between runs: configurations, provenance, outcomes; outcomes at a step that all of them reached."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qkexp.config import UserError, flatten, keys
from qkexp.record.load import Run
from qkexp.sweep.status import state_of
from qkexp.train.outcome import WINDOW, smooth

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ABSENT = "-"


@dataclass(frozen=True)
class Comparison:
    """Rows of what differs: name -> a value a run, None where a run has none.

    ``step``: the last step that every run has recorded, to which ``at_step`` rows are cut; None where one has none.
    ``equal_length``: whether that is the last step of all.
    """

    runs: tuple[Run, ...]
    identity: dict[str, list[Any]]
    other: dict[str, list[Any]]
    provenance: dict[str, list[Any]]
    outcomes: dict[str, list[Any]]
    at_step: dict[str, list[Any]]
    events: dict[str, list[Any]]
    step: int | None
    equal_length: bool


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare two runs or more; runs of different length are compared at the last step that all of them have.

    Raises:
        UserError: fewer than two runs, or one twice.
    """
    if len(runs) < 2:
        raise UserError("compare needs two run directories or more")
    if len({run.directory.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice: there is nothing to compare")
    if len(runs) > len(LETTERS):
        raise UserError(f"{len(runs)} runs are too many to read; accepted: up to {len(LETTERS)}")
    marks = {k.name for k in keys() if k.meta["identity"]}.union(*(run.chosen for run in runs))
    configs = differing([flatten(run.typed) for run in runs])
    last = [_last_step(run) for run in runs]
    known = [step for step in last if step is not None]
    step = min(known) if len(known) == len(runs) else None
    return Comparison(
        runs=tuple(runs),
        identity={name: row for name, row in configs.items() if name in marks},
        other={name: row for name, row in configs.items() if name not in marks},
        provenance=differing([facts(run) for run in runs]),
        outcomes=_rows([_outcome(run) for run in runs]),
        at_step={} if step is None else _rows([_at(run, step) for run in runs]),
        events=_rows([dict(_events(run, step)) for run in runs]),
        step=step,
        equal_length=len(set(last)) == 1,
    )


def differing(dictionaries: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all, with the value of each (None where one has no such key)."""
    return {name: row for name, row in _rows(dictionaries).items() if any(v != row[0] for v in row[1:])}


def facts(run: Run) -> dict[str, Any]:
    """provenance.json, flat: versions, commit, host, device, dtypes, the command; names of parameters left out."""
    return dict(_flat(run.provenance))


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value


def _rows(dictionaries: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in dictionaries for name in each)
    return {name: [each.get(name) for each in dictionaries] for name in names}


# ---------------------------------------------------------------- outcomes


def _last_step(run: Run) -> int | None:
    return None if run.scalars.empty else int(run.scalars.step.max())


def _outcome(run: Run) -> dict[str, Any]:
    """How it ended, and its own final and best figures: of runs of different length not to be compared."""
    outcome = run.outcome or {}
    final, best = outcome.get("final") or {}, outcome.get("best") or {}
    state = state_of(run.directory, run.typed.train.steps)
    return {
        "status": state.status,
        "reason": state.reason or None,
        "steps done / planned": f"{_steps_done(run)} / {run.typed.train.steps}",
        "final training loss": final.get("loss"),
        "lowest training loss": final.get("lowest_loss"),
        "final validation loss": final.get("val_loss"),
        "final validation accuracy": final.get("val_accuracy"),
        "best validation loss": best.get("val_loss"),
        "wall time, s": outcome.get("wall_seconds"),
    }


def _steps_done(run: Run) -> int:
    last = _last_step(run)
    return 0 if last is None else last + 1


def _at(run: Run, step: int) -> dict[str, Any]:
    """Figures of the first ``step`` + 1 steps alone, as if the run had ended there."""
    table = run.scalars[run.scalars.step <= step]
    loss, norm = table.loss.to_numpy(float), table.grad_norm.to_numpy(float)
    evaluated = table.val_loss.dropna()
    found = {
        f"training loss ({WINDOW}-step mean)": smooth(loss)[-1],
        "lowest training loss until then": np.nanmin(smooth(loss)) if np.isfinite(loss).any() else math.nan,
        f"gradient norm ({WINDOW}-step mean)": smooth(norm)[-1],
        "validation loss": evaluated.iloc[-1] if len(evaluated) and table.val_loss.notna().iloc[-1] else math.nan,
    }
    probed = run.layers.steps <= step
    if probed.any():
        found["largest |logit| until then"] = np.nanmax(run.layers["max_abs_logit"][probed], initial=-math.inf)
        found["smallest layer entropy until then, H / ln n"] = np.nanmin(
            run.layers["entropy_frac"][probed], initial=math.inf
        )
    return {name: float(value) if math.isfinite(value) else None for name, value in found.items()}


def _events(run: Run, step: int | None) -> Iterator[tuple[str, str]]:
    """Kind -> how often up to ``step``, and when first."""
    table = run.events if step is None else run.events[run.events.step <= step]
    for kind, group in table.groupby("kind", sort=True):
        first = group.sort_values("step").iloc[0]
        where = f", layer {int(first.layer)}" if first.layer >= 0 else ""
        yield str(kind), f"{len(group)} ×, first at step {int(first.step)}{where}"


# ---------------------------------------------------------------- on a terminal


def tables(found: Comparison) -> Group:
    """What a terminal shows: the runs by letter, then a table for each kind of difference."""
    letters = LETTERS[: len(found.runs)]
    legend = [Text(f"{letter}  {run.directory}") for letter, run in zip(letters, found.runs, strict=True)]
    parts: list[Any] = [*legend]
    for title, rows in (
        ("configuration: keys of the run's identity", found.identity),
        ("configuration: other keys", found.other),
        ("provenance", found.provenance),
    ):
        parts.append(_table(title, rows, letters, exact=True) if rows else Text(f"{title}: no difference"))
    whole = "" if found.equal_length else " (of each run's own length: read the next table instead)"
    parts.append(_table(f"outcomes{whole}", found.outcomes, letters))
    if found.step is None:
        parts.append(Text("a run has recorded no step yet: nothing can be compared at the same step"))
    else:
        said = "the last of all" if found.equal_length else "the last that all runs have: they differ in length"
        parts.append(_table(f"at step {found.step} ({said})", found.at_step, letters))
    until = "" if found.step is None else f" until step {found.step}"
    parts.append(
        _table(f"events{until}", found.events, letters) if found.events else Text(f"events{until}: none in any run")
    )
    return Group(*parts)


def _table(title: str, rows: Mapping[str, Sequence[Any]], letters: str, *, exact: bool = False) -> Table:
    out = Table(title=title, title_justify="left", expand=False)
    out.add_column("")
    for letter in letters:
        out.add_column(letter, overflow="fold")
    for name, row in rows.items():
        out.add_row(escape(name), *(escape(show(value, exact=exact)) for value in row))
    return out


def show(value: Any, *, exact: bool = False) -> str:
    """A value as a cell shows it; ``exact``: with every digit that makes a difference."""
    if value is None:
        return "null" if exact else ABSENT
    if isinstance(value, float):
        return repr(value) if exact else f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
