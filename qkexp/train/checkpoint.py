"""Checkpoints: written whole or not at all, loadable without trusting their contents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

KEEP = 2


def save(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain Python atomically: temporary file, fsync, rename."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; only tensors and plain Python are accepted."""
    return torch.load(path, map_location="cpu", weights_only=True)


class Checkpoints:
    """The last two checkpoints of a run, and the last healthy one before the first event of each kind."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._kept: set[int] = set()

    def save(self, step: int, state: dict[str, Any], first_events: dict[str, int]) -> None:
        """Save the state after ``step`` steps. Weights that are not finite never replace healthy ones.

        ``first_events`` maps each kind of event to the step of its first occurrence.
        """
        if not all(t.isfinite().all() for t in state["model"].values()):
            return
        save(self.folder / f"step-{step:08d}.pt", {"step": step, **state})
        self._prune(first_events)

    def steps(self) -> list[int]:
        return sorted(int(p.stem.removeprefix("step-")) for p in self.folder.glob("step-*.pt"))

    def _prune(self, first_events: dict[str, int]) -> None:
        steps = self.steps()
        for at in first_events.values():
            self._kept |= set([s for s in steps if s <= at][-1:])
        for step in steps[:-KEEP]:
            if step not in self._kept:
                (self.folder / f"step-{step:08d}.pt").unlink(missing_ok=True)
