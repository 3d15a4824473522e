"""An experiment from its file to its figures."""

from __future__ import annotations

import argparse

from qkexp.config import DataMissing
from qkexp.verbs.figures import draw_figures
from qkexp.verbs.report import make_report
from qkexp.verbs.sweep import run_sweep
from qkexp.verbs.terminal import DONE, INTERRUPTED, WRONG_INPUT, out
from qkexp.verbs.training import plan_of, publish, takes_runs
from qkexp.verbs.verify import verify_claims

HELP = "sweep an experiment, verify its claims, draw its figures, write its report"
EXAMPLE = "qkexp reproduce --quick"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_runs(parser)
    parser.add_argument("--quick", action="store_true", help="one seed")


def run(options: argparse.Namespace) -> int:
    overrides = list(options.overrides)
    name = overrides.pop(0) if overrides and "=" not in overrides[0] else "vit22b"
    plan = plan_of([f"experiment={name}", *overrides])
    if options.quick and plan.runs:
        seed = min(run.config.seed for run in plan.runs)
        plan = plan_of([f"experiment={name}", *(o for o in overrides if not o.startswith("seed=")), f"seed={seed}"])
    trained = not options.plan and bool(plan.missing(options.again))
    try:
        code = run_sweep(plan, options, sums_up=False)
    except DataMissing as missing:
        if not plan.sweep.optional_data:
            raise
        out.print(f"{name} is left out: {missing}", soft_wrap=True, markup=False)
        return DONE
    if options.plan or code in (WRONG_INPUT, INTERRUPTED):
        return code
    code = max(code, verify_claims(plan.directory))
    draw_figures(plan.directory)
    make_report(plan.directory)
    if trained:
        publish(plan)
    return code
