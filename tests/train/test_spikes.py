"""Spikes on made-up histories: what is one, what is none, and that the same history gives the same events."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qkexp.train.spikes import ENOUGH, SETTLED, SpikeDetector, spike_score

RNG = np.random.default_rng(0)
NOISE = 2.0 + 0.05 * RNG.standard_normal(400)


def steps(values: np.ndarray, start: int = 20) -> list[int]:
    detector = SpikeDetector("loss", start)
    return [event.step for step, value in enumerate(values) for event in detector.feed(step, float(value))]


def test_three_spikes_are_three_events_at_their_first_steps() -> None:
    values = NOISE.copy()
    for at in (150, 200, 300):
        values[at : at + 3] = 6.0
    assert steps(values) == [150, 200, 300]


def test_a_spike_and_a_nan_do_not_hide_the_next_spike() -> None:
    values = NOISE.copy()
    values[150:170] = 1e6
    values[180:200] = np.nan
    values[205] = np.inf
    values[210] = 4.0
    assert steps(values) == [150, 210]


def test_noise_a_slow_drift_and_a_plateau_at_chance_raise_no_alarm() -> None:
    assert steps(NOISE) == []
    assert steps(NOISE + np.linspace(0, 2, 400)) == []
    assert steps(np.full(400, math.log(10))) == [], "a constant has no deviation at all"
    assert steps(1e-4 * (1 + 0.2 * RNG.standard_normal(400))) == [], "noise around a converged loss"


def test_a_warmup_that_jumps_raises_no_alarm() -> None:
    values = NOISE.copy()
    values[30:40] = 9.0
    assert steps(values) == [], f"fewer than {ENOUGH} values are known"
    values[80:85] = 9.0
    assert steps(values, start=100) == []
    assert steps(values, start=20) == [80]


def test_a_new_level_is_one_event_and_then_the_rule() -> None:
    values = NOISE.copy()
    values[200:] += 5.0
    values[380] = 30.0
    assert steps(values) == [200, 380]
    assert 200 + SETTLED + ENOUGH < 380


def test_a_detector_that_goes_on_from_its_state_says_the_same() -> None:
    values = NOISE.copy()
    values[[150, 151, 300]] = 8.0
    for cut in (100, 151, 299):
        first, second = SpikeDetector("grad", 20), SpikeDetector("grad", 20)
        found = [e for s in range(cut) for e in first.feed(s, float(values[s]))]
        second.load_state_dict(first.state_dict())
        found += [e for s in range(cut, 400) for e in second.feed(s, float(values[s]))]
        assert [e.step for e in found] == [150, 300]
        assert {e.kind for e in found} == {"grad_spike"}


def test_spike_score_equals_its_definition_value_by_value() -> None:
    draw = np.random.default_rng(3)
    values = draw.standard_t(2, 5000).cumsum() * 0.01 + draw.standard_t(1.5, 5000)
    values[draw.integers(0, 5000, 60)] = draw.choice([math.nan, math.inf, -math.inf], 60)
    values[700:770] = math.nan
    window, judged, spikes = 100, 0, 0
    for at in range(window, len(values)):
        past = values[at - window : at][np.isfinite(values[at - window : at])]
        if len(past) >= window // 2:
            judged += 1
            spikes += not math.isfinite(values[at]) or values[at] >= past.mean() + 7 * past.std()
    assert 20 < spikes < judged < len(values) - window
    assert spike_score(values, window=window) == pytest.approx(100 * spikes / judged, rel=1e-12)


def test_spike_score_is_the_percentage_of_rises_over_seven_deviations() -> None:
    values = 1.0 + 0.01 * np.random.default_rng(1).standard_normal(2000)
    assert spike_score(values) == 0.0
    values[[1200, 1500]] = 2.0
    values[1700] = 0.0
    assert spike_score(values) == pytest.approx(0.2)
    assert math.isnan(spike_score(values[:1000])), "nothing can be judged"
