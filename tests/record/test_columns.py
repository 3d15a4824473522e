"""Arrow arrays made of buffers are those that pyarrow makes of the same values, and cost no import of pandas."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from qkexp.compose import compose_sweep
from qkexp.record.columns import measured, numbers, rows, texts
from qkexp.train.data import prepare

HARD = [1.5, math.nan, math.inf, -math.inf, -0.0, 3e38, 1e-45, math.nan, 9.0]


@pytest.mark.parametrize("length", [0, 1, 8, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_of_numbers_nan_alone_is_absent(dtype: type, length: int) -> None:
    values = np.array(HARD[:length], dtype)
    assert measured(values).equals(pa.array(values, from_pandas=True))
    assert measured(values).null_count == np.isnan(values).sum()
    assert np.array_equal(np.signbit(measured(values).fill_null(0.0).to_numpy()), np.signbit(np.nan_to_num(values)))


@pytest.mark.parametrize("values", [np.arange(20, dtype=np.int32), np.arange(20) % 3 == 0, np.arange(20.0)[::2]])
def test_whole_numbers_truths_and_views_are_what_they_were(values: np.ndarray) -> None:
    assert measured(values).equals(pa.array(values))
    absent = np.arange(len(values)) % 2 == 0
    assert values.dtype == bool or numbers(values, absent).equals(pa.array(values, mask=absent))


@pytest.mark.parametrize("values", [[], ["train"] * 9, ["blocks.0", "blöcke.1", "blocks.0", ""]])
def test_texts_are_a_dictionary_in_the_order_of_their_first_use(values: list[str]) -> None:
    found = texts(values)
    assert found.to_pylist() == values
    assert found.equals(pa.array(values, pa.string()).dictionary_encode())


def test_of_rows_what_is_missing_is_absent_and_nan_stays_nan() -> None:
    schema = pa.schema([("step", pa.int32()), ("loss", pa.float64()), ("val_loss", pa.float64())])
    table = rows([{"step": 0, "loss": math.nan}, {"step": 2**31 - 1, "loss": -0.0, "val_loss": math.inf}], schema)
    assert table.schema == schema
    first, second = table.to_pylist()
    assert (first["step"], first["val_loss"], math.isnan(first["loss"])) == (0, None, True)
    assert (second, math.copysign(1, second["loss"])) == (
        {"step": 2**31 - 1, "loss": -0.0, "val_loss": math.inf},
        -1.0,
    )


def test_a_run_writes_its_tables_without_pandas(tmp_path: Path) -> None:
    prepare(compose_sweep([], single=True).runs[0][1].data, 8)  # what a launcher does for it, with scikit-learn
    code = """
import sys
from pathlib import Path
from qkexp.compose import compose_sweep
from qkexp.sweep.job import execute
small = ["model.width=16", "model.depth=1", "model.heads=2", "train.steps=3", "train.batch_size=8"]
cfg = compose_sweep(small, single=True).runs[0][1]
assert execute(cfg, Path(sys.argv[1]), {}) == 0
print([name for name in ("pandas", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
