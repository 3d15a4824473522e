"""From heads to layers to keys: each metric's own reduction, and what is absent stays absent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from qkexp.config import PROBE_GROUPS
from qkexp.probe.frame import Frame, Group, columns, layer_values, to_numpy
from qkexp.probe.metrics import BY_NAME, GROUPS, METRICS, NAMES


def heads(**given: list[float]) -> np.ndarray:
    """(metric, layer 1, head 3): 1, 2, 3 unless given."""
    out = np.tile(np.array([1.0, 2.0, 3.0], np.float32), (len(NAMES), 1, 1))
    for name, value in given.items():
        out[NAMES.index(name), 0] = value
    return out


def of(values: np.ndarray, name: str) -> float:
    return float(values[NAMES.index(name), 0])


def test_a_layers_value_is_the_maximum_of_maxima_and_the_mean_of_all_else():
    out = layer_values(heads())
    for name in NAMES:
        largest = name.startswith("max_") or name.endswith("_max")
        assert of(out, name) == (3.0 if largest else 2.0), name


def test_a_layers_pair_is_that_of_the_head_with_the_largest_logit():
    out = layer_values(
        heads(
            max_abs_logit=[5.0, 9.0, 1.0],
            max_pair_q_norm=[100.0, 7.0, 200.0],
            max_pair_k_norm=[50.0, 3.0, 60.0],
            max_pair_cos=[0.9, -0.5, 1.0],
        )
    )
    assert [of(out, f"max_pair_{x}") for x in ("q_norm", "k_norm", "cos")] == [7.0, 3.0, -0.5]


def test_heads_that_were_not_measured_are_left_out_and_a_layer_without_any_is_absent():
    nan = math.nan
    out = layer_values(
        heads(
            max_abs_logit=[nan, 4.0, 2.0],
            max_pair_q_norm=[nan, 8.0, 1.0],
            entropy_mean=[nan, 1.0, 3.0],
            max_logit=[nan, -4.0, -2.0],
            entropy_frac=[nan, nan, nan],
        )
    )
    assert of(out, "max_abs_logit") == 4.0
    assert of(out, "max_pair_q_norm") == 8.0
    assert of(out, "entropy_mean") == 2.0
    assert of(out, "max_logit") == -2.0
    assert math.isnan(of(out, "entropy_frac"))


def test_a_layers_value_is_reduced_alike_with_a_step_axis():
    stacked = np.stack([heads(), 10 * heads()], axis=1)  # (metric, step, layer, head)
    out = layer_values(stacked)
    assert out.shape == (len(NAMES), 2, 1)
    np.testing.assert_array_equal(out[:, 0], layer_values(heads()))
    np.testing.assert_array_equal(out[:, 1], layer_values(10 * heads()))


def frame(step: int = 3) -> Frame:
    """Layers 0 and 2 of two heads, layer 1 of three; one entropy absent."""
    two = torch.arange(len(NAMES) * 4.0).view(len(NAMES), 2, 2)
    three = -torch.arange(len(NAMES) * 3.0).view(len(NAMES), 1, 3)
    two[NAMES.index("entropy_mean"), 1] = math.nan
    return Frame(step, "train", ("a", "b", "c"), (Group((0, 2), two), Group((1,), three)))


def test_scalars_are_keyed_by_layer_and_metric_and_leave_out_what_is_absent():
    scalars = frame().scalars()
    assert set(scalars) == {f"attn/L{i:02d}/{name}" for i in range(3) for name in NAMES} - {"attn/L02/entropy_mean"}
    at = 4 * NAMES.index("q_norm_max")
    assert scalars["attn/L00/q_norm_max"] == at + 1
    assert scalars["attn/L02/q_norm_mean"] == 2.5
    assert scalars["attn/L01/q_norm_max"] == -3.0 * NAMES.index("q_norm_max")
    assert all(type(value) is float for value in scalars.values())


def test_the_table_has_a_row_a_step_layer_and_head_in_order():
    table = columns([frame(3), frame(5)])
    assert list(table) == ["step", "phase", "layer", "module", "head", *NAMES]
    assert table["step"].tolist() == [3] * 7 + [5] * 7
    assert table["layer"].tolist() == [0, 0, 1, 1, 1, 2, 2] * 2
    assert table["head"].tolist() == [0, 1, 0, 1, 2, 0, 1] * 2
    assert table["module"] == ["a", "a", "b", "b", "b", "c", "c"] * 2
    assert table["q_norm_mean"][:7].tolist() == [0, 1, -0.0, -1, -2, 2, 3]
    assert np.isnan(table["entropy_mean"][5:7]).all()
    assert table["entropy_mean"].dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_any_dtype_leaves_as_float32(dtype):
    out = to_numpy(torch.ones(2, dtype=dtype, requires_grad=dtype.is_floating_point))
    assert out.dtype == np.float32
    assert out.tolist() == [1.0, 1.0]


def test_every_metric_says_how_its_parts_combine():
    assert len(NAMES) == len(METRICS)
    assert len(BY_NAME) == len(METRICS) + sum(map(len, GROUPS.values()))
    for metric in BY_NAME.values():
        assert metric.heads in ("max", "mean", "max_pair", "none")
        assert metric.shards in ("max", "mean", "rows", "choices", "sum", "max_pair", "norm", "rms")
        maximum = metric.name.endswith("_max") or (metric.name.startswith("max_") and "pair" not in metric.name)
        assert not maximum or (metric.heads in ("max", "none") and metric.shards == "max"), metric.name
        assert metric.definition
        assert metric.unit
        assert metric.reading
        assert metric.limits
        assert metric.cost


def test_the_configuration_accepts_the_groups_that_there_are():
    assert set(PROBE_GROUPS) == set(GROUPS)
