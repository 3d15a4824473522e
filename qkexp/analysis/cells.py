"""Which runs repeat one another: those that differ in nothing but their seeds stand in one cell.

A cell is a variant, a learning rate, and the values of whatever else varies in the sweep while the variant
stays (size, precision, clipping, …). Variants are compared between cells that agree in all but the variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkexp.config import RunConfig, flatten, keys, to_typed
from qkexp.naming import variant
from qkexp.record.load import Run, Sweep

Values = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cell:
    """``others``: (dotted key, value) of what else distinguishes runs of a sweep, in the schema's order."""

    variant: str
    lr: float
    others: Values = ()

    def __str__(self) -> str:
        return label(self.variant, self.others, self.lr)

    @property
    def line(self) -> tuple[str, Values]:
        """What cells of one curve over the rates share."""
        return self.variant, self.others


def label(name: str, others: Values, lr: float | None = None) -> str:
    """``none at 0.03, model.width=64``."""
    where = name if lr is None else f"{name} at {lr:g}"
    return ", ".join([where, *(f"{key}={value}" for key, value in others)])


def group(sweep: Sweep) -> dict[Cell, list[Run]]:
    """Cell -> its runs by seed; cells in the order of variant, other keys and rate."""
    found: dict[Cell, list[Run]] = {}
    for cell, _, run in _placed(sweep):
        if run is not None:
            found.setdefault(cell, []).append(run)
    return found


def absent(sweep: Sweep) -> dict[Cell, list[int]]:
    """Cell -> seeds of runs that the plan names and that have not been started."""
    found: dict[Cell, list[int]] = {}
    for cell, seed, run in _placed(sweep):
        if run is None:
            found.setdefault(cell, []).append(seed)
    return found


def _placed(sweep: Sweep) -> list[tuple[Cell, int, Run | None]]:
    """Every run of the sweep, planned ones too: so a sweep that fills up keeps its cells."""
    waiting = [to_typed(r["config"]) for r in sweep.plan.get("runs", []) if r["name"] not in sweep.all]
    runs: list[Run | None] = [*sweep.all.values(), *[None] * len(waiting)]
    configs = [*(run.typed for run in sweep.all.values()), *waiting]
    rows = [(cell, cfg.seed, run) for cell, cfg, run in zip(place(configs), configs, runs, strict=True)]
    return sorted(rows, key=lambda row: (order(row[0]), row[1]))


def place(configs: list[RunConfig]) -> list[Cell]:
    """The cell of each configuration of a sweep."""
    flat = [flatten(cfg) for cfg in configs]
    names = [variant(cfg.attention) for cfg in configs]
    varied = _varied(names, flat)
    return [
        Cell(name, values["optim.lr"], tuple((key, _plain(values[key])) for key in varied))
        for name, values in zip(names, flat, strict=True)
    ]


def order(cell: Cell) -> tuple[Any, ...]:
    """Sort key: variant, then other keys by value (numbers before texts, null first), then rate."""
    others = tuple((value is not None, isinstance(value, str), value or 0, key) for key, value in cell.others)
    return cell.variant, others, cell.lr


def _varied(names: list[str], flat: list[dict[str, Any]]) -> list[str]:
    """Identity keys, but for rate, seeds and what the variant's name tells, that vary within a variant.

    A key that varies with the variant alone belongs to the method that it names, and is no axis of its own; one
    that splits runs as an earlier one does (heads, where each width has its own) adds nothing.
    """
    told = {k.name for k in keys() if k.name.startswith("attention.")} - {"attention.init"}
    candidates = [
        k.name
        for k in keys()
        if k.meta["identity"] and k.name not in told and k.name != "optim.lr" and not k.name.endswith("seed")
    ]
    found: dict[tuple[int, ...], str] = {}
    for key in candidates:
        column = [_plain(values[key]) for values in flat]
        kinds = list(dict.fromkeys(column))
        if len(kinds) > 1 and len(set(zip(names, column, strict=True))) > len(set(names)):
            found.setdefault(tuple(kinds.index(value) for value in column), key)
    return list(found.values())


def _plain(value: Any) -> Any:
    """Lists have no hash."""
    return ", ".join(str(v) for v in value) if isinstance(value, list) else value
