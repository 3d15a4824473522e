"""One frame of a model that is not being trained: timm's by name, or a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.table import Table
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from qkexp.analysis.figures.heads import heads
from qkexp.analysis.figures.style import save
from qkexp.config import UserError
from qkexp.model.attention import temperature_at
from qkexp.model.vit import attention_layers, build_vit
from qkexp.probe.check import Coverage
from qkexp.probe.frame import Frame, layer_values, to_numpy
from qkexp.probe.metrics import headless
from qkexp.probe.probe import AttentionProbe
from qkexp.record.load import load_run
from qkexp.train import checkpoint
from qkexp.train import data as datasets
from qkexp.train.precision import WEIGHTS, autocast, resolve

# of all metrics, what fits a terminal: column title -> metric
SHOWN = {
    "‖q‖": "q_norm_mean",
    "‖k‖": "k_norm_mean",
    "max |z|": "max_abs_logit",
    "attn max": "attn_max_mean",
    "H/ln n": "entropy_frac",
    "collapsed": "collapsed_rows",
}


@dataclass(frozen=True)
class Subject:
    """A model, a batch (B, C, h, w) for it, and in words what they are."""

    name: str
    model: nn.Module
    images: Tensor
    weights: str
    pictures: str
    precision: str
    context: AbstractContextManager


def take(subject: Subject, groups: Sequence[str] = ()) -> tuple[Frame, Coverage]:
    """One forward pass in evaluation mode, probed; and what of the model that covers.

    Raises:
        CoverageError: no attention that the probe can read (:mod:`qkexp.probe.check`).
    """
    probe = AttentionProbe(subject.model.eval(), groups=groups)
    with torch.no_grad(), probe.step(0, phase="val"), subject.context:
        subject.model(subject.images)
    probe.detach()
    assert probe.frame is not None
    assert probe.coverage is not None
    return probe.frame, probe.coverage


def files(frame: Frame, of: Subject, output: Path) -> Path:
    """Write the table of all layers, heads and metrics, and the map of it; returns the map's PNG."""
    caption = [f"{of.name}: {of.weights}; {of.pictures}; {of.precision}; evaluation mode.", _share(frame)]
    rows = frame.to_pandas()
    drawing = heads(rows, caption)
    return save(replace(drawing, table=rows), output, "frame")


def subject(model: str, weights: str = "random", folder: Path | None = None, batch: int = 8) -> Subject:
    """What the command line names.

    Args:
        model: a run directory, a checkpoint of one, or the name of a timm model.
        weights: of a timm model: ``random``, ``pretrained`` (random where timm cannot get them) or a file.
        folder: images, in any folders below it; None: those of the run's validation split, or noise.
        batch: how many images.

    Raises:
        UserError: no such model, no readable weights or no images.
    """
    path = Path(model)
    if path.exists():
        return _of_run(path, folder, batch)
    return _of_timm(model, weights, folder, batch)


