"""One run: the plan of one, trained or shown."""

from __future__ import annotations

import argparse
from pathlib import Path

from qkexp.verbs.terminal import DONE, err, out
from qkexp.verbs.training import adopt, launch, plan_of, print_plan, ready, takes_runs

HELP = "train one run"
EXAMPLE = "qkexp train attention=rmsnorm optim.lr=3e-2"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_runs(parser)
    parser.add_argument("-m", "--multirun", action="store_true", help="the same as qkexp sweep")


def run(options: argparse.Namespace) -> int:
    if options.multirun:
        from qkexp.verbs import sweep

        return sweep.run(options)
    plan = plan_of(options.overrides, single=True)
    if options.plan:
        return print_plan(plan, options)
    run = plan.runs[0]
    if not plan.missing(options.again):
        adopt(plan, options)
    else:
        code = launch(plan, plan.runs, ready(plan, plan.runs, alone=True), options, alone=True)
        if code:
            explain_failure(plan.directory / run.name)
            return code
    print_outcome(plan.directory / run.name)
    return DONE


def print_outcome(directory: Path) -> None:
    from qkexp.record.load import load_run

    run = load_run(directory)
    outcome = run.outcome or {}
    for label, group in (run.provenance.get("parameter_groups") or {}).items():
        line = f"{label.replace('_', ' ')}: {group['tensors']} tensors, {group['parameters']:,} parameters"
        out.print(line, markup=False)
    out.print(f"{outcome.get('status')}: {outcome.get('reason')}", markup=False)
    for name, value in (outcome.get("final") or {}).items():
        out.print(f"  {name}: {'-' if value is None else f'{value:.4g}'}")
    out.print(f"{directory}", soft_wrap=True)


def explain_failure(directory: Path) -> None:
    from qkexp.sweep.status import state_of

    state = state_of(directory)
    err.print(f"{state.status}: {state.reason}\nlog: {directory / 'log.txt'}", markup=False, soft_wrap=True)
