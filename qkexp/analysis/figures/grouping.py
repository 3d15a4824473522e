"""Runs of a sweep grouped by keys other than variant and rate."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from qkexp.analysis.figures.selection import DoesNotFit
from qkexp.config import RunConfig, flatten, identity_keys
from qkexp.record.load import Run, Sweep

Groups = dict[tuple[Any, ...], list[Run]]
_SEEDS = {"seed", "model.seed", "data.seed"}


def groups(sweep: Sweep, *names: str) -> Groups:
    """Values of some keys (``variant`` is one) -> the runs that have them, by seed; in the order of the sweep.

    Raises:
        DoesNotFit: runs of one group differ in more than their seeds, and would be mixed.
    """
    found: Groups = {}
    for run in sweep.all.values():
        values = {**flatten(run.typed), "variant": run.variant}
        found.setdefault(tuple(values[name] for name in names), []).append(run)
    for runs in found.values():
        runs.sort(key=lambda run: run.seed)
        for one, other in itertools.pairwise(runs):
            if different := _differences(one.typed, other.typed):
                raise DoesNotFit(f"runs differ in {', '.join(different)} as well")
    return found


def finished(runs: list[Run]) -> list[Run]:
    """Those that have come to an end, whatever it was."""
    return [run for run in runs if run.status in ("completed", "diverged")]


def over_seeds(curves: list[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """(steps, values) of each seed -> a row a step that any has: median ``value``, ``low``, ``high``, ``seeds``.

    A step that fewer than half of the seeds have is left out: it would be a curve of the survivors.
    """
    parts = [pd.DataFrame({"step": steps, "value": values}) for steps, values in curves]
    rows = pd.concat(parts, ignore_index=True)
    table = rows[np.isfinite(rows.value)].groupby("step").value
    found = table.agg(value="median", low="min", high="max", seeds="count").reset_index()
    return found[2 * found.seeds >= len(curves)]


def _differences(a: RunConfig, b: RunConfig) -> list[str]:
    left, right = identity_keys(a), identity_keys(b)
    return sorted(k for k in (left.keys() | right.keys()) - _SEEDS if left.get(k) != right.get(k))
