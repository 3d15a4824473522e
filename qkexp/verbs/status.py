"""How runs stand, also while they train."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from qkexp.verbs.terminal import DONE, directory_of, out, takes_directory

if TYPE_CHECKING:
    from qkexp.sweep.status import State

WATCH_SECONDS = 2.0


HELP = "how every run of a directory stands"
EXAMPLE = "qkexp status outputs/vit22b --watch"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_directory(parser)
    parser.add_argument("--watch", action="store_true", help="again every two seconds, until every run has ended")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(options: argparse.Namespace) -> int:
    from rich.console import Group
    from rich.live import Live

    from qkexp.sweep.status import pace, summary, sweep_states, table

    directory = directory_of(options.directory)

    def looks() -> Iterator[list[State]]:
        states = sweep_states(directory)
        yield states
        while options.watch and any(s.status in ("running", "missing") for s in states):
            time.sleep(WATCH_SECONDS)
            states = sweep_states(directory, {s.name: s for s in states})
            yield states

    with contextlib.suppress(KeyboardInterrupt):  # of a user who has seen enough
        if options.json:
            for states in looks():
                print(json.dumps([vars(s) for s in states], indent=None if options.watch else 1), flush=True)
        else:
            with Live(console=out, auto_refresh=False) as live:
                for states in looks():
                    line = ", ".join(filter(None, (summary(states), pace(states))))
                    live.update(Group(table(states, str(directory)), line), refresh=True)
    return DONE
