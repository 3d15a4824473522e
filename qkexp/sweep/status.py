"""How every run of a directory stands, from the directory alone: also live, and from another terminal or node."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from qkexp.record.files import read_json
from qkexp.record.lock import alive

FINISHED = ("completed", "diverged")
ENDED = (*FINISHED, "failed", "interrupted")
STATES = ("completed", "diverged", "failed", "interrupted", "running", "missing")
STYLE = {"completed": "green", "diverged": "magenta", "failed": "red", "interrupted": "yellow", "running": "cyan"}


@dataclass(frozen=True)
class State:
    """One run: its status (one of ``STATES``), steps done and planned, and the reason where there is one.

    ``seconds``: wall time of a run that ended. Of one that runs: ``step_seconds``, what a step takes now;
    ``left``, seconds to its end at that pace; ``where``, its host.
    """

    name: str
    status: str
    step: int = 0
    steps: int = 0
    reason: str = ""
    seconds: float | None = None
    step_seconds: float | None = None
    left: float | None = None
    where: str | None = None


def state_of(directory: Path, steps: int = 0) -> State:
    """The state of one run directory, which may not exist."""
    name = directory.name
    outcome = read_json(directory / "outcome.json")
    if outcome:
        reason = " ".join(str(outcome.get("reason") or "").split())
        done, planned = outcome.get("step") or 0, outcome.get("steps") or steps
        return State(name, outcome.get("status", "failed"), done, planned, reason, outcome.get("wall_seconds"))
    lock = read_json(directory / "lock")
    if lock and alive(lock):
        return _running(name, lock, steps)
    if lock or (directory / "config.yaml").exists():
        return State(name, "interrupted", (lock or {}).get("step") or 0, steps, "stopped without an outcome")
    return State(name, "missing", 0, steps)


def signature(directory: Path) -> tuple[int, int]:
    """Which outcome a run directory holds (time and inode of the file): it changes with each attempt's end."""
    try:
        found = (directory / "outcome.json").stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def _running(name: str, lock: dict[str, Any], steps: int) -> State:
    step, planned, pace = lock.get("step") or 0, lock.get("steps") or steps, lock.get("step_seconds")
    left = None if pace is None else pace * (planned - step)
    return State(name, "running", step, planned, step_seconds=pace, left=left, where=lock.get("host"))


def sweep_states(directory: Path, known: Mapping[str, State] | None = None) -> list[State]:
    """States of the plan's runs, or of every run directory where there is no plan.

    ``known``: states seen before; runs that had finished in them are not read again.
    """
    plan = read_json(directory / "plan.json")
    if plan:
        wanted = {r["name"]: r["config"]["train"]["steps"] for r in plan["runs"]}
    else:
        wanted = {p.parent.name: 0 for p in sorted(directory.glob("*/config.yaml"))}
    finished = {name: s for name, s in (known or {}).items() if s.status in FINISHED}
    return [finished.get(name) or state_of(directory / name, steps) for name, steps in wanted.items()]


def summary(states: Sequence[State]) -> str:
    """``28 completed, 2 diverged``"""
    counts = Counter(s.status for s in states)
    return ", ".join(f"{counts[s]} {s}" for s in STATES if counts[s]) or "no runs"


def pace(states: Sequence[State]) -> str:
    """``61 steps/s; about 4 minutes left``: what the living runs do together; empty where none lives."""
    alive = [1 / s.step_seconds for s in states if s.step_seconds]
    if not alive:
        return ""
    steps = sum(s.steps - s.step for s in states if s.status not in ENDED)
    left = max([steps / sum(alive), *(s.left or 0.0 for s in states)])  # the last run is not shared out
    return f"{sum(alive):.3g} steps/s in {len(alive)} runs; about {duration(left)} left"


def step_seconds(states: Sequence[State]) -> float | None:
    """Median seconds of a step, from runs that finished; None where there is none."""
    known = [s.seconds / s.step for s in states if s.seconds and s.step and s.status in FINISHED]
    return statistics.median(known) if known else None


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``"""
    for unit, size, digits in (("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def table(states: Sequence[State], title: str) -> Table:
    """A rich table of runs with status, steps, time and reason."""
    out = Table(title=title, title_justify="left", expand=False)
    for column in ("run", "status", "steps", "time", "reason"):
        out.add_column(column, justify="right" if column in ("steps", "time") else "left", overflow="fold")
    for s in states:
        style = STYLE.get(s.status, "")
        status = f"[{style}]{s.status}[/]" if style else s.status
        took = "" if s.seconds is None else f"{s.seconds:.1f} s"
        took = took if s.left is None else f"{duration(s.left)} left"
        reason = escape(s.reason) if s.status != "running" else f"on {escape(s.where or '?')}"
        out.add_row(escape(s.name), status, f"{s.step}/{s.steps}", took, reason)
    return out
