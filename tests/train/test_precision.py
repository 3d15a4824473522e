"""Precisions: where each dtype really is, what a scaler may skip, and what pure BF16 loses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from qkexp import load_run
from qkexp.compose import compose_sweep
from qkexp.config import ConfigError, RunConfig
from qkexp.model.vit import build_vit
from qkexp.record.load import Run
from qkexp.sweep.job import execute
from qkexp.train.dtypes import measure
from qkexp.train.optim import Updater
from qkexp.train.precision import check_machine, warnings
from qkexp.train.schedule import learning_rate

SMALL = ["model.width=16", "model.depth=2", "model.heads=2", "train.batch_size=16", "device=cpu"]


def config(*overrides: str) -> RunConfig:
    return compose_sweep([*SMALL, "train.steps=12", *overrides], single=True).runs[0][1]


def trained(directory: Path, *overrides: str) -> Run:
    assert execute(config(*overrides), directory, {}) == 0
    return load_run(directory)


# ---------------------------------------------------------------- where each dtype is

FP32 = dict.fromkeys(
    ("weights", "gradients", "linear", "block_norm", "qk_norm", "scores", "softmax", "attention_weights", "output"),
    "float32",
)


def mixed(low: str) -> dict[str, str]:
    return {**FP32, **dict.fromkeys(("linear", "scores", "attention_weights", "output"), low)}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("precision=fp32",), FP32),
        (("precision=bf16",), mixed("bfloat16")),
        (("precision=fp16",), mixed("float16")),
        (("precision=bf16", "attention=layernorm"), mixed("bfloat16")),
        (("precision=bf16", "attention.score_dtype=fp32"), {**mixed("bfloat16"), "scores": "float32"}),
        (("precision=bf16", "attention.norm_dtype=compute"), {**mixed("bfloat16"), "qk_norm": "bfloat16"}),
        (
            ("precision=bf16_pure",),
            {**dict.fromkeys(FP32, "bfloat16"), "qk_norm": "float32", "softmax": "float32"},
        ),
    ],
    ids=str,
)
def test_the_dry_pass_finds_every_dtype_where_it_is(tmp_path, overrides, expected):
    norm = () if any("attention=" in o for o in overrides) else ("attention=rmsnorm",)
    run = trained(tmp_path, *norm, *overrides, "train.steps=1")
    found = json.loads((tmp_path / "provenance.json").read_text())["dtypes"]
    assert found == {**expected, "optimizer_state": expected["weights"]}
    assert len(run.scalars) == 1


def test_the_dry_pass_sees_the_kernel_that_the_batch_gets_and_names_a_fused_one(tmp_path):
    """Above 2^18 scores the CPU's own BF16 softmax is taken: two images would not have shown it."""
    wide = ("data=synthetic", "model.patch=2", "train.batch_size=8", "train.steps=1")
    trained(tmp_path / "large", *wide)
    assert json.loads((tmp_path / "large" / "provenance.json").read_text())["dtypes"]["softmax"] == "bfloat16"
    trained(tmp_path / "fused", "attention.backend=sdpa", "train.steps=1")
    assert "scaled_dot_product" in json.loads((tmp_path / "fused" / "provenance.json").read_text())["dtypes"]["scores"]


def test_a_block_without_norms_has_no_type_of_them(tmp_path):
    trained(tmp_path, "model.block_norm=none", "train.steps=1")
    found = json.loads((tmp_path / "provenance.json").read_text())["dtypes"]
    assert (found["block_norm"], found["qk_norm"]) == ("-", "-")


def test_the_dry_pass_leaves_gradients_as_they_are():
    cfg = config()
    vit = build_vit(cfg, image_size=8, channels=1, classes=10)
    for p in vit.parameters():
        p.grad = torch.ones_like(p)
    measure(vit, torch.ones(2, 1, 8, 8), cfg)
    assert all((p.grad == 1).all() for p in vit.parameters())


def test_the_dry_pass_changes_no_number(tmp_path, monkeypatch):
    overrides = ("model.dropout=0.1", "train.steps=3")
    watched = trained(tmp_path / "a", *overrides).scalars.loss
    monkeypatch.setattr("qkexp.train.loop.measure", lambda *_: {})
    assert watched.tolist() == trained(tmp_path / "b", *overrides).scalars.loss.tolist()


# ---------------------------------------------------------------- fp16: the scaler


def overflow(monkeypatch: pytest.MonkeyPatch, when: Any) -> None:
    """Make the gradient of the head infinite at the attempts (counted from 0) for which ``when`` says so."""
    attempts = iter(range(10_000))

    def build(*args: Any, **kwargs: Any) -> torch.nn.Module:
        vit = build_vit(*args, **kwargs)
        vit.head.weight.register_hook(lambda g: g * math.inf if when(next(attempts)) else g)
        return vit

    monkeypatch.setattr("qkexp.train.loop.build_vit", build)
    monkeypatch.setattr("qkexp.train.loop.measure", lambda *_: {})


