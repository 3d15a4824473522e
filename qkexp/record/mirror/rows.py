"""The rows of a run directory as W&B gets them: one a step, scalars and layers' values together.

What a row leaves out, because each key costs CPU time next to a training run: zeros of ``masked_rows``
and ``nonfinite``, ``max_logit_capped`` where there is no cap (it equals ``max_logit``), and a fixed
``score_scale`` after step 0. A value that is not finite is left out and counted as ``nonfinite``.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qkexp.config import RunConfig
from qkexp.probe.metrics import GROUPS, NAMES
from qkexp.record.layers import Layers
from qkexp.record.load import Run
from qkexp.record.run import MEASURED

CHUNK = 2000  # steps read at once
LEARNED_SCALES = ("learned", "learned_per_head")
# attn/worst/<metric>: of all layers the one that is worst off, so that a chart needs one line a run
WORST = {"max_abs_logit": np.fmax, "attn_max_mean": np.fmax, "collapsed_rows": np.fmax, "entropy_frac": np.fmin}


class TablesChanged(Exception):
    """A part was merged away since it was listed: ask again."""


def budget(cfg: RunConfig) -> str:
    """How many keys a row has at most, in words: W&B has limits, and each costs time."""
    fixed = len(MEASURED) + 1 + len(WORST)
    each = len(NAMES) + sum(len(GROUPS[group]) for group in cfg.probe.groups)
    if not cfg.probe.every:
        return f"at most {len(MEASURED) + 1} keys a step"
    if cfg.model.depth is None:
        return f"at most {fixed} keys a step and {each} a layer"
    return f"at most {fixed + each * cfg.model.depth} keys a step"


def new_rows(run: Run, since: int, ended: bool) -> list[tuple[int, dict[str, float]]]:
    """At most ``CHUNK`` rows from step ``since`` on, without a gap: (step, scalars and layer values).

    A probed step waits until its attention rows are there.

    Raises:
        TablesChanged: while they were read.
    """
    scalars = read(run.directory, "scalars", since, CHUNK)
    if scalars is None:
        return []
    attention = _layer_rows(run, read(run.directory, "attention", since, CHUNK))
    every = run.config["probe"]["every"]
    rows = []
    for expected, row in enumerate(scalars.to_pylist(), start=since):
        step = row.pop("step")
        waits = every and step % every == 0 and step not in attention
        if not ended and (waits or step != expected):
            break
        measured = {k: v for k, v in row.items() if v is not None} | attention.get(step, {})
        sent = {k: v for k, v in measured.items() if math.isfinite(v)}
        if len(sent) < len(measured):
            sent["nonfinite"] = len(measured) - len(sent)
        rows.append((step, sent))
    return rows


def fingerprint(directory: Path, step: int) -> str | None:
    """What a step's scalars say, the times apart; None where the directory has no such step.

    A run that was trained again says the same at the same step exactly if it computed the same: any
    difference before it has spread to every loss since.

    Raises:
        TablesChanged: while it was read.
    """
    table = read(directory, "scalars", step, 1)
    if table is None:
        return None
    row = {k: v for k, v in table.to_pylist()[0].items() if not k.endswith("_seconds") and v is not None}
    return hashlib.sha256(repr(sorted(row.items())).encode()).hexdigest()[:12]


def _layer_rows(run: Run, table: pa.Table | None) -> dict[int, dict[str, float]]:
    """step -> ``attn/L00/<metric>`` -> the layer's value, without those that are absent or no news."""
    if table is None:
        return {}
    layers = Layers.of(table)
    config = run.config["attention"]
    names = [m for m in layers.values if m != "max_logit_capped" or config["softcap"] is not None]
    cube = np.stack([layers[m] for m in names], axis=-1)
    worst = [how.reduce(cube[..., names.index(m)], axis=1) for m, how in WORST.items()]
    for rare in ("masked_rows", "nonfinite"):
        values = cube[..., names.index(rare)]
        values[values == 0] = np.nan
    if config["scale"] not in LEARNED_SCALES:
        cube[layers.steps > 0, :, names.index("score_scale")] = np.nan
    keys = [f"attn/L{layer:02d}/{m}" for layer in layers.layers for m in names] + [f"attn/worst/{m}" for m in WORST]
    values = np.concatenate([cube.reshape(len(cube), -1), np.stack(worst, axis=-1)], axis=1)
    rows = zip(layers.steps.tolist(), values.tolist(), strict=True)
    return {step: {k: v for k, v in zip(keys, row, strict=True) if v == v} for step, row in rows}  # NaN: absent


def read(directory: Path, name: str, since: int, count: int) -> pa.Table | None:
    """Rows of ``count`` steps from ``since`` on; parts and row groups outside of them are not read."""
    end = since + count
    whole = directory / f"{name}.parquet"
    paths = [whole] if whole.exists() else sorted((directory / "parts").glob(f"{name}-*.parquet"))
    firsts = [0 if path == whole else int(path.stem.rpartition("-")[2]) for path in paths]
    tables = []
    for path, first, after in zip(paths, firsts, [*firsts, math.inf][1:], strict=True):
        if first < end and after > since:
            with _reading():
                file = pq.ParquetFile(path)
                groups = [i for i in range(file.num_row_groups) if _overlaps(file.metadata.row_group(i), since, end)]
                tables.append(file.read_row_groups(groups, use_threads=False))
    if not tables:
        return None
    table = pa.concat_tables(tables, promote_options="default")
    steps = table["step"].to_numpy()
    table = table.filter(pa.array((steps >= since) & (steps < end)))
    return table if len(table) else None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise TablesChanged(str(error)) from error


def _overlaps(group: Any, since: int, end: int) -> bool:
    steps = group.column(0).statistics
    return steps is None or not steps.has_min_max or (steps.max >= since and steps.min < end)
