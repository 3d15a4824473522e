"""What W&B is told of a run beside its rows: tags, notes, the summary by which tables sort, events and files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from qkexp.record.files import read_json
from qkexp.record.load import Run

FINISHED = ("completed", "diverged")
FIGURES = ("final", "best")
# what a run's artifact holds, where it is there
FILES = ("config.yaml", "provenance.json", "outcome.json", "diagnosis.json", "events.jsonl", "scalars.parquet",
         "attention.parquet")  # fmt: skip
FILE_BYTES = 2**30  # larger files stay where they are
EVENT_COLUMNS = ("step", "kind", "what", "layer", "head", "value", "threshold")


def tags(run: Run) -> list[str]:
    """Variant, data, model and precision of a run; no tag is longer than W&B allows."""
    cfg = run.typed
    return [tag[:64] for tag in (run.variant, cfg.data.name, cfg.model.name, cfg.precision.autocast)]


def notes(run: Run) -> str:
    """By which command, code and machine a run was made."""
    made = run.provenance
    code = made.get("code") or {}
    commit = f"{code.get('commit') or code.get('version')}{' with changes' if code.get('dirty') else ''}"
    lines = [f"`{made['command']}`" if made.get("command") else "", f"code {commit}" if code else ""]
    return "\n\n".join(filter(None, [*lines, f"on {made['host']}" if made.get("host") else "", str(run.directory)]))


def summary(status: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The figures by which W&B sorts runs: one that did not finish has none, so it never sorts as the best."""
    out = {"status": status, "diverged": status == "diverged"}
    out |= {k: outcome[k] for k in ("reason", "step", "wall_seconds") if outcome.get(k) is not None}
    if status in FINISHED:
        for kind in FIGURES:
            out |= {f"{kind}/{k}": v for k, v in outcome.get(kind, {}).items() if v is not None}
    return out


def judged(directory: Path) -> dict[str, Any]:
    """What was found about a run after it had ended: the verdict of its diagnosis, and the claims of its sweep.

    ``claims_failed`` counts the failed claims that name this run.
    """
    out: dict[str, Any] = {}
    own = (read_json(directory / "diagnosis.json") or {}).get("verdict")
    found = (read_json(directory.parent / "diagnosis.json") or {}).get("runs")
    of_sweep = [r.get("verdict") for r in found or () if isinstance(r, dict) and r.get("run") == directory.name]
    verdict = next(filter(None, [own, *of_sweep]), None)
    if verdict:
        out["verdict"] = str(verdict)
    claims = claims_of(directory.parent)
    if claims:
        out["claims"] = counted(claims)
        failed = [c for c in claims if c.get("verdict") == "fail"]
        out["claims_failed"] = sum(directory.name in str(c.get("detail")) for c in failed)
    return out


def claims_of(sweep: Path) -> list[dict[str, Any]]:
    """The checked claims of a sweep; none where they were not checked."""
    claims = (read_json(sweep / "claims.json") or {}).get("claims") or []
    return [c for c in claims if isinstance(c, dict)]


def counted(claims: list[dict[str, Any]]) -> str:
    """``14 pass, 2 not shown at this size``"""
    verdicts = [str(c.get("verdict")) for c in claims]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))


def nonfinite(table: pa.Table | None) -> tuple[dict[str, Any], list[list[Any]]]:
    """Of scalars.parquet: figures of the values that are NaN or infinite, and a row for the event table of each column.

    Charts leave such values out; null is not one of them, it was not measured.
    """
    if table is None:
        return {}, []
    steps, rows, total, first = table["step"], [], 0, math.inf
    for name in table.column_names:
        column = table[name]
        if not pa.types.is_floating(column.type):
            continue
        bad = pc.fill_null(pc.invert(pc.is_finite(column)), False)
        count = pc.sum(bad).as_py() or 0
        if count:
            total += count
            at = pc.index(bad, True).as_py()
            first = min(first, steps[at].as_py())
            rows.append([steps[at].as_py(), "nonfinite", f"{name} = {column[at].as_py()}, {count} times", *4 * [None]])
    out: dict[str, Any] = {"nonfinite_total": total}
    if total:
        out["nonfinite_step"] = first
        losses = [v for v in table["loss"].to_pylist() if v is not None and math.isfinite(v)]
        if losses:
            out["last_finite_loss"] = losses[-1]
    return out, rows


def events(run: Run) -> list[list[Any]]:
    """Rows of the event table: what W&B cannot hold as a number stands as a word."""
    path = run.directory / "events.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        value, limit = event.get("value"), event.get("threshold")
        words = [f"{k} = {v}" for k, v in (("value", value), ("threshold", limit)) if _number(v) is None and v]
        place = [event.get(k) if (event.get(k) or 0) >= 0 else None for k in ("layer", "head")]
        rows.append([event.get("step"), event.get("kind"), ", ".join(words), *place, _number(value), _number(limit)])
    return rows


def files(directory: Path) -> dict[str, Path]:
    """name -> path of what a run's artifact holds."""
    found = {name: directory / name for name in FILES}
    return {name: path for name, path in found.items() if path.is_file() and path.stat().st_size <= FILE_BYTES}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
