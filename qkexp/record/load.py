"""Reads run directories, finished or alive, into DataFrames."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from qkexp.config import RunConfig, UserError, flatten, identity, identity_keys, keys, to_typed
from qkexp.naming import variant
from qkexp.probe.metrics import NAMES
from qkexp.record.files import read_json
from qkexp.record.layers import Layers
from qkexp.record.run import SCALARS

# the C loader is ten times as fast, which a sweep of a thousand runs feels
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Run:
    """One run directory. Tables are read when they are first asked for."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml as a nested dictionary."""
        return yaml.load((self.directory / "config.yaml").read_text(), Loader=YAML_LOADER)

    @cached_property
    def typed(self) -> RunConfig:
        return to_typed(self.config)

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Identity keys that differ from the schema's defaults: what makes it the run that it is."""
        return identity_keys(self.typed)

    @cached_property
    def outcome(self) -> dict[str, Any] | None:
        """outcome.json, or None while there is none (or it is torn)."""
        return read_json(self.directory / "outcome.json")

    @cached_property
    def provenance(self) -> dict[str, Any]:
        return read_json(self.directory / "provenance.json") or {}

    @cached_property
    def scalars(self) -> pd.DataFrame:
        """A row a step; columns as in scalars.parquet, NaN where a step has no value."""
        return _read(self.directory, "scalars", SCALARS.names)

    @cached_property
    def attention(self) -> pd.DataFrame:
        """A row per probed step, layer and head: step, phase, layer, module, head and the metrics.

        Columns of metrics that were asked for beside the others, and ``subsampled``, are there where a run has them.
        """
        return _read(self.directory, "attention", ["step", "phase", "layer", "module", "head", *NAMES])

    @cached_property
    def events(self) -> pd.DataFrame:
        """step, kind, layer, head, value, threshold."""
        path = self.directory / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        columns = ["step", "kind", "layer", "head", "value", "threshold"]
        return pd.DataFrame([json.loads(line) for line in lines if line.endswith("}")], columns=columns)

    @property
    def variant(self) -> str:
        return variant(self.typed.attention)

    @property
    def lr(self) -> float:
        return self.typed.optim.lr

    @property
    def seed(self) -> int:
        return self.typed.seed

    @property
    def arm(self) -> str | None:
        """What a branch changes of its parent, as its directory's name says it; None of a run that is no branch."""
        step = self.typed.branch.step
        return None if step is None else self.name.rpartition(f"-at{step}-")[0]

    @property
    def status(self) -> str:
        return self.outcome["status"] if self.outcome else "unfinished"

    @property
    def final_val_loss(self) -> float:
        """Validation loss after the last step; +inf where the run ended early or was not finite."""
        value = (self.outcome or {}).get("final", {}).get("val_loss")
        return math.inf if value is None else float(value)

    @cached_property
    def layers(self) -> Layers:
        """Attention metrics of the training steps, heads reduced; a finished run's columns are read one by one."""
        whole = self.directory / "attention.parquet"
        present = _columns_of(whole)
        if present:
            return Layers([*NAMES, *present], functools.partial(_columns, whole, present))
        table = _read(self.directory, "attention", ["step", "phase", "layer", "module", "head", *NAMES])
        return Layers.of(pa.Table.from_pandas(table, preserve_index=False))  # parts grow: all of them at once


@dataclass(frozen=True)
class Sweep:
    """A directory of runs."""

    directory: Path
    all: dict[str, Run]

    def __getitem__(self, name: str) -> Run:
        return self.all[name]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row a run: directory, identity, status, identity keys (dotted) and final figures."""
        return pd.DataFrame([_summary(run) for run in self.all.values()])

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """What was computed from all of the runs, by name: a place for readers to keep it."""
        return {}

    @property
    def plan(self) -> dict[str, Any]:
        return read_json(self.directory / "plan.json") or {}


def load_run(directory: str | Path) -> Run:
    """Open one run directory.

    Raises:
        UserError: there is no run.
    """
    path = Path(directory)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path}: not a run directory (it has no config.yaml)")
    return Run(path)


def load_sweep(directory: str | Path) -> Sweep:
    """Open a directory of runs: those of its plan, or every run in it where there is none.

    Raises:
        UserError: there is no run.
    """
    path = Path(directory)
    plan = read_json(path / "plan.json")
    found = {p.parent.name: Run(p.parent) for p in sorted(path.glob("*/config.yaml"))}
    if plan:
        found = {name: found[name] for name in (r["name"] for r in plan["runs"]) if name in found}
    if not found and not (plan and not plan["runs"]):  # an experiment may have none, and say so in its plan
        raise UserError(f"{path}: no runs here (a sweep directory holds one directory a run)")
    return Sweep(path, found)


def _summary(run: Run) -> dict[str, Any]:
    values = flatten(run.typed)
    outcome = run.outcome or {}
    final = outcome.get("final", {})
    return {
        "directory": str(run.directory),
        "name": run.name,
        "identity": identity(run.typed),
        "variant": run.variant,
        "status": run.status,
        "reason": outcome.get("reason"),
        "step": outcome.get("step"),
        **{k.name: values[k.name] for k in keys() if k.meta["identity"]},
        "final_loss": final.get("loss"),
        "lowest_loss": final.get("lowest_loss"),
        "final_val_loss": run.final_val_loss,
        "final_val_accuracy": final.get("val_accuracy"),
        "wall_seconds": outcome.get("wall_seconds"),
    }


def _columns_of(path: Path) -> list[str]:
    """Names of a table's columns; none where there is no table, or a torn one."""
    try:
        return pq.read_schema(path).names
    except (pa.ArrowInvalid, OSError):
        return []


def _columns(path: Path, present: list[str], names: Sequence[str]) -> pa.Table:
    """Some columns of a table; one that the run's version did not have is null."""
    table = pq.ParquetFile(path).read([name for name in names if name in present])
    for name in names:
        if name not in present:
            table = table.append_column(name, pa.nulls(len(table), pa.float32()))
    return table


def _read(directory: Path, name: str, names: list[str]) -> pd.DataFrame:
    tables = read_tables(directory, name)
    if not tables:
        return pd.DataFrame({n: pd.Series(dtype="float64") for n in names})
    found = pa.concat_tables(tables, promote_options="default").to_pandas()
    later = [n for n in names if n not in found.columns]  # columns that the run's version did not have
    return found.assign(**dict.fromkeys(later, math.nan))


def read_tables(directory: Path, name: str, columns: Sequence[str] | None = None) -> list[pa.Table]:
    """A run's table ``name``, whole or in the parts that there are; ``columns``: those of them that it has."""
    whole = directory / f"{name}.parquet"
    paths = [whole] if whole.is_file() else sorted((directory / "parts").glob(f"{name}-*.parquet"))
    tables = []
    for path in paths:
        try:
            file = pq.ParquetFile(path)
            there = set(file.schema_arrow.names)
            tables.append(file.read(None if columns is None else [c for c in columns if c in there]))
        except (pa.ArrowInvalid, OSError):  # torn, or merged away since it was listed
            continue
    return tables
