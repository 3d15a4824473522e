"""Attention metrics as arrays: whatever the order and the shape of the rows that a run left."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from qkexp.record.layers import Layers


def table(rows: list[tuple[int, str, int, int, float, float]], chunks: int = 1) -> pa.Table:
    """Rows of (step, phase, layer, head, max_abs_logit, entropy_mean)."""
    names = ("step", "phase", "layer", "head", "max_abs_logit", "entropy_mean")
    kinds = (np.int32, str, np.int32, np.int32, np.float32, np.float32)
    parts = []
    for part in np.array_split(np.arange(len(rows)), chunks):
        columns = {n: np.array([rows[i][c] for i in part], kinds[c]) for c, n in enumerate(names)}
        phase = pa.array(columns.pop("phase").tolist(), pa.string()).dictionary_encode()
        parts.append(pa.table({"phase": phase, **columns}))
    return pa.concat_tables(parts)


ROWS = [
    (step, "train", layer, head, 100.0 * step + 10 * layer + head, 1.0 * step + layer + 2 * head)
    for step in (0, 5)
    for layer in (1, 3)
    for head in (0, 1)
]
LARGEST = [[11.0, 31.0], [511.0, 531.0]]  # over heads
MEAN = [[2.0, 4.0], [7.0, 9.0]]


@pytest.mark.parametrize("order", ["as written", "by head", "backwards"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_in_any_order_give_the_same_arrays(order: str, chunks: int) -> None:
    rows = {"as written": ROWS, "by head": sorted(ROWS, key=lambda r: r[3]), "backwards": ROWS[::-1]}[order]
    found = Layers.of(table(rows, chunks))
    assert (found.steps.tolist(), found.layers.tolist()) == ([0, 5], [1, 3])
    np.testing.assert_array_equal(found["max_abs_logit"], LARGEST)
    np.testing.assert_array_equal(found["entropy_mean"], MEAN)


@pytest.mark.parametrize("place", [0, 3, len(ROWS)])
def test_validation_rows_among_them_count_for_nothing(place: int) -> None:
    beside = [(5, "validation", 1, head, 1e9, 1e9) for head in (0, 1)]
    found = Layers.of(table([*ROWS[:place], *beside, *ROWS[place:]]))
    np.testing.assert_array_equal(found["max_abs_logit"], LARGEST)
    np.testing.assert_array_equal(found["entropy_mean"], MEAN)


def test_what_has_no_heads_stands_alone_and_leaves_the_heads_as_they_are() -> None:
    """Metrics of a whole layer stand at head -1, where those of heads are absent."""
    whole = [(step, "train", layer, -1, np.nan, np.nan) for step in (0, 5) for layer in (1, 3)]
    found = Layers.of(table([*ROWS, *whole]))
    np.testing.assert_array_equal(found["max_abs_logit"], LARGEST)
    np.testing.assert_array_equal(found["entropy_mean"], MEAN)


def test_layers_of_different_numbers_of_heads() -> None:
    more = [(step, "train", 3, 2, 1000.0 + step, 30.0) for step in (0, 5)]
    found = Layers.of(table([*ROWS, *more]))
    np.testing.assert_array_equal(found["max_abs_logit"], [[11.0, 1000.0], [511.0, 1005.0]])
    np.testing.assert_allclose(found["entropy_mean"], [[2.0, (3 + 5 + 30) / 3], [7.0, (8 + 10 + 30) / 3]])


NOTHING = {
    "validation alone": table([(0, "validation", 0, 0, 1.0, 1.0)]),
    "no rows": table(ROWS).slice(0, 0),
    "no rows and no types": pa.table({name: pa.array([], pa.float64()) for name in table(ROWS).column_names}),
}


@pytest.mark.parametrize("rows", NOTHING)
def test_a_run_without_training_rows_has_no_steps(rows: str) -> None:
    found = Layers.of(NOTHING[rows])
    assert found["max_abs_logit"].shape == (0, 0)
    assert "q_norm_mean" not in found.values
