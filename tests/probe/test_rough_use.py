"""What users do to models and probes that neither expects: the right number, or one clear message."""

from __future__ import annotations

import math
import resource

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from qkexp import AttentionProbe
from qkexp.probe.check import CoverageError
from qkexp.probe.metrics import NAMES

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


class Attention(nn.Module):
    """Self-attention of (B, H, N, d) by PyTorch's function; ``after`` is what the model does to its output."""

    def __init__(self, after=lambda y: y):
        super().__init__()
        self.after = after

    def forward(self, q, mask=None):
        return self.after(F.scaled_dot_product_attention(q, q, q, mask))


def inputs(B=2, H=3, N=10, d=8, size=1.0):
    return size * torch.randn(B, H, N, d, generator=torch.Generator().manual_seed(0))


def padded(seen):
    """(B, 1, N, N) of ``seen`` queries of each image; those left see every key."""
    return (torch.arange(10) < torch.tensor(seen).view(-1, 1)).view(-1, 1, 10, 1).expand(-1, 1, 10, 10)


@pytest.mark.parametrize("seen", [[2, 10], [0, 10], [1, 3]])
def test_parts_under_a_mask_combine_as_if_they_were_one_batch(seen):
    """Micro-batches are weighted by the rows that see a key, and one of padding alone has no say."""
    model, q, mask = nn.Sequential(Attention()), inputs(), padded(seen)
    probe = AttentionProbe(model)
    with probe.step(0):
        model[0](q, mask)
    whole = probe.frame.to_pandas()
    with probe.step(1):
        for image in (slice(0, 1), slice(1, 2)):
            model[0](q[image], mask[image])
    parts = probe.frame.to_pandas()
    assert whole["entropy_mean"].notna().all()
    additive = [name for name in NAMES if name != "entropy_p05"]  # a percentile of parts is none of the whole
    np.testing.assert_allclose(parts[additive], whole[additive], rtol=1e-5, atol=1e-6)


def test_rows_with_one_key_do_not_weigh_in_fractions_of_parts():
    model, q = nn.Sequential(Attention()), inputs()
    mask = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    mask[0, :, :9, 1:] = False  # nine of ten rows of the first image see one key
    probe = AttentionProbe(model)
    with probe.step(0):
        model[0](q, mask)
    whole = probe.frame.to_pandas()
    with probe.step(1):
        model[0](q[:1], mask[:1])
        model[0](q[1:], mask[1:])
    np.testing.assert_allclose(probe.frame.to_pandas()["entropy_frac"], whole["entropy_frac"], rtol=1e-5)


def test_the_first_step_checks_long_sequences_without_a_full_score_matrix():
    """Two heads of 4,096 tokens: all scores of an image would take 134 MB, and the check three times that."""
    model, q = nn.Sequential(Attention()), inputs(4, 2, 4096, 32)
    with torch.no_grad():
        model(q)  # the kernel's own memory
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        probe = AttentionProbe(model)
        with probe.step(0):
            model(q)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert probe.coverage.checked == ("0",)
    assert grown < 100e6


def test_a_float64_model_is_checked_as_finely_as_the_check_computes():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL).double()
    probe = AttentionProbe(model)
    with probe.step(0):
        model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert len(probe.coverage.checked) == 2


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_any_optimiser_inside_the_step_is_noticed(kind):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    how = {} if kind == "plain" else {kind: True}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **how)
    probe = AttentionProbe(model, groups=["update", "adam"], optimizer=optimizer)
    before = [block.attn.qkv.weight.detach().clone() for block in model.blocks]
    with probe.step(0):
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        optimizer.step()
    found = probe.frame.to_pandas()
    for layer, (old, block) in enumerate(zip(before, model.blocks, strict=True)):
        change, old = ((x.view(3, 3, 16, 48)[:2].transpose(0, 1).flatten(1).norm(dim=1))
                       for x in (block.attn.qkv.weight.detach() - old, old))  # fmt: skip
        ratio = found[found.layer == layer]["qk_update_ratio"]
        np.testing.assert_allclose(ratio, change / old, rtol=1e-4)
    assert found["q_grad_rms_eps"].notna().all()


def test_an_optimiser_of_another_model_is_no_update():
    model, other = timm.create_model("vit_tiny_patch16_224", **SMALL), nn.Linear(2, 2)
    probe, optimizer = AttentionProbe(model, groups=["update"]), torch.optim.SGD(other.parameters(), 1e-2)
    with probe.step(0):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        other(torch.randn(2, 2)).sum().backward()
        optimizer.step()
    assert probe.frame.to_pandas()["qk_update_ratio"].isna().all()


def test_scores_that_overflow_in_the_first_step_are_counted_and_blamed_on_nobody():
    model = nn.Sequential(Attention())
    probe = AttentionProbe(model)
    with probe.step(0):
        model(inputs(size=1e25))
    assert (probe.frame.to_pandas()["nonfinite"] > 0).all()
    assert "not finite" in probe.coverage.unchecked["0"]


