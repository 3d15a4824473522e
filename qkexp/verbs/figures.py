"""Pictures of a sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from qkexp.verbs.terminal import DONE, directory_of, out, takes_directory

HELP = "draw PDF, PNG and CSV; of sweeps over rates, tables too"
EXAMPLE = "qkexp figures outputs/vit22b heatmaps"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_directory(parser)
    parser.add_argument("names", nargs="*", help="figures to draw; those of the experiment by default")


def run(options: argparse.Namespace) -> int:
    draw_figures(directory_of(options.directory), options.names or None)
    return DONE


def draw_figures(directory: Path, names: list[str] | None = None) -> None:
    from qkexp.analysis.figures import draw

    with out.status("drawing figures"):
        paths = draw(directory, names)
    for path in paths:
        out.print(f"figure: {path}", soft_wrap=True)
    if names is None:
        write_tables(directory)


def write_tables(directory: Path) -> None:
    """Sensitivity to the rate, and paired tests, where a sweep has rates enough."""
    from qkexp.analysis import tables
    from qkexp.record.load import load_sweep

    with out.status("writing tables"):
        written = tables.write(load_sweep(directory))
    for found in written:
        out.print(found.table)
        for remark in found.remarks:
            out.print(f"- {remark}", soft_wrap=True, markup=False)
        out.print(f"table: {found.path}, .tex", soft_wrap=True)
