"""The W&B run of a sweep as a whole: its runs, claims and figures, beside the W&B runs of its runs."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qkexp.record.load import Sweep, load_sweep
from qkexp.record.mirror import client, facts
from qkexp.record.mirror.client import Mode
from qkexp.record.mirror.kept import KeptSweep

# a row a run, as load_sweep(...).runs has it
RUN_COLUMNS = ("name", "variant", "optim.lr", "seed", "status", "reason", "step", "final_loss", "final_val_loss",
               "final_val_accuracy", "lowest_loss", "wall_seconds")  # fmt: skip
CLAIM_COLUMNS = ("claim", "value", "bound", "verdict", "count", "detail")
FILES = ("plan.json", "expect.yaml", "claims.json", "diagnosis.json", "critical.json", "timing.json")


class SweepCopy:
    """A sweep's directory and the W&B run that sums it up. ``error`` and ``retry_at`` as in ``run.Copy``."""

    def __init__(self, directory: Path, project: str, mode: Mode, group: str):
        self.directory, self.project, self.mode, self.group = directory, project, mode, group
        self.error: str | None = None
        self.retry_at = math.inf  # only at the end: nothing of it is worth a look before
        self.done, self.rows = "nothing to copy", 0

    def advance(self, final: bool) -> None:
        """Send runs, claims and figures as they are now, unless W&B has them already."""
        if not final:
            return
        with client.claimed(self.directory) as mine:
            if mine:
                self._advance()
            else:
                self.done = "being copied by another process"

    def _advance(self) -> None:
        sweep, record = load_sweep(self.directory), KeptSweep.load(self.directory)
        if record is None:
            record = KeptSweep(client.new_id("sweep", 0), self.project, self.mode)
        content = self._content(sweep)
        if record.content == content and client.holds(record, self.mode):
            self.done = "already there"
            return
        self.done = "gone on" if record.uploads else "new"
        if record.mode == self.mode == "offline" and record.files:
            shutil.rmtree(self.directory / record.files, ignore_errors=True)
        self._send(sweep, record)
        record.content = content
        record.store(self.directory)

    def _send(self, sweep: Sweep, record: KeptSweep) -> None:
        import wandb

        first = next(iter(sweep.all.values()))
        identity = {
            "id": record.id,
            "project": record.project,
            "entity": record.entity,
            "name": f"{self.directory.resolve().name} (sweep)",
            "group": self.group,
            "job_type": "sweep",
            "tags": ["sweep"],
            "notes": facts.notes(first),
            "config": {"experiment": first.typed.experiment, "runs": len(sweep.all)},
        }
        target = client.open_run(self.mode, self.directory, **identity)
        record.mode, record.entity = self.mode, target.entity or None
        if self.mode == "online":
            record.server, record.url = client.server(), target.project_url
        record.files = client.folder(target, self.directory)
        record.store(self.directory)
        runs = sweep.runs
        row: dict[str, Any] = {"runs": _table(RUN_COLUMNS, runs.to_dict("records"))}
        claims = facts.claims_of(self.directory)
        if claims:
            row["claims"] = _table(CLAIM_COLUMNS, claims)
        for path in sorted(self.directory.glob("figures/*.png")):
            row[f"figures/{path.stem}"] = wandb.Image(str(path))
        target.log(row, step=max(target.starting_step, record.uploads))
        record.uploads = max(target.starting_step, record.uploads) + 1
        verdicts = [c.get("verdict") for c in claims]
        told: dict[str, Any] = {f"runs/{status}": int(n) for status, n in runs.status.value_counts().items()}
        told |= {f"claims/{v}": verdicts.count(v) for v in ("pass", "fail")} if claims else {}
        told |= {"claims": facts.counted(claims)} if claims else {}
        target.summary.update(
            told | {"status": "completed" if {"unfinished"}.isdisjoint(runs.status) else "unfinished"}
        )
        target.log_artifact(client.artifact(f"sweep-{self.directory.resolve().name}", "qkexp-sweep", self._files()))
        client.close_run(target, 0)

    def _files(self) -> dict[str, Path]:
        paths = [self.directory / name for name in FILES]
        paths += [self.directory / "report.html", *sorted(self.directory.glob("figures/*"))]
        return {str(p.relative_to(self.directory)): p for p in paths if p.is_file()}

    def _content(self, sweep: Sweep) -> str:
        found = hashlib.sha256(repr([(name, run.status) for name, run in sweep.all.items()]).encode())
        for name, path in self._files().items():
            found.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()[:12]


def _table(columns: tuple[str, ...], rows: Iterable[Mapping[Any, Any]]) -> Any:
    """Rows as a W&B table: a column is of numbers or of words; what is not finite, or absent, is empty."""
    import wandb

    data: list[Any] = [[_cell(row.get(name)) for name in columns] for row in rows]
    for place in range(len(columns)):
        if any(isinstance(row[place], str) for row in data):
            for row in data:
                row[place] = None if row[place] is None else str(row[place])
    return wandb.Table(columns=list(columns), data=data)


def _cell(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None
