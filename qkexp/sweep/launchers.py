"""Launchers by the name of their config, ``hydra/launcher=NAME``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkexp.sweep.launch import Launcher, LocalLauncher
from qkexp.sweep.remote import REMOTE

LAUNCHERS: dict[str, Callable[..., Launcher]] = {"local": LocalLauncher, **REMOTE}


def make_launcher(name: str, options: dict[str, Any]) -> Launcher:
    """A launcher by its name, with the keys of its config."""
    return LAUNCHERS[name](**options)
