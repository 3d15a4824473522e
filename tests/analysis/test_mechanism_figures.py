"""Figures of the mechanism, on runs of made-up numbers whose answer is known."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qkexp.analysis.figures import FIGURES, DoesNotFit
from qkexp.analysis.figures.norms_or_cosine import parts
from qkexp.analysis.figures.sequence_length import spread_at_start
from qkexp.analysis.figures.vit22b_order import ATTENTION, GRADIENT, TURN
from qkexp.compose import compose_sweep
from qkexp.naming import run_name
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.load import load_run, load_sweep
from qkexp.record.run import MEASURED, RunWriter

CHANCE = math.log(10)
STEPS = 200


def store(
    root: Path, *overrides: str, loss: object = 0.5, grad: object = 1.0, val: float = 0.5, **metrics: object
) -> Path:
    """A finished run of two layers of two heads; a metric is what numpy can spread over (steps, layers)."""
    cfg = compose_sweep([f"train.steps={STEPS}", *overrides], single=True).runs[0][1]
    record = RunWriter(root / run_name(cfg), cfg, {})
    losses, grads = (np.broadcast_to(np.asarray(x, float), STEPS) for x in (loss, grad))
    values = torch.ones(STEPS, len(NAMES), 2, 2)
    for name, series in metrics.items():
        array = np.asarray(series, float)
        array = array[:, None] if array.ndim == 1 else array
        values[:, NAMES.index(name)] = torch.tensor(np.broadcast_to(array, (STEPS, 2)).copy()).float().unsqueeze(-1)
    for step in range(STEPS):
        row = {**dict.fromkeys(MEASURED, 0.0), "loss": losses[step], "grad_norm": grads[step]}
        record.row({**row, "step": step})
        record.frame(Frame(step, "train", ("a", "b"), (Group((0, 1), values[step]),)))
    final = {"loss": float(losses[-20:].mean()), "val_loss": val, "val_accuracy": 0.5}
    outcome = {"status": "completed", "reason": "", "step": STEPS, "steps": STEPS, "constant_loss": CHANCE}
    record.finish({**outcome, "final": final, "best": {}})
    return record.directory


def ramp(start: int, end: int, low: float, high: float) -> np.ndarray:
    """Constant, then straight, then constant."""
    return np.interp(np.arange(STEPS), [start, end], [low, high])


# ---------------------------------------------------------------- the order of events


def broken(root: Path, seed: int, *, loss_turns: int) -> None:
    """Attention rises over steps 20 … 60, the loss over 40 steps from ``loss_turns``, the gradient over 150 … 190."""
    loss = np.where(
        np.arange(STEPS) < loss_turns, ramp(0, loss_turns, 2.3, 0.3), ramp(loss_turns, loss_turns + 40, 0.3, 2.3)
    )
    store(
        root,
        f"seed={seed}",
        "optim.lr=0.1",
        loss=loss,
        grad=ramp(150, 190, 1.0, 100.0),
        attn_max_mean=ramp(20, 60, 0.2, 1.0),
    )


def test_order_is_checked_for_every_triple_of_thresholds(tmp_path: Path) -> None:
    broken(tmp_path, 0, loss_turns=80)  # after every threshold of attention, before every one of the gradient
    broken(tmp_path, 1, loss_turns=40)  # while attention still rises
    table = FIGURES["vit22b_order"](load_sweep(tmp_path)).table
    shares = table[table.kind == "share"].set_index(["seed", "link"])
    assert shares.share[0, "attention < loss < gradient"] == 1.0
    assert shares.combinations[0, "attention < loss < gradient"] == len(ATTENTION) * len(TURN) * len(GRADIENT)
    assert 0 < shares.share[1, "attention < loss"] < 1
    at = table[table.kind == "onset"].set_index(["seed", "link", "threshold"]).step
    wanted = np.mean([at[1, "attention", a] < at[1, "loss", t] for a, t in itertools.product(ATTENTION, TURN)])
    assert shares.share[1, "attention < loss"] == pytest.approx(wanted)
    # 0.2 + 0.8 (step - 20) / 40 reaches 0.95 at step 57.5
    assert at[0, "attention", 0.95] == 58
    # the mean of 20 steps is smallest where a window's ends are level: the loss rises twice as steeply as it fell
    assert at[0, "loss", 0.0] == pytest.approx(80 + 20 / 3, abs=1)
    orders = table[(table.kind == "order") & (table.seed == 1)]
    assert orders.holds.mean() == pytest.approx(shares.share[1, "attention < loss < gradient"])


def test_a_link_that_never_comes_gives_no_order(tmp_path: Path) -> None:
    store(tmp_path, "optim.lr=0.1", attn_max_mean=ramp(20, 60, 0.2, 0.75))
    table = FIGURES["vit22b_order"](load_sweep(tmp_path)).table
    assert table[table.kind == "order"].holds.isna().all()
    assert table[table.kind == "share"].share.isna().all()
    reached = table[(table.kind == "onset") & table.step.notna()]
    assert set(reached.threshold) == {0.5, 0.6, 0.7}
    store(tmp_path / "calm", "optim.lr=0.1", attn_max_mean=0.2 * np.ones(STEPS))
    with pytest.raises(DoesNotFit, match="no link"):
        FIGURES["vit22b_order"](load_sweep(tmp_path / "calm"))


# ---------------------------------------------------------------- length or alignment


def test_growth_is_split_exactly_into_lengths_and_alignment(tmp_path: Path) -> None:
    q, k, cos = ramp(50, 150, 2.0, 20.0), ramp(50, 150, 3.0, 300.0), ramp(50, 150, 0.25, 0.5)
    run = store(
        tmp_path, "optim.lr=0.1", max_pair_q_norm=q, max_pair_k_norm=k, max_pair_cos=-cos,
        score_scale=np.full(STEPS, 0.25), max_abs_logit=0.25 * q * k * cos, attn_max_mean=ramp(50, 150, 0.2, 0.95),
    )  # fmt: skip
    table = parts(load_run(run), 0)
    assert table.growth.iloc[-1] == pytest.approx(math.log10(10 * 100 * 2), rel=1e-5)
    assert table.lengths.iloc[-1] == pytest.approx(3.0, rel=1e-5)
    assert table.alignment.iloc[-1] == pytest.approx(math.log10(2), rel=1e-5)
    np.testing.assert_allclose(table.growth, table.lengths + table.alignment + table.scale, atol=1e-5)
    split = FIGURES["norms_or_cosine"](load_sweep(tmp_path)).table
    split = split[split.kind == "split"].set_index(["layer", "when"])
    assert split.share_of_lengths["first", "end"] == pytest.approx(3 / math.log10(2000), rel=1e-4)
    assert split.cosine["first", "end"] == pytest.approx(0.5)
    assert split.cosine_start["first", "end"] == pytest.approx(0.25)
    assert split.step["first", "saturation"] == 144  # 0.2 + 0.75 (step - 50) / 100 reaches 0.9 at 143.3
    assert split.residual.abs().max() < 1e-5


def test_typical_alignment_is_the_gap_over_scale_and_mean_lengths(tmp_path: Path) -> None:
    lengths, gap = ramp(50, 150, 2.0, 8.0), ramp(50, 150, 1.0, 64.0)
    run = store(
        tmp_path, "optim.lr=0.1", q_in_norm_mean=lengths, k_in_norm_mean=lengths, logit_gap_mean=gap,
        score_scale=np.full(STEPS, 0.25),
    )  # fmt: skip
    # the gap grew 64 times, lengths 4 · 4 times: 4 are left for alignment
    assert parts(load_run(run), 1).mean_cosine_gap.iloc[-1] == pytest.approx(math.log10(4), rel=1e-5)


# ---------------------------------------------------------------- forced logits, tokens, rates, temperatures, starts


def test_forced_bound_is_scale_times_width_of_a_head(tmp_path: Path) -> None:
    common = ["attention=rmsnorm", "attention.gain=none", "attention.scale=fixed"]
    for scale, val in ((1.0, 0.25), (62.5, 1.5)):
        for seed in (0, 1):
            logit = np.full(STEPS, 15.0 * scale)
            store(
                tmp_path, *common, f"attention.scale_init={scale}", f"seed={seed}", val=val + seed, max_abs_logit=logit
            )
    table = FIGURES["forced_logits"](load_sweep(tmp_path)).table.set_index(["kappa", "seed"])
    assert table.val_loss.to_dict() == {(16.0, 0): 0.25, (16.0, 1): 1.25, (1000.0, 0): 1.5, (1000.0, 1): 2.5}
    assert table.max_abs_logit[1000.0, 0] == pytest.approx(15 * 62.5)
    store(tmp_path, "attention=layernorm")
    with pytest.raises(DoesNotFit, match="no others"):
        FIGURES["forced_logits"](load_sweep(tmp_path))


def test_spread_of_independent_logits_does_not_grow_with_keys_and_their_maximum_does() -> None:
    table = spread_at_start(keys=(16, 256, 4096), width=64, rows=500).set_index("tokens")
    assert table["std"][4096] == pytest.approx(1.0, abs=0.02)
    assert table["std"][4096] - table["std"][256] == pytest.approx(0.0, abs=0.02)
    # expected maximum of n standard normals: 1.766 for 16, 2.83 for 256, 3.59 for 4096 (order statistics)
    assert table.largest.tolist() == pytest.approx([1.766, 2.83, 3.59], abs=0.12)
    assert (table.largest < table.sqrt_2_ln_n).all()
    assert table.sqrt_2_ln_n[256] == pytest.approx(math.sqrt(2 * math.log(256)))


def test_tokens_are_told_from_the_runs_and_not_from_patches(tmp_path: Path) -> None:
    for patch, n in ((4, 5), (2, 17)):
        for scale in ("inv_sqrt_d", "ssmax"):
            store(
                tmp_path, f"model.patch={patch}", f"attention.scale={scale}", entropy_frac=np.full(STEPS, 0.5),
                entropy_mean=np.full(STEPS, 0.5 * math.log(n)), logit_gap_mean=np.full(STEPS, float(n)), val=n / 100,
            )  # fmt: skip
    table = FIGURES["sequence_length"](load_sweep(tmp_path)).table
    rows = table[table.kind == "run"].set_index(["scale", "tokens"])
    assert rows.final_val_loss.to_dict() == {
        ("inv_sqrt_d", 5): 0.05, ("inv_sqrt_d", 17): 0.17, ("ssmax", 5): 0.05, ("ssmax", 17): 0.17,
    }  # fmt: skip
    assert rows.start_gap["ssmax", 17] == 17


def test_a_dip_is_its_lowest_mean_and_what_came_after(tmp_path: Path) -> None:
    dip = np.where(np.arange(STEPS) < 100, ramp(20, 60, 2.8, 0.2), ramp(100, 140, 0.2, 2.0))
    store(tmp_path, "optim.lr=0.01", entropy_mean=dip, entropy_frac=dip / math.log(17))
    store(
        tmp_path,
        "optim.lr=0.02",
        entropy_mean=ramp(20, 60, 2.8, 0.1),
        entropy_frac=ramp(20, 60, 2.8, 0.1) / math.log(17),
    )
    table = FIGURES["entropy_double_lr"](load_sweep(tmp_path)).table
    dips = table[table.kind == "dip"].set_index(["lr", "layer"])
    assert dips.lowest[0.01, 0] == pytest.approx(0.2, rel=1e-5)
    assert dips.rise[0.01, 0] == pytest.approx(1.8, rel=1e-5)
    assert dips.rise[0.02, 1] == pytest.approx(0.0, abs=1e-6)
    assert dips.start[0.01, 0] == pytest.approx(2.8, rel=1e-5)
    store(tmp_path, "optim.lr=0.03")
    with pytest.raises(DoesNotFit, match="twice"):
        FIGURES["entropy_double_lr"](load_sweep(tmp_path))


def test_shocks_are_arms_by_the_step_at_which_they_begin(tmp_path: Path) -> None:
    store(tmp_path, "optim.warmup=100", entropy_mean=np.full(STEPS, 2.0))
    for start, val in ((50, 2.3), (150, 0.4)):
        shock = ["attention.temperature=0.1", f"attention.temperature_from={start}", "optim.warmup=100"]
        store(tmp_path, *shock, val=val, entropy_mean=np.where(np.arange(STEPS) < start, 2.0, 0.5))
    table = FIGURES["temperature_shock"](load_sweep(tmp_path)).table
    ends = table[table.kind == "end"].set_index("start")
    assert ends.arm.to_dict() == {
        0: "no shock", 50: "τ = 0.1 from step 50 (in warm-up)", 150: "τ = 0.1 from step 150 (after warm-up)",
    }  # fmt: skip
    assert ends.val_loss.to_dict() == {0: 0.5, 50: 2.3, 150: 0.4}
    assert ends.lowest_entropy.to_dict() == {0: 2.0, 50: 0.5, 150: 0.5}


def test_starts_are_arms_and_runs_of_one_start_are_refused(tmp_path: Path) -> None:
    store(tmp_path, "attention.init=timm", loss=1.0)
    with pytest.raises(DoesNotFit, match="two starts"):
        FIGURES["vit22b_start"](load_sweep(tmp_path))
    store(tmp_path, "attention.init=match", loss=0.75)
    table = FIGURES["vit22b_start"](load_sweep(tmp_path)).table
    losses = table[(table.metric == "loss") & (table.step == 100)].set_index("arm").value
    assert losses.to_dict() == {"no norm, timm's start": 1.0, "no norm, matched start": 0.75}


def test_side_by_side_shows_a_norm_the_low_rate_and_the_high_one_on_the_same_axes(tmp_path: Path) -> None:
    for rate, peak in ((0.01, 50.0), (0.1, 5e4)):
        store(tmp_path, f"optim.lr={rate}", loss=0.1 + rate, max_abs_logit=ramp(0, 199, 1.0, peak))
    store(tmp_path, "attention=layernorm", "optim.lr=0.1", loss=0.3, max_abs_logit=np.full(STEPS, 10.0))
    drawing = FIGURES["side_by_side"](load_sweep(tmp_path))
    table = drawing.table
    assert list(dict.fromkeys(table.run)) == ["LayerNorm, rate 0.1", "no norm, rate 0.01", "no norm, rate 0.1"]
    loss = table[(table.metric == "loss") & (table.step == 150)].set_index("run").value
    assert loss.to_dict() == pytest.approx(
        {"LayerNorm, rate 0.1": 0.3, "no norm, rate 0.01": 0.11, "no norm, rate 0.1": 0.2}
    )
    logits = table[(table.metric == "max_abs_logit") & (table.layer == 1)].groupby("run").value.max()
    assert logits["no norm, rate 0.1"] == pytest.approx(5e4, rel=1e-5)
    limits = [panel.get_ylim() for panel in drawing.figure.axes[6:9]]
    assert limits[0] == limits[1] == limits[2]


def test_side_by_side_needs_two_rates(tmp_path: Path) -> None:
    store(tmp_path, "optim.lr=0.1")
    store(tmp_path, "attention=layernorm", "optim.lr=0.1")
    with pytest.raises(DoesNotFit, match="two or more rates"):
        FIGURES["side_by_side"](load_sweep(tmp_path))
