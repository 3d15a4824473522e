"""The training loop, top to bottom."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from qkexp.config import RunConfig
from qkexp.model.attention import temperature_at
from qkexp.model.vit import attention_layers, build_vit
from qkexp.probe.frame import Frame, layer_values, to_numpy
from qkexp.probe.metrics import NAMES
from qkexp.probe.probe import AttentionProbe
from qkexp.train.batches import Batch, training_batches, validation_batches
from qkexp.train.data import Dataset, Split, batch_indices
from qkexp.train.dtypes import measure
from qkexp.train.events import Detector, Event, healthy_steps
from qkexp.train.objective import constant_loss, objective
from qkexp.train.optim import Updater
from qkexp.train.outcome import final_figures, judge
from qkexp.train.precision import WEIGHTS, autocast, loss_scaler
from qkexp.train.spikes import SpikeDetector


class Recorder(Protocol):
    """What the loop needs of whoever keeps the run; :class:`qkexp.record.run.RunWriter` is one."""

    def row(self, row: dict[str, float]) -> None: ...
    def frame(self, frame: Frame) -> None: ...
    def event(self, event: Event) -> None: ...
    def note(self, **facts: Any) -> None: ...
    def flush_due(self) -> bool: ...
    def flush(self) -> list[Frame]: ...
    def checkpoint(self, step: int, state: dict[str, Any]) -> None: ...


def train(
    cfg: RunConfig,
    data: Dataset,
    record: Recorder,
    stop: Callable[[], str | None],
    resume: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train one run and return its outcome.

    A step whose loss or gradient is not finite ends the run before it touches the weights; the tables
    then hold every step before it.

    Args:
        cfg: a checked and resolved configuration.
        data: images and labels.
        record: takes rows, frames, events and checkpoints.
        stop: asked after each step; a text means "stop now, for this reason".
        resume: a checkpoint of this run to go on from; every later row is then what it would have been.

    Returns:
        The content of outcome.json but for the wall time; ``step`` is the number of rows recorded.
    """
    device, steps, accumulate = torch.device(cfg.device), cfg.train.steps, cfg.train.accumulate
    first_images = data.train.plain(batch_indices(cfg.data.seed, 0, len(data.train), cfg.train.batch_size))
    model = build_vit(
        cfg, image_size=data.image_size, channels=data.channels, classes=data.classes, like=first_images
    ).to(device, WEIGHTS[cfg.precision.weights])
    chance = constant_loss(data.train.labels, data.classes, cfg.train)
    data = data.to_device(cfg)
    p = cfg.probe
    updater = Updater(model, cfg.optim, steps)
    probe = AttentionProbe(model, p.every, p.images, p.queries, p.groups, optimizer=updater.optimizers)
    scaler = loss_scaler(cfg.precision, cfg.device)
    dtypes = measure(model, first_images.to(updater.flat), cfg)
    forward = torch.compile(model) if cfg.compile else model
    record.note(parameter_groups=updater.groups())
    layers = attention_layers(model).values()
    detector = Detector(steps, min(layer.scale_bound for layer in layers))
    calm = max(healthy_steps(steps), min(cfg.optim.warmup, steps // 10))
    spikes = {name: SpikeDetector(kind, calm) for name, kind in (("loss", "loss"), ("grad_norm", "grad"))}
    unseen: list[dict[str, float]] = []  # rows that the spike detectors have not seen
    losses: list[float] = []
    validation: dict[str, float] = {}
    best: dict[str, float] = {}
    nonfinite: str | None = None
    stopped: str | None = None
    first = 0
    torch.manual_seed(cfg.seed)  # dropout; weights and sample order have seeds of their own
    if resume is not None:
        first, losses = resume["step"], resume["losses"].tolist()
        validation, best = resume["validation"], resume["best"]
        model.load_state_dict(resume["model"])
        updater.load_state_dict(resume["optimizers"])
        scaler.load_state_dict(resume["scaler"])
        detector.load_state_dict(resume["detector"])
        for name, spike in spikes.items():
            spike.load_state_dict(resume["spikes"][name])
        set_random_state(resume["random"])

    def flush() -> None:
        found = detect(detector, record.flush())
        for row in unseen:
            for name, spike in spikes.items():
                found += spike.feed(int(row["step"]), row[name])
        unseen.clear()
        for event in sorted(found, key=lambda e: e.step):
            record.event(event)

    def save(done: int) -> None:
        flush()
        state = {
            "steps": steps,
            "losses": torch.tensor(losses, dtype=torch.float64),
            "validation": validation,
            "best": best,
            "model": model.state_dict(),
            "optimizers": updater.state_dict(),
            "scaler": scaler.state_dict(),
            "detector": detector.state_dict(),
            "spikes": {name: spike.state_dict() for name, spike in spikes.items()},
            "random": random_state(),
        }
        record.checkpoint(done, state)

    def attempt(step: int, batches: list[Batch]) -> tuple[dict[str, float], float]:
        """Forward and backward of a step, its gradient measured: (figures, seconds of the probe after them)."""
        updater.clear()
        # of each microbatch: loss, largest |output logit|, mean log-partition; the last two show output-logit
        # divergence (Wortsman et al. 2023)
        outputs: list[Tensor] = []
        with probe.step(step, loss_scale=scaler.get_scale()):
            for images, labels in batches:
                with autocast(cfg.precision, cfg.device):
                    logits = forward(images.to(updater.flat.dtype))
                logits = logits.float()
                loss, log_partition = objective(logits, labels, cfg.train)
                largest = torch.linalg.vector_norm(logits.detach(), math.inf)
                outputs += [loss.detach(), largest, log_partition.mean()]
                scaler.scale(loss / accumulate).backward()
            backward_done = clock(device)
        probe_seconds = clock(device) - backward_done
        measured = torch.stack([*outputs, *updater.measure(scaler)]).tolist()  # the step's one synchronisation
        loss_, largest_, logz = (measured[i : 3 * accumulate : 3] for i in range(3))
        figures = {"loss": sum(loss_) / accumulate, "out_logz_mean": sum(logz) / accumulate}
        figures |= {"out_logit_absmax": max(largest_), **updater.grad_norms(measured[3 * accumulate :])}
        return figures, probe_seconds

    model.train()
    stream = training_batches(data, cfg, first)
    for step in range(first, steps):
        start = clock(device)
        for layer in layers:
            layer.temperature = temperature_at(cfg.attention, step)
        batches = list(itertools.islice(stream, accumulate))
        skipped, scale = 0, scaler.get_scale()
        figures, probe_seconds = attempt(step, batches)
        scaler.update()
        while scaler.get_scale() < scale >= 1.0 and math.isfinite(figures["loss"]):  # fp16: the gradient overflowed
            skipped, scale = skipped + 1, scaler.get_scale()
            figures, probe_seconds = attempt(step, batches)
            scaler.update()
        broken = next((name for name in ("loss", "grad_norm") if not math.isfinite(figures[name])), None)
        if broken is None:
            if cfg.train.clip_norm is not None:
                updater.clip(cfg.train.clip_norm, figures["grad_norm"])
            update = updater.step(step)
            probe.updated()
        if probe.frame is not None:
            record.frame(probe.frame)
        if broken is not None:
            nonfinite = f"{broken} is {figures[broken]} at step {step}"
            break
        if step == first:
            record.note(dtypes={**dtypes, "optimizer_state": updater.state_dtypes()})
        probe_seconds += probe.spent
        row = {
            "step": step,
            **figures,
            "lr": update.lr,
            "param_norm": update.param_norm,
            "update_rms": update.rms,
            "probe_seconds": probe_seconds,
        }
        if scaler.is_enabled():
            row |= {"skipped_steps": skipped, "loss_scale": scale}
        if update.moved is not None:
            row["moved"] = update.moved
        row["step_seconds"] = clock(device) - start - probe_seconds
        losses.append(figures["loss"])

        done = step + 1
        if done == steps or (cfg.train.eval_every and done % cfg.train.eval_every == 0):
            validation = evaluate(model, data.val, cfg)
            row |= validation
            best = _better(best, validation)
            if done == steps and not math.isfinite(validation["val_loss"]):  # the last update broke the weights
                nonfinite = f"val_loss is {validation['val_loss']} after step {step}"
        record.row(row)
        unseen.append(row)
        if record.flush_due():
            flush()
        if cfg.train.checkpoint_every and done % cfg.train.checkpoint_every == 0 and done < steps:
            save(done)
        stopped = stop() if done < steps else None
        if stopped is not None:
            break

    probe.detach()
    if nonfinite is None:
        save(len(losses))
    else:
        flush()
        record.event(Event(len(losses), "nonfinite", value=None))
    if stopped is not None:
        status, reason = "interrupted", stopped
    else:
        status, reason = judge(np.array(losses), chance, nonfinite)
    finished = status in ("completed", "diverged") and nonfinite is None
    return {
        "status": status,
        "reason": reason,
        "step": len(losses),
        "steps": steps,
        "constant_loss": chance,
        "final": {
            **final_figures(np.array(losses)),
            "val_loss": validation["val_loss"] if finished else None,
            "val_accuracy": validation["val_accuracy"] if finished else None,
        },
        "best": best,
    }


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, cfg: RunConfig) -> dict[str, float]:
    """Mean loss (the objective, nats) and accuracy on a split, and the seconds it took."""
    start = time.perf_counter()
    model.eval()
    loss, right = 0.0, 0
    for images, labels in validation_batches(split, cfg):
        with autocast(cfg.precision, cfg.device):
            logits = model(images.to(WEIGHTS[cfg.precision.weights]))
        loss += objective(logits.float(), labels, cfg.train, reduction="sum")[0].item()
        right += int((logits.argmax(-1) == labels).sum())
    model.train()
    return {
        "val_loss": loss / len(split),
        "val_accuracy": right / len(split),
        "eval_seconds": time.perf_counter() - start,
    }


def random_state() -> dict[str, Tensor]:
    """State of the random generators that a step draws from."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given: else they are those of launching it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def detect(detector: Detector, frames: list[Frame]) -> list[Event]:
    """Feed probed steps to the detector, in order."""
    events: list[Event] = []
    if not frames:
        return events
    logit, frac, scale = (NAMES.index(name) for name in ("max_abs_logit", "entropy_frac", "score_scale"))
    found = np.full((len(frames), len(frames[0].names), 3), np.nan)  # (step, layer, metric)
    for number, group in enumerate(frames[0].groups):
        values = to_numpy(torch.stack([frame.groups[number].values for frame in frames], dim=1))
        found[:, list(group.layers), :2] = layer_values(values)[[logit, frac]].transpose(1, 2, 0)
        found[:, list(group.layers), 2] = values[scale].max(-1)
    for frame, layers in zip(frames, found, strict=True):
        events += detector.feed(frame.step, *layers.T)
    return events


def _better(best: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """The smallest loss and largest accuracy so far; an evaluation that is not finite is none."""
    if not math.isfinite(new["val_loss"]):
        return best
    return {
        "val_loss": min(best.get("val_loss", math.inf), new["val_loss"]),
        "val_accuracy": max(best.get("val_accuracy", 0.0), new["val_accuracy"]),
    }
