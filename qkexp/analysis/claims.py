"""Claims of an experiment: conditions over its runs, checked against what was measured.

A claim is a mapping in the experiment's ``expect.claims``:

    claim     what it says, in words
    where     which runs: variant (a name, a list, or qk_norm), and dotted configuration keys
    metric    what is measured (qkexp.analysis.measures), with layer, reduce, over, or above/before/after
    seeds     every (default: each run must satisfy it) or median (over the seeds of a cell: a variant and rate, and
              whatever else varies in the sweep, such as the size; qkexp.analysis.cells)
    than      with median: divided by the largest median of these variants at the same rate and other keys
    minus     with median: ``best`` subtracts the smallest median of all variants there
    is        comparison and bound: "< 1.3", ">= 2", "== diverged"
    source    where the claim comes from

A claim about what is computed over several runs (a fit, an order, a sensitivity) is one about the table that a
figure plots (its CSV):

    figure    its name; where: values of its columns; metric: the column; reduce: min, max, mean, median, first, last,
              or every (default: each row must satisfy it)

``metric: stable`` is the sweep's verdict at a rate. ``at_this_size: not_shown`` declares beforehand that
the small version does not bear a claim out in every run: it is measured and printed, and fails nothing.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from rich.table import Table

from qkexp.analysis.cells import Cell, group
from qkexp.analysis.figures import FIGURES, DoesNotFit
from qkexp.analysis.measures import measure
from qkexp.analysis.stability import MIN_SEEDS, TOO_FEW, verdict_rows
from qkexp.config import UserError, flatten
from qkexp.record.load import Run, Sweep, load_sweep
from qkexp.record.run import write_json

PASS, FAIL, NOT_SHOWN, NOT_RUN = "pass", "fail", "not shown at this size", "not run"
STYLE = {PASS: "green", FAIL: "red", NOT_SHOWN: "yellow", TOO_FEW: "yellow", NOT_RUN: "yellow"}
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
TABLE_REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "min": lambda x: float(np.min(x)),
    "max": lambda x: float(np.max(x)),
    "mean": lambda x: float(np.mean(x)),
    "median": lambda x: float(np.median(x)),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
}
REQUIRED = {"claim", "metric", "is"}
OPTIONAL = {
    "where",
    "layer",
    "reduce",
    "over",
    "above",
    "before",
    "after",
    "seeds",
    "than",
    "minus",
    "source",
    "figure",
}
MOST_TOLD = 4  # columns that name a row
KEYS = REQUIRED | OPTIONAL | {"at_this_size"}


@dataclass(frozen=True)
class Result:
    """A checked claim: the value furthest from (or beyond) its bound, and how many runs or groups it was taken over."""

    claim: str
    value: Any
    bound: str
    verdict: str
    count: int
    detail: str = ""


def verify_sweep(directory: Path) -> list[Result]:
    """Check the claims of ``expect.yaml``, write claims.json; an empty list where there are none.

    Raises:
        UserError: a claim is not understood.
    """
    path = directory / "expect.yaml"
    if not path.exists():
        return []
    sweep = load_sweep(directory)
    expect = yaml.safe_load(path.read_text())
    results = [check(sweep, spec) for spec in expect["claims"]]
    write_json(directory / "claims.json", {"claims": [_plain(asdict(r)) for r in results]})
    return results


def check(sweep: Sweep, spec: dict[str, Any]) -> Result:
    """Check one claim."""
    unknown = set(spec) - KEYS
    if unknown or not set(spec) >= REQUIRED:
        raise UserError(
            f"claim {spec.get('claim')!r}: {', '.join(sorted(unknown)) or 'claim, metric or is'} not understood"
        )
    compare, bound = _condition(spec)
    if "figure" in spec:
        return _check_figure(sweep, spec, compare, bound)
    where = spec.get("where", {})
    expected = [r for r in sweep.plan.get("runs", []) if r["name"] not in sweep.all]
    runs = [run for run in sweep.all.values() if _matches(run, where)]
    if not runs:
        verdict = FAIL if expected else NOT_RUN
        return Result(spec["claim"], None, spec["is"], verdict, 0, "no run of the sweep is of this kind")
    unfinished = [run.name for run in runs if run.status not in ("completed", "diverged")]
    values = _grouped(sweep, runs, spec) if _by_group(spec) else [(run.name, measure(run, spec)) for run in runs]
    result = _judge(spec, values, compare, bound)
    if unfinished and result.verdict == PASS:
        return Result(
            result.claim, result.value, result.bound, FAIL, result.count, f"unfinished: {', '.join(unfinished)}"
        )
    return result


def _check_figure(sweep: Sweep, spec: dict[str, Any], compare: Callable, bound: Any) -> Result:
    """A claim about a figure's table; a number that is not there is NaN, and holds nothing.

    Raises:
        UserError: there is no such figure, column or reduction.
    """
    name, column, reduce = spec["figure"], spec["metric"], spec.get("reduce", "every")
    said = f"claim {spec['claim']!r}"
    if name not in FIGURES:
        raise UserError(f"{said}: figure: {name!r} is none; accepted: {', '.join(FIGURES)}")
    if reduce not in ("every", *TABLE_REDUCTIONS):
        raise UserError(f"{said}: reduce: {reduce!r} is none; accepted: every, {', '.join(TABLE_REDUCTIONS)}")
    try:
        rows = _figure_table(sweep, name)
    except DoesNotFit as reason:
        return _not_there(sweep, spec, f"figure {name}: {reason}")
    where = spec.get("where", {})
    missing = [c for c in (*where, column) if c not in rows.columns]
    if missing:
        raise UserError(f"{said}: {name} has no column {missing[0]!r}; accepted: {', '.join(rows.columns)}")
    for condition, wanted in where.items():
        rows = rows[rows[condition].isin(wanted if isinstance(wanted, list) else [wanted])]
    if rows.empty:
        return _not_there(sweep, spec, f"{name} has no row where {where}")
    values = [math.nan if pd.isna(value) else value for value in rows[column].tolist()]
    if reduce != "every":
        return _judge(spec, [(name, TABLE_REDUCTIONS[reduce](values))], compare, bound)
    return _judge(spec, list(zip(_row_names(rows, column), values, strict=True)), compare, bound)


def _row_names(rows: pd.DataFrame, column: str) -> list[str]:
    """What tells the rows of a figure's table apart, in words; empty for an only one."""
    told = [c for c in rows.columns if c != column and (c == "lr" or not pd.api.types.is_float_dtype(rows[c]))]
    told = [c for c in told if rows[c].nunique(dropna=False) > 1][:MOST_TOLD]
    return [", ".join(f"{c}={row[c]}" for c in told) for _, row in rows.iterrows()]


