"""Sweeps of large stored runs that nobody trained: what reading them costs does not depend on their values."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from qkexp.compose import compose_sweep
from qkexp.config import as_dict
from qkexp.probe.metrics import NAMES
from qkexp.record.files import write_json
from qkexp.record.run import MEASURED, SCALARS, write_table
from qkexp.sweep.plan import Plan

KINDS = 4  # different tables: runs of one kind share their files, and each reads them for itself
MODEL = ["model.name=vit_small_patch16_224", "model.width=192", "tracker=none"]


def store(folder: Path, overrides: Sequence[str], steps: int, depth: int, heads: int) -> Plan:
    """A finished sweep of these runs, ``steps`` long, each probed at every step."""
    shape = [f"train.steps={steps}", f"model.depth={depth}", f"model.heads={heads}", f"output_dir={folder}"]
    plan = Plan.of(compose_sweep([*overrides, *MODEL, *shape]))
    plan.write()
    made = [_tables(folder / f"kind{kind}", kind, steps, depth, heads) for kind in range(KINDS)]
    for number, run in enumerate(plan.runs):
        kind, home = number % KINDS, plan.directory / run.name
        home.mkdir()
        (home / "config.yaml").write_text(yaml.dump(as_dict(run.config), Dumper=yaml.CSafeDumper, sort_keys=False))
        (home / "events.jsonl").touch()
        for table in made[kind]:
            os.link(table, home / table.name)
        loss = 0.5 + 0.1 * kind
        final = {"loss": loss, "lowest_loss": 0.4, "val_loss": loss, "val_accuracy": 0.8}
        outcome = {"status": "completed", "reason": "", "step": steps, "steps": steps, "final": final, "best": {}}
        write_json(home / "outcome.json", {**outcome, "constant_loss": math.log(10)})
    return plan


def in_a_process(code: str, directory: Path) -> dict[str, Any]:
    """What a script prints as JSON; in a process of its own, what it takes in memory is its own, too."""
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _tables(folder: Path, kind: int, steps: int, depth: int, heads: int) -> tuple[Path, Path]:
    """Tables of one run, of noise that no encoding makes small."""
    folder.mkdir()
    draw = np.random.default_rng(kind)
    scalars = {name: draw.random(steps) for name in MEASURED}
    scalars["loss"] = 2.3 / (1 + np.arange(steps)) + 0.2 * draw.random(steps)
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