def table(frame: Frame) -> Table:
    """A row a layer; every number by its metric's own reduction over heads."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("#", "module", "heads", *SHOWN):
        shown.add_column(title, justify="left" if title == "module" else "right", no_wrap=title != "module")
    rows = {}
    for group in frame.groups:
        values = layer_values(to_numpy(group.values), frame.metrics)
        for place, layer in enumerate(group.layers):
            numbers = (values[frame.metrics.index(name), place] for name in SHOWN.values())
            cells = ("-" if number != number else f"{number:.3g}" for number in numbers)
            heads = group.values.shape[2] - headless(frame.metrics)
            rows[layer] = (f"{layer}", frame.names[layer], f"{heads}", *cells)
    for _, row in sorted(rows.items()):
        shown.add_row(*row)
    return shown


def _share(frame: Frame) -> str:
    return "Only a part of the rows was measured." if frame.subsampled else ""


# ---------------------------------------------------------------- of a run


def _of_run(path: Path, folder: Path | None, batch: int) -> Subject:
    directory = path.parent.parent if path.is_file() else path
    if not (directory / "config.yaml").is_file():
        raise UserError(
            f"{path}: neither a run directory nor a checkpoint of one (there is no {directory}/config.yaml)"
        )
    cfg = load_run(directory).typed
    cfg.device, cfg.attention.backend, cfg.attention.init = "cpu", "auto", "timm"  # weights come from the file
    resolve(cfg)
    state = _state(path, directory)
    data = datasets.load(cfg.data)
    model = build_vit(cfg, image_size=data.image_size, channels=data.channels, classes=data.classes)
    model.load_state_dict(state["model"])
    for layer in attention_layers(model).values():
        layer.temperature = temperature_at(cfg.attention, state["step"] - 1)
    if folder is None:
        images = data.val.plain(np.arange(min(batch, len(data.val))))
        pictures = f"the first {len(images)} images of the validation split of {cfg.data.name}"
    else:
        images = torch.stack([_fit(image, data.channels, data.image_size) for image in _open(folder, batch)])
        pictures = f"{len(images)} images of {folder}"
    dtype = WEIGHTS[cfg.precision.weights]
    return Subject(
        name=directory.name,
        model=model.to(dtype),
        images=images.to(dtype),
        weights=f"checkpoint after {state['step']} steps",
        pictures=pictures,
        precision=f"{cfg.precision.weights} weights, autocast {cfg.precision.autocast}",
        context=autocast(cfg.precision, "cpu"),
    )


def _state(path: Path, directory: Path) -> dict:
    if not path.is_file():
        state = checkpoint.latest(directory / "checkpoints")
        if state is None:
            raise UserError(f"{directory}/checkpoints: no checkpoint that can be read")
        return state
    try:
        return checkpoint.load(path)
    except Exception as error:  # whatever a torn or foreign file makes the reader say
        raise UserError(f"{path} cannot be read as a checkpoint ({type(error).__name__})") from None


def _fit(image: Image.Image, channels: int, size: int) -> Tensor:
    """As images of a folder are trained on: (C, size, size), -1 … 1."""
    pixels = v2.functional.pil_to_tensor(image.convert("L" if channels == 1 else "RGB"))
    pixels = v2.functional.resize(pixels, [round(size * 8 / 7)], antialias=True)
    return datasets.scaled(v2.functional.center_crop(pixels, [size, size]))


# ---------------------------------------------------------------- of timm


def _of_timm(name: str, weights: str, folder: Path | None, batch: int) -> Subject:
    import timm

    if not timm.is_model(name):
        near = timm.list_models(f"*{name}*")[:4] or ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"]
        raise UserError(f"{name}: neither a run directory, a checkpoint nor a timm model; such as {', '.join(near)}")
    torch.manual_seed(0)
    model, said = _weighted(name, weights)
    facts = timm.data.resolve_model_data_config(model)
    if folder is None:
        images = torch.randn(batch, *facts["input_size"], generator=torch.Generator().manual_seed(0))
        pictures = f"{batch} images of noise (no --images)"
    else:
        transform = timm.data.create_transform(**facts, is_training=False)
        images = torch.stack([transform(image.convert("RGB")) for image in _open(folder, batch)])
        pictures = f"{len(images)} images of {folder}"
    return Subject(name, model, images, said, pictures, "fp32 weights, no autocast", nullcontext())


def _weighted(name: str, weights: str) -> tuple[nn.Module, str]:
    import timm

    if weights == "random":
        return timm.create_model(name), "random weights"
    if weights == "pretrained":
        try:
            return timm.create_model(name, pretrained=True), "timm's pretrained weights"
        except Exception as error:  # no network, no such weights, no space: timm and its hub raise all kinds
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return timm.create_model(name), f"random weights, because the pretrained ones cannot be had ({why})"
    if not Path(weights).is_file():
        raise UserError(f"--weights={weights}: no such file; accepted: random, pretrained or a file")
    try:
        return timm.create_model(name, checkpoint_path=weights), f"weights of {weights}"
    except Exception as error:
        raise UserError(f"--weights={weights}: not weights of {name}: {str(error).strip()[:300]}") from None


def _open(folder: Path, batch: int) -> list[Image.Image]:
    if not folder.is_dir():
        raise UserError(f"--images={folder}: {'not a' if folder.exists() else 'no such'} directory")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS)[:batch]
    if not paths:
        raise UserError(f"--images={folder}: no images in it (accepted: {', '.join(IMG_EXTENSIONS)})")
    found = []
    for path in paths:
        try:
            with Image.open(path) as image:
                found.append(image.convert("RGB"))
        except OSError as error:
            raise UserError(f"{path} cannot be read as an image: {error}") from None
    return found
