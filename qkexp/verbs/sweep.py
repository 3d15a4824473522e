"""Many runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qkexp.verbs.search import search_rates
from qkexp.verbs.training import plan_of, print_plan, takes_runs, train_missing

if TYPE_CHECKING:
    from qkexp.sweep.plan import Plan


HELP = "train many runs (Hydra multirun syntax)"
EXAMPLE = "qkexp sweep attention=none,l2 optim.lr=1e-2,3e-2 seed=0,1,2"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_runs(parser)


def run(options: argparse.Namespace) -> int:
    return run_sweep(plan_of(options.overrides), options)


def run_sweep(plan: Plan, options: argparse.Namespace, *, sums_up: bool = True) -> int:
    """Train, search or only print a plan. ``sums_up``: and copy the sweep as a whole to W&B."""
    if plan.sweep.rates is not None:
        return search_rates(plan, options, sums_up=sums_up)
    return print_plan(plan, options) if options.plan else train_missing(plan, options, sums_up=sums_up)
