"""What the probe measures beside the scores: weights, gradients, updates and the residual stream, and when."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.linalg import vector_norm
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from qkexp import AttentionProbe
from qkexp.model import core
from qkexp.probe.frame import Group
from qkexp.probe.metrics import GROUPS, METRICS, SCORE_GROUPS, besides, headless, names
from qkexp.probe.parts import combine

ALL = tuple(GROUPS)
BESIDE = tuple(m.name for m in besides(ALL))
LABELS = torch.arange(8)


def columns_of(*groups):
    return [m.name for m in besides(groups)]


def adam(vit, **options):
    return torch.optim.Adam(vit.parameters(), lr=1e-3, **options)


def one_step(vit, images, probe, optimizer=None, step=0, *, inside=True, scale=1.0):
    """A step of training on ``images``; the optimiser's is inside of the probe's, or after it."""
    vit.zero_grad()
    with probe.step(step, loss_scale=scale):
        (scale * F.cross_entropy(vit(images), LABELS[: len(images)])).backward()
        if inside and optimizer is not None:
            optimizer.step()
    if not inside and optimizer is not None:
        optimizer.step()


def heads(probe):
    """(layer, head) -> metrics with heads."""
    frame = probe.frame.to_pandas()
    return frame[frame["head"] >= 0].set_index(["layer", "head"])


def layers(probe):
    """layer -> metrics without heads."""
    frame = probe.frame.to_pandas()
    return frame[frame["head"] == -1].set_index("layer")


def measured(probe):
    """Of the metrics beside the scores, those that have a value anywhere."""
    return set(probe.frame.to_pandas()[list(BESIDE)].dropna(axis=1, how="all").columns)


# ---------------------------------------------------------------- it changes nothing


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [("attention=none",), ("attention=l2_softcap",), ("attention=layernorm", "model.block_norm=parallel")],
    ids=str,
)
def test_losses_gradients_and_random_state_have_the_same_bits_with_all_groups(
    make_vit, images, overrides, checkpointing
):
    runs = []
    for groups in (None, ALL):
        vit = make_vit(*overrides, "model.dropout=0.1").train()
        vit.set_grad_checkpointing(checkpointing)
        optimizer = adam(vit)
        probe = AttentionProbe(vit, every=0 if groups is None else 1, groups=groups or (), optimizer=optimizer)
        torch.manual_seed(0)
        losses, grads = [], []
        for step in range(3):
            vit.zero_grad()
            with probe.step(step), torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(vit(images).float(), LABELS)
                loss.backward()
            grads += [p.grad.clone() for p in vit.parameters()]
            optimizer.step()
            probe.updated()
            losses.append(loss.item())
        runs.append((losses, grads, torch.get_rng_state()))
    (losses, grads, state), (other_losses, other_grads, other_state) = runs
    assert losses == other_losses
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
    assert torch.equal(state, other_state)


def test_a_step_leaves_no_hook_and_keeps_no_graph(make_vit, images):
    vit = make_vit("attention=none")
    probe = AttentionProbe(vit, groups=ALL, optimizer=adam(vit))

    def hooks():
        of_modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in vit.modules())
        return of_modules, sum(len(p._post_accumulate_grad_hooks or ()) for p in vit.parameters())

    before = hooks()
    with probe.step(0):
        loss = F.cross_entropy(vit(images), LABELS)
        loss.backward(retain_graph=True)
        seen = [weakref.ref(c) for layer in probe._layers for c in layer.captures]
        assert hooks() > before
    assert hooks() == before
    gc.collect()
    assert [ref() for ref in seen] == [None] * 4, "the graph is alive and holds no capture"
    assert not any(group.values.requires_grad for group in probe.frame.groups)
    loss.backward()


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: values that are read, and shapes that depend on values."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
        self.count += func.overloadpacket.__name__ in waits
        return func(*args, **(kwargs or {}))


def test_nothing_beside_the_scores_is_read_from_the_device(make_vit, images):
    counts = []
    for groups in ((), ALL):
        vit = make_vit("attention=layernorm")
        optimizer = torch.optim.Adam(vit.parameters(), fused=True)
        probe = AttentionProbe(vit, groups=groups, optimizer=optimizer)
        one_step(vit, images, probe, optimizer)  # the self-check reads
        with Reads() as reads:
            one_step(vit, images, probe, optimizer, step=1, inside=False)
            probe.updated()
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0


def test_memory_does_not_grow_with_all_groups(make_vit, images):
    vit = make_vit("attention=none", "model.depth=2")
    optimizer = adam(vit)
    probe = AttentionProbe(vit, groups=ALL, optimizer=optimizer)

    def alive():
        gc.collect()
        found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        return len(found), sum(x.untyped_storage().nbytes() for x in found)

    counts = []
    for step in range(40):
        one_step(vit, images, probe, optimizer, step, inside=step % 2 == 0)
        probe.updated()
        probe.frame.scalars()
        if step in (9, 39):
            counts.append(alive())
    assert all(late <= early for early, late in zip(*counts, strict=True))  # what other tests left may go


def test_groups_of_the_scores_alone_make_no_hook_and_no_row_of_head_minus_one(make_vit, images):
    vit = make_vit()
    probe = AttentionProbe(vit, groups=SCORE_GROUPS)
    with probe.step(0):
        vit(images)
        assert all(layer.beside is None for layer in probe._layers)
        assert not any(m._forward_hooks for m in vit.blocks)
        assert all(c.grad is None and c.handle is None for layer in probe._layers for c in layer.captures)
    assert (probe.frame.to_pandas()["head"] >= 0).all()


def test_asking_for_more_changes_no_other_column(make_vit, images):
    vit = make_vit("attention=rmsnorm")
    plain, more = AttentionProbe(vit, groups=("sink",)), AttentionProbe(vit, groups=ALL)
    with plain.step(0), more.step(0):
        F.cross_entropy(vit(images), LABELS).backward()
    few, rows = plain.frame.to_pandas(), more.frame.to_pandas()
    rows = rows[rows["head"] >= 0].reset_index(drop=True)
    assert few.equals(rows[few.columns])


# ---------------------------------------------------------------- its numbers, each computed otherwise


@pytest.fixture
def scores(monkeypatch):
    """Scores of each layer in forward order, with their gradients."""
    kept, original = [], core.soft_cap

    def keep(z, cap):
        z.retain_grad()
        kept.append(z)
        return original(z, cap)

    monkeypatch.setattr(core, "soft_cap", keep)
    return kept


@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
@pytest.mark.parametrize("preset", ["none", "layernorm", "l2_softcap"])
def test_every_number_equals_one_that_was_computed_otherwise(make_vit, images, scores, placement, preset):
    vit = make_vit(f"attention={preset}", f"model.block_norm={placement}")
    for block in vit.blocks:
        for norm in (block.attn.q_norm, block.attn.k_norm):
            if getattr(norm, "weight", None) is not None:
                norm.weight.data.uniform_(-2.0, 2.0)
    stream = []
    for block in vit.blocks:
        block.register_forward_hook(lambda _m, args, y: stream.append((args[0].detach(), y.detach())))
    optimizer = adam(vit, eps=1e-6, weight_decay=0.1)
    probe = AttentionProbe(vit, groups=ALL, optimizer=optimizer)
    one_step(vit, images, probe, optimizer)  # Adam's averages have a past
    scores.clear(), stream.clear()
    before = copy.deepcopy(vit)
    one_step(vit, images, probe, optimizer, step=1)
    found, rows = heads(probe), layers(probe)
    for i, block in enumerate(vit.blocks):
        linear = block.in_proj if placement == "parallel" else block.attn.qkv
        old = (before.blocks[i].in_proj if placement == "parallel" else before.blocks[i].attn.qkv).weight

        def parts(weight):
            return weight.detach()[-3 * 64 :].double().view(3, 4, 16, 64)  # q k v, head, d, C

        width = linear.weight.shape[1]
        assert width == 64
        was, now, grad = parts(old), parts(linear.weight), parts(linear.weight.grad)
        state = optimizer.state[linear.weight]
        v = parts(state["exp_avg_sq"] / (1.0 - 0.999 ** state["step"]))
        (x, y), z = stream[i], scores[i].grad.double()
        ratio = x.abs().flatten(1).max(1).values.double().numpy() / np.median(x.abs().flatten(1).numpy(), axis=1)
        expected = {
            "qk_spectral_norm": torch.linalg.matrix_norm(was[0].mT @ was[1], 2),
            "w_q_grad_norm": vector_norm(grad[0], dim=(1, 2)),
            "w_k_grad_norm": vector_norm(grad[1], dim=(1, 2)),
            "w_v_grad_norm": vector_norm(grad[2], dim=(1, 2)),
            "score_grad_norm": vector_norm(z, dim=(0, 2, 3)),
            "qk_update_ratio": vector_norm((now - was)[:2], dim=(0, 2, 3)) / vector_norm(was[:2], dim=(0, 2, 3)),
            "q_grad_rms_eps": v[0].mean((1, 2)).sqrt() / 1e-6,
            "k_grad_rms_eps": v[1].mean((1, 2)).sqrt() / 1e-6,
        }
        if preset == "layernorm":
            gains = (before.blocks[i].attn.q_norm.weight, before.blocks[i].attn.k_norm.weight)
            expected |= {f"{n}_gain_max": g.abs().max().expand(4) for n, g in zip("qk", gains, strict=True)}
        else:
            assert found.loc[i][["q_gain_max", "k_gain_max"]].isna().all(axis=None)
        for name, value in expected.items():
            np.testing.assert_allclose(found.loc[i][name], value.detach(), rtol=2e-4, err_msg=name)
        assert rows.loc[i, "block_in_max"] == x.abs().max()
        # PyTorch's median of an even number is the lower of the two in the middle
        assert rows.loc[i, "block_in_peak"] == pytest.approx(ratio.max(), rel=1e-2)
        assert rows.loc[i, "block_out_rms"] == pytest.approx(float(y.double().square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_the_published_entropy_bound_is_that_of_weights_and_inputs(make_vit, images, biased):
    vit = make_vit("attention=none", f"model.qkv_bias={str(biased).lower()}")
    inputs = []
    for block in vit.blocks:
        block.attn.qkv.weight.data *= 0.3
        if biased:
            block.attn.qkv.bias.data.uniform_(-0.02, 0.02)
        block.attn.qkv.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].detach().double()))
    probe = AttentionProbe(vit, groups=("bound", "spectral"))
    with probe.step(0):
        vit(images)
    found, rows = heads(probe), layers(probe)
    for i, (block, X) in enumerate(zip(vit.blocks, inputs, strict=True)):
        W = block.attn.qkv.weight.detach().double()
        if biased:
            W = torch.cat([W, block.attn.qkv.bias.detach().double()[:, None]], 1)
            X = torch.cat([X, torch.ones(8, 17, 1)], -1)
        q, k, _ = W.view(3, 4, 16, -1)
        size = torch.linalg.matrix_norm(X @ X.mT, 2)
        S = (torch.linalg.matrix_norm(q.mT @ k, 2) * size[:, None] / 4.0).numpy()  # scale 1/√16
        beta = np.exp(-S * np.sqrt(17 / 16))
        bound = np.log1p(16 * beta) + S * np.sqrt(17 * 16) * beta / (1 + 16 * beta)
        assert (bound > 1e-3).all(), "the case says something"
        np.testing.assert_allclose(found.loc[i]["entropy_bound_spectral"], bound.mean(0), rtol=1e-3)
        assert rows.loc[i, "input_spectral_norm"] == pytest.approx(size.mean().item(), rel=1e-5)
    assert (found["entropy_bound_spectral"] <= found["entropy_bound_mean"] + 1e-5).all()
    assert (found["entropy_bound_mean"] <= found["entropy_mean"] + 1e-5).all()


def test_micro_batches_combine_to_what_the_whole_batch_shows(make_vit, images):
    vit = make_vit("attention=none")
    whole, parts = (AttentionProbe(vit, groups=ALL) for _ in range(2))
    one_step(vit, images, whole)
    vit.zero_grad()
    with parts.step(0):
        for part, labels in ((images[:2], LABELS[:2]), (images[2:], LABELS[2:])):
            (len(part) / 8 * F.cross_entropy(vit(part), labels)).backward()
    assert measured(whole) == measured(parts)
    for name in measured(whole):
        a, b = (p.frame.to_pandas()[name] for p in (whole, parts))
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6, err_msg=name)


def test_gradients_are_those_of_the_loss_before_it_was_scaled(make_vit, images):
    vit = make_vit()
    frames = []
    for scale in (1.0, 1024.0, torch.tensor(1024.0)):
        probe = AttentionProbe(vit, groups=("gradients",))
        one_step(vit, images, probe, scale=scale)
        frames.append(heads(probe)[columns_of("gradients")])
    for other in frames[1:]:
        np.testing.assert_allclose(other, frames[0], rtol=1e-5)


def test_only_the_measured_images_count(make_vit, images):
    vit = make_vit()
    few = AttentionProbe(vit, images=3, groups=("activations", "spectral", "gradients"))
    with few.step(0):
        F.cross_entropy(vit(images), LABELS, reduction="sum").backward()
    vit.zero_grad()
    alone = AttentionProbe(vit, groups=("activations", "spectral", "gradients"))
    with alone.step(0):
        F.cross_entropy(vit(images[:3]), LABELS[:3], reduction="sum").backward()
    for name in (*columns_of("activations", "spectral"), "score_grad_norm"):
        a, b = (p.frame.to_pandas()[name] for p in (few, alone))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=name)


# ---------------------------------------------------------------- when a number is there, and when it is absent


FORWARD = {"qk_spectral_norm", "input_spectral_norm", "entropy_bound_spectral", *columns_of("activations")}


def test_a_pass_without_backward_has_no_gradient_though_an_older_one_still_stands_there(make_vit, images):
    vit = make_vit("attention=none")
    optimizer = adam(vit)
    probe = AttentionProbe(vit, groups=ALL, optimizer=optimizer)
    one_step(vit, images, probe, optimizer)
    assert measured(probe) == FORWARD | set(columns_of("gradients", "update", "adam"))
    with probe.step(1, phase="val"):
        vit(images)
    assert measured(probe) == FORWARD
    with probe.step(2, phase="val"), torch.no_grad():
        vit(images)
    assert measured(probe) == FORWARD


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_was_cleared_within_the_step_is_absent_and_one_that_was_clipped_is_not(
    make_vit, images, to_none
):
    vit = make_vit()
    probe = AttentionProbe(vit, groups=("gradients",))
    with probe.step(0):
        F.cross_entropy(vit(images), LABELS).backward()
        vit.zero_grad(set_to_none=to_none)
    assert measured_of(probe) == {"score_grad_norm"}
    with probe.step(1):
        F.cross_entropy(vit(images), LABELS).backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1e-3)
    assert measured_of(probe) == set(columns_of("gradients"))
    grads = heads(probe)[["w_q_grad_norm", "w_k_grad_norm", "w_v_grad_norm"]]
    assert 0 < np.sqrt((grads.to_numpy() ** 2).sum()) <= 1e-3


def test_projections_apart_are_looked_at_apart():
    """W_v is frozen and holds an older gradient."""
    model = nn.Sequential(nn.MultiheadAttention(12, 3, kdim=8, vdim=4, batch_first=True))
    attention = model[0]
    attention.v_proj_weight.requires_grad_(False)
    attention.v_proj_weight.grad = torch.ones_like(attention.v_proj_weight)
    probe = AttentionProbe(model, groups=("gradients",))
    x = torch.randn(2, 5, 12)
    with probe.step(0):
        attention(x, x[..., :8], x[..., :4], need_weights=False)[0].square().sum().backward()
    assert measured_of(probe) == {"w_q_grad_norm", "w_k_grad_norm", "score_grad_norm"}
    expected = attention.q_proj_weight.grad.view(3, 4, 12).flatten(1).norm(dim=1)
    np.testing.assert_allclose(heads(probe)["w_q_grad_norm"], expected, rtol=1e-5)


def test_checkpointing_shows_the_same(make_vit, images):
    frames = []
    for checkpointing in (False, True):
        vit = make_vit("attention=none")
        vit.set_grad_checkpointing(checkpointing)
        probe = AttentionProbe(vit, groups=ALL)
        one_step(vit, images, probe)
        frames.append(probe.frame.to_pandas())
    assert frames[0].equals(frames[1])


def test_an_update_after_the_step_is_the_one_inside_once_it_is_said(make_vit, images):
    frames = []
    for inside in (True, False):
        vit = make_vit("attention=l2")
        optimizer = adam(vit)
        probe = AttentionProbe(vit, groups=ALL, optimizer=optimizer)
        one_step(vit, images, probe, optimizer, inside=inside)
        if not inside:
            first = probe.frame
            assert not measured(probe) & set(columns_of("update", "adam"))
            probe.updated()
            assert first.to_pandas()["qk_update_ratio"].isna().all(), "a frame that was handed out stays as it was"
        frames.append(probe.frame.to_pandas())
        probe.updated()  # once more is harmless
        assert probe.frame.to_pandas().equals(frames[-1])
    assert frames[0].equals(frames[1])
    assert (heads(probe)["qk_update_ratio"] > 0).all()


def test_an_update_belongs_to_its_step_alone(make_vit, images):
    """The weights before are those that this step found, not those of the last probed step."""
    vit = make_vit()
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.0)  # updates of nothing
    probe = AttentionProbe(vit, every=2, groups=("update",), optimizer=optimizer)
    for step in range(3):
        with torch.no_grad():
            vit.blocks[0].attn.qkv.weight.mul_(1.5)
        one_step(vit, images, probe, optimizer, step, inside=False)
        probe.updated()
        assert (probe.frame is None) == (step == 1)
    assert (heads(probe)["qk_update_ratio"] == 0.0).all()


def test_without_an_optimiser_or_with_one_that_keeps_no_squares_adams_are_absent(make_vit, images):
    vit = make_vit()
    sgd = torch.optim.SGD(vit.parameters(), lr=0.1)
    for given, stepped in (((), adam(vit)), (sgd, sgd)):
        probe = AttentionProbe(vit, groups=("update", "adam"), optimizer=given)
        one_step(vit, images, probe, stepped)
        assert measured_of(probe) == {"qk_update_ratio"}


def measured_of(probe):
    return set(probe.frame.metrics) & set(BESIDE) & set(probe.frame.to_pandas().dropna(axis=1, how="all").columns)


def test_projections_that_are_frozen_have_no_gradient_and_an_update_of_zero(make_vit, images):
    vit = make_vit()
    vit.blocks[1].attn.qkv.weight.requires_grad_(False)
    optimizer = adam(vit)
    probe = AttentionProbe(vit, groups=("gradients", "update", "adam"), optimizer=optimizer)
    one_step(vit, images, probe, optimizer)
    frozen, free = heads(probe).loc[1], heads(probe).loc[0]
    assert frozen[["w_q_grad_norm", "w_k_grad_norm", "w_v_grad_norm", "q_grad_rms_eps"]].isna().all(axis=None)
    assert (frozen["qk_update_ratio"] == 0.0).all()
    assert (frozen["score_grad_norm"] > 0.0).all()
    assert free.notna().all(axis=None)


def test_what_is_not_finite_is_absent(make_vit, images):
    vit = make_vit("attention=none")
    vit.blocks[3].attn.qkv.weight.data[:16] = math.inf  # W_q of head 0
    probe = AttentionProbe(vit, groups=ALL)
    one_step(vit, images, probe)
    found = heads(probe)
    assert found.loc[3, "qk_spectral_norm"].isna().tolist() == [True, False, False, False]
    assert math.isnan(found.loc[(3, 0), "entropy_bound_spectral"])
    assert math.isnan(layers(probe).loc[3, "block_out_rms"])
    assert all(math.isfinite(x) for x in probe.frame.scalars().values())


def test_the_score_of_a_layer_with_dropped_weights_has_no_gradient_that_could_be_computed():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)
    x = torch.randn(2, 3, 32, 32)
    for rate in (0.0, 0.5):
        for block in vit.blocks:
            block.attn.attn_drop.p = rate
        probe = AttentionProbe(vit.train(), groups=("gradients",))
        with probe.step(0):
            vit(x).square().mean().backward()
        assert heads(probe)["score_grad_norm"].isna().all() == (rate > 0)
        assert (heads(probe)["w_q_grad_norm"] > 0).all()


@pytest.mark.parametrize("fused", [True, False])
def test_the_score_of_a_timm_layer_has_the_gradient_that_autograd_finds(fused):
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3)
    for block in vit.blocks:
        block.attn.fused_attn = fused
    x, kept = torch.randn(2, 3, 32, 32), []
    probe = AttentionProbe(vit, groups=("gradients", "activations"))
    with probe.step(0):
        vit(x).square().mean().backward()
    reference = copy.deepcopy(vit).double()
    for block in reference.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop = Kept(kept)
    reference.zero_grad()
    reference(x.double()).square().mean().backward()
    for i, p in enumerate(kept):
        dz = p.detach() * (p.grad - (p.detach() * p.grad).sum(-1, keepdim=True))
        np.testing.assert_allclose(heads(probe).loc[i]["score_grad_norm"], vector_norm(dz, dim=(0, 2, 3)), rtol=1e-4)
    assert layers(probe)["block_out_rms"].notna().all()


class Kept(nn.Identity):
    """Keeps the weights of attention, and their gradient."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, p):
        p.retain_grad()
        self.kept.append(p)
        return p


