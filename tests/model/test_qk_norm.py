"""QK norms against PyTorch's own, and what they do at zero, at small activations and across heads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from qkexp.model.qk_norm import QKNorm, RMSNormalise

B, N, H, D = 2, 5, 3, 8
EPS = 1e-6


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("gain", "factor"), list(itertools.product([None, (D,), (H, D)], [1.0, D**-0.5])))
def test_the_hand_written_gradient_is_right(gain, factor):
    x = rand(B, N, H, D, dtype=torch.float64).requires_grad_()
    g = None if gain is None else rand(*gain, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, g: RMSNormalise.apply(x, g, 1e-3, factor, torch.float64), (x, g))


def test_the_gradient_is_right_where_it_comes_back_transposed():
    x = rand(B, N, H, D, dtype=torch.float64).requires_grad_()
    g = rand(D, seed=1, dtype=torch.float64).requires_grad_()
    back = lambda x, g: RMSNormalise.apply(x, g, 1e-3, 1.0, torch.float64).transpose(1, 2)  # noqa: E731
    assert torch.autograd.gradcheck(back, (x, g))


REFERENCES = {
    "layernorm": (
        {"center": True, "gain": "shared", "bias": True},
        lambda x, w, b: F.layer_norm(x, (D,), w, b, EPS),
    ),
    "layernorm_all": (
        {"center": True, "gain": "shared", "bias": True, "axis": "all"},
        lambda x, w, b: F.layer_norm(x.flatten(-2), (H * D,), w, b, EPS).view_as(x),
    ),
    "rmsnorm": ({"gain": "shared"}, lambda x, w, b: F.rms_norm(x, (D,), w, EPS)),
    "rmsnorm_per_head": ({"gain": "per_head"}, lambda x, w, b: F.rms_norm(x, (D,), None, EPS) * w),
    "rmsnorm_all": (
        {"gain": "per_head", "axis": "all"},
        lambda x, w, b: F.rms_norm(x.flatten(-2), (H * D,), w, EPS).view_as(x),
    ),
    "l2": ({"kind": "l2", "gain": "none"}, lambda x, w, b: F.normalize(x, dim=-1)),
    "l2_gain": ({"kind": "l2", "gain": "shared", "bias": True}, lambda x, w, b: F.normalize(x, dim=-1) * w + b),
    "l2_all": (
        {"kind": "l2", "gain": "none", "axis": "all"},
        lambda x, w, b: F.normalize(x.flatten(-2), dim=-1).view_as(x),
    ),
    "l2_centred": (
        {"kind": "l2", "gain": "none", "center": True},
        lambda x, w, b: F.normalize(x - x.mean(-1, keepdim=True), dim=-1),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_norms_equal_pytorchs_forward_and_backward(name):
    options, reference = REFERENCES[name]
    norm = QKNorm(H, D, eps=EPS, **options)
    for i, p in enumerate(norm.parameters()):
        p.data = rand(*p.shape, seed=10 + i)
    results = []
    for call in (norm, lambda x: reference(x, norm.weight, norm.bias)):
        norm.zero_grad()
        x = rand(B, N, H, D).requires_grad_()
        y = call(x)
        (y * rand(B, N, H, D, seed=2)).sum().backward()
        results.append([y.detach(), x.grad, *[p.grad.clone() for p in norm.parameters()]])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("axis", "gain", "shape"),
    [
        ("head", "none", None),
        ("head", "shared", (D,)),
        ("head", "per_head", (H, D)),
        ("all", "none", None),
        ("all", "shared", (H * D,)),
        ("all", "per_head", (H * D,)),
    ],
)
def test_gain_and_bias_have_the_documented_shapes(axis, gain, shape):
    norm = QKNorm(H, D, axis=axis, gain=gain, bias=True)
    assert (None if norm.weight is None else tuple(norm.weight.shape)) == shape
    assert tuple(norm.bias.shape) == (shape or ((H * D,) if axis == "all" else (D,)))


def test_gain_offset_starts_alike_and_means_one_plus_w():
    plain, offset = QKNorm(H, D), QKNorm(H, D, gain_offset=1)
    x = rand(B, N, H, D)
    assert plain.weight.tolist() == [1.0] * D
    assert offset.weight.tolist() == [0.0] * D
    assert torch.equal(plain(x), offset(x))
    plain.weight.data += 0.5
    offset.weight.data += 0.5
    assert torch.equal(plain(x), offset(x))


OPTIONS = [{"kind": kind, "center": center} for kind in ("rms", "l2") for center in (False, True)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_vectors_give_zeros_and_a_bounded_gradient(options, dtype):
    x = torch.zeros(B, N, H, D, dtype=dtype, requires_grad=True)  # zero-initialised projections are a real start
    y = QKNorm(H, D, eps=EPS, **options)(x)
    assert y.abs().max() == 0
    arriving = rand(B, N, H, D, seed=1)
    (y * arriving).sum().backward()
    assert x.grad.isfinite().all()
    assert 0 < x.grad.abs().max() <= 2 * arriving.abs().max() * EPS**-0.5


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-3, 1.0])
def test_every_norm_treats_small_activations_alike(size):
    x = size * rand(B, N, H, D)
    rms, l2 = (QKNorm(H, D, kind=kind, gain="none", eps=EPS)(x) for kind in ("rms", "l2"))
    torch.testing.assert_close(l2, rms / D**0.5, rtol=1e-6, atol=0)
    torch.testing.assert_close(rms, F.rms_norm(x, (D,), None, EPS), rtol=1e-5, atol=0)
    centred = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(
        QKNorm(H, D, center=True, gain="none", eps=EPS)(x),
        QKNorm(H, D, gain="none", eps=EPS)(centred),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize(("axis", "coupled"), [("head", False), ("all", True)])
def test_scaling_one_head_reaches_the_others_only_with_axis_all(axis, coupled):
    norm = QKNorm(H, D, axis=axis)
    x = rand(B, N, H, D)
    large = x.clone()
    large[:, :, 1] *= 100
    before, after = norm(x), norm(large)
    others = [0, 2]
    if coupled:
        assert (after[:, :, others].norm() / before[:, :, others].norm()).item() < 0.05
    else:
        assert torch.equal(before[:, :, others], after[:, :, others])
        torch.testing.assert_close(before[:, :, 1], after[:, :, 1], rtol=1e-4, atol=1e-4)


def test_norm_dtype_fp32_rounds_once_even_under_autocast():
    x = (0.1 * rand(B, N, H, D)).bfloat16()
    expected = F.layer_norm(x.float(), (D,), eps=EPS).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = QKNorm(H, D, center=True, dtype="fp32", eps=EPS)(x)
    assert y.dtype == torch.bfloat16
    assert (y == expected).float().mean() > 0.99  # a tie may fall the other way
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-3)


def test_norm_dtype_compute_stays_in_bf16():
    x = rand(B, N, H, D).bfloat16()
    rough, exact = QKNorm(H, D, dtype="compute")(x), QKNorm(H, D, dtype="fp32")(x)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough, exact, rtol=3e-2, atol=3e-2)
    assert not torch.equal(rough, exact)


def test_strided_views_of_one_projection_are_normalised_like_copies():
    packed = rand(B, N, 3, H, D)
    q, k, _ = packed.unbind(2)
    for axis in ("head", "all"):
        norm = QKNorm(H, D, axis=axis)
        assert torch.equal(norm(q), norm(q.contiguous()))
        assert norm(k).shape == (B, N, H, D)


def test_centring_alone_subtracts_the_mean_of_a_head_and_bounds_nothing():
    norm = QKNorm(2, 4, kind="center", gain="none")
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    expected = x - x.reshape(3, 5, 2, 4).mean(dim=3, keepdim=True)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm(10 * x), 10 * expected)  # lengths pass
    assert not list(norm.parameters())
    assert norm(x.bfloat16()).dtype == torch.bfloat16
