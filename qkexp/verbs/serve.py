"""The report in a browser of this machine, also while the sweep runs."""

from __future__ import annotations

import argparse
import contextlib

from qkexp.verbs.terminal import DONE, directory_of, out, takes_directory

HELP = "show the report in a browser of this machine; it follows a sweep that runs"
EXAMPLE = "qkexp serve outputs/vit22b --port 8000"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_directory(parser)
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; a free one by default")


def run(options: argparse.Namespace) -> int:
    directory = directory_of(options.directory)
    from qkexp.analysis.serve import Server

    with out.status(f"reading {directory}"):
        server = Server(directory, options.port)
    with server, contextlib.suppress(KeyboardInterrupt):  # of a user who has seen enough
        out.print(f"{directory}: {server.url} (Ctrl-C ends it)", soft_wrap=True, markup=False)
        server.serve_forever(poll_interval=0.2)
    return DONE