def test_a_layer_whose_weights_nobody_knows_shows_what_needs_none(images):
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.inner(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v)

    model = nn.Sequential(Called())
    probe = AttentionProbe(model, groups=ALL)
    for step in range(2):  # discovered in the first
        with probe.step(step):
            model(images[:, 0]).sum().backward()
        assert measured(probe) == {"score_grad_norm"}


def test_the_native_fast_path_stays_on_under_every_group():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()
    x, kept = torch.randn(2, 9, 32), torch._transformer_encoder_layer_fwd
    calls = []

    def count(*args, **kwargs):
        calls.append(1)
        return kept(*args, **kwargs)

    torch._transformer_encoder_layer_fwd = count
    try:
        with torch.no_grad():
            layer(x)
            probe = AttentionProbe(layer, groups=ALL)
            with probe.step(0):
                layer(x)
    finally:
        torch._transformer_encoder_layer_fwd = kept
    assert len(calls) == 2
    assert measured(probe) == {"qk_spectral_norm"}


def test_a_compiled_model_is_probed_in_eager_mode_and_shows_the_same(make_vit, images):
    vit = make_vit("attention=none", "model.depth=2")
    probe = AttentionProbe(vit, groups=ALL)
    one_step(vit, images, probe)
    eager = probe.frame.to_pandas()
    compiled = torch.compile(vit, backend="eager", fullgraph=True)
    vit.zero_grad()
    with probe.step(0):
        F.cross_entropy(compiled(images), LABELS).backward()
    assert probe.frame.to_pandas().equals(eager)
    torch._dynamo.reset()


