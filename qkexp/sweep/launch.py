"""The local launcher: a warm pool, one process a run.

Runs fork from a server process that has imported torch, timm and this package, so a run starts in
hundredths of a second; not pandas or pyarrow, which start threads that a fork would lose. Other launches of
the same sweep may be at work: the locks in the run directories split the runs among all of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from qkexp.config import as_dict
from qkexp.record.files import read_json
from qkexp.record.lock import held, take
from qkexp.sweep.job import BUSY, CRASHED, DONE, INTERRUPTED, fail, run_frozen
from qkexp.sweep.plan import Planned
from qkexp.sweep.provenance import collect
from qkexp.sweep.status import FINISHED, signature
from qkexp.sweep.warm import context

TICK_SECONDS = 0.2
RETRY_SECONDS = 1.0  # between looks at runs that other launches train
DUMP_SECONDS = 1.0  # for the stacks of a run that hangs, before it is killed
GRACE_SECONDS = 30.0  # for checkpoints, when runs are asked to stop
CODES = {**dict.fromkeys(FINISHED, DONE), "failed": CRASHED, "interrupted": INTERRUPTED}


class Launcher(Protocol):
    """What trains the runs of a plan, here or elsewhere."""

    workers: int
    where: str  # runs compute: "here", or the name of what runs them elsewhere
    problems: list[str]  # of the last launch, beyond those of single runs

    def launch(
        self, directory: Path, runs: Sequence[Planned], *, again: bool, fail_fast: bool, tick: Callable[[], None]
    ) -> int:
        """Train runs into ``directory``. Returns 0, 1 where a run crashed, 75 where the user stopped it.

        ``tick`` is called several times a second, to show progress.
        """
        ...


@dataclass
class Running:
    """A run that this launcher trains."""

    run: Planned
    process: ForkServerProcess
    slot: int | None  # its GPU
    before: tuple[int, int]  # the outcome that an earlier attempt left
    deadline: float
    kill_at: float | None = None


class LocalLauncher:
    """Runs a plan's runs in processes of this machine.

    Args:
        workers: runs at once; None: the cores divided by ``threads``, on GPUs as many as fit.
        threads: CPU threads of one run; None: 1.
        gpus: share of a GPU that a run takes; None: 1, where runs compute on GPUs.
    """

    where = "here"

    def __init__(self, workers: int | None = None, threads: int | None = None, gpus: float | None = None):
        self.threads, self.gpus = threads or 1, gpus or 1.0
        self.asked = workers
        self.workers = workers or max(1, cores() // self.threads)
        self.running: dict[int, Running] = {}
        self.problems: list[str] = []
        self.patient = True  # waits for runs that other launches train, to say how they ended

    def launch(
        self,
        directory: Path,
        runs: Sequence[Planned],
        *,
        again: bool = False,
        fail_fast: bool = False,
        tick: Callable[[], None] = lambda: None,
        before: Mapping[str, tuple[int, int]] | None = None,
    ) -> int:
        """See :class:`Launcher`. ``before``: signatures of the runs when the launch began, if that was elsewhere."""
        self.directory, self.again, self.provenance = directory, again, collect()
        self.context = context()
        self.before = before or signatures(directory, runs)
        slots = self._slots(runs)
        waiting, code, look = deque(runs), DONE, 0.0
        try:
            while waiting or self.running:
                while slots and waiting and time.monotonic() >= look:
                    run, ended = self._next(waiting)
                    code = worst(code, ended)
                    if run is None:
                        look = time.monotonic() + RETRY_SECONDS
                    else:
                        self._start(run, slots.pop())
                if not (self.running or self.patient):
                    break
                for item in self._reap():
                    slots.append(item.slot)
                    ended = self._ended(item)
                    if ended == BUSY:  # another launch has it: look again until it has ended
                        waiting.append(item.run)
                    else:
                        code = worst(code, ended)
                if code == CRASHED and fail_fast:
                    break
                tick()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            self.stop()
        return code

    def stop(self) -> None:
        """Ask the runs to save and end; kill those that do not."""
        for item in self.running.values():
            item.process.terminate()
        end = time.monotonic() + GRACE_SECONDS
        for item in self.running.values():
            item.process.join(max(0.0, end - time.monotonic()))
            if item.process.is_alive():
                item.process.kill()
        self.running.clear()

    def _slots(self, runs: Sequence[Planned]) -> list[int | None]:
        """A slot a run at once: the GPU that it computes on, or None."""
        count = gpu_count() if any(run.config.device != "cpu" for run in runs) else 0
        slots: list[int | None] = [gpu for gpu in range(count) for _ in range(int(1 / self.gpus + 1e-6))]
        if slots:
            self.workers = min(self.asked or len(slots), len(slots))
        else:
            slots = [None] * self.workers
        return slots[: self.workers][::-1]

    def _next(self, waiting: deque[Planned]) -> tuple[Planned | None, int]:
        """The next run that nobody trains; runs that another launch ended meanwhile are done, with their code."""
        code = DONE
        for _ in range(len(waiting)):
            run = waiting.popleft()
            folder = self.directory / run.name
            if signature(folder) != self.before[run.name]:
                status = (read_json(folder / "outcome.json") or {}).get("status")
                if status in (*FINISHED, "failed"):
                    code = worst(code, CODES[status])
                    continue
            if held(folder) is None:
                return run, code
            waiting.append(run)
        return None, code

    def _start(self, run: Planned, slot: int | None) -> None:
        folder = self.directory / run.name
        before = signature(folder)
        again = self.again and before == self.before[run.name]  # else it was begun anew already, and goes on
        process = self.context.Process(
            target=run_frozen,
            args=(as_dict(run.config), str(folder), self.threads, slot, self.provenance, again),
            name=run.name,
        )
        process.start()
        timeout = run.config.train.timeout
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        self.running[process.sentinel] = Running(run, process, slot, before, deadline)

    def _reap(self) -> list[Running]:
        """Runs whose process has ended; those past their time are ended."""
        now = time.monotonic()
        for item in self.running.values():
            if item.kill_at is None and now >= item.deadline:
                item.kill_at = now + DUMP_SECONDS
                with contextlib.suppress(ProcessLookupError):
                    os.kill(item.process.pid or 0, signal.SIGQUIT)  # where it hangs goes to its log
            elif item.kill_at is not None and now >= item.kill_at:
                item.process.kill()
        ready = multiprocessing.connection.wait(list(self.running), timeout=TICK_SECONDS)
        if not self.running:
            time.sleep(TICK_SECONDS)
        ended = [self.running.pop(sentinel) for sentinel in ready]  # type: ignore[arg-type]
        for item in ended:
            item.process.join()
        return ended

    def _ended(self, item: Running) -> int:
        """How a run ended, by its outcome; one that was killed gets one here."""
        folder, code = self.directory / item.run.name, item.process.exitcode or 0
        item.process.close()
        outcome = read_json(folder / "outcome.json")
        if outcome and (code == DONE or signature(folder) != item.before):
            return CODES.get(outcome.get("status", "failed"), CRASHED)
        if code == BUSY:
            return BUSY
        reason = self._reason(item, code)
        try:
            return self._record(folder, item.run, reason, code)
        except OSError as error:  # a full disk: the directory cannot tell, so the launch does
            self.problems.append(f"{item.run.name}: {reason}; nor can that be recorded ({error.strerror})")
            return CRASHED

    def _record(self, folder: Path, run: Planned, reason: str, code: int) -> int:
        """Say in a run's directory that its process died, unless the run is another's by now."""
        left = read_json(folder / "lock") or {}
        lock = take(folder, run.steps)
        if lock is None:
            return BUSY
        try:
            with (folder / "log.txt").open("a") as log:
                hint = ", by somebody or by the system for want of memory" if code == -signal.SIGKILL else ""
                log.write(f"{reason}{hint}\n")
            fail(folder, reason, {**lock.state, "step": left.get("step", 0)})
        finally:
            lock.release()
        return CRASHED

    def _reason(self, item: Running, code: int) -> str:
        if item.kill_at is not None:
            return f"timed out: not done after train.timeout={item.run.config.train.timeout:g} seconds"
        if code >= 0:
            return f"ended with exit code {code} and without an outcome"
        return f"killed by {signal.Signals(-code).name}"


def worst(one: int, other: int) -> int:
    """Of two exit codes the one to tell: a crash before an interruption before success."""
    return max(one, other, key=(DONE, INTERRUPTED, CRASHED).index)


def signatures(directory: Path, runs: Sequence[Planned]) -> dict[str, tuple[int, int]]:
    return {run.name: signature(directory / run.name) for run in runs}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()
