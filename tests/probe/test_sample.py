"""Which queries are measured: evenly spread, each as often as any other, and no random number drawn for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkexp.probe.sample import coprime_near, of_rows, spread
from qkexp.probe.stats import attention_stats

SIZES = [(17, 4), (17, 17), (16, 5), (197, 32), (1, 1), (2, 1), (12, 6)]


@pytest.mark.parametrize(("rows", "wanted"), SIZES)
def test_in_as_many_turns_as_rows_each_row_is_taken_equally_often(rows, wanted):
    counts = sum(
        torch.stack([torch.bincount(chosen, minlength=rows) for chosen in spread(rows, wanted, 3, turn)])
        for turn in range(5, 5 + rows)
    )
    assert counts.tolist() == [[wanted] * rows] * 3


@pytest.mark.parametrize(("rows", "wanted"), SIZES)
def test_rows_are_distinct_and_evenly_spread(rows, wanted):
    for chosen in spread(rows, wanted, 4, 7).sort(-1).values:
        gaps = torch.diff(torch.cat([chosen, chosen[:1] + rows]))
        assert gaps.sum() == rows
        assert gaps.min() >= rows // wanted
        assert gaps.max() <= -(-rows // wanted)


def test_images_and_turns_see_other_rows():
    a, b = spread(197, 8, 6, 0), spread(197, 8, 6, 1)
    assert len({tuple(sorted(x.tolist())) for x in (*a, *b)}) == 7  # image b at turn 1 is image b + 1 at turn 0


def test_no_random_number_is_drawn():
    before = torch.get_rng_state()
    spread(197, 8, 6, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("number", range(1, 40))
def test_the_stride_shares_no_divisor_with_the_number_of_rows(number):
    assert np.gcd(coprime_near(number, 0.618 * number), number) == 1


@pytest.mark.parametrize("wanted", [1, 5, 12])
def test_over_all_choices_means_are_those_of_all_rows_and_maxima_are_not_above_theirs(wanted):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 2, 12, 8, generator=g), torch.randn(3, 2, 20, 8, generator=g)
    mask = torch.rand(3, 1, 12, 20, generator=g) < 0.7
    bias = torch.randn(2, 12, 20, generator=g).unsqueeze(0)
    whole = attention_stats(q, k, 1.0, bias, mask, groups=("sink", "bound"))
    parts = []
    for turn in range(12):
        rows = spread(12, wanted, 3, turn)
        chosen = [of_rows(x, rows) for x in (q, bias, mask)]
        parts.append(attention_stats(chosen[0], k, 1.0, *chosen[1:], groups=("sink", "bound")))
    for name in whole:
        each = torch.stack([part[name] for part in parts])
        if name.endswith("_mean") or name in ("entropy_frac", "collapsed_rows"):
            torch.testing.assert_close(each.mean(0), whole[name], rtol=1e-4, atol=1e-5, msg=name)
        elif name in ("max_logit", "max_abs_logit"):
            assert (each <= whole[name] + 1e-5).all()
            torch.testing.assert_close(each.amax(0), whole[name])


def test_what_is_the_same_for_every_row_is_not_copied():
    rows = spread(12, 3, 2, 0)
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    assert of_rows(mask, rows) is mask
    x = torch.arange(12.0).view(1, 1, 12, 1)  # the same for both images
    assert of_rows(x, rows).flatten(1).tolist() == rows.tolist()
