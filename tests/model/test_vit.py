"""The model: timm's own outputs, the same start for every variant, and norms that are really applied."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch.nn import functional as F

from qkexp.config import ConfigError
from qkexp.model.attention import Attention, default_scale
from qkexp.model.qk_norm import QKNorm
from qkexp.model.vit import attention_layers, build_vit
from qkexp.probe.stats import attention_stats

INSIDE = (".q_norm.", ".k_norm.", "logit_scale")


# ---------------------------------------------------------------- timm's model


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit_tiny_patch16_224", {"depth": 3, "width": 64, "heads": 4, "patch": 2}),
        ("vit_base_patch16_reg4_gap_256", {"depth": 2, "width": 48, "heads": 3, "patch": 4}),
        ("vit_base_patch16_clip_224", {"depth": 2, "width": 48, "heads": 2, "patch": 4}),
    ],
)
def test_without_norm_it_computes_what_timm_computes(make_vit, images, name, sizes):
    vit = make_vit("attention=none", f"model.name={name}", *(f"model.{k}={v}" for k, v in sizes.items()))
    theirs = {"width": "embed_dim", "heads": "num_heads", "patch": "patch_size", "depth": "depth"}
    other = timm.create_model(name, img_size=8, in_chans=1, num_classes=10, **{theirs[k]: v for k, v in sizes.items()})
    missing = other.load_state_dict(vit.state_dict(), strict=True)
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    torch.testing.assert_close(vit(images), other(images), rtol=1e-5, atol=1e-5)


def test_initial_weights_are_timms(make_vit):
    vit = make_vit("attention=none")
    for layer in attention_layers(vit).values():
        assert layer.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert layer.qkv.bias.abs().max() == 0
        assert layer.proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_rope_224",
        "vit_small_patch16_dinov3",
        "vit_relpos_small_patch16_224",
        "vit_srelpos_small_patch16_224",
        "vit_dwee_patch16_reg1_gap_256",  # differential attention in a plain block
        "vit_base_patch16_rpn_224",
        "vit_small_patch16_18x2_224",
        "vit_base_patch16_sapiens2",
        "vit_base_r50_s16_224",
        "vitamin_small_224",
        "deit_tiny_distilled_patch16_224",
        "resnet18",
        "vit_tinny_patch16_224",
    ],
)
def test_names_that_are_not_a_plain_vit_are_refused(make_vit, name):
    with pytest.raises(ConfigError) as error:
        make_vit(f"model.name={name}")
    assert error.value.key == "model.name"
    assert name in str(error.value)


def test_sizes_that_do_not_fit_are_refused_by_key(make_vit):
    with pytest.raises(ConfigError, match=r"model"):
        make_vit("model.width=null", "model.heads=5")  # timm's width of 192 is no multiple


def test_building_leaves_the_global_random_state_alone_and_depends_on_the_seed_only(make_vit):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make_vit("model.depth=1").state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = make_vit("model.depth=1").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = make_vit("model.depth=1", "model.seed=5").state_dict()
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


# ---------------------------------------------------------------- the same start for every variant


def test_variants_share_names_and_initial_weights_outside_attention(make_vit, variant):
    plain = make_vit("attention=none").state_dict()
    vit = make_vit(f"attention={variant}").state_dict()
    common = {name: w for name, w in vit.items() if not any(part in name for part in INSIDE)}
    assert common.keys() == plain.keys()
    assert all(torch.equal(plain[name], common[name]) for name in plain)


@pytest.mark.parametrize("overrides", [("attention=none",), ("attention=softcap",), ("attention.scale=one",)], ids=str)
def test_match_gives_rmsnorms_spread_of_logits_in_every_layer(make_vit, images, overrides, spreads):
    matched = spreads(make_vit(*overrides, "attention.init=match", like=images), images)
    target = spreads(make_vit("attention=rmsnorm"), images)
    torch.testing.assert_close(matched, target, rtol=0.02, atol=0)
    assert (spreads(make_vit("attention=none"), images) < 0.5 * target).all()  # what matching is for


def test_match_scales_q_and_k_alike_and_nothing_else(make_vit, images):
    plain = make_vit("attention=none").state_dict()
    matched = make_vit("attention=none", "attention.init=match", like=images).state_dict()
    assert plain.keys() == matched.keys()
    for name, weight in plain.items():
        if name.endswith("attn.qkv.weight"):
            q, k, v = matched[name].chunk(3)
            q0, k0, v0 = weight.chunk(3)
            factor = (q.norm() / q0.norm()).item()
            assert factor > 1
            torch.testing.assert_close(q, factor * q0)
            torch.testing.assert_close(k, factor * k0)
            assert torch.equal(v, v0)
        else:
            assert torch.equal(weight, matched[name]), name


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "l2"])
def test_match_changes_no_variant_with_a_norm(make_vit, norm):
    plain, matched = make_vit(f"attention={norm}"), make_vit(f"attention={norm}", "attention.init=match")
    for a, b in zip(plain.parameters(), matched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_match_without_images_is_refused(make_vit):
    with pytest.raises(ValueError, match="images"):
        make_vit("attention=none", "attention.init=match")


# ---------------------------------------------------------------- norms and scales do something


def test_a_norm_makes_logits_blind_to_the_size_of_w_q(make_vit, images, normed, spreads):
    vit = make_vit(f"attention={normed}", "attention.eps=1e-6")
    before, output = spreads(vit, images), vit(images)
    for layer in attention_layers(vit).values():
        layer.qkv.weight.data[: layer.heads * layer.head_dim] *= 10
    torch.testing.assert_close(spreads(vit, images), before, rtol=1e-3, atol=0)
    torch.testing.assert_close(vit(images), output, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", ["none", "softcap"])
def test_without_a_norm_logits_grow_with_w_q(make_vit, images, variant, spreads):
    vit = make_vit(f"attention={variant}")
    before = spreads(vit, images)[0]
    layer = next(iter(attention_layers(vit).values()))
    layer.qkv.weight.data[: layer.heads * layer.head_dim] *= 10
    torch.testing.assert_close(spreads(vit, images)[0], 10 * before, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("attention=layernorm", "attention.bias=true"),
        ("attention=rmsnorm", "attention.gain=per_head"),
        ("attention=rmsnorm", "attention.axis=all"),
        ("attention=rmsnorm", "attention.gain_offset=1"),
        ("attention=l2",),
        ("attention=l2_softcap", "attention.scale=learned_per_head"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["explicit", "sdpa"])
def test_every_gain_and_scale_gets_a_gradient(make_vit, images, overrides, backend):
    if backend == "sdpa" and "softcap" in overrides[0]:
        backend = "explicit"
    vit = make_vit(*overrides, f"attention.backend={backend}")
    with torch.autocast("cpu", torch.bfloat16):
        logits = vit(images)
    F.cross_entropy(logits.float(), torch.arange(8)).backward()
    inside = {n: p for n, p in vit.named_parameters() if any(part in n for part in INSIDE)}
    assert inside
    for name, parameter in vit.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("k_norm.bias"):  # adds the same to every score of a row, which softmax ignores
            assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize(("scale", "shape"), [("learned", (1,)), ("learned_per_head", (4,))])
def test_learned_scales_are_never_zero_dimensional_and_start_at_log2_n(make_vit, scale, shape):
    for layer in attention_layers(make_vit("attention=l2", f"attention.scale={scale}")).values():
        assert tuple(layer.logit_scale.shape) == shape
        assert layer.logit_scale.tolist() == pytest.approx([math.log2(17**2 - 17)] * shape[0])


def test_the_start_of_a_scale_counts_class_and_register_tokens(make_vit):
    vit = make_vit("attention=l2", "model.name=vit_base_patch16_reg4_gap_256")
    layer = next(iter(attention_layers(vit).values()))
    assert layer.logit_scale.item() == pytest.approx(default_scale(16 + 4))


@pytest.mark.parametrize(
    ("overrides", "scale"),
    [
        (("attention=none",), 0.25),
        (("attention.scale=one",), 1.0),
        (("attention.scale=fixed", "attention.scale_init=3"), 3.0),
        (("attention.scale=fixed",), math.log2(17**2 - 17)),
        (("attention=l2", "attention.scale_init=5"), 5.0),
    ],
    ids=str,
)
def test_the_core_is_called_with_the_configured_scale(make_vit, images, overrides, scale, captured):
    for _, _, seen in captured(make_vit(*overrides), images):
        assert float(seen) == pytest.approx(scale)


def test_backends_agree_on_a_whole_model(make_vit, images):
    for variant in ("none", "layernorm", "l2"):
        outputs = [
            make_vit(f"attention={variant}", f"attention.backend={backend}")(images) for backend in ("explicit", "sdpa")
        ]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_core_and_norms_are_called_in_the_documented_layout(make_vit, images):
    vit = make_vit("attention=l2")
    layer = next(iter(attention_layers(vit).values()))
    shapes = {}
    layer.q_norm.register_forward_pre_hook(lambda _m, a: shapes.update(q_norm=a[0].shape))
    layer.core.register_forward_pre_hook(lambda _m, a: shapes.update(core=[x.shape for x in a[:3]]))
    vit(images)
    assert shapes == {"q_norm": (8, 17, 4, 16), "core": [(8, 4, 17, 16)] * 3}
    assert isinstance(layer, Attention)
    assert list(layer.core.parameters()) == []


# ---------------------------------------------------------------- entropy at the start


def iid(norm: QKNorm | None, scale: float) -> dict[str, float]:
    """Mean entropy and max |logit| of 197 independent Gaussian queries and keys of width 64."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(32, 197, 1, 64, generator=g) for _ in range(2))
    if norm is not None:
        q, k = norm(q), norm(k)
    stats = attention_stats(q.transpose(1, 2), k.transpose(1, 2), scale)
    return {"entropy": stats["entropy_mean"].item(), "largest": stats["max_abs_logit"].item()}


