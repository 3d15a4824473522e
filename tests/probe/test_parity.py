"""Entropy, largest weight and collapsed rows equal those of the weights that each model itself computes."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from torch import nn
from torch.overrides import TorchFunctionMode
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

from qkexp import AttentionProbe

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
SWIN = {"img_size": 32, "window_size": 4, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 24, "num_classes": 5}
NORMED = {"qk_norm": True, "norm_layer": functools.partial(nn.LayerNorm, eps=1e-6)}

TIMM = {
    "vit": ("vit_tiny_patch16_224", SMALL),
    "vit, qk_norm": ("vit_tiny_patch16_224", SMALL | NORMED),
    "vit, res-post": ("vit_tiny_patch16_224", SMALL | {"block_fn": ResPostBlock}),
    "vit, parallel": ("vit_tiny_patch16_224", SMALL | NORMED | {"block_fn": ParallelScalingBlock}),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "siglip, latent pooling": ("vit_base_patch16_siglip_224", SMALL),
    "beit": ("beit_base_patch16_224", SMALL),
    "relpos": ("vit_relpos_small_patch16_224", SMALL),
    "srelpos": ("vit_srelpos_small_patch16_224", SMALL),
    "eva02": ("eva02_tiny_patch14_224", SMALL),
    "rope": ("vit_base_patch16_rope_224", SMALL),
    "dinov3": ("vit_small_patch16_dinov3", SMALL),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "swin v2": ("swinv2_tiny_window8_256", SWIN),
    "hiera": ("hiera_tiny_224", {"img_size": 64, "embed_dim": 24, "num_heads": 1, "stages": (1, 1, 1, 1)}),
    "levit": ("levit_128s", {"img_size": 64}),
    "pvt v2": ("pvt_v2_b0", {}),
}
IMAGE = {"hiera": 64, "levit": 64, "pvt v2": 64}


def sharpen(model, seed=0):
    """Weights away from their start, so that some rows collapse and some do not."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if any(part in name for part in ("qkv", "q_proj", "k_proj", "in_proj", ".q.", ".kv.")) and p.dim() == 2:
            p.data += 0.3 * torch.randn(p.shape, generator=g)
        elif any(part in name for part in ("bias_table", "cpb_mlp", "rel_pos", "latent")):
            p.data += 0.5 * torch.randn(p.shape, generator=g)
    return model


