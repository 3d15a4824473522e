"""The state of a run at a step, from a checkpoint or by training again from one, every row checked against the run's.

Same configuration, same bits: so a replay that differs in one number of one row is not the run that was recorded, and
says so instead of handing its state on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from qkexp.config import UserError
from qkexp.probe.frame import Frame
from qkexp.record.load import Run
from qkexp.record.run import MEASURED, attention_table
from qkexp.sweep.job import prepare_cpu
from qkexp.sweep.provenance import collect
from qkexp.train import checkpoint
from qkexp.train import data as datasets
from qkexp.train.loop import train
from qkexp.train.precision import resolve

ROUNDING = "Other hardware, versions or numbers of threads round otherwise."
TIMES = ("step_seconds", "probe_seconds", "eval_seconds")
NUMBERS = tuple(name for name in MEASURED if name not in TIMES)
PLACE = ["step", "layer", "head"]  # of a row of attention.parquet


@dataclass(frozen=True)
class Difference:
    """The first number in which two recordings of the same steps differ; ``where``: of which layer and head."""

    step: int
    column: str
    recorded: float
    found: float
    where: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, {self.column}{self.where}: {self.recorded!r} recorded, {self.found!r} now"


class ReplayError(Exception):
    """A replay is not the run that was recorded."""

    def __init__(self, run: Run, difference: Difference):
        self.difference = difference
        here, there = circumstances(collect() | {"threads": torch.get_num_threads()}), circumstances(run.provenance)
        other = [f"{name} {there[name]}, here {here[name]}" for name in here if here[name] != there[name]]
        super().__init__(
            f"the replay of {run.directory} differs: {difference}. {ROUNDING}"
            + (f" Recorded: {'; '.join(other)}." if other else "")
            + f" Branch at a step that has a checkpoint ({steps_text(run)}), or --unchecked goes on from the replay."
        )


@dataclass
class Source:
    """The state of a run after so many steps, and where it comes from.

    ``base``: the steps that a checkpoint had; those after it were replayed. ``difference``: the first number that
    was not the recorded one, where that was allowed.
    """

    state: dict[str, Any]
    base: int
    difference: Difference | None = None


def state_at(
    run: Run, step: int, kept: Path, *, unchecked: bool = False, tick: Callable[[int], None] = lambda _: None
) -> Source:
    """The state of a run after ``step`` steps.

    Args:
        kept: folder of states that were replayed before; a new one is put there if it was checked.
        unchecked: go on where a replayed row differs.
        tick: called with each step that is done.

    Raises:
        ReplayError: a replayed row differs from the recorded one.
        UserError: there is nothing to start from.
    """
    base = _nearest(run, step, kept)
    first = base["step"] if base else 0
    begun = run.typed.branch.step or 0
    if first < begun:
        raise UserError(
            f"{run.directory}: its first own step is {begun}, and no checkpoint is left from which to go on"
        )
    if base is not None and first == step:
        return Source(base, step)
    cfg = copy.deepcopy(run.typed)
    cfg.train.checkpoint_every = 0
    resolve(cfg)
    prepare_cpu()
    check, own = _Check(run, step, unchecked, tick), torch.get_num_threads()
    torch.set_num_threads(threads(run))
    try:
        train(cfg, datasets.load(cfg.data), check, check.stop, base)
    finally:
        torch.set_num_threads(own)
    if check.state is None:
        raise UserError(f"{run.directory}: its replay ended at step {check.done}, before step {step}")
    if check.difference is None:
        kept.mkdir(parents=True, exist_ok=True)
        checkpoint.save(kept / checkpoint.name(step), check.state)
    return Source(check.state, first, check.difference)


def recorded(run: Run) -> int:
    """Steps from the first on whose rows can be read."""
    steps = run.scalars.step.to_numpy()
    return int(np.cumprod(steps == np.arange(len(steps))).sum())


def threads(run: Run) -> int:
    """CPU threads that a run was trained with; its sums are split by them."""
    return int(run.provenance.get("threads") or 1)


def first_difference(recorded: Run, other: Run, first: int = 0) -> Difference | None:
    """The first number in which two runs differ from a step on, over the steps that both have; None: none.

    Attention is compared where both measured the same images and queries.
    """
    a, b = (r.scalars[r.scalars.step >= first].set_index("step") for r in (recorded, other))
    last = min(len(a), len(b))
    found = [_compared(a[:last], b[:last], NUMBERS)]
    mine, theirs = recorded.typed.probe, other.typed.probe
    if (mine.images, mine.queries) == (theirs.images, theirs.queries):
        steps = set(recorded.attention.step) & set(other.attention.step)
        tables = [r.attention[r.attention.step.isin(steps) & (r.attention.step >= first)] for r in (recorded, other)]
        a, b = (table.set_index(PLACE).sort_index() for table in tables)
        found.append(_compared(a, b))
    return min((d for d in found if d is not None), key=lambda d: d.step, default=None)


def circumstances(provenance: dict[str, Any]) -> dict[str, Any]:
    """What may make the same run round otherwise."""
    versions = provenance.get("versions") or {}
    code = provenance.get("code") or {}
    named = {"torch": versions.get("torch"), "commit": (code.get("commit") or "")[:7] or None}
    return {"host": provenance.get("host"), "threads": provenance.get("threads"), **named}


def steps_text(run: Run) -> str:
    """``100, 200``: where a run has checkpoints."""
    return ", ".join(map(str, checkpoint.steps(run.directory / "checkpoints"))) or "none"


def _nearest(run: Run, step: int, kept: Path) -> dict[str, Any] | None:
    """The newest usable state of at most so many steps, whose losses are those of the run's tables."""
    losses = run.scalars.loss.to_numpy()
    known = min(step, recorded(run))
    found = [checkpoint.latest(folder, at_most=known) for folder in (run.directory / "checkpoints", kept)]
    usable = [s for s in found if s is not None and np.array_equal(s["losses"].numpy(), losses[: s["step"]])]
    return max(usable, key=lambda s: s["step"], default=None)


