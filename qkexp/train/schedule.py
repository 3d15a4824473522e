"""The learning rate of a step: a pure function, whose largest value is exactly the rate asked for."""

from __future__ import annotations

import math
from collections.abc import Callable

from qkexp.config import OptimConfig


def learning_rate(step: int, steps: int, cfg: OptimConfig) -> float:
    """The rate used at ``step`` (from 0): linear warm-up, then the schedule.

    The largest rate is exactly ``cfg.lr``, at the last step of the warm-up (the first without one). A
    warm-up longer than the run is a ramp that stops on its way.
    """
    if step < cfg.warmup:
        return cfg.lr * ((step + 1) / cfg.warmup)
    peak = max(cfg.warmup - 1, 0)
    return cfg.lr * SCHEDULES[cfg.schedule](step - peak, steps - peak, cfg)


def _cosine(past: int, length: int, cfg: OptimConfig) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * (past / length)))


def _constant(past: int, length: int, cfg: OptimConfig) -> float:
    return 1.0


def _linear(past: int, length: int, cfg: OptimConfig) -> float:
    return 1.0 - past / length


def _rsqrt(past: int, length: int, cfg: OptimConfig) -> float:
    """1/sqrt of the time since the start on the scale of the warm-up, then a linear cool-down to 0.

    The shape of ViT-22B's kin (NaViT, arXiv 2307.06304; big_vision's ``rsqrt``).
    """
    scale = max(cfg.warmup, 1)
    value = math.sqrt(scale / (scale + past))
    left = length - past
    return value * min(1.0, left / cfg.cooldown) if cfg.cooldown else value


SCHEDULES: dict[str, Callable[[int, int, OptimConfig], float]] = {
    "cosine": _cosine,
    "constant": _constant,
    "linear": _linear,
    "rsqrt": _rsqrt,
}