def test_an_output_that_overflows_in_fp16_is_said():
    class Written(nn.Module):
        def forward(self, q):
            return (q @ q.transpose(-2, -1)).mul(1e-3).softmax(-1) @ q

    model = nn.Sequential(Written())
    model[0].to_q, model[0].to_k = nn.Identity(), nn.Identity()  # it looks like attention
    probe = AttentionProbe(model)
    with torch.no_grad(), probe.step(0):
        assert model(inputs(size=300.0).half()).isnan().any()
    assert "overflows" in probe.coverage.unchecked["0"]


@pytest.mark.parametrize("after", [lambda y: y.mul_(0.5), nn.Dropout(0.1, inplace=True)], ids=["mul_", "dropout"])
def test_what_is_done_to_the_output_afterwards_is_not_the_attentions_fault(after):
    model = nn.Sequential(Attention(after)).train()
    probe = AttentionProbe(model)
    with probe.step(0):
        model(inputs())
    assert probe.coverage.checked == ("0",)


def test_a_query_that_is_scaled_and_then_written_into_is_the_written_one():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q, self.to_k = nn.Identity(), nn.Identity()

        def forward(self, x):
            q = x * 0.25
            q += 1.0
            return (q @ x.transpose(-2, -1)).softmax(-1) @ x

    model, x = nn.Sequential(Biased()), inputs()
    probe = AttentionProbe(model)
    with probe.step(0):
        model(x)
    z = (0.25 * x + 1.0) @ x.transpose(-2, -1)
    found = probe.frame.to_pandas()["max_logit"]
    np.testing.assert_allclose(found, z.amax((0, 2, 3)), rtol=1e-5)
    assert probe.coverage.checked == ("0",)


def test_a_shifted_windows_mask_is_no_score_in_swin_v2_cr():
    torch.manual_seed(0)
    model = timm.create_model(
        "swinv2_cr_tiny_224", img_size=64, window_size=4, depths=(2, 2), num_heads=(2, 4), embed_dim=32, num_classes=5
    )
    probe = AttentionProbe(model.eval())
    with torch.no_grad(), probe.step(0):
        model(torch.randn(2, 3, 64, 64))
    assert probe.frame.to_pandas()["max_abs_logit"].max() < 30.0
    assert len(probe.coverage.checked) == 4


class Layers(nn.Module):
    """Encoder layers, of which some may be left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))

    def forward(self, x, skip=()):
        for number, layer in enumerate(self.layers):
            x = x if number in skip else layer(x)
        return x


def test_a_layer_that_is_dropped_is_absent_where_that_is_allowed_and_else_named():
    model, x = Layers(), torch.randn(2, 5, 16)
    probe = AttentionProbe(model, allow_missing=True)
    with probe.step(0):
        model(x, skip=(1,))
    assert probe.frame.to_pandas()["module"].unique().tolist() == ["layers.0.self_attn", "layers.2.self_attn"]
    assert len(probe.coverage.fired) == 2
    with probe.step(1):
        model(x)
    assert probe.frame.to_pandas()["layer"].unique().tolist() == [0, 1, 2]
    with probe.step(2):
        pass
    assert probe.frame is None
    strict = AttentionProbe(model)
    with pytest.raises(CoverageError, match=r"layers\.1\.self_attn"), strict.step(0):
        model(x, skip=(1,))


def test_a_step_without_a_forward_pass_has_an_empty_table():
    model = Layers()
    probe = AttentionProbe(model)
    with probe.step(0):
        model(torch.randn(2, 5, 16))
    with probe.step(1):
        pass
    assert probe.frame.scalars() == {}
    assert len(probe.frame.to_pandas()) == 0
    assert "entropy_mean" in probe.frame.to_pandas()


@pytest.mark.parametrize(
    "wrong",
    [{"images": 0}, {"images": "foo"}, {"queries": 0}, {"queries": -3}, {"every": -1}, {"every": 1.5},
     {"groups": "sink"}, {"groups": ["sinks"]}],
    ids=str,
)  # fmt: skip
def test_arguments_without_meaning_are_refused_before_training(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}".replace("[", r"\[")):
        AttentionProbe(Layers(), **wrong)


def test_no_optimiser_may_be_none():
    assert AttentionProbe(Layers(), optimizer=None).optimizers == ()


def test_a_step_within_a_step_is_refused():
    probe = AttentionProbe(Layers())
    with pytest.raises(RuntimeError, match="step 1 begins within another"), probe.step(0), probe.step(1):
        pass


def test_names_of_an_average_are_those_of_its_model():
    model = Layers()
    average = torch.optim.swa_utils.AveragedModel(model)
    assert AttentionProbe(average).names == AttentionProbe(model).names


def test_heads_between_tokens_and_width_are_read_from_einsum():
    class Einsum(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q, self.to_k = nn.Identity(), nn.Identity()

        def forward(self, x):
            z = torch.einsum("bnhd,bmhd->bhnm", x, x) / math.sqrt(8)
            return torch.einsum("bhnm,bmhd->bnhd", z.softmax(-1), x)

    x = inputs()
    model = nn.Sequential(Einsum())
    probe = AttentionProbe(model)
    with probe.step(0):
        model(x.transpose(1, 2))
    z = x @ x.transpose(-2, -1) / math.sqrt(8)
    expected = torch.special.entr(z.double().softmax(-1)).sum(-1).mean((0, 2))
    np.testing.assert_allclose(probe.frame.to_pandas()["entropy_mean"], expected, rtol=1e-4)
    assert probe.coverage.checked == ("0",)
