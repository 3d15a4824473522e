"""Batches: functions of (configuration, number), whoever makes them and wherever a run begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from qkexp.compose import compose_sweep
from qkexp.config import RunConfig
from qkexp.train import augment
from qkexp.train.batches import TrainingBatches, training_batches, validation_batches
from qkexp.train.data import Dataset, Memory, load

AUGMENTED = ["data.crop=pad", "data.flip=true", "data.randaugment=2"]
SAMPLES, SIZE = 24, 8  # three microbatches an epoch


def config(*overrides: str) -> RunConfig:
    own = ["data=fashion_mnist", "model.patch=4", f"train.batch_size={SIZE}", "train.steps=6", *overrides]
    cfg = compose_sweep(own, single=True).runs[0][1]
    cfg.device = "cpu"
    return cfg


@pytest.fixture
def data() -> Dataset:
    draw = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (SAMPLES + 8, 1, 16, 16), dtype=torch.uint8, generator=draw)
    labels = torch.arange(SAMPLES + 8) % 10
    return Dataset(Memory(images[:SAMPLES], labels[:SAMPLES], 16), Memory(images[SAMPLES:], labels[:8], 16), 10, 1)


def bits(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[bytes, bytes]]:
    return [(images.numpy().tobytes(), labels.numpy().tobytes()) for images, labels in batches]


@pytest.mark.parametrize("extra", [[], ["data.mixup=0.4"], ["data.crop=resized"]], ids=str)
def test_any_number_of_workers_makes_the_same_bits_over_two_epochs(data: Dataset, extra: list[str]) -> None:
    alone, helped = (
        bits(list(training_batches(data, config(*AUGMENTED, *extra, f"data.workers={n}"), 0))) for n in (0, 2)
    )
    assert len(alone) == 6
    assert alone == helped


def test_workers_make_the_same_bits_from_a_folder_of_images(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    image_folder(tmp_path)
    own = ["data=imagefolder", f"data.root={tmp_path}", "data.image_size=16", "train.batch_size=8", "train.steps=4"]
    cfg = config(*own)
    data, made = load(cfg.data), []
    for workers in (0, 2):
        cfg.data.workers = workers
        made.append(bits([*training_batches(data, cfg, 0), *validation_batches(data.val, cfg)]))
    assert len(made[0]) == 4 + 1
    assert made[0] == made[1]


def test_a_sample_is_augmented_alike_whatever_batch_it_is_in_and_anew_each_epoch(data: Dataset) -> None:
    cfg = config(*AUGMENTED)
    batches = TrainingBatches(data, cfg)
    assert batches.change is not None
    together = augment.augmented((data.train.stored(i) for i in (3, 9, 5)), batches.change, 0, 1, np.array([3, 9, 5]))
    alone = augment.augmented([data.train.stored(9)], batches.change, 0, 1, np.array([9]))
    assert torch.equal(together[1], alone[0])
    other_epoch = augment.augmented([data.train.stored(9)], batches.change, 0, 2, np.array([9]))
    assert not torch.equal(alone, other_epoch)
    same_pixels = augment.augmented([data.train.stored(9)], batches.change, 0, 1, np.array([10]))
    assert not torch.equal(alone, same_pixels), "another sample has numbers of its own"
    other_seed = augment.augmented([data.train.stored(9)], batches.change, 1, 1, np.array([9]))
    assert not torch.equal(alone, other_seed)


@pytest.mark.parametrize("workers", [0, 2])
def test_making_batches_leaves_the_generator_of_dropout_alone(data: Dataset, workers: int) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(training_batches(data, config(*AUGMENTED, "data.mixup=0.4", f"data.workers={workers}"), 0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("extra", [[], [*AUGMENTED, "data.mixup=0.4"], ["train.accumulate=2"]], ids=str)
def test_a_stream_that_begins_later_goes_on_with_the_same_batches(data: Dataset, extra: list[str]) -> None:
    cfg = config(*extra)
    whole, rest = (bits(list(training_batches(data, cfg, first))) for first in (0, 4))
    assert len(whole) == 6 * cfg.train.accumulate
    assert rest == whole[4 * cfg.train.accumulate :]


def test_validation_is_every_sample_once_in_order_and_never_augmented(data: Dataset) -> None:
    plain = list(validation_batches(data.val, config()))
    augmented = list(validation_batches(data.val, config(*AUGMENTED, "data.mixup=0.4", "data.label_noise=0.5")))
    assert bits(plain) == bits(augmented)
    images, labels = plain[0]
    assert torch.equal(images, data.val.images.float() / 127.5 - 1.0)
    assert labels.tolist() == data.val.labels.tolist()


def test_padded_crop_shifts_by_at_most_an_eighth_and_fills_with_black(data: Dataset) -> None:
    white = Memory(torch.full((SAMPLES, 1, 16, 16), 255, dtype=torch.uint8), data.train.labels, 16)
    batches = list(training_batches(Dataset(white, data.val, 10, 1), config("data.crop=pad"), 0))
    images = torch.cat([images for images, _ in batches])
    black = (images == -1.0).float().sum((1, 2, 3))
    assert set(images.unique().tolist()) == {-1.0, 1.0}
    assert black.max() <= 16 * 16 - 14 * 14
    assert black.unique().numel() > 5, "each sample is shifted by itself"


def test_flip_mirrors_about_half_of_the_images(data: Dataset) -> None:
    plain = torch.cat([i for i, _ in training_batches(data, config(), 0)])
    flipped = torch.cat([i for i, _ in training_batches(data, config("data.flip=true"), 0)])
    mirrored = [torch.equal(a.flip(-1), b) for a, b in zip(plain, flipped, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(plain, flipped, strict=True)]
    assert sum(mirrored) + sum(kept) == len(plain) == 48
    assert 12 <= sum(mirrored) <= 36


def test_mixup_mixes_images_and_labels_by_the_same_share(data: Dataset) -> None:
    plain = next(training_batches(data, config(), 0))
    images, labels = next(training_batches(data, config("data.mixup=0.4"), 0))
    one_hot = torch.nn.functional.one_hot(plain[1], 10).float()
    for i in range(SIZE):
        own, neighbour = int(plain[1][i]), int(plain[1][i - 1])
        assert own != neighbour or labels[i, own] == 1.0
        share = labels[i, own] if own != neighbour else None
        if share is not None:
            torch.testing.assert_close(labels[i], share * one_hot[i] + (1 - share) * one_hot[i - 1])
            torch.testing.assert_close(images[i], share * plain[0][i] + (1 - share) * plain[0][i - 1])
    assert labels.sum(1).tolist() == pytest.approx([1.0] * SIZE)


# ---------------------------------------------------------------- controls


def test_label_noise_is_an_exact_share_of_other_classes_fixed_by_the_seed() -> None:
    labels = torch.arange(1000) % 10
    cfg = config("data.label_noise=0.3").data
    noisy = augment.noisy(labels, 10, cfg)
    changed = noisy != labels
    assert int(changed.sum()) == 300
    shifts = torch.bincount((noisy - labels)[changed] % 10, minlength=10)
    assert shifts[0] == 0
    assert shifts[1:].min() > 15, "every other class is as likely"
    assert torch.equal(augment.noisy(labels, 10, cfg), noisy)
    assert not torch.equal(augment.noisy(labels, 10, config("data.label_noise=0.3", "data.seed=1").data), noisy)
    more = augment.noisy(labels, 10, config("data.label_noise=0.6").data)
    assert torch.equal(more[changed], noisy[changed]), "a larger share holds the smaller one"


def test_label_noise_never_touches_validation(tmp_path: Path) -> None:
    def digits(*overrides: str) -> Dataset:
        own = [f"data.root={tmp_path}", *overrides]
        return load(compose_sweep(own, single=True).runs[0][1].data)

    plain, noisy = digits(), digits("data.label_noise=0.4")
    assert torch.equal(plain.val.labels, noisy.val.labels)
    assert int((plain.train.labels != noisy.train.labels).sum()) == round(0.4 * 1437)


@pytest.mark.parametrize("poison", ["labels", "images", "nan"])
def test_poison_hits_every_microbatch_of_the_named_steps_and_no_other(data: Dataset, poison: str) -> None:
    own = ["train.accumulate=2", "train.steps=4"]
    plain = list(training_batches(data, config(*own), 0))
    spoilt = list(training_batches(data, config(*own, f"data.poison={poison}", "data.poison_steps=[1,3]"), 0))
    differ = [a != b for a, b in zip(bits(plain), bits(spoilt), strict=True)]
    assert differ == [False, False, True, True, False, False, True, True]
    for (images, labels), (bad_images, bad_labels) in zip(plain[2:4], spoilt[2:4], strict=True):
        if poison == "labels":
            assert torch.equal(images, bad_images)
            assert set(bad_labels.tolist()) <= set(range(10))
        else:
            assert torch.equal(labels, bad_labels)
            assert bad_images.isnan().all() if poison == "nan" else torch.equal(bad_images, images * 100.0)
