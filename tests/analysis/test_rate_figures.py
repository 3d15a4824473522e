"""Figures over rates, sizes, precisions and parts of a norm: their tables, from made-up runs with known answers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qkexp.analysis.claims import check, verify_sweep
from qkexp.analysis.figures import FIGURES, DoesNotFit, draw
from qkexp.analysis.figures.anatomy import arm
from qkexp.analysis.figures.logit_scaling import Parabola
from qkexp.analysis.figures.spikes import lags
from qkexp.analysis.figures.style import RC, rate_ticks
from qkexp.analysis.figures.three_places import PLACES
from qkexp.compose import compose_sweep, options
from qkexp.config import ConfigError, keys
from qkexp.model.vit import attention_layers, build_vit
from qkexp.naming import run_name
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import BY_NAME, NAMES, headless
from qkexp.record.load import load_sweep
from qkexp.record.run import RunWriter
from qkexp.train.events import Event

STEPS, CHANCE = 30, 2.3


def make(
    root: Path,
    *overrides: str,
    val: float | None = 0.2,
    loss: np.ndarray | None = None,
    grad: np.ndarray | None = None,
    events: tuple[tuple[str, int], ...] = (),
    status: str = "completed",
    reason: str = "",
    **metrics: tuple[float, ...],
) -> None:
    """A run of two layers; of each metric the values of both layers, at every step."""
    cfg = compose_sweep(overrides, single=True).runs[0][1]
    record = RunWriter(root / run_name(cfg), cfg, {})
    names = (*NAMES, *(n for n in metrics if n not in NAMES))
    for step in range(STEPS):
        row = {"step": step, "loss": 2.5 if loss is None else float(loss[step])}
        record.row({**row, "grad_norm": 1.0 if grad is None else float(grad[step])})
        without = headless(names)  # then the first place of the last axis is head -1
        values = torch.ones(len(names), 2, 1 + without)
        for name, pair in metrics.items():
            values[names.index(name)] = torch.tensor(pair).unsqueeze(-1)
        record.frame(Frame(step, "train", ("a", "b"), (Group((0, 1), values),), names))
    for kind, step in events:
        record.event(Event(step, kind, layer=0))
    final = {"loss": 1.0, "val_loss": val, "val_accuracy": None}
    facts = {"reason": reason, "step": STEPS, "steps": STEPS, "constant_loss": CHANCE, "final": final, "best": {}}
    record.finish({"status": status, **facts})


def table_of(name: str, root: Path) -> pd.DataFrame:
    """What is plotted, as its CSV holds it."""
    assert draw(root, [name])
    return pd.read_csv(root / "figures" / f"{name}.csv")


# ---------------------------------------------------------------- max_lr

RATES = (0.003, 0.01, 0.03, 0.1)


def grid(root: Path, variant: str, losses: tuple[float | None, ...]) -> None:
    for seed in range(3):
        for rate, loss in zip(RATES, losses, strict=True):
            make(root, f"attention={variant}", f"optim.lr={rate}", f"seed={seed}", val=loss)


def test_max_lr_tells_brackets_and_headroom_of_each_method(tmp_path: Path) -> None:
    grid(tmp_path, "none", (0.3, 0.2, 1.2, None))
    grid(tmp_path, "rmsnorm", (0.3, 0.2, 0.25, 0.4))
    table = table_of("max_lr", tmp_path)
    cells = table[table.kind == "cell"].set_index(["variant", "lr"])
    # limit: 0.2 + 0.2 (2.3 - 0.2) = 0.62
    assert cells.stable["none"].tolist() == [True, True, False, False]
    assert math.isinf(cells.val_loss["none", 0.1])
    lines = table[table.kind == "line"].set_index("variant")
    assert lines.loc["none", ["best_lr", "stable_to", "largest_stable", "first_unstable", "headroom"]].tolist() == [
        0.01, 0.01, 0.01, 0.03, 1.0,
    ]  # fmt: skip
    assert lines.stable_to["rmsnorm"] == 0.1
    assert lines.loc["rmsnorm", ["largest_stable", "headroom"]].isna().all(), "an edge of the grid is no result"


def test_max_lr_of_one_seed_has_losses_and_no_verdict(tmp_path: Path) -> None:
    for rate in RATES:
        make(tmp_path, f"optim.lr={rate}", val=0.3)
    table = table_of("max_lr", tmp_path)
    assert table[table.kind == "cell"].stable.isna().all()
    assert table[table.kind == "line"].bracket.tolist() == ["undecided: no verdict at 0.003"]


def test_of_one_seed_no_claim_about_verdicts_fails(tmp_path: Path) -> None:
    """``reproduce max_lr --quick``."""
    for variant in ("none", "rmsnorm"):
        for rate in (*RATES, 1.0):
            make(tmp_path, f"attention={variant}", f"optim.lr={rate}", val=2.3 if variant == "none" else 0.9)
    expect = compose_sweep(["experiment=max_lr"]).expect
    assert expect is not None
    verdicts = {check(load_sweep(tmp_path), spec).verdict for spec in expect["claims"]}
    assert verdicts <= {"not run", "too few seeds", "not shown at this size"}


# ---------------------------------------------------------------- sizes


def sized(root: Path, width: int, variant: str, losses: tuple[float, ...]) -> None:
    for seed in range(3):
        for rate, loss in zip(RATES, losses, strict=True):
            keys = (f"model.width={width}", f"model.heads={width // 16}", f"attention={variant}")
            make(root, *keys, f"optim.lr={rate}", f"seed={seed}", val=loss)


def test_sizes_have_a_sensitivity_each_and_ratios_at_equal_size(tmp_path: Path) -> None:
    sized(tmp_path, 32, "none", (0.4, 0.3, 0.5, 0.9))
    sized(tmp_path, 64, "none", (0.3, 0.2, 1.2, 9.0))
    sized(tmp_path, 32, "layernorm", (0.4, 0.3, 0.3, 0.3))
    sized(tmp_path, 64, "layernorm", (0.3, 0.1, 0.1, 0.2))
    table = table_of("lr_sensitivity_sizes", tmp_path)
    lines = table[table.kind == "line"].set_index(["variant", "weights"])
    small, large = 12 * 4 * 32**2, 12 * 4 * 64**2
    assert lines.lrs["none", small] == pytest.approx((0.1 + 0.2 + 0.6) / 4)
    # 9.0 is clipped at the loss of step 0, which is 2.5
    assert lines.lrs["none", large] == pytest.approx((0.1 + 1.0 + 2.3) / 4)
    assert lines.lrs_constant["none", large] == pytest.approx((0.1 + 1.0 + 2.1) / 4)
    assert lines.ratio["layernorm", large] == pytest.approx((0.1 + 1.0 + 2.3) / (0.2 + 0.1))
    assert lines.over_smaller["none", large] == pytest.approx(3.4 / 0.9)
    assert math.isnan(lines.over_smaller["none", small])


def test_one_size_is_no_figure_of_sizes(tmp_path: Path) -> None:
    grid(tmp_path, "none", (0.3, 0.2, 1.2, 0.9))
    with pytest.raises(DoesNotFit, match="2 or more sizes"):
        FIGURES["lr_sensitivity_sizes"](load_sweep(tmp_path))


# ---------------------------------------------------------------- logit scaling


def law(weights: float) -> float:
    """A power law that bends: exactly what a parabola in log-log axes can follow."""
    x = math.log10(weights / 1e5)
    return 10 ** (1.0 + 0.8 * x + 0.1 * x**2)


def test_prediction_comes_from_the_smaller_sizes_alone(tmp_path: Path) -> None:
    widths = (16, 32, 48, 64, 128)
    for width in widths:
        for seed in (0, 1):
            z = law(12 * 4 * width**2) * (2.0 if width == 128 else 1.0)
            keys = (f"model.width={width}", f"model.heads={width // 16}", f"seed={seed}")
            make(tmp_path, *keys, max_abs_logit=(z, 1e6))
    table = table_of("logit_scaling", tmp_path)
    (row,) = table[table.kind == "prediction"].to_dict("records")
    assert row["predicted"] == pytest.approx(law(12 * 4 * 128**2), rel=1e-4), "the last layer's 1e6 is not the first's"
    assert row["factor"] == pytest.approx(2.0, rel=1e-4)
    assert row["curvature"] == pytest.approx(0.2, rel=1e-2)
    middle = np.mean([math.log10(12 * 4 * w**2 / 1e5) for w in widths[:-1]])
    assert row["slope"] == pytest.approx(0.8 + 0.2 * middle, rel=1e-2)
    assert row["residual"] < 1e-4


def test_parabola_is_numpys_and_its_slope_is_at_the_mean_of_x() -> None:
    x = np.array([4.0, 4.5, 5.0, 5.2, 6.0])
    y = 2 - 0.5 * x + 0.3 * x**2
    fit = Parabola.of(x, y)
    assert fit(7.0) == pytest.approx(2 - 3.5 + 0.3 * 49)
    assert (fit.slope, fit.curvature) == (pytest.approx(-0.5 + 0.6 * x.mean()), pytest.approx(0.6))


# ---------------------------------------------------------------- precision


def test_precision_names_types_and_tells_overflow_from_a_bad_loss(tmp_path: Path) -> None:
    for kind, z, ulp in (("fp32", 9e4, 2**-7), ("bf16", 9e4, 512.0), ("bf16_pure", 8e4, 512.0)):
        make(tmp_path, f"precision={kind}", val=2.0, max_abs_logit=(10.0, z), max_logit=(9.0, z), score_ulp=(0.1, ulp))
    make(
        tmp_path, "precision=fp16", val=None, status="diverged", reason="nonfinite: loss is nan at step 9",
        max_abs_logit=(10.0, 9e4), max_logit=(10.0, 6e4), score_ulp=(0.1, 32.0),
    )  # fmt: skip
    table = table_of("precision", tmp_path)
    runs = table[table.kind == "run"].set_index("precision")
    assert runs.overflows.to_dict() == {"fp32": False, "bf16": False, "bf16_pure": False, "fp16": True}
    assert runs.ulp["bf16"] == 512.0
    assert runs.resolution["bf16"] == pytest.approx((512 / 9e4 + 0.1 / 10) / 2, rel=1e-5), "of both layers"
    assert math.isinf(runs.val_loss["fp16"])
    curves = table[table.kind == "curve"]
    assert set(curves.precision) == set(runs.index)
    assert curves[curves.precision == "fp16"].max_abs_logit.max() == pytest.approx(9e4)
    assert runs.steps_beyond["bf16"] == STEPS
    assert runs.steps_beyond["fp16"] == 0, "a score under -65,504 is -inf, and only loses its weight"


# ---------------------------------------------------------------- anatomy


@pytest.mark.parametrize(
    ("overrides", "name", "bound"),
    [
        (["attention.norm=rms"], "RMS, gain frozen", 4.0),
        (["attention.norm=rms", "attention.center=true", "attention.gain=shared"], "LayerNorm, gain learned", 4.0),
        (
            ["attention.norm=rms", "attention.gain=shared", "attention.gain_offset=1", "optim.gain_decay=0.1"],
            "RMS, gain decayed",
            4.0,
        ),
        (["attention.norm=l2", "attention.scale=fixed", "attention.scale_init=4"], "L2", 4.0),
        (["attention.norm=l2", "attention.scale=learned", "attention.scale_init=4"], "L2, scale learned", 4.0),
        (["attention.norm=rms", "attention.scale=one"], "RMS, gain frozen, no 1/√d", 16.0),
        (["attention.norm=l2", "attention.scale=fixed", "attention.scale_init=0.25"], "L2, cosine / √d", 0.25),
    ],
)
def test_an_arms_name_agrees_with_the_largest_score_that_its_model_can_make(
    overrides: list[str], name: str, bound: float
) -> None:
    cfg = compose_sweep([*overrides, "attention.backend=explicit"], single=True).runs[0][1]
    assert arm(cfg) == name
    model = build_vit(cfg, image_size=8, channels=1, classes=10)
    layer = next(iter(attention_layers(model).values()))
    x = torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(0))
    q = layer.q_norm(x)  # a query that is its own key: the cosine is 1
    scale = layer.scale if isinstance(layer.scale, float) else float(layer.scale)
    largest = float((q * q).sum(-1).max().detach()) * scale
    assert largest == pytest.approx(bound, rel=0.02)


def test_anatomy_reads_the_start_from_the_first_step_and_keeps_head_widths_apart(tmp_path: Path) -> None:
    for heads in (4, 1):
        for norm in ("none", "rms"):
            keys = (f"attention.norm={norm}", f"model.heads={heads}", "optim.lr=0.01")
            make(tmp_path, *keys, entropy_frac=(0.8, 0.9), max_abs_logit=(3.0 * heads, 2.0))
    table = table_of("anatomy", tmp_path)
    runs = table[table.kind == "run"].set_index(["norm", "head_width"])
    assert sorted(set(runs.index.get_level_values(1))) == [16, 64]
    assert runs.first_entropy["RMS", 16] == pytest.approx(0.85)
    assert runs.first_logit["RMS", 16] == 12.0
    assert runs.first_logit["no norm", 64] == 3.0


# ---------------------------------------------------------------- three places


def test_three_places_takes_the_largest_over_steps_and_layers(tmp_path: Path) -> None:
    assert "block_out_rms" in BY_NAME
    for block in ("pre", "none"):
        for variant in ("none", "rmsnorm_softcap"):
            keys = (f"model.block_norm={block}", f"attention={variant}", "optim.lr=0.1")
            z = 900.0 if variant == "none" else 4.0
            make(tmp_path, *keys, block_out_rms=(2.0, 7.0), max_abs_logit=(z, 1.0), max_logit_capped=(3.0, 50.0))
    table = table_of("three_places", tmp_path)
    runs = table[table.kind == "run"].set_index(["block_norm", "variant"])
    assert (runs.residual == 7.0).all()
    assert runs.raw_logit["pre", "none"] == 900.0
    assert runs.raw_logit["none", "rmsnorm_softcap"] == 4.0
    assert (runs.capped_logit == 50.0).all()


def test_block_norms_of_every_kind_have_a_name() -> None:
    (choices,) = (k.meta["choices"] for k in keys() if k.name == "model.block_norm")
    assert set(PLACES) == set(choices)


# ---------------------------------------------------------------- spikes


@pytest.mark.parametrize("factor", [1.02, 1.5, 10**0.5])
def test_the_numbers_of_rates_never_touch(factor: float) -> None:
    """A bisection's rates lie as close as it is fine."""
    rates = [1e-3 * factor**i for i in range(9)]
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(6.4, 3.0))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_xlim(rates[0] / 1.45, rates[-1] * 1.45)
        rate_ticks(axes, rates)
        figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(axes.get_xticks()) == len(rates)
    assert axes.get_xticklabels()[0].get_text() == "0.001"
    assert len(boxes) == len(rates) or factor < 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_a_lag_is_positive_where_the_gradient_spikes_first() -> None:
    loss, grad = np.array([100, 200, 300, 400]), np.array([97, 205, 340, 398, 402])
    assert lags(loss, grad).tolist() == [3, -5, 2], "300 has none within 10 steps; of 398 and 402 the earlier counts"


