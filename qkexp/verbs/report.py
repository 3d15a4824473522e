"""One HTML file for a sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from qkexp.verbs.terminal import DONE, directory_of, out, takes_directory

HELP = "write report.html: claims, curves, maps and runs in one file that needs no network"
EXAMPLE = "qkexp report outputs/vit22b"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_directory(parser)


def run(options: argparse.Namespace) -> int:
    directory = directory_of(options.directory)
    from qkexp.analysis.report.claims import unchecked

    if unchecked(directory):
        from qkexp.analysis.claims import verify_sweep

        with out.status("checking claims"):
            verify_sweep(directory)
    make_report(directory)
    return DONE


def make_report(directory: Path) -> None:
    from rich.progress import Progress

    from qkexp.analysis.report import write_report

    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("reading runs", total=None)
        path = write_report(directory, lambda done, total: bar.update(task, completed=done, total=total))
    out.print(f"report: {path}", soft_wrap=True, markup=False)
