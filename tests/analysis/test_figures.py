"""Figures show exactly the recorded numbers, keep failures in sight and need no screen."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from qkexp.analysis.figures import FIGURES, draw, style
from qkexp.analysis.figures.selection import DoesNotFit, cells, keys_per_row, model_text, recipe_text
from qkexp.analysis.figures.style import LOOKS, canvas, columns_that_fit, look
from qkexp.analysis.figures.vit22b_panels import shown_layers, spread
from qkexp.compose import compose_sweep, options
from qkexp.config import UserError, to_typed
from qkexp.naming import run_name
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.load import load_sweep
from qkexp.record.run import MEASURED, RunWriter
from qkexp.train.events import Event

ATTENTION = {
    "none": {},
    "layernorm": {"norm": "rms", "center": True, "gain": "shared"},
    "rmsnorm": {"norm": "rms", "gain": "shared"},
    "softcap": {"softcap": 50.0},
}
CHANCE = math.log(10)
KEYS = 17


def frame(step: int, layers: int, heads: int, **values: float) -> Frame:
    """A probed step in which metric m of layer l and head h is ``values[m] * (1 + l) + h / 100``."""
    table = torch.zeros(len(NAMES), layers, heads)
    for name, value in values.items():
        for layer in range(layers):
            table[NAMES.index(name), layer] = value * (1 + layer) + torch.arange(heads) / 100
    return Frame(step, "train", tuple(f"blocks.{i}" for i in range(layers)), (Group(tuple(range(layers)), table),))


def make_run(
    directory: Path,
    variant: str = "none",
    *,
    lr: float = 1e-2,
    seed: int = 0,
    steps: int = 30,
    ended: int | None = None,
    val_loss: float | None = 0.5,
    status: str = "completed",
    loss: np.ndarray | None = None,
    grad_norm: np.ndarray | None = None,
    attn_max: np.ndarray | None = None,
    collapsed: tuple[int, ...] = (),
    layers: int = 3,
    finish: bool = True,
    probed: bool = True,
    **keys: object,
) -> Path:
    """A run of made-up numbers, written as the loop would."""
    cfg = to_typed(
        {
            "seed": seed,
            "attention": ATTENTION[variant],
            "optim": {"lr": lr, "warmup": steps},
            "train": {"steps": steps, **keys},
            "model": {"width": 64, "depth": layers, "heads": 2, "patch": 2},
        }
    )
    writer = RunWriter(directory / run_name(cfg), cfg, {})
    count = steps if ended is None else ended
    loss = np.linspace(2.0, 1.0, steps) + seed if loss is None else loss
    grad_norm = np.full(steps, 1.0 + seed) if grad_norm is None else grad_norm
    attn_max = np.full(steps, 0.1 + seed / 10) if attn_max is None else attn_max
    for step in range(count):
        row = dict.fromkeys(MEASURED, 0.0)
        row |= {"step": step, "loss": loss[step], "grad_norm": grad_norm[step], "param_norm": 10.0 + seed}
        writer.row(row)
        if not probed:
            continue
        entropy = 1.0 + seed / 10
        writer.frame(
            frame(
                step,
                layers,
                2,
                max_abs_logit=5.0 + seed,
                attn_max_mean=float(attn_max[step]),
                entropy_mean=entropy,
                entropy_frac=entropy / math.log(KEYS),
            )
        )
    for layer in collapsed:
        writer.event(Event(5, "layer_collapse", layer, value=0.0, threshold=0.05))
    if finish:
        final = {
            "loss": float(np.mean(loss[:count][-20:])) if count else None,
            "val_loss": val_loss,
            "val_accuracy": None,
        }
        outcome = {"status": status, "reason": "", "step": count, "steps": steps, "constant_loss": CHANCE}
        writer.finish({**outcome, "final": final, "best": {}})
    return writer.directory


def nonfinite_run(directory: Path, variant: str = "none", **more: object) -> Path:
    return make_run(directory, variant, ended=12, val_loss=None, status="diverged", **more)  # type: ignore[arg-type]


def csv(directory: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(directory / "figures" / f"{name}.csv")


# ---------------------------------------------------------------- panels


def test_panels_csv_holds_median_and_range_over_seeds(tmp_path: Path) -> None:
    for seed in (0, 1, 3):
        make_run(tmp_path, seed=seed)
    draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    curves = table[(table.kind == "curve") & (table.step == 25)].set_index(["metric", "layer"])
    first_head_mean = 0.005  # heads 0 and 1 add 0 and 0.01
    loss = np.linspace(2.0, 1.0, 30)[6:26].mean()  # steps 6 … 25: the last 20
    expected = {
        ("loss", -1): (loss + 1, loss, loss + 3),
        ("grad_norm", -1): (2.0, 1.0, 4.0),
        ("param_norm", -1): (11.0, 10.0, 13.0),
        ("max_abs_logit", 0): (6.01, 5.01, 8.01),  # the maximum over heads
        ("max_abs_logit", 2): (18.01, 15.01, 24.01),
        ("attn_max_mean", 1): (0.4 + first_head_mean, 0.2 + first_head_mean, 0.8 + first_head_mean),
        ("entropy_mean", 0): (1.1 + first_head_mean, 1.0 + first_head_mean, 1.3 + first_head_mean),
    }
    for key, (middle, low, high) in expected.items():
        row = curves.loc[key]
        assert (row["value"], row["low"], row["high"]) == pytest.approx((middle, low, high), rel=1e-5), key
        assert row["seeds"] == 3


def test_panels_show_none_against_layernorm_at_the_highest_rate(tmp_path: Path) -> None:
    for variant in ("none", "layernorm", "softcap"):
        for lr in (1e-2, 9e-2, 1e-1):  # as text, 1e-2 < 9e-2 would still hold, but 0.1 < 0.09 would not
            make_run(tmp_path, variant, lr=lr)
    draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    curves = table[table.kind == "curve"]
    assert set(curves.variant) == {"none", "layernorm"}
    assert set(curves.lr) == {0.1}


@pytest.mark.parametrize("present", [["none"], ["layernorm"], ["rmsnorm"], ["softcap", "none"]])
def test_panels_use_what_is_there(tmp_path: Path, present: list[str]) -> None:
    for variant in present:
        make_run(tmp_path, variant)
    assert draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    assert set(table[table.kind == "curve"].variant) == set(present)


def test_run_that_ended_early_is_marked_where_it_ended(tmp_path: Path) -> None:
    make_run(tmp_path, seed=0)
    make_run(tmp_path, seed=1)
    nonfinite_run(tmp_path, seed=2)
    draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    ended = table[table.kind == "ended"]
    assert set(ended.metric) == {"loss", "grad_norm", "param_norm", "max_abs_logit", "attn_max_mean", "entropy_mean"}
    assert set(ended.step) == {11}
    assert set(ended.seed) == {2}
    loss = ended[ended.metric == "loss"].value.item()
    assert loss == pytest.approx(np.linspace(2.0, 1.0, 30)[:12].mean() + 2)
    late = table[(table.kind == "curve") & (table.metric == "loss") & (table.step == 20)]
    assert late.seeds.item() == 2


def test_curve_of_few_survivors_is_not_drawn_as_the_median(tmp_path: Path) -> None:
    make_run(tmp_path, seed=0)
    nonfinite_run(tmp_path, seed=1)
    nonfinite_run(tmp_path, seed=2)
    draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    assert table[table.kind == "curve"].step.max() == 11


def test_onsets_are_medians_over_seeds_and_never_counts(tmp_path: Path) -> None:
    steps = 200
    down, up = np.linspace(2.0, 0.5, 100), np.linspace(0.5, 2.5, 100)
    grad_norm = np.where(np.arange(steps) < 150, 1.0, 100.0)
    for seed, saturated in ((0, 40), (1, 60), (2, None)):
        at = steps if saturated is None else saturated
        attn_max = np.where(np.arange(steps) < at, 0.1, 0.95)
        make_run(
            tmp_path, seed=seed, steps=steps, loss=np.concatenate([down, up]), grad_norm=grad_norm, attn_max=attn_max
        )
    draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    onsets = table[table.kind == "onset"].set_index("metric")
    saturates = onsets.loc["saturates"]
    assert (saturates["step"], saturates["low"], saturates["high"], saturates["seeds"]) == (60, 40, 60, 2)
    smoothed = pd.Series(np.concatenate([down, up])).rolling(20, min_periods=1).mean()
    assert onsets.loc["turns", "step"] == smoothed.idxmin()
    assert onsets.loc["explodes", "step"] == 150  # one step of 100 lifts the mean of 20 to 5.95


def test_a_run_that_trains_has_no_onsets(tmp_path: Path) -> None:
    make_run(tmp_path, loss=np.linspace(2.0, 1.0, 30))
    draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    assert not (table.kind == "onset").any()


def test_uniform_entropy_and_chance_come_from_the_runs(tmp_path: Path) -> None:
    run = load_sweep(make_run(tmp_path).parent)
    assert keys_per_row(next(iter(run.all.values()))) == KEYS
    draw(tmp_path, ["vit22b_panels"])
    table = csv(tmp_path, "vit22b_panels")
    levels = table[table.kind == "level"].set_index("metric").value
    assert levels["entropy_mean"] == pytest.approx(math.log(KEYS))
    assert levels["loss"] == pytest.approx(CHANCE)


def test_runs_that_were_not_probed_show_their_scalars(tmp_path: Path) -> None:
    make_run(tmp_path, probed=False)
    drawing = FIGURES["vit22b_panels"](load_sweep(tmp_path))
    assert set(drawing.table[drawing.table.kind == "curve"].metric) == {"loss", "grad_norm", "param_norm"}
    assert [t.get_text() for t in drawing.figure.axes[3].texts] == ["not measured"]
    with pytest.raises(DoesNotFit, match="no probed steps"):
        FIGURES["heatmaps"](load_sweep(tmp_path))


def test_alive_runs_are_drawn_as_far_as_they_are(tmp_path: Path) -> None:
    directory = make_run(tmp_path, finish=False, ended=0)
    assert not (directory / "outcome.json").exists()
    make_run(tmp_path, "layernorm", seed=1)
    table = FIGURES["vit22b_panels"](load_sweep(tmp_path)).table
    assert set(table[table.kind == "curve"].variant) == {"layernorm"}


def test_first_middle_and_last_layer() -> None:
    assert shown_layers(np.arange(12)) == {0: "first", 6: "middle", 11: "last"}
    assert shown_layers(np.arange(2)) == {0: "first", 1: "last"}
    assert shown_layers(np.arange(1)) == {0: "first"}


def test_numbers_of_near_onsets_move_apart() -> None:
    places = spread(np.array([165.0, 185.0, 380.0]), 75)
    assert np.diff(places).min() >= 75 - 1e-6
    assert places[2] == 380
    assert spread(np.array([30.0, 10.0]), 5).tolist() == [30, 10]


# ---------------------------------------------------------------- learning rates


def sensitivity_sweep(directory: Path) -> None:
    """Three seeds of two variants at rates whose text order is not their numeric order."""
    losses = {
        ("rmsnorm", 9e-3): (0.1, 0.2, 0.3), ("rmsnorm", 1e-1): (0.3, 0.4, 0.2), ("rmsnorm", 3e-2): (0.1, 0.1, 0.3),
        ("none", 9e-3): (0.2, 0.3, 0.1), ("none", 3e-2): (1.5, 1.0, 0.9), ("none", 1e-1): (None, 2.2, None),
    }  # fmt: skip
    for (variant, lr), values in losses.items():
        for seed, value in enumerate(values):
            if value is None:
                nonfinite_run(directory, variant, lr=lr, seed=seed)
            else:
                collapsed = (0, 2) if (variant, lr, seed) == ("none", 3e-2, 1) else ()
                make_run(directory, variant, lr=lr, seed=seed, val_loss=value, collapsed=collapsed)


def test_sensitivity_csv_holds_every_run_and_the_medians(tmp_path: Path) -> None:
    sensitivity_sweep(tmp_path)
    draw(tmp_path, ["lr_sensitivity"])
    table = csv(tmp_path, "lr_sensitivity")
    assert (table.kind == "run").sum() == 18
    medians = table[table.kind == "median"].set_index(["variant", "lr"])
    assert medians.loc[("rmsnorm", 0.009), "val_loss"] == pytest.approx(0.2)
    assert medians.loc[("none", 0.03), "val_loss"] == pytest.approx(1.0)
    assert medians.loc[("none", 0.1), "val_loss"] == math.inf
    # the smallest median is 0.1, so the limit is 0.1 + 0.2 (ln 10 - 0.1)
    levels = table.set_index("kind").val_loss
    assert levels["limit"] == pytest.approx(0.1 + 0.2 * (CHANCE - 0.1))
    assert levels["chance"] == pytest.approx(CHANCE)
    stable = medians.stable.astype(str)
    assert stable[("rmsnorm", 0.1)] == "True"
    assert stable[("none", 0.03)] == "False"
    assert stable[("none", 0.1)] == "False"


def test_failed_and_collapsed_runs_stay_in_the_figure(tmp_path: Path) -> None:
    sensitivity_sweep(tmp_path)
    drawing = FIGURES["lr_sensitivity"](load_sweep(tmp_path))
    runs = drawing.table[drawing.table.kind == "run"]
    failed = runs[runs.failed]
    assert sorted(zip(failed.variant, failed.lr, failed.seed, strict=True)) == [("none", 0.1, 0), ("none", 0.1, 2)]
    assert runs[runs.collapsed_layers > 0].collapsed_layers.tolist() == [2]
    axes = drawing.figure.axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "x"]
    assert len(marks) == 2
    highest = max(v for v in runs.val_loss if math.isfinite(v))
    for mark in marks:
        assert highest < mark.get_ydata()[0] < axes.get_ylim()[1]
    assert sum(line.get_marker() == "v" for line in axes.lines) == 1


def test_rates_are_ordered_as_numbers(tmp_path: Path) -> None:
    sensitivity_sweep(tmp_path)
    drawing = FIGURES["lr_sensitivity"](load_sweep(tmp_path))
    for kind in ("run", "median"):
        rows = drawing.table[(drawing.table.kind == kind) & (drawing.table.variant == "rmsnorm")]
        assert list(dict.fromkeys(rows.lr)) == [0.009, 0.03, 0.1]
    axes = drawing.figure.axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.009", "0.03", "0.1"]


def test_two_seeds_give_no_verdict(tmp_path: Path) -> None:
    for lr in (1e-2, 1e-1):
        for seed in (0, 1):
            make_run(tmp_path, lr=lr, seed=seed)
    draw(tmp_path, ["lr_sensitivity"])
    table = csv(tmp_path, "lr_sensitivity")
    assert table.stable.isna().all()
    assert "limit" not in set(table.kind)


def test_unfinished_runs_are_no_results(tmp_path: Path) -> None:
    for lr in (1e-2, 1e-1):
        make_run(tmp_path, lr=lr)
    make_run(tmp_path, lr=1e-1, seed=1, finish=False)
    make_run(tmp_path, lr=1e-1, seed=2, status="interrupted", val_loss=None)
    make_run(tmp_path, lr=1e-1, seed=3, status="failed", val_loss=None)
    drawing = FIGURES["lr_sensitivity"](load_sweep(tmp_path))
    runs = drawing.table[drawing.table.kind == "run"]
    assert runs.seed.tolist() == [0, 0, 3]
    assert runs.status.tolist() == ["completed", "completed", "failed"]
    medians = drawing.table[drawing.table.kind == "median"]
    assert medians.seeds.tolist() == [1, 1]  # a crash is no seed


def test_sensitivity_needs_two_rates(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(DoesNotFit, match="two or more"):
        FIGURES["lr_sensitivity"](load_sweep(tmp_path))


# ---------------------------------------------------------------- heat maps


def test_heatmaps_hold_the_first_seed_of_every_variant(tmp_path: Path) -> None:
    for variant in ("softcap", "none"):
        for seed in (1, 2):
            make_run(tmp_path, variant, lr=1e-1, seed=seed, layers=4, steps=6)
    make_run(tmp_path, "none", lr=1e-2, seed=1, layers=4, steps=6)
    draw(tmp_path, ["heatmaps"])
    table = csv(tmp_path, "heatmaps")
    assert len(table) == 2 * 6 * 4
    assert list(dict.fromkeys(table.variant)) == ["none", "softcap"]
    assert set(table.seed) == {1}
    assert set(table.lr) == {0.1}
    row = table[(table.variant == "softcap") & (table.step == 3) & (table.layer == 2)]
    assert row.max_abs_logit.item() == pytest.approx(6.0 * 3 + 0.01)
    assert row.entropy_frac.item() == pytest.approx(1.1 / math.log(KEYS) * 3 + 0.005, rel=1e-5)


def test_heatmap_columns_share_one_scale(tmp_path: Path) -> None:
    make_run(tmp_path, "none", seed=0, steps=5)
    make_run(tmp_path, "softcap", seed=7, steps=5)
    figure = FIGURES["heatmaps"](load_sweep(tmp_path)).figure
    maps = [axes.collections[0] for axes in figure.axes[:4]]
    assert maps[0].norm is maps[2].norm
    assert (maps[1].norm.vmin, maps[1].norm.vmax) == (maps[3].norm.vmin, maps[3].norm.vmax)
    assert maps[1].norm.vmin == pytest.approx(5.01)
    assert maps[1].norm.vmax == pytest.approx(12 * 3 + 0.01)


# ---------------------------------------------------------------- all figures


def test_plan_chooses_figures_and_unfit_ones_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path)
    plan = {"figures": ["lr_sensitivity", "heatmaps", "of_a_later_version"], "runs": [{"name": run.name}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    paths = draw(tmp_path)
    assert paths == [tmp_path / "figures" / "heatmaps.png"]
    assert {p.name for p in paths[0].parent.iterdir()} == {"heatmaps.png", "heatmaps.pdf", "heatmaps.csv"}
    assert [r.getMessage() for r in caplog.records] == [
        "figure lr_sensitivity skipped: needs runs at two or more learning rates",
        "figure of_a_later_version skipped: no such figure in this version",
    ]


def test_of_figures_that_nobody_asked_for_only_those_that_fit_are_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path)
    assert "heatmaps" in {path.stem for path in draw(tmp_path)}
    assert not caplog.records
    make_run(tmp_path / "bare", ended=0, val_loss=None, status="diverged")
    assert draw(tmp_path / "bare") == []
    assert "figure heatmaps skipped" in caplog.text


def test_unknown_name_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(UserError, match=r"panels: no such figure; accepted: vit22b_panels, lr_sensitivity, heatmaps"):
        draw(tmp_path, ["panels"])


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "timeline"])  # which draws one run
def test_runs_that_differ_in_another_key_are_not_mixed(tmp_path: Path, name: str) -> None:
    for batch_size in (32, 64):
        for lr in (1e-2, 1e-1):
            make_run(tmp_path, lr=lr, batch_size=batch_size)
    other = {"score_geometry": "it shows formulas", "cause": "optim.qk_lr_scale", "branches": "no branches"}
    with pytest.raises(DoesNotFit, match=other.get(name, r"train\.batch_size")):
        FIGURES[name](load_sweep(tmp_path))


@pytest.mark.parametrize("name", FIGURES)
def test_only_runs_that_ended_at_once(tmp_path: Path, name: str) -> None:
    for lr in (1e-2, 1e-1):
        make_run(tmp_path, lr=lr, ended=0, val_loss=None, status="diverged", loss=np.ones(30))
    try:
        FIGURES[name](load_sweep(tmp_path))
    except DoesNotFit:
        assert name != "lr_sensitivity"  # there, a failure is what is to be seen


def test_a_variant_has_one_colour_everywhere(tmp_path: Path) -> None:
    sensitivity_sweep(tmp_path)
    sweep = load_sweep(tmp_path)
    panels = FIGURES["vit22b_panels"](sweep).figure
    rates = FIGURES["lr_sensitivity"](sweep).figure
    for variant in ("none", "rmsnorm"):
        colours = set()
        for figure in (panels, rates):
            entries = figure.legends[0].legend_handles
            labels = [text.get_text() for text in figure.legends[0].get_texts()]
            colours.add(to_hex(entries[labels.index(look(variant).label)].get_color()))
        assert colours == {look(variant).colour.lower()}


def test_every_preset_has_a_look_of_its_own() -> None:
    for name in options("attention"):
        _, cfg = compose_sweep([f"attention={name}"], single=True).runs[0]
        assert any(run_name(cfg).startswith(f"{known}-lr") for known in LOOKS), name


def test_looks_differ_and_depend_on_the_name_alone() -> None:
    assert len({k.colour for k in LOOKS.values()}) == len(LOOKS)
    assert len({k.marker for k in LOOKS.values()}) == len(LOOKS)
    assert look("layernorm_axis-all") == look("layernorm_axis-all")
    assert look("layernorm_axis-all").colour not in {k.colour for k in LOOKS.values()}


def test_drawing_leaves_the_callers_settings_alone(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = dict(matplotlib.rcParams)
    draw(tmp_path, ["heatmaps"])
    assert dict(matplotlib.rcParams) == before


def test_captions_state_the_configuration(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1000, ended=1, clip_norm=1.0)
    run = next(iter(load_sweep(tmp_path).all.values()))
    assert model_text(run, 17) == (
        "ViT of width 64 and depth 3 (2 heads, 17 tokens, 0.15 M weights in its blocks) on digits"
    )
    assert recipe_text(run) == (
        "AdamW, batch 64, no weight decay, clipping at 1, BF16 autocast; "
        "the learning rate rises linearly from 0 over the whole run of 1,000 steps"
    )


def test_tables_of_unneeded_runs_are_not_read(tmp_path: Path) -> None:
    for lr in (1e-2, 1e-1):
        for seed in (0, 1):
            make_run(tmp_path, lr=lr, seed=seed)
    sweep = load_sweep(tmp_path)
    FIGURES["heatmaps"](sweep)
    read = {(r.lr, r.seed) for r in sweep.all.values() if vars(r).keys() & {"attention", "layers"}}
    assert read == {(0.1, 0)}
    assert set(cells(sweep)) == {("none", 0.01), ("none", 0.1)}


def test_a_stale_display_does_not_matter(tmp_path: Path) -> None:
    make_run(tmp_path)
    code = (
        "import sys; from pathlib import Path; from qkexp.analysis.figures import draw; print(draw(Path(sys.argv[1])))"
    )
    environment = {**os.environ, "DISPLAY": "localhost:64.0", "MPLBACKEND": "TkAgg"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "vit22b_panels.png" in done.stdout


@pytest.mark.parametrize("width", [4.0, 6.4, 10.0])
def test_a_legend_of_every_look_fits_the_width_that_its_columns_were_chosen_for(width: float) -> None:
    with matplotlib.rc_context(style.RC):
        handles = [Line2D([], [], marker=k.marker, label=k.label) for k in LOOKS.values()]
        columns = columns_that_fit(handles, width, 4)
        rows = -(-len(handles) // columns)
        sheet = canvas(1, 1, panel=(width, 2.0), paragraphs=["below"], legend_rows=rows)
        sheet.legend(handles, columns)
        sheet.figure.draw_without_rendering()
        box = sheet.figure.legends[0].get_window_extent()
    assert (box.x0 >= 0, box.x1 <= sheet.figure.bbox.width) == (True, True)
    assert columns == {4.0: 1, 6.4: 3, 10.0: 4}[width]  # and no fewer than need be
