"""Tables of a sweep over learning rates: on the terminal, as CSV with every digit, and as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from qkexp.analysis.figures.selection import DoesNotFit
from qkexp.analysis.sensitivity import comparisons, summary
from qkexp.analysis.stability import MIN_SEEDS
from qkexp.analysis.statistics import METHOD
from qkexp.record.files import write_text
from qkexp.record.load import Sweep

MIN_RATES = 3
ABSENT = "–"
MEASURES = {"lrs": "LR sens.", "best_val_loss": "best loss"}

Cells = dict[str, Callable[[dict[str, Any]], str]]  # title -> text of a row


def number(value: Any) -> str:
    """Three digits; a dash where nothing is known."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ABSENT
    return f"{value:.3g}"


def _with_interval(value: str, low: str, high: str) -> Callable[[dict[str, Any]], str]:
    """``0.87 [0.70, 1.0]``, without the interval where it was refused."""

    def text(row: dict[str, Any]) -> str:
        known = not math.isnan(row[low])
        return number(row[value]) + (f" [{number(row[low])}, {number(row[high])}]" if known else "")

    return text


@dataclass(frozen=True)
class Kind:
    """A table: what makes its rows, what is shown of one beside the keys that vary, and what to know about it.

    ``words`` are titles of columns that hold text.
    """

    title: str
    rows: Callable[[Sweep], pd.DataFrame]
    cells: Cells
    words: tuple[str, ...]
    notes: tuple[str, ...]


TABLES = {
    "sensitivity": Kind(
        "sensitivity to the learning rate",
        summary,
        {
            "LR sens.": _with_interval("lrs", "lrs_low", "lrs_high"),
            "from chance": lambda row: number(row["lrs_constant"]),
            "best rate": lambda row: number(row["best_lr"]),
            "loss": _with_interval("best_val_loss", "best_low", "best_high"),
            "headroom": lambda row: number(row["headroom"]),
            "largest stable rate": lambda row: row["bracket"],
        },
        ("largest stable rate",),
        (
            "LR sens.: mean over the grid of min(ℓ, ℓ₀) − ℓ*, nats, of each seed, then over seeds (arXiv 2309.14322); "
            "ℓ₀ is the training loss of step 0, before the first update, or chance. 0 is also what a model at chance "
            "everywhere has: read it beside the loss, which is the median at the best rate.",
            f"Stable: median validation loss over {MIN_SEEDS} seeds or more near the best of the sweep. Headroom: "
            "largest stable rate over the variant's own best one; none where the grid does not hold the bracket.",
            METHOD["interval"],
        ),
    ),
    "paired": Kind(
        "differences from the reference, paired by seed",
        comparisons,
        {
            "against": lambda row: row["against"],
            "of": lambda row: MEASURES[row["measure"]],
            "difference": _with_interval("difference", "low", "high"),
            "p (t)": lambda row: number(row["t_p"]),
            "p (flip)": lambda row: number(row["flip_p"]),
            "seeds": lambda row: str(row["seeds"]),
        },
        ("against", "of"),
        (METHOD["t"], METHOD["flip"], "No correction for the number of comparisons. Best rates are of the same seeds."),
    ),
}


@dataclass(frozen=True)
class Written:
    """A table that was written, and how it looks on a terminal; ``remarks`` are of these runs."""

    path: Path
    table: Table
    remarks: list[str]


def write(sweep: Sweep) -> list[Written]:
    """Write every table that fits into ``<sweep>/tables`` as CSV and LaTeX."""
    folder = sweep.directory / "tables"
    found = []
    for name, kind in TABLES.items():
        try:
            rows = build(name, sweep)
        except DoesNotFit:
            continue
        folder.mkdir(exist_ok=True)
        write_text(folder / f"{name}.csv", rows.to_csv(index=False))
        write_text(folder / f"{name}.tex", latex(kind, rows))
        found.append(Written(folder / f"{name}.csv", rich(kind, rows), remarks(rows)))
    return found


def build(name: str, sweep: Sweep) -> pd.DataFrame:
    """The rows of a table.

    Raises:
        DoesNotFit: fewer than three rates, or nothing to compare.
    """
    if len({run.lr for run in sweep.all.values()}) < MIN_RATES:
        raise DoesNotFit(f"needs runs at {MIN_RATES} or more learning rates")
    rows = TABLES[name].rows(sweep)
    if rows.empty:
        raise DoesNotFit("needs two or more variants")
    return rows


def rich(kind: Kind, rows: pd.DataFrame) -> Table:
    """As the terminal shows it."""
    shown = _readable(kind, rows)
    out = Table(title=kind.title, title_justify="left", caption="\n".join(kind.notes), caption_justify="left")
    out.box, out.padding, out.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False
    for column in shown.columns:
        text = column in ("variant", *kind.words)
        out.add_column(column, justify="left" if text else "right", overflow="fold")
    for row in shown.itertuples(index=False):
        out.add_row(*row)
    return out


def latex(kind: Kind, rows: pd.DataFrame) -> str:
    """A booktabs table; what to know about it stands above as comments."""
    notes = "".join(f"% {note}\n" for note in kind.notes)
    return notes + _readable(kind, rows).to_latex(index=False, escape=True, caption=kind.title)


def remarks(rows: pd.DataFrame) -> list[str]:
    """What these runs do not bear out: runs that are missing, figures that have too few seeds, models at chance."""
    found: list[str] = []
    for column, word in (("missing", "missing"), ("note", ""), ("refused", "")):
        for text in rows[column].unique() if column in rows else ():
            names = list(dict.fromkeys(rows.variant[rows[column] == text]))
            if text:
                of = "every variant" if len(names) == rows.variant.nunique() else ", ".join(names)
                found.append(f"{of}: {word + ': ' if word else ''}{text}")
    flags = {
        "at_chance": "at chance at every rate",
        "best_at_edge": "the best rate is an edge of the grid, so the best may lie beyond it",
    }
    for column, text in flags.items():
        names = list(rows[rows[column].eq(True)].variant.unique()) if column in rows else []
        if names:
            found.append(f"{', '.join(names)}: {text}")
    return found


def _readable(kind: Kind, rows: pd.DataFrame) -> pd.DataFrame:
    """Variant, keys that vary, and the table's cells, as text."""
    keys = [c for c in rows.columns if "." in c]
    found = []
    for row in rows.to_dict("records"):
        shown = {"variant": row["variant"], **{key: str(row[key]) for key in keys}}
        found.append({**shown, **{title: text(row) for title, text in kind.cells.items()}})  # type: ignore[arg-type]
    return pd.DataFrame(found)
