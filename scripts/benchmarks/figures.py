"""Figures of a large sweep: 1,000 stored runs of 1,000 steps, 12 layers and 12 heads."""

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

RUNS = ["attention=none,layernorm,rmsnorm,l2,softcap", "optim.lr=3e-3,1e-2,3e-2,1e-1", "tracker=none"]
KINDS = 4  # different tables: runs of one kind share their files

# in a process of its own: what it takes in memory is then its own, too
DRAW = """
import json, resource, sys, time
start = time.monotonic()
from pathlib import Path
from qkexp.analysis.figures import draw
drawn = draw(Path(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.monotonic() - start, "gb": peak / 1e6, "figures": [p.stem for p in drawn]}))
"""


def figure_figures(quick: bool = False) -> Iterator[Figure]:
    """Seconds and memory from the command's start to the last file."""
    seeds, steps, depth, heads = (2, 30, 2, 2) if quick else (50, 1000, 12, 12)
    with tempfile.TemporaryDirectory(prefix="qkexp-bench-") as folder:
        shape = [f"train.steps={steps}", "model.name=vit_small_patch16_224", f"model.depth={depth}"]
        size = [f"model.heads={heads}", "model.width=192", f"seed=range(0,{seeds})", f"output_dir={folder}"]
        plan = Plan.of(compose_sweep([*RUNS, *shape, *size]))
        plan.write()
        made = [_tables(Path(folder) / f"kind{kind}", kind, steps, depth, heads) for kind in range(KINDS)]
        for number, run in enumerate(plan.runs):
            kind = number % KINDS
            home = plan.directory / run.name
            home.mkdir()
            text = yaml.dump(as_dict(run.config), Dumper=yaml.CSafeDumper, sort_keys=False)
            (home / "config.yaml").write_text(text)
            (home / "events.jsonl").touch()
            for table in made[kind]:
                os.link(table, home / table.name)
            final = {"loss": 0.5 + 0.1 * kind, "val_loss": 0.5 + 0.1 * kind, "val_accuracy": 0.8}
            outcome = {"status": "completed", "reason": "", "step": steps, "steps": steps, "final": final, "best": {}}
            write_json(home / "outcome.json", {**outcome, "constant_loss": math.log(10)})
        command = [sys.executable, "-c", DRAW, str(plan.directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    detail = {"runs": len(plan.runs), "steps": steps, "layers": depth, "heads": heads, "figures": found["figures"]}
    name = f"{', '.join(found['figures'])} of {len(plan.runs)} runs"
    yield Figure("figures", f"{name}: load and draw", found["seconds"], "s", 60.0, "below", detail)
    yield Figure("figures", f"{name}: memory", found["gb"], "GB", 4.0, "below", detail)


def _tables(folder: Path, kind: int, steps: int, depth: int, heads: int) -> tuple[Path, Path]:
    """Tables of one run, of noise that no encoding makes small."""
    folder.mkdir()
    draw = np.random.default_rng(kind)
    scalars = {name: draw.random(steps) for name in MEASURED}
    scalars["loss"] = 2.3 / (1 + np.arange(steps)) + 0.2 * draw.random(steps)
    write_table(folder / "scalars.parquet", pa.table({"step": np.arange(steps), **scalars}).cast(SCALARS))
    rows, places = steps * depth * heads, np.arange(steps * depth * heads)
    layer = (places // heads % depth).astype(np.int32)
    columns = {
        "step": (places // (depth * heads)).astype(np.int32),
        "phase": pa.array(["train"] * rows).dictionary_encode(),
        "layer": layer,
        "module": pa.DictionaryArray.from_arrays(layer, [f"blocks.{i}.attn" for i in range(depth)]),
        "head": (places % heads).astype(np.int32),
        **{name: draw.random(rows, dtype=np.float32) for name in NAMES},
    }
    write_table(folder / "attention.parquet", pa.table(columns))
    return folder / "scalars.parquet", folder / "attention.parquet"
