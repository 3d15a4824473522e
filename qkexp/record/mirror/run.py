"""One run directory and its W&B run: every row once, in order of the step, one call a row.

Whatever happens to the run, its W&B run stays the same. A run that was resumed or trained again computes the same
numbers, so it goes on where W&B stands; only where it did not (on other hardware, say) does a new W&B run replace the
old one, which is then marked ``superseded``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkexp.config import identity
from qkexp.record.load import Run
from qkexp.record.mirror import client, facts, maps
from qkexp.record.mirror.client import Mode
from qkexp.record.mirror.kept import KeptRun
from qkexp.record.mirror.rows import CHUNK, TablesChanged, fingerprint, new_rows, read

EXIT_CODES = {"completed": 0, "diverged": 0, "failed": 1}
CRASHED = 255  # how W&B shows a run that stopped without an end of its own
SUPERSEDED = "superseded"
ELSEWHERE = ("tracker", "output_dir", "sweep_name", "experiment")  # keys that change no row
log = logging.getLogger("qkexp.mirror")


class Copy:
    """A run directory and its W&B run.

    ``error`` and ``retry_at`` (monotonic) belong to the caller, which decides when to try again.
    """

    def __init__(self, directory: Path, project: str, mode: Mode, group: str):
        self.directory, self.project, self.mode, self.group = directory, project, mode, group
        self.error: str | None = None
        self.retry_at = 0.0
        self.record: KeptRun | None = None
        self.done = "nothing to copy"  # of the last advance: new, gone on, already there, …
        self.rows = 0  # sent by this object
        self._target: Any = None  # the open wandb.Run
        self._claimed: int | None = None  # a descriptor of the directory, locked while the W&B run is open
        self._seen: tuple[object, ...] = ()

    def advance(self, final: bool) -> None:
        """Send what is new; close the W&B run when the run has ended. ``final``: nothing more will come."""
        seen = self._signature()
        if (seen == self._seen and not final) or not (self.directory / "config.yaml").exists():
            return
        with self._claim() as mine:
            if not mine:
                self.done = "being copied by another process"
                return
            try:
                self._send(Run(self.directory), final)
                self._seen = seen
            except TablesChanged:
                if final:
                    raise
            except BaseException:
                self._drop()
                raise

    def _send(self, run: Run, final: bool) -> None:
        outcome = run.outcome if final or self.ended() else None
        status = outcome["status"] if outcome else "unfinished" if final else None
        record = self._attempt(run, status)
        if record is None:  # nothing yet, or trained again and not yet as far as W&B has it
            if final and self._target is not None:
                self._target.summary.update(facts.summary("unfinished", {}))
                self._close(CRASHED)
            return
        judged = facts.judged(self.directory) if status else {}
        mark, told = _hash(judged), bool(status) and record.status == status and client.holds(record, self.mode)
        if told and (self.mode == "offline" or record.judged == mark):
            self.done = "already there"
            return
        self.done = "gone on" if record.next_step else "new"
        record.status = None
        if self._target is None:
            record = self._open(run, record)
        self._send_rows(run, record, ended=status is not None)
        if status:
            self._say_the_end(run, record, status, outcome or {}, judged, first=not told)
            self._close(EXIT_CODES.get(status, CRASHED))
            record.status, record.judged = status, mark
            record.arrived = record.next_step if self.mode == "online" else record.arrived
        else:
            client.check(self._target)
        self._keep()

    def _send_rows(self, run: Run, record: KeptRun, ended: bool) -> None:
        pictured, full = maps.map_steps(run.config), True
        while full:
            rows = new_rows(run, record.next_step, ended)
            pictures = maps.head_maps(run, pictured & {step for step, _ in rows})
            for step, row in rows:
                self._target.log(row | self._images(step, pictures.get(step, {})), step=step)
                record.next_step = step + 1
            self.rows += len(rows)
            full = len(rows) == CHUNK
        if record.next_step:
            record.last = fingerprint(self.directory, record.next_step - 1)

    def _say_the_end(
        self, run: Run, record: KeptRun, status: str, outcome: dict[str, Any], judged: dict[str, Any], first: bool
    ) -> None:
        """Summary and tables; the ``first`` time also the event table and the last heads, in the last row."""
        import wandb

        steps = record.next_step
        figures, rows = facts.nonfinite(read(self.directory, "scalars", 0, steps) if steps else None)
        self._target.summary.update(facts.summary(status, outcome) | figures | judged)
        if outcome:
            made = client.artifact(f"run-{self.directory.name}", "qkexp-run", facts.files(self.directory))
            self._target.log_artifact(made)
        if not first:
            return
        last: dict[str, Any] = {}
        every = run.config["probe"]["every"]
        if every and steps:
            step = (steps - 1) // every * every
            if step not in maps.map_steps(run.config):  # the run ended before its last step
                last |= self._images(step, maps.head_maps(run, [step]).get(step, {}))
        found: list[Any] = facts.events(run) + rows
        if found:
            last["events"] = wandb.Table(columns=list(facts.EVENT_COLUMNS), data=found)
        if last:  # joins the last row, or makes one of its own where that is on the server already
            self._target.log(last, step=max(steps - 1, self._target.starting_step, 0))

    def _images(self, step: int, found: dict[str, Any]) -> dict[str, Any]:
        import wandb

        return {
            f"heads/{metric}": wandb.Image(maps.picture(values, metric), caption=maps.caption(step, metric))
            for metric, values in found.items()
        }

    # ---------------------------------------------------------------- which W&B run

    def _attempt(self, run: Run, status: str | None) -> KeptRun | None:
        """The W&B run that takes the rows; None where there is nothing to say yet."""
        record, settings = self.record, _hash({k: v for k, v in run.config.items() if k not in ELSEWHERE})
        if record is None:
            if status is None and fingerprint(self.directory, 0) is None:
                return None
            return self._begin(run, settings, 0)
        if record.next_step:
            here = fingerprint(self.directory, record.next_step - 1)
            if here is None and status not in facts.FINISHED and settings == record.settings:
                # trained again, and not yet (or not again) as far as W&B has it
                return record if status not in (None, "unfinished", record.status) else None
            if settings != record.settings or (record.last is not None and here != record.last):
                self._supersede(record)
                return self._begin(run, settings, record.attempt + 1)
        return record

    def _begin(self, run: Run, settings: str, attempt: int) -> KeptRun:
        name = client.new_id(identity(run.typed)[:6], attempt)
        self.record = KeptRun(name, self.project, self.mode, attempt=attempt, settings=settings)
        self._keep()
        return self.record

    def _supersede(self, record: KeptRun) -> None:
        """Another W&B run takes its place: an offline one goes, one on the server says so and has no figures."""
        log.info(
            "%s was trained again with other numbers: a new W&B run takes the place of %s", self.directory, record.id
        )
        if record.mode == "offline":
            self._drop()
            shutil.rmtree(self.directory / (record.files or "wandb"), ignore_errors=True)
        elif self.mode == "online":
            try:
                if self._target is None:
                    self._open(Run(self.directory), record)
                self._clear_figures(SUPERSEDED)
                self._close(CRASHED)
            except Exception:
                log.exception("%s: could not be marked as superseded", record.id)
                self._drop()

    def _open(self, run: Run, record: KeptRun) -> KeptRun:
        """Open the W&B run of a record; of a new one, where the server will not have that one again."""
        import wandb

        if record.mode == self.mode == "offline" and record.files:
            shutil.rmtree(self.directory / record.files, ignore_errors=True)  # cut short: copied anew, as a whole
        try:
            self._target = self._init(run, record)
        except wandb.errors.CommError as error:
            if client.DELETED not in str(error):
                raise
            record = self._begin(run, record.settings or "", record.attempt + 1)
            self._target = self._init(run, record)
        record.next_step = 0
        if self.mode == "online":
            # the server knows what it has; one that does not say (not W&B's own) has at least what it once confirmed
            record.arrived = record.arrived if record.server == client.server() else 0
            record.next_step = max(self._target.starting_step, record.arrived)
            record.server, record.url = client.server(), self._target.url
        record.mode, record.entity = self.mode, self._target.entity or None
        record.files = client.folder(self._target, self.directory)
        self._clear_figures("running")
        self._keep()
        return record

    def _init(self, run: Run, record: KeptRun) -> Any:
        return client.open_run(
            self.mode,
            self.directory,
            id=record.id,
            entity=record.entity,
            project=record.project,
            name=run.name,
            group=self.group,
            job_type="train",
            tags=facts.tags(run),
            notes=facts.notes(run),
            config={**run.config, "variant": run.variant, "identity": identity(run.typed), "attempt": record.attempt},
        )

    def _clear_figures(self, status: str) -> None:
        """An open run has no figures that an earlier end left: it must not sort by them."""
        told = self._target.summary
        for key in [k for k in told.keys() if str(k).partition("/")[0] in facts.FIGURES]:  # noqa: SIM118
            del told[key]
        told.update({"status": status})

    # ---------------------------------------------------------------- holding it

    @contextlib.contextmanager
    def _claim(self) -> Iterator[bool]:
        """Hold the run while its W&B run is open."""
        if self._claimed is None:
            self._claimed = client.claim(self.directory)
            if self._claimed is None:
                yield False
                return
            self.record = KeptRun.load(self.directory) or self.record
        try:
            yield True
        finally:
            if self._target is None:
                os.close(self._claimed)
                self._claimed = None

    def _close(self, exit_code: int) -> None:
        target, self._target = self._target, None
        client.close_run(target, exit_code)

    def _drop(self) -> None:
        """Let go of a W&B run that failed; what it lacks is sent when it is opened again."""
        target, self._target = self._target, None
        if target is not None:
            with contextlib.suppress(Exception):
                target.finish(exit_code=CRASHED)

    def _keep(self) -> None:
        assert self.record is not None
        self.record.store(self.directory)

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


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
