"""The largest stable learning rate of each variant, by bisection on a lattice of rates.

A search is a sweep that grows: each round asks for one more rate a variant, trains what is missing in the
sweep's directory and judges anew. Decisions follow from what was trained and from nothing else, so the same
command goes on wherever it was stopped. Stability is a property of the sweep (the best median may fall while
it grows), so every verdict is taken again in each round.

A rate may be too low to learn in the given steps, which is not stable either: the search first looks for a
stable rate, downwards and then in the widest stretches that are not explored, and goes up from the lowest found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from rich.table import Table

from qkexp.config import UserError
from qkexp.naming import variant
from qkexp.sweep.plan import Plan, Planned

MIN_SEEDS = 3
Point = tuple[str, float]  # variant, rate
Verdicts = Mapping[Point, bool | None]  # None: no verdict, because runs of that point failed


@dataclass(frozen=True)
class Bracket:
    """Where a variant stops being stable: ``stable`` and ``unstable`` are rates that were trained.

    Both are None unless the bracket is closed: an edge of the searched range is no result.
    """

    variant: str
    stable: float | None
    unstable: float | None
    says: str
    rates: int  # that were trained

    @property
    def closed(self) -> bool:
        return self.stable is not None


def ask(verdicts: Mapping[int, bool | None], count: int) -> int | None:
    """The number of the rate to train next, of ``count``; None where the search has ended.

    ``verdicts``: rate's number -> whether it is stable.
    """
    if None in verdicts.values():
        return None
    low, high = edges(verdicts, count)
    if low is not None:
        return None if high - low <= 1 else (low + high) // 2
    lowest = min(verdicts, default=count)
    if lowest > 0:
        return (lowest - 1) // 2
    width, start = max((b - a, -a) for a, b in pairwise([*sorted(verdicts), count]))
    return -start + width // 2 if width > 1 else None


def edges(verdicts: Mapping[int, bool | None], count: int) -> tuple[int | None, int]:
    """Numbers of the last stable rate and the first unstable one above it; ``count``: none was found above."""
    stable = sorted(i for i, verdict in verdicts.items() if verdict)
    if not stable:
        return None, count
    high = min((i for i, verdict in verdicts.items() if verdict is False and i > stable[0]), default=count)
    return max(i for i in stable if i < high), high


def search(
    plan: Plan, train: Callable[[Plan], int], judge: Callable[[Sequence[str]], Verdicts]
) -> tuple[int, list[Bracket]]:
    """Train what each round asks for until every bracket is closed or cannot be.

    Args:
        plan: every run that the search may ask for: variants, rates of the lattice, seeds.
        train: trains what is missing of a plan; its exit code. Anything but 0 and 1 ends the search.
        judge: run names -> verdicts.

    Returns:
        The worst exit code and a bracket a variant.
    """
    assert plan.sweep.rates is not None
    rates = plan.sweep.rates
    points: dict[Point, list[Planned]] = {}
    for run in plan.runs:
        points.setdefault(_point(run), []).append(run)
    variants = list(dict.fromkeys(name for name, _ in points))
    for name in variants:
        seeds = len(points[name, rates[0]])
        if seeds < MIN_SEEDS:
            raise UserError(f"seed: {seeds} runs a rate; a search needs at least {MIN_SEEDS}, such as seed=0,1,2")
    asked: dict[Point, None] = {}
    worst = 0
    while True:
        names = [run.name for point in asked for run in points[point]]
        verdicts = judge(names) if asked else {}
        numbered = {
            name: {i: verdicts.get((name, rate)) for i, rate in enumerate(rates) if (name, rate) in asked}
            for name in variants
        }
        wanted = {name: i for name in variants if (i := ask(numbered[name], len(rates))) is not None}
        if not wanted:
            return worst, [_bracket(name, numbered[name], rates) for name in variants]
        asked |= {(name, rates[i]): None for name, i in wanted.items()}
        code = train(plan.only(run for point in asked for run in points[point]))
        if code not in (0, 1):
            return code, []
        worst = max(worst, code)


def _point(run: Planned) -> Point:
    return variant(run.config.attention), run.config.optim.lr


def _bracket(name: str, verdicts: Mapping[int, bool | None], rates: Sequence[float]) -> Bracket:
    low, high = edges(verdicts, len(rates))
    if None in verdicts.values():
        failed = next(rates[i] for i, verdict in verdicts.items() if verdict is None)
        return Bracket(name, None, None, f"undecided: no verdict at {failed:g}", len(verdicts))
    if low is None:
        says = f"no stable rate between {rates[0]:g} and {rates[-1]:g}"
        return Bracket(name, None, None, says, len(verdicts))
    if high == len(rates):
        says = f"stable up to {rates[-1]:g}, the highest rate searched: raise bisect.high"
        return Bracket(name, None, None, says, len(verdicts))
    says = f"stable at {rates[low]:.4g}, not at {rates[high]:.4g}"
    above = [rates[i] for i, verdict in verdicts.items() if verdict and i > high]
    says += f"; but stable again at {above[0]:.4g}" if above else ""
    return Bracket(name, rates[low], rates[high], says, len(verdicts))


def table(brackets: Sequence[Bracket]) -> Table:
    """A rich table of brackets."""
    out = Table(title="largest stable learning rate", title_justify="left")
    for column in ("variant", "at least", "below", "rates trained", ""):
        out.add_column(column, justify="left" if column in ("variant", "") else "right", overflow="fold")
    for b in brackets:
        low, high = ("-" if r is None else f"{r:.4g}" for r in (b.stable, b.unstable))
        out.add_row(b.variant, low, high, str(b.rates), b.says)
    return out


def report(brackets: Sequence[Bracket]) -> dict[str, object]:
    """What ``critical.json`` holds."""
    return {"brackets": [asdict(b) for b in brackets]}
