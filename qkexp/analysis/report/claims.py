"""The claims of a sweep as they were last checked, and whether that still stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkexp.analysis.report.run import plain
from qkexp.record.files import read_json
from qkexp.sweep.status import FINISHED, State


def claims(directory: Path, states: Sequence[State]) -> dict[str, Any]:
    """claims.json as it is, and how many runs have not ended (``open``); ``rows`` is None where nothing was checked."""
    found = read_json(directory / "claims.json")
    return {
        "declared": (directory / "expect.yaml").exists(),
        "rows": None if found is None else [plain(row) for row in found.get("claims", [])],
        "stale": found is not None and unchecked(directory),
        "open": sum(s.status not in FINISHED for s in states),
    }


def unchecked(directory: Path) -> bool:
    """Whether claims are declared, and a run has ended (or they were declared) since they were checked."""
    expect, checked = directory / "expect.yaml", directory / "claims.json"
    if not expect.exists():
        return False
    if not checked.exists():
        return True
    changes = [expect, *directory.glob("*/outcome.json")]
    return max(path.stat().st_mtime for path in changes) > checked.stat().st_mtime