# ---------------------------------------------------------------- the table


def test_what_has_no_heads_stands_at_head_minus_one_and_only_there(make_vit, images):
    vit = make_vit("attention=none")
    probe = AttentionProbe(vit, groups=ALL)
    one_step(vit, images, probe)
    frame = probe.frame.to_pandas()
    assert frame["head"].tolist() == [-1, 0, 1, 2, 3] * 4
    alone = [m.name for m in besides(ALL) if m.heads == "none"]
    rows = frame["head"] == -1
    assert headless(names(ALL))
    assert not headless(names(("sink", "update")))
    assert frame[rows][alone].notna().all(axis=None)
    assert frame[rows][[m.name for m in METRICS]].isna().all(axis=None)
    assert frame[~rows][alone].isna().all(axis=None)
    assert frame[~rows][[m.name for m in METRICS]].notna().all(axis=None)
    scalars = probe.frame.scalars()
    assert scalars["attn/L02/block_out_rms"] == pytest.approx(layers(probe).loc[2, "block_out_rms"])
    assert scalars["attn/L02/max_abs_logit"] == pytest.approx(heads(probe).loc[2]["max_abs_logit"].max())
    assert scalars["attn/L02/w_q_grad_norm"] == pytest.approx(heads(probe).loc[2]["w_q_grad_norm"].mean(), rel=1e-6)


def test_ranks_combine_norms_and_root_mean_squares_as_such():
    metrics = names(ALL)
    a, b = (torch.full((len(metrics), 1, 3), value) for value in (3.0, 4.0))
    out = dict(zip(metrics, combine([a, b], [1, 3], metrics)[:, 0, 0].tolist(), strict=True))
    assert out["score_grad_norm"] == pytest.approx(5.0)
    assert out["block_out_rms"] == pytest.approx(math.sqrt((9 + 3 * 16) / 4))
    assert out["block_in_max"] == 4.0
    assert out["w_q_grad_norm"] == pytest.approx(3.75)
    assert Group((0,), a).rows == 1
