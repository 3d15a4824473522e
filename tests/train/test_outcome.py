"""Every branch of the one rule that calls a run completed or diverged."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from qkexp.train.outcome import final_figures, judge, smooth

CHANCE = math.log(10)


def falling(end: float, steps: int = 200) -> np.ndarray:
    return np.concatenate([np.linspace(CHANCE, end, steps - 40), np.full(40, end)])


def test_smoothing_is_a_running_mean_over_20_steps() -> None:
    values = np.random.default_rng(0).normal(size=100)
    expected = pd.Series(values).rolling(20, min_periods=1).mean().to_numpy()
    np.testing.assert_allclose(smooth(values), expected, atol=1e-12)


def test_falling_loss_is_completed() -> None:
    assert judge(falling(0.1), CHANCE)[0] == "completed"


def test_loss_that_rose_a_fifth_of_the_way_to_chance_is_diverged() -> None:
    limit = 0.5 + 0.2 * (CHANCE - 0.5)
    for end, status in ((limit - 0.02, "completed"), (limit + 0.02, "diverged")):
        loss = np.concatenate([falling(0.5), np.full(60, end)])
        found, reason = judge(loss, CHANCE)
        assert found == status
        assert ("rose" in reason) == (status == "diverged")


def test_loss_that_never_left_chance_is_diverged() -> None:
    for end, status in ((0.96 * CHANCE, "diverged"), (0.94 * CHANCE, "completed")):
        found, reason = judge(np.full(200, end), CHANCE)
        assert found == status
        assert reason.startswith("at_chance") == (status == "diverged")


def test_nonfinite_step_is_diverged_whatever_came_before() -> None:
    assert judge(falling(0.1), CHANCE, "loss is nan at step 200") == ("diverged", "nonfinite: loss is nan at step 200")


def test_one_spike_is_not_divergence() -> None:
    loss = falling(0.1)
    loss[100] = 50.0
    assert judge(loss, CHANCE)[0] == "completed"


def test_huge_but_finite_loss_is_diverged() -> None:
    assert judge(np.concatenate([falling(0.1), np.full(50, 1e6)]), CHANCE)[0] == "diverged"


def test_run_shorter_than_the_window_is_judged_by_what_there_is() -> None:
    assert judge(np.array([2.0, 1.5, 1.0]), CHANCE)[0] == "completed"
    assert judge(np.array([3.0, 3.0]), CHANCE)[0] == "diverged"


def test_final_is_the_mean_of_the_last_20_steps() -> None:
    figures = final_figures(np.concatenate([np.full(50, 0.2), np.arange(20.0)]))
    assert figures["loss"] == pytest.approx(9.5)
    assert figures["lowest_loss"] == pytest.approx(0.19, abs=0.02)
    assert final_figures(np.array([]))["loss"] is None
