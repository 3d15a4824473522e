"""Block placements: timm's own outputs where it has them, the written formula where it has not."""

from __future__ import annotations

import functools

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn
from torch.nn import functional as F

from qkexp.config import ConfigError, OptimConfig
from qkexp.model.blocks import BLOCKS
from qkexp.model.parts import PARTS, pieces
from qkexp.train.optim import Updater, decays

PLACEMENTS = tuple(BLOCKS)
SIZES = {"img_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 4, "num_heads": 4, "patch_size": 2}


def randomise(model: nn.Module) -> None:
    """Move every parameter off its start: gains of 1 and biases of 0 would hide a mistake."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> str:
    return request.param


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("placement", "theirs"),
    [
        ("res_post", {"block_fn": ResPostBlock}),
        ("res_post", {"block_fn": ResPostBlock, "init_values": 0.1}),
        ("parallel", {"block_fn": functools.partial(ParallelScalingBlock, fuse_out_proj=True), "qkv_bias": False}),
    ],
    ids=["res_post", "res_post-layer_scale", "parallel"],
)
def test_placements_that_timm_has_compute_what_timm_computes_also_in_backward(make_vit, images, placement, theirs):
    scale = f"model.layer_scale={theirs.get('init_values', 'null')}"
    ours = make_vit(f"model.block_norm={placement}", scale)
    other = VisionTransformer(**SIZES, **theirs)
    start = dict(ours.named_parameters())["blocks.0.norm1.weight"][0].item() if placement == "res_post" else None
    assert start in (None, 1.0) or start == pytest.approx(0.1)
    randomise(ours)
    assert not any(other.load_state_dict(ours.state_dict(), strict=True))
    outputs = [m(images) for m in (ours, other)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for output in outputs:
        F.cross_entropy(output, torch.arange(8)).backward()
    gradients = dict(other.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name].grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("scaled", [False, True])
def test_post_norm_normalises_the_sum_and_no_norm_normalises_nothing(make_vit, scaled):
    x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(1))
    extra = ("model.layer_scale=0.5",) if scaled else ()
    factor = 0.5 if scaled else 1.0
    block = make_vit("model.block_norm=post", *extra).blocks[0]
    half = F.layer_norm(x + factor * block.attn(x), (64,), eps=1e-6)
    torch.testing.assert_close(block(x), F.layer_norm(half + factor * block.mlp(half), (64,), eps=1e-6))
    block = make_vit("model.block_norm=none", *extra).blocks[0]
    half = x + factor * block.attn(x)
    torch.testing.assert_close(block(x), half + factor * block.mlp(half))
    assert not any(isinstance(m, nn.LayerNorm) for m in block.modules())


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch14_dinov2",  # layer scale
        "vit_giant_patch14_dinov2",  # gated MLP
        "vit_small_patch14_reg4_dinov2",  # registers without position
        "vit_base_patch16_siglip_224",  # MAP head
        "vit_medium_patch16_gap_240",  # pooled, no class token
    ],
)
def test_plain_timm_vits_with_more_than_the_basics_compute_what_timm_computes(make_vit, images, name):
    vit = make_vit(f"model.name={name}", "model.mlp_ratio=4")
    other = timm.create_model(name, **SIZES, mlp_ratio=4)
    randomise(vit)
    assert not any(other.load_state_dict(vit.state_dict(), strict=True))
    torch.testing.assert_close(vit(images), other(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "theirs"),
    [
        (("model.registers=3",), {"reg_tokens": 3}),
        (("model.pool=map",), {"global_pool": "map", "class_token": False}),
        (("model.pool=avg",), {"global_pool": "avg", "class_token": False}),
        (("model.mlp_ratio=2", "model.qkv_bias=false"), {"mlp_ratio": 2.0, "qkv_bias": False}),
        (("model.layer_scale=0.1",), {"init_values": 0.1}),
    ],
    ids=str,
)
def test_overrides_are_timms_own_options(make_vit, images, overrides, theirs):
    vit, other = make_vit(*overrides), VisionTransformer(**SIZES, **theirs)
    randomise(vit)
    assert not any(other.load_state_dict(vit.state_dict(), strict=True))
    torch.testing.assert_close(vit(images), other(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["dropout", "drop_path"])
def test_dropout_acts_in_training_only_and_draws_from_the_runs_generator(make_vit, images, placement, key):
    vit = make_vit(f"model.block_norm={placement}", f"model.{key}=0.5")
    vit.train()
    torch.manual_seed(0)
    first, second = vit(images), vit(images)
    torch.manual_seed(0)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(vit(images), first)
    plain = make_vit(f"model.block_norm={placement}").eval()
    torch.testing.assert_close(vit.eval()(images), plain(images))


def test_parallel_refuses_what_it_cannot_fuse(make_vit):
    with pytest.raises(ConfigError, match=r"model\.qkv_bias"):
        make_vit("model.block_norm=parallel", "model.qkv_bias=true")
    with pytest.raises(ConfigError, match="mlp_layer"):
        make_vit("model.block_norm=parallel", "model.name=vit_giant_patch14_dinov2", "model.mlp_ratio=4")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vit_base_patch16_rpn_224", "model.block_norm=res_post"),
        ("vit_base_patch16_xp_224", "model.block_norm=parallel"),
        ("vit_relpos_small_patch16_224", "VisionTransformerRelPos"),
        ("vit_base_r50_s16_224", "HybridEmbed"),
        ("vit_dwee_patch16_reg1_gap_256", "DiffAttention"),
        ("resnet18", "of its own kind"),
    ],
)
def test_a_refused_name_says_why_and_what_to_take_instead(make_vit, name, hint):
    with pytest.raises(ConfigError, match=hint):
        make_vit(f"model.name={name}")


# ---------------------------------------------------------------- variants in every placement


def test_variants_share_names_and_initial_weights_outside_attention_in_every_placement(make_vit, placement, variant):
    plain = make_vit(f"model.block_norm={placement}").state_dict()
    vit = make_vit(f"model.block_norm={placement}", f"attention={variant}").state_dict()
    common = {n: w for n, w in vit.items() if not any(p in n for p in (".q_norm.", ".k_norm.", "logit_scale"))}
    assert common.keys() == plain.keys()
    assert all(torch.equal(plain[name], common[name]) for name in plain)


def test_a_norm_makes_the_output_blind_to_the_size_of_w_q_in_every_placement(make_vit, images, placement):
    vit = make_vit(f"model.block_norm={placement}", "attention=rmsnorm")
    parameters = dict(vit.named_parameters())
    outputs = []
    for _ in range(2):  # from 100 on: at their start the queries of un-normed inputs are not large beside eps
        with torch.no_grad():
            for piece in pieces(vit):
                if piece.role == "q":
                    piece.of(parameters[piece.parameter]).mul_(100)
        outputs.append(vit(images))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_match_gives_rmsnorms_spread_of_logits_in_every_placement(make_vit, images, placement, spreads):
    block = f"model.block_norm={placement}"
    matched = spreads(make_vit(block, "attention.init=match", like=images), images)
    torch.testing.assert_close(matched, spreads(make_vit(block, "attention=rmsnorm"), images), rtol=0.02, atol=0)


# ---------------------------------------------------------------- parameter groups


def test_pieces_cover_every_parameter_once_and_hold_what_their_roles_say(make_vit, placement):
    vit = make_vit(f"model.block_norm={placement}", "attention=l2")
    counts = {n: torch.zeros(p.shape) for n, p in vit.named_parameters()}
    for piece in pieces(vit):
        piece.of(counts[piece.parameter]).add_(1)
    assert all((c == 1).all() for c in counts.values())
    # the role is right if changing it changes what the role names, and nothing before it
    block = vit.blocks[0]
    x = torch.randn(1, 17, 64, generator=torch.Generator().manual_seed(1))
    parameters = dict(block.named_parameters())
    for role in ("q", "k", "v"):
        seen: list[list[torch.Tensor]] = []
        hook = block.attn.core.register_forward_pre_hook(lambda _m, a, seen=seen: seen.append(list(a[:3])))
        block(x)
        for piece in pieces(block):
            if piece.role == role and piece.parameter.endswith("weight"):
                piece.of(parameters[piece.parameter].data).mul_(-1)
        block(x)
        hook.remove()
        changed = [not torch.allclose(a, b) for a, b in zip(*seen, strict=True)]
        assert changed == [role == r for r in ("q", "k", "v")]


def test_only_matrices_decay_in_every_placement_and_variant(make_vit, placement, variant):
    vit = make_vit(
        f"model.block_norm={placement}",
        f"attention={variant}",
        "model.layer_scale=0.1",
        "model.registers=2",
        "model.pool=map",
    )
    inside = ("in_proj", "out_proj") if placement == "parallel" else ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    expected = {f"blocks.{i}.{n}.weight" for i in range(4) for n in inside}
    expected |= {"patch_embed.proj.weight", "head.weight"}
    expected |= {f"attn_pool.{n}.weight" for n in ("q", "kv", "proj", "mlp.fc1", "mlp.fc2")}
    assert {n for n, p in vit.named_parameters() if decays(n, p)} == expected


def test_gradient_parts_of_the_fused_block_are_those_of_its_rows_and_columns(make_vit, images):
    vit = make_vit("model.block_norm=parallel", "attention=l2")
    updater = Updater(vit, OptimConfig(), steps=1)
    F.cross_entropy(vit(images), torch.arange(8)).backward()
    grads = {name: p.grad.clone() for name, p in vit.named_parameters()}
    parts = {
        k.removeprefix("grad_norm_"): v for k, v in updater.grad_norms([float(n) for n in updater.measure()]).items()
    }
    squares = dict.fromkeys(PARTS, 0.0)
    for name, grad in grads.items():
        g = grad.double().square()
        if name.endswith("in_proj.weight"):
            squares["mlp"] += g[:256].sum().item()
            squares["qk"] += g[256:384].sum().item()
            squares["vo"] += g[384:].sum().item()
        elif name.endswith("out_proj.weight"):
            squares["vo"] += g[:, :64].sum().item()
            squares["mlp"] += g[:, 64:].sum().item()
        else:
            part = "mlp" if name.endswith("mlp_bias") else "qk" if "logit_scale" in name else "rest"
            squares[part] += g.sum().item()
    parts.pop("grad_norm")
    assert parts == pytest.approx({k: v**0.5 for k, v in squares.items()}, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_freezing_q_and_k_keeps_their_bits_and_moves_all_else_in_the_fused_block(make_vit, images, optimizer):
    vit = make_vit("model.block_norm=parallel")
    start = {n: p.detach().clone() for n, p in vit.named_parameters()}
    updater = Updater(vit, OptimConfig(name=optimizer, lr=0.1, qk_lr_scale=0.0), steps=1)
    F.cross_entropy(vit(images), torch.arange(8)).backward()
    updater.step(0)
    now = dict(vit.named_parameters())
    group = updater.groups()["q_k_rate_x_0"]
    assert group["parameters"] == 4 * 2 * 64 * 64, "q and k of the fused matrix, not all of it"
    assert group["names"][:2] == ["blocks.0.in_proj.weight[q]", "blocks.0.in_proj.weight[k]"]
    for piece in pieces(vit):
        same = torch.equal(piece.of(now[piece.parameter]), piece.of(start[piece.parameter]))
        assert same == piece.projects_qk, piece
