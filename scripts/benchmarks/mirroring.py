"""What copying to W&B costs the training that it runs beside: sweeps with and without it, in turns."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.sink import sink
from benchmarks.timing import Figure, ratio, side_by_side
from qkexp.record.files import read_json
from qkexp.record.load import load_sweep
from qkexp.sweep.launch import cores

PAIRS, STEPS, WARM = 3, 300, 20
EXIT_SECONDS = 5.0
KEY = "0" * 40


def mirror_figures(quick: bool = False) -> Iterator[Figure]:
    """Time of a step with a mirror beside it / without, every core training; and how long the sweep's end takes."""
    steps, pairs = (20, 1) if quick else (STEPS, PAIRS)
    names = itertools.count()
    with tempfile.TemporaryDirectory(prefix="qkexp-bench-") as folder, sink() as url:
        for mode in ("online",) if quick else ("online", "offline"):
            ends: list[float] = []

            def train(*keys: str, ends: list[float] = ends) -> float:
                seconds, end = _sweep(Path(folder) / str(next(names)), steps, url, *keys)
                if "tracker=none" not in keys:
                    ends.append(end)
                return seconds

            beside = functools.partial(train, f"tracker.mode={mode}")
            on, off = side_by_side(beside, functools.partial(train, "tracker=none"), pairs)
            yield ratio("mirror", f"micro step with W&B {mode} / without", on, off, target=1.05, side="below")
            yield Figure("mirror", f"end of a sweep, {mode}", max(ends), "s", EXIT_SECONDS, "below")


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
        _wait(directory, list(sweep.all))
    rows = [run.scalars.iloc[min(WARM, steps // 2) :] for run in sweep.all.values()]
    seconds = [float((r.step_seconds + r.probe_seconds.fillna(0)).mean()) for r in rows]
    return sum(seconds) / len(seconds), end


def _wait(directory: Path, names: list[str], patience: float = 60.0) -> None:
    """Until the mirror is done, so that the next sweep is alone."""
    limit = time.monotonic() + patience
    kept = [directory / "mirror.json", *(directory / name / "mirror.json" for name in names)]
    while time.monotonic() < limit:
        found = [read_json(path) or {} for path in kept]
        if all(one.get("status") or one.get("content") for one in found):
            return
        time.sleep(0.2)
