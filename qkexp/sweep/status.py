"""How every run of a directory stands, from the directory alone: also live, and from another terminal."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from qkexp.record.load import read_json

STALE_SECONDS = 60.0
FINISHED = ("completed", "diverged")
STATES = ("completed", "diverged", "failed", "interrupted", "running", "missing")
STYLE = {"completed": "green", "diverged": "magenta", "failed": "red", "interrupted": "yellow", "running": "cyan"}


@dataclass(frozen=True)
class State:
    """One run: its status (one of ``STATES``), steps done and planned, and the reason where there is one."""

    name: str
    status: str
    step: int = 0
    steps: int = 0
    reason: str = ""
    seconds: float | None = None


def state_of(directory: Path, steps: int = 0) -> State:
    """The state of one run directory, which may not exist."""
    outcome = read_json(directory / "outcome.json")
    lock = read_json(directory / "lock")
    if outcome:
        return State(
            directory.name,
            outcome.get("status", "failed"),
            outcome.get("step") or 0,
            outcome.get("steps") or steps,
            outcome.get("reason") or "",
            outcome.get("wall_seconds"),
        )
    if lock and alive(lock):
        return State(directory.name, "running", lock.get("step") or 0, lock.get("steps") or steps)
    if (directory / "config.yaml").exists() or lock:
        return State(directory.name, "interrupted", (lock or {}).get("step") or 0, steps, "stopped without an outcome")
    return State(directory.name, "missing", 0, steps)


def alive(lock: dict[str, Any]) -> bool:
    """Whether the process that holds a lock lives: by pid on this host, by heartbeat on another."""
    if lock.get("host") == socket.gethostname():
        try:
            os.kill(int(lock["pid"]), 0)
        except (ProcessLookupError, ValueError, KeyError, TypeError):
            return False
        except PermissionError:
            return True
        return True
    return time.time() - float(lock.get("time") or 0) < STALE_SECONDS


def sweep_states(directory: Path) -> list[State]:
    """States of the plan's runs, or of every run directory where there is no plan."""
    plan = read_json(directory / "plan.json")
    if plan:
        return [state_of(directory / r["name"], r["config"]["train"]["steps"]) for r in plan["runs"]]
    return [state_of(p.parent) for p in sorted(directory.glob("*/config.yaml"))]


def summary(states: Sequence[State]) -> str:
    """``28 completed, 2 diverged``"""
    counts = Counter(s.status for s in states)
    return ", ".join(f"{counts[s]} {s}" for s in STATES if counts[s]) or "no runs"


def table(states: Sequence[State], title: str) -> Table:
    """A rich table of runs with status, steps and reason."""
    out = Table(title=title, title_justify="left", expand=False)
    for column in ("run", "status", "steps", "seconds", "reason"):
        out.add_column(column, justify="right" if column in ("steps", "seconds") else "left", overflow="fold")
    for s in states:
        style = STYLE.get(s.status, "")
        seconds = "" if s.seconds is None else f"{s.seconds:.1f}"
        out.add_row(s.name, f"[{style}]{s.status}[/]" if style else s.status, f"{s.step}/{s.steps}", seconds, s.reason)
    return out
