"""What differs between runs."""

from __future__ import annotations

import argparse

from qkexp.verbs.terminal import DONE, out

HELP = "what differs between runs: configurations, code and machine, outcomes at the same step"
EXAMPLE = "qkexp compare outputs/vit22b/none-lr1e-01-seed0-1f3a9c outputs/vit22b/l2-lr1e-01-seed0-9aac98"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, two or more")


def run(options: argparse.Namespace) -> int:
    from qkexp.analysis.compare import compare, tables
    from qkexp.record.load import load_run

    out.print(tables(compare([load_run(directory) for directory in options.runs])), soft_wrap=False)
    return DONE