@dataclass
class _Check:
    """A recorder that compares what it is given with what a run recorded, and keeps the state of one step."""

    run: Run
    last: int
    unchecked: bool
    tick: Callable[[int], None]
    done: int = 0
    state: dict[str, Any] | None = None
    difference: Difference | None = None
    _frames: list[Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = self.run.scalars.set_index("step")
        self._attention = dict(list(self.run.attention.set_index(PLACE).sort_index().groupby("step")))

    def stop(self) -> str | None:
        return "replayed" if self.done >= self.last else None

    def row(self, row: dict[str, float]) -> None:
        step = int(row["step"])
        self._note(_compared(self._rows.loc[[step]], pd.DataFrame([row]).set_index("step"), NUMBERS))
        self.done = step + 1
        self.tick(self.done)

    def frame(self, frame: Frame) -> None:
        self._frames.append(frame)
        found = attention_table([frame]).to_pandas().set_index(PLACE).sort_index()
        self._note(_compared(self._attention.get(frame.step, found[:0]), found))

    def event(self, event: Any) -> None: ...
    def note(self, **facts: Any) -> None: ...

    def flush_due(self) -> bool:
        return len(self._frames) >= 50  # what a frame holds is freed

    def flush(self) -> list[Frame]:
        frames, self._frames = self._frames, []
        return frames

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        if step == self.last:
            self.state = {"step": step, **state}

    def _note(self, difference: Difference | None) -> None:
        if difference is None:
            return
        if not self.unchecked:
            raise ReplayError(self.run, difference)
        self.difference = self.difference or difference


def _compared(recorded: pd.DataFrame, found: pd.DataFrame, columns: tuple[str, ...] = ()) -> Difference | None:
    """The first number that differs in its bits; both absent is the same. Text is not compared."""
    names = columns or tuple(n for n in found.columns if n in recorded.columns and n not in ("phase", "module"))
    a, b = (t.reindex(columns=names).to_numpy(np.float64, na_value=np.nan) for t in (recorded, found))
    if a.shape != b.shape:
        step = int(np.ravel(found.index[0])[0]) if len(found) else -1
        return Difference(step, "rows", len(a), len(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return None
    row, column = np.argwhere(~same)[0]
    place = np.ravel(found.index[row])
    where = f" of layer {place[1]}, head {place[2]}" if len(place) == 3 else ""
    return Difference(int(place[0]), names[column], float(a[row, column]), float(b[row, column]), where)
