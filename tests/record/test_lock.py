"""The lock of a run: one holder, known to be dead or alive, on whatever machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qkexp.record import lock as locks
from qkexp.record.files import read_json
from qkexp.record.lock import Lock, LockLostError, alive, held, started, take

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(locks, "QUIET_SECONDS", 0.6)
    monkeypatch.setattr(locks, "STALE_SECONDS", 1.2)


@pytest.fixture
def dead() -> int:
    """A pid that is no process's."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Any]:
    """A holder on another host, whose clock may be wrong; beats until told to stop."""
    stop = threading.Event()
    threads = []

    def start(offset: float, beats: bool = True) -> None:
        def write() -> None:
            state = {"host": "elsewhere", "pid": 1, "token": "t", "heartbeat": time.time() + offset, "n": time.time()}
            locks.write_text(tmp_path / "lock", json.dumps(state))

        def keep() -> None:
            while not stop.wait(0.05):
                write()

        write()
        if beats:
            threads.append(threading.Thread(target=keep))
            threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join()


def take_and_report(directory: Path, barrier: Any, won: Any) -> None:
    barrier.wait()
    lock = take(directory, 1)
    if lock is not None:
        won.put(os.getpid())
        time.sleep(1.0)  # holds it while the others try
        lock.release()


@pytest.mark.parametrize("stale", [False, True], ids=["free", "left by the dead"])
def test_of_many_that_take_a_lock_at_once_one_gets_it(tmp_path: Path, dead: int, stale: bool) -> None:
    context = multiprocessing.get_context("fork")
    for round_ in range(5):
        folder = tmp_path / str(round_)
        folder.mkdir()
        if stale:
            (folder / "lock").write_text(json.dumps({"host": HERE, "pid": dead, "heartbeat": time.time()}))
        barrier, won = context.Barrier(6), context.Queue()
        processes = [context.Process(target=take_and_report, args=(folder, barrier, won)) for _ in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(20)
        winners = [won.get(timeout=5)]
        assert won.empty(), winners
        assert not (folder / "lock").exists()


def test_lock_names_host_pid_heartbeat_and_progress_and_goes_when_released(tmp_path: Path) -> None:
    lock = take(tmp_path, 100)
    assert lock is not None
    lock.beat(7, 0.5)
    said = read_json(tmp_path / "lock")
    assert said is not None
    assert (said["host"], said["pid"], said["step"], said["steps"], said["step_seconds"]) == (
        HERE,
        os.getpid(),
        7,
        100,
        0.5,
    )
    first = said["heartbeat"]
    time.sleep(0.3)
    assert (read_json(tmp_path / "lock") or {})["heartbeat"] > first, "it beats by itself"
    assert take(tmp_path, 100) is None
    lock.release()
    assert not (tmp_path / "lock").exists()
    lock.beat(8)
    assert not (tmp_path / "lock").exists(), "what was given back stays away"


def test_lock_of_a_pid_that_was_given_out_again_is_stale(tmp_path: Path) -> None:
    mine = {"host": HERE, "pid": os.getpid(), "heartbeat": 0}
    assert alive(mine)
    assert alive({**mine, "started": started(os.getpid())})
    assert not alive({**mine, "started": 1})


def test_a_dead_process_that_is_not_buried_yet_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        time.sleep(0.5)
        if not Path(f"/proc/{process.pid}/stat").exists():
            pytest.skip("no /proc")
        assert not alive({"host": HERE, "pid": process.pid})
    finally:
        process.wait()


@pytest.mark.parametrize("offset", [0.0, -7200.0, 7200.0], ids=["right", "behind", "ahead"])
def test_a_holder_elsewhere_that_beats_is_never_robbed_whatever_its_clock_says(
    tmp_path: Path, elsewhere: Any, offset: float
) -> None:
    elsewhere(offset)
    assert take(tmp_path, 1) is None


@pytest.mark.parametrize("offset", [0.0, -7200.0, 7200.0], ids=["right", "behind", "ahead"])
def test_a_holder_elsewhere_that_beats_no_more_is_dead_whatever_its_clock_says(
    tmp_path: Path, elsewhere: Any, offset: float
) -> None:
    elsewhere(offset, beats=False)
    lock = take(tmp_path, 1)
    assert lock is not None
    lock.release()


def test_a_holder_that_lost_its_lock_stops_and_touches_nothing_of_the_new_one(tmp_path: Path) -> None:
    lock = take(tmp_path, 1)
    assert lock is not None
    other = {"host": "elsewhere", "pid": 5, "token": "new", "heartbeat": time.time()}
    locks.write_text(tmp_path / "lock", json.dumps(other))
    with pytest.raises(LockLostError, match="pid 5 on elsewhere"):
        lock.beat(3)
    lock.release()
    assert read_json(tmp_path / "lock") == other


@pytest.mark.parametrize("damage", [b"", b"\x00garbage{", b"[]"])
def test_a_damaged_lock_is_repaired_by_its_holder_and_taken_over_from_the_dead(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "lock").write_bytes(damage)
    assert held(tmp_path) is None
    lock = take(tmp_path, 1)
    assert lock is not None
    (tmp_path / "lock").write_bytes(damage)
    assert take(tmp_path, 1) is None, "its holder lives, and writes it anew"
    lock.release()


def test_locks_of_the_first_version_are_understood(dead: int) -> None:
    assert not alive({"host": HERE, "pid": dead, "time": time.time()})
    assert alive({"host": "elsewhere", "pid": 1, "time": time.time()})
    assert not alive({"host": "elsewhere", "pid": 1, "time": time.time() - 3600})


def test_a_lock_not_taken_by_take_does_not_beat(tmp_path: Path) -> None:
    Lock(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
