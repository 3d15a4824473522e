"""The arms of a branch: those that are tried unless others are asked for, what an arm may change, and its name."""

from __future__ import annotations

import dataclasses

from qkexp.config import ConfigError, RunConfig, flatten, identity_keys, keys
from qkexp.model.calibrate import can_calibrate, inserts
from qkexp.naming import slug

UNCHANGED = "unchanged"
NORM = ("attention.norm=rms", "attention.gain=per_head")

# What a branch may change, beside keys that change no number. It shares start, batches and length with its parent.
CHANGEABLE = (
    *(f"attention.{f.name}" for f in dataclasses.fields(RunConfig().attention) if f.name not in ("init", "gate")),
    *(f"optim.{f.name}" for f in dataclasses.fields(RunConfig().optim) if f.name != "name"),
    *("precision.autocast", "train.clip_norm", "train.loss", "train.label_smoothing"),
    *("model.dropout", "model.drop_path"),
    *("data.label_noise", "data.poison", "data.poison_steps", "data.mixup", "data.crop", "data.flip"),
    *("data.randaugment", "data.randaugment_magnitude"),
)
FIXED = ("experiment", "sweep_name", "output_dir")  # no number hangs on them, but a branch lies where it lies


def default_arms(parent: RunConfig) -> tuple[dict[str, list[str]], list[str]]:
    """The arms that are tried without overrides, name -> overrides; and those left out, with the reason."""
    o, left_out = parent.optim, []
    arms: dict[str, list[str]] = {UNCHANGED: []}
    if parent.attention.norm == "none":
        arms["norm"] = list(NORM)
    else:
        left_out.append("norm (the run has one)")
    if o.qk_lr_scale:
        arms["frozen_qk"] = ["optim.qk_lr_scale=0"]
        arms["slow_qk"] = [f"optim.qk_lr_scale={0.1 * o.qk_lr_scale:.6g}"]
    else:
        left_out.append("frozen_qk, slow_qk (Q and K are frozen already)")
    arms["slow"] = [f"optim.lr={0.1 * o.lr:.6g}"]
    return arms, left_out


def check_changes(parent: RunConfig, cfg: RunConfig, step: int) -> None:
    """Refuse what a branch cannot change.

    Raises:
        ConfigError: with the first key, its value and what is accepted.
    """
    old, new = flatten(parent), flatten(cfg)
    counted = identity_keys(parent).keys() | identity_keys(cfg).keys()
    for name in (n for n in new if new[n] != old[n] and not n.startswith("branch.")):
        if name in FIXED or (name in counted and name not in CHANGEABLE):
            raise ConfigError(
                name, new[name], f"{old[name]}, as in the run: a branch shares its start, its batches and its length"
            )
    a = cfg.attention
    if a.norm == "none" and parent.attention.norm != "none":
        raise ConfigError(
            "attention.norm",
            a.norm,
            "rms | l2: a norm can be put in, not taken out (the logits would lose their scale)",
        )
    if inserts(parent.attention, a) and not can_calibrate(a):
        raise ConfigError(
            "attention.gain", a.gain, "shared | per_head, or a learned attention.scale: they hold the logits' scale"
        )
    changed = set(cfg.data.poison_steps) ^ set(parent.data.poison_steps)
    if min(changed, default=step) < step:
        raise ConfigError(
            "data.poison_steps", cfg.data.poison_steps, f"those of the run before step {step}, which is past"
        )


def describe(parent: RunConfig, cfg: RunConfig) -> str:
    """A name for an arm: the identity keys that it changes, with their values."""
    old, new = flatten(parent), flatten(cfg)
    changed = [k.name for k in keys() if k.meta["identity"] and old[k.name] != new[k.name]]
    values = [f"{new[n]:g}" if isinstance(new[n], float) else str(new[n]) for n in changed]
    parts = [f"{n.rpartition('.')[2].replace('_', '')}-{v}" for n, v in zip(changed, values, strict=True)]
    return slug("_".join(parts))[:120]
