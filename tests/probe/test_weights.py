"""Projections head by head, and the gradient of the scores: against float64, and in every kind of module."""

from __future__ import annotations

import functools
import math

import pytest
import timm
import torch
import torchvision
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qkexp import AttentionProbe
from qkexp.probe import gradients
from qkexp.probe.gradients import score_gradient
from qkexp.probe.weights import HeadRows, fused, head_norms, largest_gain, norm, product_norm, second_moment

# ---------------------------------------------------------------- the spectral norm


def pair(d=16, C=48, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, d, C, generator=g), torch.randn(5, d, C, generator=g)


def blind_start():
    """The first singular vectors lie where every single coordinate shows less of them than of the second ones."""
    a = torch.zeros(1, 17, 17)
    a[0, :16, :16] = 1.0 / 16.0  # norm 1, in columns of norm 1/4
    a[0, 16, 16] = 0.9
    return a, torch.eye(17)[None]


def skewed():
    a, b = pair()
    return a * torch.logspace(0, -4, 48), b * torch.logspace(-3, 0, 16).view(16, 1)


PAIRS = {
    "random": pair,
    "wider than the input": lambda: pair(d=64, C=24),
    "of one channel": lambda: pair(d=1),
    "skewed": skewed,
    "of one direction": lambda: tuple(x[..., :1] * torch.ones(48) for x in pair()),
    "huge": lambda: tuple(1e15 * x for x in pair()),
    "tiny": lambda: tuple(1e-15 * x for x in pair()),
    "blind start": blind_start,
    "all singular values alike": lambda: (torch.eye(16)[None], 3 * torch.eye(16)[None]),
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_spectral_norm_is_that_of_a_float64_decomposition(case):
    a, b = PAIRS[case]()
    true = torch.linalg.matrix_norm(a.double().mT @ b.double(), 2)
    torch.testing.assert_close(head_norms(a, b).double(), true, rtol=1e-6, atol=0)


def test_the_spectral_norm_of_nothing_is_zero_and_of_what_is_not_finite_absent():
    a, b = pair()
    a[1] = 0.0
    a[2, 3, 4] = math.inf
    b[3, 3, 4] = math.nan
    found = head_norms(a, b)
    assert found[1] == 0.0
    assert found.isfinite().tolist() == [True, True, False, False, True]


def test_many_values_near_the_largest_leave_it_a_little_below_never_above():
    a = torch.diag(torch.linspace(1.0, 0.999, 64))[None]
    assert 0.999 < product_norm(a, torch.eye(64)[None]).item() <= 1.0 + 1e-6


# ---------------------------------------------------------------- which rows are whose

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
SWIN = {"img_size": 32, "window_size": 4, "depths": (2, 2), "num_heads": (3, 3), "embed_dim": 24, "num_classes": 5}
NORMED = {"qk_norm": True, "norm_layer": functools.partial(nn.LayerNorm, eps=1e-6), "qkv_bias": False}


class Cross(nn.Module):
    """PyTorch's attention of keys of another width."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 3, kdim=32, vdim=24, bias=False, batch_first=True)

    def forward(self, x):
        x = x.flatten(1)[:, : 10 * 48].view(-1, 10, 48)
        return self.attention(x, x[..., :32], x[..., :24], need_weights=False)[0]


def torchvision_swin():
    return torchvision.models.swin_transformer.SwinTransformer([4, 4], 24, [1, 1], [3, 3], [4, 4], num_classes=5)


FOREIGN = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", **SMALL),
    "vit, qk_norm": lambda: timm.create_model("vit_tiny_patch16_224", **SMALL, **NORMED),
    "parallel": lambda: timm.create_model("vit_tiny_patch16_224", **SMALL, block_fn=ParallelScalingBlock),
    "relpos": lambda: timm.create_model("vit_relpos_small_patch16_224", **SMALL),
    "swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN),
    "torchvision's swin": torchvision_swin,
    "multi-head": lambda: torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=5),
    "multi-head, of unlike widths": Cross,
}


def silence_a_head(model, images):
    """Zero the rows of head 1 of W_q, then W_k, then W_v, of the last layer; nothing else of the layer changes."""
    probe = AttentionProbe(model)
    layer = probe._layers[-1]
    for name in "qkv":
        rows = getattr(layer.ask("projections"), name)
        kept = [x.detach().clone() for x in (rows.weight, rows.bias) if x is not None]
        for x in (rows.weight, rows.bias):
            if x is not None:
                x.data.narrow(0, rows.start, rows.heads * rows.width).view(rows.heads, rows.width, -1)[1] = 0.0
        probe.coverage, layer.checked = None, False  # v is captured where a step is checked
        with probe.step(0):
            model(images)
            capture = layer.captures[0]
            silent = {n: (getattr(capture, n).abs().amax((0, 2, 3)) == 0).tolist() for n in "qkv"}
        assert silent == {n: [False, n == name, False, *[False] * (rows.heads - 3)] for n in "qkv"}
        for x, before in zip([x for x in (rows.weight, rows.bias) if x is not None], kept, strict=True):
            x.data.copy_(before)


@pytest.mark.parametrize("family", FOREIGN)
def test_rows_of_a_head_are_those_that_make_its_q_k_and_v(family):
    torch.manual_seed(0)
    silence_a_head(FOREIGN[family]().train(), torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("placement", ["pre", "post", "res_post", "none", "parallel"])
@pytest.mark.parametrize("preset", ["none", "rmsnorm"])
def test_rows_of_a_head_in_every_placement_of_our_own_blocks(make_vit, images, placement, preset):
    silence_a_head(make_vit(f"attention={preset}", f"model.block_norm={placement}"), images)


def test_a_module_of_which_nobody_knows_the_rows_has_none():
    model = timm.create_model("vit_base_patch16_siglip_224", **SMALL)  # its pool has q and kv
    assert [layer.ask("projections") is None for layer in AttentionProbe(model)._layers] == [False, False, True]


@pytest.mark.parametrize(("shape", "expected"), [((4,), [4, 4, 4]), ((3, 4), [4, 8, 12]), ((12,), [4, 8, 12])], ids=str)
def test_gains_are_the_largest_of_a_heads_channels_in_any_layout(shape, expected):
    rows = fused(torch.zeros(36, 12), None, 3)[0]
    gain = nn.LayerNorm(shape)
    gain.weight.data = -(1.0 + torch.arange(gain.weight.numel())).view(shape)
    assert largest_gain(gain, rows).tolist() == expected
    gain.gain_offset = 1  # γ = 1 + w
    assert largest_gain(gain, rows).tolist() == [x - 1 for x in expected]
    assert largest_gain(nn.Identity(), rows) is None
    assert largest_gain(nn.LayerNorm(5), rows) is None


def test_a_norm_of_several_parts_is_that_of_all_their_numbers():
    a, b = pair()
    found = norm([a.to(torch.bfloat16), b])
    true = (a.to(torch.bfloat16).double().square().sum((1, 2)) + b.double().square().sum((1, 2))).sqrt()
    torch.testing.assert_close(found.double(), true, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- Adam's averages


@pytest.mark.parametrize("fused_step", [False, True])
def test_the_second_moment_is_bias_corrected_and_found_in_a_vector_that_holds_the_parameter(fused_step):
    flat = nn.Parameter(torch.randn(40))
    weight = nn.Parameter(flat.data[10:34].view(6, 4))
    optimizer = torch.optim.Adam([flat], betas=(0.9, 0.99), eps=1e-3, fused=fused_step)
    assert second_moment([optimizer], weight) is None, "before the first step there is none"
    squares = torch.zeros(40)
    for step in (1, 2, 3):
        flat.grad = torch.randn(40) * step
        squares = 0.99 * squares + 0.01 * flat.grad.square()
        optimizer.step()
    v, eps = second_moment([torch.optim.SGD([nn.Parameter(torch.zeros(3))]), optimizer], weight)
    torch.testing.assert_close(v, (squares / (1 - 0.99**3))[10:34].view(6, 4))
    assert eps == 1e-3
    assert second_moment([optimizer], nn.Parameter(torch.zeros(6, 4))) is None
    assert second_moment([torch.optim.SGD([flat])], weight) is None
    assert len(optimizer.state) == 1, "asking makes no state"


# ---------------------------------------------------------------- the gradient of the scores

G = torch.Generator().manual_seed(2)
SCORES = {
    "plain": {},
    "a scale a head": {"scale": torch.tensor([0.3, -1.0, 2.0, 0.1])},
    "bias": {"bias": torch.randn(4, 9, 11, generator=G)},
    "mask": {"mask": torch.rand(3, 1, 9, 11, generator=G) < 0.6},
    "a row without a key": {"mask": (torch.arange(9) != 4).view(9, 1).expand(9, 11)},
    "additive mask": {"mask": torch.where(torch.rand(9, 11, generator=G) < 0.5, 0.0, -math.inf)},
    "cap": {"cap": 2.0},
    "shared keys": {"keyed": 2},
}


@pytest.mark.parametrize("chunk", [1 << 22, 4 * 4 * 9 * 11, 4 * 4 * 2 * 11])
@pytest.mark.parametrize("case", SCORES)
def test_the_gradient_of_the_scores_is_autograds(case, chunk, monkeypatch):
    monkeypatch.setattr(gradients, "CHUNK_BYTES", chunk)
    torch.manual_seed(1)
    given = {"scale": 0.5, **SCORES[case]}
    keyed = given.pop("keyed", 4)
    q, k, v = (torch.randn(3, h, n, 8).double() for h, n in ((4, 9), (keyed, 11), (keyed, 11)))
    grad = torch.randn(3, 4, 9, 8).double()
    scale, bias, mask, cap = (given.get(name) for name in ("scale", "bias", "mask", "cap"))
    factor = scale.double().view(4, 1, 1) if isinstance(scale, torch.Tensor) else scale
    z = factor * q @ k.repeat_interleave(4 // keyed, 1).mT
    z = (z if bias is None else z + bias).requires_grad_()
    c = z if cap is None else cap * torch.tanh(z / cap)
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask == 0
        c = torch.where(seen, c, -1e30)
    p = c.softmax(-1)
    p = p if mask is None else p * seen.any(-1, keepdim=True)
    (p @ v.repeat_interleave(4 // keyed, 1)).backward(grad)
    true = z.grad.square().sum((0, 2, 3))
    found = score_gradient(*(x.float() for x in (q, k, v, grad)), scale, bias, mask, cap)
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=0)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def test_the_gradient_of_long_sequences_never_builds_a_full_score_matrix(monkeypatch):
    q, k, v, grad = (torch.randn(2, 2, 512, 8) for _ in range(4))
    mask = torch.ones(2, 1, 1, 512, dtype=torch.bool)
    expected = score_gradient(q, k, v, grad, 1.0, mask=mask)
    monkeypatch.setattr(gradients, "CHUNK_BYTES", 1 << 16)
    with Largest() as largest:
        found = score_gradient(q, k, v, grad, 1.0, mask=mask)
    assert largest.bytes <= max(1 << 16, q.nbytes)  # a single head's scores would be 1 << 20
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_rows_of_a_tensor_are_a_view_of_the_right_place():
    weight = torch.arange(24.0).view(12, 2)
    assert HeadRows(weight, None, 2, 3, 6).of(weight)[1, 0].tolist() == [18.0, 19.0]
