"""Models that this project did not write: what is captured, what is checked, what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from qkexp import AttentionProbe
from qkexp.probe.adapters import Capture, Hook
from qkexp.probe.check import CoverageError, SelfCheckError
from qkexp.probe.metrics import NAMES

H, D = 3, 16
WIDTH = H * D


def heads(x, n=H):
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class Called(nn.Module):
    """Grouped-query attention through PyTorch's function, in a class that does not look like attention."""

    def __init__(self, keys=1, **kwargs):
        super().__init__()
        self.inner = nn.Linear(WIDTH, (H + 2 * keys) * D)
        self.keys, self.kwargs, self.seen = keys, kwargs, None

    def forward(self, x):
        q, k, v = self.inner(x).split([WIDTH, self.keys * D, self.keys * D], -1)
        self.seen = heads(q), heads(k, self.keys), heads(v, self.keys)
        y = imported_by_name(*self.seen, enable_gqa=True, **self.kwargs)
        return x + y.transpose(1, 2).flatten(2)


class WrittenOut(nn.Module):
    """Attention as people write it; ``how`` says what is done to the score."""

    def __init__(self, how="scaled first"):
        super().__init__()
        self.qkv, self.proj, self.how = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), how
        self.bias = nn.Parameter(torch.randn(H, 17, 17))
        self.register_buffer("mask", torch.ones(17, 17).tril() == 0)
        self.temperature = nn.Parameter(torch.tensor([3.0, 5.0, 7.0]).view(H, 1, 1))
        self.drop = nn.Dropout(0.0)
        self.seen = None

    def forward(self, x):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        self.seen = q, k, v
        if self.how == "scaled first":
            p = ((q * D**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        elif self.how == "masked_fill":
            z = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
            p = F.softmax(z.masked_fill(self.mask, float("-inf")), dim=-1, dtype=torch.float32)
        elif self.how == "capped":
            z = q @ k.transpose(-2, -1) * D**-0.5
            p = torch.softmax(torch.tanh(z / 2.0) * 2.0, -1)
        elif self.how == "einsum, biased":
            z = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.5
            z = torch.where(~self.mask, z + self.bias, torch.finfo(z.dtype).min)
            return self.proj(torch.einsum("b h i j, b h j d -> b h i d", z.softmax(-1), v).transpose(1, 2).flatten(2))
        elif self.how == "cosine":
            z = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            p = (z * self.temperature).softmax(-1)
        else:  # over images and heads at once, in one axis, shifted by hand
            z = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).mul_(D**-0.5)
            z = (z - z.amax(-1, keepdim=True)).view(-1, H, 17, 17)
            p = z.softmax(-1)
        y = self.drop(p.to(v.dtype)) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def x():
    return torch.randn(4, 17, WIDTH, generator=torch.Generator().manual_seed(3))


def probed(model, *args, **kwargs):
    probe = AttentionProbe(model, **kwargs)
    with probe.step(0):
        model(*args)
    return probe


def check(probe, reference, layer, q, k, scale, **kwargs):
    found = probe.frame.to_pandas().set_index(["layer", "head"]).loc[layer]
    true = reference(q, k, scale, **kwargs)
    for name in set(true) & set(NAMES):
        np.testing.assert_allclose(found[name], true[name], rtol=1e-4, atol=1e-4, err_msg=name)


# ---------------------------------------------------------------- what is captured


@pytest.mark.parametrize("kwargs", [{}, {"scale": 1 / 16}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("keys", [1, 3])
def test_any_module_that_calls_pytorchs_function_is_discovered(reference, x, keys, kwargs):
    model = Model(nn.Identity(), Called(keys, **kwargs), Called(keys, **kwargs))
    probe = AttentionProbe(model)
    assert probe.names == ()
    with probe.step(0):
        model(x)
    assert probe.names == probe.coverage.checked == ("blocks.1", "blocks.2")
    for layer in (0, 1):
        q, k, _ = model.blocks[layer + 1].seen
        mask = torch.ones(17, 17, dtype=torch.bool).tril() if kwargs.get("is_causal") else None
        k = k.repeat_interleave(H // keys, 1)  # query head h meets key head h // (H / H_k)
        check(probe, reference, layer, q, k, kwargs.get("scale", D**-0.5), mask=mask)


@pytest.mark.parametrize("how", ["scaled first", "masked_fill", "capped", "einsum, biased", "cosine", "one axis"])
def test_attention_that_is_written_out_is_followed_to_its_softmax(reference, x, how):
    model = Model(WrittenOut(how))
    model.blocks[0].qkv.weight.data *= 3
    probe = probed(model, x)
    assert probe.coverage.checked == ("blocks.0",)
    q, k, _ = model.blocks[0].seen
    scale, kwargs = D**-0.5, {}
    if how == "masked_fill":
        kwargs["mask"] = ~model.blocks[0].mask
    elif how == "capped":
        kwargs["cap"] = 2.0
    elif how == "einsum, biased":
        scale, kwargs = 0.5, {"bias": model.blocks[0].bias.detach(), "mask": ~model.blocks[0].mask}
    elif how == "cosine":
        raw = q, k
        q, k, scale = F.normalize(q, dim=-1), F.normalize(k, dim=-1), torch.tensor([3.0, 5.0, 7.0])
        found = probe.frame.to_pandas()
        for name, t in zip(("q", "k"), raw, strict=True):
            np.testing.assert_allclose(found[f"{name}_norm_mean"], t.detach().norm(dim=-1).mean((0, 2)), rtol=1e-5)
    check(probe, reference, 0, q, k, scale, **kwargs)


@pytest.mark.parametrize(
    "lost",
    [
        lambda z: z.softmax(-2),
        lambda z: (z * torch.rand(17, 17)).softmax(-1),
        lambda z: (torch.tanh(z) + torch.rand(17, 17)).softmax(-1),
        lambda z: torch.tanh(z.masked_fill(torch.rand(17, 17) > 0.5, -math.inf)).softmax(-1),
        lambda z: z.roll(1, -1).softmax(-1),
    ],
    ids=[
        "softmax over queries",
        "factor a pair",
        "bias on a capped score",
        "cap on a masked score",
        "unknown function",
    ],
)
def test_a_score_that_cannot_be_told_is_not_measured_wrongly(x, lost):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
            return (lost(q @ k.transpose(-2, -1)) @ v).transpose(1, 2).flatten(2)

    with pytest.warns(UserWarning, match=r"blocks\.0 \(Attention\)"):
        probed(Model(Attention(), WrittenOut()), x)


def test_two_probes_at_once_do_not_see_each_other():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 2).eval()
    model = Model(model, WrittenOut(), Called())
    one, other, alone = (AttentionProbe(model) for _ in range(3))
    x = torch.randn(2, 17, WIDTH)
    with torch.no_grad():
        with one.step(0), other.step(0):
            model(x)
        with alone.step(0):
            model(x)
    assert one.frame.to_pandas().equals(alone.frame.to_pandas())
    assert other.frame.to_pandas().equals(alone.frame.to_pandas())


def test_raw_lengths_are_those_before_the_norm(x):
    norm = functools.partial(nn.LayerNorm, eps=1e-6)
    small = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 48, "num_heads": 3, "qk_norm": True}
    for block in (None, ParallelScalingBlock):
        kwargs = small | {"norm_layer": norm} | ({} if block is None else {"block_fn": block})
        model = timm.create_model("vit_tiny_patch16_224", **kwargs)
        raw = []
        layer = model.blocks[0] if block else model.blocks[0].attn
        layer.q_norm.register_forward_pre_hook(lambda _m, a, raw=raw: raw.append(a[0].detach()))
        found = probed(model, torch.randn(2, 3, 32, 32)).frame.to_pandas()
        length = raw[0].norm(dim=-1)  # the parallel block's norm sees heads last
        length = length if block else length.transpose(1, 2)
        np.testing.assert_allclose(found["q_norm_max"], length.amax((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(found["q_in_norm_mean"], np.sqrt(16), rtol=1e-3)


def test_a_mask_shows_the_same_in_every_encoding(x):
    seen = torch.ones(17, 17, dtype=torch.bool).tril()
    zero = torch.zeros(17, 17)
    masks = [seen, *(zero.masked_fill(~seen, v) for v in (-math.inf, torch.finfo(torch.float32).min, -1e4))]
    torch.manual_seed(0)
    first = Called()
    frames = []
    for mask in masks:
        model = Model(copy.deepcopy(first))
        model.blocks[0].kwargs = {"attn_mask": mask}
        frames.append(probed(model, x).frame.to_pandas())
    for frame in frames[1:]:
        np.testing.assert_allclose(frame[list(NAMES)], frames[0][list(NAMES)], rtol=1e-6)


def test_an_additive_mask_may_hold_a_bias_as_well(reference, x):
    bias = torch.randn(H, 17, 17)
    seen = torch.ones(17, 17, dtype=torch.bool).tril()
    model = Model(Called(attn_mask=bias.masked_fill(~seen, -math.inf)))
    q, k, _ = (probe := probed(model, x)) and model.blocks[0].seen
    check(probe, reference, 0, q, k.repeat_interleave(H, 1), D**-0.5, bias=bias, mask=seen)


def test_the_first_images_are_measured_with_their_masks(x):
    mask = torch.rand(4, 1, 17, 17) > 0.3
    torch.manual_seed(0)
    model = Model(Called(attn_mask=mask))
    few = probed(model, x, images=2).frame.to_pandas()
    model.blocks[0].kwargs = {"attn_mask": mask[:2]}
    alone = probed(model, x[:2]).frame.to_pandas()
    np.testing.assert_allclose(few[list(NAMES)], alone[list(NAMES)], rtol=1e-5)


def test_a_query_that_is_a_parameter_may_be_updated_within_the_step():
    """AttentionPoolLatent without a projection: its queries are views of the latent, which the optimiser changes."""
    pool = timm.layers.AttentionPoolLatent(48, num_heads=3, q_proj=False)
    optimizer = torch.optim.SGD(pool.parameters(), lr=1.0)
    probe = AttentionProbe(nn.ModuleDict({"pool": pool}))
    with probe.step(0):
        pool(torch.randn(2, 9, 48)).sum().backward()
        optimizer.step()
    assert probe.coverage.checked == ("pool",)


# ---------------------------------------------------------------- one's own adapter


class Secret(nn.Module):
    """Computes its weights in a way that is not followed."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def attend(self, q, k, v):
        weights = (q @ k.transpose(-2, -1) / 4.0).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    def forward(self, x):
        self.core = q, k, v = [heads(t) for t in self.qkv(x).chunk(3, -1)]
        self.out = self.attend(q, k, v)
        return self.out.transpose(1, 2).flatten(2)


class SecretAdapter:
    scale = 0.25

    def find(self, model):
        return [(name, m) for name, m in model.named_modules() if isinstance(m, Secret)]

    def attach(self, module, listener, sink):
        def hook(module, args, output):
            if listener.active:
                q, k, v, out = map(listener.take, (*module.core, module.out))
                sink(Capture(q, k, None, None, self.scale, v=v, output=out))

        return [module.register_forward_hook(Hook(hook))]


def test_an_adapter_of_ones_own(reference, x):
    model = Model(Secret(), WrittenOut())
    probe = probed(model, x, adapters=[SecretAdapter()])
    assert probe.coverage.checked == ("blocks.0", "blocks.1")
    check(probe, reference, 0, *model.blocks[0].core[:2], 0.25)
    assert not model.blocks[0]._forward_hooks  # only there while a step is probed


def test_an_adapter_of_ones_own_comes_before_the_built_in_ones(x):
    class Mine(SecretAdapter):
        def find(self, model):
            return [("blocks.0", model.blocks[0])]

        def attach(self, module, listener, sink):
            def hook(module, args, output):
                if listener.active:
                    sink(Capture(*map(listener.take, module.seen[:2]), None, None, D**-0.5))

            return [module.register_forward_hook(Hook(hook))]

    model = Model(WrittenOut())
    probe = probed(model, x, adapters=[Mine()])
    assert probe.coverage.unchecked == {"blocks.0": "its output was not captured"}
    assert probe.frame.to_pandas().shape[0] == H  # once


# ---------------------------------------------------------------- trust


def test_an_adapter_that_errs_is_an_error_that_names_the_layer(x):
    adapter = SecretAdapter()
    adapter.scale = 0.3
    with pytest.raises(SelfCheckError, match=r"blocks\.1 \(Secret\).*away from the recomputed one"):
        probed(Model(WrittenOut(), Secret()), x, adapters=[adapter])


@pytest.mark.parametrize("fault", ["bias", "mask", "cap", "head order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_sees_what_an_adapter_forgets(x, fault, dtype):
    from qkexp.model.core import ScoreSpec
    from qkexp.probe.check import self_check

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, H, 17, D, generator=g).to(dtype) for _ in range(3))
    bias, mask = torch.randn(H, 17, 17, generator=g), torch.rand(17, 17, generator=g) > 0.2
    z = q.float() @ k.float().transpose(-2, -1) / 2 + bias
    y = ((3 * torch.tanh(z / 3)).masked_fill(~mask, -math.inf).softmax(-1).to(dtype) @ v).to(dtype)
    whole = Capture(q, k, None, None, 0.5, ScoreSpec(3.0), bias, mask, v, y)
    assert self_check(whole) == (None, None)
    if fault == "bias":
        whole.bias = None
    elif fault == "mask":
        whole.mask = None
    elif fault == "cap":
        whole.spec = ScoreSpec()
    else:
        whole.k = k.flip(1)
    assert "away from" in self_check(whole)[0]


def test_attention_that_no_adapter_knows_is_named(x):
    model = Model(Secret(), WrittenOut())
    with pytest.warns(UserWarning, match=r"blocks\.0 \(Secret\) looks like attention"):
        probe = probed(model, x)
    assert probe.coverage.unknown == {"blocks.0": "Secret"}
    assert probe.names == ("blocks.1",)
    with pytest.raises(CoverageError, match=r"blocks\.0 \(Secret\); write an adapter"):
        probed(model, x, strict=True)
    with pytest.raises(CoverageError, match=r"showed no attention.*blocks\.0 \(Secret\)"):
        probed(Model(Secret()), x)


@pytest.mark.parametrize("fused", [True, False])
def test_a_swin_whose_mask_leaks_is_no_fault_of_an_adapter(fused):
    """Beyond scores of 100 a hidden pair outweighs the others: the check knows what the model really adds."""
    torch.manual_seed(0)
    kwargs = {"img_size": 32, "window_size": 4, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 24}
    model = timm.create_model("swin_tiny_patch4_window7_224", **kwargs).eval()
    for m in model.modules():
        if hasattr(m, "qkv"):
            m.qkv.weight.data *= 60
            m.fused_attn = fused
    probe = probed(model, torch.randn(2, 3, 32, 32))
    assert probe.frame.to_pandas()["max_abs_logit"].max() > 200
    assert len(probe.coverage.checked) == 4


def test_a_first_step_without_a_forward_pass_forgets_no_layer(x):
    model = Model(WrittenOut(), Called())
    probe = AttentionProbe(model)
    with pytest.raises(CoverageError, match="no attention in this step"), probe.step(0):
        pass
    with probe.step(0):
        model(x)
    assert probe.coverage.checked == ("blocks.0", "blocks.1")


def test_nothing_of_the_graph_is_kept(x):
    blocks = WrittenOut("cosine"), WrittenOut("einsum, biased"), Called(attn_mask=nn.Parameter(torch.randn(17, 17)))
    model = Model(*blocks)
    probe = AttentionProbe(model)
    with probe.step(0):
        model(x)
        held = [vars(c).values() for layer in probe._layers for c in layer.captures]
        assert len(held) == 3
        assert not any(t.requires_grad for values in held for t in values if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    "make", [lambda: small_vit(), lambda: swin(), lambda: encoder()], ids=["vit", "swin", "encoder"]
)
def test_inference_mode_shows_the_same(make):
    model, images = make().eval(), torch.randn(2, 3, 32, 32)
    frames = []
    for mode in (torch.enable_grad, torch.inference_mode):
        probe = AttentionProbe(model)
        with probe.step(0), mode():
            model(images)
        frames.append(probe.frame.to_pandas())
    np.testing.assert_allclose(frames[0][list(NAMES)], frames[1][list(NAMES)], rtol=1e-5)


def test_dropped_weights_are_measured_and_not_checked(x):
    model = Model(WrittenOut())
    model.blocks[0].drop.p = 0.5
    dropped = probed(model, x)
    assert dropped.coverage.unchecked == {"blocks.0": "attention dropout is active"}
    assert dropped.frame.to_pandas().equals(probed(model.eval(), x).frame.to_pandas())


def test_coverage_is_a_report(x):
    report = str(probed(Model(WrittenOut(), Called()), x).coverage)
    assert "2 found, 2 attached, 2 fired, 2 self-checked" in report


# ---------------------------------------------------------------- it changes nothing


def small_vit(**kwargs):
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **small, **kwargs)


def swin():
    torch.manual_seed(0)
    small = {"img_size": 32, "window_size": 4, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 24}
    return timm.create_model("swinv2_tiny_window8_256", **small, num_classes=5, attn_drop_rate=0.1)


def encoder():
    torch.manual_seed(0)
    embed = nn.Sequential(nn.Flatten(2), nn.Linear(1024, WIDTH))
    return nn.Sequential(embed, nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, H), 2))


MODELS = {
    "vit": lambda: small_vit(attn_drop_rate=0.1, drop_path_rate=0.1),
    "vit, written out": lambda: unfused(small_vit(attn_drop_rate=0.1)),
    "swin v2": swin,
    "encoder": encoder,
    "discovered": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(1024, WIDTH), Called(dropout_p=0.1)),
}


def unfused(model):
    for m in model.modules():
        if hasattr(m, "fused_attn"):
            m.fused_attn = False
    return model


def state(module):
    """Everything that a module holds, hooks included."""
    return [(name, list(m.__dict__), {k: len(v) for k, v in m.__dict__.items() if k.endswith("hooks")})
            for name, m in module.named_modules()]  # fmt: skip


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_gradients_and_random_state_are_bit_identical(make, autocast):
    runs = []
    for on in (False, True):
        torch.manual_seed(0)
        model = make().train()
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        before, functions = state(model), (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        probe = AttentionProbe(model) if on else None
        torch.manual_seed(5)
        for step in range(2):
            with probe.step(step) if on else torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, autocast):
                out = model(images).float()
                out.square().sum().backward()
        runs.append([out, *(p.grad for p in model.parameters()), torch.get_rng_state()])
        if on:
            assert len(probe.names) >= 1
            assert state(model) == before
            assert functions == (F.scaled_dot_product_attention, F.multi_head_attention_forward)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_step_that_raises_leaves_everything_as_it_was(make):
    model = make()
    before, function = state(model), F.scaled_dot_product_attention
    probe = AttentionProbe(model)

    def fail(*_):
        raise RuntimeError("out of memory")

    last = list(model.modules())[-1]
    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), probe.step(0):
        model(torch.randn(2, 3, 32, 32))
    handle.remove()
    assert state(model) == before
    assert F.scaled_dot_product_attention is function
    assert torch.overrides._len_torch_function_stack() == 0
    with probe.step(0):
        model(torch.randn(2, 3, 32, 32))
    assert probe.coverage is not None


@pytest.mark.parametrize(("name", "steps"), [(name, 1000 if name == "discovered" else 30) for name in MODELS])
def test_memory_is_flat(name, steps):
    model = MODELS[name]()
    images = torch.randn(2, 3, 32, 32)
    probe = AttentionProbe(model)

    def alive():
        gc.collect()
        found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        return len(found), sum(t.untyped_storage().nbytes() for t in found)

    counts = []
    for step in range(steps):
        with probe.step(step):
            model(images).sum().backward()
        model.zero_grad()
        probe.frame.scalars()
        if step in (4, steps - 1):
            counts.append(alive())
    assert all(late <= early for early, late in zip(*counts, strict=True))  # what other tests left may go


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "make", [MODELS["vit"], MODELS["swin v2"], MODELS["encoder"]], ids=["vit", "swin v2", "encoder"]
)
def test_a_copy_made_within_a_step_is_silent(make, how):
    model = make().eval()
    images = torch.randn(2, 3, 32, 32)
    probe = AttentionProbe(model)
    with probe.step(0):
        model(images)
    alone = probe.frame.to_pandas()
    with probe.step(0):
        if how == "deepcopy":
            other = copy.deepcopy(model)
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            other = torch.load(buffer, weights_only=False)
        model(images)
        other(100 * images)
    assert probe.frame.to_pandas().equals(alone)
