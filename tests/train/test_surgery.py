"""A checkpoint made fit for another configuration: what is carried over, and what new parameters start with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkexp.config import RunConfig
from qkexp.model.vit import build_vit
from qkexp.train import data as datasets
from qkexp.train.batches import TrainingBatches
from qkexp.train.loop import train
from qkexp.train.optim import Updater
from qkexp.train.surgery import CALIBRATION_STEPS, adapt

SMALL = ["model.width=16", "model.depth=2", "model.heads=2", "train.batch_size=16", "train.steps=20"]
RECIPE = ["attention.init=match", "optim.lr=0.02", "optim.warmup=2", "train.clip_norm=0.5"]
NORM = ["attention.norm=rms", "attention.gain=per_head"]
DONE = 8


class Keep:
    """A recorder that keeps the last state and stops at a step."""

    def __init__(self, last: int) -> None:
        self.last, self.done, self.state = last, 0, dict[str, Any]()

    def row(self, row: dict[str, float]) -> None:
        self.done = int(row["step"]) + 1

    def frame(self, frame: Any) -> None: ...
    def event(self, event: Any) -> None: ...
    def note(self, **facts: Any) -> None: ...
    def flush_due(self) -> bool:
        return False

    def flush(self) -> list[Any]:
        return []

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy({"step": step, **state})

    def stop(self) -> str | None:
        return "enough" if self.done == self.last else None


@pytest.fixture
def config(make_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    return lambda *overrides: make_config(*SMALL, *RECIPE, "device=cpu", *overrides)


def state_of(cfg: RunConfig, last: int = DONE, resume: dict[str, Any] | None = None) -> dict[str, Any]:
    keep = Keep(last)
    train(cfg, datasets.load(cfg.data), keep, keep.stop, resume)
    return keep.state


def updater_of(cfg: RunConfig, state: dict[str, Any]) -> tuple[nn.Module, Updater]:
    """The model and the optimisers of a state."""
    model = build_vit(cfg, image_size=8, channels=1, classes=10, like=torch.randn(4, 1, 8, 8))
    updater = Updater(model, cfg.optim, cfg.train.steps)
    model.load_state_dict(state["model"])
    updater.load_state_dict(state["optimizers"])
    return model, updater


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, dict):  # PyTorch's are ordered ones
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{path}/{place}")
    elif isinstance(one, Tensor):
        assert isinstance(other, Tensor), path
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other, path


@pytest.mark.parametrize(
    "overrides",
    [[], ["optim.name=muon"], ["optim=sgd", "optim.lr=0.02", "optim.warmup=2"], ["precision=fp16"], ["attention=l2"]],
    ids=["adamw", "muon", "sgd", "fp16", "l2"],
)
def test_a_state_that_fits_already_comes_back_bit_for_bit(
    config: Callable[..., RunConfig], overrides: list[str]
) -> None:
    cfg = config(*overrides)
    state = state_of(cfg)
    given = copy.deepcopy(state)
    adapted = adapt(state, cfg, cfg, datasets.load(cfg.data))
    assert_equal(state, given)
    # the rate is set at every step; what the parent's last one was says nothing
    for each in (adapted, state):
        for optimizer in each["optimizers"]:
            for group in optimizer["param_groups"]:
                group.pop("lr")
    assert_equal(adapted, state)


def test_weights_of_pure_bf16_come_back_bit_for_bit(config: Callable[..., RunConfig]) -> None:
    cfg = config("precision=bf16_pure")
    state = state_of(cfg)
    adapted = adapt(state, cfg, cfg, datasets.load(cfg.data))
    assert_equal(adapted["model"], state["model"])
    for mine, theirs in zip(adapted["optimizers"], state["optimizers"], strict=True):
        for key, kept in theirs["state"].items():
            for kind, value in kept.items():  # float32 holds every bf16; loading rounds it back
                assert torch.equal(mine["state"][key][kind].to(value.dtype), value)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_with_a_norm_all_else_keeps_its_weights_and_averages_by_name(
    config: Callable[..., RunConfig], optimiser: str
) -> None:
    old, new = (config(f"optim.name={optimiser}", *extra) for extra in ([], NORM))
    state = state_of(old)
    adapted = adapt(state, old, new, datasets.load(old.data))
    (before, kept), (after, carried) = updater_of(old, state), updater_of(new, adapted)
    theirs, mine = kept.spans(), carried.spans()
    fresh = mine.keys() - theirs.keys()
    assert {name.split(".", 2)[2] for name in fresh} == {"attn.q_norm.weight", "attn.k_norm.weight"}
    assert kept.kept().keys() == carried.kept().keys() >= {"exp_avg", "exp_avg_sq"}
    for name, span in theirs.items():
        assert torch.equal(before.state_dict()[name], after.state_dict()[name])
        for kind, vector in kept.kept().items():
            assert torch.equal(vector[span], carried.kept()[kind][mine[name]]), (name, kind)
    counts = {float(s["step"]) for o in carried.optimizers for s in o.state.values() if "step" in s}
    assert counts == {DONE}


def test_averages_of_a_new_gain_are_those_of_its_clipped_gradients_on_the_next_batches(
    config: Callable[..., RunConfig],
) -> None:
    old, new = config("train.accumulate=2"), config("train.accumulate=2", *NORM)
    data = datasets.load(old.data)
    adapted = adapt(state_of(old), old, new, data)
    model, updater = updater_of(new, adapted)
    batches, gradients = TrainingBatches(data, new), []
    named = dict(model.eval().named_parameters())
    for step in range(DONE, DONE + CALIBRATION_STEPS):
        loss = sum(F.cross_entropy(model(x), y) for x, y in (batches[2 * step], batches[2 * step + 1])) / 2
        found = torch.autograd.grad(loss, list(named.values()))  # type: ignore[arg-type]
        norm = torch.sqrt(sum(g.double().square().sum() for g in found)).item()
        factor = min(1.0, 0.5 / norm)
        gradients.append({n: (g * factor).flatten() for n, g in zip(named, found, strict=True)})
    for name, span in updater.spans().items():
        if name.endswith("_norm.weight"):
            each = torch.stack([g[name] for g in gradients])
            for kind, average, beta in (("exp_avg", each, 0.9), ("exp_avg_sq", each.square(), 0.999)):
                wanted = (1 - beta**DONE) * average.mean(0)
                torch.testing.assert_close(updater.kept()[kind][span], wanted, rtol=2e-3, atol=1e-9)


def test_new_gains_move_no_further_in_their_first_step_than_the_rate(config: Callable[..., RunConfig]) -> None:
    """With averages that start at 0, late in a run, Adam would move them 3 times as far, and soon 6 times."""
    old, new = config(), config(*NORM)
    adapted = adapt(state_of(old), old, new, datasets.load(old.data))
    after = state_of(new, DONE + 1, adapted)
    for name, start in adapted["model"].items():
        if name.endswith("_norm.weight"):
            assert 0 < (after["model"][name] - start).abs().max() < 1.2 * new.optim.lr, name


def test_settings_of_the_optimiser_are_those_of_the_new_configuration(config: Callable[..., RunConfig]) -> None:
    old = config("optim.name=muon")
    new = config("optim.name=muon", "optim.betas=[0.5,0.7]", "optim.eps=1e-4", "optim.momentum=0.6")
    adapted = adapt(state_of(old), old, new, datasets.load(old.data))
    _, updater = updater_of(new, adapted)
    muon, adam = (o.param_groups[0] for o in updater.optimizers)
    assert muon["momentum"] == 0.6
    assert (list(adam["betas"]), adam["eps"]) == ([0.5, 0.7], 1e-4)


def test_a_scaler_comes_and_goes_with_fp16(config: Callable[..., RunConfig]) -> None:
    half, brain = config("precision=fp16"), config()
    data = datasets.load(half.data)
    assert adapt(state_of(brain), brain, half, data)["scaler"]["scale"] == 65536.0
    assert adapt(state_of(half), half, brain, data)["scaler"] == {}
