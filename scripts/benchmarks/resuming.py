"""How soon a large sweep goes on: 1,000 runs planned, 995 of them done."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.timing import Figure
from qkexp.compose import compose_sweep
from qkexp.config import as_dict
from qkexp.record.files import write_json
from qkexp.sweep.plan import Plan, Planned
from qkexp.sweep.provenance import collect

SWEEP = ["attention=none,layernorm,rmsnorm,l2", "optim.lr=1e-3,3e-3,1e-2,3e-2,1e-1", "tracker=none", "train.steps=20"]
MISSING = 5


def resume_figures(quick: bool = False) -> Iterator[Figure]:
    """Seconds from the command to the start of the last missing run."""
    with tempfile.TemporaryDirectory(prefix="qkexp-bench-") as folder:
        seeds = 2 if quick else 50
        command = [*SWEEP, f"seed=range(0,{seeds})", f"output_dir={folder}", f"hydra.launcher.workers={MISSING}"]
        plan, made = Plan.of(compose_sweep(command)), collect()
        for run in plan.runs[MISSING:]:
            finished(plan.directory / run.name, run, made)
        start = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "qkexp", "sweep", *command], stdout=subprocess.DEVNULL)
        logs = [plan.directory / run.name / "log.txt" for run in plan.runs[:MISSING]]
        while process.poll() is None and not all(log.exists() and "training" in log.read_text() for log in logs):
            time.sleep(0.05)
        took = time.monotonic() - start
        process.wait()
    detail = {"planned": len(plan.runs), "missing": MISSING, "exit_code": process.returncode}
    yield Figure("sweep", f"the last {MISSING} of {len(plan.runs)} runs start after", took, "s", 10.0, "below", detail)


def finished(directory: Path, run: Planned, made: dict[str, object]) -> None:
    """A run directory as if the run had ended, but for its tables."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.dump(as_dict(run.config), Dumper=yaml.CSafeDumper, sort_keys=False))
    write_json(directory / "provenance.json", made)
    write_json(directory / "outcome.json", {"status": "completed", "step": run.steps, "steps": run.steps})
