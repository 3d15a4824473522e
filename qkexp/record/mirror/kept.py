"""mirror.json: which W&B run a directory is copied to, and how far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from qkexp.record.files import read_json, write_json

NAME = "mirror.json"


@dataclass
class Kept:
    """A W&B run. ``files`` is where wandb keeps its own, relative to the directory."""

    id: str
    project: str
    mode: str
    entity: str | None = None
    server: str | None = None  # whose address it was last opened at
    url: str | None = None
    files: str | None = None

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """None where there is none, or a torn one: then a new id is made."""
        kept = read_json(directory / NAME) or {}
        try:
            return cls(**{f.name: kept[f.name] for f in fields(cls) if f.name in kept})
        except TypeError:
            return None

    def store(self, directory: Path) -> None:
        write_json(directory / NAME, asdict(self))


@dataclass
class KeptRun(Kept):
    """Of a run directory."""

    next_step: int = 0  # rows handed to wandb
    arrived: int = 0  # rows of which the server has said that it has them
    attempt: int = 0
    last: str | None = None  # fingerprint of the last row handed over
    settings: str | None = None  # hash of the configuration that decides what a row holds
    status: str | None = None  # the run's, once all of it was copied
    judged: str | None = None  # hash of what was found about the run later


@dataclass
class KeptSweep(Kept):
    """Of a sweep's directory."""

    uploads: int = 0  # each is a step
    content: str | None = None  # hash of what was sent last
