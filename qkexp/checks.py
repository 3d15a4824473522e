"""What a configuration may say: the bounds of each key, and the combinations that have a meaning."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qkexp.config import (
    DATA_SETS,
    LEARNED_SCALES,
    PROBE_GROUPS,
    AttentionConfig,
    ConfigError,
    Key,
    LauncherConfig,
    RunConfig,
    flatten,
    image_size,
    keys,
)


def check(cfg: RunConfig) -> None:
    """Refuse values and combinations without meaning, naming key, value and what is accepted.

    Raises:
        ConfigError: with the first key that is not accepted.
    """
    values = flatten(cfg)
    for k in keys():
        check_value(k, values[k.name])
    _check_combinations(cfg)


def accepted(k: Key) -> str:
    """What a key accepts, in words."""
    if k.meta["choices"] is not None:
        return " | ".join(str(c) for c in k.meta["choices"])
    kind = k.type.replace("| None", "").strip()
    words = {"int": "a whole number", "float": "a finite number", "bool": "true | false", "str": "a text"}
    text = words.get(kind, kind)
    for bound, sign in (("low", ">="), ("above", ">"), ("below", "<")):
        if k.meta[bound] is not None:
            text += f" {sign} {k.meta[bound]:g}"
    return text + (", or null" if "None" in k.type else "")


def check_launcher(values: dict[str, Any]) -> dict[str, Any]:
    """Keys of a launcher, checked and of the right type.

    Raises:
        ConfigError: with the first that is not accepted.
    """
    typed = OmegaConf.structured(LauncherConfig)
    for k in keys(LauncherConfig):
        if k.name in values:
            named = dataclasses.replace(k, name=f"hydra.launcher.{k.name}")
            try:
                typed[k.name] = values[k.name]
            except OmegaConfBaseException:
                raise ConfigError(named.name, values[k.name], accepted(k)) from None
            check_value(named, typed[k.name])
    found = OmegaConf.to_container(typed)
    assert isinstance(found, dict)
    return {str(name): found[name] for name in values if name in found}


def check_value(k: Key, value: Any) -> None:
    """Refuse a value that a key does not accept."""
    meta = k.meta
    if value is None:
        if "None" not in k.type and k.type != "Any":
            raise ConfigError(k.name, value, accepted(k))
        return
    if meta["choices"] is not None and value not in meta["choices"]:
        raise ConfigError(k.name, value, accepted(k))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        bad = not math.isfinite(value)
        bad = bad or (meta["low"] is not None and value < meta["low"])
        bad = bad or (meta["above"] is not None and value <= meta["above"])
        bad = bad or (meta["below"] is not None and value >= meta["below"])
        if bad:
            raise ConfigError(k.name, value, accepted(k))


def _check_combinations(cfg: RunConfig) -> None:
    a, p, o, d = cfg.attention, cfg.probe, cfg.optim, cfg.data
    if a.norm in ("none", "center"):
        for name, neutral in (("center", False), ("axis", "head"), ("gain", "none"), ("bias", False)):
            if getattr(a, name) != neutral:
                raise ConfigError(
                    f"attention.{name}", getattr(a, name), f"{neutral} while attention.norm={a.norm} (there is no norm)"
                )
    if a.gain == "none" and a.gain_offset:
        raise ConfigError("attention.gain_offset", a.gain_offset, "0 while attention.gain=none (there is no gain)")
    if a.gain == "none" and o.gain_decay:
        raise ConfigError("optim.gain_decay", o.gain_decay, "0 while attention.gain=none (there is no gain)")
    _check_scale(a)
    _check_temperature(a, cfg.train.steps)
    if a.backend == "sdpa" and a.softcap is not None:
        raise ConfigError("attention.backend", a.backend, "auto | explicit | flex while attention.softcap is set")
    if a.backend == "sdpa" and a.score_dtype != "compute":
        raise ConfigError("attention.backend", a.backend, "auto | explicit while attention.score_dtype=fp32")
    if a.backend == "flex" and a.dropout:
        raise ConfigError("attention.backend", a.backend, "auto | explicit while attention.dropout is set")
    if a.backend == "flex" and cfg.device != "cuda":
        raise ConfigError("attention.backend", a.backend, "auto | explicit | sdpa unless device=cuda")
    if o.name == "adam" and o.decay != "independent":
        raise ConfigError("optim.decay", o.decay, "independent while optim.name=adam (its decay is a gradient)")
    if o.name in ("adam", "adamw") and o.momentum != 0.9:
        raise ConfigError("optim.momentum", o.momentum, f"0.9 while optim.name={o.name} (it has none; optim.betas)")
    if cfg.precision.weights == "bf16" and cfg.precision.autocast != "none":
        raise ConfigError(
            "precision.autocast", cfg.precision.autocast, "none while precision.weights=bf16 (all is bf16 already)"
        )
    if o.cooldown and o.schedule != "rsqrt":
        raise ConfigError("optim.cooldown", o.cooldown, f"0 while optim.schedule={o.schedule}")
    if o.cooldown > cfg.train.steps:
        raise ConfigError("optim.cooldown", o.cooldown, f"at most train.steps={cfg.train.steps}")
    if len(o.betas) != 2 or not all(isinstance(b, float) and 0.0 <= b < 1.0 for b in o.betas):
        raise ConfigError("optim.betas", o.betas, "two numbers in [0, 1)")
    for name in ("images", "queries"):
        value = getattr(p, name)
        if value != "all" and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise ConfigError(f"probe.{name}", value, "all, or a whole number >= 1")
    if not set(p.groups) <= set(PROBE_GROUPS):
        raise ConfigError("probe.groups", p.groups, f"a list of any of {', '.join(PROBE_GROUPS)}")
    m = cfg.model
    if m.block_norm == "parallel" and m.qkv_bias:
        raise ConfigError(
            "model.qkv_bias", m.qkv_bias, "false | null while model.block_norm=parallel (ViT-22B has none)"
        )
    if m.block_norm == "parallel" and a.gate != "none":
        raise ConfigError(
            "attention.gate", a.gate, "none while model.block_norm=parallel (its projections are one matrix)"
        )
    if m.width is not None and m.heads is not None and m.width % m.heads:
        raise ConfigError("model.heads", m.heads, f"a divisor of model.width={m.width}")
    _check_data(cfg)
    size = image_size(d)
    if m.patch is not None and size % m.patch:
        raise ConfigError("model.patch", m.patch, f"a divisor of the image size {size}")


def _check_scale(a: AttentionConfig) -> None:
    if a.scale in ("inv_sqrt_d", "one") and a.scale_init is not None:
        raise ConfigError("attention.scale_init", a.scale_init, f"null while attention.scale={a.scale}")
    for name, neutral in (("scale_log", False), ("scale_max", None)):
        if a.scale not in LEARNED_SCALES and getattr(a, name) != neutral:
            raise ConfigError(
                f"attention.{name}",
                getattr(a, name),
                f"{'null' if neutral is None else 'false'} while attention.scale={a.scale} (nothing is learned)",
            )
    if a.norm == "l2" and a.gain == "none" and a.scale == "inv_sqrt_d":
        accepted_scales = " | ".join(("one", "fixed", *LEARNED_SCALES))
        raise ConfigError(
            "attention.scale", a.scale, f"{accepted_scales} while attention.norm=l2 (cosines over sqrt(d) stay uniform)"
        )


def _check_temperature(a: AttentionConfig, steps: int) -> None:
    if a.temperature == 1.0:
        for name, neutral in (("temperature_from", 0), ("temperature_until", None)):
            if getattr(a, name) != neutral:
                raise ConfigError(
                    f"attention.{name}",
                    getattr(a, name),
                    f"{'null' if neutral is None else 0} while attention.temperature=1 (nothing changes)",
                )
        return
    if a.scale_max is not None:
        raise ConfigError("attention.temperature", a.temperature, "1 while attention.scale_max bounds the scale")
    if a.temperature_from >= steps:
        raise ConfigError("attention.temperature_from", a.temperature_from, f"a step below train.steps={steps}")
    if a.temperature_until is not None and a.temperature_until <= a.temperature_from:
        raise ConfigError(
            "attention.temperature_until",
            a.temperature_until,
            f"a step above attention.temperature_from={a.temperature_from}, or null",
        )


def _check_data(cfg: RunConfig) -> None:
    d, facts = cfg.data, DATA_SETS[cfg.data.name]
    fixed = {"classes": facts.classes, "samples": facts.samples}
    if d.name == "digits":
        fixed["image_size"] = facts.size
    for name, value in fixed.items() if d.name != "synthetic" else ():
        if getattr(d, name) not in (None, value):
            own = f" or {value}" if value else ""
            raise ConfigError(f"data.{name}", getattr(d, name), f"null{own} while data.name={d.name}")
    images = (d.samples if d.name == "synthetic" else None) or facts.samples
    if images is not None and cfg.train.batch_size > images:
        raise ConfigError("train.batch_size", cfg.train.batch_size, f"at most the {images} training images")
    if d.randaugment and d.name in ("digits", "synthetic"):
        raise ConfigError(
            "data.randaugment", d.randaugment, f"0 while data.name={d.name} (it is made for 8-bit images)"
        )
    if not d.randaugment and d.randaugment_magnitude != 9:
        raise ConfigError("data.randaugment_magnitude", d.randaugment_magnitude, "9 while data.randaugment=0")
    if (d.poison == "none") != (not d.poison_steps):
        wanted = "[] while data.poison=none" if d.poison == "none" else f"the steps of data.poison={d.poison}"
        raise ConfigError("data.poison_steps", d.poison_steps, wanted)
    steps = d.poison_steps
    if steps != sorted(set(steps)) or not all(0 <= s < cfg.train.steps for s in steps):
        raise ConfigError("data.poison_steps", steps, f"steps from 0 to {cfg.train.steps - 1} in rising order")
