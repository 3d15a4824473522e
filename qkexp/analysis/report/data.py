"""A sweep as the page reads it: one JSON header, and the bytes of all curves behind it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex

from qkexp.analysis.compare import differing
from qkexp.analysis.figures.lr_sensitivity import levels
from qkexp.analysis.figures.maps import COLUMNS
from qkexp.analysis.figures.style import look, rank
from qkexp.analysis.report.claims import claims
from qkexp.analysis.report.diagnosis import diagnoses
from qkexp.analysis.report.run import LAYERED, SCALARS, Budget, Part, describe, plain
from qkexp.analysis.stability import stability
from qkexp.config import keys
from qkexp.record.files import read_json
from qkexp.record.load import Run, Sweep, load_sweep
from qkexp.sweep.status import State, state_of, summary, sweep_states

LAYER_BYTES, HEAD_BYTES = 1_800_000, 2_300_000  # of all runs: what keeps a page of 100 large ones under 10 MB
# keys that a variant's name or the seed already says
_SAID = ("attention.", "seed", "model.seed", "data.seed")


@dataclass
class Reader:
    """Makes a sweep's payload; what was read of a run is kept until its directory changes."""

    directory: Path
    progress: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        self._parts: dict[str, tuple[str, Part]] = {}

    def version(self) -> str:
        """Changes whenever a run, the plan or the claims do; costs a look at each file's time and size."""
        names = sorted(p.parent.name for p in self.directory.glob("*/config.yaml"))
        marks = [_mark(self.directory / name) for name in names]
        marks += [_mark(self.directory, ("plan.json", "claims.json", "expect.yaml", "diagnosis.json"))]
        states = [(s.name, s.status) for s in sweep_states(self.directory)]
        return hashlib.sha256(repr((names, marks, states)).encode()).hexdigest()[:16]

    def payload(self, version: str = "") -> bytes:
        """gzip of: length of the header (uint32, little-endian), header (JSON), arrays.

        Args:
            version: what the page holds against later ones, to see whether there is news.

        Raises:
            UserError: no runs, and no plan of any.
        """
        planned = [r["name"] for r in (read_json(self.directory / "plan.json") or {}).get("runs") or []]
        begun = [name for name in planned if (self.directory / name / "config.yaml").is_file()]
        sweep = load_sweep(self.directory) if begun or not planned else Sweep(self.directory, {})
        states = {s.name: s for s in sweep_states(self.directory)}
        count = max(len(planned), len(sweep.all), 1)
        budget = Budget(LAYER_BYTES // count, HEAD_BYTES // count)
        diagnosed = diagnoses(self.directory, list(sweep.all))
        parts = []
        for done, (name, run) in enumerate(sweep.all.items()):
            self.progress(done, len(sweep.all))
            parts.append(self._part(name, run, states.get(name) or state_of(run.directory), budget))
        self.progress(len(sweep.all), len(sweep.all))
        runs, common, blob = _joined(parts)
        for each in runs:
            each["diagnosis"] = diagnosed.get(each["name"])
        header = {
            "version": version,
            "name": self.directory.resolve().name,
            "runs": runs,
            "common": common,
            "missing": [{**asdict(s), "wall_seconds": s.seconds} for s in states.values() if s.name not in sweep.all],
            "summary": summary(list(states.values())),
            "axes": _axes(sweep, runs),
            "variants": _variants(sweep),
            "identity": [k.name for k in keys() if k.meta["identity"]],
            "scalars": SCALARS,
            "layered": LAYERED,
            "colours": {name: _colours(name) for _, _, name in COLUMNS.values()},
            "claims": claims(self.directory, list(states.values())),
            **_stability(sweep),
        }
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 4)  # arrays of float32 begin at a multiple of four
        return gzip.compress(struct.pack("<I", len(text)) + text + blob, 6, mtime=0)

    def _part(self, name: str, run: Run, state: State, budget: Budget) -> Part:
        mark = f"{_mark(run.directory)} {state.status} {budget}"
        if self._parts.get(name, ("",))[0] != mark:
            self._parts[name] = mark, describe(run, state, budget)
        return self._parts[name][1]


def _mark(directory: Path, names: Sequence[str] | None = None) -> list[tuple[str, int, int]]:
    """Time and size of files: those named, or all of a run but its lock, which beats without news."""
    paths = [directory / n for n in names] if names else [*_files(directory), *_files(directory / "parts")]
    found = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError:  # not there, or gone since it was listed
            continue
        found.append((path.name, stat.st_mtime_ns, stat.st_size))
    return found


def _files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            kept = [Path(e.path) for e in entries if e.is_file() and e.name not in ("lock", "log.txt", "mirror.json")]
    except OSError:
        return []
    return sorted(kept)


def _joined(parts: Sequence[Part]) -> tuple[list[dict[str, Any]], dict[str, Any], bytes]:
    """Facts of the runs, what is the same in all of them, and their arrays one after another.

    Each run gets ``at``: name of an array -> its first byte. Of ``config`` and ``provenance`` a run keeps what others
    do not share.
    """
    runs, pieces, at = [], [], 0
    common: dict[str, Any] = {}
    for group in ("config", "provenance"):
        every = [part.facts[group] for part in parts]
        varied = differing(every)
        common[group] = {k: v for k, v in (every[0] if every else {}).items() if k not in varied}
    for part in parts:
        facts = dict(part.facts)
        for group in ("config", "provenance"):
            facts[group] = {k: v for k, v in facts[group].items() if k not in common[group]}
        facts["at"] = {}
        for name, data in part.arrays.items():
            facts["at"][name] = at
            padded = data + b"\0" * (-len(data) % 4)
            pieces.append(padded)
            at += len(padded)
        runs.append(facts)
    return runs, common, b"".join(pieces)


def _axes(sweep: Sweep, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Identity keys, beside variant and seed, in which runs differ, with their values in order."""
    if not runs:
        return []
    varied = [k.name for k in keys() if k.meta["identity"] and not k.name.startswith(_SAID)]
    table = sweep.runs
    out = []
    for name in varied:
        values = {json.dumps(plain(v)): v for v in table[name]}
        if len(values) > 1 or name == "optim.lr":
            ordered = sorted(values.values(), key=lambda v: (not isinstance(v, (int, float)), _order(v)))
            out.append({"key": name, "values": [plain(v) for v in ordered]})
    return sorted(out, key=lambda axis: axis["key"] != "optim.lr")


def _order(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else str(value)


def _variants(sweep: Sweep) -> list[dict[str, str]]:
    names = sorted({run.variant for run in sweep.all.values()}, key=rank)
    return [{"name": name, **asdict(look(name))} for name in names]


def _colours(name: str) -> list[str]:
    """A colour map of the figures at eleven places."""
    return [to_hex(matplotlib.colormaps[name](x)) for x in np.linspace(0, 1, 11)]


def _stability(sweep: Sweep) -> dict[str, Any]:
    if not sweep.all:
        return {"stability": [], "levels": {}}
    verdicts = stability(sweep)
    return {
        "stability": [plain(row) for row in verdicts.to_dict("records")],
        "levels": {name: float(value) for name, value in levels(sweep, verdicts).items()},
    }
