"""Where data sets come from: found on disk, or fetched and converted once, never without being asked.

A set is looked for as its converted file in ``data.root`` (or the user's cache folder), then as the
files that its authors publish, which are read as they are. Fetching needs ``qkexp data prepare`` or
``data.download=true``; it happens under a lock, and what is there afterwards is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import logging
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

from qkexp.config import ConfigError, DataConfig, UserError

log = logging.getLogger("qkexp")
Arrays = dict[str, np.ndarray]  # train_x, val_x: (n, C, size, size) uint8; train_y, val_y: (n,) int64
SILENCE = 30.0  # seconds without a byte after which a server counts as dead


# ---------------------------------------------------------------- files as they are published


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_folder(root: Path) -> Path | None:
    """The folder that holds the four idx files, gzipped or not: the root itself or torchvision's layout."""
    for folder in (root, root / "FashionMNIST" / "raw"):
        if all(_idx_file(folder, name) is not None for name in IDX):
            return folder
    return None


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _read_fashion_mnist(root: Path) -> Arrays:
    folder = _idx_folder(root)
    assert folder is not None
    train_x, train_y, val_x, val_y = (_read_idx(_idx_file(folder, name)) for name in IDX)
    return {"train_x": train_x[:, None], "train_y": train_y, "val_x": val_x[:, None], "val_y": val_y}


