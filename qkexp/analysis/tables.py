"""Tables of a sweep over learning rates: on the terminal, as CSV with every digit, and as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from qkexp.analysis.figures.selection import DoesNotFit
from qkexp.analysis.sensitivity import comparisons, summary
from qkexp.analysis.stability import MIN_SEEDS
from qkexp.analysis.statistics import METHOD
from qkexp.record.files import write_text
from qkexp.record.load import Sweep

MIN_RATES = 3
NOT_SHOWN = "–"


@dataclass(frozen=True)
class Kind:
    """A table: what makes its rows, which columns are shown (column -> title) beside keys that vary, what to know."""

    title: str
    rows: Callable[[Sweep], pd.DataFrame]
    shown: dict[str, str]
    notes: tuple[str, ...]
    words = ("variant", "against", "of", "largest stable rate")  # titles of columns that hold text


TABLES = {
    "sensitivity": Kind(
        "sensitivity to the learning rate",
        summary,
        {
            "variant": "variant",
            "lrs": "LR sensitivity",
            "lrs_low": "low",
            "lrs_high": "high",
            "lrs_constant": "… from chance",
            "best_lr": "best rate",
            "best_val_loss": "loss there",
            "bracket": "largest stable rate",
            "headroom": "headroom",
        },
        (
            "LR sensitivity: mean over the grid of min(ℓ, ℓ₀) − ℓ*, nats, of each seed, then over seeds (arXiv "
            "2309.14322); ℓ₀ is the training loss of step 0, before the first update, or chance. 0 is also what a "
            "model at chance everywhere has: read it beside the loss.",
            f"Stable: median validation loss over {MIN_SEEDS} seeds or more near the best of the sweep. Headroom: "
            "largest stable rate over the variant's own best one; none where the grid does not hold the bracket.",
            METHOD["interval"],
        ),
    ),
    "paired": Kind(
        "differences from the reference, paired by seed",
        comparisons,
        {
            "variant": "variant",
            "against": "against",
            "measure": "of",
            "difference": "difference",
            "low": "low",
            "high": "high",
            "t_p": "p (t)",
            "flip_p": "p (sign flip)",
            "seeds": "seeds",
        },
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
    for column in shown.columns:
        text = column in kind.words
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
        for text, where in rows.groupby(column, sort=False).variant if column in rows else ():
            names = list(dict.fromkeys(where))
            if text:
                of = "every variant" if len(names) == rows.variant.nunique() else ", ".join(names)
                found.append(f"{of}: {word + ': ' if word else ''}{text}")
    flags = {
        "at_chance": "at chance at every rate",
        "best_at_edge": "the best rate is an edge of the grid, so the best may lie beyond it",
    }
    for column, text in flags.items():
        names = rows[rows[column].eq(True)].variant.unique() if column in rows else []
        if len(names):
            found.append(f"{', '.join(names)}: {text}")
    return found


def _readable(kind: Kind, rows: pd.DataFrame) -> pd.DataFrame:
    """Chosen columns under their titles, as text."""
    keys = {c: c for c in rows.columns if "." in c}  # configuration keys that vary
    first, *rest = kind.shown.items()
    titles = dict([first, *keys.items(), *rest])
    return pd.DataFrame({title: [_text(value) for value in rows[column]] for column, title in titles.items()})


def _text(value: Any) -> str:
    if isinstance(value, float):
        return NOT_SHOWN if math.isnan(value) else f"{value:.3g}"
    return NOT_SHOWN if value is None else str(value)
