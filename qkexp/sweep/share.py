"""Finished runs that several sweeps need: trained once, and then whole in the directory of each.

A run is taken over from a sweep under the same output directory when nothing of it is here yet and its
identity is the same to the last digit. Its files are hard links, so they cost no space, and each sweep can be
deleted or trained again without the other: files of a run are replaced, never changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qkexp.config import identity, to_typed
from qkexp.record.files import read_json
from qkexp.sweep.status import FINISHED

OWN = ("mirror.json", "wandb", "lock", "branches")  # of the sweep where it was trained
APPENDED = ("log.txt", "events.jsonl")


@dataclass(frozen=True)
class Shared:
    """A finished run of another sweep."""

    name: str
    directory: Path


def elsewhere(
    directory: Path, wanted: Mapping[str, str], fits: Callable[[str, dict[str, Any]], bool]
) -> dict[str, Shared]:
    """Of the wanted runs (name -> identity) those that have finished in sweeps beside ``directory``.

    ``fits`` says of a name and a stored configuration whether it recorded enough.
    """
    found: dict[str, Shared] = {}
    for other in sorted(p for p in directory.parent.glob("*/") if p != directory):
        for name in wanted.keys() - found.keys():
            config = _finished(other / name, wanted[name])
            if config is not None and fits(name, config):
                found[name] = Shared(name, other / name)
    return found


def _finished(directory: Path, mark: str) -> dict[str, Any] | None:
    """The configuration of a run that has finished here, with its tables, and has this identity."""
    outcome = read_json(directory / "outcome.json")
    if not outcome or outcome.get("status") not in FINISHED or not (directory / "scalars.parquet").exists():
        return None
    try:
        config = yaml.safe_load((directory / "config.yaml").read_text())
        return config if identity(to_typed(config)) == mark else None
    except Exception:  # of another version, or damaged: then it is not the same run
        return None


def adopt(run: Shared, directory: Path) -> None:
    """Make a finished run of another sweep a run of this one: all of it, or nothing."""
    target, part = directory / run.name, directory / f".{run.name}.{os.getpid()}.part"
    shutil.copytree(run.directory, part, copy_function=_link, ignore=shutil.ignore_patterns(*OWN, ".*"))
    try:
        part.rename(target)
    except OSError:  # another launch was faster
        shutil.rmtree(part)


def _link(source: str, target: str) -> None:
    if Path(source).name not in APPENDED:
        try:
            os.link(source, target)
            return
        except OSError:  # another device, or a file system without links
            pass
    shutil.copy2(source, target)
