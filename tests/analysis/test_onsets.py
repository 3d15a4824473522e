"""Onsets: made-up curves whose first crossings, layers and orders are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qkexp.analysis.onsets import (
    BY_LINK,
    Link,
    Onset,
    apart,
    crossing,
    gradient_reference,
    healthy_reference,
    onset,
    order,
    precedes,
    rise,
    running_means,
    score,
    split_growth,
)

STEPS = np.arange(300)
LINK = Link("x", "x", "growth", (2.0, 4.0, 8.0), "x", "grows", True)


def ramp(start: int, length: int, top: float, base: float = 1.0) -> np.ndarray:
    """``base`` up to ``start``, then rising in equal factors to ``top`` over so many steps, then there."""
    return base * (top / base) ** np.clip((STEPS - start) / length, 0.0, 1.0)


def test_an_onset_is_the_interval_that_holds_the_crossings_of_all_thresholds() -> None:
    # 16-fold in 40 steps: 2 after 10, 4 after 20, 8 after 30
    found = onset(LINK, STEPS, ramp(100, 40, 16.0)[:, None], layers=(0,))
    assert [c.late for c in found.crossings if c] == [110, 120, 130]
    assert (found.early, found.late, found.reached) == (110, 130, 3)


def test_an_onset_that_reaches_part_of_the_grid_has_no_end() -> None:
    found = onset(LINK, STEPS, ramp(100, 40, 5.0)[:, None], layers=(0,))
    assert (found.reached, found.late) == (2, None)
    assert found.early is not None
    never = onset(LINK, STEPS, np.ones((300, 1)), layers=(0,))
    assert (never.early, never.late, never.layer) == (None, None, -1)


def test_the_layer_is_the_one_that_crossed_first_and_not_the_one_that_ended_highest() -> None:
    early, late = ramp(100, 40, 16.0), ramp(150, 10, 1e6)
    found = onset(LINK, STEPS, np.stack([late, early], axis=1), layers=(3, 7))
    assert found.layer == 7
    assert found.layers == (7, 7, 7)


def test_one_batch_over_the_threshold_is_no_onset_but_at_the_very_end_what_is_left_counts() -> None:
    values = np.ones((300, 1))
    values[50:52] = 100.0
    assert crossing(STEPS, values, 2.0) is None
    values[298:] = 100.0
    assert crossing(STEPS, values, 2.0).late == 298  # type: ignore[union-attr]


def test_a_rarely_probed_crossing_may_have_come_any_time_after_the_probe_before_it() -> None:
    every = slice(0, None, 25)
    found = crossing(STEPS[every], ramp(100, 40, 16.0)[every, None], 2.0, hold=1)
    assert found is not None
    assert (found.early, found.late) == (101, 125)  # the crossing of the whole curve is at 110


def test_a_running_mean_says_no_later_than_the_first_value_of_its_window_that_was_over() -> None:
    raw = np.where(STEPS >= 100, 3.0, 1.0)
    found = crossing(STEPS, running_means(raw)[:, None], 2.0, hold=1, raw=raw[:, None])
    assert found is not None
    assert found.late == 109  # half of the window is over: (10 * 3 + 10 * 1) / 20
    assert found.early == 100


def test_gaps_are_under_every_threshold() -> None:
    values = ramp(100, 40, 16.0)[:, None]
    values[:200] = np.nan
    assert crossing(STEPS, values, 2.0).late == 200  # type: ignore[union-attr]
    assert crossing(STEPS, np.full((300, 1), np.nan), 2.0) is None


def test_an_order_is_claimed_only_where_it_holds_over_the_whole_grid() -> None:
    a = onset(LINK, STEPS, ramp(100, 40, 16.0)[:, None], layers=(0,))  # 110 … 130
    after = onset(LINK, STEPS, ramp(125, 40, 16.0)[:, None], layers=(0,))  # 135 … 155
    across = onset(LINK, STEPS, ramp(115, 40, 16.0)[:, None], layers=(0,))  # 125 … 145
    partly = onset(LINK, STEPS, ramp(10, 40, 5.0)[:, None], layers=(0,))  # from 28 on, never severe
    assert precedes(a, after)
    assert not precedes(after, a)
    assert not precedes(a, across)
    assert not precedes(across, a)
    assert not precedes(partly, a), "at the severe threshold it never came"
    names = [Onset(n, o.grid, o.crossings) for n, o in zip("abc", (a, after, across), strict=True)]
    assert order(names) == [("a", "b")]


def test_healthy_reference_is_the_median_of_the_stretch_and_of_what_was_measured_in_it() -> None:
    values = np.stack([np.arange(300.0), np.where(STEPS < 10, np.nan, STEPS)], axis=1)
    np.testing.assert_array_equal(healthy_reference(STEPS, values, 21), [10.0, 15.0])
    assert math.isnan(healthy_reference(STEPS, values, 5)[1])
    np.testing.assert_array_equal(healthy_reference(STEPS[::50], values[::50, :1], 20), [0.0])


def test_scores_grow_as_things_get_worse() -> None:
    value, usual = np.array([[0.2]]), np.array([0.8])
    assert score("growth", value, usual).item() == pytest.approx(0.25)
    assert score("fall", value, usual).item() == pytest.approx(4.0)
    assert score("to_one", np.array([[0.9]]), np.array([0.5])).item() == pytest.approx(0.8)
    assert np.isfinite(score("fall", np.array([[0.0]]), usual)).all(), "an entropy of exactly 0"


def test_a_gradient_is_compared_with_its_running_minimum_from_step_100_on() -> None:
    norm = np.full(300, 4.0)
    norm[50], norm[150:] = 0.1, 1.0
    reference = gradient_reference(STEPS, norm, 20)
    assert reference[60] == 4.0, "a minimum before step 100 does not count"
    assert (reference[149], reference[150], reference[299]) == (4.0, 1.0, 1.0)


def test_a_loss_rises_in_ways_from_its_lowest_to_chance() -> None:
    loss = np.array([2.0, 0.3, 0.7, 2.3, 4.3])
    risen, raw = rise(loss, loss + 1.0, chance := 2.3)
    np.testing.assert_allclose(risen, [0.0, 0.0, 0.2, 1.0, 2.0])
    np.testing.assert_allclose(raw[2], (1.7 - 0.3) / (chance - 0.3))
    near, _ = rise(np.array([2.29, 2.30]), np.array([2.29, 2.30]), chance)
    assert near[1] < 0.05, "next to chance a hundredth of a nat is no rise"


def test_against_another_arm_growth_is_relative_to_its_growth() -> None:
    mine, other = ramp(100, 40, 16.0)[:, None], ramp(100, 40, 4.0)[:, None]
    found = apart(LINK, STEPS, mine, STEPS, other, (0,))
    # the quotient grows 4-fold in 40 steps: 2 after 20, 4 at the end, 8 never
    assert [c.late if c else None for c in found.crossings] == [120, 140, None]
    shared = apart(LINK, STEPS, mine, STEPS[::10], other[::10], (0,))
    assert [c.late if c else None for c in shared.crossings] == [120, 140, None]
    losses = apart(BY_LINK["loss"], STEPS, np.full((300, 1), 0.5), STEPS, np.full((300, 1), 0.15), (-1,))
    assert losses.reached == 2, "a difference of 0.35, not a quotient"


def test_growth_splits_into_its_factors_exactly() -> None:
    before = {"score_scale": 0.25, "max_pair_q_norm": 2.0, "max_pair_k_norm": 3.0, "max_pair_cos": -0.5}
    after = {"score_scale": 0.5, "max_pair_q_norm": 8.0, "max_pair_k_norm": 3.0, "max_pair_cos": 1.0}
    for pair in (before, after):
        factors = [abs(v) for v in pair.values()]
        pair["max_abs_logit"] = math.prod(factors)
    split = split_growth(before, after)
    assert split["total"] == pytest.approx(math.log(16))
    assert split["shares"] == pytest.approx({"scale": 0.25, "q": 0.5, "k": 0.0, "cos": 0.25})
    assert split["rest"] == pytest.approx(0.0, abs=1e-12)


def test_shares_of_no_growth_and_of_what_was_not_measured_are_absent() -> None:
    pair = {
        "max_abs_logit": 1.0,
        "score_scale": 1.0,
        "max_pair_q_norm": 1.0,
        "max_pair_k_norm": 1.0,
        "max_pair_cos": 1.0,
    }
    assert split_growth(pair, {**pair, "max_abs_logit": 1.5})["shares"] is None
    assert split_growth(pair, {**pair, "max_pair_cos": math.nan}) == {}
    assert split_growth(pair, {"max_abs_logit": 2.0}) == {}
