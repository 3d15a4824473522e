"""Attention statistics against a float64 computation, at the numerical edges, and for every kind of mask."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import qkexp
from qkexp.probe import rows
from qkexp.probe.metrics import SCORE_GROUPS, names
from qkexp.probe.rows import entropy_bound, row_stats
from qkexp.probe.stats import attention_stats, layer_stats, percentile, spacing

RAW = {"q_norm_mean", "q_norm_max", "k_norm_mean", "k_norm_max"}
LOGITS = ("max_logit", "max_abs_logit", "max_logit_capped")


def qk(B=2, H=3, N=17, M=None, d=16, *, size=1.0, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(B, H, N, d, generator=g), torch.randn(B, H, M or N, d, generator=g)
    return (size * q).to(dtype), k.to(dtype)


def shared(H, keyed, **more):
    """q of H heads and k of fewer."""
    q, k = qk(H=H, **more)
    return q, k[:, :keyed]


def random_mask(B, H, N, M, seed=1):
    """Bool (B, H, N, M) with a row that sees nothing and a row that sees one key in each head."""
    mask = torch.rand(B, H, N, M, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[0, :, 0] = False
    mask[0, :, 1:2] = False
    mask[0, :, 1:2, M // 2] = True
    return mask


def one_hot_case():
    q = 40.0 * torch.eye(12).expand(2, 3, 12, 12)
    return q, q / 4, {"scale": 1.0}


def uniform_case():
    q, k = qk()
    return q, k[:, :, :1].expand_as(k), {"scale": 0.25}


def bias_of(*shape):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(5))


CASES = {
    "random": lambda: (*qk(), {"scale": 0.25}),
    "one-hot": one_hot_case,
    "identical keys": uniform_case,
    "logits of 5e4": lambda: (*qk(size=1.5e4), {"scale": 0.25}),
    "bf16": lambda: (*qk(size=4, dtype=torch.bfloat16), {"scale": 0.25}),
    "bf16, logits of 5e4": lambda: (*qk(size=1.5e4, dtype=torch.bfloat16), {"scale": 0.25}),
    "bias": lambda: (*qk(), {"scale": 0.25, "bias": bias_of(3, 17, 17)}),
    "bias of each image": lambda: (*qk(), {"scale": 0.25, "bias": bias_of(2, 1, 1, 17)}),
    "mask": lambda: (*qk(), {"scale": 0.25, "mask": random_mask(2, 3, 17, 17)}),
    "mask of keys": lambda: (*qk(), {"scale": 0.25, "mask": (torch.arange(17) < 11).view(1, 1, 1, 17)}),
    "mask of pairs": lambda: (*qk(), {"scale": 0.25, "mask": torch.ones(17, 17).tril().bool()}),
    "cap": lambda: (*qk(size=30), {"scale": 1.0, "cap": 50.0}),
    "cap, mask and bias": lambda: (
        *qk(size=30),
        {"scale": 1.0, "cap": 5.0, "mask": random_mask(2, 3, 17, 17), "bias": bias_of(3, 17, 17)},
    ),
    "scale of each head": lambda: (*qk(), {"scale": torch.tensor([0.1, 1.0, 10.0])}),
    "one learned scale": lambda: (*qk(), {"scale": torch.nn.Parameter(torch.tensor([8.09]))}),
    "odd sizes": lambda: (*qk(N=13, d=7), {"scale": 0.4}),
    "few queries, many keys": lambda: (*qk(N=7, M=130, d=5), {"scale": 1.0}),
    "many queries, few keys": lambda: (*qk(N=130, M=5, d=5), {"scale": 1.0}),
    "cross with mask": lambda: (*qk(N=7, M=70, d=5), {"scale": 1.0, "mask": random_mask(2, 3, 7, 70)}),
    "one query": lambda: (*qk(N=1, M=9), {"scale": 1.0}),
    "heads that share keys": lambda: (*shared(6, 2, N=17), {"scale": 0.25}),
    "one key head": lambda: (*shared(4, 1, N=11, M=23), {"scale": torch.tensor([0.1, 1.0, 3.0, 9.0])}),
    "heads that share keys, cap, mask and bias": lambda: (
        *shared(6, 3, N=13, M=17, size=30),
        {"scale": 1.0, "cap": 5.0, "mask": random_mask(2, 6, 13, 17), "bias": bias_of(6, 13, 17)},
    ),
    "logits of 1e6, long": lambda: (*qk(N=9, M=200, size=3e5), {"scale": 0.25, "mask": random_mask(2, 3, 9, 200)}),
}


@pytest.fixture(params=["as it is", "keys first", "keys last", "a few heads a chunk", "a few rows a chunk"])
def path(request, monkeypatch):
    """Every way through the code: layout of short rows, and where chunks end."""
    chosen = {
        "as it is": {},
        "keys first": {"SHORT": 10**6},
        "keys last": {"SHORT": 0},
        "a few heads a chunk": {"CHUNK_BYTES": 4 * 4 * 17 * 17},
        "a few rows a chunk": {"CHUNK_BYTES": 4 * 5 * 17, "SHORT": 20},
    }[request.param]
    for name, value in chosen.items():
        monkeypatch.setattr(rows, name, value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("path")
def test_metrics_equal_a_float64_computation(case, reference):
    q, k, options = CASES[case]()
    found = {name: value.numpy() for name, value in attention_stats(q, k, **options, groups=SCORE_GROUPS).items()}
    assert set(found) == set(names(SCORE_GROUPS)) - RAW
    true = reference(q, k, **options)
    largest = true["max_abs_logit"]
    for name in LOGITS:
        assert np.all(np.abs(found[name] - true[name]) <= 1e-5 * np.maximum(largest, 1e-3)), name
    for name in ("entropy_mean", "entropy_frac", "attn_max_mean", "sink_mean", "entropy_bound_mean"):
        np.testing.assert_allclose(found[name], true[name], atol=1e-4, rtol=0, err_msg=name)
    assert np.all(np.abs(found["entropy_p05"] - true["entropy_p05"]) <= 1e-4 + 1e-6 * largest)
    assert np.all(np.abs(found["logit_gap_mean"] - true["logit_gap_mean"]) <= 1e-5 * np.maximum(largest, 1))
    for name in ("q_in_norm_mean", "k_in_norm_mean", "score_scale"):
        np.testing.assert_allclose(found[name], true[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(found["collapsed_rows"], true["collapsed_rows"], atol=1e-6)
    np.testing.assert_array_equal(found["masked_rows"], true["masked_rows"])
    np.testing.assert_array_equal(found["nonfinite"], 0.0)
    if case != "identical keys" and case != "one-hot":  # there the pair is not unique
        for name in ("max_pair_q_norm", "max_pair_k_norm", "max_pair_cos"):
            np.testing.assert_allclose(found[name], true[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("path")
def test_single_rows_are_within_their_bound(case, reference):
    q, k, options = CASES[case]()
    true = reference(q, k, **options)
    scale = torch.as_tensor(options.pop("scale")).detach().float().reshape(-1, 1, 1)
    rows = row_stats(q.float() * scale, k.float(), **options, groups=("bound",))
    bound = 1e-4 + 1e-6 * true["max_abs_logit"][:, None]
    valid = ~np.isnan(true["rows"])
    assert np.all((np.abs(rows.entropy.numpy() - true["rows"]) <= bound) | ~valid)
    if rows.valid is not None:
        np.testing.assert_array_equal(rows.valid.numpy(), valid)
    assert (rows.entropy.numpy()[valid] >= 0).all()
    assert (rows.extra["entropy_bound"].numpy() <= rows.entropy.numpy() + bound)[valid].all()


@pytest.mark.parametrize("case", [c for c in CASES if "bias" not in c])
def test_the_largest_logit_is_the_product_of_its_pairs_lengths_and_cosine(case):
    q, k, options = CASES[case]()
    s = attention_stats(q, k, **options)
    product = s["score_scale"] * s["max_pair_q_norm"] * s["max_pair_k_norm"] * s["max_pair_cos"].abs()
    torch.testing.assert_close(product.log(), s["max_abs_logit"].log(), rtol=0, atol=1e-5)
    assert (s["max_pair_cos"].abs() <= 1 + 1e-5).all()


def test_one_hot_is_zero_and_identical_keys_are_uniform():
    q, k, options = one_hot_case()
    sharp = attention_stats(q, k, **options)
    assert sharp["entropy_mean"].tolist() == [0.0] * 3
    assert sharp["collapsed_rows"].tolist() == [1.0] * 3
    assert sharp["attn_max_mean"].tolist() == [1.0] * 3
    q, k, options = uniform_case()
    flat = attention_stats(q, k, **options)
    assert flat["entropy_mean"].tolist() == pytest.approx([math.log(17)] * 3, abs=1e-6)
    assert flat["entropy_frac"].tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    assert flat["attn_max_mean"].tolist() == pytest.approx([1 / 17] * 3, abs=1e-6)
    assert flat["logit_gap_mean"].tolist() == pytest.approx([0.0] * 3, abs=1e-5)


def test_a_rows_common_offset_changes_logits_but_neither_gap_nor_entropy():
    q, k = qk()
    plain = attention_stats(q, k, 0.25)
    lifted = attention_stats(q, k, 0.25, bias=torch.full((1, 1, 1, 1), 100.0))
    torch.testing.assert_close(lifted["max_logit"], plain["max_logit"] + 100)
    torch.testing.assert_close(lifted["logit_gap_mean"], plain["logit_gap_mean"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lifted["entropy_mean"], plain["entropy_mean"], rtol=0, atol=1e-4)


def test_one_collapsed_head_is_visible_among_uniform_ones():
    q, k = qk(H=4, N=12, d=12)
    q, k = q * 1e-3, k.clone()
    q[:, 2] = k[:, 2] = 40 * torch.eye(12)
    s = attention_stats(q, k, 1.0)
    assert s["entropy_frac"][2] < 1e-6
    assert (s["entropy_frac"][[0, 1, 3]] > 0.99).all()


def test_soft_cap_reads_max_logit_before_and_max_logit_capped_after_the_cap():
    q, k = qk(size=1e4)
    s = attention_stats(q, k, 1.0, cap=50.0)
    assert (s["max_logit"] > 1e4).all()
    assert s["max_logit_capped"].tolist() == [50.0] * 3
    none = attention_stats(q, k, 1.0)
    assert torch.equal(none["max_logit_capped"], none["max_logit"])


# ---------------------------------------------------------------- masks


ENCODINGS = {
    "-inf": (-math.inf, torch.float32),
    "finfo.min": (torch.finfo(torch.float32).min, torch.float32),
    "-1e4": (-1e4, torch.float32),
    "-1e4 in bf16": (-1e4, torch.bfloat16),  # rounds to -9984
    "-1e4 that was bf16 once": (-9984.0, torch.float32),
    "finfo.min in bf16": (torch.finfo(torch.bfloat16).min, torch.bfloat16),
    "finfo.min in fp16": (torch.finfo(torch.float16).min, torch.float16),
    "-inf in float64": (-math.inf, torch.float64),
}


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_mask_means_the_same_in_every_encoding(encoding, cap):
    value, dtype = ENCODINGS[encoding]
    q, k = qk(size=20)
    mask = random_mask(2, 3, 17, 17)
    additive = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, value)
    expected, found = attention_stats(q, k, 1.0, mask=mask, cap=cap), attention_stats(q, k, 1.0, mask=additive, cap=cap)
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


@pytest.mark.parametrize(
    "mask",
    [torch.ones(17, 17), -3.0 * torch.ones(17, 17), torch.ones(17, 17, dtype=torch.int64), torch.full((17,), math.nan)],
    ids=["ones", "a bias", "integers", "nan"],
)
def test_a_mask_that_is_neither_bool_nor_additive_is_refused(mask):
    with pytest.raises(ValueError, match="mask"):
        attention_stats(*qk(), 1.0, mask=mask)


@pytest.mark.parametrize("cap", [None, 1.0, 5.0])
def test_a_masked_key_changes_nothing(cap):
    q, k = qk()
    mask = torch.ones(17, 17, dtype=torch.bool)
    mask[:, 4] = False
    before = attention_stats(q, k, 1.0, mask=mask, cap=cap)
    k[:, :, 4] = 1e3 * k[:, :, 4].sign()
    after = attention_stats(q, k, 1.0, mask=mask, cap=cap)
    for name in before.keys() - {"k_in_norm_mean"}:
        torch.testing.assert_close(before[name], after[name], rtol=1e-6, atol=1e-6, msg=name)


def test_masked_rows_are_counted_and_rows_with_one_key_are_left_out_of_the_fraction():
    q, k = qk(B=1, H=2, N=4)
    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 0, 0] = False
    mask[0, 0, 1, 1:] = False
    s = attention_stats(torch.zeros_like(q), k, 1.0, mask=mask)
    assert s["masked_rows"].tolist() == [1.0, 0.0]
    assert s["entropy_frac"].tolist() == pytest.approx([1.0, 1.0])
    assert s["entropy_mean"].tolist() == pytest.approx([2 / 3 * math.log(4), math.log(4)])
    assert s["collapsed_rows"].tolist() == [0.0, 0.0]


def test_a_head_that_sees_nothing_has_no_values_and_the_others_keep_theirs():
    q, k = qk(H=2)
    mask = torch.ones(1, 2, 1, 1, dtype=torch.bool)
    mask[0, 0] = False
    s, alone = attention_stats(q, k, 1.0, mask=mask), attention_stats(q[:, 1:], k[:, 1:], 1.0)
    assert s["masked_rows"].tolist() == [2 * 17.0, 0.0]
    assert s["nonfinite"].tolist() == [0.0, 0.0]
    measured = {"q_in_norm_mean", "k_in_norm_mean", "masked_rows", "nonfinite", "score_scale"}
    for name in s:
        assert s[name][0].isfinite() == (name in measured), name
        torch.testing.assert_close(s[name][1], alone[name][0], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("masked", [False, True])
def test_a_single_key_leaves_nothing_to_be_spread_over(masked):
    q, k = qk(M=1)
    s = attention_stats(q, k, 1.0, mask=torch.ones(1, 1, dtype=torch.bool) if masked else None)
    assert s["entropy_mean"].tolist() == [0.0] * 3
    assert s["entropy_frac"].isnan().all()
    assert s["collapsed_rows"].isnan().all()


# ---------------------------------------------------------------- non-finite, huge and tiny


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("path")
def test_non_finite_inputs_spoil_their_own_head_only_and_are_counted(value):
    q, k = qk(B=2, H=3, N=17)
    clean = attention_stats(q, k, 0.25)
    q[1, 1, 5, 2] = value
    k[0, 2, 3, 0] = value
    k[0, 2, 4, 1] = value
    s = attention_stats(q, k, 0.25)
    # the value itself, and its row (17 keys) or column (17 queries) of scores
    assert s["nonfinite"].tolist() == [0.0, 1.0 + 17, 2.0 + 2 * 17]
    for name in s.keys() - {"nonfinite", "score_scale", "masked_rows"}:
        assert torch.equal(s[name][0], clean[name][0]), name
        assert s[name][1:].isnan().all(), name
    assert s["masked_rows"].tolist() == [0.0] * 3


def test_scores_that_overflow_are_counted():
    q = torch.full((1, 1, 3, 4), 1e25)
    s = attention_stats(q, q, 1.0)
    assert s["nonfinite"].item() == 9
    assert s["max_logit"].isnan()
    assert s["score_ulp"].isnan()


ADDITIVE = {"-inf": -math.inf, "finfo.min": torch.finfo(torch.float32).min, "-1e4": -1e4}


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)), st.integers(1, 12), st.integers(1, 90),
    st.integers(1, 9), st.sampled_from([1e-3, 1.0, 30.0, 1e6]), st.sampled_from([None, "bool", *ADDITIVE]),
    st.booleans(), st.sampled_from([None, 1.0, 50.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape_mask_and_size_of_logits_equals_float64(reference, heads, N, M, d, size, mask, biased, cap, seed):
    """Heads that share keys, other numbers of keys than of queries, masks in every encoding, logits to 1e6."""
    B, keyed, served = heads
    q, k = qk(B, keyed * served, N, M, d, seed=seed)
    k = k[:, :keyed]
    scale = size / float((q.norm(dim=-1).max() * k.norm(dim=-1).max()).clamp_min(1e-6))
    seen = None if mask is None else random_mask(B, keyed * served, N, M, seed)
    given_mask = torch.zeros(seen.shape).masked_fill_(~seen, ADDITIVE[mask]) if mask in ADDITIVE else seen
    bias = bias_of(keyed * served, N, M) if biased else None
    found = attention_stats(q, k, scale, bias, given_mask, cap, groups=SCORE_GROUPS)
    if seen is not None and not seen.any((0, 2, 3)).all():
        return  # a head without a pair has no maximum
    true = reference(q, k, scale, bias, seen, cap)
    slack = 1e-4 + 2e-6 * true["max_abs_logit"]
    for name in ("entropy_mean", "entropy_p05", "attn_max_mean", "sink_mean", "entropy_bound_mean", "logit_gap_mean"):
        assert np.all(np.abs(found[name].numpy() - true[name]) <= slack), name
    for name in LOGITS:
        assert np.all(np.abs(found[name].numpy() - true[name]) <= 1e-5 * np.maximum(true["max_abs_logit"], 1e-3)), name
    np.testing.assert_array_equal(found["masked_rows"], true["masked_rows"])
    np.testing.assert_array_equal(found["nonfinite"], 0.0)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(1, 9),
    st.integers(-6, 6), st.sampled_from(["random", "zero", "identical", "bf16"]), st.sampled_from([None, 1.0, 50.0]),
    st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_finite_inputs_never_give_nan_and_entropy_keeps_its_bounds(B, H, N, M, d, exponent, kind, cap, per_head, seed):
    q, k = qk(B, H, N, M, d, size=10.0**exponent, seed=seed)
    k = k * 10.0**exponent
    if kind == "zero":
        q = torch.zeros_like(q)
    elif kind == "identical":
        k = k[:, :, :1].expand_as(k)
    elif kind == "bf16":
        q, k = q.bfloat16(), k.bfloat16()
    s = attention_stats(q, k, torch.rand(H) if per_head else 1.0, cap=cap)
    for name, value in s.items():
        if M > 1 or name not in ("entropy_frac", "collapsed_rows"):
            assert value.isfinite().all(), name
    assert (s["entropy_mean"] >= 0).all()
    assert (s["entropy_p05"] >= 0).all()
    assert (s["entropy_mean"] <= math.log(M) + 1e-4).all()
    assert (s["attn_max_mean"] <= 1).all()
    assert (s["max_abs_logit"] >= s["max_logit"]).all()
    assert (s["nonfinite"] == 0).all()


def test_a_scale_of_zero_is_measured():
    s = attention_stats(*qk(), torch.tensor([0.0, 1.0, -1.0]))
    assert all(value.isfinite().all() for value in s.values())
    assert s["max_abs_logit"][0] == 0
    assert s["entropy_mean"][0].item() == pytest.approx(math.log(17), abs=1e-6)
    torch.testing.assert_close(
        s["score_scale"] * s["max_pair_q_norm"] * s["max_pair_k_norm"] * s["max_pair_cos"].abs(),
        torch.stack([torch.tensor(0.0), s["max_abs_logit"][1], -s["max_abs_logit"][2]]),
    )


@pytest.mark.parametrize("at", [0.0, 1e-7, 1e-3, 1.0, 49.9, 50.0, 100.0, 1e3, 1e4, 5e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_spacing_is_the_distance_to_the_next_number(at, dtype):
    rounded = torch.tensor(at).to(dtype)
    bits = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}[dtype]
    after = (rounded.view(bits) + 1).view(dtype)
    assert spacing(rounded.float(), dtype).item() == (after.double() - rounded.double()).item()


@pytest.mark.parametrize(("at", "ulp"), [(50.0, 0.25), (100.0, 0.5), (1e3, 4.0), (1e4, 64.0), (5e4, 256.0)])
def test_score_ulp_is_the_spacing_of_bf16_at_the_largest_logit(at, ulp):
    q = torch.tensor([[[[1.0]]]], dtype=torch.bfloat16)
    s = attention_stats(q, q, at)
    assert s["score_ulp"].item() == ulp
    assert layer_stats([q], [q], [at], score_dtype=torch.float32)["score_ulp"].item() < 0.01


# ---------------------------------------------------------------- reductions, memory, context


def test_percentile_is_numpys():
    x = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0))
    for fraction in (0.0, 0.05, 0.5, 1.0):
        np.testing.assert_allclose(percentile(x, fraction), np.quantile(x.double(), fraction, axis=1), rtol=1e-6)
    assert percentile(x[:, :1], 0.05).tolist() == x[:, 0].tolist()


def test_layers_of_one_call_are_measured_as_if_alone():
    layers = [qk(size=size, seed=seed) for seed, size in enumerate([1.0, 100.0, 0.01])]
    scales = [0.25, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([8.0])]
    q, k = zip(*layers, strict=True)
    together = layer_stats(q, k, scales)
    for i in range(3):
        alone = attention_stats(q[i], k[i], scales[i])
        for name in alone:
            torch.testing.assert_close(together[name][i], alone[name], rtol=1e-5, atol=1e-6, msg=name)


def test_layers_of_one_call_keep_their_own_bias_and_mask():
    layers = [qk(N=9, M=11, seed=seed) for seed in range(3)]
    biases = [bias_of(3, 9, 11), None, 2 * bias_of(1, 1, 9, 11)]
    masks = [None, random_mask(2, 3, 9, 11), random_mask(2, 1, 9, 11, seed=3)]
    q, k = zip(*layers, strict=True)
    together = layer_stats(q, k, [0.25] * 3, bias=biases, mask=masks, groups=SCORE_GROUPS)
    for i in range(3):
        alone = attention_stats(q[i], k[i], 0.25, biases[i], masks[i], groups=SCORE_GROUPS)
        for name in alone:
            torch.testing.assert_close(together[name][i], alone[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_key_that_is_not_finite_spoils_every_head_that_reads_it():
    q, k = shared(6, 2, N=17)
    k[1, 1, 3, 0] = math.nan
    s = attention_stats(q, k, 0.25)
    assert s["nonfinite"].tolist() == [0.0] * 3 + [1.0 + 17] * 3
    assert s["entropy_mean"].isnan().tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("keyed", [4, 5])
def test_heads_that_cannot_be_paired_are_refused(keyed):
    q, k = qk(H=6)
    with pytest.raises(ValueError, match=r"k \("):
        attention_stats(q, torch.cat([k, k], 1)[:, :keyed], 1.0)


@pytest.mark.parametrize("group", ["sinks", "gradients"])
def test_a_group_that_is_unknown_or_needs_more_than_q_and_k_is_refused(group):
    with pytest.raises(ValueError, match=r"sink"):
        attention_stats(*qk(), 1.0, groups=(group,))


def test_keys_of_several_heads_are_not_copied():
    q, k = torch.randn(8, 32, 2, 64), torch.randn(8, 1, 600, 64)
    with Largest() as largest:
        attention_stats(q, k, 1.0)
    assert largest.bytes <= 32 * k.nbytes / 8  # one image's, for the pair of the maximum


@pytest.mark.parametrize("n", [2, 17, 1025])
@pytest.mark.parametrize("size", [0.0, 0.5, 4.0, 11.0, 60.0, 1e4])
def test_the_entropy_bound_is_attained_by_the_sharpest_row_of_its_length(n, size):
    z = torch.full((n,), -size / math.sqrt(n * (n - 1)), dtype=torch.float64)
    z[n // 2] = size * math.sqrt((n - 1) / n)
    p = z.softmax(0)
    entropy = -(p * p.log()).nan_to_num().sum()
    found = entropy_bound(torch.tensor(size), torch.tensor(float(n)))
    assert found.item() == pytest.approx(entropy.item(), rel=1e-4, abs=1e-6)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 1, 512, dtype=torch.bool)], ids=["plain", "mask of keys"])
def test_long_sequences_never_build_a_full_score_matrix(mask, monkeypatch):
    q, k = qk(B=2, H=2, N=512, d=8)
    expected = attention_stats(q, k, 1.0, mask=mask)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 16)
    with Largest() as largest:
        found = attention_stats(q, k, 1.0, mask=mask)
    assert largest.bytes <= max(3 << 16, q.nbytes)  # a single head's scores would be 1 << 20
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_statistics_ignore_autocast_and_gradients():
    q, k = qk()
    plain = attention_stats(q, k, 0.25)
    q.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention_stats(q, k, torch.nn.Parameter(torch.tensor([0.25])))
    for name in plain:
        assert torch.equal(plain[name], inside[name]), name
        assert inside[name].dtype == torch.float32
        assert not inside[name].requires_grad


def test_inputs_are_left_as_they_were():
    q, k = qk()
    kept = q.clone(), k.clone()
    attention_stats(q, k, 3.0, cap=5.0, mask=random_mask(2, 3, 17, 17))
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


def test_products_are_exact_where_training_rounds_them_to_bf16_on_cpu():
    q, k = qk(N=200, d=64, size=30)
    plain = attention_stats(q, k, 1.0)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        found = attention_stats(q, k, 1.0)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert torch.equal(found["max_logit"], plain["max_logit"])


@pytest.mark.parametrize("asked", ["highest", "high"])
def test_products_are_exact_where_training_uses_tf32(asked, monkeypatch):
    used = []
    product = torch.bmm
    precision = torch.backends.cuda.matmul
    monkeypatch.setattr(torch, "bmm", lambda *a, **kw: (used.append(precision.fp32_precision), product(*a, **kw))[1])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(asked)
    try:
        attention_stats(*qk(), 1.0)
        assert torch.get_float32_matmul_precision() == asked
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(used) == {"ieee"}


def test_the_public_name_is_this_function():
    assert qkexp.attention_stats is attention_stats
