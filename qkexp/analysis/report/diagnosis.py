"""What ``diagnosis.json`` says of runs, where there is one: the verdict, its evidence, the onsets as intervals.

The file is another verb's, and may be of another version: what is not understood is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkexp.record.files import read_json


def of_run(directory: Path) -> dict[str, Any] | None:
    """The diagnosis beside a run's tables."""
    return read(read_json(directory / "diagnosis.json"))


def of_sweep(directory: Path) -> dict[str, dict[str, Any]]:
    """Name of a run -> its diagnosis, from the file beside the sweep's plan (a list of runs, or a mapping)."""
    runs = (read_json(directory / "diagnosis.json") or {}).get("runs")
    if isinstance(runs, Mapping):
        named = list(runs.items())
    else:
        named = [(r.get("run") or r.get("name"), r) for r in runs or [] if isinstance(r, Mapping)]
    return {name: known for name, each in named if isinstance(name, str) and (known := read(each))}


def read(found: Any) -> dict[str, Any] | None:
    """Verdict, rule, evidence, notes, and onsets with ``what, early, late, layer, head``; None without a verdict."""
    if not isinstance(found, Mapping) or not isinstance(found.get("verdict"), str):
        return None
    onsets = found.get("onsets")
    named = onsets.items() if isinstance(onsets, Mapping) else [(str(o.get("link")), o) for o in _mappings(onsets)]
    return {
        "verdict": found["verdict"],
        "rule": found["rule"] if isinstance(found.get("rule"), str) else None,
        "evidence": _texts(found.get("evidence")),
        "notes": _texts(found.get("notes")),
        "onsets": [_onset(name, each) for name, each in named if isinstance(each, Mapping)],
    }


def _onset(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: _whole(found.get(key)) for key in ("early", "late", "layer", "head")}
    return {"what": str(found.get("what") or name), **numbers}


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1e15 else None


def _texts(found: Any) -> list[str]:
    return [str(text) for text in found] if isinstance(found, list) else []


def _mappings(found: Any) -> list[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
