"""What is minimised, and the loss of the best predictor that ignores the image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qkexp.config import TrainConfig


def objective(logits: Tensor, labels: Tensor, cfg: TrainConfig, reduction: str = "mean") -> tuple[Tensor, Tensor]:
    """The loss and the log-partition log Σ exp of the output logits of each image, (B,), without a graph.

    The loss is the mean (or ``sum``) over images, nats: logits (B, classes) float32, labels (B,) or soft (B, classes).
    ``sigmoid`` is binary cross-entropy summed over classes, as ViT-22B and its kin train (arXiv 2302.05442).
    """
    if cfg.loss == "ce" and labels.ndim == 1 and not cfg.label_smoothing:
        log_probs = F.log_softmax(logits, -1)  # what cross_entropy does; it knows the log-partition already
        loss = F.nll_loss(log_probs, labels, reduction=reduction)
        return loss, (logits.detach()[:, 0] - log_probs.detach()[:, 0])
    log_partition = logits.detach().logsumexp(-1)
    if cfg.loss == "ce":
        return F.cross_entropy(logits, labels, label_smoothing=cfg.label_smoothing, reduction=reduction), log_partition
    soft = F.one_hot(labels, logits.shape[-1]) if labels.ndim == 1 else labels
    target = _smoothed(soft.to(logits.dtype), cfg.label_smoothing)
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
    return (loss / len(labels) if reduction == "mean" else loss), log_partition


def constant_loss(labels: Tensor, classes: int, cfg: TrainConfig) -> float:
    """The objective, nats, of the best predictor that gives every image the same answer.

    That answer is the mean target m, and its loss the entropy of m: of one distribution for
    cross-entropy, of a coin for each class for the sigmoid loss. Mixed labels have the same mean.
    """
    share = torch.bincount(labels.cpu(), minlength=classes).double() / len(labels)
    mean = _smoothed(share, cfg.label_smoothing)
    entropy = torch.special.entr(mean).sum()
    if cfg.loss == "sigmoid":
        entropy += torch.special.entr(1.0 - mean).sum()
    return float(entropy)


def _smoothed(target: Tensor, smoothing: float) -> Tensor:
    return target * (1.0 - smoothing) + smoothing / target.shape[-1]
