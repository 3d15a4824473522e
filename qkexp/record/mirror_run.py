"""Copies one run directory to its W&B run: every row once, in order of the step, one call a row.

What a row leaves out, because each key costs CPU time next to a training run: zeros of ``masked_rows``
and ``nonfinite``, ``max_logit_capped`` where there is no cap (it equals ``max_logit``), and a fixed
``score_scale`` after step 0. A value that is not finite is left out and counted as ``nonfinite``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qkexp.config import identity
from qkexp.record.layers import Layers
from qkexp.record.load import Run, read_json
from qkexp.record.run import write_json

Mode = Literal["online", "offline"]
CHUNK = 2000  # steps read at once
EXIT_CODES = {"completed": 0, "diverged": 0, "failed": 1}
CRASHED = 255  # how W&B shows a run that stopped without an end of its own
LEARNED_SCALES = ("learned", "learned_per_head")


class TablesChanged(Exception):
    """A part was merged away since it was listed: ask again."""


@dataclass
class Record:
    """mirror.json: which W&B run a directory is copied to, and how far."""

    id: str
    project: str
    mode: str
    entity: str | None = None
    next_step: int = 0
    attempt: int = 0
    mark: str | None = None  # of the attempt (head_mark); None before its first row
    status: str | None = None  # the run's, once all of it was copied
    files: str | None = None  # wandb's own, relative to the run directory


class Copy:
    """A run directory and its W&B run.

    ``error`` and ``retry_at`` (monotonic) belong to the caller, which decides when to try again.
    """

    def __init__(self, directory: Path, project: str, mode: Mode, group: str):
        self.directory, self.project, self.mode, self.group = directory, project, mode, group
        self.error: str | None = None
        self.retry_at = 0.0
        self.record: Record | None = None
        self._target: Any = None  # the open wandb.Run
        self._claimed: int | None = None  # a descriptor of the directory, locked while the W&B run is open
        self._seen: tuple[object, ...] = ()
        self._config_version: tuple[int, int] | None = None

    def advance(self, final: bool) -> None:
        """Send what is new; close the W&B run when the run has ended. ``final``: nothing more will come."""
        seen = self._signature()
        if (seen == self._seen and not final) or not (self.directory / "config.yaml").exists():
            return
        with self._claim() as mine:
            if mine:
                try:
                    self._send(Run(self.directory), final)
                    self._seen = seen
                except TablesChanged:
                    if final:
                        raise

    def _send(self, run: Run, final: bool) -> None:
        outcome = run.outcome if final or self.ended() else None
        mark = head_mark(self.directory)
        if mark is None and outcome is None:
            return  # nothing yet, or just cleared for a new attempt
        status = outcome["status"] if outcome else "unfinished" if final else None
        record = self._attempt(run, mark)
        if status and record.status == status and record.mode in ("online", self.mode):
            return
        record.status = None
        if self._target is None:
            self._open(run, record)
        self._send_rows(run, record, ended=status is not None)
        record.mark = mark
        if status:
            self._target.summary.update(summary(status, outcome or {}))
            self._close(EXIT_CODES.get(status, CRASHED))
            record.status = status
        self._keep()

    def _send_rows(self, run: Run, record: Record, ended: bool) -> None:
        full = True
        while full:
            rows = new_rows(run, record.next_step, ended)
            for step, row in rows:
                self._target.log(row, step=step)
                record.next_step = step + 1
            full = len(rows) == CHUNK

    def _attempt(self, run: Run, mark: str | None) -> Record:
        """The attempt's record: a run that was cleared and trained again is a new W&B run."""
        old, written = self.record, _changed(self.directory / "config.yaml")
        again = old is not None and old.mark != mark and (old.mark or old.status)
        if old is None or again or self._config_version not in (None, written):
            if self._target is not None:
                self._target.summary.update({"status": "restarted"})
                self._close(CRASHED)
            attempt = old.attempt + 1 if old else 0
            # W&B never gives out a deleted id again, hence the random end
            name = f"{identity(run.typed)[:6]}-{attempt}-{secrets.token_hex(3)}"
            self.record = Record(name, self.project, self.mode, attempt=attempt)
            self._keep()
        self._config_version = written
        assert self.record is not None
        return self.record

    def _open(self, run: Run, record: Record) -> None:
        import wandb

        if record.mode == self.mode == "offline" and record.files:
            shutil.rmtree(self.directory / record.files, ignore_errors=True)  # cut short: copied anew, as a whole
        self._target = wandb.init(
            id=record.id,
            entity=record.entity,
            project=record.project,
            name=run.name,
            group=self.group,
            job_type="train",
            tags=[tag[:64] for tag in tags(run)],  # 64: W&B's limit
            config={**run.config, "identity": identity(run.typed), "attempt": record.attempt},
            dir=str(self.directory),
            mode=self.mode,
            resume="allow",
            reinit="create_new",
            settings=quiet_settings(self.mode),
        )
        # automatic summaries hold last values, by which a run that just began could sort as the best
        self._target.define_metric("*", summary="none")
        record.mode, record.entity = self.mode, self._target.entity or None
        record.files = str(Path(self._target.dir).parent.relative_to(self.directory.absolute()))
        record.next_step = self._target.starting_step if self.mode == "online" else 0  # the server knows what it has
        self._keep()

    @contextlib.contextmanager
    def _claim(self) -> Iterator[bool]:
        """Hold the run while it is copied: two launchers may share a sweep, and so two mirrors a run."""
        if self._claimed is None:
            claimed = os.open(self.directory, os.O_RDONLY)
            try:
                fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another mirror copies it
                os.close(claimed)
                yield False
                return
            except OSError:  # a file system without locks
                pass
            self._claimed = claimed
            with contextlib.suppress(TypeError):  # torn, or written by other code: a new id
                self.record = Record(**(read_json(self.directory / "mirror.json") or {}))
        try:
            yield True
        finally:
            if self._target is None:
                os.close(self._claimed)
                self._claimed = None

    def _close(self, exit_code: int) -> None:
        target, self._target = self._target, None
        target.finish(exit_code=exit_code)

    def _keep(self) -> None:
        assert self.record is not None
        write_json(self.directory / "mirror.json", asdict(self.record))

    def ended(self) -> bool:
        """Whether the run has an outcome of its own; while its lock is held, one may be an earlier attempt's."""
        return (self.directory / "outcome.json").exists() and not (self.directory / "lock").exists()

    def _signature(self) -> tuple[object, ...]:
        """Changes whenever there may be something to do, at the price of a few ``stat`` calls."""
        names = ("config.yaml", "outcome.json", "parts", "scalars.parquet", "attention.parquet")
        held = (self.directory / "lock").exists()
        return (held, *(_changed(self.directory / name) for name in names))