def _read_idx(path: Path | None) -> np.ndarray:
    """An idx file of bytes: two zeros, 8 for unsigned bytes, the number of sizes, sizes, content.

    Torchvision reads unpacked ones alone.
    """
    assert path is not None
    try:
        content = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        if content[:3] != b"\x00\x00\x08":
            raise ValueError("it is not an idx file of bytes")
        rank = content[3]
        shape = np.frombuffer(content, ">i4", rank, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _read_cifar(kind: Any) -> Callable[[Path], Arrays]:
    def read(root: Path) -> Arrays:
        try:
            train, val = kind(root, train=True), kind(root, train=False)  # compares its checksums
        except RuntimeError as error:
            raise UserError(f"{root / kind.base_folder} is damaged or incomplete: {error}") from None
        return {
            "train_x": np.ascontiguousarray(train.data.transpose(0, 3, 1, 2)),  # layout must not tell where from
            "train_y": np.array(train.targets),
            "val_x": np.ascontiguousarray(val.data.transpose(0, 3, 1, 2)),
            "val_y": np.array(val.targets),
        }

    return read


def _cifar_folder(kind: Any) -> Callable[[Path], Path | None]:
    return lambda root: root / kind.base_folder if (root / kind.base_folder).is_dir() else None


@dataclass(frozen=True)
class Source:
    """One published data set: torchvision's class, how its files are found and read, and what they are."""

    kind: Any
    find: Callable[[Path], Path | None]
    read: Callable[[Path], Arrays]
    files: str
    packaged: Path | None = None  # where a Linux distribution's package puts the files
    package: str = ""


_CIFAR10, _CIFAR100 = torchvision.datasets.CIFAR10, torchvision.datasets.CIFAR100
SOURCES = {
    "fashion_mnist": Source(
        torchvision.datasets.FashionMNIST,
        _idx_folder,
        _read_fashion_mnist,
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
        "t10k-labels-idx1-ubyte.gz (unpacked, or in FashionMNIST/raw, as well)",
        Path("/usr/share/datasets/fashion-mnist"),
        "dataset-fashion-mnist (Debian)",
    ),
    "cifar10": Source(_CIFAR10, _cifar_folder(_CIFAR10), _read_cifar(_CIFAR10), "cifar-10-batches-py/"),
    "cifar100": Source(_CIFAR100, _cifar_folder(_CIFAR100), _read_cifar(_CIFAR100), "cifar-100-python/"),
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
    """The set's images and labels, from its converted file or from published files in place.

    Raises:
        ConfigError: they are not there and may not be fetched.
        UserError: they are damaged, or could not be fetched.
    """
    source = SOURCES[cfg.name]
    if is_whole(converted_file(cfg)):
        return read_arrays(converted_file(cfg))
    root = _published(cfg, source)
    if root is not None:
        return source.read(root)
    require(cfg)
    return read_arrays(converted_file(cfg))


def require(cfg: DataConfig) -> None:
    """Make sure that the set is there: fetch it where ``data.download`` allows that, else refuse.

    Raises:
        ConfigError: says what to put where, and the command that fetches it.
    """
    source, file = SOURCES[cfg.name], converted_file(cfg)
    if is_whole(file) or _published(cfg, source) is not None:
        return
    if cfg.download:
        convert(cfg)
        return
    damaged = f" ({file} is there, but its checksum is not that of {file.name}.sha256)" if file.exists() else ""
    packaged = (
        f", or leave data.root unset and install {source.package}, which fills {source.packaged}"
        if source.packaged
        else ""
    )
    command = f"qkexp data prepare {cfg.name}" + (f" data.root={cfg.root}" if cfg.root is not None else "")
    raise ConfigError(
        "data.root",
        cfg.root,
        f"a folder with {source.files}{damaged}. Put the files into {cache_dir(cfg)}{packaged}, "
        f"or fetch them once with `{command}` (data.download=true does it before the first run)",
    )


def convert(cfg: DataConfig) -> Path:
    """Convert a set once, fetching it where its published files are not found; returns the file.

    Two processes at once do it once: the second waits for the first and finds the file.

    Raises:
        UserError: it could not be fetched, or the folder cannot be written.
    """
    source, file = SOURCES[cfg.name], converted_file(cfg)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(f".{cfg.name}.lock")):
            if is_whole(file):
                return file
            root = _published(cfg, source) or _packaged(source)
            if root is not None:
                write_arrays(file, source.read(root))
            else:
                with tempfile.TemporaryDirectory(prefix=f".{cfg.name}-", dir=file.parent) as folder:
                    _fetch(cfg.name, source, Path(folder))
                    write_arrays(file, source.read(Path(folder)))
    except OSError as error:
        raise UserError(f"{cfg.name} could not be prepared in {file.parent}: {error}") from None
    return file


def _published(cfg: DataConfig, source: Source) -> Path | None:
    """The root under which published files lie; a package's folder counts unless ``data.root`` says another."""
    if source.find(cache_dir(cfg)) is not None:
        return cache_dir(cfg)
    return _packaged(source) if cfg.root is None else None


def _packaged(source: Source) -> Path | None:
    return source.packaged if source.packaged is not None and source.find(source.packaged) is not None else None


def _fetch(name: str, source: Source, folder: Path) -> None:
    """Download through torchvision, which knows addresses and checksums."""
    silence = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)  # torchvision sets none: a dead network would hang for ever
    try:
        with _bars(name):
            source.kind(folder, download=True)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        told = " ".join(str(error).split())
        raise UserError(
            f"{name} could not be fetched: {told}. On a machine without network put {source.files} into data.root"
        ) from None
    finally:
        socket.setdefaulttimeout(silence)


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


# ---------------------------------------------------------------- files that are whole or not there


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock. The kernel gives it back when its holder dies, so none is ever stale."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some cluster file systems have no locks: twice the work, the same file
            log.warning("%s cannot be locked (%s)", path, error)
        yield


def write_arrays(path: Path, arrays: Arrays, *, checked: bool = True) -> None:
    """Write a converted file and its checksum, each whole or not at all.

    The checksum goes first: whoever reads in between finds that the two differ, never that half a file
    is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        if checked:
            checksum = part.with_suffix(".sha256")
            checksum.write_text(f"{_sha256(part)}  {path.name}\n")  # as sha256sum writes and checks it
            checksum.replace(_checksum_file(path))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_arrays(path: Path) -> Arrays:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def is_whole(path: Path) -> bool:
    """Whether a converted file is there and has its checksum."""
    try:
        return _checksum_file(path).read_text().split()[0] == _sha256(path)
    except (FileNotFoundError, NotADirectoryError, IndexError):
        return False


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    if train.classes != val.classes:
        differing = sorted(set(train.classes) ^ set(val.classes))
        raise ConfigError(
            "data.root", cfg.root, f"the same classes in train and val; {', '.join(differing[:5])} are in one only"
        )
    return train, val
