"""Where data sets come from: found on disk, or fetched and converted once, never without being asked.

A set is looked for as its converted file in ``data.root`` (or the user's cache folder), then as the
files that its authors publish, which are read as they are. Fetching needs ``qkexp data prepare`` or
``data.download=true``.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torchvision
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torchvision.datasets import ImageFolder

from qkexp.config import DATA_SETS, ConfigError, DataConfig, DataMissing, UserError
from qkexp.train.store import Arrays, is_whole, locked, read_arrays, write_arrays

SILENCE = 30.0  # seconds without a byte after which a server counts as dead


# ---------------------------------------------------------------- files as they are published


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class Source:
    """A published data set: torchvision's class, how its folder is found under a root and read, what it holds."""

    kind: Any
    find: Callable[[Path], Path | None]
    read: Callable[[Path], Arrays]
    files: str
    packaged: Path | None = None  # where a Linux distribution's package puts the files
    package: str = ""


def _find_idx(root: Path) -> Path | None:
    """The root itself, or torchvision's layout under it."""
    folders = (root, root / "FashionMNIST" / "raw")
    return next((folder for folder in folders if len(_idx_files(folder)) == len(IDX)), None)


def _idx_files(folder: Path) -> list[Path]:
    """The idx files that are there, unpacked or gzipped, in the order of ``IDX``."""
    both = [(folder / name, folder / f"{name}.gz") for name in IDX]
    return [plain if plain.is_file() else packed for plain, packed in both if plain.is_file() or packed.is_file()]


def _read_idx(folder: Path) -> Arrays:
    train_x, train_y, val_x, val_y = (_read_idx_file(path) for path in _idx_files(folder))
    return {"train_x": train_x[:, None], "train_y": train_y, "val_x": val_x[:, None], "val_y": val_y}


def _read_idx_file(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, 8 for unsigned bytes, the number of sizes, sizes, content.

    Torchvision reads unpacked ones alone.
    """
    try:
        content = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        if content[:3] != b"\x00\x00\x08":
            raise ValueError("not an idx file of bytes")
        rank = content[3]
        shape = np.frombuffer(content, ">i4", rank, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _cifar(kind: Any) -> Source:
    def find(root: Path) -> Path | None:
        folder = root / kind.base_folder
        return folder if all((folder / name).is_file() for name, _ in kind.train_list + kind.test_list) else None

    def read(folder: Path) -> Arrays:
        try:
            parts = {"train": kind(folder.parent, train=True), "val": kind(folder.parent, train=False)}
        except RuntimeError as error:  # it compares its checksums
            raise UserError(f"{folder} is damaged: {error}") from None
        # contiguous, because memory layout decides how sums round, and must not tell where a set came from
        images = {f"{n}_x": np.ascontiguousarray(p.data.transpose(0, 3, 1, 2)) for n, p in parts.items()}
        return images | {f"{n}_y": np.array(p.targets) for n, p in parts.items()}

    return Source(kind, find, read, f"{kind.base_folder}/")


SOURCES = {
    "fashion_mnist": Source(
        torchvision.datasets.FashionMNIST,
        _find_idx,
        _read_idx,
        ", ".join(f"{name}.gz" for name in IDX) + " (unpacked, or in FashionMNIST/raw, as well)",
        Path("/usr/share/datasets/fashion-mnist"),
        "dataset-fashion-mnist",
    ),
    "cifar10": _cifar(torchvision.datasets.CIFAR10),
    "cifar100": _cifar(torchvision.datasets.CIFAR100),
}


# ---------------------------------------------------------------- sets that fit in memory


def cache_dir(cfg: DataConfig) -> Path:
    """``data.root``, or the user's cache folder."""
    if cfg.root is not None:
        return Path(cfg.root).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkexp"


def converted_file(cfg: DataConfig) -> Path:
    """The one file of a converted set; a checksum stands beside it."""
    return cache_dir(cfg) / f"{cfg.name}-1.npz"


def read(cfg: DataConfig) -> Arrays:
    """The set from its converted file, from published files in place, or fetched where ``data.download`` allows it.

    Raises:
        ConfigError: it is not there; says what to put where, and the command that fetches it.
        UserError: it is damaged, or could not be fetched.
    """
    source, file = SOURCES[cfg.name], converted_file(cfg)
    if is_whole(file):
        return _checked(cfg.name, read_arrays(file), file)
    # a folder that the user names is searched alone: data from elsewhere would be a surprise
    folder = _find(source, cache_dir(cfg), source.packaged if cfg.root is None else None)
    if folder is not None:
        return _checked(cfg.name, source.read(folder), folder)
    if cfg.download:
        return read_arrays(convert(cfg))
    raise DataMissing("data.root", cfg.root, _wanted(cfg, source))


def _wanted(cfg: DataConfig, source: Source) -> str:
    """What to put where, in words."""
    file = converted_file(cfg)
    text = f"a folder with {source.files}. Put them into {cache_dir(cfg)}"
    if source.packaged is not None:
        text += f", or install Debian's package {source.package}, which fills {source.packaged}"
        text += " (read while data.root is null)" if cfg.root is not None else ""
    command = f"qkexp data prepare {cfg.name}" + (f" data.root={cfg.root}" if cfg.root is not None else "")
    text += f", or fetch them once with `{command}` (data.download=true does that before the first run)"
    return text + (f". {file} is there, but its checksum is wrong" if file.exists() else "")


def convert(cfg: DataConfig) -> Path:
    """Convert a set once, fetching it where its published files are not found; returns the file.

    Of two processes at once the second waits for the first and finds the file.

    Raises:
        UserError: it could not be fetched, or the folder cannot be written.
    """
    source, file = SOURCES[cfg.name], converted_file(cfg)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(f".{cfg.name}.lock")):
            if is_whole(file):
                return file
            with tempfile.TemporaryDirectory(prefix=f".{cfg.name}-", dir=file.parent) as scratch:
                folder = _find(source, file.parent, source.packaged) or _fetch(cfg.name, source, Path(scratch))
                write_arrays(file, _checked(cfg.name, source.read(folder), folder))
    except OSError as error:
        raise UserError(f"{cfg.name} could not be prepared in {file.parent}: {error}") from None
    return file


