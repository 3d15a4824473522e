"""Images and labels in memory, and an order of samples that is a function of (seed, step)."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qkexp.config import SYNTHETIC_SAMPLES, DataConfig, image_size


@dataclass(frozen=True)
class Split:
    """Images (n, C, size, size) float32 and labels (n,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    train: Split
    val: Split
    classes: int

    @property
    def image_size(self) -> int:
        return self.train.images.shape[-1]

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    def to(self, device: torch.device) -> Dataset:
        return Dataset(self.train.to(device), self.val.to(device), self.classes)


def load(cfg: DataConfig) -> Dataset:
    """The configured data set, converted already or made from its seed."""
    return LOADERS[cfg.name](cfg)


def prepare(cfg: DataConfig) -> None:
    """Convert a data set once, so that runs load it in milliseconds and without scikit-learn."""
    if cfg.name == "digits" and not _digits_file(cfg).is_file():
        _convert_digits(_digits_file(cfg))


def batch_indices(seed: int, step: int, samples: int, batch_size: int) -> np.ndarray:
    """Indices (batch_size,) of a step: epoch by epoch a fresh permutation, incomplete batches left out."""
    per_epoch = samples // batch_size
    epoch, place = divmod(step, per_epoch)
    return _permutation(seed, epoch, samples)[place * batch_size : (place + 1) * batch_size]


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(samples)


# ---------------------------------------------------------------- digits


def cache_dir(cfg: DataConfig) -> Path:
    """``data.root``, or the user's cache folder."""
    if cfg.root is not None:
        return Path(cfg.root).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkexp"


def _digits_file(cfg: DataConfig) -> Path:
    return cache_dir(cfg) / "digits-1.npz"


def _convert_digits(path: Path) -> None:
    """scikit-learn's digits -> one file with the split: 80/20, stratified, fixed for ever by seed 0."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32)
    parts = train_test_split(images, labels.astype(np.int64), test_size=360, stratify=labels, random_state=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("wb") as file:
        np.savez(file, train_x=parts[0], val_x=parts[1], train_y=parts[2], val_y=parts[3])
    part.replace(path)  # atomic: two processes may convert at once


def _load_digits(cfg: DataConfig) -> Dataset:
    prepare(cfg)
    with np.load(_digits_file(cfg)) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    return Dataset(
        Split(_scaled(arrays["train_x"]), arrays["train_y"]),
        Split(_scaled(arrays["val_x"]), arrays["val_y"]),
        classes=10,
    )


def _scaled(images: Tensor) -> Tensor:
    """0 … 16 -> -1 … 1: mean and deviation 0.5, as timm's ViTs take their images."""
    return images / 8.0 - 1.0


# ---------------------------------------------------------------- synthetic


def _make_synthetic(cfg: DataConfig) -> Dataset:
    """A random prototype a class, plus unit noise: learnable, and any size."""
    size, classes, samples = image_size(cfg), cfg.classes or 10, cfg.samples or SYNTHETIC_SAMPLES
    generator = torch.Generator().manual_seed(cfg.seed)
    prototypes = torch.randn(classes, 3, size, size, generator=generator)

    def split(n: int) -> Split:
        labels = torch.arange(n) % classes
        noise = torch.randn(n, 3, size, size, generator=generator)
        return Split(prototypes[labels] + noise, labels)

    return Dataset(split(samples), split(max(classes, samples // 4)), classes)


LOADERS = {"digits": _load_digits, "synthetic": _make_synthetic}
