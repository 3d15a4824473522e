"""A timm VisionTransformer by name, with our blocks inside and the same start for every variant."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention as TimmAttention
from timm.models.vision_transformer import Block, ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import Tensor, nn

from qkexp.config import ConfigError, ModelConfig, RunConfig, head_width, image_size
from qkexp.model.attention import Attention
from qkexp.model.blocks import BLOCKS
from qkexp.model.core import choose_backend, per_head
from qkexp.model.parts import pieces
from qkexp.model.qk_norm import QKNorm
from qkexp.model.rotary import AxialRotary


def build_vit(cfg: RunConfig, *, image_size: int, channels: int, classes: int, like: Tensor | None = None) -> nn.Module:
    """Build the configured ViT on the CPU in float32.

    Initial weights are timm's (truncated normal, std 0.02) and depend on ``model.seed`` alone, so
    variants differ only inside attention. With ``attention.init=match``, W_q and W_k of a variant
    without norm are then scaled (:func:`match_logit_spread`).

    Args:
        cfg: a checked configuration.
        image_size, channels, classes: of the data.
        like: images (B, channels, size, size) on which ``init=match`` measures; required by it.

    Raises:
        ConfigError: a name that is not a plain timm VisionTransformer, or sizes that do not fit.
    """
    m, attention = cfg.model, cfg.attention
    if attention.backend == "auto":
        device = "cuda" if cfg.device == "cuda" else "cpu"
        attention = dataclasses.replace(
            attention,
            backend=choose_backend(device, attention.softcap, attention.score_dtype, head_width(m), attention.dropout),
        )
    overrides = timm_overrides(m)
    _require_plain(m.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(m.seed)
        try:
            plain = _skeleton(m.name, overrides, image_size)
            prefix, grid = plain.num_prefix_tokens, plain.patch_embed.grid_size
            block = functools.partial(
                BLOCKS[m.block_norm],
                attention=attention,
                tokens=prefix + plain.patch_embed.num_patches,
                rotary=AxialRotary(plain.blocks[0].attn.head_dim, grid, prefix) if m.rope == "axial" else None,
            )
            vit = timm.create_model(
                m.name, img_size=image_size, in_chans=channels, num_classes=classes, block_fn=block, **overrides
            )
        except (ValueError, AssertionError, TypeError, RuntimeError, OverflowError) as error:
            why = str(error) or "timm refuses them without a reason"
            raise ConfigError("model", {"name": m.name, **overrides}, f"sizes that fit together ({why})") from None
    if attention.init == "match" and attention.norm in ("none", "center"):
        if like is None:
            raise ValueError("attention.init=match needs images to measure the spread of logits on")
        match_logit_spread(vit, like)
    return vit


def timm_overrides(m: ModelConfig) -> dict[str, Any]:
    """What the configuration sets of timm's VisionTransformer; keys that are null keep timm's own."""
    chosen: dict[str, Any] = {
        "embed_dim": m.width,
        "depth": m.depth,
        "num_heads": m.heads,
        "patch_size": m.patch,
        "mlp_ratio": m.mlp_ratio,
        "qkv_bias": m.qkv_bias,
        "reg_tokens": m.registers,
        "init_values": m.layer_scale,
        "global_pool": m.pool,
        "class_token": None if m.pool is None else m.pool == "token",
        "proj_drop_rate": m.dropout or None,
        "pos_drop_rate": m.dropout or None,
        "drop_path_rate": m.drop_path or None,
    }
    return {k: v for k, v in chosen.items() if v is not None}


def check_sizes(cfg: RunConfig) -> None:
    """Build the model without memory: sizes that do not fit are found before a run starts.

    Raises:
        ConfigError: as :func:`build_vit`.
    """
    plain = dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, init="timm"))
    with torch.device("meta"):
        build_vit(plain, image_size=image_size(cfg.data), channels=3, classes=10)


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """Name -> our attention modules, in forward order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Attention)}


def _require_plain(name: str) -> None:
    """Refuse names whose model is not a plain VisionTransformer: our blocks would change what it is."""
    if not timm.is_model(name):
        near = timm.list_models(f"{name.split('_')[0]}_*patch16_224")[:4]
        raise ConfigError(
            "model.name", name, f"a timm model name, such as {', '.join(near or ['vit_tiny_patch16_224'])}"
        )
    with torch.device("meta"):
        try:
            probe = timm.create_model(name, depth=1)
        except (TypeError, ValueError, AssertionError, RuntimeError):
            probe = None
    if _difference(probe):
        raise ConfigError("model.name", name, f"a plain timm VisionTransformer ({_difference(probe)})")


