"""Rates, decay, gradient statistics and updates, against PyTorch's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkexp.compose import compose_sweep
from qkexp.config import OptimConfig
from qkexp.model.parts import PARTS
from qkexp.model.vit import build_vit
from qkexp.train.optim import Updater, decays
from qkexp.train.schedule import learning_rate


def vit(attention: str = "rmsnorm") -> torch.nn.Module:
    cfg = compose_sweep([f"attention={attention}"], single=True).runs[0][1]
    return build_vit(cfg, image_size=8, channels=1, classes=10)


def gradients(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 1, 8, 8, generator=generator)
    F.cross_entropy(model(images), torch.arange(8)).backward()


@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
def test_largest_rate_is_exactly_the_rate_asked_for(warmup: int) -> None:
    cfg = OptimConfig(lr=0.03, warmup=warmup, schedule="cosine")
    rates = [learning_rate(s, 100, cfg) for s in range(100)]
    assert max(rates) == 0.03
    assert rates.index(0.03) == max(warmup - 1, 0)
    assert 0 < rates[-1] < 0.001 * 0.03 + 1e-4


def test_warmup_is_linear_from_zero_and_joins_the_cosine_without_a_jump() -> None:
    cfg = OptimConfig(lr=1.0, warmup=10, schedule="cosine")
    assert [learning_rate(s, 100, cfg) for s in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert learning_rate(10, 100, cfg) == pytest.approx(0.5 * (1 + math.cos(math.pi / 91)))


def test_warmup_as_long_as_the_run_is_a_ramp_and_a_longer_one_stops_on_its_way() -> None:
    ramp = OptimConfig(lr=0.1, warmup=1000)
    assert learning_rate(999, 1000, ramp) == 0.1
    assert learning_rate(499, 500, ramp) == pytest.approx(0.05)


def test_constant_schedule_stays_at_the_peak() -> None:
    cfg = OptimConfig(lr=0.5, warmup=4, schedule="constant")
    assert {learning_rate(s, 50, cfg) for s in range(3, 50)} == {0.5}


def test_decay_is_for_matrices_only_whatever_the_variant() -> None:
    for attention in ("none", "layernorm", "l2", "rmsnorm"):
        names = {n for n, p in vit(attention).named_parameters() if decays(n, p)}
        expected = {"patch_embed.proj.weight", "head.weight"}
        for block in range(4):
            expected |= {f"blocks.{block}.{n}.weight" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
        assert names == expected
    assert not decays("blocks.0.attn.q_norm.weight", torch.zeros(4, 16)), "a gain a head is a gain, whatever its rank"


def test_updates_equal_pytorchs_adamw_with_coupled_decay() -> None:
    cfg = OptimConfig(lr=0.01, warmup=3, weight_decay=0.1, decay="coupled", betas=[0.9, 0.95])
    ours, theirs = vit(), vit()
    named = list(theirs.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": 0.1},
            {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    updater = Updater(ours, cfg, steps=10)
    for step in range(5):
        for group in reference.param_groups:
            group["lr"] = learning_rate(step, 10, cfg)
        gradients(ours), gradients(theirs)
        updater.step(step)
        updater.clear()
        reference.step()
        reference.zero_grad()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_independent_decay_follows_the_schedule_and_not_the_peak_rate() -> None:
    for lr in (1e-6, 1e-3):
        model = vit("none")
        before = model.head.weight.detach().clone()  # type: ignore[union-attr]
        updater = Updater(model, OptimConfig(lr=lr, warmup=4, weight_decay=0.5), steps=8)
        gradients(model)
        updater.grad.zero_()  # decay alone
        updater.step(1)
        torch.testing.assert_close(model.head.weight, before * (1 - 0.5 * 0.5))  # type: ignore[union-attr]


def test_gradient_norm_is_pytorchs_and_its_parts_add_up() -> None:
    model = vit("layernorm")
    updater = Updater(model, OptimConfig(), steps=10)
    gradients(model)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore[misc]
    norms = updater.grad_norms([float(n) for n in updater.measure()])
    assert norms["grad_norm"] == pytest.approx(float(expected), rel=1e-5)
    assert sum(norms[f"grad_norm_{p}"] ** 2 for p in PARTS) == pytest.approx(norms["grad_norm"] ** 2)


def test_gradient_parts_hold_what_their_names_say() -> None:
    model = vit("l2")
    updater = Updater(model, OptimConfig(), steps=10)
    gradients(model)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    parts = {
        k.removeprefix("grad_norm_"): v for k, v in updater.grad_norms([float(n) for n in updater.measure()]).items()
    }
    expected = dict.fromkeys(PARTS, 0.0)
    for name, grad in grads.items():
        if "attn.qkv" in name:
            expected["qk"] += grad[:128].square().sum().item()
            expected["vo"] += grad[128:].square().sum().item()
        else:
            part = (
                "qk" if "logit_scale" in name else "vo" if "attn.proj" in name else "mlp" if ".mlp." in name else "rest"
            )
            expected[part] += grad.square().sum().item()
    for part in PARTS:
        assert parts[part] == pytest.approx(expected[part] ** 0.5, rel=1e-4)


def test_clipping_limits_the_gradient_to_the_norm_asked_for() -> None:
    model = vit()
    updater = Updater(model, OptimConfig(), steps=10)
    gradients(model)
    norms = updater.grad_norms([float(n) for n in updater.measure()])
    updater.clip(0.25 * norms["grad_norm"], norms["grad_norm"])
    assert float(updater.grad.norm()) == pytest.approx(0.25 * norms["grad_norm"], rel=1e-4)
    updater.clip(100.0, float(updater.grad.norm()))
    assert float(updater.grad.norm()) == pytest.approx(0.25 * norms["grad_norm"], rel=1e-4), "a small one is left alone"


def test_update_rms_is_the_step_over_the_rate_without_decay() -> None:
    model = vit()
    updater = Updater(model, OptimConfig(lr=0.01, weight_decay=0.1), steps=10)
    gradients(model)
    done = updater.step(0)
    # Adam's first step is the gradient's sign wherever the gradient is well above eps
    assert 0.9 < float(done.rms) <= 1.0
    squares = sum(float(p.detach().double().square().sum()) for p in model.parameters())
    assert float(done.param_norm) == pytest.approx(squares**0.5, rel=1e-5)


def test_parameters_keep_names_and_shapes_after_sharing_storage() -> None:
    model, plain = vit(), vit()
    Updater(model, OptimConfig(), steps=10)
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in plain.state_dict().items()}
    for (_, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize("schedule", ["cosine", "constant", "linear", "rsqrt"])
@pytest.mark.parametrize("warmup", [0, 1, 20])
def test_every_schedule_peaks_exactly_at_the_rate_asked_for_and_joins_without_a_jump(
    schedule: str, warmup: int
) -> None:
    cfg = OptimConfig(lr=0.01, warmup=warmup, schedule=schedule, cooldown=10)
    rates = [learning_rate(s, 200, cfg) for s in range(200)]
    assert max(rates) == 0.01
    assert rates.index(0.01) == max(warmup - 1, 0)
    after = rates[max(warmup - 1, 0) :]
    assert all(b <= a for a, b in itertools.pairwise(after)), "never rises again"


def test_rsqrt_falls_as_the_root_of_time_on_the_scale_of_the_warmup_and_cools_down_to_nothing() -> None:
    cfg = OptimConfig(lr=1.0, warmup=100, schedule="rsqrt", cooldown=50)
    assert learning_rate(99 + 300, 1000, cfg) == pytest.approx(0.5), "four times the warm-up: half the rate"
    free = OptimConfig(lr=1.0, warmup=100, schedule="rsqrt")
    assert learning_rate(999, 1000, free) == pytest.approx(1 / math.sqrt(10))
    assert learning_rate(999, 1000, cfg) == pytest.approx(1 / math.sqrt(10) / 50)


def test_linear_falls_by_the_same_amount_each_step_towards_zero() -> None:
    cfg = OptimConfig(lr=1.0, warmup=0, schedule="linear")
    assert [learning_rate(s, 4, cfg) for s in range(4)] == [1.0, 0.75, 0.5, 0.25]


# ---------------------------------------------------------------- optimisers


def reference(name: str, parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=0.0)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_updates_are_those_of_pytorchs_optimiser_on_separate_parameters(name: str) -> None:
    ours, theirs = vit(), vit()
    updater = Updater(ours, OptimConfig(name=name, lr=0.01, schedule="constant"), steps=3)
    optimizer = reference(name, list(theirs.parameters()), 0.01)
    for step in range(3):
        for model in (ours, theirs):
            gradients(model)
        updater.step(step)
        updater.clear()
        optimizer.step()
        optimizer.zero_grad()
    for (name_, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda text, n=name_: f"{n}: {text}")


def test_adams_decay_is_a_gradient_of_matrices_alone() -> None:
    model, plain = vit(), vit()
    updater = Updater(model, OptimConfig(name="adam", lr=0.01, schedule="constant", weight_decay=0.1), steps=1)
    decayed = [p for n, p in plain.named_parameters() if decays(n, p)]
    free = [p for n, p in plain.named_parameters() if not decays(n, p)]
    optimizer = torch.optim.Adam([{"params": decayed, "weight_decay": 0.1}, {"params": free}], lr=0.01)
    for m in (model, plain):
        gradients(m)
    updater.step(0)
    optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_muon_turns_each_projection_by_itself_and_adam_moves_the_rest() -> None:
    model, plain = vit("none"), vit("none")
    updater = Updater(model, OptimConfig(name="muon", lr=0.01, momentum=0.9, schedule="constant"), steps=1)
    for m in (model, plain):
        gradients(m)
    updater.step(0)
    before, after = dict(plain.named_parameters()), dict(model.named_parameters())
    name = "blocks.0.attn.qkv.weight"
    parts = [nn.Parameter(w.detach().clone()) for w in before[name].chunk(3)]
    for part, grad in zip(parts, before[name].grad.chunk(3), strict=True):
        part.grad = grad.clone()
    torch.optim.Muon(parts, lr=0.01, weight_decay=0.0, momentum=0.9, adjust_lr_fn="match_rms_adamw").step()
    torch.testing.assert_close(after[name], torch.cat([p.detach() for p in parts]))
    adam = torch.optim.Adam([p for n, p in plain.named_parameters() if n == "head.weight"], lr=0.01)
    adam.step()
    torch.testing.assert_close(after["head.weight"], before["head.weight"])
    assert all(not torch.equal(p, q) for p, q in zip(vit("none").parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_frozen_q_and_k_projections_keep_their_bits_also_under_decay_and_all_else_moves(name: str) -> None:
    model = vit("none")
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    updater = Updater(model, OptimConfig(name=name, lr=0.1, weight_decay=0.1, qk_lr_scale=0.0), steps=2)
    for step in range(2):
        gradients(model)
        updater.step(step)
        updater.clear()
    for n, p in model.named_parameters():
        if ".qkv." in n:
            rows = 2 * p.shape[0] // 3
            assert torch.equal(p[:rows], start[n][:rows])
            assert not torch.equal(p[rows:], start[n][rows:])
        else:
            assert not torch.equal(p, start[n]), n


def test_a_rate_of_the_classifier_multiplies_its_change_and_no_other() -> None:
    changes = []
    for scale in (1.0, 30.0):
        model = vit("none")
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        updater = Updater(
            model, OptimConfig(lr=0.01, schedule="constant", head_lr_scale=scale, qk_lr_scale=0.5), steps=1
        )
        gradients(model)
        updater.step(0)
        changes.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    groups = updater.groups()
    assert groups["head_rate_x_30"]["names"] == ["head.weight[rest]", "head.bias[rest]"]
    assert groups["q_k_rate_x_0.5"]["tensors"] > 0
    for name, change in changes[1].items():
        if name.startswith("head."):
            torch.testing.assert_close(change, 30.0 * changes[0][name], rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(change, changes[0][name]), name


def test_a_tenth_of_the_q_and_k_rate_makes_a_tenth_of_their_change() -> None:
    changes = []
    for scale in (1.0, 0.1):
        model = vit("none")
        before = model.blocks[0].attn.qkv.weight.detach().clone()
        updater = Updater(model, OptimConfig(lr=0.01, schedule="constant", qk_lr_scale=scale), steps=1)
        gradients(model)
        updater.step(0)
        changes.append(model.blocks[0].attn.qkv.weight.detach() - before)
    torch.testing.assert_close(changes[1][:128], 0.1 * changes[0][:128], rtol=1e-3, atol=1e-7)
    assert torch.equal(changes[1][128:], changes[0][128:])


@pytest.mark.parametrize("decay", ["independent", "coupled"])
def test_decay_of_gains_follows_the_rule_of_weights_and_touches_nothing_else(decay: str) -> None:
    cfg = OptimConfig(name="sgd", lr=0.5, momentum=0.0, schedule="constant", gain_decay=0.1, decay=decay)
    model = vit("gemma3")  # gain 1 + w
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(2.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    updater = Updater(model, cfg, 10)
    updater.step(0)  # no gradient: only decay moves anything
    factor = 1 - 0.1 * (0.5 if decay == "coupled" else 1.0)
    for name, parameter in model.named_parameters():
        gain = "q_norm" in name or "k_norm" in name
        torch.testing.assert_close(parameter.detach(), before[name] * (factor if gain else 1.0))
    assert updater.groups()["gains_decayed"]["tensors"] == 2 * len(model.blocks)


def test_adams_decay_of_gains_is_a_gradient() -> None:
    model = vit("rmsnorm")
    updater = Updater(model, OptimConfig(name="adam", gain_decay=0.1, lr=1e-3), 10)
    updater.step(0)
    for name, parameter in model.named_parameters():
        expected = 0.1 if "q_norm" in name or "k_norm" in name else 0.0  # of a gain of 1
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected))