def _figure_table(sweep: Sweep, name: str) -> pd.DataFrame:
    """What a figure plots; many claims about one draw it once."""
    if name not in sweep.tables:
        sweep.tables[name] = FIGURES[name](sweep).table
    return sweep.tables[name]


def _not_there(sweep: Sweep, spec: dict[str, Any], why: str) -> Result:
    """What a claim is about is not in a figure: excused where a sweep has few seeds (--quick), else a failure."""
    few = len({run.seed for run in sweep.all.values()}) < MIN_SEEDS
    return Result(spec["claim"], None, spec["is"], NOT_RUN if few else FAIL, 0, why)


def _by_group(spec: dict[str, Any]) -> bool:
    return spec.get("seeds") == "median" or spec["metric"] == "stable"


def _judge(spec: dict[str, Any], values: list[tuple[str, Any]], compare: Callable, bound: Any) -> Result:
    known = [(name, v) for name, v in values if v is not None]
    if not known:
        return Result(spec["claim"], None, spec["is"], TOO_FEW, len(values), f"fewer than {MIN_SEEDS}")
    bad = [(name, v) for name, v in known if not _holds(compare, v, bound)]
    numbers = [(n, v) for n, v in (bad or known) if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if numbers:  # the value nearest to failing, or furthest beyond
        upper = spec["is"].strip().startswith("<")
        name, value = (max if upper else min)(numbers, key=lambda item: -math.inf if math.isnan(item[1]) else item[1])
    else:
        name, value = (bad or known)[0]
    verdict = FAIL if bad else PASS
    if spec.get("at_this_size") == "not_shown":
        verdict = NOT_SHOWN
    named = ", ".join(n for n, _ in bad if n) if bad else name
    detail = f"{len(bad)} of {len(known)} do not" if bad else "nearest" if named else ""
    detail += f": {named}" if named else ""
    return Result(spec["claim"], value, spec["is"], verdict, len(known), detail)


def _holds(compare: Callable, value: Any, bound: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return False
    return bool(compare(value, bound))


def _grouped(sweep: Sweep, runs: Sequence[Run], spec: dict[str, Any]) -> list[tuple[str, Any]]:
    """(cell, value) for each cell among the runs (:mod:`qkexp.analysis.cells`); None below 3 seeds."""
    names = {run.name for run in runs}
    cells = group(sweep)
    kinds = [cell for cell, members in cells.items() if names & {run.name for run in members}]
    if spec["metric"] == "stable":
        said = verdict_rows(sweep)
        return [(str(cell), said[cell]["stable"] if cell in said else None) for cell in kinds]
    medians = _medians(cells, spec)
    out: list[tuple[str, Any]] = []
    for cell in kinds:
        value, seeds = medians.get(cell, (math.nan, 0))
        peers = {c.variant: m for c, (m, _) in medians.items() if (c.lr, c.others) == (cell.lr, cell.others)}
        others = [m for name, m in peers.items() if name != cell.variant]
        if "than" in spec:
            others = [m for name, m in peers.items() if _is_variant(name, spec["than"])]
            value = value / max(others) if others else math.nan
        if spec.get("minus") == "best":
            value -= min([*others, value])
        out.append((str(cell), value if seeds >= MIN_SEEDS else None))
    return out


def _medians(cells: dict[Cell, list[Run]], spec: dict[str, Any]) -> dict[Cell, tuple[float, int]]:
    """Cell -> median over its runs that have an outcome, and their number."""
    found = {cell: [float(measure(run, spec)) for run in runs if run.outcome] for cell, runs in cells.items()}
    return {cell: (float(np.median(values)), len(values)) for cell, values in found.items() if values}


def _condition(spec: dict[str, Any]) -> tuple[Callable[[Any, Any], bool], Any]:
    found = re.fullmatch(r"(<=|>=|==|<|>)\s*(\S+)", str(spec["is"]).strip())
    if not found:
        raise UserError(
            f"claim {spec['claim']!r}: is: {spec['is']!r} is not a comparison ({', '.join(OPERATORS)}) and a bound"
        )
    bound = yaml.safe_load(found.group(2))
    with contextlib.suppress(ValueError):  # YAML takes 1e-6 for a text
        bound = float(bound) if isinstance(bound, str) else bound
    return OPERATORS[found.group(1)], bound


def _matches(run: Run, where: dict[str, Any]) -> bool:
    values = flatten(run.typed)
    for name, wanted in where.items():
        if name == "variant":
            if not _is_variant(run.variant, wanted):
                return False
        elif name.endswith(" >="):
            if values[name.removesuffix(" >=")] < wanted:
                return False
        elif values[name] not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def _is_variant(name: str, wanted: Any) -> bool:
    if wanted == "qk_norm":
        return not name.startswith(("none", "softcap"))
    return name in wanted if isinstance(wanted, list) else name == wanted


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity have no place in JSON."""
    value = result["value"]
    bad = isinstance(value, float) and not math.isfinite(value)
    return {**result, "value": str(value) if bad else value}


def table(results: Sequence[Result]) -> Table:
    """Claims with value, bound and verdict."""
    out = Table(title="claims", title_justify="left")
    for column in ("claim", "value", "bound", "verdict", "over"):
        out.add_column(column, justify="right" if column in ("value", "over") else "left", overflow="fold")
    for r in results:
        value = (
            f"{r.value:.4g}" if isinstance(r.value, (int, float)) and not isinstance(r.value, bool) else str(r.value)
        )
        text = f"[{STYLE[r.verdict]}]{r.verdict}[/]" + (f"\n{r.detail}" if r.verdict in (FAIL, NOT_SHOWN) else "")
        out.add_row(r.claim, "-" if r.value is None else value, r.bound, text, str(r.count))
    return out
