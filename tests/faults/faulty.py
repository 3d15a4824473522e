"""The real command line, with runs that go wrong as told.

    QKEXP_FAULTS='{"1": ["segfault", 5]}' python faulty.py sweep …

The key is the run's seed, the number a count of steps after which it happens. The server that runs fork from
imports this module too, which wraps the loop's ``stop``, asked after each step. Nothing in the package knows.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import qkexp.record.run
import qkexp.sweep.job as job
from qkexp.config import RunConfig

real_train = job.train


def train(cfg: RunConfig, data: Any, record: Any, stop: Callable[[], str | None], resume: Any) -> dict[str, Any]:
    kind, at = json.loads(os.environ.get("QKEXP_FAULTS", "{}")).get(str(cfg.seed), ("", 0))
    if kind == "diverge":
        cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, lr=1e30))

    def faulty_stop() -> str | None:
        if record._steps == at:
            FAULTS[kind]()
        return stop()

    return real_train(cfg, data, record, faulty_stop, resume)


def raises() -> None:
    raise KeyError("[/no] such thing")  # also what a table must not take for its own markup


def clock_back() -> None:
    real = time.time
    time.time = lambda: real() - 7200  # type: ignore[assignment]


FAULTS: dict[str, Callable[[], Any]] = {
    "": lambda: None,
    "diverge": lambda: None,
    "raise": raises,
    "exit": lambda: sys.exit(3),
    "vanish": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),  # what a lack of memory looks like
    "hang": lambda: time.sleep(3600),
    "clock_back": clock_back,
}

job.train = train
qkexp.record.run.FLUSH_SECONDS = float(os.environ.get("QKEXP_FLUSH", "2"))

if __name__ == "__main__":
    import qkexp.cli
    import qkexp.sweep.warm

    qkexp.sweep.warm.PRELOAD.append("faulty")
    sys.exit(qkexp.cli.main(sys.argv[1:]))
