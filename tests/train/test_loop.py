"""The loop: what it records, when it stops, and what a broken step may not touch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from qkexp.compose import compose_sweep
from qkexp.config import RunConfig
from qkexp.probe.frame import Frame
from qkexp.probe.metrics import GROUPS, NAMES, besides
from qkexp.train import loop
from qkexp.train.checkpoint import Checkpoints, load, steps
from qkexp.train.data import load as load_data
from qkexp.train.events import Event


class Memory:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.frames: list[Frame] = []
        self.events: list[Event] = []
        self.saved: list[tuple[int, dict[str, Any]]] = []
        self._pending: list[Frame] = []

    def row(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def frame(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._pending.append(frame)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def note(self, **facts: Any) -> None:
        pass

    def flush_due(self) -> bool:
        return len(self.rows) % 7 == 0

    def flush(self) -> list[Frame]:
        pending, self._pending = self._pending, []
        return pending

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self.saved.append((step, {k: v.clone() for k, v in state["model"].items()}))


def config(*overrides: str) -> RunConfig:
    cfg = compose_sweep(["train.steps=30", *overrides], single=True).runs[0][1]
    cfg.device = "cpu"
    return cfg


def run(*overrides: str, stop: Any = lambda: None) -> tuple[Memory, dict[str, Any]]:
    record, cfg = Memory(), config(*overrides)
    return record, loop.train(cfg, load_data(cfg.data), record, stop)


def losses(record: Memory) -> list[float]:
    return [row["loss"] for row in record.rows]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_loss_is_bit_identical_with_probe_on_off_and_rare(precision: str) -> None:
    seen = [losses(run(f"precision={precision}", f"probe.every={every}")[0]) for every in (0, 1, 7)]
    assert seen[0] == seen[1] == seen[2]


EVERY = "probe.groups=[sink,bound,spectral,activations,gradients,update,gains,adam]"


def attention(record: Memory) -> pd.DataFrame:
    return pd.concat([frame.to_pandas() for frame in record.frames])


@pytest.mark.parametrize("overrides", [("attention=layernorm",), ("attention=none", "train.accumulate=2")], ids=str)
def test_every_group_is_in_the_table_of_a_run_and_changes_no_loss(overrides: tuple[str, ...]) -> None:
    plain, more = run("train.steps=6", *overrides)[0], run("train.steps=6", *overrides, EVERY)[0]
    assert losses(plain) == losses(more)
    table = attention(more)
    heads, layers = table[table["head"] >= 0], table[table["head"] == -1]
    normed = "attention=layernorm" in overrides
    absent = {"input_spectral_norm", "entropy_bound_spectral"} if normed else {"q_gain_max", "k_gain_max"}
    for metric in besides(tuple(GROUPS)):
        column = (layers if metric.heads == "none" else heads)[metric.name]
        assert column.isna().all() if metric.name in absent else column.notna().all(), metric.name
    assert heads["qk_update_ratio"].gt(0).all()
    of_layers = np.sqrt(
        heads.groupby("step")[["w_q_grad_norm", "w_k_grad_norm"]].agg(lambda x: (x**2).sum()).sum(axis=1)
    )
    parts = np.array([row["grad_norm_qk"] for row in more.rows])
    assert np.all(of_layers <= parts * 1.0001), "biases and gains of the norms belong to that part too"
    assert np.all(of_layers >= 0.5 * parts)


def test_gradients_of_a_run_in_fp16_are_those_of_the_loss_without_its_scale() -> None:
    first = [attention(run("train.steps=1", EVERY, f"precision={p}")[0])["w_v_grad_norm"] for p in ("fp16", "fp32")]
    np.testing.assert_allclose(*(x.dropna() for x in first), rtol=0.05)


def test_projections_that_keep_their_bits_have_updates_of_zero_and_muon_no_adam_to_compare() -> None:
    frozen = attention(run("train.steps=3", EVERY, "optim.qk_lr_scale=0")[0])
    assert (frozen["qk_update_ratio"].dropna() == 0.0).all()
    assert frozen["qk_update_ratio"].notna().any()
    muon = attention(run("train.steps=3", EVERY, "optim=muon")[0])
    assert muon["q_grad_rms_eps"].isna().all()
    assert muon["qk_update_ratio"].notna().any()


def test_a_step_that_ends_a_run_shows_its_attention_and_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    _break_at(monkeypatch, 3, math.nan)
    record, _ = run(EVERY)
    assert [frame.step for frame in record.frames] == [0, 1, 2, 3]
    updates = attention(record).groupby("step")["qk_update_ratio"].count()
    assert updates.tolist()[3] == 0 < min(updates.tolist()[:3])


def test_same_seed_same_losses_and_other_seed_others() -> None:
    assert losses(run()[0]) == losses(run()[0])
    assert losses(run()[0]) != losses(run("seed=1")[0])


def test_soft_cap_far_above_the_logits_changes_nothing_but_rounding() -> None:
    plain, capped = losses(run("precision=fp32")[0]), losses(run("precision=fp32", "attention.softcap=1e6")[0])
    assert plain == pytest.approx(capped, abs=1e-3)


def test_row_holds_the_rate_that_was_used_and_the_norm_before_clipping() -> None:
    free = run("optim.warmup=10", "optim.lr=1e-2")[0].rows
    clipped = run("optim.warmup=10", "optim.lr=1e-2", "train.clip_norm=1e-3")[0].rows
    assert free[0]["lr"] == pytest.approx(1e-3)
    assert free[9]["lr"] == 1e-2
    assert clipped[0]["grad_norm"] == free[0]["grad_norm"] > 0.1


def test_validation_comes_at_the_end_and_every_so_many_steps() -> None:
    assert [r["step"] for r in run()[0].rows if "val_loss" in r] == [29]
    record, outcome = run("train.eval_every=12")
    assert [r["step"] for r in record.rows if "val_loss" in r] == [11, 23, 29]
    assert outcome["final"]["val_loss"] == record.rows[-1]["val_loss"]
    assert outcome["best"]["val_loss"] == min(r["val_loss"] for r in record.rows if "val_loss" in r)


def test_evaluation_is_not_probed_and_changes_no_loss() -> None:
    with_eval, without = run("train.eval_every=5")[0], run()[0]
    assert losses(with_eval) == losses(without)
    assert [f.step for f in with_eval.frames] == list(range(30))


def test_optimiser_runs_outside_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = torch.optim.Adam.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    run()
    assert seen == [False] * 30


def test_bf16_run_keeps_float32_weights() -> None:
    assert {v.dtype for v in run()[0].saved[-1][1].values()} == {torch.float32}


def _break_at(monkeypatch: pytest.MonkeyPatch, step: int, value: float) -> None:
    calls = {"n": 0}
    original = loop.objective

    def broken(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, log_partition = original(*args, **kwargs)
        calls["n"] += 1
        return (loss * value if calls["n"] == step + 1 else loss), log_partition

    monkeypatch.setattr(loop, "objective", broken)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_step_ends_the_run_before_it_touches_a_weight(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    _break_at(monkeypatch, 17, value)
    record, outcome = run("train.checkpoint_every=5")
    assert (outcome["status"], outcome["step"]) == ("diverged", 17)
    assert outcome["reason"].startswith("nonfinite: loss is ")
    assert [r["step"] for r in record.rows] == list(range(17))
    assert [(e.kind, e.step) for e in record.events] == [("nonfinite", 17)]
    assert [s for s, _ in record.saved] == [5, 10, 15], "nothing is saved after the broken step"
    assert all(v.isfinite().all() for _, state in record.saved for v in state.values())
    assert outcome["final"]["val_loss"] is None, "a run that ended early has no final validation loss"


def test_gradient_that_is_not_finite_ends_the_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.Updater.measure

    def measure(self: Any, scaler: Any) -> Any:
        next(iter(self.named))[1].grad[...] = math.inf
        return original(self, scaler)

    monkeypatch.setattr(loop.Updater, "measure", measure)
    record, outcome = run()
    assert outcome["reason"] == "nonfinite: grad_norm is inf at step 0"
    assert record.rows == []


def test_exploding_rate_is_a_result() -> None:
    record, outcome = run("optim.lr=1e10")
    assert outcome["status"] == "diverged"
    assert outcome["step"] == len(record.rows) >= 1
    assert all(math.isfinite(r["loss"]) and math.isfinite(r["grad_norm"]) for r in record.rows)


def test_stop_finishes_the_step_and_says_interrupted() -> None:
    asked = iter([None, None, "stopped by SIGTERM"])
    record, outcome = run(stop=lambda: next(asked))
    assert (outcome["status"], outcome["reason"], outcome["step"]) == ("interrupted", "stopped by SIGTERM", 3)
    assert record.saved[-1][0] == 3


def test_events_do_not_depend_on_how_rows_were_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("train.steps=120", "optim.lr=0.3", "optim.warmup=30")
    often = run(*overrides)[0].events
    monkeypatch.setattr(Memory, "flush_due", lambda self: False)
    assert run(*overrides)[0].events == often
    assert often


def test_checkpoints_keep_the_last_two_and_the_last_healthy_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    store = Checkpoints(tmp_path)
    state = {"model": {"w": torch.ones(3)}}
    for step in (10, 20, 30):
        store.save(step, state, {})
    assert steps(tmp_path) == [20, 30]
    for step in (40, 50, 60):
        store.save(step, state, {"logit_runaway": 35})
    assert steps(tmp_path) == [30, 50, 60], "30 is the last before the first event"


def test_nonfinite_weights_never_become_a_checkpoint(tmp_path) -> None:  # type: ignore[no-untyped-def]
    store = Checkpoints(tmp_path)
    store.save(10, {"model": {"w": torch.ones(3)}}, {})
    store.save(20, {"model": {"w": torch.tensor([1.0, math.nan])}}, {})
    assert steps(tmp_path) == [10]


def test_checkpoint_loads_without_trusting_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    Checkpoints(tmp_path).save(5, {"model": {"w": torch.ones(3)}, "optimizer": {"lr": 0.1}}, {})
    again = load(tmp_path / "step-00000005.pt")
    assert again["step"] == 5
    assert torch.equal(again["model"]["w"], torch.ones(3))
    assert not list(tmp_path.glob(".*")), "no temporary file stays"


def test_microbatches_make_the_step_of_one_large_batch() -> None:
    """Loss, gradient and measured images are those of all microbatches; sums differ in their order only."""
    whole = run("train.batch_size=32", "precision=fp32", "train.steps=6")[0]
    parts = run("train.batch_size=8", "train.accumulate=4", "precision=fp32", "train.steps=6")[0]
    for a, b in zip(whole.rows, parts.rows, strict=True):
        for name in ("loss", "grad_norm", "grad_norm_qk", "out_logz_mean", "out_logit_absmax"):
            assert b[name] == pytest.approx(a[name], rel=2e-3), name
    for a, b in zip(whole.frames, parts.frames, strict=True):
        for metric in ("entropy_mean", "max_abs_logit", "q_norm_mean", "attn_max_mean"):
            key = f"attn/L01/{metric}"
            assert b.scalars()[key] == pytest.approx(a.scalars()[key], rel=2e-3), metric


def test_sigmoid_loss_starts_at_ten_coins_and_chance_is_its_own() -> None:
    record, outcome = run("train.loss=sigmoid")
    assert record.rows[0]["loss"] == pytest.approx(10 * math.log(2), rel=0.05)
    assert outcome["constant_loss"] == pytest.approx(-10 * (0.1 * math.log(0.1) + 0.9 * math.log(0.9)), rel=1e-3)


def test_weights_that_the_last_update_broke_are_a_divergence_and_not_a_crash(tmp_path: Any) -> None:
    from qkexp import load_run
    from qkexp.sweep.job import execute

    cfg = config("optim.lr=1e30", "train.steps=1", "precision=fp32", "train.eval_every=1")
    assert execute(cfg, tmp_path, {}) == 0
    found = load_run(tmp_path)
    assert found.outcome is not None
    assert found.outcome["status"] == "diverged"
    assert found.outcome["reason"].startswith("nonfinite: val_loss is nan after step 0")
    assert found.outcome["final"]["val_loss"] is None
    assert found.outcome["best"] == {}
    assert len(found.scalars) == 1


def test_an_evaluation_that_is_not_finite_is_no_best() -> None:
    good = {"val_loss": 1.0, "val_accuracy": 0.5}
    assert loop._better({}, {"val_loss": math.nan, "val_accuracy": 0.1}) == {}
    assert loop._better(good, {"val_loss": math.nan, "val_accuracy": 0.9}) == good
    assert loop._better(good, {"val_loss": 2.0, "val_accuracy": 0.6}) == {"val_loss": 1.0, "val_accuracy": 0.6}


@pytest.mark.parametrize(("precision", "rope"), [("fp32", "axial"), ("bf16", "none")])
def test_every_preset_trains(variant: str, precision: str, rope: str) -> None:
    keys = (f"attention={variant}", "attention.init=match", f"precision={precision}", f"model.rope={rope}")
    memory, outcome = run(*keys, "train.steps=20", "optim.lr=3e-3", "probe.every=19")
    assert outcome["step"] == 20
    losses = [row["loss"] for row in memory.rows]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.15
    assert all((group.values[NAMES.index("nonfinite")] == 0).all() for group in memory.frames[-1].groups)


def test_a_learned_scale_that_reaches_its_bound_is_an_event() -> None:
    memory, _ = run("attention=swin_v2", "attention.scale_init=100")
    found = [event for event in memory.events if event.kind == "scale_bound"]
    assert [(event.step, event.layer, event.threshold) for event in found] == [(0, layer, 100.0) for layer in range(4)]
    assert [event.value for event in found] == pytest.approx([100.0] * 4)
    memory, _ = run("attention=swin_v2")
    assert not [event for event in memory.events if event.kind == "scale_bound"]