def _checked(name: str, arrays: Arrays, where: Path) -> Arrays:
    """The arrays, if they can be this set's: shapes, and labels that fit the images.

    Raises:
        UserError: they cannot; wrong labels would be trained on without a word.
    """
    facts = DATA_SETS[name]
    assert facts.classes is not None
    for split in ("train", "val"):
        images, labels = arrays[f"{split}_x"], arrays[f"{split}_y"]
        wanted = (facts.channels, facts.size, facts.size)
        if images.shape[1:] != wanted:
            raise UserError(f"{where} is damaged: {split} images are {images.shape[1:]}, not {wanted}")
        if labels.shape != images.shape[:1]:
            raise UserError(f"{where} is damaged: {len(images)} {split} images, but labels {labels.shape}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < facts.classes:
            raise UserError(f"{where} is damaged: {split} label {labels.max()}, but {facts.classes} classes")
    return arrays


def _find(source: Source, *roots: Path | None) -> Path | None:
    found = (source.find(root) for root in roots if root is not None)
    return next((folder for folder in found if folder is not None), None)


def _fetch(name: str, source: Source, scratch: Path) -> Path:
    """Download through torchvision, which knows addresses and checksums; returns the set's folder."""
    silence = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)  # torchvision sets none: a dead network would hang for ever
    try:
        with _bars(name):
            source.kind(scratch, download=True)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        told = " ".join(str(error).split())
        raise UserError(
            f"{name} could not be fetched: {told}. On a machine without network put {source.files} into data.root"
        ) from None
    finally:
        socket.setdefaulttimeout(silence)
    folder = source.find(scratch)
    assert folder is not None
    return folder


@contextlib.contextmanager
def _bars(name: str) -> Iterator[None]:
    """Torchvision's progress bars, shown by rich with the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        class Bar:
            def __init__(self, total: int | None = None, **_: Any):
                self.task = progress.add_task(f"fetching {name}", total=total)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: Any) -> None:
                progress.stop_task(self.task)

            def update(self, amount: int) -> None:
                progress.update(self.task, advance=amount)

        module: Any = torchvision.datasets.utils
        theirs, module.tqdm = module.tqdm, Bar
        try:
            yield
        finally:
            module.tqdm = theirs


# ---------------------------------------------------------------- folders of images


def image_folders(cfg: DataConfig) -> tuple[ImageFolder, ImageFolder]:
    """``ROOT/train`` and ``ROOT/val`` with a folder of images for each class, listed but not read.

    Raises:
        ConfigError: they are not there, hold no images, or hold different classes.
    """
    wanted = "a folder with train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg (ImageNet's layout)"
    if cfg.root is None:
        raise ConfigError("data.root", cfg.root, f"{wanted}; imagefolder cannot be fetched")
    root = Path(cfg.root).absolute()
    try:
        train, val = ImageFolder(str(root / "train")), ImageFolder(str(root / "val"))
    except OSError as error:
        raise ConfigError("data.root", cfg.root, f"{wanted}; {' '.join(str(error).split())}") from None
    if len(train.classes) < 2:
        raise ConfigError("data.root", cfg.root, f"{wanted}, of at least two classes; it has {train.classes}")
    if train.classes != val.classes:
        differing = sorted(set(train.classes) ^ set(val.classes))
        raise ConfigError(
            "data.root", cfg.root, f"the same classes in train and val; {', '.join(differing[:5])} are in one only"
        )
    return train, val
