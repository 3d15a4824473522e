"""Proof of cause: go on from a step of a run with something changed."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from qkexp.verbs.terminal import DONE, FAILED, err, out
from qkexp.verbs.training import launch, print_plan, ready

if TYPE_CHECKING:
    from rich.table import Table

    from qkexp.record.load import Run
    from qkexp.sweep.plan import Plan, Planned

HELP = "go on from a step of a run with something changed"
EXAMPLE = "qkexp branch outputs/lr_grid/none-lr3e-02-seed200-4df8cb --at 40"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", help="a run directory: finished, diverged, stopped or running")
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="steps of the run that are kept")
    parser.add_argument("--again", action="store_true", help="train finished branches again")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first branch that crashes")
    parser.add_argument("--plan", action="store_true", help="print the branches and start nothing")
    parser.add_argument("--unchecked", action="store_true", help="go on though a replay is not what was recorded")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="what changes, such as optim.qk_lr_scale=0,0.1; without any: a calibrated norm, Q and K frozen, Q and K "
        "at a tenth of the rate, all at a tenth of the rate; always beside an arm that changes nothing",
    )


def run(options: argparse.Namespace) -> int:
    from qkexp.record.load import load_run

    parent = load_run(options.directory)
    with out.status("reading the run"):
        from qkexp.sweep import branch, replay

        plan, left_out = branch.plan_branches(parent, options.at, options.overrides)
    if left_out:
        out.print(f"left out: {'; '.join(left_out)}", soft_wrap=True)
    if options.plan:
        return print_plan(plan, options)
    todo = plan.missing(options.again)
    launcher = ready(plan, todo, alone=False)
    finished = len(plan.runs) - len(todo)
    out.print(f"{plan.directory}: {len(plan.runs)} branches at step {options.at}, {finished} finished", soft_wrap=True)
    code = DONE
    if todo:
        try:
            _begin(plan, todo, parent, options)
        except replay.ReplayError as error:
            err.print(f"qkexp branch: {error}", markup=False, soft_wrap=True)
            return FAILED
        branch.with_earlier(plan).write()
        anew = argparse.Namespace(**{**vars(options), "again": False})  # they were begun anew
        code = launch(plan, todo, launcher, anew, alone=False)
    out.print(_table(plan, options.at))
    return max(code, _compare(plan, parent, options))


def _begin(plan: Plan, todo: list[Planned], parent: Run, options: argparse.Namespace) -> None:
    """Find the state at the step, replaying what has no checkpoint, and begin the branches that have not begun."""
    from rich.progress import Progress

    from qkexp.sweep import branch, replay

    todo = todo if options.again else branch.not_begun(plan, todo)
    if not todo:
        return
    with Progress(console=out, transient=True) as progress:
        task = progress.add_task(f"replaying {parent.name}", total=options.at)
        source = replay.state_at(
            parent,
            options.at,
            plan.directory / branch.KEPT,
            unchecked=options.unchecked,
            tick=lambda done: progress.update(task, completed=done),
        )
        progress.update(task, description="preparing the branches", completed=0, total=len(todo))
        plan.make_directory()
        branch.note_source(plan, source)
        branch.begin(plan, todo, parent, source, lambda: progress.advance(task))
    how = f"step {options.at} is a checkpoint"
    if source.base < options.at:
        start = f"the checkpoint at step {source.base}" if source.base else "the start"
        how = f"step {options.at} was replayed from {start}, and every number was the recorded one"
        if source.difference is not None:
            how = f"step {options.at} was replayed from {start}, and is not the recorded run: {source.difference}"
    out.print(how, markup=False, soft_wrap=True)


def _table(plan: Plan, step: int) -> Table:
    """How each branch went on."""
    from rich.markup import escape
    from rich.table import Table

    from qkexp.record.load import Run

    table = Table(title="branches", title_justify="left")
    numbers = (f"loss before step {step}", "final loss", "final validation loss")
    for column in ("arm", "status", *numbers, "reason"):
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for planned in plan.runs:
        found = Run(plan.directory / planned.name)
        loss = found.scalars.loss
        final = (found.outcome or {}).get("final", {})
        values = [loss[max(0, step - 20) : step].mean(), final.get("loss"), final.get("val_loss")]
        reason = "" if found.status == "completed" else escape(str((found.outcome or {}).get("reason") or ""))
        arm = planned.name.rpartition(f"-at{step}-")[0]
        texts = ("-" if v is None or math.isnan(v) else f"{v:.3g}" for v in values)
        table.add_row(arm, found.status, *texts, reason)
    return table


def _compare(plan: Plan, parent: Run, options: argparse.Namespace) -> int:
    """Whether the arm that changes nothing went on as its parent did."""
    from qkexp.record.load import Run
    from qkexp.sweep import replay

    arm = Run(plan.directory / plan.runs[0].name)
    if not (arm.directory / "config.yaml").exists():
        return DONE  # it was not begun
    with out.status("comparing with the run"):
        difference = replay.first_difference(parent, arm, options.at)
    if difference is not None:
        text = f"{arm.name} did not go on as {parent.name} did: {difference}"
        err.print(f"{text}. {replay.ROUNDING}", markup=False, soft_wrap=True)
        return DONE if options.unchecked else FAILED
    shared = min(replay.recorded(parent), replay.recorded(arm))
    if shared > options.at:
        out.print(f"{arm.name}: steps {options.at} to {shared - 1} have every number of the run", soft_wrap=True)
    return DONE