@pytest.mark.parametrize(
    ("options", "scale", "entropy"),
    [
        ({"kind": "rms"}, 64**-0.5, 4.79),
        ({"kind": "rms", "center": True}, 64**-0.5, 4.79),
        ({"kind": "l2", "gain": "none"}, 15.24, 3.74),
        ({"kind": "l2", "gain": "none"}, 10.0, 4.54),
        ({"kind": "rms"}, 1.0, 0.76),  # without 1/sqrt(d) a norm is sharp, not uniform
        ({"kind": "l2", "gain": "none"}, 64**-0.5, 5.283),
        ({"kind": "l2", "gain": "none"}, 1.0, 5.275),
    ],
    ids=str,
)
def test_entropy_of_random_queries_and_keys_is_where_calculation_puts_it(options, scale, entropy):
    found = iid(QKNorm(1, 64, **options), scale)
    assert found["entropy"] == pytest.approx(entropy, abs=0.012 if entropy > 1 else 0.03)
    bound = scale if options["kind"] == "l2" else scale * 64
    assert found["largest"] <= bound * (1 + 1e-5)


def test_the_scale_that_l2_starts_with_is_the_published_one():
    assert default_scale(197) == pytest.approx(15.24, abs=0.005)
    assert default_scale(17) == pytest.approx(8.09, abs=0.005)


@pytest.mark.parametrize(
    ("attention", "low", "high", "largest"),
    [
        ("none", 5.23, 5.25, (1.2, 2.5)),
        ("layernorm", 4.78, 4.93, (4.0, 5.5)),
        ("softcap", 5.23, 5.25, (1.2, 2.5)),
        ("l2", 3.5, 4.1, (8.0, 15.24)),
    ],
)
def test_step_0_entropy_of_vit_base_is_at_its_anchor(make_config, attention, low, high, largest, captured):
    cfg = make_config(f"attention={attention}", "model=vit_base", "model.depth=2", "data=synthetic")
    vit = build_vit(cfg, image_size=224, channels=3, classes=10)
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    for q, k, scale in captured(vit, images):
        stats = attention_stats(q, k, scale)
        assert low < stats["entropy_mean"].mean() < high < math.log(197)
        assert largest[0] < stats["max_abs_logit"].max() < largest[1]
