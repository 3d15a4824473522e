"""Data sets by name: their training and validation splits, and the order of samples."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from qkexp.config import DATA_SETS, ConfigError, DataConfig, RunConfig, UserError, image_size
from qkexp.train import augment, sources, store

# ---------------------------------------------------------------- splits


@dataclass(frozen=True)
class Memory:
    """A split in memory, of small sets.

    Images are (n, C, h, w), uint8 as published or float32 as they are trained on; labels (n,) int64 on
    the CPU; ``size`` is the side of an image as it is trained on.
    """

    images: Tensor
    labels: Tensor
    size: int

    @property
    def black(self) -> float:
        """The value of a black pixel as stored."""
        return 0.0 if self.images.dtype == torch.uint8 else -1.0

    def __len__(self) -> int:
        return len(self.labels)

    def plain(self, indices: np.ndarray) -> Tensor:
        """Images without augmentation, (B, C, size, size) float32, -1 … 1."""
        return scaled(self.fit(self.images[torch.from_numpy(indices).to(self.images.device)]))

    def stored(self, index: int) -> Tensor:
        """One image as it is stored, (C, h, w)."""
        return self.images[index]

    def fit(self, images: Tensor) -> Tensor:
        """Images (..., C, h, w) as stored -> (..., C, size, size), without chance."""
        if images.shape[-1] == self.size:
            return images
        return v2.functional.resize(images, [self.size, self.size], antialias=True)

    def to(self, device: torch.device) -> Memory:
        return replace(self, images=self.images.to(device))


@dataclass(frozen=True)
class Folder:
    """A split on disk, whose images are decoded when they are wanted; else as :class:`Memory`."""

    files: ImageFolder
    labels: Tensor
    size: int
    black = 0.0

    def __len__(self) -> int:
        return len(self.labels)

    def plain(self, indices: np.ndarray) -> Tensor:
        return scaled(torch.stack([self.fit(self.stored(i)) for i in indices]))

    def stored(self, index: int) -> Tensor:
        path = self.files.samples[index][0]
        try:
            return v2.functional.pil_to_tensor(self.files.loader(path))
        except Exception as error:  # whatever a broken file makes the decoder say
            raise UserError(f"{path} cannot be read as an image: {error}") from None

    def fit(self, images: Tensor) -> Tensor:
        """The middle of the image at 8/7 of the size, as ImageNet is evaluated (256 -> 224)."""
        return v2.functional.center_crop(
            v2.functional.resize(images, [round(self.size * 8 / 7)], antialias=True), [self.size, self.size]
        )

    def to(self, device: torch.device) -> Folder:
        return self


Split = Memory | Folder


def scaled(images: Tensor) -> Tensor:
    """uint8 0 … 255 -> float32 -1 … 1: mean and deviation 0.5, as timm's ViTs take their images."""
    return images.float().div_(127.5).sub_(1.0) if images.dtype == torch.uint8 else images


# ---------------------------------------------------------------- data sets


@dataclass(frozen=True)
class Dataset:
    """The training split, whose labels are those in use (noise included), and the validation split."""

    train: Split
    val: Split
    classes: int
    channels: int

    @property
    def image_size(self) -> int:
        return self.train.size

    def to_device(self, cfg: RunConfig) -> Dataset:
        """What is in memory moved to the run's device, but for images that are augmented one by one."""
        device = torch.device(cfg.device)
        train = self.train if augment.augments(cfg.data) else self.train.to(device)
        return replace(self, train=train, val=self.val.to(device))


def load(cfg: DataConfig) -> Dataset:
    """The configured data set: read from disk, or made from its seed.

    Raises:
        UserError: it is not there, or damaged; the message says what to do.
    """
    data = LOADERS[cfg.name](cfg)
    if cfg.label_noise:
        data = replace(data, train=replace(data.train, labels=augment.noisy(data.train.labels, data.classes, cfg)))
    return data


def prepare(cfg: DataConfig, batch_size: int = 1) -> None:
    """Make sure that a run will find its data, within seconds and before anything is written for it.

    Raises:
        UserError: it is not there (and may not be fetched), or does not fit the configuration.
    """
    if cfg.name == "digits":
        _convert_digits(cfg)
    elif cfg.name == "imagefolder":
        train, _ = sources.image_folders(cfg)
        _require_a_batch(len(train), batch_size)
    elif cfg.name in sources.SOURCES:
        _require_a_batch(len(sources.read(cfg)["train_y"]), batch_size)


