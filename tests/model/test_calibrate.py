"""A norm or a learned scale that is put into a trained model leaves its logits as sharp as they were."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qkexp.config import AttentionConfig, ConfigError, RunConfig
from qkexp.model.calibrate import calibrate, can_calibrate, inserts
from qkexp.model.parts import pieces
from qkexp.model.vit import attention_layers

GAINS = ["attention.norm=rms", "attention.gain=per_head"]
BY_HEAD = {
    "rms": GAINS,
    "layernorm": [*GAINS, "attention.center=true"],
    "biased": [*GAINS, "attention.center=true", "attention.bias=true"],
    "offset": [*GAINS, "attention.gain_offset=1"],
    "all heads together": [*GAINS, "attention.axis=all"],
    "l2 gains": ["attention.norm=l2", "attention.gain=per_head", "attention.scale=one"],
    "l2 scale a head": ["attention.norm=l2", "attention.scale=learned_per_head"],
    "logarithmic scale": ["attention.norm=l2", "attention.scale=learned_per_head", "attention.scale_log=true"],
    "length scale": ["attention.norm=rms", "attention.scale=ssmax"],
    "no norm, a scale": ["attention.scale=learned_per_head"],
}
BY_LAYER = {"shared gain": ["attention=rmsnorm"], "one scale": ["attention=l2"], "presets": ["attention=layernorm"]}


def grown(vit: nn.Module) -> nn.Module:
    """The model as after some training: W_q and W_k grown, each head otherwise."""
    parameters = dict(vit.named_parameters())
    factors = torch.tensor([2.0, 4.0, 8.0, 16.0])  # of the heads
    with torch.no_grad():
        for piece in pieces(vit):
            if piece.projects_qk:
                rows = piece.of(parameters[piece.parameter])
                rows.mul_(factors.repeat_interleave(len(rows) // len(factors)).view(-1, *[1] * (rows.dim() - 1)))
    return vit.eval()


def measured(vit: nn.Module, images: Tensor) -> np.ndarray:
    """Mean over rows of the largest score less the row's mean, (layer, head), in float64 and written out."""
    found = []

    def look(_: nn.Module, args: tuple) -> None:
        q, k, _v, scale = (a.double().numpy(force=True) if isinstance(a, Tensor) else a for a in args)
        scale = np.asarray(scale).reshape(-1, 1, 1)
        z = np.einsum("bhid,bhjd->bhij", q * scale, k)
        found.append((z.max(axis=-1) - z.mean(axis=-1)).mean(axis=(0, 2)))

    handles = [layer.core.register_forward_pre_hook(look) for layer in attention_layers(vit).values()]
    vit(images)
    for handle in handles:
        handle.remove()
    return np.stack(found)


@pytest.fixture
def pair(make_vit: Callable[..., nn.Module]) -> Callable[..., tuple[nn.Module, nn.Module]]:
    """A grown model without norm, and one of the same weights with what the overrides put in, as it is born."""

    def make(*overrides: str, rope: str = "none") -> tuple[nn.Module, nn.Module]:
        old = grown(make_vit(f"model.rope={rope}"))
        new = make_vit(*overrides, f"model.rope={rope}").eval()
        missing, unexpected = new.load_state_dict(old.state_dict(), strict=False)
        assert missing
        assert not unexpected
        return old, new

    return make


@pytest.mark.parametrize("name", BY_HEAD)
def test_the_logits_of_every_head_are_as_sharp_as_before(name: str, pair: Callable[..., tuple], images: Tensor) -> None:
    old, new = pair(*BY_HEAD[name])
    wanted = measured(old, images)
    assert wanted.max() / wanted.min() > 30, "heads that differ"
    assert not np.allclose(measured(new, images), wanted, rtol=0.5), "as born, the norm would change the logits"
    calibrate(new, old, images)
    np.testing.assert_allclose(measured(new, images), wanted, rtol=1e-4)


@pytest.mark.parametrize("name", BY_LAYER)
def test_what_all_heads_share_keeps_the_mean_of_the_layer(
    name: str, pair: Callable[..., tuple], images: Tensor
) -> None:
    old, new = pair(*BY_LAYER[name])
    calibrate(new, old, images)
    np.testing.assert_allclose(measured(new, images).mean(axis=1), measured(old, images).mean(axis=1), rtol=1e-4)


@pytest.mark.parametrize("order", ["norm_first", "rope_first"])
def test_rotations_are_kept_in_their_place(order: str, pair: Callable[..., tuple], images: Tensor) -> None:
    old, new = pair(*GAINS, f"attention.rope_order={order}", rope="axial")
    calibrate(new, old, images)
    np.testing.assert_allclose(measured(new, images), measured(old, images), rtol=1e-4)


def test_gains_are_the_sizes_of_q_and_k_where_tokens_are_of_one_length(make_vit: Callable[..., nn.Module]) -> None:
    """Then q̂ is q and the model is the same function: nothing is left for the second step to correct."""
    old = make_vit().eval()
    new = make_vit(*GAINS).eval()
    new.load_state_dict(old.state_dict(), strict=False)
    sizes = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 0.5, 0.25, 8.0]])
    for vit in (old, new):
        for layer in attention_layers(vit).values():
            layer.qkv.register_forward_hook(lambda _m, _a, y: equal_lengths(y, sizes))
    images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    calibrate(new, old, images)
    for layer in attention_layers(new).values():
        for norm, size in zip((layer.q_norm, layer.k_norm), sizes, strict=True):
            torch.testing.assert_close(norm.weight.data, size.view(-1, 1).expand(4, 16), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(new(images), old(images), rtol=1e-3, atol=1e-4)


def equal_lengths(qkv: Tensor, sizes: Tensor) -> Tensor:
    """q and k of every token with the root mean square ``sizes`` (2, heads); v as it is."""
    B, N, _ = qkv.shape
    y = qkv.view(B, N, 3, 4, 16).clone()
    y[:, :, :2] *= sizes[..., None] / y[:, :, :2].square().mean(-1, keepdim=True).sqrt()
    return y.view(B, N, -1)


def test_a_bound_under_the_scale_that_is_needed_is_refused_with_that_scale(
    pair: Callable[..., tuple], images: Tensor
) -> None:
    old, new = pair("attention.norm=l2", "attention.scale=learned", "attention.scale_max=9")
    with pytest.raises(ConfigError, match=r"attention\.scale_max: 9\.0 is not accepted; accepted: at least \d+"):
        calibrate(new, old, images)


def test_what_is_inserted_and_what_can_hold_the_scale(make_config: Callable[..., RunConfig]) -> None:
    def of(*overrides: str) -> AttentionConfig:
        return make_config(*overrides).attention

    plain, rms = of(), of("attention=rmsnorm")
    assert inserts(plain, rms)
    assert inserts(rms, of("attention=rmsnorm", "attention.center=true"))
    assert inserts(rms, of("attention=l2"))
    assert inserts(plain, of("attention.scale=learned"))
    assert not inserts(plain, of("attention=softcap"))
    assert not inserts(plain, of("attention.scale=fixed", "attention.scale_init=0.1")), "a shock by design"
    assert not inserts(rms, of("attention=rmsnorm", "attention.eps=1e-3"))
    assert can_calibrate(rms)
    assert can_calibrate(of("attention=l2"))
    assert not can_calibrate(of("attention.norm=rms"))
