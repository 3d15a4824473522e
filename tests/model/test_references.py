"""Each preset equals the real implementation: same weights, forward and backward, float32."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import references
import timm
import torch
from timm.layers import RotaryEmbeddingCat
from timm.layers.attention import AttentionRope
from timm.models.vision_transformer import Attention as TimmAttention
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import nn

from qkexp.compose import options
from qkexp.config import identity
from qkexp.model.attention import Attention
from qkexp.model.rotary import AxialRotary

SIZES = {"img_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 2, "num_heads": 4, "patch_size": 2}
TOLERANCE = 1e-5


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("preset", references.REFERENCES)
def test_a_preset_computes_what_the_real_implementation_computes(preset, record_property):
    found = references.largest_difference(preset)
    record_property("largest_difference", found)
    assert max(found.values()) <= TOLERANCE


@pytest.mark.parametrize(
    ("preset", "change"),
    [
        ("qwen3", {"gain_offset": 1}),
        ("qwen3", {"rope_order": "rope_first"}),
        ("qwen3", {"axis": "all"}),
        ("gemma2", {"softcap": None}),
        ("gemma3", {"gain_offset": 0}),
        ("command_r_plus", {"center": False}),
        ("command_r_plus", {"eps": 1e-2}),
        ("olmo2", {"axis": "head", "gain": "per_head"}),
        ("llama4", {"scale": "one"}),
        ("swin_v2", {"scale_log": False}),
        ("henry2020", {"scale": "inv_sqrt_d"}),
        ("vit22b", {"center": False}),
        ("vit22b_rms", {"center": True}),
    ],
    ids=str,
)
def test_the_comparison_notices_every_switch(preset, change, monkeypatch):
    """A proof that would pass with the wrong formula proves nothing."""
    wrong = dataclasses.replace(references.attention_of(preset), **change)
    monkeypatch.setattr(references, "attention_of", lambda _: wrong)
    try:
        found = max(references.largest_difference(preset).values())
    except (RuntimeError, KeyError):  # parameters of other shapes or names
        return
    assert found > 100 * TOLERANCE


def test_presets_that_set_the_same_are_the_same_run(make_config, variants, aliases):
    for name, same in aliases.items():
        assert identity(make_config(f"attention={name}")) == identity(make_config(f"attention={same}"))
    assert len({identity(make_config(f"attention={name}")) for name in variants}) == len(variants)
    assert set(options("attention")) == {*variants, *aliases}
    assert set(references.REFERENCES) < {*variants, *aliases}


# ---------------------------------------------------------------- whole models, and what stands around the norm


def test_a_whole_vit_with_timms_qk_norm_is_timms(make_vit, images):
    ours = make_vit("attention=timm", "model.depth=2")
    theirs = VisionTransformer(**SIZES, qk_norm=True)
    randomise(ours)
    assert not any(theirs.load_state_dict(ours.state_dict(), strict=True))
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_the_parallel_block_with_timms_qk_norm_is_timms(make_vit, images):
    block = functools.partial(ParallelScalingBlock, fuse_out_proj=True)
    ours = make_vit("attention=timm", "model.depth=2", "model.block_norm=parallel")
    theirs = VisionTransformer(**SIZES, qk_norm=True, qkv_bias=False, block_fn=block)
    randomise(ours)
    state = {name.replace(".attn.", "."): p for name, p in ours.state_dict().items()}
    assert not any(theirs.load_state_dict(state, strict=True))
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_a_whole_vit_with_axial_rope_is_timms_rope_vit(make_vit, images):
    ours = make_vit("model.rope=axial", "model.depth=2", "model.layer_scale=0.5")
    sizes = {k: v for k, v in SIZES.items() if k != "img_size"}
    theirs = timm.create_model("vit_small_patch16_rope_ape_224", img_size=8, **sizes)
    randomise(ours)
    ours.pos_embed.data[:, 0] = 0  # theirs has none for the class token
    state = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", n): p for n, p in ours.state_dict().items()}
    state["pos_embed"] = ours.pos_embed[:, 1:]
    assert not any(theirs.load_state_dict(state, strict=True))
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)
    ours.blocks[0].attn.rotary = nn.Identity()
    assert (ours(images) - theirs(images)).abs().max() > 1e-3  # the rotation is felt


@pytest.mark.parametrize("grid", [(4, 4), (3, 5)], ids=str)
def test_norm_then_axial_rope_is_timms_attention_with_both(grid, make_config):
    prefix, tokens = 2, 2 + grid[0] * grid[1]
    cfg = make_config("attention=timm").attention
    ours = Attention(64, 4, tokens, cfg, rotary=AxialRotary(16, grid, prefix), qkv_bias=True)
    norm = functools.partial(nn.LayerNorm, eps=1e-6)
    theirs = AttentionRope(64, 4, num_prefix_tokens=prefix, qk_norm=True, norm_layer=norm)
    rope = RotaryEmbeddingCat(16, temperature=100.0, in_pixels=False, feat_shape=list(grid), grid_indexing="xy")
    randomise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x, rope=rope.get_embed()), rtol=1e-5, atol=1e-5)


def test_the_gate_of_each_channel_is_timms(make_config):
    ours = Attention(64, 4, 17, make_config("attention.gate=channel").attention, qkv_bias=True)
    theirs = TimmAttention(64, 4, qkv_bias=True, gated=True)
    randomise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
