"""What every preset guarantees, as properties; and the keys around the norm: scales, dropout, gate, rotation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from qkexp.config import ConfigError
from qkexp.model.attention import Attention
from qkexp.model.core import AttentionCore, choose_backend
from qkexp.model.qk_norm import QKNorm
from qkexp.model.rotary import AxialRotary
from qkexp.model.vit import attention_layers, check_sizes
from qkexp.probe.stats import attention_stats
from qkexp.train.optim import decays

B, N, H, D = 2, 17, 4, 16
GAINED = ("layernorm", "rmsnorm", "gemma3", "command_r_plus")  # one statistic a head, and a gain without bias


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def module(make_config, *overrides: str, tokens: int = N, rotary: bool = False) -> Attention:
    """Attention of 4 heads of 16 channels with gains and biases away from their start."""
    torch.manual_seed(0)
    turn = AxialRotary(D, (4, 4), tokens - 16) if rotary else None
    attn = Attention(H * D, H, tokens, make_config(*overrides).attention, rotary=turn, qkv_bias=True)
    for norm in (attn.q_norm, attn.k_norm):
        for i, p in enumerate(norm.parameters()):
            p.data += 0.4 * rand(*p.shape, seed=5 + i)
    return attn


def score(attn: Attention, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """z, (B, H, N, N), of raw projections (B, N, H, d)."""
    q, k = attn.rotary(attn.q_norm(q)).transpose(1, 2), attn.rotary(attn.k_norm(k)).transpose(1, 2)
    scale = attn.scale
    return (scale.view(-1, 1, 1) if isinstance(scale, torch.Tensor) else scale) * (q @ k.mT)


# ---------------------------------------------------------------- what a norm touches


def test_scaling_one_head_by_100_reaches_the_others_only_where_one_statistic_serves_all(make_config, normed):
    attn = module(make_config, f"attention={normed}")
    q, k = rand(B, N, H, D), rand(B, N, H, D, seed=1)
    large = q.clone()
    large[:, :, 1] *= 100
    before, after = score(attn, q, k), score(attn, large, k)
    others = [0, 2, 3]
    if normed == "olmo2":
        assert (after[:, others].norm() / before[:, others].norm()).item() < 0.05
    else:
        assert torch.equal(before[:, others], after[:, others])
        torch.testing.assert_close(before[:, 1], after[:, 1], rtol=1e-3, atol=1e-3)  # eps is felt less by long queries


@pytest.mark.parametrize("rope", ["none", "axial"])
@pytest.mark.parametrize("factor", [0.3, 7.0, 1e4])
def test_scaling_w_q_changes_nothing_under_any_norm(make_config, normed, rope, factor):
    attn = module(make_config, f"attention={normed}", rotary=rope == "axial")
    q, k = 10 * rand(B, N, H, D), 10 * rand(B, N, H, D, seed=1)
    torch.testing.assert_close(score(attn, factor * q, k), score(attn, q, k), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rope", ["none", "axial"])
@pytest.mark.parametrize("name", [*GAINED, "llama4"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-3, 1e3))
def test_a_gained_norm_bounds_the_score_by_sqrt_d_and_the_largest_gains(make_config, name, rope, seed, size):
    attn = module(make_config, f"attention={name}", rotary=rope == "axial")
    q, k = size * rand(B, N, H, D, seed=seed), size * rand(B, N, H, D, seed=seed + 1)
    q[0], k[0] = q[0].sign() * q[0].abs() ** 5, q[0]  # a few channels dominate, and some pairs are aligned
    assert score(attn, q, k).abs().max() <= bound(attn) * (1 + 1e-5)


def bound(attn: Attention) -> float:
    """√d · max|γ_q| · max|γ_k|."""
    gains = [
        1.0 if n.weight is None else (n.weight + n.gain_offset).abs().max().item() for n in (attn.q_norm, attn.k_norm)
    ]
    return D**0.5 * gains[0] * gains[1]


def test_the_bound_is_attained_by_a_pair_that_has_all_its_length_where_both_gains_are_largest(make_config):
    attn = module(make_config, "attention=rmsnorm")
    for norm in (attn.q_norm, attn.k_norm):
        norm.weight.data[3] = 1.0 + norm.weight.abs().max()
    q = torch.zeros(1, 1, H, D)
    q[..., 3] = 1e3
    assert score(attn, q, q).max().item() == pytest.approx(bound(attn), rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(["l2", "swin_v2"]))
def test_cosines_are_bounded_by_their_scale_which_aligned_pairs_attain(make_config, seed, name):
    attn = module(make_config, f"attention={name}")
    q, k = 100 * rand(B, N, H, D, seed=seed), 100 * rand(B, N, H, D, seed=seed + 1)
    k[:, 0] = q[:, 0]
    z, scale = score(attn, q, k), attn.scale.detach().expand(H)
    assert (z.abs().amax((0, 2, 3)) <= scale * (1 + 1e-5)).all()
    torch.testing.assert_close(z[:, :, 0, 0], scale.expand(B, H), rtol=1e-5, atol=0)


@settings(max_examples=50, deadline=None)
@given(cap=st.floats(1e-2, 1e3), seed=st.integers(0, 10**6), size=st.floats(0.1, 1e3))
def test_a_masked_key_has_exactly_no_weight_under_any_cap(cap, seed, size):
    q, k = size * rand(1, 2, 9, 4, seed=seed), size * rand(1, 2, 9, 4, seed=seed + 1)
    mask = (torch.arange(9) > 0).view(1, 1, 1, 9)
    hidden = attention_stats(q, k, 1.0, mask=mask, cap=cap, groups=("sink",))  # the first key is the masked one
    alone = attention_stats(q, k[:, :, 1:], 1.0, cap=cap)
    assert (hidden["sink_mean"] == 0).all()
    torch.testing.assert_close(hidden["entropy_mean"], alone["entropy_mean"], rtol=1e-5, atol=1e-6)
    assert (hidden["max_logit_capped"].abs() <= cap).all()


def test_two_orders_of_norm_and_rotation_agree_only_without_gain_and_centring(make_config):
    q, k = rand(B, N, H, D), rand(B, N, H, D, seed=1)

    def gap(*keys: str) -> float:
        first, second = (
            score(module(make_config, *keys, f"attention.rope_order={order}", rotary=True), q, k)
            for order in ("norm_first", "rope_first")
        )
        return (first - second).abs().max().item()

    assert gap("attention=llama4") < 1e-4
    assert gap("attention=l2") < 1e-4
    assert gap("attention=qwen3") > 0.1
    assert gap("attention=layernorm", "attention.gain=none") > 0.1


def test_without_a_rotation_the_order_is_inert(make_config, images, make_vit):
    a, b = (make_vit("attention=qwen3", f"attention.rope_order={o}")(images) for o in ("norm_first", "rope_first"))
    assert torch.equal(a, b)


def test_qk_norm_of_one_axis_does_not_take_the_weights_of_the_other(make_vit):
    with pytest.raises(RuntimeError, match=r"q_norm\.weight.*64.*16"):
        make_vit("attention=qwen3").load_state_dict(make_vit("attention=olmo2").state_dict())


def test_loading_weights_without_norm_into_a_normed_model_names_exactly_what_is_new(make_vit):
    plain = make_vit("attention=none").state_dict()
    with pytest.raises(RuntimeError) as error:
        make_vit("attention=chameleon").load_state_dict(plain)
    named = {word.strip('".,') for word in str(error.value).split() if "blocks." in word}
    new = {f"blocks.{i}.attn.{n}_norm.{p}" for i in range(4) for n in "qk" for p in ("weight", "bias")}
    assert named == new


# ---------------------------------------------------------------- every part is used


@pytest.mark.parametrize(
    "overrides",
    [
        ("attention.scale=ssmax",),
        ("attention=l2", "attention.scale_log=true", "attention.scale_max=100"),
        ("attention.gate=head",),
        ("attention.gate=channel",),
        *((f"attention={name}",) for name in ("gemma3", "command_r_plus", "olmo2", "chameleon", "swin_v2", "timm")),
    ],
    ids=str,
)
@pytest.mark.parametrize("rope", ["none", "axial"])
def test_every_parameter_of_a_preset_gets_a_gradient(make_vit, images, overrides, rope):
    vit = make_vit(*overrides, f"model.rope={rope}")
    with torch.autocast("cpu", torch.bfloat16):
        logits = vit(images)
    F.cross_entropy(logits.float(), torch.arange(8)).backward()
    for name, parameter in vit.named_parameters():
        if rope == "none" and name.endswith("k_norm.bias"):
            continue  # adds the same to every score of a row, which softmax ignores; a rotation makes it differ
        assert (parameter.grad != 0).any(), name


def test_every_learned_scale_gets_its_gradient_also_when_it_is_sharded(make_vit, images):
    def grads(shard: bool) -> dict[str, torch.Tensor]:
        found = {}
        for overrides in (("attention=henry2020",), ("attention=swin_v2",), ("attention.scale=ssmax",)):
            vit = make_vit(*overrides)
            if shard:
                for block in vit.blocks:
                    fully_shard(block)
                fully_shard(vit)
            F.cross_entropy(vit(images), torch.arange(8)).backward()
            for name, p in vit.named_parameters():
                if name.endswith("logit_scale"):
                    found[f"{overrides} {name}"] = p.grad.full_tensor() if shard else p.grad
        return found

    plain = grads(shard=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = grads(shard=True)
    finally:
        dist.destroy_process_group()
    assert len(plain) == 12
    for name, grad in plain.items():
        assert (grad != 0).all(), name
        torch.testing.assert_close(sharded[name], grad, rtol=1e-4, atol=1e-8)


# ---------------------------------------------------------------- scales


@pytest.mark.parametrize("raw", [100.0, 1e4, float(torch.finfo(torch.float32).max)])
def test_a_learned_scale_stops_at_its_bound_and_stays_finite_however_far_its_logarithm_runs(make_config, raw):
    attn = module(make_config, "attention=swin_v2")
    attn.logit_scale.data[:2] = raw
    assert attn.scale[:2].tolist() == pytest.approx([100.0, 100.0])
    attn(rand(B, N, H * D)).square().sum().backward()
    assert attn.logit_scale.grad.isfinite().all()
    assert attn.logit_scale.grad[:2].tolist() == [0.0, 0.0]
    assert (attn.logit_scale.grad[2:] != 0).all()


def test_swins_temperature_starts_at_a_tenth_and_a_log_scale_stays_positive(make_config):
    attn = module(make_config, "attention=swin_v2")
    assert attn.scale.tolist() == pytest.approx([10.0] * H)
    assert attn.logit_scale.tolist() == pytest.approx([math.log(10.0)] * H)
    attn.logit_scale.data -= 1000.0
    assert (attn.scale >= 0).all()


def test_ssmax_starts_as_plain_attention_and_grows_with_log_n(make_config):
    assert module(make_config, "attention.scale=ssmax").scale.tolist() == pytest.approx([D**-0.5] * H)
    few, many = (
        module(make_config, "attention.scale=ssmax", "attention.scale_init=0.168", tokens=n).scale for n in (17, 257)
    )
    assert few.tolist() == pytest.approx([0.168 * math.log(17) * D**-0.5] * H)
    assert (many / few).tolist() == pytest.approx([math.log(257) / math.log(17)] * H)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("attention.norm=l2",), "attention.scale"),
        (("attention.scale_log=true",), "attention.scale_log"),
        (("attention.scale=fixed", "attention.scale_max=10"), "attention.scale_max"),
        (("attention=l2", "attention.scale_max=0"), "attention.scale_max"),
        (("attention.dropout=1",), "attention.dropout"),
        (("attention.dropout=-0.1",), "attention.dropout"),
        (("attention.gate=head", "model.block_norm=parallel"), "attention.gate"),
        (("attention.backend=flex", "device=cuda", "attention.dropout=0.1"), "attention.backend"),
        (("attention.norm=none", "attention.gain_offset=1"), "attention.gain_offset"),
    ],
    ids=str,
)
def test_combinations_without_meaning_are_refused_by_key(make_config, overrides, key):
    with pytest.raises(ConfigError) as error:
        make_config(*overrides)
    assert error.value.key == key


@pytest.mark.parametrize("start", [(), ("attention.scale_init=7",)], ids=["null", "given"])
def test_a_learned_scale_that_would_start_above_its_bound_is_refused_before_a_run(make_config, start):
    cfg = make_config("attention=l2", "attention.scale_max=6", *start)  # log2(17² - 17) is 8.1
    with pytest.raises(ConfigError, match=r"attention\.scale_max: 6.0 .*start, [78]"):
        check_sizes(cfg)


def test_cosines_over_sqrt_d_are_refused_because_they_stay_uniform():
    """d = 64, N = 197: H / log N is above 0.999 whatever is learned; the published start is far from it."""
    q, k = (QKNorm(1, 64, kind="l2", gain="none")(rand(8, 197, 1, 64, seed=s)).transpose(1, 2) for s in (0, 1))
    kept, published = (attention_stats(q, k, scale)["entropy_frac"].item() for scale in (64**-0.5, 15.24))
    assert kept > 0.999
    assert published < 0.75


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_a_larger_eps_bounds_the_gradient_of_short_queries_and_lets_their_length_through(make_config, variant, eps):
    attn = module(make_config, f"attention={variant}", f"attention.eps={eps}")
    if isinstance(attn.q_norm, torch.nn.Identity):
        return
    x = torch.zeros(B, N, H, D, requires_grad=True)
    attn.q_norm(x).sum().backward()
    gain = max([1.0, *(p.abs().max().item() for p in attn.q_norm.parameters())]) + attn.q_norm.gain_offset
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() <= 2 * gain * eps**-0.5


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("backend", ["explicit", "sdpa"])
def test_attention_dropout_drops_weights_in_training_only_and_keeps_their_expectation(backend):
    core = AttentionCore(backend=backend, dropout=0.25)
    q, k, v = torch.zeros(1, 1, 400, 4), torch.zeros(1, 1, 400, 4), torch.eye(400).view(1, 1, 400, 400)
    torch.manual_seed(0)
    weights = core(q, k, v, 1.0)[0, 0] * 400  # v = 1 shows the weights
    assert (weights == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert weights[weights > 0].tolist()[0] == pytest.approx(1 / 0.75)
    assert weights.mean().item() == pytest.approx(1.0, abs=0.02)
    assert torch.allclose(core.eval()(q, k, v, 1.0)[0, 0] * 400, torch.ones(400, 400))


def test_dropout_of_weights_goes_to_a_kernel_that_can_drop():
    assert choose_backend("cuda", None, "compute", 64, 0.1) == "sdpa"
    assert choose_backend("cuda", 50.0, "compute", 64, 0.1) == "explicit"
    with pytest.raises(ValueError, match="cannot drop"):
        AttentionCore(softcap=5.0, backend="flex", dropout=0.1)(*(rand(1, 1, 4, 16) for _ in range(3)), 1.0)


def test_attention_dropout_changes_neither_the_start_nor_the_spread_that_match_measures(make_vit, images):
    keys = ("attention.init=match", "attention.dropout=0.5")
    a, b = make_vit(*keys, like=images).state_dict(), make_vit(keys[0], like=images).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in b)


# ---------------------------------------------------------------- gate


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_gate_starts_at_one_half_and_leaves_every_other_weight_at_its_start(make_vit, images, gate):
    plain, gated = make_vit(), make_vit(f"attention.gate={gate}")
    a, b = plain.state_dict(), gated.state_dict()
    assert {n for n in b if n not in a} == {f"blocks.{i}.attn.gate.{p}" for i in range(4) for p in ("weight", "bias")}
    assert all(torch.equal(a[name], b[name]) for name in a)
    x = rand(B, N, 64)
    ours, theirs = (next(iter(attention_layers(m).values())) for m in (gated, plain))
    torch.testing.assert_close(ours(x) - ours.proj.bias, 0.5 * (theirs(x) - theirs.proj.bias))


@pytest.mark.parametrize(("gate", "touched"), [("head", D), ("channel", 1)])
def test_a_shut_gate_shuts_its_head_or_its_channel_only(make_config, gate, touched):
    attn = module(make_config, f"attention.gate={gate}")
    attn.proj = torch.nn.Identity()
    x = rand(B, N, H * D)
    before = attn(x)
    attn.gate.bias.data[2] = -1e9
    changed = (attn(x) != before).any(0).any(0)
    assert changed.sum() == touched
    assert changed.nonzero()[0] == 2 * touched


def test_a_gate_decays_as_a_matrix_and_belongs_to_the_output(make_vit):
    from qkexp.model.parts import pieces

    vit = make_vit("attention.gate=head")
    named = dict(vit.named_parameters())
    assert decays("blocks.0.attn.gate.weight", named["blocks.0.attn.gate.weight"])
    assert not decays("blocks.0.attn.gate.bias", named["blocks.0.attn.gate.bias"])
    assert {p.part for p in pieces(vit) if ".gate." in p.parameter} == {"vo"}


# ---------------------------------------------------------------- rotation


def test_a_rotation_keeps_lengths_and_leaves_class_and_register_tokens_alone():
    rotary, x = AxialRotary(D, (3, 5), 2), rand(B, 17, H, D)
    y = rotary(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)
    assert torch.equal(y[:, :2], x[:, :2])
    assert (y[:, 3:] != x[:, 3:]).any(-1).all()
    assert list(rotary.state_dict()) == []


def test_scores_under_a_rotation_depend_on_the_distance_of_patches_in_each_direction():
    rotary = AxialRotary(D, (4, 6), 0)
    q, k = (rotary(rand(1, 1, 1, D, seed=s).expand(1, 24, 1, D))[0, :, 0].view(4, 6, D) for s in (0, 1))
    z = torch.einsum("abd,xyd->abxy", q, k)
    torch.testing.assert_close(z[:3, :4, :3, :4], z[1:, 2:, 1:, 2:], rtol=1e-4, atol=1e-5)
    assert (z[0, 0, 1, 0] - z[0, 0, 0, 1]).abs() > 1e-3


def test_heads_that_cannot_turn_in_two_directions_are_refused_by_key(make_vit):
    with pytest.raises(ConfigError, match=r"model\.rope.*multiple of 4"):
        make_vit("model.rope=axial", "model.width=60", "model.heads=10")


def test_a_rotation_changes_no_weight_and_no_name(make_vit):
    plain, turned = make_vit().state_dict(), make_vit("model.rope=axial").state_dict()
    assert plain.keys() == turned.keys()
    assert all(torch.equal(plain[n], turned[n]) for n in plain)
