"""Events: relative to the run's own healthy stretch, deterministic, once a layer."""

from __future__ import annotations

import numpy as np

from qkexp.train.events import Detector, Event, healthy_steps


def run(logits: np.ndarray, frac: np.ndarray, steps: int = 1000) -> list[Event]:
    detector = Detector(steps)
    events = []
    for step in range(len(logits)):
        events += detector.feed(step, logits[step], frac[step])
    return events


def calm(steps: int = 300, layers: int = 2) -> tuple[np.ndarray, np.ndarray]:
    return np.full((steps, layers), 4.0), np.full((steps, layers), 0.9)


def test_healthy_stretch_is_five_percent_but_at_least_20_steps() -> None:
    assert (healthy_steps(1000), healthy_steps(100)) == (50, 20)


def test_calm_run_has_no_events() -> None:
    assert run(*calm()) == []


def test_runaway_is_thirty_times_the_layers_own_median() -> None:
    logits, frac = calm()
    logits[100:, 1] = 119.0
    assert run(logits, frac) == []
    logits[100:, 1] = 121.0
    assert run(logits, frac) == [Event(100, "logit_runaway", 1, value=121.0, threshold=120.0)]


def test_large_but_steady_logits_are_not_a_runaway() -> None:
    logits, frac = calm()
    assert run(logits * 1e5, frac) == []


def test_collapse_needs_20_probed_steps_in_a_row() -> None:
    logits, frac = calm()
    frac[100:119, 0] = 0.01
    assert run(logits, frac) == []
    frac[119, 0] = 0.01
    assert [(e.kind, e.step, e.layer) for e in run(logits, frac)] == [("layer_collapse", 119, 0)]


def test_attention_that_was_sharp_from_the_start_does_not_collapse() -> None:
    logits, frac = calm()
    frac[:] = 0.04
    assert run(logits, frac) == []


def test_collapse_of_all_layers_is_an_event_of_its_own() -> None:
    logits, frac = calm()
    frac[100:, 0] = 0.01
    frac[150:, 1] = 0.01
    kinds = [(e.kind, e.step, e.layer) for e in run(logits, frac)]
    assert kinds == [("layer_collapse", 119, 0), ("layer_collapse", 169, 1), ("all_collapse", 169, -1)]


def test_each_kind_fires_once_a_layer() -> None:
    logits, frac = calm()
    logits[100:120] = 1e4
    logits[200:220] = 1e4
    assert len(run(logits, frac)) == 2


def test_absent_values_are_not_events() -> None:
    logits, frac = calm()
    logits[100:], frac[100:] = np.nan, np.nan
    assert run(logits, frac) == []


def test_a_scale_at_its_bound_is_told_once_a_layer_also_in_the_healthy_stretch() -> None:
    detector = Detector(1000, scale_bound=100.0)
    frac = np.full(2, 0.9)
    told = [
        detector.feed(step, frac, frac, np.array(scales))
        for step, scales in enumerate([[10.0, 99.9], [10.0, 99.999], [10.0, 100.0], [100.00001, 50.0]])
    ]
    assert told == [
        [],
        [Event(1, "scale_bound", 1, value=99.999, threshold=100.0)],
        [],
        [Event(3, "scale_bound", 0, value=100.00001, threshold=100.0)],
    ]


def test_a_scale_without_bound_reaches_none() -> None:
    frac = np.full(2, 0.9)
    assert Detector(1000).feed(0, frac, frac, np.array([1e9, np.inf])) == []
    assert Detector(1000, 100.0).feed(0, frac, frac, np.array([np.nan, np.inf])) == []