def _changed(path: Path) -> tuple[int, int]:
    """Time and inode: files are replaced whole, perhaps twice in one tick of the file system's clock."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def tags(run: Run) -> list[str]:
    """Variant, data, model and precision of a run."""
    return [run.variant, run.typed.data.name, run.typed.model.name, run.typed.precision.autocast]


def summary(status: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """The figures by which W&B sorts runs: one that did not finish has none, so it never sorts as the best."""
    out = {"status": status, "diverged": status == "diverged"}
    out |= {k: outcome[k] for k in ("reason", "step", "wall_seconds") if outcome.get(k) is not None}
    if status in ("completed", "diverged"):
        for kind in ("final", "best"):
            out |= {f"{kind}/{k}": v for k, v in outcome.get(kind, {}).items() if v is not None}
    return out


def quiet_settings(mode: Mode) -> Any:
    """wandb without console capture, system statistics, git, code and machine facts: each costs time."""
    import wandb

    wanted: dict[str, Any] = {
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "symlink": False,
        "init_timeout": 20.0,
        "finish_timeout": 60.0,
        "finish_timeout_raises": True,
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "x_skip_transaction_log": mode == "online",  # the directory has it all
        "x_log_level": logging.WARNING,
    }
    return wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields})


# ---------------------------------------------------------------- rows


def head_mark(directory: Path) -> str | None:
    """What tells an attempt from an earlier one: its first row, of which the times never repeat."""
    for path in (directory / "scalars.parquet", directory / "parts" / "scalars-00000000.parquet"):
        if path.exists():
            with _reading():
                row = pq.ParquetFile(path).read_row_group(0, use_threads=False).slice(0, 1).to_pylist()
            return hashlib.sha256(repr(row).encode()).hexdigest()[:12]
    return None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise TablesChanged(str(error)) from error


def new_rows(run: Run, since: int, ended: bool) -> list[tuple[int, dict[str, float]]]:
    """At most ``CHUNK`` rows from step ``since`` on, without a gap: (step, scalars and layer values).

    A probed step waits until its attention rows are there.

    Raises:
        TablesChanged: while they were read.
    """
    scalars = _table(run.directory, "scalars", since)
    if scalars is None:
        return []
    attention = _layer_rows(run, _table(run.directory, "attention", since))
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


def _layer_rows(run: Run, table: pa.Table | None) -> dict[int, dict[str, float]]:
    """step -> ``attn/L00/<metric>`` -> the layer's value, without those that are absent or no news."""
    if table is None:
        return {}
    layers = Layers.of(table)
    config = run.config["attention"]
    names = [m for m in layers.values if m != "max_logit_capped" or config["softcap"] is not None]
    cube = np.stack([layers[m] for m in names], axis=-1)
    for rare in ("masked_rows", "nonfinite"):
        values = cube[..., names.index(rare)]
        values[values == 0] = np.nan
    if config["scale"] not in LEARNED_SCALES:
        cube[layers.steps > 0, :, names.index("score_scale")] = np.nan
    keys = [f"attn/L{layer:02d}/{m}" for layer in layers.layers for m in names]
    rows = zip(layers.steps.tolist(), cube.reshape(len(cube), -1).tolist(), strict=True)
    return {step: {k: v for k, v in zip(keys, row, strict=True) if v == v} for step, row in rows}  # NaN: absent


def _table(directory: Path, name: str, since: int) -> pa.Table | None:
    """Rows of ``CHUNK`` steps from ``since`` on; parts and row groups outside of them are not read."""
    whole = directory / f"{name}.parquet"
    paths = [whole] if whole.exists() else sorted((directory / "parts").glob(f"{name}-*.parquet"))
    firsts = [0 if path == whole else int(path.stem.rpartition("-")[2]) for path in paths]
    tables = []
    for path, first, end in zip(paths, firsts, [*firsts, math.inf][1:], strict=True):
        if first < since + CHUNK and end > since:
            with _reading():
                file = pq.ParquetFile(path)
                groups = [i for i in range(file.num_row_groups) if _overlaps(file.metadata.row_group(i), since)]
                tables.append(file.read_row_groups(groups, use_threads=False))
    if not tables:
        return None
    table = pa.concat_tables(tables, promote_options="default")
    steps = table["step"].to_numpy()
    table = table.filter(pa.array((steps >= since) & (steps < since + CHUNK)))
    return table if len(table) else None


def _overlaps(group: Any, since: int) -> bool:
    steps = group.column(0).statistics
    return steps is None or not steps.has_min_max or (steps.max >= since and steps.min < since + CHUNK)