def test_an_overflowing_step_is_taken_again_at_half_the_scale_and_counted(tmp_path, monkeypatch):
    plain = trained(tmp_path / "plain", "precision=fp16").scalars
    overflow(monkeypatch, lambda attempt: attempt in (0, 1, 7))  # twice at step 0, once at step 5
    run = trained(tmp_path / "overflow", "precision=fp16", "optim.warmup=4")
    rows, cfg = run.scalars, run.typed
    assert rows.step.tolist() == list(range(12))
    assert rows.skipped_steps.tolist() == [2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert rows.loss_scale.tolist() == [2.0**14] * 5 + [2.0**13] * 7
    assert rows.lr.tolist() == [learning_rate(s, 12, cfg.optim) for s in range(12)], "the schedule follows real steps"
    assert rows.loss[0] == plain.loss[0]
    assert rows.grad_norm[0] == pytest.approx(plain.grad_norm[0], rel=0.02), "measured without the scale"
    assert run.outcome["status"] in ("completed", "diverged")
    assert not run.outcome["reason"].startswith("nonfinite")


def test_a_gradient_that_overflows_at_every_scale_ends_the_run_and_is_not_hidden_as_skipped(tmp_path, monkeypatch):
    overflow(monkeypatch, lambda attempt: attempt >= 3)
    run = trained(tmp_path, "precision=fp16")
    assert run.outcome["status"] == "diverged"
    assert "grad_norm is" in run.outcome["reason"]
    assert "at step 3" in run.outcome["reason"]
    assert len(run.scalars) == 3


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16_pure"])
def test_nothing_but_fp16_skips_a_step(tmp_path, monkeypatch, precision):
    overflow(monkeypatch, lambda attempt: attempt == 3)
    run = trained(tmp_path, f"precision={precision}")
    assert run.outcome["status"] == "diverged"
    assert len(run.scalars) == 3
    assert run.scalars.skipped_steps.isna().all()
    assert run.scalars.loss_scale.isna().all()


# ---------------------------------------------------------------- pure BF16


def test_pure_bf16_leaves_gains_at_one_where_float32_weights_move_and_says_how_many_moved(tmp_path):
    keys = ("attention=rmsnorm", "optim.lr=1e-3", "optim.schedule=constant")
    gains = {}
    for precision in ("bf16", "bf16_pure"):
        run = trained(tmp_path / precision, *keys, f"precision={precision}")
        state = torch.load(tmp_path / precision / "checkpoints" / "step-00000012.pt", weights_only=True)["model"]
        gains[precision] = state["blocks.0.attn.q_norm.weight"]
        moved = run.scalars.moved
        assert moved.isna().all() if precision == "bf16" else ((moved > 0.01) & (moved < 1.0)).all()
    assert (gains["bf16_pure"] == 1).all()
    assert gains["bf16_pure"].dtype == torch.bfloat16
    assert (gains["bf16"] != 1).any()


def test_pure_bf16_is_announced_by_name():
    assert any("rounded away" in w for w in warnings(config("precision=bf16_pure")))
    assert not any("rounded away" in w for w in warnings(config("precision=bf16")))


@pytest.mark.parametrize(("precision", "probe"), [("bf16", "bf16"), ("fp16", "fp16"), ("bf16_pure", "bf16")])
def test_a_cpu_without_the_instructions_is_told_of_before_the_first_step(monkeypatch, precision, probe):
    for native, there in ((True, False), (False, True)):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{probe}_supported", lambda n=native: n)
        assert any("instructions" in w for w in warnings(config(f"precision={precision}"))) == there


def test_bf16_weights_under_autocast_are_refused():
    with pytest.raises(ConfigError, match=r"precision\.autocast"):
        config("precision.weights=bf16")


# ---------------------------------------------------------------- where autocast is, and compile


def test_backward_and_update_run_outside_autocast(tmp_path, monkeypatch):
    seen = []
    real = Updater.step

    def build(*args: Any, **kwargs: Any) -> torch.nn.Module:
        vit = build_vit(*args, **kwargs)
        vit.head.weight.register_hook(lambda g: seen.append(torch.is_autocast_enabled("cpu")))
        return vit

    def step(self: Updater, number: int) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return real(self, number)

    monkeypatch.setattr("qkexp.train.loop.build_vit", build)
    monkeypatch.setattr(Updater, "step", step)
    trained(tmp_path, "precision=bf16", "train.steps=2")
    assert seen == [False] * 5  # backward of the dry pass, then backward and update of two steps


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_gives_the_losses_and_frames_of_an_eager_one_within_rounding(tmp_path):
    keys = ("attention=rmsnorm", "precision=fp32", "train.steps=4", "probe.every=2", "model.depth=1")
    eager = trained(tmp_path / "eager", *keys)
    compiled = trained(tmp_path / "compiled", *keys, "compile=true")
    assert compiled.scalars.loss.tolist() == pytest.approx(eager.scalars.loss.tolist(), rel=1e-4)
    assert compiled.attention.step.unique().tolist() == [0, 2]
    for metric in ("max_abs_logit", "entropy_mean", "q_norm_mean"):
        assert compiled.attention[metric].tolist() == pytest.approx(eager.attention[metric].tolist(), rel=1e-3)


def test_compile_without_a_compiler_is_refused_before_anything_starts(monkeypatch):
    cfg = config("compile=true")
    monkeypatch.setattr("qkexp.train.precision.shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match="compiler"):
        check_machine(cfg)