def _difference(model: nn.Module | None) -> str | None:
    """What of the parts that our blocks replace, or count tokens of, is not timm's plain one; None: nothing."""
    if model is None:
        return "this one takes no depth: it is of its own kind"
    if type(model) is not VisionTransformer:
        return f"this one is a {type(model).__name__}"
    if type(model.patch_embed) is not PatchEmbed:
        return f"this one makes its patches with {type(model.patch_embed).__name__}"
    block: Any = model.blocks[0]
    if type(block) in _OUR_NAMES:
        return f"this one has {type(block).__name__}: take a plain name and model.block_norm={_OUR_NAMES[type(block)]}"
    if type(block) is not Block:
        return f"this one has {type(block).__name__}"
    return None if type(block.attn) is TimmAttention else f"this one has {type(block.attn).__name__}"


_OUR_NAMES = {ResPostBlock: "res_post", ParallelScalingBlock: "parallel"}


def _skeleton(name: str, overrides: dict[str, Any], image_size: int) -> Any:
    """timm's own model without memory, one block deep: tells tokens, grid and width of a head."""
    with torch.device("meta"):
        return timm.create_model(name, img_size=image_size, **{**overrides, "depth": 1})


# ---------------------------------------------------------------- the same start for every variant


def row_spread(q: Tensor, k: Tensor, scale: float | Tensor) -> Tensor:
    """Root mean square deviation of a score from its row's mean, over images, heads and rows (scalar).

    Softmax ignores a row's offset, so this, not the plain standard deviation, is what it feels.
    """
    z = (q.float() * per_head(scale)) @ k.float().transpose(-2, -1)
    return (z - z.mean(-1, keepdim=True)).square().mean().sqrt()


@torch.no_grad()
def match_logit_spread(vit: Any, images: Tensor) -> None:
    """Scale W_q and W_k so that every layer's logits spread at step 0 as under RMSNorm.

    timm's init gives un-normed arms tiny ‖q‖ and uniform attention while a norm starts sharper; that
    alone separates the arms at low rates and is not stability. The target is measured in this very
    model with weightless RMSNorms put in place; then layers are scaled from the first to the last,
    because a layer's input depends on the attention before it.
    """
    layers = list(attention_layers(vit).values())
    with _changed(layers, backend="explicit", dropout=0.0):
        with _rms_normed(layers):
            targets = _spreads(vit, images)
        for depth, block in enumerate(vit.blocks):
            factor = (targets[depth] / _spreads(vit, images)[depth]).sqrt()
            parameters = dict(block.named_parameters())
            for piece in pieces(block):
                if piece.projects_qk:
                    piece.of(parameters[piece.parameter]).mul_(factor)


@contextmanager
def _rms_normed(layers: list[Attention]) -> Iterator[None]:
    """RMSNorm and 1/sqrt(d) in place of whatever the layers have."""
    kept = [(layer.q_norm, layer.k_norm, layer.fixed_scale, layer.logit_scale) for layer in layers]
    for layer in layers:
        layer.q_norm = QKNorm(layer.heads, layer.head_dim, gain="none")
        layer.k_norm = QKNorm(layer.heads, layer.head_dim, gain="none")
        layer.fixed_scale, layer.logit_scale = layer.head_dim**-0.5, None
    try:
        yield
    finally:
        for layer, (q_norm, k_norm, fixed, learned) in zip(layers, kept, strict=True):
            layer.q_norm, layer.k_norm = q_norm, k_norm
            layer.fixed_scale, layer.logit_scale = fixed, learned


@contextmanager
def _changed(layers: list[Attention], backend: str, dropout: float) -> Iterator[None]:
    """Another core for a while: measuring on the CPU must neither compile a kernel for it nor draw random numbers."""
    kept = [(layer.core.backend, layer.core.dropout) for layer in layers]
    for layer in layers:
        layer.core.backend, layer.core.dropout = backend, dropout
    try:
        yield
    finally:
        for layer, own in zip(layers, kept, strict=True):
            layer.core.backend, layer.core.dropout = own


def _spreads(vit: nn.Module, images: Tensor) -> list[Tensor]:
    """:func:`row_spread` of every layer in one forward pass."""
    found: list[Tensor] = []
    handles = [
        layer.core.register_forward_pre_hook(lambda _m, a: found.append(row_spread(a[0], a[1], a[3])))
        for layer in attention_layers(vit).values()
    ]
    try:
        vit(images)
    finally:
        for handle in handles:
            handle.remove()
    return found
