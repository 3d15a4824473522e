"""Data: a fixed split, and an order that depends on (seed, step) alone."""

from __future__ import annotations

import numpy as np
import torch

from qkexp.config import DataConfig
from qkexp.train.data import batch_indices, load, prepare


def test_digits_split_is_fixed_stratified_and_disjoint(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cfg = DataConfig(seed=0, root=str(tmp_path))
    data = load(cfg)
    assert (len(data.train), len(data.val)) == (1437, 360)
    counts = torch.bincount(data.val.labels)
    assert counts.min() >= 34
    assert counts.max() <= 37
    train = {row.numpy().tobytes() for row in data.train.images}
    assert sum(row.numpy().tobytes() in train for row in data.val.images) == 0
    other = load(DataConfig(seed=5, root=str(tmp_path)))
    assert torch.equal(other.val.labels, data.val.labels), "data.seed orders samples, it does not split"


def test_digits_are_scaled_as_timms_vits_take_images(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = load(DataConfig(seed=0, root=str(tmp_path)))
    for split in (data.train, data.val):
        assert (float(split.images.min()), float(split.images.max())) == (-1.0, 1.0)


def test_digits_are_converted_once(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cfg = DataConfig(seed=0, root=str(tmp_path))
    prepare(cfg)
    (file,) = tmp_path.iterdir()
    stamp = file.stat().st_mtime_ns
    prepare(cfg)
    load(cfg)
    assert file.stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [file], "no temporary file stays"


def test_order_is_a_function_of_seed_and_step() -> None:
    forwards = [batch_indices(3, s, 100, 10).tolist() for s in range(30)]
    backwards = [batch_indices(3, s, 100, 10).tolist() for s in reversed(range(30))][::-1]
    assert forwards == backwards
    assert forwards != [batch_indices(4, s, 100, 10).tolist() for s in range(30)]


def test_every_epoch_is_a_fresh_permutation_without_incomplete_batches() -> None:
    epochs = [np.concatenate([batch_indices(0, e * 14 + s, 100, 7) for s in range(14)]) for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 98
    assert epochs[0].tolist() != epochs[1].tolist()


def test_synthetic_data_has_the_size_asked_for_and_follows_its_seed() -> None:
    cfg = DataConfig(name="synthetic", image_size=16, classes=5, samples=40, seed=1)
    data = load(cfg)
    assert data.train.images.shape == (40, 3, 16, 16)
    assert (len(data.val), data.classes, data.image_size, data.channels) == (10, 5, 16, 3)
    assert torch.equal(load(cfg).train.images, data.train.images)
    assert not torch.equal(
        load(DataConfig(name="synthetic", image_size=16, seed=2)).train.images[:40], data.train.images
    )


def test_a_damaged_digits_file_is_made_anew(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cfg = DataConfig(name="digits", root=str(tmp_path))
    whole = load(cfg)
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(b"junk")
    assert torch.equal(load(cfg).train.images, whole.train.images)
