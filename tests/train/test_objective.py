"""Losses against PyTorch's own, and the loss of the best constant answer against a search for it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkexp.config import DataConfig, TrainConfig
from qkexp.train.data import load
from qkexp.train.objective import constant_loss, objective


def labels() -> Tensor:
    return torch.tensor([0] * 5 + [1] * 3 + [2] * 2)


def loss_of(logits: Tensor, labels: Tensor, cfg: TrainConfig, reduction: str = "mean") -> Tensor:
    return objective(logits, labels, cfg, reduction)[0]


def test_chance_on_digits_is_the_entropy_of_the_labels(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = load(DataConfig(seed=0, root=str(tmp_path)))
    p = torch.bincount(data.train.labels).double() / 1437
    assert math.isclose(constant_loss(data.train.labels, 10, TrainConfig()), -(p * p.log()).sum(), rel_tol=1e-9)


@pytest.mark.parametrize("loss", ["ce", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_constant_answer_is_better_than_the_constant_loss_and_one_reaches_it(loss: str, smoothing: float) -> None:
    cfg = TrainConfig(loss=loss, label_smoothing=smoothing)
    answer = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([answer], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14)

    def closure() -> Tensor:
        search.zero_grad()
        value = loss_of(answer.expand(10, 3), labels(), cfg)
        value.backward()
        return value

    search.step(closure)
    assert closure().item() == pytest.approx(constant_loss(labels(), 3, cfg), abs=1e-9)


def test_sigmoid_loss_is_summed_over_classes_and_averaged_over_images() -> None:
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    expected = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels(), 3).float(), reduction="none").sum(1)
    cfg = TrainConfig(loss="sigmoid")
    assert loss_of(logits, labels(), cfg).item() == pytest.approx(expected.mean().item())
    assert loss_of(logits, labels(), cfg, reduction="sum").item() == pytest.approx(expected.sum().item())


def test_smoothed_cross_entropy_is_pytorchs() -> None:
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    cfg = TrainConfig(label_smoothing=0.2)
    assert torch.equal(loss_of(logits, labels(), cfg), F.cross_entropy(logits, labels(), label_smoothing=0.2))


@pytest.mark.parametrize("loss", ["ce", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_labels_are_the_mean_over_the_labels_they_mix(loss: str, smoothing: float) -> None:
    """Both losses are linear in the target: that of a mixture is the mixture of the losses."""
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cfg, share = TrainConfig(loss=loss, label_smoothing=smoothing), 0.3
    one, other = labels(), labels().flip(0)
    soft = share * F.one_hot(one, 3).double() + (1 - share) * F.one_hot(other, 3).double()
    for reduction in ("mean", "sum"):
        mixed = share * loss_of(logits, one, cfg, reduction) + (1 - share) * loss_of(logits, other, cfg, reduction)
        assert loss_of(logits, soft, cfg, reduction).item() == pytest.approx(mixed.item(), rel=1e-12)
    single = loss_of(logits.float(), soft.float(), cfg)
    assert single.item() == pytest.approx(loss_of(logits, soft, cfg).item(), rel=1e-6)


@pytest.mark.parametrize("loss", ["ce", "sigmoid"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_log_partition_is_that_of_the_output_logits(loss: str, smoothing: float, size: float) -> None:
    logits = (size * torch.randn(10, 3, generator=torch.Generator().manual_seed(0))).requires_grad_()
    _, found = objective(logits, labels(), TrainConfig(loss=loss, label_smoothing=smoothing))
    torch.testing.assert_close(found.double(), logits.detach().double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert not found.requires_grad
