"""Batches as a function of (configuration, number).

Because a batch depends on nothing else, any process may make any of them: results are the same for
every number of workers, and a resumed run goes on at exactly the batch where it stopped.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from qkexp.config import RunConfig, UserError
from qkexp.train import augment
from qkexp.train.data import Dataset, Folder, Split, batch_indices, scaled

EVAL_BATCH = 256
Batch = tuple[Tensor, Tensor]  # images (B, C, size, size) float32; labels (B,) int64, or (B, classes) where soft


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
            worker_init_fn=_ignore_signals,
            # a run's own default is a server that it would have to start first, importing torch anew
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            generator=torch.Generator(),  # else it draws from the one of dropout
        )
    for batch in made:
        if isinstance(batch, UserError):
            raise batch
        images, labels = batch
        yield images.to(cfg.device, non_blocking=True), labels.to(cfg.device, non_blocking=True)


def _ignore_signals(_: int) -> None:
    """A cluster's signal reaches every process; the run saves and then ends its workers, they do not end it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class _Handed:
    """Errors as values: one that a worker raises arrives wrapped in its traceback."""

    def __init__(self, batches: Any):
        self.batches = batches

    def __getitem__(self, number: int) -> Batch | UserError:
        try:
            return self.batches[number]
        except UserError as error:
            return error
