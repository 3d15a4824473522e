"""One answer, under the same names, in every mode of execution."""

from __future__ import annotations

import copy
import socket

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkexp import AttentionProbe
from qkexp.probe.metrics import METRICS, NAMES, besides
from qkexp.probe.parts import combine

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **SMALL)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 4, 96, 0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(1024, 48), nn.TransformerEncoder(layer, 2))


@pytest.fixture
def x():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def frame_of(probe, call, step=0, **kwargs):
    with probe.step(step, **kwargs):
        call()
    return probe.frame.to_pandas()


def same(a, b, rtol=1e-5):
    assert list(a["module"]) == list(b["module"])
    np.testing.assert_allclose(a[list(NAMES)], b[list(NAMES)], rtol=rtol, atol=1e-6)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------- compiled


@pytest.mark.parametrize("make", [vit, encoder])
@pytest.mark.parametrize("order", ["probe first", "compiled and run first", "given the compiled one"])
def test_a_compiled_model_is_measured_whatever_came_first(fresh_compiler, make, order, x):
    model = make()
    eager = frame_of(AttentionProbe(model), lambda: model(x))
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    if order == "probe first":
        probe = AttentionProbe(model, every=2)
    compiled = torch.compile(model, backend=backend)
    if order != "probe first":
        compiled(x)
        probe = AttentionProbe(model if order == "compiled and run first" else compiled, every=2)
    for step in range(4):
        with probe.step(step):
            compiled(x).sum().backward()
        assert (probe.frame is None) == (step % 2 == 1)
        if probe.frame is not None:
            same(probe.frame.to_pandas(), eager)
    assert len(graphs) == 1  # steps that are not probed run the one graph, without a break or a second compilation


def test_compiled_parts_keep_their_names(fresh_compiler, x):
    model = vit()
    eager = frame_of(AttentionProbe(model), lambda: model(x))
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[0].compile(backend="eager")
    model(x)
    same(frame_of(AttentionProbe(model), lambda: model(x)), eager)


def test_this_projects_vit_that_was_compiled_before_is_measured_when_the_probe_is_given_what_was_compiled(
    fresh_compiler, make_vit, images
):
    model = make_vit("attention=l2", "model.depth=2")
    eager = frame_of(AttentionProbe(model), lambda: model(images))
    compiled = torch.compile(model, backend="eager")
    compiled(images)
    probe = AttentionProbe(compiled)
    for step in range(3):
        same(frame_of(probe, lambda: compiled(images), step), eager)


def test_a_graph_without_our_hooks_is_noticed(fresh_compiler, make_vit, images):
    model = make_vit("attention=l2", "model.depth=2")
    compiled = torch.compile(model, backend="eager")
    compiled(images)
    probe = AttentionProbe(model)  # which cannot know
    eager = frame_of(probe, lambda: compiled(images))
    with pytest.warns(UserWarning, match="compiled before the probe"), probe.step(1):
        compiled(images)
    same(frame_of(probe, lambda: compiled(images), 2), eager)


# ---------------------------------------------------------------- recomputed, accumulated, evaluated


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [vit, encoder])
def test_a_checkpointed_layer_counts_once(make, reentrant, x):
    model = make()
    plain = frame_of(AttentionProbe(model), lambda: model(x).sum().backward())
    probe = AttentionProbe(model)

    def forward():
        if isinstance(model, nn.Sequential):
            y = model[1](model[0](x))
            for layer in model[2].layers:
                y = checkpoint(layer, y, use_reentrant=reentrant)
        else:
            y = model.patch_embed(x)
            y = model.norm_pre(model.patch_drop(model._pos_embed(y)))
            for block in model.blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
        y.sum().backward()
        assert [len(layer.captures) for layer in probe._layers] == [1, 1]

    same(frame_of(probe, forward), plain)


def test_gradient_accumulation_is_one_step(x):
    model = vit()
    probe = AttentionProbe(model)
    whole = frame_of(probe, lambda: model(x))

    def parts():
        for part in x.split(1):
            model(part).sum().backward()

    halves = frame_of(probe, parts)
    exact = [m.name for m in METRICS if m.name != "entropy_p05"]
    np.testing.assert_allclose(halves[exact], whole[exact], rtol=1e-4, atol=1e-6)