class Softmaxes(TorchFunctionMode):
    """The output of every softmax over the last axis."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__ == "softmax":
            self.weights.append(out.detach())
        return out


def own_weights(model, x):
    """Weights (B, H, N, M) of each layer of a timm model in forward order: unfused, before dropout."""
    model = copy.deepcopy(model)
    for m in model.modules():
        if hasattr(m, "fused_attn"):
            m.fused_attn = False
    with Softmaxes() as seen, torch.no_grad():
        model(x)
    return [p if p.dim() == 4 else p.movedim(1, -3).flatten(0, -4) for p in seen.weights]  # windows are images


def of_weights(p):
    """The three metrics, per head, from weights (B, H, N, M); a weight of exactly 0 or e^-100 was masked."""
    p = p.double().numpy()
    keys = (p > 1e-40).sum(-1) if (p.min() < 1e-40) else np.full(p.shape[:-1], p.shape[-1])
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0.0).sum(-1)
    several = keys > 1
    fraction = np.where(several, entropy / np.log(np.maximum(keys, 2)), np.nan)
    collapsed = np.where(several, fraction < 0.05, np.nan)
    return {
        "entropy_mean": entropy.mean((0, 2)),
        "attn_max_mean": p.max(-1).mean((0, 2)),
        "collapsed_rows": np.nanmean(collapsed, (0, 2)) if several.any() else np.full(p.shape[1], np.nan),
    }


def compare(probe, weights):
    frame = probe.frame.to_pandas()
    assert frame["layer"].nunique() == len(weights)
    worst = 0.0
    for layer, p in enumerate(weights):
        found = frame[frame["layer"] == layer]
        for name, true in of_weights(p).items():
            worst = max(worst, float(np.abs(found[name].to_numpy() - true).max()))
            np.testing.assert_allclose(found[name], true, atol=1e-4, err_msg=f"{probe.names[layer]} {name}")
    return worst


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])
@pytest.mark.parametrize("arch", TIMM)
def test_a_timm_model_shows_the_weights_that_it_computes(arch, fused, record_property):
    name, kwargs = TIMM[arch]
    torch.manual_seed(0)
    model = sharpen(timm.create_model(name, **kwargs)).eval()
    for m in model.modules():
        if hasattr(m, "fused_attn"):
            m.fused_attn = fused
    size = IMAGE.get(arch, 32)
    x = torch.randn(2, 3, size, size)
    probe = AttentionProbe(model)
    with probe.step(0), torch.no_grad():
        model(x)
    assert not probe.coverage.unknown
    assert not probe.coverage.unchecked
    record_property("largest_difference", compare(probe, own_weights(model, x)))
    assert probe.frame.to_pandas()["attn_max_mean"].max() > 0.2  # far enough from uniform to mean something


def test_attn_drop_sees_the_weights_that_the_probe_measures():
    """What people hook by hand, on the unfused path in training, before dropout."""
    torch.manual_seed(0)
    model = sharpen(timm.create_model("vit_tiny_patch16_224", **SMALL, attn_drop_rate=0.5)).train()
    weights = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _m, args: weights.append(args[0].detach()))
    probe = AttentionProbe(model)
    with probe.step(0):
        model(torch.randn(2, 3, 32, 32))
    compare(probe, weights)
    assert set(probe.coverage.unchecked.values()) == {"attention dropout is active"}
    model.eval()
    with probe.step(1):
        model(torch.randn(2, 3, 32, 32))
    assert all(layer.checked for layer in probe._layers)  # done when it can be


# ---------------------------------------------------------------- this project's own


def our_vit(make_vit, variant, order="none", *overrides):
    rope = () if order == "none" else ("model.rope=axial", f"attention.rope_order={order}")
    model = sharpen(make_vit(f"attention={variant}", *rope, *overrides))
    for name, p in model.named_parameters():
        if "_norm." in name or "gate" in name:
            p.data += 0.4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("order", ["none", "norm_first", "rope_first"])
def test_our_vit_shows_the_weights_that_it_computes_in_every_preset(make_vit, images, variant, order, record_property):
    model, raw, core = our_vit(make_vit, variant, order), [], []
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda _m, _a, y: raw.append(y.view(8, 17, 3, 4, 16).unbind(2)))
        block.attn.core.register_forward_pre_hook(lambda _m, a: core.append(a[:2]))
    probe = AttentionProbe(model)
    with probe.step(0), torch.no_grad():
        model(images)
    assert len(probe.coverage.checked) == 4
    record_property("largest_difference", compare(probe, own_weights(model, images)))
    frame = probe.frame.to_pandas()
    for layer, (projections, entering) in enumerate(zip(raw[:4], core[:4], strict=True)):
        rows = frame[frame["layer"] == layer]
        for name, x, x_in in zip("qk", projections[:2], entering, strict=True):  # norm_first or not: raw and effective
            np.testing.assert_allclose(rows[f"{name}_norm_mean"], x.norm(dim=-1).mean((0, 1)), rtol=1e-4)
            np.testing.assert_allclose(rows[f"{name}_in_norm_mean"], x_in.norm(dim=-1).mean((0, 2)), rtol=1e-4)


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_our_dropped_and_gated_attention_is_measured_before_both(make_vit, images, gate):
    model = our_vit(make_vit, "rmsnorm", "none", "attention.dropout=0.5", f"attention.gate={gate}").train()
    probe = AttentionProbe(model)
    torch.manual_seed(0)
    with probe.step(0):
        model(images)
    assert set(probe.coverage.unchecked.values()) == {"attention dropout is active"}
    torch.manual_seed(0)
    compare(probe, own_weights(model, images))
    model.eval()
    with probe.step(1):
        model(images)
    assert all(layer.checked for layer in probe._layers)


@pytest.mark.parametrize("version", ["ShiftedWindowAttention", "ShiftedWindowAttentionV2"])
def test_torchvisions_swin_shows_the_weights_that_it_computes(version, record_property):
    torch.manual_seed(0)
    module = getattr(torchvision.models.swin_transformer, version)
    model = sharpen(nn.Sequential(*(module(24, [4, 4], [s, s], 2) for s in (0, 2)))).eval()
    x = torch.randn(2, 8, 8, 24)
    probe = AttentionProbe(model)
    with probe.step(0):
        model(x)
    assert probe.coverage.checked == ("0", "1")
    weights = own_weights(model, x)
    record_property("largest_difference", compare(probe, weights))
    assert (weights[1] < 1e-40).any()  # shifted windows hide pairs
    assert probe.frame.to_pandas()["max_abs_logit"].max() < 50


# ---------------------------------------------------------------- nn.MultiheadAttention


def mha_weights(model, *args, **kwargs):
    """Per-head weights that each nn.MultiheadAttention returns when asked, in forward order."""
    model, weights = copy.deepcopy(model), []
    for m in model.modules():
        if isinstance(m, nn.MultiheadAttention):
            m.register_forward_pre_hook(
                lambda _m, a, k: (a[:3], k | {"need_weights": True, "average_attn_weights": False}), with_kwargs=True
            )
            m.register_forward_hook(lambda _m, _a, out: weights.append(out[1].detach()))
    with torch.no_grad():
        model(*args, **kwargs)
    return [w if w.dim() == 4 else w[None] for w in weights]


class TextTower(nn.Module):
    """CLIP's: sequence first, a causal mask that adds -inf, no weights asked for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(24, 3) for _ in range(2))

    def forward(self, x):
        mask = torch.full((x.shape[0], x.shape[0]), float("-inf")).triu_(1)
        for attend in self.layers:
            x = x + attend(x, x, x, need_weights=False, attn_mask=mask)[0]
        return x