def test_spikes_pool_pairs_of_all_runs_of_a_variant(tmp_path: Path) -> None:
    for precision in ("bf16", "fp32"):
        spikes = (("loss_spike", 20), ("grad_spike", 18)) if precision == "bf16" else (("loss_spike", 25),)
        make(tmp_path, f"precision={precision}", "optim.lr=0.1", events=spikes)
        make(tmp_path, f"precision={precision}", "attention=layernorm", "optim.lr=0.1")
    table = table_of("spikes", tmp_path)
    runs = table[table.kind == "run"].set_index(["variant", "precision"])
    assert runs.loss_spikes["none", "fp32"] == 1
    assert runs.matched.tolist().count(1) == 1
    pool = table[table.kind == "pool"].set_index("variant")
    assert (pool.matched["none"], pool.lag["none"], pool.gradient_first["none"]) == (1, 2.0, 1.0)
    assert math.isnan(pool.lag["layernorm"]), "no pair has no lag"


# ---------------------------------------------------------------- the experiments themselves


@pytest.mark.parametrize(
    "name", ["max_lr", "lr_sensitivity", "logit_scaling", "precision", "anatomy", "three_places", "spikes"]
)
def test_experiments_name_figures_that_exist_and_keep_their_choosing_seeds_apart(name: str) -> None:
    assert name in options("experiment")
    composed = compose_sweep([f"experiment={name}"])
    assert composed.figures
    assert set(composed.figures) <= set(FIGURES)
    assert composed.expect is not None
    used = {cfg.seed for _, cfg in composed.runs}
    assert len(used) >= 3
    assert not used & set(composed.expect["chosen_on"]["seed"])
    for spec in composed.expect["claims"]:
        assert spec.get("figure", "max_lr") in FIGURES


def test_refusals_of_the_new_keys() -> None:
    for overrides, key in (
        (["optim.gain_decay=0.1"], "optim.gain_decay"),
        (["attention.norm=center", "attention.gain=shared"], "attention.gain"),
        (["attention.norm=center", "attention.center=true"], "attention.center"),
    ):
        with pytest.raises(ConfigError) as error:
            compose_sweep(overrides, single=True)
        assert error.value.key == key


def test_no_figure_writes_what_json_cannot_hold(tmp_path: Path) -> None:
    grid(tmp_path, "none", (0.3, 0.2, 1.2, None))
    spec = {
        "claim": "c",
        "figure": "max_lr",
        "where": {"kind": "cell", "lr": 0.03},
        "metric": "stable",
        "is": "== false",
    }
    result = check(load_sweep(tmp_path), spec)
    assert (result.verdict, result.value) == ("pass", False)
    (tmp_path / "expect.yaml").write_text(json.dumps({"claims": [spec]}))
    verify_sweep(tmp_path)
    assert json.loads((tmp_path / "claims.json").read_text())["claims"][0]["value"] is False
