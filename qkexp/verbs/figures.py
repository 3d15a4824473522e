"""Pictures of a sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from qkexp.verbs.terminal import DONE, directory_of, out, takes_directory

HELP = "draw PDF, PNG and CSV"
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
