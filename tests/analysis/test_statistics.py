"""Intervals and tests over seeds, against enumeration and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from qkexp.analysis.statistics import (
    TooFewSeeds,
    bootstrap_seeds,
    flip_pairs,
    flip_test,
    interval,
    paired,
    t_test,
)


def test_bootstrap_interval_is_that_of_all_resamples_written_out() -> None:
    values = np.array([0.1, 0.4, 0.5, 1.3, 2.0])
    means = sorted(np.mean(draw) for draw in itertools.product(values, repeat=5))
    low, high = interval(values)
    assert low == pytest.approx(np.quantile(means, 0.025), abs=0.04)
    assert high == pytest.approx(np.quantile(means, 0.975), abs=0.04)


def test_interval_is_refused_where_its_tails_are_finer_than_the_resamples() -> None:
    # of 3 seeds, 27 resamples: the rarest has 1/27 > 0.025; of 4, 1/256
    assert bootstrap_seeds() == 4
    with pytest.raises(TooFewSeeds, match="needs at least 4 seeds, there are 3"):
        interval([1.0, 2.0, 3.0])


def test_flip_test_counts_signs_and_is_refused_where_no_result_could_be_significant() -> None:
    differences = np.array([0.3, -0.1, 0.4, 0.2, 0.5, 0.6])
    signs = np.array(list(itertools.product((-1, 1), repeat=6)))
    means = (signs * differences).mean(axis=1)
    expected = np.mean(np.abs(means) >= differences.mean() - 1e-12)
    assert flip_test(differences) == pytest.approx(expected)
    assert flip_test(np.arange(1.0, 7.0)) == pytest.approx(2 / 64), "all of one sign: the smallest p there is"
    assert flip_pairs() == 6, "2 / 2^5 = 0.0625 is over 0.05"
    with pytest.raises(TooFewSeeds, match="needs at least 6 seeds, there are 5"):
        flip_test(np.arange(1.0, 6.0))


def test_t_test_is_the_textbooks() -> None:
    d = np.array([0.2, 0.5, 0.3])
    t = d.mean() / (d.std(ddof=1) / math.sqrt(3))
    low, high, p = t_test(d)
    assert p == pytest.approx(2 * stats.t.sf(t, 2))
    half = stats.t.ppf(0.975, 2) * d.std(ddof=1) / math.sqrt(3)
    assert (low, high) == (pytest.approx(d.mean() - half), pytest.approx(d.mean() + half))


def test_a_pair_is_one_seed_and_the_order_of_seeds_does_not_matter() -> None:
    a, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.9, 1.8, 2.7, 3.9])
    found, turned = paired(a, b), paired(a[::-1], b[::-1])
    assert found.difference == pytest.approx(0.175)
    assert found.t_p == pytest.approx(turned.t_p)
    assert found.t_p < 0.05 < stats.ttest_ind(a, b).pvalue, "unpaired, the spread of seeds hides the difference"
    assert math.isnan(found.flip_p)
    assert "6 seeds, there are 4" in found.refused


def test_equal_differences_have_no_t_and_infinite_losses_are_refused() -> None:
    assert math.isnan(paired([1.0, 2.0, 3.0], [0.5, 1.5, 2.5]).t_p)
    with pytest.raises(ValueError, match="clip"):
        paired([math.inf, 1.0, 2.0], [1.0, 1.0, 1.0])
