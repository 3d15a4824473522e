"""One run in one process: lock, log, train, outcome. A crash takes this run with it and no other."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from qkexp.config import ConfigError, RunConfig, UserError, to_typed
from qkexp.record.files import read_json, write_json
from qkexp.record.lock import Lock, LockLostError, take
from qkexp.record.run import RunWriter, intact
from qkexp.sweep.status import FINISHED
from qkexp.train import checkpoint
from qkexp.train import data as datasets
from qkexp.train.events import Event
from qkexp.train.loop import train
from qkexp.train.precision import resolve

log = logging.getLogger("qkexp")
DONE, CRASHED, WRONG_INPUT, BUSY, INTERRUPTED = 0, 1, 2, 74, 75


def run_frozen(
    config: dict[str, Any], directory: str, threads: int, gpu: int | None, provenance: dict[str, Any], again: bool
) -> None:
    """A worker's entry: train a frozen configuration into a directory and exit with a code."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as file:  # also what C libraries print when they die
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()  # where it was, when it dies of a signal
    faulthandler.register(signal.SIGQUIT)  # and when the launcher asks, before it ends a run that hangs
    _die_first()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which asks us to stop
    _stop_with_parent()
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    sys.exit(execute(to_typed(config), folder, provenance, again=again))


def execute(cfg: RunConfig, directory: Path, provenance: dict[str, Any], *, again: bool = False) -> int:
    """Train a configuration into a directory. Returns DONE, CRASHED, BUSY or INTERRUPTED."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = take(directory, cfg.train.steps)
    if lock is None:
        return BUSY
    try:
        outcome = read_json(directory / "outcome.json")
        if outcome and outcome.get("status") in FINISHED and not again:
            return DONE  # another launcher was faster
        (directory / "outcome.json").unlink(missing_ok=True)  # of an earlier attempt: whatever comes, it is not ours
        return _train(cfg, directory, provenance, lock, again=again)
    finally:
        lock.release()


def _train(cfg: RunConfig, directory: Path, provenance: dict[str, Any], lock: Lock, *, again: bool) -> int:
    prepare_cpu()
    handler = logging.FileHandler(directory / "log.txt")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    start = time.monotonic()
    try:
        resolve(cfg)
        facts = {**provenance, "device": _device_name(cfg.device), "threads": torch.get_num_threads()}
        resume = None if again else _resume(cfg, directory)
        own = cfg.branch.step  # of a branch: the steps before it are its parent's
        if own is not None and (resume is None or resume["step"] < own):
            raise UserError(f"{directory}: the state that it branched from is gone; `qkexp branch` makes it again")
        record = RunWriter(directory, cfg, facts, keep=resume["step"] if resume else 0, lock=lock)
        if resume:
            record.event(Event(resume["step"], "branched" if resume["step"] == own else "resumed"))
        log.info("training %s from step %d", directory.name, resume["step"] if resume else 0)
        with _signals() as stop:
            outcome = train(cfg, datasets.load(cfg.data), record, stop, resume)
        record.finish(outcome)
        log.info("%s after %d steps: %s", outcome["status"], outcome["step"], outcome["reason"])
        return INTERRUPTED if outcome["status"] == "interrupted" else DONE
    except LockLostError as error:
        log.error("stopped: %s", error)
        return BUSY
    except UserError as error:
        fail(directory, str(error), lock.state, time.monotonic() - start)
        log.error("%s", error)
        return CRASHED
    except BaseException as error:
        if _is_disk_full(error):
            return _disk_full(directory, lock)
        log.error("crashed\n%s", traceback.format_exc())
        code = error.code if isinstance(error, SystemExit) else None
        what = f"called sys.exit({code})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        fail(directory, what, lock.state, time.monotonic() - start)
        return CRASHED
    finally:
        log.removeHandler(handler)
        handler.close()


def _is_disk_full(error: BaseException | None) -> bool:
    """Also where a library has wrapped it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        error = error.__cause__ or error.__context__
    return False


def _disk_full(directory: Path, lock: Lock) -> int:
    """What is on disk stays readable: files are replaced whole, and what was half written goes."""
    for folder in (directory, directory / "parts", directory / "checkpoints"):
        for part in folder.glob(".*.part"):
            part.unlink(missing_ok=True)
    reason = f"no space left on the device of {directory}: free some, and the same command goes on"
    with contextlib.suppress(OSError):
        log.error("%s", reason)
        fail(directory, reason, lock.state)
    return CRASHED


def _resume(cfg: RunConfig, directory: Path) -> dict[str, Any] | None:
    """The state to go on from, where an earlier attempt left one.

    Raises:
        UserError: it was made for another number of steps, and so for another schedule.
    """
    folder = directory / "checkpoints"
    state = checkpoint.latest(folder, at_most=intact(directory)) if checkpoint.steps(folder) else None
    if state is not None and state["steps"] != cfg.train.steps:
        raise ConfigError("train.steps", cfg.train.steps, f"{state['steps']}, with which {directory} was begun")
    return state


def fail(directory: Path, reason: str, lock: Mapping[str, Any], seconds: float | None = None) -> None:
    """Record that a run failed, at the step that its lock tells; its tables stay as parts, which readers load."""
    outcome = {"status": "failed", "reason": reason, "step": lock.get("step", 0), "steps": lock.get("steps", 0)}
    write_json(directory / "outcome.json", {**outcome, "final": {}, "best": {}, "wall_seconds": seconds})


def prepare_cpu() -> None:
    """What makes small steps on a CPU fast: memory that stays in the process, and no denormal numbers.

    In collapsed attention most weights are e^-100 and smaller. Arithmetic on results under 1e-38 traps in
    hardware and takes ten times as long; flushed to zero they cost nothing and no sum changes.
    """
    keep_heap()
    torch.set_flush_denormal(True)


def keep_heap() -> None:
    """Keep freed memory in the process (glibc), instead of returning it to the system after each tensor.

    A CPU step allocates and frees the same megabytes again and again; without this the page faults
    cost 8 % of a micro step and 40 % of its probe (EXPERIMENTS.md).
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def _die_first() -> None:
    """When memory runs out, the system is to end this run and not its launcher (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


@contextlib.contextmanager
def _signals() -> Iterator[Any]:
    """SIGTERM and SIGINT ask the loop to stop after its step; yields the loop's ``stop``."""
    asked: list[str] = []
    previous = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        if number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
            continue
        previous[number] = signal.signal(number, lambda n, _: asked.append(f"stopped by {signal.Signals(n).name}"))
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop_with_parent() -> None:
    """Ask this run to stop when the launcher dies, so that no orphan trains on."""
    parent = multiprocessing.parent_process()

    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
