"""The report of a large sweep: 100 stored runs of 1,000 steps, 12 layers and 12 heads."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml

from benchmarks.timing import Figure
from qkexp.compose import compose_sweep
from qkexp.config import as_dict
from qkexp.probe.metrics import NAMES
from qkexp.record.files import write_json
from qkexp.record.run import MEASURED, SCALARS, write_table
from qkexp.sweep.plan import Plan

RUNS = ["attention=none,layernorm,rmsnorm,l2,softcap", "optim.lr=1e-2,1e-1", "tracker=none"]

# in a process of its own: what it takes in memory is then its own, too
WRITE = """
import json, resource, sys, time
start = time.monotonic()
from pathlib import Path
from qkexp.analysis.report import write_report
path = write_report(Path(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.monotonic() - start, "gb": peak / 1e6, "mb": path.stat().st_size / 1e6}))
"""


def report_figures(quick: bool = False) -> Iterator[Figure]:
    """Seconds and memory from the command's start to the file, and its size."""
    seeds, steps, depth, heads = (1, 30, 2, 2) if quick else (10, 1000, 12, 12)
    shape = [f"train.steps={steps}", "model.name=vit_small_patch16_224", f"model.depth={depth}", f"model.heads={heads}"]
    shape += ["model.width=192", f"seed=range(0,{seeds})"]
    with tempfile.TemporaryDirectory(prefix="qkexp-bench-") as folder:
        plan = Plan.of(compose_sweep([*RUNS, *shape, f"output_dir={folder}"]))
        plan.write()
        tables = _tables(Path(folder) / "tables", steps, depth, heads)
        for run in plan.runs:
            home = plan.directory / run.name
            home.mkdir()
            (home / "config.yaml").write_text(yaml.dump(as_dict(run.config), Dumper=yaml.CSafeDumper, sort_keys=False))
            for table in tables:  # every run has the same numbers, and reads them for itself
                os.link(table, home / table.name)
            final = {"loss": 0.5, "lowest_loss": 0.4, "val_loss": 0.5, "val_accuracy": 0.8}
            outcome = {"status": "completed", "reason": "", "step": steps, "steps": steps, "final": final, "best": {}}
            write_json(home / "outcome.json", {**outcome, "constant_loss": math.log(10)})
        command = [sys.executable, "-c", WRITE, str(plan.directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    detail = {"runs": len(plan.runs), "steps": steps, "layers": depth, "heads": heads}
    name = f"of {len(plan.runs)} runs"
    yield Figure("report", f"{name}: load and write", found["seconds"], "s", 20.0, "below", detail)
    yield Figure("report", f"{name}: memory", found["gb"], "GB", 2.0, "below", detail)
    yield Figure("report", f"{name}: file", found["mb"], "MB", 10.0, "below", detail)


def _tables(folder: Path, steps: int, depth: int, heads: int) -> tuple[Path, Path]:
    """Tables of one run, of noise that no encoding makes small."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    scalars = {name: draw.random(steps) for name in MEASURED}
    write_table(folder / "scalars.parquet", pa.table({"step": np.arange(steps), **scalars}).cast(SCALARS))
    rows = steps * depth * heads
    place = np.arange(rows)
    layer = (place // heads % depth).astype(np.int32)
    columns = {
        "step": (place // (depth * heads)).astype(np.int32),
        "phase": pa.array(["train"] * rows).dictionary_encode(),
        "layer": layer,
        "module": pa.DictionaryArray.from_arrays(layer, [f"blocks.{i}.attn" for i in range(depth)]),
        "head": (place % heads).astype(np.int32),
        **{name: np.exp(draw.normal(0, 3, rows)).astype(np.float32) for name in NAMES},
    }
    write_table(folder / "attention.parquet", pa.table(columns))
    return folder / "scalars.parquet", folder / "attention.parquet"
