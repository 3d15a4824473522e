"""From overrides to trained runs: what train, sweep and reproduce share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkexp.config import RunConfig
from qkexp.verbs.terminal import DONE, err, out

if TYPE_CHECKING:
    from qkexp.record.mirror.process import Mirror
    from qkexp.sweep.launch import Launcher
    from qkexp.sweep.plan import Plan, Planned

MIRROR_SECONDS = 1.5  # nobody waits longer for W&B


def takes_runs(parser: argparse.ArgumentParser) -> None:
    """The arguments of verbs that train."""
    from qkexp.compose import options

    parser.add_argument("--again", action="store_true", help="train finished runs again")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first run that crashes")
    parser.add_argument("--plan", action="store_true", help="print the runs and start nothing")
    known = "; ".join(f"{group}: {', '.join(options(group))}" for group in ("experiment", "attention"))
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=f"GROUP=FILE or GROUP.KEY=VALUE; of {known}")


def plan_of(overrides: Sequence[str], *, single: bool = False) -> Plan:
    from qkexp.compose import compose_sweep

    with out.status("composing the runs"):
        composed = compose_sweep(overrides, single=single)
    from qkexp.sweep.plan import Plan

    return Plan.of(composed)


def ready(plan: Plan, todo: Sequence[Planned], *, alone: bool) -> Launcher:
    """Check what only this machine can tell (device, sizes, data), before anything is written.

    Returns the launcher that is to train the runs.
    """
    if todo and plan.sweep.launcher_name == "local":
        from qkexp.sweep.warm import warm_up

        warm_up()
    from qkexp.model.vit import check_sizes
    from qkexp.sweep.launch import cores
    from qkexp.sweep.launchers import make_launcher
    from qkexp.train.data import prepare
    from qkexp.train.precision import check_machine, warnings

    settings = dict(plan.sweep.launcher)
    if alone:
        settings |= {"workers": 1, "threads": settings["threads"] or cores()}
    launcher = make_launcher(plan.sweep.launcher_name, settings)
    if launcher.where == "here":
        for run in todo:
            check_machine(run.config)
        for text in {w: None for run in todo for w in warnings(run.config)}:
            err.print(text, markup=False, soft_wrap=True)
    for config in {str((r.config.model, r.config.data, r.config.attention)): r.config for r in todo}.values():
        check_sizes(config)
    needs: dict[tuple[Any, ...], RunConfig] = {}  # of each data set the run with the largest batch
    for config in sorted((run.config for run in todo), key=lambda c: c.train.batch_size):
        needs[config.data.name, config.data.root, config.data.download] = config
    for config in needs.values():
        prepare(config.data, config.train.batch_size)
    return launcher


def launch(
    plan: Plan,
    todo: Sequence[Planned],
    launcher: Launcher,
    options: argparse.Namespace,
    *,
    alone: bool,
    sums_up: bool = False,
) -> int:
    """Train runs, show progress, and mirror them where a tracker is configured.

    ``sums_up``: and then the sweep as a whole.
    """
    from qkexp.record.files import write_json
    from qkexp.sweep.display import progress

    plan.make_directory()
    mirror = _mirror(plan, [run.name for run in todo], sweep=sums_up)
    if mirror is not None:
        from qkexp.record.mirror.rows import budget

        keys = budget(max((run.config for run in todo), key=lambda c: c.model.depth or 0))
        out.print(f"W&B: group {plan.sweep.name}, {keys}", soft_wrap=True)
    began = time.monotonic()
    try:
        with progress(out, plan.directory, todo) as tick:
            code = launcher.launch(plan.directory, todo, again=options.again, fail_fast=options.fail_fast, tick=tick)
        for problem in launcher.problems:
            err.print(f"{launcher.where}: {problem}", markup=False, soft_wrap=True)
        if not alone:
            timing = {
                "wall_seconds": time.monotonic() - began,
                "workers": launcher.workers,
                "trained": [r.name for r in todo],
            }
            write_json(plan.directory / "timing.json", timing)
    finally:
        _close(mirror, "copying the last rows to W&B")
    return code


def publish(plan: Plan) -> None:
    """Copy to W&B what came after training: claims and figures."""
    _close(_mirror(plan, [run.name for run in plan.runs], sweep=True), "copying claims and figures to W&B")


def _mirror(plan: Plan, names: Sequence[str], *, sweep: bool) -> Mirror | None:
    """What copies runs to W&B, where a tracker is configured."""
    tracker = plan.runs[0].config.tracker
    if tracker.name != "wandb":
        return None
    from qkexp.record.mirror.process import start

    return start(plan.directory, names, tracker.project, tracker.mode, group=plan.sweep.name, sweep=sweep)


def _close(mirror: Mirror | None, status: str) -> None:
    if mirror is None:
        return
    with out.status(status):
        warning = mirror.close(MIRROR_SECONDS)
    if warning:
        err.print(warning, markup=False, soft_wrap=True)


def adopt(plan: Plan, options: argparse.Namespace) -> None:
    """Take over what other sweeps have finished, and name it."""
    plan.make_directory()
    shared = plan.adopt(options.again)
    if shared:
        sweeps = sorted({run.directory.parent.name for run in shared})
        names = some([run.name for run in shared])
        out.print(f"shared with {', '.join(sweeps)} (--again trains them anew): {names}", soft_wrap=True)


def train_missing(plan: Plan, options: argparse.Namespace, *, sums_up: bool = True) -> int:
    """Train what is missing of a plan, and say how all of it stands. ``sums_up`` as in :func:`launch`."""
    from qkexp.sweep.status import summary, table

    todo = plan.missing(options.again)
    launcher = ready(plan, todo, alone=False)
    plan.write()
    done = len(plan.runs) - len(todo)
    out.print(f"{plan.directory}: {len(plan.runs)} runs, {done} finished before, {len(todo)} to train", soft_wrap=True)
    adopt(plan, options)
    foreign = [] if options.again else plan.foreign()
    if foreign:
        out.print(f"kept, though other code made them (--again trains them anew): {some(foreign)}", soft_wrap=True)
    code = launch(plan, todo, launcher, options, alone=False, sums_up=sums_up) if todo else DONE
    states = plan.states()
    problems = [s for s in states if s.status not in ("completed", "diverged")]
    listed = states if len(states) <= 12 else problems  # of many runs, those that need a look
    if todo and listed:
        out.print(table(listed, "runs"))
    out.print(f"{plan.directory}: {summary(states)}", soft_wrap=True)
    return code


def print_plan(plan: Plan, options: argparse.Namespace, title: str = "plan") -> int:
    from qkexp.sweep.estimate import estimate
    from qkexp.sweep.status import summary, table

    states = plan.states()
    out.print(table(states, f"{title} of {plan.directory}"))
    todo = plan.missing(options.again)
    named = len(plan.sweep.runs)
    twice = f" ({named} named by the grid)" if title == "plan" and named > len(plan.runs) else ""
    out.print(f"{len(plan.runs)} runs{twice}: {summary(states)}; {len(todo)} to train")
    if todo:
        with out.status("estimating the time"):
            text = estimate(todo, states, plan.sweep)
        out.print(text, soft_wrap=True)
    return DONE


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
