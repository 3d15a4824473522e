"""What copying to W&B costs the training that it runs beside: sweeps with and without it, in turns."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.sink import Busy, Failing, Refusing, Silent, nobody, sink
from benchmarks.timing import Figure, ratio, side_by_side
from qkexp.record.files import read_json
from qkexp.record.load import load_sweep
from qkexp.sweep.launch import cores

PAIRS, STEPS, WARM = 3, 300, 20
EXIT_SECONDS = 5.0
KEY = "0" * 40
# name -> the server, and the mirror's mode
SERVERS: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "online": (sink, "online"),
    "offline": (nobody, "offline"),
    "online, server gone": (nobody, "online"),
    "online, wrong key": (functools.partial(sink, Refusing), "online"),
    "online, 429 to all": (functools.partial(sink, Busy), "online"),
    "online, 500 to all": (functools.partial(sink, Failing), "online"),
    "online, never answered": (functools.partial(sink, Silent), "online"),
}


def mirror_figures(quick: bool = False, servers: Sequence[str] | None = None) -> Iterator[Figure]:
    """Time of a step with a mirror beside it / without, every core training; and how long the sweep's end takes.

    Args:
        servers: names of :data:`SERVERS`; all by default, the first where ``quick``.
    """
    steps, pairs = (20, 1) if quick else (STEPS, PAIRS)
    homes = map(str, itertools.count())
    with tempfile.TemporaryDirectory(prefix="qkexp-bench-") as folder:
        for name in servers or list(SERVERS)[: 1 if quick else None]:
            serve, mode = SERVERS[name]
            ends: list[float] = []
            with serve() as url:

                def train(*keys: str, url: str = url, ends: list[float] = ends) -> float:
                    seconds, end = _sweep(Path(folder) / next(homes), steps, url, *keys)
                    if "tracker=none" not in keys:
                        ends.append(end)
                    return seconds

                beside = functools.partial(train, f"tracker.mode={mode}")
                on, off = side_by_side(beside, functools.partial(train, "tracker=none"), pairs)
            yield ratio("mirror", f"micro step with W&B {name} / without", on, off, target=1.05, side="below")
            yield Figure("mirror", f"end of a sweep, {name}", max(ends), "s", EXIT_SECONDS, "below")


def _sweep(home: Path, steps: int, url: str, *keys: str) -> tuple[float, float]:
    """A run a core: (seconds of a step, seconds from the last run's end to the end of the process).

    Each sweep has an output folder of its own: sweeps that lie beside one another share finished runs.
    """
    directory = home / "sweep"
    seeds = f"seed=range(0,{cores()})"
    command = ["sweep", "model=vit_micro", "data=digits", seeds, f"train.steps={steps}", "optim.warmup=10", *keys]
    command += [f"output_dir={home}", f"sweep_name={directory.name}"]
    env = {**os.environ, "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_CACHE_DIR": str(directory / "cache")}
    started = time.time()
    subprocess.run([sys.executable, "-m", "qkexp", *command], env=env, check=True, capture_output=True)
    ended = [path.stat().st_mtime for path in directory.glob("*/outcome.json")]
    if min(ended) < started:
        raise RuntimeError(f"{directory} shares a run instead of training it: nothing was measured")
    end = time.time() - max(ended)
    sweep = load_sweep(directory)
    if "tracker=none" not in keys:
        _settle(directory, list(sweep.all))
    rows = [run.scalars.iloc[min(WARM, steps // 2) :] for run in sweep.all.values()]
    seconds = [float((r.step_seconds + r.probe_seconds.fillna(0)).mean()) for r in rows]
    return sum(seconds) / len(seconds), end


def _settle(directory: Path, names: list[str], patience: float = 8.0) -> None:
    """Until the mirror is done, so that the next sweep is alone; one that cannot be, with its server, is ended."""
    limit = time.monotonic() + patience
    kept = [directory / "mirror.json", *(directory / name / "mirror.json" for name in names)]
    while time.monotonic() < limit:
        found = [read_json(path) or {} for path in kept]
        if all(one.get("status") or one.get("content") for one in found):
            return
        time.sleep(0.2)
    subprocess.run(["pkill", "-f", f"mirror.process {directory}"], check=False)
