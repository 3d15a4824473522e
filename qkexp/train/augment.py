"""What is done to training images and labels: augmentation, label noise, poisoned batches.

Everything random is a function of (``data.seed``, epoch, sample) or (``data.seed``, microbatch): it
does not depend on workers, on the batch's other images, or on where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from qkexp.config import DataConfig

# what a generator is for, as the last word of its seed: no two uses share their numbers
_IMAGE, _MIXUP, _NOISE, _POISON = 1, 2, 3, 4
BRIGHT = 100.0  # factor of data.poison=images


def augments(cfg: DataConfig) -> bool:
    """Whether training images are anything but plain."""
    return cfg.crop != "none" or cfg.flip or cfg.randaugment > 0


def transform(cfg: DataConfig, size: int, fit: Callable[[Tensor], Tensor], black: float) -> Callable[[Tensor], Tensor]:
    """Image (C, h, w) as stored -> augmented (C, size, size); draws from torch's global generator.

    Args:
        cfg: which augmentations.
        size: side of the result in pixels.
        fit: brings an image to that size without chance.
        black: the value of a black pixel, which fills what a shifted image leaves free.
    """
    steps: list[Callable[[Tensor], Tensor]] = [v2.RandomResizedCrop(size) if cfg.crop == "resized" else fit]
    if cfg.crop == "pad":
        steps.append(v2.RandomCrop(size, padding=max(1, size // 8), fill=black))
    if cfg.flip:
        steps.append(v2.RandomHorizontalFlip())
    if cfg.randaugment:
        steps.append(v2.RandAugment(cfg.randaugment, cfg.randaugment_magnitude))
    return v2.Compose(steps)


def augmented(
    images: Iterable[Tensor], apply: Callable[[Tensor], Tensor], seed: int, epoch: int, indices: np.ndarray
) -> Tensor:
    """Each image transformed with the numbers of (seed, epoch, sample): (B, C, size, size)."""
    with torch.random.fork_rng(devices=[]):  # dropout draws from the same generator: it must not notice
        made = []
        for image, index in zip(images, indices, strict=True):
            number = np.random.default_rng((seed, epoch, index, _IMAGE)).integers(2**63)
            torch.default_generator.manual_seed(int(number))  # not torch.manual_seed: it seeds every device, 0.1 ms
            made.append(apply(image))
    return torch.stack(made)


def mixup(
    images: Tensor, labels: Tensor, classes: int, cfg: DataConfig, epoch: int, indices: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Each image mixed with its neighbour in the batch (Zhang et al. 2017, arXiv 1710.09412).

    Images (B, C, size, size) float32 and labels (B,) -> images and soft labels (B, classes). The share is
    drawn for each image from Beta(alpha, alpha).
    """
    draws = (np.random.default_rng((cfg.seed, epoch, index, _MIXUP)) for index in indices)
    share = torch.tensor([d.beta(cfg.mixup, cfg.mixup) for d in draws], dtype=torch.float32)

    def mixed(values: Tensor) -> Tensor:
        own = share.to(values.device).view(-1, *[1] * (values.ndim - 1))
        return values * own + values.roll(1, 0) * (1.0 - own)

    return mixed(images), mixed(F.one_hot(labels, classes).float())


def noisy(labels: Tensor, classes: int, cfg: DataConfig) -> Tensor:
    """Labels (n,) of which ``data.label_noise * n``, rounded, are another class, each as likely.

    Which samples and which classes is a function of ``data.seed``; a larger share holds a smaller one.
    """
    draw = np.random.default_rng((cfg.seed, 0, 0, _NOISE))
    order, shift = draw.permutation(len(labels)), draw.integers(1, classes, len(labels))
    chosen = torch.from_numpy(order[: round(cfg.label_noise * len(labels))])
    changed = labels.clone()
    changed[chosen] = (labels[chosen] + torch.from_numpy(shift)[chosen]) % classes
    return changed


def poisoned(images: Tensor, labels: Tensor, classes: int, cfg: DataConfig, microbatch: int) -> tuple[Tensor, Tensor]:
    """A batch spoilt as ``data.poison`` says, for controls: known steps at which a run must show it."""
    if cfg.poison == "images":
        return images * BRIGHT, labels
    if cfg.poison == "nan":
        return images * torch.nan, labels
    draw = np.random.default_rng((cfg.seed, microbatch, 0, _POISON))
    return images, torch.from_numpy(draw.integers(0, classes, len(labels))).to(labels.device)
