"""Writes a run directory: the truth about a run, readable at any moment, complete whatever happens.

Tables grow as parts (``parts/scalars-00000120.parquet``, named by their first step), because a
truncated Parquet file cannot be read: a kill loses at most one flush. ``finish`` merges them.
"""

from __future__ import annotations

import json
import logging
import shutil
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
from qkexp.record.columns import measured, texts
from qkexp.record.columns import rows as table_of
from qkexp.record.files import write_json, write_text
from qkexp.record.lock import Lock
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
        lock: the directory's, where more than this process may know of it; nothing is written without it.
    """

    def __init__(
        self,
        directory: Path,
        cfg: RunConfig,
        provenance: dict[str, Any],
        keep: int = 0,
        lock: Lock | None = None,
    ):
        self.directory, self.cfg, self.provenance, self.lock = directory, cfg, provenance, lock
        self._rows: list[dict[str, float]] = []
        self._frames: list[Frame] = []
        self._first_events: dict[str, int] = {}
        self._steps = keep
        self._start = self._flushed = time.monotonic()
        self._flushed_steps = keep
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
        if self.lock is not None:
            self.lock.beat()  # it is still ours
        frames, rows = self._frames, self._rows
        self._frames, self._rows = [], []
        if frames:  # first: a step that stands in scalars has its attention, whenever a kill comes
            self._part("attention", frames[0].step, attention_table(frames))
        if rows:
            self._part("scalars", rows[0]["step"], table_of(rows, SCALARS))
        self.heartbeat()  # a step that the lock tells is on disk
        return frames

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self._checkpoints.save(step, state, self._first_events)

    # ------------------------------------------------ start and end

    def heartbeat(self) -> None:
        """Tell other processes that this run is alive, how far it is and how fast.

        Raises:
            LockLostError: another process has taken the run over.
        """
        now, steps = time.monotonic(), self._steps - self._flushed_steps
        if self.lock is not None:
            self.lock.beat(self._steps, (now - self._flushed) / steps if steps else None)
        self._flushed, self._flushed_steps = now, self._steps

    def finish(self, outcome: dict[str, Any]) -> None:
        """Merge the parts and write the outcome, which comes last: it says that all is there."""
        self.flush()
        for name in TABLES:
            merge(self.directory, name)
        shutil.rmtree(self.directory / "parts", ignore_errors=True)
        outcome["wall_seconds"] = time.monotonic() - self._start
        write_json(self.directory / "outcome.json", outcome)

    def _part(self, name: str, step: float, table: pa.Table) -> None:
        write_table(self.directory / "parts" / f"{name}-{int(step):08d}.parquet", table)


def clear(directory: Path) -> None:
    """Remove what an earlier attempt recorded; its log and W&B identity stay."""
    directory.mkdir(parents=True, exist_ok=True)
    _tidy(directory)
    for name in ("parts", "checkpoints"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("scalars.parquet", "attention.parquet", "events.jsonl", "outcome.json"):
        (directory / name).unlink(missing_ok=True)
    (directory / "events.jsonl").touch()


def _tidy(directory: Path) -> None:
    """Remove what a killed process had half written. The mirror's files are its own, and so are branches."""
    for folder in (directory, directory / "parts", directory / "checkpoints"):
        for part in folder.glob(".*.part"):
            if "mirror" not in part.name:
                part.unlink(missing_ok=True)


def rewind(directory: Path, keep: int) -> dict[str, int]:
    """Cut tables and events back to the first ``keep`` steps; returns the first step of each kind of event.

    A kill at any point of it, or of the merge at a run's end, leaves what a second call puts right: while a
    whole table exists it holds every row, and its parts count for nothing.
    """
    parts = directory / "parts"
    parts.mkdir(exist_ok=True)
    _tidy(directory)
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
    events = _keep_events(path, path, keep)
    first: dict[str, int] = {}
    for event in events:
        first.setdefault(event["kind"], event["step"])
    return first


def inherit(directory: Path, parent: Path, keep: int) -> None:
    """Begin a run with the first ``keep`` steps of another: their rows and events, and nothing else."""
    clear(directory)
    for table in TABLES:
        whole = parent / f"{table}.parquet"
        for path in [whole] if whole.exists() else sorted((parent / "parts").glob(f"{table}-*.parquet")):
            rows = _before(path, keep)
            first = 0 if path == whole else int(path.stem.rpartition("-")[2])
            if len(rows):
                (directory / "parts").mkdir(exist_ok=True)
                write_table(directory / "parts" / f"{table}-{first:08d}.parquet", rows)
    _keep_events(parent / "events.jsonl", directory / "events.jsonl", keep)


def _keep_events(source: Path, target: Path, keep: int) -> list[dict[str, Any]]:
    """The events before a step, written and returned."""
    lines = source.read_text().splitlines() if source.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith("}"))
    events = [event for event in whole if event["step"] < keep]
    write_text(target, "".join(json.dumps(event) + "\n" for event in events))
    return events


def intact(directory: Path) -> int:
    """Steps from the first on whose rows can be read: a run goes on from there at the latest, so none is lost."""
    damaged, steps = [], set()
    for table in TABLES:
        whole = directory / f"{table}.parquet"
        for path in [whole] if whole.exists() else sorted((directory / "parts").glob(f"{table}-*.parquet")):
            try:
                rows = pq.ParquetFile(path).read(["step"])
            except (pa.ArrowException, OSError) as error:
                log.warning("%s cannot be read (%s): its steps are trained again", path.name, type(error).__name__)
                damaged.append(0 if path == whole else int(path.stem.rpartition("-")[2]))
                path.unlink()
            else:
                steps |= set(rows["step"].to_pylist()) if table == "scalars" else set()
    gap = next(step for step in range(len(steps) + 1) if step not in steps)
    return min([gap, *damaged])


def _before(path: Path, step: int) -> pa.Table:
    return pq.ParquetFile(path).read().filter(pc.field("step") < step)


def attention_table(frames: list[Frame]) -> pa.Table:
    """Frames -> rows of attention.parquet; what was not measured is null."""
    data = columns(frames)
    arrays = [texts(values) if isinstance(values, list) else measured(values) for values in data.values()]
    return pa.Table.from_arrays(arrays, names=list(data))


def merge(directory: Path, name: str) -> None:
    """Parts of a table -> the table."""
    parts = sorted((directory / "parts").glob(f"{name}-*.parquet"))
    if parts:
        tables = [pq.ParquetFile(p).read() for p in parts]
        table = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
        write_table(directory / f"{name}.parquet", table)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table whole; a dictionary of measured numbers, which hardly repeat, would cost a third of the file."""
    part = path.with_name(f".{path.name}.part")
    repeats = [field.name for field in table.schema if not pa.types.is_floating(field.type)]
    pq.write_table(table, part, compression="zstd", use_dictionary=repeats)
    part.replace(path)
