"""Runs to W&B, afterwards."""

from __future__ import annotations

import argparse

from qkexp.verbs.terminal import DONE, FAILED, directory_of, err, out, takes_directory

HELP = "copy runs to W&B that are not there yet"
EXAMPLE = "qkexp sync outputs/vit22b --mode online"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_directory(parser)
    parser.add_argument(
        "--mode", choices=("auto", "online", "offline"), default="auto", help="auto: online with a login"
    )


def run(options: argparse.Namespace) -> int:
    from qkexp.record.load import load_sweep
    from qkexp.record.mirror import start

    directory = directory_of(options.directory)
    sweep = load_sweep(directory)
    runs, group = sweep.all, sweep.plan.get("sweep") or directory.resolve().name
    tracker = next(iter(runs.values())).typed.tracker
    mirror = start(directory, list(runs), tracker.project, options.mode, group=group)
    with out.status(f"copying {len(runs)} runs to W&B"):
        warning = mirror.close(None)
    if warning:
        err.print(warning, markup=False, soft_wrap=True)
        return FAILED
    out.print(f"{directory}: {len(runs)} runs are on W&B, or as offline runs in their directories", soft_wrap=True)
    return DONE
