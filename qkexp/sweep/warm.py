"""The server that runs fork from. It imports torch on one core while its launcher still does so on another."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOAD = ["qkexp.sweep.preload"]


def context() -> ForkServerContext:
    """Processes that fork from the server."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    return made


def warm_up() -> None:
    """Start the server now; it ends with this process."""
    context()
    forkserver.ensure_running()
