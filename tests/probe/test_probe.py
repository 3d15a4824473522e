"""The probe on real training steps: it changes nothing, misses nothing, and mixes nothing up."""

from __future__ import annotations

import copy
import gc
import io
import math
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkexp import AttentionProbe
from qkexp.config import AttentionConfig
from qkexp.model.attention import Attention
from qkexp.model.vit import attention_layers
from qkexp.probe.check import CoverageError
from qkexp.probe.metrics import METRICS, NAMES
from qkexp.probe.parts import combine
from qkexp.probe.rows import CHUNK_BYTES


def train(vit, steps, probe=None, *, inside=True):
    """Losses, and the gradients of the last step, of a few bf16 steps of SGD on changing images."""
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        images, labels = torch.randn(8, 1, 8, 8, generator=g), torch.randint(10, (8,), generator=g)

        def one(images=images, labels=labels):
            with torch.autocast("cpu", torch.bfloat16):
                logits = vit(images)
            loss = F.cross_entropy(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            if inside:
                optimizer.step()
            losses.append(loss.item())

        if probe is None:
            one()
        else:
            with probe.step(step):
                one()
        if not inside:
            optimizer.step()
    return losses, [p.grad.clone() for p in vit.parameters()]


def table(probe):
    return probe.frame.to_pandas().set_index(["layer", "head"])


def values(probe, metric):
    """(layer, head) of a metric of the last frame."""
    return table(probe)[metric].unstack().to_numpy()


# ---------------------------------------------------------------- it changes nothing


def test_losses_and_gradients_are_bit_identical_with_and_without_a_probe(make_vit, variant, images):
    runs = []
    for probed in (False, True):
        vit = make_vit(f"attention={variant}", "attention.init=match", like=images)
        torch.manual_seed(0)
        result = train(vit, 4, AttentionProbe(vit) if probed else None)
        runs.append((*result, torch.get_rng_state()))
    (losses, grads, state), (probed_losses, probed_grads, probed_state) = runs
    assert losses == probed_losses
    assert len(set(losses)) == 4
    for a, b in zip(grads, probed_grads, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(state, probed_state)


def test_detach_leaves_the_model_as_it_was(make_vit):
    def hooks(vit):
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in vit.modules())

    vit = make_vit("attention=rmsnorm")
    probe = AttentionProbe(vit)
    assert hooks(vit) == 3 * 4
    probe.detach()
    assert hooks(vit) == 0
    probe.detach()  # a second time is harmless


def test_memory_does_not_grow(make_vit, images):
    vit = make_vit("attention=l2", "model.depth=2")
    probe = AttentionProbe(vit)

    def alive():
        gc.collect()
        found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        return len(found), sum(x.untyped_storage().nbytes() for x in found), sum(x.grad_fn is not None for x in found)

    counts = []
    for step in range(300):
        with probe.step(step):
            F.cross_entropy(vit(images[:2]), torch.arange(2)).backward()
        vit.zero_grad()
        probe.frame.scalars()
        if step in (9, 299):
            counts.append(alive())
    assert all(late <= early for early, late in zip(*counts, strict=True))  # what other tests left may go


def test_nothing_of_the_graph_is_kept(make_vit, images):
    vit = make_vit("attention=l2")
    probe = AttentionProbe(vit)
    with probe.step(0):
        vit(images)
        held = [c for layer in probe._layers for c in layer.captures]
        assert not any(x.requires_grad for c in held for x in (c.q, c.k, c.q_length, c.k_length, c.scale))
    assert not any(layer.captures for layer in probe._layers)
    assert not any(group.values.requires_grad for group in probe.frame.groups)


# ---------------------------------------------------------------- it measures what the softmax saw


def test_every_metric_is_there_for_every_layer_and_head(make_vit, variant, images):
    vit = make_vit(f"attention={variant}")
    probe = AttentionProbe(vit)
    with probe.step(12):
        vit(images)
    frame = probe.frame.to_pandas()
    assert list(frame.columns) == ["step", "phase", "layer", "module", "head", *NAMES]
    assert list(zip(frame["layer"], frame["head"], strict=True)) == [(i, h) for i in range(4) for h in range(4)]
    assert list(frame["module"].unique()) == [f"blocks.{i}.attn" for i in range(4)]
    assert set(frame["step"]) == {12}
    assert set(frame["phase"]) == {"train"}
    assert np.isfinite(frame[list(NAMES)].to_numpy()).all()
    assert {str(frame[name].dtype) for name in NAMES} == {"float32"}
    assert {str(frame[name].dtype) for name in ("step", "layer", "head")} == {"int32"}


@pytest.mark.parametrize("overrides", [("attention.scale=learned_per_head",), ("attention.axis=all",)], ids=str)
@pytest.mark.parametrize("preset", ["rmsnorm", "l2_softcap"])
def test_metrics_equal_those_of_independently_captured_tensors(make_vit, reference, images, preset, overrides):
    vit = make_vit(f"attention={preset}", *overrides)
    for layer in attention_layers(vit).values():
        if layer.logit_scale is not None:
            layer.logit_scale.data *= torch.linspace(0.5, 2, layer.logit_scale.numel())
    seen, raw = [], []
    for layer in attention_layers(vit).values():
        layer.core.register_forward_pre_hook(lambda _m, a: seen.append([copy.deepcopy(x) for x in map(cut, a)]))
        layer.qkv.register_forward_hook(lambda _m, _a, y: raw.append(cut(y)))
    probe = AttentionProbe(vit)
    with probe.step(0), torch.autocast("cpu", torch.bfloat16):
        vit(images)
    found, cap = table(probe), 50.0 if "softcap" in preset else None
    for layer, ((q, k, _, scale), projection) in enumerate(zip(seen, raw, strict=True)):
        assert q.dtype == torch.bfloat16
        true = reference(q, k, scale, cap=cap)
        lengths = projection.double().view(8, 17, 3, 4, 16).norm(dim=-1)
        true |= {
            "q_norm_mean": lengths[:, :, 0].mean((0, 1)),
            "q_norm_max": lengths[:, :, 0].amax((0, 1)),
            "k_norm_mean": lengths[:, :, 1].mean((0, 1)),
            "k_norm_max": lengths[:, :, 1].amax((0, 1)),
            "nonfinite": np.zeros(4),
        }
        size = np.exp2(np.floor(np.log2(true["max_abs_logit"])))
        true["score_ulp"] = size * 2.0**-7
        assert set(true) >= set(NAMES)
        for name in NAMES:
            np.testing.assert_allclose(found.loc[layer][name], true[name], rtol=1e-4, atol=1e-4, err_msg=name)


def cut(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def test_a_learned_scale_is_the_one_of_the_forward_pass_though_the_step_updates_it(make_vit):
    """The optimiser's in-place update may happen before the step is measured."""
    frames = []
    for inside in (True, False):
        vit = make_vit("attention=l2")
        probe = AttentionProbe(vit)
        train(vit, 3, probe, inside=inside)
        frames.append(probe.frame.to_pandas())
        assert vit.blocks[0].attn.logit_scale.item() != pytest.approx(values(probe, "score_scale")[0, 0], abs=1e-6)
    assert frames[0].equals(frames[1])


def test_q_or_k_overwritten_after_the_softmax_saw_it_is_an_error(make_vit, images):
    vit = make_vit("attention=rmsnorm")

    def overwrite(_module, args, _out):
        args[1].zero_()

    vit.blocks[2].attn.core.register_forward_hook(overwrite)
    probe = AttentionProbe(vit)
    with pytest.raises(CoverageError, match=r"blocks\.2\.attn.*in place"), probe.step(0), torch.no_grad():
        vit(images)


def test_inference_mode_is_measured(make_vit, images):
    vit = make_vit("attention=l2")
    probe = AttentionProbe(vit)
    frames = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with probe.step(0, phase="val"), mode():
            vit(images)
        frames.append(probe.frame.to_pandas())
    assert frames[0].equals(frames[1])
    assert frames[0].equals(frames[2])
    assert set(frames[0]["phase"]) == {"val"}


@pytest.mark.parametrize("preset", ["none", "rmsnorm", "layernorm", "l2", "softcap"])
def test_forced_growth_of_the_weights(make_vit, images, preset):
    """W_q, W_k times c: logits grow by c² without a norm and stay put with one; entropy falls to 0, finite."""
    vit = make_vit(f"attention={preset}")
    probe = AttentionProbe(vit)

    def measure():
        with probe.step(0):
            vit(images)
        frame = table(probe).loc[0]
        assert np.isfinite(table(probe)[list(NAMES)].to_numpy()).all()
        return frame

    def grow(c):
        layer = vit.blocks[0].attn
        layer.qkv.weight.data[: 2 * layer.heads * layer.head_dim] *= c

    start = measure()
    grow(8.0)
    after = measure()
    np.testing.assert_allclose(after["q_norm_mean"], 8 * start["q_norm_mean"], rtol=1e-4)
    if preset in ("none", "softcap"):
        np.testing.assert_allclose(after["max_abs_logit"], 64 * start["max_abs_logit"], rtol=1e-4)
        np.testing.assert_allclose(after["max_pair_cos"], start["max_pair_cos"], rtol=1e-3)
    else:
        np.testing.assert_allclose(after["max_abs_logit"], start["max_abs_logit"], rtol=1e-3)
        np.testing.assert_allclose(after["q_in_norm_mean"], start["q_in_norm_mean"], rtol=1e-3)
    grow(1e3)
    last = measure()
    if preset == "none":
        assert (last["entropy_mean"] < 1e-3).all()
        assert (last["entropy_mean"] >= 0).all()
        assert (last["collapsed_rows"] > 0.99).all()
        assert (last["max_abs_logit"] > 1e5).all()
    elif preset == "softcap":
        assert (last["max_logit_capped"] == 50.0).all()
        assert (last["max_logit"] > 1e5).all()
    else:
        np.testing.assert_allclose(last["entropy_mean"], start["entropy_mean"], rtol=1e-3)


def test_a_non_finite_head_is_absent_and_the_others_are_not(make_vit, images):
    vit = make_vit("attention=none")
    probe = AttentionProbe(vit)
    layer = vit.blocks[3].attn  # the last: nothing after it is spoiled
    layer.qkv.weight.data[16:32] = math.inf  # W_q of head 1
    with probe.step(0):
        vit(images)
    frame = table(probe)
    assert (frame["nonfinite"].drop((3, 1)) == 0).all()
    assert frame.loc[(3, 1), "nonfinite"] == 8 * 17 * 16 + 8 * 17 * 17
    measured = ["nonfinite", "score_scale", "masked_rows", "k_norm_mean", "k_norm_max"]
    assert set(frame.columns[frame.loc[(3, 1)].notna()]) == {*measured, "step", "phase", "module"}
    assert frame.drop((3, 1))[list(NAMES)].notna().all(axis=None)
    scalars = probe.frame.scalars()
    assert scalars["attn/L03/max_abs_logit"] == pytest.approx(frame.loc[3]["max_abs_logit"].max())
    assert all(math.isfinite(x) for x in scalars.values())


# ---------------------------------------------------------------- which forwards belong to a step


def test_only_every_nth_step_is_probed(make_vit, images):
    vit = make_vit("model.depth=1")
    probe = AttentionProbe(vit, every=3)
    frames = []
    for step in range(7):
        with probe.step(step):
            vit(images)
        frames.append(None if probe.frame is None else probe.frame.step)
    assert frames == [0, None, None, 3, None, None, 6]
    never = AttentionProbe(vit, every=0)
    with never.step(0):
        vit(images)
    assert never.frame is None


def test_forwards_outside_a_step_are_not_measured(make_vit, images):
    vit = make_vit("attention=l2")
    probe = AttentionProbe(vit)
    vit(100 * images)
    with probe.step(0):
        vit(images)
    alone = probe.frame.to_pandas()
    vit(100 * images)  # an evaluation between two steps
    assert probe.frame.to_pandas().equals(alone)
    with probe.step(0):
        vit(images)
    vit(100 * images)
    assert probe.frame.to_pandas().equals(alone)


def test_the_first_images_of_a_batch_are_measured(make_vit, images):
    vit = make_vit("attention=l2")
    few, alone, more = AttentionProbe(vit, images=3), AttentionProbe(vit), AttentionProbe(vit, images=100)
    with few.step(0), more.step(0):
        vit(images)
    with alone.step(0):
        vit(images[:3])
    for name in NAMES:
        np.testing.assert_allclose(values(few, name), values(alone, name), rtol=1e-4, atol=1e-5, err_msg=name)
    with alone.step(0):
        vit(images)
    assert more.frame.to_pandas().equals(alone.frame.to_pandas())


def test_two_forwards_of_a_step_combine_by_each_metrics_own_reduction(make_vit, images):
    vit = make_vit("attention=none")
    vit.blocks[0].attn.qkv.weight.data *= 20
    probe = AttentionProbe(vit)
    parts = [images[:2], 3 * images[2:]]  # unlike in size and in content
    frames = []
    for part in (*parts, torch.cat(parts)):
        with probe.step(0):
            vit(part)
        frames.append({name: values(probe, name) for name in NAMES})
    with probe.step(0):
        for part in parts:
            vit(part)
    first, second, whole = frames
    for metric in METRICS:
        combined = values(probe, metric.name)
        if metric.name == "entropy_p05":
            expected = (2 * first[metric.name] + 6 * second[metric.name]) / 8
        else:  # as if the parts had been one batch
            expected = whole[metric.name]
        np.testing.assert_allclose(combined, expected, rtol=1e-4, atol=1e-5, err_msg=metric.name)
    assert (np.abs(first["max_abs_logit"] - second["max_abs_logit"]) > 1e-3).any()


def test_combining_keeps_a_spoiled_part_visible_and_counts_sum():
    part = torch.arange(2.0 * len(NAMES)).view(len(NAMES), 1, 2)
    spoiled = part.clone()
    spoiled[:, 0, 1] = math.nan
    spoiled[NAMES.index("nonfinite"), 0] = torch.tensor([0.0, 5.0])
    out = dict(zip(NAMES, combine([part, spoiled], [1, 3])[:, 0], strict=True))
    for name in set(NAMES) - {"nonfinite", "masked_rows"}:
        assert out[name][1].isnan(), name
        assert out[name][0] == part[NAMES.index(name), 0, 0], name
    assert out["nonfinite"].tolist() == (part[NAMES.index("nonfinite"), 0] + torch.tensor([0.0, 5.0])).tolist()


def test_activation_checkpointing_does_not_count_a_layer_twice(make_vit, images):
    plain, saving = make_vit("attention=l2"), make_vit("attention=l2")
    saving.set_grad_checkpointing(True)
    frames = []
    for vit in (plain, saving):
        probe = AttentionProbe(vit)
        with probe.step(0):
            F.cross_entropy(vit(images), torch.arange(8)).backward()
            assert [len(layer.captures) for layer in probe._layers] == [1] * 4
        frames.append(probe.frame.to_pandas())
    assert frames[0].equals(frames[1])


class Pair(nn.Module):
    """Two attention layers of unlike shapes: 4 heads on all tokens, then 8 on every other one."""

    def __init__(self):
        super().__init__()
        cfg = AttentionConfig(backend="explicit")
        self.a, self.b = (Attention(32, h, 17, cfg, qkv_bias=True, proj_bias=True) for h in (4, 8))

    def forward(self, x):
        return self.b(self.a(x)[:, ::2])


def test_layers_of_unlike_shapes_share_a_frame():
    model = Pair()
    probe = AttentionProbe(model)
    with probe.step(0):
        model(torch.randn(2, 17, 32))
    frame = probe.frame.to_pandas()
    assert frame.groupby("module").size().to_dict() == {"a": 4, "b": 8}
    assert (frame.groupby("module")["entropy_mean"].max() <= np.log([17, 9]) + 1e-6).all()
    assert len(probe.frame.scalars()) == 2 * len(NAMES)


def test_a_layer_called_twice_is_one_layer():
    model = Pair()
    probe = AttentionProbe(model)
    x = torch.randn(2, 17, 32)
    with probe.step(0):
        model.b(model.a(model.a(x)))
    assert list(probe.frame.to_pandas().groupby("module").size()) == [4, 8]


# ---------------------------------------------------------------- coverage


def test_a_model_without_known_attention_is_refused():
    with pytest.raises(CoverageError, match="Linear"):
        AttentionProbe(nn.Linear(2, 2))


def test_an_unused_layer_is_named_after_the_first_probed_step(make_vit, images):
    vit = make_vit()
    vit.spare = Attention(32, 4, 17, AttentionConfig(backend="explicit"), qkv_bias=True, proj_bias=True)
    probe = AttentionProbe(vit, every=2)
    with probe.step(1):
        vit(images)
    with pytest.raises(CoverageError, match=r"1 of 5 .*: spare;"), probe.step(2):
        vit(images)
    assert probe.frame is None


@pytest.mark.parametrize("passed_by", ["core", "q_norm", "k_norm"])
def test_a_part_called_without_its_hooks_is_named(make_vit, images, passed_by):
    vit = make_vit("attention=rmsnorm")
    part = getattr(vit.blocks[1].attn, passed_by)
    probe = AttentionProbe(vit)
    part._forward_pre_hooks.clear()  # as part.forward(x) would do
    with pytest.raises(CoverageError, match=r"1 of 4 .*blocks\.1\.attn"), probe.step(0):
        vit(images)


def test_a_layer_called_as_module_forward_is_measured_all_the_same(make_vit, images):
    vit = make_vit("attention=l2")
    probe = AttentionProbe(vit)
    with probe.step(0):
        vit(images)
    before = probe.frame.to_pandas()
    block = vit.blocks[1]

    def forward(self, x):
        x = x + self.attn.forward(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    block.forward = types.MethodType(forward, block)
    with probe.step(0):
        vit(images)
    assert probe.frame.to_pandas().equals(before)


def test_a_step_without_any_forward_is_an_error_at_first_and_an_empty_frame_later(make_vit, images):
    vit = make_vit()
    probe = AttentionProbe(vit)
    with pytest.raises(CoverageError, match="4 of 4"), probe.step(0):
        pass
    with probe.step(1):
        vit(images)
    assert probe.frame is not None


@pytest.mark.parametrize("fault", ["the step raises", "a layer is missing"])
def test_a_failed_step_leaves_the_probe_usable(make_vit, images, fault):
    vit = make_vit("attention=l2")
    probe = AttentionProbe(vit)
    with probe.step(0):
        vit(images)
    expected = probe.frame.to_pandas()
    error = RuntimeError if fault == "the step raises" else CoverageError

    def fail():
        vit(100 * images)
        if fault == "the step raises":
            raise RuntimeError("out of memory")
        probe._layers[2].captures.clear()

    with pytest.raises(error), probe.step(1):
        fail()
    assert probe.frame is None
    assert not probe.active
    vit(100 * images)
    with probe.step(0):
        vit(images)
    assert probe.frame.to_pandas().equals(expected)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_probed_model_does_not_write_into_the_probe(make_vit, images, how):
    vit = make_vit("attention=l2")
    probe = AttentionProbe(vit)
    with probe.step(0):
        vit(images)
    alone = probe.frame.to_pandas()
    if how == "deepcopy":
        other = copy.deepcopy(vit)
    else:
        buffer = io.BytesIO()
        torch.save(vit, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert torch.equal(other(images), vit(images))
    with probe.step(0):
        vit(images)
        other(100 * images)
    assert probe.frame.to_pandas().equals(alone)
    fresh = AttentionProbe(vit)
    with pytest.raises(CoverageError, match="belong to a copy"), fresh.step(0):
        other(images)
    own = AttentionProbe(other)  # the copy can be probed for itself
    with own.step(0):
        other(images)
    assert own.frame.to_pandas().equals(alone)


def test_an_averaged_model_is_silent(make_vit, images):
    vit = make_vit()
    probe = AttentionProbe(vit)
    average = torch.optim.swa_utils.AveragedModel(vit)
    with probe.step(0):
        vit(images)
        average(images)
        assert [len(layer.captures) for layer in probe._layers] == [1] * 4


# ---------------------------------------------------------------- under compile


def test_a_compiled_model_shows_the_same_in_one_graph(make_vit, images):
    vit = make_vit("attention=l2", "model.depth=2")
    probe = AttentionProbe(vit)
    with probe.step(0):
        vit(images)
    eager = probe.frame.to_pandas()
    compiled = torch.compile(vit, backend="eager", fullgraph=True)
    with probe.step(0):
        compiled(images)
    assert probe.frame.to_pandas().equals(eager)
    torch._dynamo.reset()


# ---------------------------------------------------------------- a part of a batch, and more metrics


def test_queries_are_a_part_whose_means_are_unbiased_and_whose_maxima_say_what_they_are(make_vit, images):
    vit = make_vit("attention=l2")
    whole, part = AttentionProbe(vit, every=5), AttentionProbe(vit, every=5, queries=4)
    frames = []
    for step in range(0, 5 * 17, 5):  # each phase of 17 tokens once
        with whole.step(step), part.step(step):
            vit(images)
        frames.append({name: values(part, name) for name in NAMES})
        assert part.frame.subsampled
        assert part.frame.to_pandas()["subsampled"].all()
    assert not whole.frame.subsampled
    assert "subsampled" not in whole.frame.to_pandas()
    for name in ("entropy_mean", "entropy_frac", "collapsed_rows", "attn_max_mean", "logit_gap_mean", "q_in_norm_mean"):
        mean = np.mean([frame[name] for frame in frames], axis=0)
        np.testing.assert_allclose(mean, values(whole, name), rtol=1e-4, atol=1e-5, err_msg=name)
    largest = [frame["max_abs_logit"] for frame in frames]
    assert (np.array(largest) <= values(whole, "max_abs_logit") * (1 + 1e-5)).all()
    np.testing.assert_allclose(np.max(largest, axis=0), values(whole, "max_abs_logit"), rtol=1e-5)


def test_queries_depend_on_the_step_alone(make_vit, images):
    """A resumed run measures what it would have measured; and no random number is drawn."""
    vit = make_vit("attention=l2")
    frames, before = [], torch.get_rng_state()
    for steps in ((0, 2, 4), (4,)):
        probe = AttentionProbe(vit, every=2, queries=3)
        for step in steps:
            with probe.step(step):
                vit(images)
        frames.append(probe.frame.to_pandas())
    assert frames[0].equals(frames[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_as_many_images_and_queries_as_there_are_is_no_subsample(make_vit, images):
    vit = make_vit("attention=l2")
    alone, asked = AttentionProbe(vit), AttentionProbe(vit, images=8, queries=17)
    with alone.step(0), asked.step(0):
        vit(images)
    assert asked.frame.to_pandas().equals(alone.frame.to_pandas())
    few = AttentionProbe(vit, images=7)
    with few.step(0):
        vit(images)
    assert few.frame.subsampled
    with few.step(1):
        vit(images[:2])
    assert not few.frame.subsampled


def test_micro_batches_of_a_step_show_other_queries_and_count_by_those(make_vit, images):
    vit = make_vit("attention=none")
    probe = AttentionProbe(vit, queries=5)
    with probe.step(0):
        vit(images)
    whole = table(probe)
    with probe.step(0):
        vit(images[:2])
        vit(images[2:])
    for name in ("entropy_mean", "max_logit", "logit_gap_mean"):
        np.testing.assert_allclose(table(probe)[name], whole[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_groups_add_their_columns_and_change_no_other(make_vit, images):
    vit = make_vit("attention=softcap")
    plain, more = AttentionProbe(vit), AttentionProbe(vit, groups=("bound", "sink"))
    with plain.step(0), more.step(0):
        vit(images[:3])
        vit(images[3:])
    few, all_of_them = plain.frame.to_pandas(), more.frame.to_pandas()
    assert list(all_of_them.columns) == [*few.columns, "sink_mean", "entropy_bound_mean"]
    assert few.equals(all_of_them[few.columns])
    assert (all_of_them["entropy_bound_mean"] <= all_of_them["entropy_mean"]).all()
    assert set(more.frame.scalars()) - set(plain.frame.scalars()) == {
        f"attn/L{i:02d}/{name}" for i in range(4) for name in ("sink_mean", "entropy_bound_mean")
    }


def test_an_unknown_group_is_refused(make_vit):
    with pytest.raises(ValueError, match="sink"):
        AttentionProbe(make_vit(), groups=("sinks",))


def test_a_compiled_model_shows_that_images_were_left_out(make_vit, images):
    vit = make_vit("attention=l2", "model.depth=2")
    probe = AttentionProbe(vit, images=3)
    compiled = torch.compile(vit, backend="eager", fullgraph=True)
    for step in range(2):
        with probe.step(step):
            compiled(images)
        assert probe.frame.subsampled
    torch._dynamo.reset()


def test_large_layers_are_measured_at_once_and_show_the_same(make_vit, images, monkeypatch):
    """q and k of a large layer are not kept until the step ends; means, maxima and counts do not notice."""
    vit = make_vit("attention=l2")
    probe, parts = AttentionProbe(vit, queries=9), (images[:2], images[2:])
    frames = []
    for limit in (CHUNK_BYTES, 0):
        monkeypatch.setattr("qkexp.probe.probe.CHUNK_BYTES", limit)
        with probe.step(3):
            for part in parts:
                vit(part)
            assert [len(layer.captures) for layer in probe._layers] == [0 if limit == 0 else 2] * 4
        frames.append(probe.frame.to_pandas())
        assert (probe.spent > 0) == (limit == 0)
    assert list(frames[0].columns) == list(frames[1].columns)
    numbers = list(NAMES)
    np.testing.assert_allclose(frames[1][numbers], frames[0][numbers], rtol=1e-5, atol=1e-6)
    with probe.step(4):
        vit(images)
    assert not any(layer.done for layer in probe._layers)
