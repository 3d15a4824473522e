"""The search for the critical rate: on made-up sweeps, where the answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from qkexp.compose import compose_sweep
from qkexp.config import ConfigError, UserError
from qkexp.naming import variant
from qkexp.sweep.bisect import Bracket, ask, search
from qkexp.sweep.plan import Plan

SEARCH = ["bisect.low=1e-3", "bisect.high=1", "seed=0,1,2"]


def plan(tmp_path: Path, *overrides: str) -> Plan:
    return Plan.of(compose_sweep([*SEARCH, f"output_dir={tmp_path}", *overrides]))


class World:
    """Trains nothing: a variant is stable from its first rate to its last one."""

    def __init__(self, plan: Plan, stable: dict[str, tuple[float, float]]):
        self.plan, self.stable = plan, stable
        self.of = {run.name: (variant(run.config.attention), run.config.optim.lr) for run in plan.runs}
        self.rounds: list[set[str]] = []

    def train(self, part: Plan) -> int:
        self.rounds.append({run.name for run in part.runs})
        return 0

    def judge(self, names: Sequence[str]) -> dict[tuple[str, float], bool | None]:
        low_high = {point: self.stable[point[0]] for point in {self.of[name] for name in names}}
        return {point: low <= point[1] <= high for point, (low, high) in low_high.items()}

    def search(self) -> dict[str, Bracket]:
        code, brackets = search(self.plan, self.train, self.judge)
        assert code == 0
        return {b.variant: b for b in brackets}


def test_every_place_of_the_edge_is_found_with_few_rates(tmp_path: Path) -> None:
    """On the 19 rates of a factor of 1.5 over three decades, wherever the variant breaks."""
    rates = plan(tmp_path).sweep.rates
    assert rates is not None
    assert len(rates) == 19
    assert (rates[0], rates[-1]) == (1e-3, 1.0)
    assert max(b / a for a, b in pairwise(rates)) <= 1.5
    for last in range(18):
        verdicts: dict[int, bool | None] = {}
        while (i := ask(verdicts, 19)) is not None:
            assert i not in verdicts
            verdicts[i] = i <= last
        assert verdicts[last]
        assert verdicts[last + 1] is False
        assert len(verdicts) <= 8


def test_brackets_lie_around_the_edge_and_most_runs_are_never_trained(tmp_path: Path) -> None:
    world = World(plan(tmp_path, "attention=none,rmsnorm"), {"none": (1e-3, 0.012), "rmsnorm": (1e-3, 0.3)})
    found = world.search()
    for name, edge in (("none", 0.012), ("rmsnorm", 0.3)):
        b = found[name]
        assert b.closed
        assert b.stable <= edge < b.unstable <= 1.5 * b.stable
    assert len(world.plan.runs) == 19 * 2 * 3
    assert len(world.rounds[-1]) <= 38
    assert all(a <= b for a, b in pairwise(world.rounds)), "a search only grows"


def test_rates_too_low_to_learn_do_not_hide_the_stable_ones(tmp_path: Path) -> None:
    b = World(plan(tmp_path), {"none": (4e-3, 8e-3)}).search()["none"]
    assert b.stable <= 8e-3 < b.unstable <= 1.5 * b.stable


@pytest.mark.parametrize(("stable", "says"), [((1e-3, 2.0), "raise bisect.high"), ((2.0, 3.0), "no stable rate")])
def test_an_edge_of_the_range_is_never_a_result(tmp_path: Path, stable: tuple[float, float], says: str) -> None:
    b = World(plan(tmp_path), {"none": stable}).search()["none"]
    assert (b.stable, b.unstable, b.closed) == (None, None, False)
    assert says in b.says


def test_a_point_whose_runs_failed_leaves_its_variant_undecided_and_the_others_not(tmp_path: Path) -> None:
    world = World(plan(tmp_path, "attention=none,l2"), {"none": (1e-3, 0.01), "l2": (1e-3, 0.1)})
    judge = world.judge
    world.judge = lambda names: {p: None if p[0] == "none" else v for p, v in judge(names).items()}  # type: ignore[method-assign]
    found = world.search()
    assert "undecided" in found["none"].says
    assert not found["none"].closed
    assert found["l2"].closed


def test_an_interrupted_search_says_so_and_reports_nothing(tmp_path: Path) -> None:
    world = World(plan(tmp_path), {"none": (1e-3, 0.01)})
    assert search(world.plan, lambda part: 75, world.judge) == (75, [])


def test_verdicts_that_fall_while_the_sweep_grows_move_the_bracket(tmp_path: Path) -> None:
    """The best median of the sweep is part of the definition: a later round may take a verdict back."""
    world = World(plan(tmp_path), {"none": (1e-3, 0.3)})
    judge = world.judge

    def stricter(names: Sequence[str]) -> dict[tuple[str, float], bool | None]:
        if len(names) >= 9:
            world.stable = {"none": (1e-3, 0.006)}
        return judge(names)

    world.judge = stricter  # type: ignore[method-assign]
    b = world.search()["none"]
    assert b.stable <= 0.006 < b.unstable <= 1.5 * b.stable


def test_two_seeds_are_too_few_for_a_search(tmp_path: Path) -> None:
    few = plan(tmp_path, "seed=0,1")
    few = replace(few, runs=[run for run in few.runs if run.config.seed < 2])
    with pytest.raises(UserError, match="at least 3"):
        search(few, lambda part: 0, lambda names: {})


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["bisect.low=1e-3"], "bisect.high"),
        (["bisect.low=1", "bisect.high=1e-3"], "bisect.high"),
        (["bisect.low=1e-3", "bisect.high=1", "bisect.factor=1"], "bisect.factor"),
        (["bisect.low=0", "bisect.high=1"], "bisect.low"),
    ],
)
def test_a_range_without_meaning_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_sweep(overrides)
    assert error.value.key == named


def test_rates_cannot_be_given_beside_a_search() -> None:
    with pytest.raises(UserError, match=r"optim\.lr"):
        compose_sweep([*SEARCH, "optim.lr=1e-3,1e-2"])