class Cross(nn.Module):
    """Keys and values of other widths and number, a bias among them and a zero."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(24, 3, kdim=16, vdim=20, add_bias_kv=True, add_zero_attn=True)

    def forward(self, q, k, v, **kwargs):
        return self.attend(q, k, v, need_weights=False, **kwargs)[0]


def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


PADDING = torch.arange(9) >= torch.tensor([[9], [5]])
CAUSAL = torch.full((9, 9), float("-inf")).triu_(1)


def mha_case(name):
    torch.manual_seed(0)
    x = torch.randn(2, 9, 24)
    if name == "torchvision":
        return TorchvisionViT(32, 8, 2, 4, 32, 64, num_classes=5), (torch.randn(2, 3, 32, 32),), {}
    if name == "text tower":
        return TextTower(), (x.transpose(0, 1),), {}
    if name == "cross":
        return Cross(), (torch.randn(7, 2, 24), torch.randn(5, 2, 16), torch.randn(5, 2, 20)), {}
    if name == "unbatched":
        return Cross(), (torch.randn(7, 24), torch.randn(5, 16), torch.randn(5, 20)), {}
    if name == "encoder":
        return encoder(), (x,), {}
    if name == "encoder, norm first, gelu":
        return encoder(norm_first=True, activation="gelu"), (x,), {}
    if name == "encoder, padding":
        return encoder(), (x,), {"src_key_padding_mask": PADDING}
    assert name == "encoder, causal and padding"
    return (
        encoder(),
        (x,),
        {"mask": CAUSAL, "src_key_padding_mask": CAUSAL.new_zeros(2, 9).masked_fill(PADDING, -torch.inf)},
    )


MHA = (
    "torchvision", "text tower", "cross", "unbatched",
    "encoder", "encoder, norm first, gelu", "encoder, padding", "encoder, causal and padding",
)  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "eval", "eval without gradients"])
@pytest.mark.parametrize("name", MHA)
def test_multihead_attention_shows_the_weights_that_it_returns(name, mode, record_property):
    model, args, kwargs = mha_case(name)
    sharpen(model).train(mode == "train")
    probe = AttentionProbe(model)
    with torch.set_grad_enabled(mode != "eval without gradients"):
        plain = model(*args, **kwargs)
        with probe.step(0):
            out = model(*args, **kwargs)
    assert torch.equal(out, plain)
    assert not probe.coverage.unchecked
    record_property("largest_difference", compare(probe, mha_weights(model, *args, **kwargs)))


@pytest.mark.parametrize("grad", [True, False])
def test_multihead_attention_that_is_asked_for_weights_is_measured(grad):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": sharpen(nn.MultiheadAttention(24, 2, batch_first=True))}).eval()
    x = torch.randn(2, 9, 24)
    probe = AttentionProbe(model)
    with probe.step(0), torch.set_grad_enabled(grad):
        _, weights = model["a"](x, x, x, average_attn_weights=False)
    compare(probe, [weights.detach()])
    assert probe.coverage.checked == ("a",)


def test_rows_that_a_nested_tensor_leaves_out_are_left_out():
    """The native encoder drops padding; a padded query is no row of the model."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True)
    model = sharpen(nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)).eval()
    x = torch.randn(2, 9, 24)
    probe, alone = AttentionProbe(model), AttentionProbe(model)
    with torch.no_grad():
        with probe.step(0):
            model(x, src_key_padding_mask=PADDING)
        with alone.step(0):
            model(x[:1])
            model(x[1:, :5])
    found, true = (p.frame.to_pandas() for p in (probe, alone))
    np.testing.assert_allclose(found["entropy_mean"], true["entropy_mean"], atol=1e-4)
    assert (found["masked_rows"] == 4).all()
