"""What every verb says things with, and the exit codes that it says last."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from qkexp.config import UserError

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 75
out = Console(soft_wrap=False, highlight=False)
err = Console(stderr=True, highlight=False)


def takes_directory(parser: argparse.ArgumentParser) -> None:
    """The argument of verbs that read a sweep."""
    parser.add_argument("directory", help="a sweep directory, such as outputs/vit22b")


def directory_of(text: str) -> Path:
    """A directory that exists.

    Raises:
        UserError: it does not.
    """
    path = Path(text)
    if not path.is_dir():
        raise UserError(f"{text}: no such directory")
    return path