def test_evaluation_is_kept_apart_by_its_phase(x):
    model = vit()
    probe = AttentionProbe(model)
    train = frame_of(probe, lambda: model(x))
    model.eval()
    with torch.no_grad():
        model(100 * x)  # outside a step: not measured
        val = frame_of(probe, lambda: model(x), phase="val")
    assert set(train["phase"]) == {"train"}
    assert set(val["phase"]) == {"val"}
    same(train, val)


# ---------------------------------------------------------------- precisions


@pytest.mark.parametrize("make", [vit, encoder])
@pytest.mark.parametrize("mode", ["bf16 autocast", "fp16 autocast", "pure bf16"])
def test_low_precision_is_measured_and_checked(make, mode, x):
    model = make()
    exact = frame_of(AttentionProbe(model), lambda: model(x))
    if mode == "pure bf16":
        model, x = model.bfloat16(), x.bfloat16()
    dtype = torch.float16 if mode == "fp16 autocast" else torch.bfloat16
    probe = AttentionProbe(model)
    with torch.autocast("cpu", dtype, enabled="autocast" in mode):
        low = frame_of(probe, lambda: model(x))
    assert not probe.coverage.unchecked
    np.testing.assert_allclose(low["entropy_mean"], exact["entropy_mean"], rtol=0.02)
    eps = torch.finfo(dtype).eps
    ulp = 2.0 ** np.floor(np.log2(low["max_abs_logit"])) * eps
    np.testing.assert_allclose(low["score_ulp"], ulp)


# ---------------------------------------------------------------- wrappers and copies


def test_an_average_of_the_model_is_silent_and_can_be_probed_for_itself(x):
    model = vit()
    alone = frame_of(AttentionProbe(model), lambda: model(x))
    average = torch.optim.swa_utils.AveragedModel(model)
    ema = copy.deepcopy(model)
    probe = AttentionProbe(model)

    def all_of_them():
        model(x)
        average(100 * x)
        ema(100 * x)

    assert frame_of(probe, all_of_them).equals(alone)
    assert frame_of(AttentionProbe(average.module), lambda: average(x)).equals(alone)


def test_data_parallel_is_refused_with_advice():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        AttentionProbe(nn.DataParallel(vit()))


# ---------------------------------------------------------------- several processes


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


BESIDE = ("spectral", "activations", "gradients")


def rank_main(rank, port, x, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    try:
        model = nn.parallel.DistributedDataParallel(vit())
        probe = AttentionProbe(model, groups=BESIDE)
        part = (x[:1], x[1:])[rank]  # unlike sizes
        with probe.step(0):
            F.cross_entropy(model(part), torch.arange(len(part))).backward()
        own = probe.frame
        everyone = own.all_reduce()
        torch.save({"names": probe.names, "own": own.to_pandas(), "all": everyone.to_pandas()}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_ranks_agree_on_the_numbers_of_all_of_them(x, tmp_path):
    """One process on the whole batch is the truth, but for a percentile."""
    x = x.clone()
    x[0] *= 10  # the maxima are one rank's
    mp.spawn(rank_main, (free_port(), x, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2)]
    model = vit()
    whole = frame_of(AttentionProbe(model, groups=BESIDE), lambda: model(x))
    assert ranks[0]["names"] == ("blocks.0.attn", "blocks.1.attn")  # no trace of the wrapper
    assert ranks[0]["all"].equals(ranks[1]["all"])
    exact = [m.name for m in (*METRICS, *besides(BESIDE[:2])) if m.name != "entropy_p05"]
    np.testing.assert_allclose(ranks[0]["all"][exact], whole[exact], rtol=1e-4, atol=1e-6)
    averaged = [rank[frame]["w_q_grad_norm"].dropna() for rank in ranks for frame in ("own", "all")]
    for norms in averaged:  # the gradient after the ranks exchanged theirs
        np.testing.assert_allclose(norms, averaged[0], rtol=1e-6)
    assert not np.allclose(ranks[0]["own"]["max_abs_logit"], ranks[1]["own"]["max_abs_logit"])


def test_a_maximum_over_ranks_is_no_mean():
    part = torch.zeros(len(NAMES), 1, 1)
    other = part.clone()
    part[NAMES.index("max_abs_logit")], other[NAMES.index("max_abs_logit")] = 10.0, 1000.0
    assert combine([part, other], [1, 1])[NAMES.index("max_abs_logit")].item() == 1000.0
