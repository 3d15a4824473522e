"""Runs to W&B, afterwards."""

from __future__ import annotations

import argparse
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from qkexp.verbs.terminal import DONE, FAILED, directory_of, err, out, takes_directory

if TYPE_CHECKING:
    from qkexp.record.mirror.process import Copied

HELP = "copy runs to W&B that are not there yet"
EXAMPLE = "qkexp sync outputs/vit22b --mode online"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_directory(parser)
    parser.add_argument(
        "--mode", choices=("auto", "online", "offline"), default="auto", help="auto: online with a login"
    )
    parser.add_argument("--again", action="store_true", help="copy everything anew, into new W&B runs")


def run(options: argparse.Namespace) -> int:
    from rich.progress import Progress

    from qkexp.config import UserError
    from qkexp.record.load import load_sweep
    from qkexp.record.mirror.login import resolve_mode
    from qkexp.record.mirror.process import poll
    from qkexp.record.mirror.run import Copy
    from qkexp.record.mirror.sweep import SweepCopy

    directory = directory_of(options.directory)
    sweep = load_sweep(directory)
    tracker = next(iter(sweep.all.values())).typed.tracker
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    try:
        mode = resolve_mode(options.mode)
    except ValueError as error:
        raise UserError(f"--mode={options.mode}: {error}") from error
    if mode is None:
        raise UserError("WANDB_MODE=disabled: nothing is copied; --mode=online or offline copies nevertheless")
    if options.again:
        for folder in (directory, *(r.directory for r in sweep.all.values())):
            (folder / "mirror.json").unlink(missing_ok=True)
    group = sweep.plan.get("sweep") or directory.resolve().name
    runs: list[Copied] = [Copy(r.directory, tracker.project, mode, group) for r in sweep.all.values()]
    copies: list[Copied] = [*runs, *([SweepCopy(directory, tracker.project, mode, group)] if sweep.plan else [])]
    logging.getLogger("qkexp.mirror").setLevel(logging.CRITICAL)  # what failed is told at the end
    with Progress(console=out, transient=True) as bar:
        task = bar.add_task(f"copying to W&B, {mode}", total=len(copies))
        reached = poll(copies, final=True, tick=lambda _: bar.advance(task))
    return tell(runs, copies, reached, str(directory), mode)


def tell(runs: list[Copied], copies: list[Copied], reached: bool, directory: str, mode: str) -> int:
    """What was copied, what was there already, and what could not be."""
    failed = [copy for copy in copies if copy.error]
    how = Counter(copy.done for copy in runs if not copy.error)
    lost = sum(bool(copy.error) for copy in runs)
    words = [f"{count} {name}" for name, count in how.items()] + ([f"{lost} failed"] if lost else [])
    rows = sum(copy.rows for copy in runs)
    out.print(f"{directory}: {len(runs)} runs, {mode}: {', '.join(words)}; {rows:,} rows", soft_wrap=True)
    for copy in failed[:3]:
        err.print(f"{copy.directory.name}: {copy.error}", markup=False, soft_wrap=True)
    if not reached:
        text = "the W&B server cannot be reached, or refuses; the directories have everything: try again later"
        err.print(text, soft_wrap=True)
    url = next(filter(None, map(_url, runs)), None)
    if url and mode == "online" and not failed:
        out.print(url, soft_wrap=True)
    return FAILED if failed or not reached else DONE


def _url(copy: Any) -> str | None:
    """The page of the project that a run was copied to."""
    url = copy.record.url if copy.record else None
    return url.partition("/runs/")[0] if url else None
