"""A QK norm put into a trained model so that its logits keep their scale.

A norm whose gain starts at 1 would throw logits that have grown back to those of a fresh model: the loss would jump,
and what follows would say nothing about the norm. So gains start where they leave the logits as sharp as they were,
head by head: at the root mean square of q and of k, and then both multiplied by one factor, so that the mean gap
between the largest logit of a row and the row's mean is exactly what it was on the images given (``logit_gap_mean``:
softmax ignores a row's offset). What a norm is for stays: single tokens that are longer than others lose their length,
and so the largest logits shrink; and the lengths of all no longer follow W_q and W_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qkexp.config import LEARNED_SCALES, AttentionConfig, ConfigError
from qkexp.model.attention import Attention
from qkexp.model.core import Scale, per_head
from qkexp.model.qk_norm import QKNorm
from qkexp.model.vit import attention_layers

NORM_KEYS = ("norm", "center", "axis", "gain", "gain_offset", "bias")
SCALE_KEYS = ("scale", "scale_log", "scale_max")
PARAMETERS = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias", "logit_scale")  # that are then new


def inserts(old: AttentionConfig, new: AttentionConfig) -> bool:
    """Whether ``new`` has a norm or a learned scale that ``old`` has not, or has it otherwise."""
    scaled = new.scale in LEARNED_SCALES and _differ(old, new, SCALE_KEYS)
    return scaled or (new.norm != "none" and _differ(old, new, NORM_KEYS))


def can_calibrate(cfg: AttentionConfig) -> bool:
    """Whether something is learned that can hold the logits' scale."""
    return cfg.gain != "none" or cfg.scale in LEARNED_SCALES


@torch.no_grad()
def calibrate(new: nn.Module, old: nn.Module, images: Tensor) -> None:
    """Set gains of ``new``, or where it has none learned scales, so that its logits are as sharp as those of ``old``.

    Both are in evaluation mode and have the same weights otherwise. Layers are set from the first to the last in one
    pass, each on the inputs that those before it give. A gain or scale that all heads share keeps the mean gap of
    the layer, not that of each head.

    Args:
        images: (B, C, size, size) on which the gaps are measured.

    Raises:
        ConfigError: the scale that is needed is over ``attention.scale_max``.
    """
    lengths, targets = _measure(old, images)
    layers = list(attention_layers(new).values())
    for layer, of_layer in zip(layers, lengths, strict=True):
        for norm, length in zip(_with_gain(layer), of_layer, strict=False):
            gain = _gain(norm, layer.heads)
            gain[:] = _merged(length, len(gain)).view(-1, 1) - norm.gain_offset

    def adjust(layer: Attention, target: Tensor) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            q, k, v, scale = args
            scale = scale.clone() if isinstance(scale, Tensor) else scale  # it may be what is multiplied
            count = _count(layer)
            ratio = _merged(target, count) / _merged(gaps(q, k, scale), count)
            ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
            _multiply(layer, ratio)
            return q * ratio.view(-1, 1, 1), k, v, scale

        return hook

    with _hooked((layer.core, adjust(layer, target)) for layer, target in zip(layers, targets, strict=True)):
        new(images)


def gaps(q: Tensor, k: Tensor, scale: Scale) -> Tensor:
    """Mean over rows of the largest score less the row's mean, of each head: q, k (B, H, N, d) -> (H,)."""
    z = (q.float() * per_head(scale)) @ k.float().transpose(-2, -1)
    return (z.amax(-1) - z.mean(-1)).mean((0, 2))


def _measure(vit: nn.Module, images: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Of each layer: the root mean square of the projections q and k of each head, (H,) both; and :func:`gaps`."""
    sizes: list[Tensor] = []
    found: list[Tensor] = []
    hooks: list[tuple[nn.Module, Callable[..., Any]]] = []
    for layer in attention_layers(vit).values():
        for norm in (layer.q_norm, layer.k_norm):  # they get (B, N, H, d)
            hooks.append((norm, lambda _, args: sizes.append(args[0].float().square().mean((0, 1, 3)).sqrt())))
        hooks.append((layer.core, lambda _, args: found.append(gaps(args[0], args[1], args[3]))))
    with _hooked(hooks):
        vit(images)
    return list(zip(sizes[::2], sizes[1::2], strict=True)), found


def _with_gain(layer: Attention) -> list[QKNorm]:
    """The norms of q and of k, where they have gains; else nothing."""
    return [n for n in (layer.q_norm, layer.k_norm) if isinstance(n, QKNorm) and n.weight is not None]


def _gain(norm: QKNorm, heads: int) -> Tensor:
    """A norm's gain as a view (heads, channels), (1, channels) where all heads share it."""
    assert norm.weight is not None
    shared = norm.weight.dim() == 1 and norm.axis == "head"
    return norm.weight.data.view(1 if shared else heads, -1)


def _count(layer: Attention) -> int:
    """How many values hold the scale of a layer's logits: one a head, or one for all."""
    norms = _with_gain(layer)
    if norms:
        return len(_gain(norms[0], layer.heads))
    assert layer.logit_scale is not None
    return len(layer.logit_scale)


def _merged(values: Tensor, count: int) -> Tensor:
    """Of each head -> (count,): as they are, or their mean."""
    return values if count == len(values) else values.mean().view(1)


def _multiply(layer: Attention, ratio: Tensor) -> None:
    """Multiply the logits of a layer, (H,) or (1,), by what its gains or its learned scale hold."""
    norms = _with_gain(layer)
    for norm in norms:
        gain = _gain(norm, layer.heads)
        gain[:] = (gain + norm.gain_offset) * ratio.sqrt().view(-1, 1) - norm.gain_offset
    if not norms and layer.logit_scale is not None:
        s = layer.logit_scale.data
        s[:] = s + ratio.log() if layer.scale_log else s * ratio
        largest = s.max().exp() if layer.scale_log else s.max()
        if layer.scale_max is not None and largest > layer.scale_max:
            wanted = f"at least {float(largest):.4g}, the scale that keeps the logits as sharp as they are"
            raise ConfigError("attention.scale_max", layer.scale_max, wanted)


@contextmanager
def _hooked(hooks: Sequence[tuple[nn.Module, Callable[..., Any]]] | Iterator[Any]) -> Iterator[None]:
    """Forward-pre-hooks for a while."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differ(old: AttentionConfig, new: AttentionConfig, names: Sequence[str]) -> bool:
    return any(getattr(old, name) != getattr(new, name) for name in names)
