"""Converted data files: written under a lock, whole or not there, and known by their checksum."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

log = logging.getLogger("qkexp")
Arrays = dict[str, np.ndarray]  # train_x, val_x: (n, C, size, size); train_y, val_y: (n,)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock. The kernel gives it back when its holder dies, so none is ever stale."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some cluster file systems have no locks: twice the work, the same file
            log.warning("%s cannot be locked (%s)", path, error)
        yield


def write_arrays(path: Path, arrays: Arrays, *, checked: bool = True) -> None:
    """Write a converted file and its checksum, each whole or not at all.

    The checksum goes first: whoever reads in between finds that the two differ, never that half a file
    is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        if checked:
            checksum = part.with_suffix(".sha256")
            checksum.write_text(f"{_sha256(part)}  {path.name}\n")  # as sha256sum writes and checks it
            checksum.replace(_checksum_file(path))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_arrays(path: Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def is_whole(path: Path) -> bool:
    """Whether a converted file is there and has its checksum."""
    try:
        return _checksum_file(path).read_text().split()[0] == _sha256(path)
    except (OSError, IndexError):
        return False


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
