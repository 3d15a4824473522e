"""Data sets, and batches that are a function of (configuration, microbatch).

Because a batch depends on nothing else, any process may make any of them: results are the same for
every number of workers, and a resumed run goes on at exactly the batch where it stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from qkexp.config import DATA_SETS, ConfigError, DataConfig, RunConfig, UserError, image_size
from qkexp.train import augment, sources

EVAL_BATCH = 256
Batch = tuple[Tensor, Tensor]  # images (B, C, size, size) float32; labels (B,) int64, or (B, classes) where soft


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
        sources.require(cfg)


def convert(cfg: DataConfig) -> str:
    """Fetch and convert a data set once; returns where it is now.

    Raises:
        UserError: it could not be fetched, or is not one that can be.
    """
    if cfg.name == "synthetic":
        return "made from data.seed when it is used: nothing to prepare"
    if cfg.name == "imagefolder":
        train, val = sources.image_folders(cfg)
        return f"{cfg.root}: {len(train)} training and {len(val)} validation images of {len(train.classes)} classes"
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
    sources.write_arrays(path, dict(zip(names, parts, strict=True)), checked=False)
    return path


def _load_digits(cfg: DataConfig) -> Dataset:
    arrays = {n: torch.from_numpy(a) for n, a in sources.read_arrays(_convert_digits(cfg)).items()}
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


# ---------------------------------------------------------------- batches


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


class TrainingBatches:
    """Number of a microbatch -> its images and labels: ordered, augmented, mixed, poisoned."""

    def __init__(self, data: Dataset, cfg: RunConfig):
        self.split, self.classes, self.cfg = data.train, data.classes, cfg
        self.change: Callable[[Tensor], Tensor] | None = None
        if augment.augments(cfg.data):
            self.change = augment.transform(cfg.data, self.split.size, self.split.fit, self.split.black)

    def __getitem__(self, microbatch: int) -> Batch:
        cfg, split, size = self.cfg.data, self.split, self.cfg.train.batch_size
        indices = batch_indices(cfg.seed, microbatch, len(split), size)
        epoch = microbatch // (len(split) // size)
        if self.change is None:
            images = split.plain(indices)
        else:
            stored = (split.stored(i) for i in indices)
            images = scaled(augment.augmented(stored, self.change, cfg.seed, epoch, indices))
        labels = split.labels[torch.from_numpy(indices)]
        if cfg.mixup:
            images, labels = augment.mixup(images, labels, self.classes, cfg, epoch, indices)
        if microbatch // self.cfg.train.accumulate in cfg.poison_steps:
            images, labels = augment.poisoned(images, labels, self.classes, cfg, microbatch)
        return images, labels


class PlainBatches:
    """Number of a batch -> the next images and labels of a split, in order and as they are."""

    def __init__(self, split: Split):
        self.split = split

    def __len__(self) -> int:
        return -(-len(self.split) // EVAL_BATCH)

    def __getitem__(self, number: int) -> Batch:
        indices = np.arange(number * EVAL_BATCH, min((number + 1) * EVAL_BATCH, len(self.split)))
        return self.split.plain(indices), self.split.labels[torch.from_numpy(indices)]


def training_batches(data: Dataset, cfg: RunConfig, first_step: int) -> Iterator[Batch]:
    """The microbatches from a step to the end of the run, on the run's device."""
    batches, per_step = TrainingBatches(data, cfg), cfg.train.accumulate
    return _stream(batches, range(first_step * per_step, cfg.train.steps * per_step), data.train, cfg)


def validation_batches(split: Split, cfg: RunConfig) -> Iterator[Batch]:
    """A split once, in order and without augmentation, on the run's device."""
    batches = PlainBatches(split)
    return _stream(batches, range(len(batches)), split, cfg)


def _stream(batches: Any, numbers: range, split: Split, cfg: RunConfig) -> Iterator[Batch]:
    """Batches by number, made here or by ``data.workers`` processes where making them takes long."""
    slow = isinstance(split, Folder) or getattr(batches, "change", None) is not None
    made: Any = (batches[n] for n in numbers)
    if slow and cfg.data.workers:
        made = DataLoader(
            _Handed(batches),  # type: ignore[arg-type]
            batch_size=None,  # a batch is what the data set holds
            sampler=numbers,
            num_workers=cfg.data.workers,
            pin_memory=cfg.device == "cuda",
            generator=torch.Generator(),  # else it draws from the one of dropout
        )
    for batch in made:
        if isinstance(batch, UserError):
            raise batch
        images, labels = batch
        yield images.to(cfg.device, non_blocking=True), labels.to(cfg.device, non_blocking=True)


class _Handed:
    """Errors as values: one that a worker raises arrives wrapped in its traceback."""

    def __init__(self, batches: Any):
        self.batches = batches

    def __getitem__(self, number: int) -> Batch | UserError:
        try:
            return self.batches[number]
        except UserError as error:
            return error
