"""The command line in real processes, as users start it, and with faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
MICRO = ["tracker=none", "optim.warmup=5", "train.batch_size=16", "model.width=16", "model.depth=2", "model.heads=2"]


def heed_interrupts() -> None:
    """Where the tests run in the background of a shell, their processes would be born deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """``qkexp`` in processes of its own; what still runs at the end of a test is killed."""

    def __init__(self, folder: Path):
        self.folder, self._started = folder, list[subprocess.Popen[str]]()

    def start(self, *args: str, faults: dict[int, tuple[str, int]] | None = None, flush: float = 0.2) -> Any:
        env = {**os.environ, "QKEXP_FAULTS": json.dumps(faults or {}), "QKEXP_FLUSH": str(flush)}
        env |= {"PYTHONPATH": os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])}
        process = subprocess.Popen(
            [sys.executable, str(FAULTS / "faulty.py"), args[0], f"output_dir={self.folder}", *MICRO, *args[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            preexec_fn=heed_interrupts,
        )
        self._started.append(process)
        return process

    def run(self, *args: str, faults: dict[int, tuple[str, int]] | None = None) -> tuple[int, str]:
        """Exit code and what was printed."""
        process = self.start(*args, faults=faults)
        printed, _ = process.communicate(timeout=180)
        return process.returncode, printed

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        for line in Path("/proc").glob("[0-9]*/cmdline"):  # jobs are nobody's children
            with contextlib.suppress(OSError):
                if f"{self.folder}/".encode() in line.read_bytes():
                    os.kill(int(line.parent.name), signal.SIGKILL)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    made.close()


@pytest.fixture
def wait_for() -> Callable[..., None]:
    def wait(condition: Callable[[], Any], seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited too long"
            time.sleep(0.02)

    return wait
