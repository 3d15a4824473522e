"""Writes a run directory: the truth about a run, readable at any moment, complete whatever happens.

Tables grow as parts (``parts/scalars-00000120.parquet``, named by their first step), because a
truncated Parquet file cannot be read: a kill loses at most one flush. ``finish`` merges them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from qkexp.config import RunConfig, as_dict
from qkexp.probe.frame import Frame, columns
from qkexp.train.events import Event

FLUSH_SECONDS = 2.0
TABLES = ("scalars", "attention")
log = logging.getLogger("qkexp")

# scalars.parquet; a step without a value (of val_loss, say) is null there
MEASURED = (
    "loss", "lr", "grad_norm", "param_norm", "update_rms",
    "grad_norm_qk", "grad_norm_vo", "grad_norm_mlp", "grad_norm_rest",
    "out_logit_absmax", "out_logz_mean", "step_seconds", "probe_seconds",
    "eval_seconds", "val_loss", "val_accuracy",
    "skipped_steps", "loss_scale",  # fp16: attempts whose gradient overflowed, and the scale that did not
    "moved",  # bf16 weights: share of parameters that the step changed
)  # fmt: skip
SCALARS = pa.schema([("step", pa.int32()), *((name, pa.float64()) for name in MEASURED)])


class RunWriter:
    """The recorder of one run (the protocol of :class:`qkexp.train.loop.Recorder`).

    Args:
        directory: the run's.
        cfg: the resolved configuration.
        provenance: what is known of code, host and command line.
        keep: steps that an earlier attempt recorded and that stay; everything else of it is replaced.
    """

    def __init__(self, directory: Path, cfg: RunConfig, provenance: dict[str, Any], keep: int = 0):
        self.directory, self.cfg, self.provenance = directory, cfg, provenance
        self._rows: list[dict[str, float]] = []
        self._frames: list[Frame] = []
        self._first_events: dict[str, int] = {}
        self._steps = keep
        self._start = self._flushed = time.monotonic()
        if keep:
            self._first_events = rewind(directory, keep)
        else:
            clear(directory)
        (directory / "parts").mkdir(exist_ok=True)
        write_text(directory / "config.yaml", yaml.safe_dump(as_dict(cfg), sort_keys=False))
        self.note()
        from qkexp.train.checkpoint import Checkpoints  # imports torch, which readers of runs do not need

        self._checkpoints = Checkpoints(directory / "checkpoints")
        self.heartbeat()

    # ------------------------------------------------ what the loop calls

    def row(self, row: dict[str, float]) -> None:
        self._rows.append(row)
        self._steps += 1

    def frame(self, frame: Frame) -> None:
        self._frames.append(frame)

    def event(self, event: Event) -> None:
        self._first_events.setdefault(event.kind, event.step)
        with (self.directory / "events.jsonl").open("a") as file:
            file.write(json.dumps(asdict(event)) + "\n")

    def note(self, **facts: Any) -> None:
        """Add facts to provenance.json."""
        self.provenance |= facts
        write_json(self.directory / "provenance.json", self.provenance)

    def flush_due(self) -> bool:
        return time.monotonic() - self._flushed > FLUSH_SECONDS

    def flush(self) -> list[Frame]:
        """Write what is buffered as parts; returns the frames written, for the event detector."""
        frames, rows = self._frames, self._rows
        self._frames, self._rows = [], []
        if frames:  # first: a step that stands in scalars has its attention, whenever a kill comes
            self._part("attention", frames[0].step, attention_table(frames))
        if rows:
            self._part("scalars", rows[0]["step"], pa.Table.from_pylist(rows, schema=SCALARS))
        self._flushed = time.monotonic()
        self.heartbeat()
        return frames

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self._checkpoints.save(step, state, self._first_events)

    # ------------------------------------------------ start and end

    def heartbeat(self) -> None:
        """Tell other processes that this run is alive, and how far it is."""
        state = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "step": self._steps,
            "steps": self.cfg.train.steps,
        }
        write_json(self.directory / "lock", state)

    def finish(self, outcome: dict[str, Any]) -> None:
        """Merge the parts, write the outcome, release the lock. The outcome comes last: it says that all is there."""
        self.flush()
        for name in TABLES:
            merge(self.directory, name)
        shutil.rmtree(self.directory / "parts", ignore_errors=True)
        outcome["wall_seconds"] = time.monotonic() - self._start
        write_json(self.directory / "outcome.json", outcome)
        (self.directory / "lock").unlink(missing_ok=True)

    def _part(self, name: str, step: float, table: pa.Table) -> None:
        write_table(self.directory / "parts" / f"{name}-{int(step):08d}.parquet", table)


def clear(directory: Path) -> None:
    """Remove what an earlier attempt recorded; its log and W&B identity stay."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("parts", "checkpoints"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("scalars.parquet", "attention.parquet", "events.jsonl", "outcome.json"):
        (directory / name).unlink(missing_ok=True)
    (directory / "events.jsonl").touch()


def rewind(directory: Path, keep: int) -> dict[str, int]:
    """Cut tables and events back to the first ``keep`` steps; returns the first step of each kind of event.

    A kill at any point of it, or of the merge at a run's end, leaves what a second call puts right: while a
    whole table exists it holds every row, and its parts count for nothing.
    """
    parts = directory / "parts"
    parts.mkdir(exist_ok=True)
    for table in TABLES:
        whole, pieces = directory / f"{table}.parquet", sorted(parts.glob(f"{table}-*.parquet"))
        if whole.exists():
            for path in pieces:
                path.unlink()
            write_table(parts / f"{table}-00000000.parquet", _before(whole, keep))
            whole.unlink()
            continue
        for path in pieces:
            rows = _before(path, keep)
            if len(rows):
                write_table(path, rows)
            else:
                path.unlink()
    (directory / "outcome.json").unlink(missing_ok=True)
    path = directory / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [event for event in map(json.loads, filter(None, lines)) if event["step"] < keep]
    write_text(path, "".join(json.dumps(event) + "\n" for event in events))
    first: dict[str, int] = {}
    for event in events:
        first.setdefault(event["kind"], event["step"])
    return first


def _before(path: Path, step: int) -> pa.Table:
    return pq.ParquetFile(path).read().filter(pc.field("step") < step)


def attention_table(frames: list[Frame]) -> pa.Table:
    """Frames -> rows of attention.parquet; what was not measured is null."""
    data = columns(frames)
    fields = {}
    for name, values in data.items():
        if name in ("phase", "module"):
            fields[name] = pa.array(values).dictionary_encode()
        else:
            fields[name] = pa.array(values, from_pandas=True)
    return pa.table(fields)


def merge(directory: Path, name: str) -> None:
    """Parts of a table -> the table."""
    parts = sorted((directory / "parts").glob(f"{name}-*.parquet"))
    if parts:
        tables = [pq.ParquetFile(p).read() for p in parts]
        table = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
        write_table(directory / f"{name}.parquet", table)


def write_table(path: Path, table: pa.Table) -> None:
    part = path.with_name(f".{path.name}.part")
    pq.write_table(table, part, compression="zstd")
    part.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole, so that no reader sees half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