def convert(cfg: DataConfig) -> str:
    """Fetch and convert a data set once; returns where it is now.

    Raises:
        UserError: it could not be fetched, or is not one that can be.
    """
    if cfg.name == "synthetic":
        return "made from data.seed when it is used: nothing to prepare"
    if cfg.name == "imagefolder":
        data = _load_folder(cfg)
        _decode_all(data)
        return f"{cfg.root}: {len(data.train)} training and {len(data.val)} validation images of {data.classes} classes"
    return str(_convert_digits(cfg) if cfg.name == "digits" else sources.convert(cfg))


def _load_published(cfg: DataConfig) -> Dataset:
    arrays = {name: torch.from_numpy(array) for name, array in sources.read(cfg).items()}
    size, facts = image_size(cfg), DATA_SETS[cfg.name]
    assert facts.classes is not None
    train, val = (Memory(arrays[f"{s}_x"], arrays[f"{s}_y"].long(), size) for s in ("train", "val"))
    return Dataset(train, val, facts.classes, facts.channels)


def _load_folder(cfg: DataConfig) -> Dataset:
    train, val = (Folder(f, torch.tensor(f.targets), image_size(cfg)) for f in sources.image_folders(cfg))
    return Dataset(train, val, len(train.files.classes), channels=3)


def _decode_all(data: Dataset) -> None:
    """Read every image once: one that cannot be read is better found now than after hours of training."""
    console = Console(stderr=True)
    broken: list[str] = []
    for name, split in (("train", data.train), ("val", data.val)):
        for index in track(range(len(split)), f"reading {name}", console=console):
            try:
                split.stored(index)
            except UserError as error:
                broken.append(str(error))
    if broken:
        more = f"\n… and {len(broken) - 5} more" if len(broken) > 5 else ""
        count = len(data.train) + len(data.val)
        raise UserError(f"{len(broken)} of {count} images cannot be read:\n" + "\n".join(broken[:5]) + more)


def _convert_digits(cfg: DataConfig) -> Path:
    """scikit-learn's digits -> one file with the split: 80/20, stratified, fixed for ever by seed 0.

    So runs load it in milliseconds and without scikit-learn.
    """
    path = sources.converted_file(cfg)
    if path.is_file():
        return path
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype(np.float32)
    parts = train_test_split(images, labels.astype(np.int64), test_size=360, stratify=labels, random_state=0)
    names = ("train_x", "val_x", "train_y", "val_y")
    store.write_arrays(path, dict(zip(names, parts, strict=True)), checked=False)
    return path


def _load_digits(cfg: DataConfig) -> Dataset:
    path = _convert_digits(cfg)
    try:
        stored = store.read_arrays(path)
    except (OSError, ValueError, zipfile.BadZipFile):  # damaged; the images are at hand
        path.unlink()
        stored = store.read_arrays(_convert_digits(cfg))
    arrays = {n: torch.from_numpy(a) for n, a in stored.items()}
    train, val = (Memory(arrays[f"{s}_x"] / 8.0 - 1.0, arrays[f"{s}_y"], 8) for s in ("train", "val"))  # from 0 … 16
    return Dataset(train, val, classes=10, channels=1)


def _make_synthetic(cfg: DataConfig) -> Dataset:
    """A random prototype a class, plus unit noise: learnable, and any size."""
    facts = DATA_SETS["synthetic"]
    size, classes, samples = image_size(cfg), cfg.classes or facts.classes, cfg.samples or facts.samples
    assert classes is not None
    assert samples is not None
    generator = torch.Generator().manual_seed(cfg.seed)
    prototypes = torch.randn(classes, 3, size, size, generator=generator)

    def split(n: int) -> Memory:
        labels = torch.arange(n) % classes
        noise = torch.randn(n, 3, size, size, generator=generator)
        return Memory(prototypes[labels] + noise, labels, size)

    return Dataset(split(samples), split(max(classes, samples // 4)), classes, channels=3)


LOADERS: dict[str, Callable[[DataConfig], Dataset]] = {
    "digits": _load_digits,
    "synthetic": _make_synthetic,
    "fashion_mnist": _load_published,
    "cifar10": _load_published,
    "cifar100": _load_published,
    "imagefolder": _load_folder,
}


# ---------------------------------------------------------------- order


def batch_indices(seed: int, microbatch: int, samples: int, batch_size: int) -> np.ndarray:
    """Indices (batch_size,) of a microbatch: epoch by epoch a fresh permutation, incomplete batches left out."""
    _require_a_batch(samples, batch_size)
    epoch, place = divmod(microbatch, samples // batch_size)
    return _permutation(seed, epoch, samples)[place * batch_size : (place + 1) * batch_size]


def _require_a_batch(samples: int, batch_size: int) -> None:
    if batch_size > samples:
        raise ConfigError("train.batch_size", batch_size, f"at most the {samples} training images")


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, samples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(samples)
