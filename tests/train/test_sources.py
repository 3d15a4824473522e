"""Where data sets come from: found, read in place, fetched once, and never silently."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import http.server
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

from qkexp import cli
from qkexp.config import ConfigError, DataConfig, UserError
from qkexp.record.load import load_run
from qkexp.train import sources, store
from qkexp.train.data import load, prepare

KIND = torchvision.datasets.FashionMNIST
TRAIN, VAL = 40, 20
ImageFolder = Callable[..., Path]
SMALL = ["model.width=16", "model.depth=1", "model.heads=2", "train.batch_size=8", "train.steps=3", "tracker=none"]


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def fashion(folder: Path, *, packed: bool = True) -> dict[str, np.ndarray]:
    """A tiny Fashion-MNIST in the published format."""
    draw = np.random.default_rng(0)
    arrays = {}
    for name, n in (("train", TRAIN), ("t10k", VAL)):
        arrays[f"{name}-images-idx3-ubyte"] = draw.integers(0, 256, (n, 28, 28), np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = (np.arange(n) % 10).astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        content = idx(array)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


def cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A tiny CIFAR-10 as published, its checksums put into torchvision's list."""
    kind, draw = torchvision.datasets.CIFAR10, np.random.default_rng(1)
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    images = []

    def write(name: str, content: dict[str, Any]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(name: str) -> list[str]:
        images.append(draw.integers(0, 256, (8, 3072), np.uint8))
        return write(name, {"data": images[-1], "labels": [int(i) for i in range(8)]})

    train = [batch(f"data_batch_{i}") for i in range(1, 6)]
    test = [batch("test_batch")]
    meta = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(kind, "train_list", train)
    monkeypatch.setattr(kind, "test_list", test)
    monkeypatch.setattr(kind, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta[1]})
    return np.concatenate(images[:5]).reshape(-1, 3, 32, 32)


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the distribution's package."""
    bare = dataclasses.replace(sources.SOURCES["fashion_mnist"], packaged=None)
    monkeypatch.setitem(sources.SOURCES, "fashion_mnist", bare)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_package: None) -> Iterator[list[str]]:
    """Torchvision's mirror on the loopback; yields the paths that were asked for."""
    fashion(tmp_path / "mirror")
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Method") != "HEAD":  # torchvision's look for redirects
                asked.append(self.path)
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(tmp_path / "mirror"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        files = sorted((tmp_path / "mirror").iterdir())
        sums = [(f.name, hashlib.md5(f.read_bytes()).hexdigest()) for f in files]
        monkeypatch.setattr(KIND, "mirrors", [f"http://127.0.0.1:{running.server_port}/"])
        monkeypatch.setattr(KIND, "resources", sums)
        yield asked
        running.shutdown()


# ---------------------------------------------------------------- published files


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_in_place(tmp_path: Path, layout: str, packed: bool) -> None:
    arrays = fashion(tmp_path / layout, packed=packed)
    before = sorted(tmp_path.rglob("*"))
    data = load(DataConfig(name="fashion_mnist", seed=0, root=str(tmp_path)))
    assert (len(data.train), len(data.val), data.classes, data.channels) == (TRAIN, VAL, 10, 1)
    assert data.train.images.dtype == torch.uint8, "floats would take four times the memory"
    assert np.array_equal(data.train.images[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
    assert data.val.labels.tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    assert sorted(tmp_path.rglob("*")) == before, "reading writes nothing"


@pytest.mark.skipif(not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="the package is not installed")
def test_the_packaged_fashion_mnist_is_found_without_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = load(DataConfig(name="fashion_mnist", seed=0))
    assert (len(data.train), len(data.val)) == (60_000, 10_000)
    assert torch.bincount(data.train.labels).tolist() == [6000] * 10
    batch = data.train.plain(np.arange(64))
    assert (batch.dtype, float(batch.min()), float(batch.max())) == (torch.float32, -1.0, 1.0)
    with pytest.raises(ConfigError):  # a folder that the user names is searched alone
        load(DataConfig(name="fashion_mnist", seed=0, root=str(tmp_path)))


def test_truncated_file_is_named(tmp_path: Path) -> None:
    fashion(tmp_path)
    broken = tmp_path / "train-images-idx3-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        prepare(DataConfig(name="fashion_mnist", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-labels-idx1-ubyte.gz", np.zeros(3, np.uint8), "train images, but labels (3,)"),
        ("t10k-labels-idx1-ubyte.gz", None, "val label 77, but 10 classes"),
        ("train-images-idx3-ubyte.gz", np.zeros((5, 8, 8), np.uint8), "train images are (1, 8, 8)"),
    ],
)
def test_files_that_do_not_belong_together_are_refused_instead_of_trained_on(
    tmp_path: Path, file: str, content: np.ndarray | None, message: str
) -> None:
    arrays = fashion(tmp_path)
    content = np.full(len(arrays["t10k-labels-idx1-ubyte"]), 77, np.uint8) if content is None else content
    (tmp_path / file).write_bytes(gzip.compress(idx(content)))
    with pytest.raises(UserError, match=re.escape(message)):
        load(DataConfig(name="fashion_mnist", root=str(tmp_path), seed=0))


