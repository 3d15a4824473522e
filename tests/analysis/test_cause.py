"""The figures of interventions show the recorded numbers of the right arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex

from qkexp.analysis.claims import check
from qkexp.analysis.figures import FIGURES
from qkexp.analysis.figures.arms import arm_look
from qkexp.analysis.figures.selection import DoesNotFit
from qkexp.analysis.figures.style import LOOKS, look, save
from qkexp.config import to_typed
from qkexp.naming import branch_name, run_name
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.load import Sweep, load_sweep
from qkexp.record.run import MEASURED, RunWriter

STEPS = 50
PARENT = "f" * 64


def write(folder: Path, loss: np.ndarray, logit: float, arm: str | None = None, **groups: dict[str, Any]) -> None:
    """A run of made-up numbers: the loss given; max |z| ``logit`` in layer 0 and twice that in layer 1."""
    config = {"model": {"width": 64, "depth": 2, "heads": 2, "patch": 2}, "train": {"steps": STEPS}}
    cfg = to_typed(config | groups)
    name = run_name(cfg) if arm is None else branch_name(arm, cfg)
    writer = RunWriter(folder / name, cfg, {})
    values = torch.zeros(len(NAMES), 2, 2)
    values[NAMES.index("max_abs_logit")] = logit * torch.tensor([[1.0], [2.0]])
    values[NAMES.index("entropy_frac")] = torch.tensor([[0.5], [0.25]])
    for step, value in enumerate(loss):
        writer.row({**dict.fromkeys(MEASURED, 1.0), "step": step, "loss": value})
        writer.frame(Frame(step, "train", ("a", "b"), (Group((0, 1), values),)))
    final = {"loss": float(loss[-20:].mean()), "val_loss": 0.3, "val_accuracy": 0.9}
    writer.finish(
        {"status": "completed", "reason": "", "step": len(loss), "steps": STEPS, "constant_loss": 2.3}
        | {"final": final, "best": {}}
    )


def falling(end: float) -> np.ndarray:
    return np.linspace(2.3, end, STEPS) + 0.01 * np.sin(np.arange(STEPS))


@pytest.fixture
def arms(tmp_path: Path) -> Sweep:
    """Two starts, two variants, three arms, three seeds; the end of a loss tells which run it is."""
    for i, init in enumerate(("match", "timm")):
        for v, attention in enumerate(({}, {"norm": "rms", "gain": "shared"})):
            for a, factor in enumerate((1.0, 0.1, 0.0)):
                for seed in (0, 1, 2):
                    end = 1.0 - 0.1 * a - 0.01 * i - 0.001 * v + 0.2 * (seed == 2)
                    groups = {"attention": {**attention, "init": init}, "optim": {"qk_lr_scale": factor}}
                    write(tmp_path, falling(end), 10.0 * (a + 1), **groups, seed=seed)
    return load_sweep(tmp_path)


def test_the_table_has_every_runs_end_and_curve_and_the_medians_over_seeds(arms: Sweep) -> None:
    table = FIGURES["cause"](arms).table
    assert len(arms.all) == 36
    for run in arms.all.values():
        o, a = run.typed.optim, run.typed.attention
        mine = table[
            (table.init == a.init)
            & (table.variant == run.variant)
            & (table.qk_lr_scale == o.qk_lr_scale)
            & (table.seed == run.seed)
        ]
        (end,) = mine[mine.kind == "run"].itertuples()
        loss = run.scalars.loss
        assert end.final_loss == pytest.approx(loss[-20:].mean(), rel=1e-12)
        assert end.max_abs_logit == pytest.approx(20.0 * (1 + [1.0, 0.1, 0.0].index(o.qk_lr_scale)))
        assert end.entropy_frac == pytest.approx(0.25)
        drawn = mine[(mine.kind == "curve") & (mine.metric == "loss")].sort_values("step")
        np.testing.assert_allclose(drawn.value, loss.rolling(20, min_periods=1).mean(), rtol=1e-12)
    medians = table[(table.kind == "median") & (table.init == "match") & (table.variant == "none")]
    ends = {name: row.final_loss for name, row in zip(medians.arm, medians.itertuples(), strict=True)}
    assert set(medians.seeds) == {3}
    wanted = [falling(end)[-20:].mean() for end in (1.0, 0.9, 0.8)]  # the third seed is an outlier
    assert [ends[n] for n in ("trained", "slow_qk", "frozen_qk")] == pytest.approx(wanted)


def test_claims_can_be_made_about_the_medians_of_an_arm(arms: Sweep) -> None:
    where = {"kind": "median", "variant": "none", "init": "match", "arm": "trained"}
    spec = {"claim": "x", "figure": "cause", "where": where, "metric": "final_loss", "is": "> 1.2"}
    assert check(arms, spec).verdict == "pass"
    assert check(arms, {**spec, "where": {**where, "arm": "frozen_qk"}}).verdict == "fail"


def test_one_seed_makes_no_median_and_a_claim_about_it_fails_nothing(tmp_path: Path) -> None:
    for factor in (1.0, 0.0):
        write(tmp_path, falling(1.0), 1.0, optim={"qk_lr_scale": factor})
    sweep = load_sweep(tmp_path)
    assert set(FIGURES["cause"](sweep).table.kind) == {"curve", "run"}
    where = {"kind": "median", "arm": "trained"}
    spec = {"claim": "x", "figure": "cause", "where": where, "metric": "final_loss", "is": "> 5"}
    assert check(sweep, spec).verdict == "not run"


def test_runs_that_are_no_such_experiment_are_not_drawn(tmp_path: Path) -> None:
    write(tmp_path, falling(1.0), 1.0)
    with pytest.raises(DoesNotFit, match="two or more values"):
        FIGURES["cause"](load_sweep(tmp_path))
    write(tmp_path, falling(1.0), 1.0, optim={"qk_lr_scale": 0.0, "lr": 0.5})
    with pytest.raises(DoesNotFit, match="differ in more"):
        FIGURES["cause"](load_sweep(tmp_path))
    with pytest.raises(DoesNotFit, match="no branches"):
        FIGURES["branches"](load_sweep(tmp_path))


def test_an_arm_that_changes_nothing_looks_as_its_variant_and_no_two_arms_look_alike() -> None:
    for variant in ("none", "rmsnorm"):
        assert arm_look("unchanged", variant).colour == arm_look("trained", variant).colour == look(variant).colour
    changed = [arm_look(name, "none") for name in ("norm", "frozen_qk", "slow_qk", "slow", "softcap-50")]
    colours = [here.colour for here in changed]
    assert len(set(colours)) == len({here.marker for here in changed}) == len(changed)
    assert not set(colours) & {here.colour for here in LOOKS.values()}


@pytest.fixture
def branches(tmp_path: Path) -> Sweep:
    """Two arms from step 20 and one from step 30 of one run."""
    loss = falling(1.0)
    for arm, step, optim in (
        ("unchanged", 20, {}),
        ("frozen_qk", 20, {"qk_lr_scale": 0.0}),
        ("slow", 30, {"lr": 1e-4}),
    ):
        own = np.where(np.arange(STEPS) < step, loss, loss - 0.5 * (arm == "frozen_qk"))
        write(tmp_path, own, 10.0, arm, optim=optim, branch={"parent": PARENT, "step": step})
    return load_sweep(tmp_path)


def test_branches_share_the_line_before_their_step_and_part_there(branches: Sweep, tmp_path: Path) -> None:
    drawing = FIGURES["branches"](branches)
    table = drawing.table[drawing.table.metric == "loss"]
    assert set(map(tuple, table[["branch_step", "arm"]].drop_duplicates().to_numpy())) == {
        (20, "shared"), (20, "unchanged"), (20, "frozen_qk"), (30, "shared"), (30, "slow"),
    }  # fmt: skip
    smooth = pd.Series(falling(1.0)).rolling(20, min_periods=1).mean()
    for step in (20, 30):
        shared = table[(table.branch_step == step) & (table.arm == "shared")]
        assert shared.step.tolist() == list(range(step))
        np.testing.assert_allclose(shared.value, smooth[:step], rtol=1e-12)
    frozen = table[table.arm == "frozen_qk"]
    assert frozen.step.min() == 19, "it leaves the shared line where that ends"
    assert frozen.value.iloc[-1] == pytest.approx(smooth.iloc[-1] - 0.5)
    rows = {axes.get_subplotspec().rowspan.start for axes in drawing.figure.axes}  # type: ignore[union-attr]
    assert rows == {0, 1}, "a row a step"
    drawn = {to_hex(line.get_color()).upper() for line in drawing.figure.axes[0].lines}
    assert {arm_look("frozen_qk", "none").colour.upper(), look("none").colour.upper()} <= drawn
    assert save(drawing, tmp_path / "figures", "branches").stat().st_size > 10_000


def test_branches_of_two_runs_are_not_mixed(branches: Sweep, tmp_path: Path) -> None:
    write(tmp_path, falling(1.0), 10.0, "slow", branch={"parent": "0" * 64, "step": 20})
    with pytest.raises(DoesNotFit, match="more than one run"):
        FIGURES["branches"](load_sweep(tmp_path))
