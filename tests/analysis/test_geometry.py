"""Closed forms of the score against computations of another kind, and what the figure shows of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from scipy.special import entr, softmax

from qkexp.analysis.figures import FIGURES, DoesNotFit
from qkexp.analysis.geometry import KEYS, entropy_floor, gain_bound, gap_entropy, lengths_to_one_hot, sharpest_split
from qkexp.record.load import Run, Sweep
from qkexp.verbs.terminal import DONE


def entropy(scores: np.ndarray) -> float:
    return float(entr(softmax(scores)).sum())


@pytest.mark.parametrize(("bound", "n", "wanted"), [(4.0, 17, 0.048063), (11.31, 257, 9.0736e-7), (0.0, 17, 2.833213)])
def test_floor_is_the_entropy_of_its_minimiser(bound: float, n: int, wanted: float) -> None:
    assert entropy_floor(bound, n) == pytest.approx(wanted, rel=1e-4)
    assert entropy_floor(bound, n) == pytest.approx(entropy(np.r_[bound, np.full(n - 1, -bound)]), rel=1e-9)


def test_one_high_score_is_not_the_sharpest_row_of_a_small_bound() -> None:
    # 9 scores within ±0.5: four high ones are sharper than one, though one holds more weight
    assert entropy_floor(0.5, 9) < entropy(np.r_[0.5, np.full(8, -0.5)]) - 0.04
    splits = [entropy(np.r_[np.full(m, 0.5), np.full(9 - m, -0.5)]) for m in range(1, 9)]
    assert entropy_floor(0.5, 9) == pytest.approx(min(splits), rel=1e-12)
    assert sharpest_split(0.5, 9) == 1 + int(np.argmin(splits)) > 1
    assert sharpest_split(np.array([4.0, 11.31]), 257).tolist() == [1, 1]


def test_no_row_within_the_bound_is_sharper_than_the_floor() -> None:
    draw = np.random.default_rng(0)
    for bound in (0.5, 2.0, 4.0):
        rows = [draw.uniform(-bound, bound, 9), draw.choice([-bound, bound], 9)]
        rows += [minimize(entropy, row, bounds=[(-bound, bound)] * 9).x for row in rows]
        assert min(map(entropy, rows)) >= entropy_floor(bound, 9) - 1e-9
        starts = [draw.uniform(-bound, bound, 9) for _ in range(30)]
        found = min(minimize(entropy, start, bounds=[(-bound, bound)] * 9).fun for start in starts)
        assert found == pytest.approx(entropy_floor(bound, 9), rel=1e-5), "an optimiser finds the floor"


def test_gap_entropy_is_that_of_one_score_above_equal_others() -> None:
    assert gap_entropy(np.array([3.0]), 65)[0] == pytest.approx(entropy(np.r_[3.0, np.zeros(64)]), rel=1e-12)


def test_gap_grows_with_the_product_of_lengths() -> None:
    table = lengths_to_one_hot(np.array([8.0]), d=64, cosine=0.5).set_index("curve")
    assert table.closed["N = 17"] == pytest.approx(entropy(np.r_[0.5 * 64 / 8, np.zeros(16)]), rel=1e-12)
    assert table.value["N = 17"] == pytest.approx(table.closed["N = 17"], abs=1e-6)


def test_bound_of_a_norm_moves_with_the_square_of_a_gain() -> None:
    table = gain_bound(np.array([1.0, 3.0])).set_index(["curve", "x"]).value
    assert table["d = 128", 1.0] == pytest.approx(11.3137, abs=1e-4)
    assert table["d = 128", 3.0] == pytest.approx(9 * math.sqrt(128), rel=1e-6)


def test_figure_of_formulas_is_drawn_without_runs_and_refused_with_them(tmp_path: Path) -> None:
    table = FIGURES["score_geometry"](Sweep(tmp_path, {})).table
    marks = table[table.kind == "mark"].set_index(["panel", "curve", "x"]).value
    assert marks["length_bound", "q·k", 40.0] == 1600
    assert marks["entropy_floor", f"N = {KEYS[0]}", 4.0] == pytest.approx(0.048, abs=1e-4)
    assert marks["cap_gradient", "cap 50", 50.0] == pytest.approx(1 / math.cosh(1) ** 2, rel=1e-12)
    peak = table[table.panel == "softmax_gradient"].set_index("x").value
    assert (peak.idxmax(), peak.max()) == (0.0, 0.25)
    with pytest.raises(DoesNotFit, match="formulas"):
        FIGURES["score_geometry"](Sweep(tmp_path, {"a": Run(tmp_path / "a")}))


def test_an_experiment_without_runs_is_verified_and_drawn(tmp_path: Path) -> None:
    from qkexp.cli import main

    assert main(["reproduce", "score_geometry", f"output_dir={tmp_path}", "tracker=none"]) == DONE
    assert main(["reproduce", "score_geometry", "--quick", f"output_dir={tmp_path}", "tracker=none"]) == DONE
    drawn = pd.read_csv(tmp_path / "score_geometry" / "figures" / "score_geometry.csv")
    assert set(drawn.kind) == {"curve", "mark"}
