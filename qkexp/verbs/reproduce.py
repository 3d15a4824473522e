"""An experiment from its file to its figures."""

from __future__ import annotations

import argparse

from qkexp.verbs.figures import draw_figures
from qkexp.verbs.sweep import run_sweep
from qkexp.verbs.terminal import INTERRUPTED, WRONG_INPUT
from qkexp.verbs.training import plan_of, publish, takes_runs
from qkexp.verbs.verify import verify_claims

HELP = "sweep an experiment, verify its claims, draw its figures"
EXAMPLE = "qkexp reproduce --quick"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_runs(parser)
    parser.add_argument("--quick", action="store_true", help="one seed")


def run(options: argparse.Namespace) -> int:
    overrides = list(options.overrides)
    name = overrides.pop(0) if overrides and "=" not in overrides[0] else "vit22b"
    plan = plan_of([f"experiment={name}", *overrides])
    if options.quick:
        seed = min(run.config.seed for run in plan.runs)
        plan = plan_of([f"experiment={name}", *(o for o in overrides if not o.startswith("seed=")), f"seed={seed}"])
    trained = not options.plan and bool(plan.missing(options.again))
    code = run_sweep(plan, options, sums_up=False)
    if options.plan or code in (WRONG_INPUT, INTERRUPTED):
        return code
    code = max(code, verify_claims(plan.directory))
    draw_figures(plan.directory)
    if trained:
        publish(plan)
    return code
