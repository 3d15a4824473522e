"""What ``diagnosis.json`` says of runs, where there is one: the verdict, its evidence, the onsets as intervals.

The file is another verb's, and may be of another version: what is not understood is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkexp.record.files import read_json

WHERE = ("early", "late", "layer", "head")
OLD = "this diagnosis was made before the run ended: qkexp diagnose makes it anew"


def diagnoses(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Name of a run -> its diagnosis, from the file beside its tables or from that beside the sweep's plan.

    Of two the later one counts; one that is older than the run's end says so in its notes.
    """
    whole = directory / "diagnosis.json"
    of_sweep = _runs(whole)
    found = {}
    for name in names:
        own = directory / name / "diagnosis.json"
        known = [(p, each) for p, runs in ((own, _runs(own)), (whole, of_sweep)) if (each := read(runs.get(name)))]
        if known:
            path, each = max(known, key=lambda item: _time(item[0]))
            if _time(directory / name / "outcome.json") > _time(path):
                each["notes"].append(OLD)
            found[name] = each
    return found


def _runs(path: Path) -> dict[str, Any]:
    runs = (read_json(path) or {}).get("runs")
    return {str(each.get("run")): each for each in _mappings(runs)}


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read(found: Any) -> dict[str, Any] | None:
    """Verdict, rule, evidence, notes, and onsets with ``what, early, late, layer, head``; None without a verdict."""
    if not isinstance(found, Mapping) or not isinstance(found.get("verdict"), str):
        return None
    onsets = found.get("onsets")
    compared = [each.get("text") for each in _mappings(found.get("compared"))]
    return {
        "verdict": found["verdict"],
        "rule": found["rule"] if isinstance(found.get("rule"), str) else None,
        "evidence": [*_texts(found.get("evidence")), *_texts(compared)],
        "notes": _texts(found.get("notes")),
        "onsets": [
            {"what": str(each.get("what") or name), **{key: _whole(each.get(key)) for key in WHERE}}
            for name, each in (onsets.items() if isinstance(onsets, Mapping) else ())
            if isinstance(each, Mapping)
        ],
    }


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1e15 else None


def _texts(found: Any) -> list[str]:
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


def _mappings(found: Any) -> list[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
