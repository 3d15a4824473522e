"""LR sensitivity, brackets, headroom and their tables, on runs with made-up losses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qkexp.analysis import tables
from qkexp.analysis.cells import Cell, group
from qkexp.analysis.claims import check
from qkexp.analysis.figures.selection import DoesNotFit
from qkexp.analysis.sensitivity import comparisons, lr_sensitivity, summary
from qkexp.analysis.stability import stability, verdicts
from qkexp.cli import main
from qkexp.compose import compose_sweep
from qkexp.naming import run_name
from qkexp.record.files import write_json
from qkexp.record.load import load_sweep
from qkexp.record.run import RunWriter

START, CHANCE = 2.5, 2.3
RATES = (0.003, 0.01, 0.03, 0.1)


def make(root: Path, variant: str, lr: float, seed: int, val: float | None, *keys: str, status: str = "") -> str:
    """A run that starts at a loss of 2.5 and ends at ``val`` (None: not finite)."""
    overrides = [f"attention={variant}", f"optim.lr={lr}", f"seed={seed}", *keys]
    cfg = compose_sweep(overrides, single=True).runs[0][1]
    record = RunWriter(root / run_name(cfg), cfg, {})
    for step, loss in enumerate((START, 1.0)):
        record.row({"step": step, "loss": loss, "grad_norm": 1.0})
    final = {"loss": 1.0, "val_loss": val, "val_accuracy": None}
    facts = {"reason": "", "step": 2, "steps": 2, "constant_loss": CHANCE, "final": final, "best": {}}
    record.finish({"status": status or ("diverged" if val is None else "completed"), **facts})
    return record.directory.name


def line(root: Path, variant: str, losses: tuple[float | None, ...], seeds: int = 3, *keys: str) -> None:
    for seed in range(seeds):
        for rate, loss in zip(RATES, losses, strict=True):
            make(root, variant, rate, seed, None if loss is None else loss + 0.01 * seed, *keys)


def test_sensitivity_is_the_mean_excess_over_the_best_clipped_at_the_initial_loss() -> None:
    losses = np.array([0.5, 0.2, 1.2, math.inf])
    # 0.3 + 0 + 1.0 + (2.5 - 0.2), over 4
    assert lr_sensitivity(losses, 2.5) == pytest.approx(3.6 / 4)
    assert lr_sensitivity(losses, np.array([2.5, 2.5, 1.0, 2.4])) == pytest.approx((0.3 + 0.8 + 2.2) / 4)
    assert lr_sensitivity(np.full(4, 9.0), 2.5) == 0.0, "a model at chance everywhere: why loss stands beside it"
    assert math.isnan(lr_sensitivity(np.array([0.5, math.nan]), 2.5)), "a part of the grid is another quantity"


def test_summary_of_a_grid_with_a_known_answer(tmp_path: Path) -> None:
    line(tmp_path, "none", (0.4, 0.2, 1.2, None))
    line(tmp_path, "rmsnorm", (0.3, 0.2, 0.25, 0.5))
    rows = summary(load_sweep(tmp_path)).set_index("variant")
    none, rms = rows.loc["none"], rows.loc["rmsnorm"]
    # each seed's losses are moved alike, so only the clipped one makes seeds differ: 2.5 - 0.2 - 0.01 seed
    assert none.lrs == pytest.approx((0.2 + 0 + 1.0 + 2.29) / 4)
    assert none.lrs_constant == pytest.approx((0.2 + 0 + 1.0 + 2.09) / 4)
    assert rms.lrs == pytest.approx((0.1 + 0 + 0.05 + 0.3) / 4)
    # limit: 0.21 + 0.2 (2.3 - 0.21) = 0.628
    assert (none.largest_stable, none.first_unstable, none.headroom) == (0.01, 0.03, 1.0)
    assert none.best_lr == 0.01
    assert none.best_val_loss == pytest.approx(0.21)
    assert not none.best_at_edge
    assert math.isnan(rms.largest_stable), "an edge of the grid is no result"
    assert math.isnan(rms.headroom)
    assert rms.bracket == "stable up to 0.1, the highest rate tried"
    assert none.weights == 12 * 4 * 64**2
    assert "needs at least 4 seeds, there are 3" in none.note
    assert math.isnan(none.lrs_low)


def test_stable_again_above_an_unstable_rate_is_said_and_does_not_count(tmp_path: Path) -> None:
    line(tmp_path, "none", (0.2, 0.3, 1.9, 0.4))
    (row,) = summary(load_sweep(tmp_path)).to_dict("records")
    assert (row["largest_stable"], row["bracket"]) == (0.01, "stable at 0.01, not at 0.03; again at 0.1")
    assert row["headroom"] == pytest.approx(0.01 / 0.003)
    assert row["best_at_edge"]


def test_missing_runs_are_named_and_never_skipped(tmp_path: Path) -> None:
    line(tmp_path, "rmsnorm", (0.3, 0.2, 0.25, 0.5), 4)
    line(tmp_path, "none", (0.4, 0.2, 1.2, 2.0), 4)
    failed = make(tmp_path, "none", 0.03, 1, 1.2, status="failed")
    rows = summary(load_sweep(tmp_path)).set_index("variant")
    none = rows.loc["none"]
    assert none.missing == "0.03 seed 1 (failed)"
    assert all(math.isnan(none[c]) for c in ("lrs", "lrs_constant", "best_lr", "best_val_loss", "headroom"))
    assert none.largest_stable == 0.01, "the bracket has three seeds left"
    assert rows.loc["rmsnorm"].missing == ""
    assert comparisons(load_sweep(tmp_path)).refused.tolist() == ["missing: 0.03 seed 1 (failed)"] * 2
    written = tables.write(load_sweep(tmp_path))
    assert "none: missing: 0.03 seed 1 (failed)" in written[0].remarks
    # a run that the plan names and nobody started is missing too
    cfg = (tmp_path / failed / "config.yaml").read_text()
    import shutil

    import yaml

    runs = [{"name": p.parent.name, "config": yaml.safe_load(p.read_text())} for p in tmp_path.glob("*/config.yaml")]
    write_json(tmp_path / "plan.json", {"runs": runs})
    shutil.rmtree(tmp_path / failed)
    assert yaml.safe_load(cfg)["optim"]["lr"] == 0.03
    rows = summary(load_sweep(tmp_path)).set_index("variant")
    assert rows.loc["none"].missing == "0.03 seed 1 (not run)"


def test_a_hole_in_the_grid_is_missing(tmp_path: Path) -> None:
    line(tmp_path, "none", (0.4, 0.2, 1.2, 2.0))
    for seed in range(3):
        for rate in RATES[:-1]:
            make(tmp_path, "rmsnorm", rate, seed, 0.3)
    rows = summary(load_sweep(tmp_path)).set_index("variant")
    assert rows.loc["rmsnorm"].missing == ", ".join(f"0.1 seed {s} (not run)" for s in range(3))


def test_sizes_are_cells_of_their_own_and_variants_are_compared_within_a_size(tmp_path: Path) -> None:
    small, large = ("model.width=32", "model.heads=2"), ("model.width=64", "model.heads=4")
    line(tmp_path, "none", (0.4, 0.3, 0.5, 0.9), 3, *small)
    line(tmp_path, "none", (0.3, 0.2, 1.2, 2.0), 3, *large)
    line(tmp_path, "rmsnorm", (0.4, 0.3, 0.3, 0.3), 3, *small)
    line(tmp_path, "rmsnorm", (0.3, 0.1, 0.1, 0.2), 3, *large)
    sweep = load_sweep(tmp_path)
    cells = group(sweep)
    assert len(cells) == 16
    assert all(len(runs) == 3 for runs in cells.values())
    assert Cell("none", 0.1, (("model.width", 32),)) in cells, "heads go with the width, and add nothing"
    table = stability(sweep).set_index(["variant", "model.width", "lr"])
    # limit: 0.11 + 0.2 (2.3 - 0.11) = 0.548, of all sizes
    assert table.stable["none", 32].tolist() == [True, True, True, False]
    assert table.stable["none", 64].tolist() == [True, True, False, False]
    than = {"claim": "c", "where": {"variant": "none", "optim.lr": 0.1}, "metric": "final_val_loss", "seeds": "median",
            "than": "rmsnorm", "is": ">= 9"}  # fmt: skip
    result = check(sweep, than)
    assert result.value == pytest.approx(0.91 / 0.31), "the small one is compared with the small one"
    assert result.count == 2
    assert "none at 0.1, model.width=32" in result.detail
    weights = summary(sweep).set_index(["variant", "model.width"]).weights
    assert weights["none", 32] * 4 == weights["none", 64]


def test_a_search_over_two_sizes_has_no_verdict(tmp_path: Path) -> None:
    names = [make(tmp_path, "none", 0.01, seed, 0.2, f"model.depth={d}") for d in (2, 4) for seed in range(3)]
    assert verdicts(tmp_path, names) == {("none", 0.01): None}
    assert verdicts(tmp_path, names[:3]) == {("none", 0.01): True}


def test_losses_of_another_task_have_another_limit(tmp_path: Path) -> None:
    for seed in range(3):
        make(tmp_path, "none", 0.01, seed, 0.1)
        make(tmp_path, "none", 0.01, seed, 1.5, "train.label_smoothing=0.5")
    table = stability(load_sweep(tmp_path)).set_index("train.label_smoothing")
    assert table.limit[0.0] == pytest.approx(0.1 + 0.2 * 2.2)
    assert table.limit[0.5] == pytest.approx(1.5 + 0.2 * 0.8)


def test_comparisons_pair_seeds_and_refuse_what_they_cannot_tell(tmp_path: Path) -> None:
    line(tmp_path, "none", (0.4, 0.3, 1.2, 2.0), 6)
    for seed in range(6):
        for rate, loss in zip(RATES, (0.3, 0.2, 0.25, 0.5), strict=True):
            make(tmp_path, "l2", rate, seed, loss + 0.02 * seed)
    rows = comparisons(load_sweep(tmp_path)).set_index("measure")
    best = rows.loc["best_val_loss"]
    assert (best.variant, best.against, best.seeds) == ("l2", "none", 6)
    # 0.2 + 0.02 s against 0.3 + 0.01 s
    assert best.difference == pytest.approx(-0.075)
    assert best.flip_p == pytest.approx(2 / 64)
    assert rows.refused.tolist() == ["", ""]


def test_tables_are_written_as_csv_and_latex_with_what_is_not_known_left_out(tmp_path: Path) -> None:
    line(tmp_path, "none", (0.4, 0.2, 1.2, None))
    line(tmp_path, "rmsnorm", (0.3, 0.2, 0.25, 0.5))
    tables.write(load_sweep(tmp_path))
    rows = pd.read_csv(tmp_path / "tables" / "sensitivity.csv")
    assert rows.lrs.tolist() == pytest.approx(summary(load_sweep(tmp_path)).lrs.tolist(), rel=1e-12)
    tex = (tmp_path / "tables" / "sensitivity.tex").read_text()
    assert "\\toprule" in tex
    assert "none & 0.872 & 0.82" in tex
    assert "& 0.01 & 0.21 & – & stable up to 0.1, the highest rate tried" in tex
    assert (tmp_path / "tables" / "paired.tex").exists()


def test_two_rates_make_no_table(tmp_path: Path) -> None:
    for rate in (0.01, 0.1):
        make(tmp_path, "none", rate, 0, 0.2)
    with pytest.raises(DoesNotFit, match="3 or more"):
        tables.build("sensitivity", load_sweep(tmp_path))
    assert tables.write(load_sweep(tmp_path)) == []


def test_figures_of_a_sweep_over_rates_prints_its_tables_and_what_they_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line(tmp_path, "none", (0.4, 0.2, 1.2, None))
    line(tmp_path, "rmsnorm", (0.3, 0.2, 0.25, 0.5))
    assert main(["figures", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "LR sens." in said
    assert "a 95% bootstrap interval needs at least 4 seeds, there are 3" in said
    assert (tmp_path / "tables" / "paired.csv").exists()
    assert main(["figures", str(tmp_path), "lr_sensitivity"]) == 0
    assert "LR sens." not in capsys.readouterr().out, "one figure was asked for"