def test_cifar_is_the_same_in_place_and_converted_down_to_its_memory_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = cifar(tmp_path, monkeypatch)
    cfg = DataConfig(name="cifar10", seed=0, root=str(tmp_path))
    in_place = load(cfg)
    sources.convert(cfg)
    converted = load(cfg)
    for data in (in_place, converted):
        assert np.array_equal(data.train.images.numpy(), images)
        assert data.train.images.is_contiguous()
        assert data.train.labels.tolist() == list(range(8)) * 5
        assert len(data.val) == 8


def test_cifar_that_differs_from_its_checksums_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar(tmp_path, monkeypatch)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="cifar-10-batches-py is damaged"):
        prepare(DataConfig(name="cifar10", root=str(tmp_path)))


def test_images_are_resized_where_another_size_is_asked_for(tmp_path: Path) -> None:
    fashion(tmp_path)
    data = load(DataConfig(name="fashion_mnist", seed=0, root=str(tmp_path), image_size=32))
    assert data.image_size == 32
    batch = data.train.plain(np.arange(5))
    assert batch.shape == (5, 1, 32, 32)
    alone = torch.cat([data.train.plain(np.array([i])) for i in range(5)])
    assert torch.equal(batch, alone)


# ---------------------------------------------------------------- what is not there


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100", "imagefolder"])
@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_missing_data_exits_2_with_what_to_put_where_and_leaves_nothing(
    verb: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([verb, f"data={name}", "data.root=nowhere", "model.patch=4", "tracker=none"]) == 2
    message = capsys.readouterr().err
    assert f"data.root: '{tmp_path / 'nowhere'}'" in message
    for part in {
        "fashion_mnist": ["t10k-labels-idx1-ubyte.gz", "dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"],
        "cifar10": ["cifar-10-batches-py"],
        "cifar100": ["cifar-100-python"],
        "imagefolder": ["train/CLASS", "val/CLASS"],
    }[name]:
        assert part in message
    if name != "imagefolder":
        assert f"`qkexp data prepare {name} data.root={tmp_path / 'nowhere'}`" in message
    assert list(tmp_path.iterdir()) == []


def test_every_data_set_of_a_sweep_is_looked_for_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fashion(tmp_path / "there")
    axes = ["data=fashion_mnist,cifar10", "data.root=there", "model.patch=4"]
    assert cli.main(["sweep", *axes, *SMALL]) == 2
    assert "cifar-10-batches-py" in capsys.readouterr().err
    assert not (tmp_path / "outputs" / "sweep" / "plan.json").exists()


def test_a_batch_larger_than_the_files_that_are_there_is_refused(tmp_path: Path) -> None:
    fashion(tmp_path)
    with pytest.raises(ConfigError, match=rf"train\.batch_size: 41 .* {TRAIN} training images"):
        prepare(DataConfig(name="fashion_mnist", root=str(tmp_path)), batch_size=41)


# ---------------------------------------------------------------- fetching


def test_nothing_is_fetched_without_being_asked(tmp_path: Path, server: list[str]) -> None:
    cfg = DataConfig(name="fashion_mnist", seed=0, root=str(tmp_path / "data"))
    with pytest.raises(ConfigError):
        prepare(cfg)
    assert server == []
    cfg.download = True
    prepare(cfg)
    assert len(server) == 4
    assert len(load(cfg).train) == TRAIN


def test_data_prepare_fetches_and_converts_once(
    tmp_path: Path, server: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "prepare", "fashion_mnist", f"data.root={tmp_path / 'data'}"]
    assert cli.main(command) == 0
    file = tmp_path / "data" / "fashion_mnist-1.npz"
    assert str(file) in capsys.readouterr().out
    stamp = file.stat().st_mtime_ns
    assert cli.main(command) == 0
    assert len(server) == 4
    assert file.stat().st_mtime_ns == stamp
    left = {p.name for p in file.parent.iterdir()}
    assert left == {file.name, f"{file.name}.sha256", ".fashion_mnist.lock"}, "archives and scratch files are gone"
    assert subprocess.run(["sha256sum", "-c", f"{file.name}.sha256"], cwd=file.parent).returncode == 0


def test_a_download_that_differs_from_its_checksum_is_refused_and_leaves_nothing(
    tmp_path: Path, server: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KIND, "resources", [(name, "0" * 32) for name, _ in KIND.resources])
    with pytest.raises(UserError, match="could not be fetched"):
        sources.convert(DataConfig(name="fashion_mnist", root=str(tmp_path / "data")))
    assert [p.name for p in (tmp_path / "data").iterdir()] == [".fashion_mnist.lock"]


def test_without_network_data_prepare_exits_2(
    tmp_path: Path, no_package: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KIND, "mirrors", ["http://127.0.0.1:9/"])
    assert cli.main(["data", "prepare", "fashion_mnist", f"data.root={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert "could not be fetched" in message
    assert "train-images-idx3-ubyte.gz" in message


def test_a_damaged_converted_file_is_said_and_prepared_anew(tmp_path: Path, server: list[str]) -> None:
    cfg = DataConfig(name="fashion_mnist", seed=0, root=str(tmp_path / "data"))
    file = sources.convert(cfg)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="checksum is wrong"):
        load(cfg)
    sources.convert(cfg)
    assert len(server) == 8
    assert len(load(cfg).train) == TRAIN


@pytest.mark.parametrize("arguments", [["nosuch"], ["imagefolder"], ["fashion_mnist", "data.nosuch=1"]])
def test_data_prepare_of_what_cannot_be_prepared_exits_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "prepare", *arguments]) == 2
    wanted = {"nosuch": "cifar100", "imagefolder": "cannot be fetched", "fashion_mnist": "data.nosuch"}
    assert wanted[arguments[0]] in capsys.readouterr().err


