"""The state of a run, made fit for another configuration: what both have is carried over, what is new is prepared.

Weights and what the optimisers keep of them go by parameter, because the flat vectors of two models differ as soon as
one has a gain more. A norm is inserted so that the logits stay as sharp as they are (:mod:`qkexp.model.calibrate`).
Adam's averages of a new parameter are those of its gradients on the next batches: had they started at 0, the correction
of their bias would be over long since, and the parameter would move at up to six times the rate for a hundred steps.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from qkexp.config import RunConfig
from qkexp.model.calibrate import PARAMETERS, calibrate, inserts
from qkexp.model.vit import build_vit
from qkexp.train.batches import Batch, training_batches
from qkexp.train.data import Dataset
from qkexp.train.objective import objective
from qkexp.train.optim import Updater
from qkexp.train.precision import loss_scaler, resolve

CALIBRATION_STEPS = 4  # whose batches new parameters are calibrated on


def adapt(state: dict[str, Any], old: RunConfig, new: RunConfig, data: Dataset) -> dict[str, Any]:
    """A checkpoint of a run of configuration ``old`` -> one that a run of configuration ``new`` goes on from.

    The two have the same model but for norms and learned scales of attention, and the same optimiser with other
    settings. The checkpoint given is not changed.

    Raises:
        ConfigError: a learned scale cannot keep the logits as sharp as they are under ``attention.scale_max``.
    """
    before, after = _Trained(old, data), _Trained(new, data)
    before.load(state)
    fresh = after.take_weights(before, inserted=inserts(old.attention, new.attention))
    averages: dict[str, dict[str, Tensor]] = {}
    if fresh:
        steps = _next_steps(after.cfg, data, state["step"])
        calibrate(after.model, before.model, torch.cat([images for step in steps for images, _ in step]))
        averages = after.averages(fresh, steps, state["step"])
    after.take_averages(before, averages)
    types = {t.dtype for t in state["model"].values()}
    adapted = {**state, "model": {name: t.to(*types).cpu() for name, t in after.model.state_dict().items()}}
    adapted["optimizers"] = after.updater.state_dict()
    if old.precision.autocast != new.precision.autocast:
        adapted["scaler"] = loss_scaler(new.precision, after.cfg.device).state_dict()
    return adapted


class _Trained:
    """A model and its optimisers, in float32 and without dropout."""

    def __init__(self, cfg: RunConfig, data: Dataset):
        self.cfg = copy.deepcopy(cfg)
        resolve(self.cfg)
        plain = dataclasses.replace(self.cfg.attention, init="timm", backend="explicit")  # the weights will be others
        built = dataclasses.replace(self.cfg, attention=plain)
        model = build_vit(built, image_size=data.image_size, channels=data.channels, classes=data.classes)
        self.model = model.to(self.cfg.device).eval()
        self.updater = Updater(self.model, cfg.optim, cfg.train.steps)
        self.spans = self.updater.spans()

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.updater.load_state_dict(state["optimizers"])

    @torch.no_grad()
    def take_weights(self, other: _Trained, *, inserted: bool) -> list[str]:
        """Copy weights by name; returns the parameters that are new, of an inserted norm or scale all."""
        own, theirs = self.model.state_dict(), other.model.state_dict()
        fresh = [n for n in own if n not in theirs or (inserted and n.endswith(PARAMETERS))]
        for name in own.keys() - set(fresh):
            own[name].copy_(theirs[name])
        return fresh

    def averages(self, names: list[str], steps: list[list[Batch]], done: int) -> dict[str, dict[str, Tensor]]:
        """What Adam would keep of these parameters after ``done`` steps with gradients like those of ``steps``."""
        parameters = dict(self.model.named_parameters())
        gradients: dict[str, list[Tensor]] = {name: [] for name in names}
        for batches in steps:
            self.updater.clear()
            for images, labels in batches:
                loss, _ = objective(self.model(images).float(), labels, self.cfg.train)
                (loss / len(batches)).backward()
            if self.cfg.train.clip_norm is not None:
                norm = self.updater.grad_norms([float(n) for n in self.updater.measure()])["grad_norm"]
                self.updater.clip(self.cfg.train.clip_norm, norm)
            for name in names:
                grad = parameters[name].grad
                assert grad is not None
                gradients[name].append(grad.reshape(-1).clone())
        first, second = (1.0 - beta**done for beta in self.cfg.optim.betas)
        found = {}
        for name, each in gradients.items():
            stacked = torch.stack(each)
            found[name] = {"exp_avg": first * stacked.mean(0), "exp_avg_sq": second * stacked.square().mean(0)}
        return found

    def take_averages(self, other: _Trained, fresh: dict[str, dict[str, Tensor]]) -> None:
        """Copy what the optimisers keep, parameter by parameter; of new ones as given, or 0."""
        whole: dict[str, Tensor] = {}  # what is kept, each as one vector over all parameters
        for kind, vector in other.updater.kept().items():
            whole[kind] = torch.zeros_like(self.updater.flat)
            for name, span in self.spans.items():
                if name in fresh:
                    whole[kind][span] = fresh[name].get(kind, torch.zeros(()))
                else:
                    whole[kind][span] = vector[other.spans[name]]
        for mine, theirs in zip(self.updater.optimizers, other.updater.optimizers, strict=True):
            if not theirs.state:
                continue
            kinds = next(iter(theirs.state.values()))
            for parameter in (p for group in mine.param_groups for p in group["params"]):
                at = parameter.storage_offset()
                mine.state[parameter] = {
                    kind: whole[kind][at : at + parameter.numel()].view_as(parameter).clone()
                    if value.dim()
                    else value.clone()  # Adam's count of steps
                    for kind, value in kinds.items()
                }


def _next_steps(cfg: RunConfig, data: Dataset, step: int) -> list[list[Batch]]:
    """The batches of the next steps, as they are without poison."""
    clean = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, poison="none", poison_steps=[]))
    stream = training_batches(data.to_device(clean), clean, step)
    count = min(CALIBRATION_STEPS, cfg.train.steps - step)
    return [list(itertools.islice(stream, cfg.train.accumulate)) for _ in range(count)]
