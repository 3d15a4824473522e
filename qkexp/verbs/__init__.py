"""The command line's verbs, a file each: ``HELP``, ``EXAMPLE``, ``arguments(parser)`` and ``run(options)``.

``run`` returns the exit code. Heavy imports stand inside functions: the help of a verb costs nothing.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol

VERBS = (
    "reproduce",
    "train",
    "sweep",
    "status",
    "verify",
    "figures",
    "sync",
    "probe",
    "data",
    "diagnose",
    "branch",
    "report",
    "serve",
    "compare",
    "dashboard",
)


class Verb(Protocol):
    """What a file of this folder holds."""

    HELP: str
    EXAMPLE: str

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


def load(name: str) -> Verb:
    """The verb of a name in :data:`VERBS`."""
    return importlib.import_module(f"qkexp.verbs.{name}")
