"""The lock of a run directory: which process trains the run, told to whoever can see the file.

``lock`` names host and pid of its holder and carries a heartbeat. Any number of launches, on any number of
machines that share the folder, split the runs of a sweep by nothing else. A holder that is dead is
recognised: on this host by its pid (and when that process started, for pids are given out again), on others
by a heartbeat that stands still. Whether it does is watched, not computed from the time of day: clocks of
two machines disagree, and are set back. A holder that lost its lock, because it was suspended for too long,
learns it at its next heartbeat and writes nothing more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkexp.record.files import read_json, write_text

NAME = "lock"
BEAT_SECONDS = 2.0
QUIET_SECONDS = 10.0  # of watching a heartbeat that is old already, or a lock that cannot be read
STALE_SECONDS = 60.0  # without a heartbeat, a process of another host is dead
log = logging.getLogger("qkexp")


class LockLostError(Exception):
    """Another process has taken this run over: stop, and write nothing more."""


class Lock:
    """A lock that this process holds, as :func:`take` returns it. Beats by itself until it is released."""

    def __init__(self, directory: Path, steps: int):
        self.path = directory / NAME
        self.state: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "token": secrets.token_hex(8),
            "heartbeat": time.time(),
            "step": 0,
            "steps": steps,
            "step_seconds": None,
        }
        self._lost = False
        self._mutex = threading.Lock()
        self._released = threading.Event()

    def beat(self, step: int | None = None, step_seconds: float | None = None) -> None:
        """Say that the run is alive: how many steps are done, and what one takes now.

        Raises:
            LockLostError: the lock is another's. One that was deleted or damaged is written anew.
        """
        with self._mutex:
            if step is not None:
                self.state |= {"step": step, "step_seconds": step_seconds}
            if not self._released.is_set():
                self._write()

    def release(self) -> None:
        """Give the lock back. Nothing of another holder is touched."""
        self._released.set()
        with self._mutex:
            if (read_json(self.path) or {}).get("token") == self.state["token"]:
                self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        held = read_json(self.path)
        self._lost = self._lost or (held is not None and held.get("token") != self.state["token"])
        if self._lost:
            raise LockLostError(f"{self.path.parent} was taken over by {holder(held)}")
        self.state["heartbeat"] = time.time()
        write_text(self.path, json.dumps(self.state))

    def _keep(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk: the run itself will say so
                try:
                    self.beat()
                except LockLostError:
                    return  # the run learns it when it next writes


def take(directory: Path, steps: int) -> Lock | None:
    """Take a run's lock; None where a process that lives holds it.

    A dead holder's lock is taken over. If it was another host's, its heartbeat is watched first: that takes
    some seconds, at most ``STALE_SECONDS``.
    """
    lock = Lock(directory, steps)
    seen = _content(lock.path)
    if seen is not None and not _dead(lock.path, seen):
        return None
    with _alone(directory):
        if _content(lock.path) != seen:
            return None  # another process was faster
        if seen is None:
            try:
                with lock.path.open("x") as file:  # exclusive also where the file system knows no locks
                    file.write(json.dumps(lock.state))
            except FileExistsError:
                return None
        else:
            write_text(lock.path, json.dumps(lock.state))
    threading.Thread(target=lock._keep, daemon=True, name="heartbeat").start()
    return lock


def held(directory: Path) -> dict[str, Any] | None:
    """What the lock of a run says, if its holder seems to live; a glance, without watching."""
    lock = read_json(directory / NAME)
    return lock if lock and alive(lock) else None


def alive(lock: dict[str, Any]) -> bool:
    """Whether the holder of a lock seems to live: by its process on this host, by its heartbeat on another."""
    if lock.get("host") == socket.gethostname():
        return _process_lives(lock)
    return time.time() - _heartbeat(lock) < STALE_SECONDS


def holder(lock: dict[str, Any] | None) -> str:
    """``pid 17 on node3``"""
    return f"pid {(lock or {}).get('pid')} on {(lock or {}).get('host')}"


def started(pid: int) -> int | None:
    """When a process started (ticks since boot), where /proc tells; None if it is gone, or dead but not buried."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _process_lives(lock: dict[str, Any]) -> bool:
    try:
        pid = int(lock["pid"])
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError, KeyError, TypeError):
        return False
    except PermissionError:
        pass  # another user's, and alive
    if not Path("/proc/self/stat").exists():
        return True
    since = started(pid)
    return since is not None and lock.get("started") in (None, since)


def _dead(path: Path, seen: bytes) -> bool:
    """Whether the holder of a lock is dead; watches the file where this host cannot know."""
    lock = read_json(path)
    if lock is not None and lock.get("host") == socket.gethostname():
        return not _process_lives(lock)
    quiet = STALE_SECONDS if lock is not None and alive(lock) else QUIET_SECONDS
    log.info("%s: watching the lock of %s for %.0f s", path.parent, holder(lock), quiet)
    end = time.monotonic() + quiet
    while time.monotonic() < end:
        time.sleep(0.25)
        if _content(path) != seen:
            return False
    return True


def _heartbeat(lock: dict[str, Any]) -> float:
    try:
        return float(lock.get("heartbeat", lock.get("time")))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time, by a lock of the kernel's on the log: the one file of a run that is never replaced."""
    with (directory / "log.txt").open("a") as file:
        with contextlib.suppress(OSError):  # a file system without locks: the window is microseconds
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
