"""The mirror's process, ``python -m qkexp.record.mirror.process``, and the handle by which its parent holds it.

Training never imports wandb: a dead server, a full disk or a slow upload touch this process only. It
looks at the directories every few seconds. The directory is the truth: ``mirror.json`` in it keeps the
W&B id, and a later call (``qkexp sync DIR``) goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qkexp.record.files import read_json

POLL_SECONDS = 5.0  # rarely: each look costs CPU time next to training
RETRY_SECONDS = 60.0  # after a failure, or while the server cannot be reached
LAST_SECONDS = 60.0  # what a mirror may take after its parent has said that all runs ended, or has died
AT_ONCE = 8  # runs that are ended at once: most of it is waiting for the server
log = logging.getLogger("qkexp.mirror")


class Copied(Protocol):
    """What is copied: a run (``run.Copy``) or a sweep as a whole (``sweep.SweepCopy``)."""

    directory: Path
    error: str | None
    retry_at: float
    done: str
    rows: int

    @property
    def mode(self) -> str: ...
    def advance(self, final: bool) -> None: ...


# ---------------------------------------------------------------- the parent's side


@dataclass
class Mirror:
    """A mirror process, seen from the process that started it."""

    process: subprocess.Popen[bytes]
    directory: Path
    names: tuple[str, ...]

    def close(self, timeout: float | None) -> str | None:
        """Say that all runs ended and wait for the rest to be copied; returns a warning where it was not.

        What is not done in time goes on without us, for a minute at most, and ends by itself. Of offline runs nothing
        is told then: nobody watches them, and ``qkexp sync`` makes what they lack.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it may be dead
            self.process.stdin.write(b"\n")  # a fork may hold the pipe open, so the end is said as well
            self.process.stdin.close()
        try:
            if self.process.wait(timeout) == 0:
                return None
        except subprocess.TimeoutExpired:
            if {record.get("mode") for record in self._records() if record} == {"offline"}:
                return None
            tail = f"goes on in the background for {LAST_SECONDS:.0f} s at most; if anything is missing then"
        else:
            tail = f"see {self.directory / 'mirror.log'}; later"
        left = [record.get("status") is None for record in self._records()]
        what = f"{sum(left)} of {len(left)} runs" if any(left) else "the sweep's own tables and figures are"
        return f"W&B: {what} not copied yet; {tail}: qkexp sync {self.directory}"

    def _records(self) -> list[dict[str, Any]]:
        """What each run that has begun keeps of its copy; empty where nothing is copied yet."""
        begun = [self.directory / name for name in self.names if (self.directory / name / "config.yaml").exists()]
        return [read_json(directory / "mirror.json") or {} for directory in begun]


def start(directory: Path, names: Sequence[str], project: str, mode: str, group: str, *, sweep: bool = False) -> Mirror:
    """Start mirroring the runs ``names`` of a directory; they need not exist yet.

    Args:
        directory: the sweep's.
        names: run directories in it.
        project: W&B project.
        mode: online, offline, or auto (what ``WANDB_MODE`` says, else online where there is a login).
        group: W&B group of the runs.
        sweep: copy what belongs to the sweep as a whole too, at the end.
    """
    command = [sys.executable, "-m", "qkexp.record.mirror.process", str(directory), *names]
    command += ["--project", project, "--mode", mode, "--group", group, *(["--sweep"] if sweep else [])]
    # one thread each: it shares the machine with training (wandb's service is written in Go)
    env = {"WANDB_ERROR_REPORTING": "false", **os.environ, "OMP_NUM_THREADS": "1", "GOMAXPROCS": "1"}
    with (directory / "mirror.log").open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,  # Ctrl-C is for the runs: their last rows are still to be copied
        )
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: no priorities on Windows
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    return Mirror(process, directory, tuple(names))


# ---------------------------------------------------------------- the child's side


