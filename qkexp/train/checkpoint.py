"""Checkpoints: written whole or not at all, loadable without trusting their contents."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

KEEP = 2
log = logging.getLogger("qkexp")


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


def latest(folder: Path, at_most: int | None = None) -> dict[str, Any] | None:
    """The newest checkpoint that can be read and whose weights are finite; None where there is none.

    One that is torn or corrupt is said and passed over for the one before; one of more than ``at_most`` steps
    is passed over too.
    """
    for step in reversed([s for s in steps(folder) if at_most is None or s <= at_most]):
        path = folder / name(step)
        try:
            state = load(path)
            if state["step"] == step and all(t.isfinite().all() for t in state["model"].values()):
                return state
            why = "its weights are not finite"
        except Exception as error:  # whatever a torn file makes the reader say
            why = f"{type(error).__name__}"
        log.warning("%s cannot be used (%s): going back to the one before", path.name, why)
    return None


def steps(folder: Path) -> list[int]:
    """Steps of which there is a checkpoint."""
    return sorted(int(p.stem.removeprefix("step-")) for p in folder.glob("step-*.pt"))


def name(step: int) -> str:
    return f"step-{step:08d}.pt"


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
        save(self.folder / name(step), {"step": step, **state})
        self._prune(first_events)

    def _prune(self, first_events: dict[str, int]) -> None:
        found = steps(self.folder)
        for at in first_events.values():
            self._kept |= set([s for s in found if s <= at][-1:])
        for step in found[:-KEEP]:
            if step not in self._kept:
                (self.folder / name(step)).unlink(missing_ok=True)