PREPARE = """
import pathlib, sys, time
from qkexp.config import DataConfig
from qkexp.train import sources
import dataclasses
root, log = sys.argv[1:]
def fetch(name, source, scratch):
    with open(log, "a") as file:
        file.write("fetched\\n")
    time.sleep(float(sys.stdin.readline()))
    return pathlib.Path(root, "mirror")
sources._fetch = fetch
sources.SOURCES["fashion_mnist"] = dataclasses.replace(sources.SOURCES["fashion_mnist"], packaged=None)
sources.convert(DataConfig(name="fashion_mnist", root=root + "/data"))
"""


def start(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that prepares Fashion-MNIST, and takes so long over fetching it."""
    command = [sys.executable, "-c", PREPARE, str(tmp_path), str(tmp_path / "log")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    return process


def test_of_two_processes_at_once_one_fetches_and_a_killed_one_blocks_nobody(tmp_path: Path) -> None:
    fashion(tmp_path / "mirror")
    log = tmp_path / "log"
    killed = start(tmp_path, 600)
    end = time.monotonic() + 60
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    both = [start(tmp_path, 2), start(tmp_path, 2)]
    told = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert log.read_text().count("fetched") == 2, "one of the killed, one of the two"
    assert sum("waiting for another process" in text for text in told) == 1
    assert store.is_whole(tmp_path / "data" / "fashion_mnist-1.npz")


# ---------------------------------------------------------------- folders of images


def folder_run(tmp_path: Path, *overrides: str) -> tuple[int, Path]:
    """A short run through the command line on ``tmp_path/root``: exit code and where runs would be."""
    own = ["data=imagefolder", f"data.root={tmp_path / 'root'}", "data.image_size=16", "model.patch=8"]
    code = cli.main(["train", f"output_dir={tmp_path / 'outputs'}", *own, *SMALL, *overrides])
    return code, tmp_path / "outputs" / "single"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_of_images_trains_through_the_command_line(
    workers: int, tmp_path: Path, image_folder: ImageFolder
) -> None:
    image_folder(tmp_path / "root")
    code, runs = folder_run(tmp_path, f"data.workers={workers}")
    assert code == 0
    (directory,) = runs.iterdir()
    run = load_run(directory)
    assert len(run.scalars) == 3
    assert run.outcome is not None
    assert run.outcome["constant_loss"] == pytest.approx(np.log(2)), "two classes"


def test_image_folder_whose_parts_differ_in_classes_is_refused(tmp_path: Path, image_folder: ImageFolder) -> None:
    root = image_folder(tmp_path)
    (root / "val" / "n02").rename(root / "val" / "n03")
    with pytest.raises(ConfigError, match="the same classes in train and val; n02, n03"):
        prepare(DataConfig(name="imagefolder", root=str(root)))


def test_image_folder_smaller_than_a_batch_is_refused_before_training(
    tmp_path: Path, image_folder: ImageFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    image_folder(tmp_path / "root", train=2)
    code, runs = folder_run(tmp_path, "train.batch_size=5")
    assert code == 2
    assert "train.batch_size: 5 is not accepted; accepted: at most the 4 training images" in capsys.readouterr().err
    assert not runs.parent.exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_read_is_named(workers: int, tmp_path: Path, image_folder: ImageFolder) -> None:
    root = image_folder(tmp_path / "root")
    broken = root / "train" / "n01" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    code, runs = folder_run(tmp_path, f"data.workers={workers}")
    assert code == 1
    (directory,) = runs.iterdir()
    outcome = load_run(directory).outcome
    assert outcome is not None
    assert outcome["reason"].startswith(f"{broken} cannot be read as an image")
    assert "Traceback" not in outcome["reason"]


def test_prepare_reads_every_image_of_a_folder_and_names_the_broken_ones(
    tmp_path: Path, image_folder: ImageFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validation image that cannot be read would else end a run after its last step."""
    root = image_folder(tmp_path / "root")
    assert cli.main(["data", "prepare", "imagefolder", f"data.root={root}"]) == 0
    broken = next((root / "val").rglob("*.jpg"))
    broken.write_bytes(b"no image")
    capsys.readouterr()
    assert cli.main(["data", "prepare", "imagefolder", f"data.root={root}"]) == 2
    message = capsys.readouterr().err
    assert ": 1 of " in message
    assert str(broken) in message.replace("\n", "")
