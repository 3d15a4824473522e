"""The attention score: its order of operations, and that every kernel computes the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from qkexp.config import ConfigError
from qkexp.model.core import AttentionCore, RoundedSoftmax, choose_backend, soft_cap


def qkv(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [(size * torch.randn(*shape, generator=g)).to(dtype) for _ in range(3)]


def plain(q, k, v, scale, cap=None):
    """softmax(cap(scale · q·k)) v in float64."""
    q, k, v = q.double(), k.double(), v.double()
    scale = torch.as_tensor(scale, dtype=torch.float64).reshape(-1, 1, 1)
    z = scale * (q @ k.transpose(-2, -1))
    c = z if cap is None else cap * torch.tanh(z / cap)
    return torch.softmax(c, -1) @ v


SCALES = {"float": 0.25, "one": torch.tensor([3.0]), "per_head": torch.tensor([0.5, 8.0, 1.0])}


@pytest.mark.parametrize("backend", ["explicit", "sdpa"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_kernels_compute_softmax_of_the_scaled_score(backend, scale):
    q, k, v = qkv(2, 3, 17, 16)
    y = AttentionCore(backend=backend)(q, k, v, scale)
    torch.testing.assert_close(y.double(), plain(q, k, v, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 17, 16), (4, 8, 100, 8)], ids=["few scores", "many scores"])
def test_explicit_agrees_with_pytorchs_attention_forward_and_backward_in_bf16(shape):
    ours, theirs = [[x.requires_grad_() for x in qkv(*shape, dtype=torch.bfloat16)] for _ in range(2)]
    y = AttentionCore()(*ours, shape[-1] ** -0.5)
    z = F.scaled_dot_product_attention(*theirs)
    torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)
    y.float().square().sum().backward()
    z.float().square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad - b.grad).norm() < 0.02 * b.grad.norm()


@pytest.mark.parametrize("cap", [1.0, 5.0, 50.0])
def test_logits_far_above_the_cap_are_capped(cap):
    q, k, v = qkv(2, 3, 17, 16, size=10.0)  # scores of several hundred: small ones would hide a dropped cap
    y = AttentionCore(softcap=cap)(q, k, v, 1.0)
    torch.testing.assert_close(y.double(), plain(q, k, v, 1.0, cap), rtol=1e-4, atol=1e-4)
    assert (y.double() - plain(q, k, v, 1.0)).abs().max() > 0.1


def test_the_scale_comes_before_the_cap():
    q, k = torch.tensor([[[[10.0]]]]), torch.tensor([[[[10.0], [0.0]]]])  # scores 100 and 0
    v = torch.tensor([[[[1.0], [0.0]]]])
    weight = AttentionCore(softcap=5.0)(q, k, v, 0.125).item()
    expected = 5 * math.tanh(0.125 * 100 / 5)  # 4.93; the other order would give 0.625
    assert weight == pytest.approx(1 / (1 + math.exp(-expected)), rel=1e-5)


def test_the_cap_is_reached_exactly_and_passes_no_gradient_there():
    z = torch.tensor([1e3, -1e4, 5e4], requires_grad=True)
    c = soft_cap(z, 50.0)
    assert c.tolist() == [50.0, -50.0, 50.0]
    c.sum().backward()
    assert z.grad.tolist() == [0.0, 0.0, 0.0]


def test_without_a_cap_the_score_is_untouched():
    z = torch.tensor([1e30, -3.0])
    assert soft_cap(z, None) is z


def test_sdpa_refuses_to_drop_a_cap(make_config):
    q, k, v = qkv(1, 1, 4, 4)
    with pytest.raises(ValueError, match="soft-cap"):
        AttentionCore(softcap=5.0, backend="sdpa")(q, k, v, 1.0)
    with pytest.raises(ConfigError, match=r"attention\.backend"):
        make_config("attention=softcap", "attention.backend=sdpa")


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
def test_a_cap_without_meaning_is_refused(make_config, value):
    with pytest.raises(ConfigError, match=r"attention\.softcap"):
        make_config(f"attention.softcap={value}")


def test_score_dtype_fp32_resolves_scores_that_bf16_merges():
    q = torch.tensor([[[[64.0, 0.125]]]], dtype=torch.bfloat16)
    k = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]], dtype=torch.bfloat16)  # scores 64 and 64.125
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.bfloat16)
    merged = AttentionCore(score_dtype="compute")(q, k, v, 1.0).item()
    with torch.autocast("cpu", torch.bfloat16):
        resolved = AttentionCore(score_dtype="fp32")(q, k, v, 1.0).item()
    assert merged == 0.5
    assert resolved == pytest.approx(1 / (1 + math.exp(-0.125)), abs=2e-3)


def test_float64_inputs_keep_float64_accuracy():
    q, k, v = qkv(1, 2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(AttentionCore()(q, k, v, 0.5), plain(q, k, v, 0.5), rtol=1e-13, atol=1e-13)


def test_a_learned_scale_gets_its_gradient_through_every_kernel():
    grads = []
    for backend in ("explicit", "sdpa"):
        scale = torch.tensor([2.0, 4.0, 8.0], requires_grad=True)
        q, k, v = qkv(2, 3, 17, 16)
        AttentionCore(backend=backend)(q, k, v, scale).square().sum().backward()
        grads.append(scale.grad)
    assert grads[0].abs().min() > 0
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_the_backend_table_never_gives_a_capped_score_to_a_kernel_without_cap():
    assert choose_backend("cpu", None, "compute") == "explicit"
    assert choose_backend("cuda", None, "compute") == "sdpa"
    assert choose_backend("cuda", 50.0, "compute") == "flex"
    assert choose_backend("cuda", 50.0, "compute", head_dim=8) == "explicit", "FlexAttention takes heads of 16 and more"
    assert choose_backend("cuda", None, "fp32") == "explicit"
    assert choose_backend("cuda", 50.0, "fp32") == "explicit"


def test_small_softmax_rounds_weights_and_gradient_as_the_bf16_kernel_does():
    z = (8 * torch.randn(4, 2, 17, 17, generator=torch.Generator().manual_seed(0))).bfloat16()
    grad = torch.randn(4, 2, 17, 17, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for softmax in (RoundedSoftmax.apply, lambda z: z.softmax(-1)):
        x = z.clone().requires_grad_()
        p = softmax(x)
        p.backward(grad)
        results.append((p, x.grad))
    (p, g), (p_kernel, g_kernel) = results
    assert torch.equal(p, p_kernel)
    torch.testing.assert_close(g, g_kernel, rtol=2**-7, atol=2**-12)
    saturated = p.max(-1).values == 1
    assert saturated.any()
    assert (g[saturated] == 0).all() == (g_kernel[saturated] == 0).all()