def serve(copies: Sequence[Copied], ended: threading.Event) -> int:
    """Poll until ``ended`` or orphaned, then copy the rest. Returns 0, or 1 where something was not copied."""
    parent, wait = os.getppid(), POLL_SECONDS
    while not ended.wait(wait) and os.getppid() == parent:
        wait = POLL_SECONDS if poll(copies, final=False) else RETRY_SECONDS
    threading.Thread(target=_end_in_time, daemon=True).start()
    reached = poll(copies, final=True)
    failed = [copy for copy in copies if copy.error]
    for copy in failed:
        log.error("%s is not copied: %s", copy.directory.name, copy.error)
    return int(not reached or bool(failed))


def poll(copies: Sequence[Copied], final: bool, tick: Callable[[Copied], None] = lambda _: None) -> bool:
    """Advance everything; what fails does not stop the others. False: the server cannot be reached.

    ``tick`` is called after each, from several threads where ``final``.
    """
    due = [copy for copy in copies if final or _is_due(copy)]
    gone = threading.Event()

    def one(copy: Copied) -> None:
        if gone.is_set():
            copy.error = copy.error or "the server cannot be reached"
        elif not _advance(copy, final):
            gone.set()
        tick(copy)

    if final and len(due) > 1:
        one(due[0])  # alone: a server that is not there is asked once, not by every run
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, due[1:]))
    else:
        for copy in due:
            one(copy)
    return not gone.is_set()


def _is_due(copy: Copied) -> bool:
    if copy.mode == "offline" and not _has_ended(copy.directory):  # nobody watches it grow; a look costs CPU time
        return False
    return time.monotonic() >= copy.retry_at


def _has_ended(directory: Path) -> bool:
    return (directory / "outcome.json").exists() and not (directory / "lock").exists()


def _advance(copy: Copied, final: bool) -> bool:
    import wandb

    try:
        copy.advance(final)
        copy.error = None
    except Exception as error:
        copy.error = f"{type(error).__name__}: {error}"
        copy.retry_at = time.monotonic() + RETRY_SECONDS
        if isinstance(error, wandb.errors.CommError):
            log.error("%s: %s", copy.directory.name, error)
            return False
        log.exception("%s", copy.directory.name)
    return True


def _await_end(ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        os.read(0, 1)  # a byte, or the end of the pipe: the parent closed it or died
    ended.set()


def _end_in_time() -> None:
    """Nobody waits for the last rows for ever: the directories have them."""
    time.sleep(LAST_SECONDS)
    log.error("not done after %.0f s: the rest is left to qkexp sync", LAST_SECONDS)
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """The mirror process: ends when its standard input ends and everything is copied."""
    from qkexp.record.mirror.login import resolve_mode
    from qkexp.record.mirror.run import Copy
    from qkexp.record.mirror.sweep import SweepCopy

    parser = argparse.ArgumentParser(prog="python -m qkexp.record.mirror.process", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of the sweep")
    parser.add_argument("names", nargs="*", help="run directories in it")
    parser.add_argument("--project", default="qkexp", help="W&B project")
    parser.add_argument("--mode", default="auto", choices=("auto", "online", "offline"))
    parser.add_argument("--group", default=None, help="W&B group; the directory's name by default")
    parser.add_argument("--sweep", action="store_true", help="copy claims, figures and the table of runs, too")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    try:
        mode = resolve_mode(args.mode)
    except ValueError as error:
        log.error("%s", error)
        return 1
    log.info("%d runs of %s, %s", len(args.names), args.directory, mode or "disabled by WANDB_MODE")
    if mode is None:
        return 0
    _import_early()
    group = args.group or args.directory.resolve().name
    copies: list[Copied] = [Copy(args.directory / name, args.project, mode, group) for name in args.names]
    if args.sweep:
        copies.insert(1, SweepCopy(args.directory, args.project, mode, group))  # soon, but behind one that probes
    return serve(copies, ended)


def _import_early() -> None:
    """Import what copying needs while the runs are still starting: later it would take time from their steps."""
    import PIL.Image  # noqa: F401
    import wandb.apis.public  # noqa: F401


def _teardown() -> None:
    """Let wandb's service write its last: a run that it has closed may not be on the disk yet."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()


if __name__ == "__main__":
    code = main()
    _teardown()  # no longer than LAST_SECONDS allows, should it wait for a server that is gone
    logging.shutdown()
    os._exit(code)  # without wandb's own hooks at exit
