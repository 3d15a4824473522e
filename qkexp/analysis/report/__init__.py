"""One HTML file for a sweep: claims, curves, maps, runs; it opens from disk and asks nobody for anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qkexp.analysis.report.data import Reader
from qkexp.analysis.report.page import page
from qkexp.record.files import write_text

__all__ = ["Reader", "page", "write_report"]


def write_report(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Write ``<directory>/report.html`` from what its runs have recorded by now; ``progress(done, total)`` in runs.

    Raises:
        UserError: no runs there.
    """
    path = Path(directory) / "report.html"
    write_text(path, page(Path(directory).resolve().name, Reader(Path(directory), progress).payload()))
    return path
