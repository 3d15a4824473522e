"""The local launcher: a warm pool, one process a run.

Runs fork from a server process that has imported torch, timm and this package, so a run starts in
hundredths of a second; not pandas or pyarrow, which start threads that a fork would lose.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from qkexp.config import as_dict
from qkexp.sweep.job import BUSY, CRASHED, INTERRUPTED, fail, run_frozen
from qkexp.sweep.plan import Planned
from qkexp.sweep.provenance import collect

PRELOAD = ["qkexp.sweep.preload"]
RETRY_SECONDS = 1.0
GRACE_SECONDS = 30.0


class LocalLauncher:
    """Runs a plan's runs in processes of this machine.

    Args:
        workers: runs at once; None: the cores divided by ``threads``.
        threads: CPU threads of one run; None: 1.
    """

    def __init__(self, workers: int | None = None, threads: int | None = None):
        self.threads = threads or 1
        self.workers = workers or max(1, cores() // self.threads)

    def launch(
        self,
        directory: Path,
        runs: Sequence[Planned],
        *,
        again: bool = False,
        fail_fast: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> int:
        """Train runs into ``directory``. Returns 0, 1 where a run crashed, 75 where the user stopped it.

        ``tick`` is called several times a second, to show progress.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        provenance = collect()
        waiting: deque[tuple[float, Planned]] = deque((0.0, run) for run in runs)
        running: dict[int, tuple[Planned, ForkServerProcess]] = {}
        code = 0
        try:
            while waiting or running:
                while waiting and len(running) < self.workers and waiting[0][0] <= time.monotonic():
                    _, run = waiting.popleft()
                    process = context.Process(
                        target=run_frozen,
                        args=(as_dict(run.config), str(directory / run.name), self.threads, provenance, again),
                        name=run.name,
                    )
                    process.start()
                    running[process.sentinel] = (run, process)
                ready = multiprocessing.connection.wait(list(running), timeout=0.2)
                if not running:
                    time.sleep(0.2)
                for sentinel in ready:
                    run, process = running.pop(sentinel)  # type: ignore[arg-type]
                    process.join()
                    ended = self._ended(directory / run.name, run, process.exitcode or 0)
                    process.close()
                    if ended == BUSY:  # another launcher has it: look again until it has ended
                        waiting.append((time.monotonic() + RETRY_SECONDS, run))
                    elif ended == CRASHED or (ended == INTERRUPTED and not code):
                        code = ended
                if code == CRASHED and fail_fast:
                    waiting.clear()
                    self._stop(running)
                    break
                tick()
        except KeyboardInterrupt:
            self._stop(running)
            return INTERRUPTED
        return code

    def _ended(self, directory: Path, run: Planned, exitcode: int) -> int:
        """Make sure that a run that ended has an outcome, also where it was killed."""
        if exitcode in (0, BUSY, INTERRUPTED):
            return exitcode
        if not (directory / "outcome.json").exists():
            name = signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
            fail(directory, f"killed by {name}" if exitcode < 0 else f"ended with {name}", run.steps)
            (directory / "lock").unlink(missing_ok=True)
        return CRASHED

    def _stop(self, running: dict[int, tuple[Planned, ForkServerProcess]]) -> None:
        for _, process in running.values():
            process.terminate()
        end = time.monotonic() + GRACE_SECONDS
        for _, process in running.values():
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_launcher(name: str, options: dict[str, Any]) -> LocalLauncher:
    """A launcher by the name of its config, ``hydra/launcher=NAME``, with the keys of that config."""
    return LAUNCHERS[name](**options)


LAUNCHERS = {"local": LocalLauncher}
