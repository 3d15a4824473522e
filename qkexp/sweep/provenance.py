"""What produced a run: versions, code, host, command line."""

from __future__ import annotations

import platform
import shlex
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("qkexp", "torch", "timm", "torchvision", "numpy", "hydra-core", "omegaconf", "pyarrow")


def collect() -> dict[str, Any]:
    """Facts about this process that a run records."""
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        "code": code(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
    }


def code() -> dict[str, Any]:
    """Git commit of the package and whether it has uncommitted changes; nulls outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        commit = _git(root, "rev-parse", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return {"version": _version("qkexp"), "commit": None, "dirty": None}
    return {"version": _version("qkexp"), "commit": commit, "dirty": dirty}


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
