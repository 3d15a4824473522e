"""Data sets, fetched and converted once."""

from __future__ import annotations

import argparse

from qkexp.config import UserError
from qkexp.verbs.terminal import DONE, out
from qkexp.verbs.training import plan_of

HELP = "fetch and convert a data set once"
EXAMPLE = "qkexp data prepare fashion_mnist data.root=data"


def arguments(parser: argparse.ArgumentParser) -> None:
    from qkexp.compose import options

    parser.add_argument("action", choices=("prepare",), help="fetch where it is not found on disk, convert, check")
    parser.add_argument("name", metavar="NAME", help=" | ".join(options("data")))
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="data.root=DIR: where to; else the user's cache"
    )


def run(options: argparse.Namespace) -> int:
    other = [o for o in options.overrides if o.split("=")[0] in ("data", "data.name")]
    if other:
        raise UserError(f"{other[0]}: the data set is {options.name}, as named before it")
    plan = plan_of([f"data={options.name}", *options.overrides], single=True)
    from qkexp.train.data import convert

    out.print(f"{options.name}: {convert(plan.runs[0].config.data)}", soft_wrap=True, markup=False)
    return DONE
