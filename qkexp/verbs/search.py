"""A sweep that bisects for each variant's largest stable rate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qkexp.verbs.terminal import DONE, out
from qkexp.verbs.training import print_plan, train_missing

if TYPE_CHECKING:
    from qkexp.sweep.bisect import Verdicts
    from qkexp.sweep.plan import Plan

STOP = -1  # a search that only plans


def search_rates(plan: Plan, options: argparse.Namespace, *, sums_up: bool = True) -> int:
    """Bisect for the largest stable rate of each variant."""
    from qkexp.record.files import write_json
    from qkexp.sweep.bisect import report, search, table

    assert plan.sweep.rates is not None
    rates = plan.sweep.rates
    out.print(
        f"{plan.directory}: searching {len(rates)} rates from {rates[0]:g} to {rates[-1]:g}; all of them would be "
        f"{len(plan.runs)} runs",
        soft_wrap=True,
    )

    def train(part: Plan) -> int:
        if not options.plan:
            return train_missing(part, options, sums_up=sums_up)
        if part.missing():
            return print_plan(part, options, "the next round") or STOP
        return DONE

    def judge(names: Sequence[str]) -> Verdicts:
        from qkexp.analysis.stability import verdicts

        return verdicts(plan.directory, names)

    code, brackets = search(plan, train, judge)
    if code == STOP:
        return DONE
    if brackets:
        out.print(table(brackets))
        if not options.plan:
            write_json(plan.directory / "critical.json", report(brackets))
    return code
