"""attention.temperature: what the score is divided by, in which steps, and that nothing else changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_loop import losses, run

from qkexp.compose import compose_sweep
from qkexp.config import AttentionConfig, ConfigError, identity
from qkexp.model.attention import temperature_at
from qkexp.probe.metrics import NAMES


def first_layer(frame, metric: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return frame.groups[0].values[NAMES.index(metric), 0]


@pytest.mark.parametrize(("step", "wanted"), [(0, 1.0), (4, 1.0), (5, 0.1), (8, 0.1), (9, 1.0), (100, 1.0)])
def test_temperature_stands_from_its_first_step_until_its_last(step: int, wanted: float) -> None:
    assert temperature_at(AttentionConfig(temperature=0.1, temperature_from=5, temperature_until=9), step) == wanted


def test_steps_before_a_shock_are_bit_identical_and_the_probe_sees_it_at_its_first_step() -> None:
    plain, _ = run("train.steps=12")
    shock = ["attention.temperature=0.1", "attention.temperature_from=6", "attention.temperature_until=8"]
    shocked, _ = run("train.steps=12", *shock)
    assert losses(shocked)[:6] == losses(plain)[:6]
    assert losses(shocked)[6] != losses(plain)[6]
    scales = [float(first_layer(frame, "score_scale")[0]) for frame in shocked.frames]
    assert scales == pytest.approx([0.25] * 6 + [2.5] * 2 + [0.25] * 4)
    # step 6 starts from the same weights: the score is that of the plain run, divided by 0.1
    ratio = first_layer(shocked.frames[6], "max_abs_logit") / first_layer(plain.frames[6], "max_abs_logit")
    assert ratio.numpy() == pytest.approx(np.full(4, 10.0), rel=1e-4)
    product = math.prod(
        float(first_layer(shocked.frames[6], m)[0])
        for m in ("score_scale", "max_pair_q_norm", "max_pair_k_norm", "max_pair_cos")
    )
    assert abs(product) == pytest.approx(float(first_layer(shocked.frames[6], "max_abs_logit")[0]), rel=1e-4)


def test_learned_scales_are_divided_too_and_keep_their_gradient() -> None:
    shocked, _ = run("train.steps=3", "attention=l2", "attention.temperature=0.5")
    plain, _ = run("train.steps=3", "attention=l2")
    ratio = first_layer(shocked.frames[0], "score_scale") / first_layer(plain.frames[0], "score_scale")
    assert ratio.numpy() == pytest.approx(np.full(4, 2.0), rel=1e-6)
    assert first_layer(shocked.frames[2], "score_scale")[0] != first_layer(shocked.frames[0], "score_scale")[0]


def test_a_temperature_is_another_run_and_its_absence_the_old_one() -> None:
    def mark(*overrides: str) -> str:
        return identity(compose_sweep(overrides, single=True).runs[0][1])

    assert mark("attention.temperature=1") == mark("attention.temperature_from=0") == mark()
    shock = ("attention.temperature=0.1", "attention.temperature_from=5")
    assert len({mark(), mark(shock[0]), mark(*shock), mark(*shock, "attention.temperature_until=9")}) == 4


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["attention.temperature=0"], "attention.temperature"),
        (["attention.temperature_from=5"], "attention.temperature_from"),
        (["attention.temperature_until=5"], "attention.temperature_until"),
        (["attention.temperature=0.1", "attention.temperature_from=400"], "attention.temperature_from"),
        (
            ["attention.temperature=0.1", "attention.temperature_from=5", "attention.temperature_until=5"],
            "attention.temperature_until",
        ),
        (["attention=swin_v2", "attention.temperature=0.1"], "attention.temperature"),
    ],
)
def test_temperatures_without_meaning_are_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_sweep(overrides, single=True)
    assert error.value.key == named
