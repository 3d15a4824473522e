"""Other people's attention with our weights: what each preset must equal, forward and backward.

``REFERENCES`` names the real implementation of each preset of configs/attention, from transformers or timm where
they hold it. Their modules run as they are: without mask or cache, with as many key heads as query heads, and the
rotation is theirs where they have one. docs/systems.md and tests/model/test_references.py both use
:func:`largest_difference`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import RmsNorm
from timm.models.swin_transformer_v2 import WindowAttention
from timm.models.vision_transformer import Attention as TimmAttention
from torch import Tensor, nn
from torch.nn import functional as F

from qkexp.compose import compose_sweep
from qkexp.config import AttentionConfig
from qkexp.model.attention import Attention, default_scale

DIM, HEADS, TOKENS, IMAGES = 64, 4, 16, 3
WIDTH = DIM // HEADS

Names = dict[str, tuple[str, ...]]  # our parameter -> theirs, which are its rows one after another; "" is zero there


@dataclass(frozen=True)
class Theirs:
    """A module of theirs, its call on (B, N, C), how its parameters are named, and how it turns (B, N, H, d)."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]
    names: Names = field(default_factory=dict)
    turn: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Reference:
    """Where an implementation comes from, and what makes it."""

    label: str
    make: Callable[[], Theirs]


# ---------------------------------------------------------------- transformers

SEPARATE: Names = {
    "qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "qkv.bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    "proj.weight": ("o_proj.weight",),
    "proj.bias": ("o_proj.bias",),
}


def angles() -> Tensor:
    """(N, d/2): an angle for each token and pair of channels."""
    return torch.arange(TOKENS)[:, None] / 100.0 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))


def transformers(family: str, prefix: str, config: str | None = None, **extra: Any) -> Reference:
    """``{prefix}Attention`` of a family, eager, with biases as a ViT has them."""

    def make() -> Theirs:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH}
        settings = getattr(modeling, config or f"{prefix}Config")(**sizes, attention_bias=True, **extra)
        settings._attn_implementation = "eager"
        module = getattr(modeling, f"{prefix}Attention")(settings, layer_idx=0)
        places, turn = _complex_rotation(modeling) if family == "llama4" else _real_rotation(modeling, family)

        def call(x: Tensor) -> Tensor:
            return module(hidden_states=x, position_embeddings=places, attention_mask=None)[0]

        return Theirs(module, call, SEPARATE, turn)

    return Reference(f"transformers `{prefix}Attention`", make)


def _real_rotation(modeling: Any, family: str) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Cosines and sines in the family's layout (neighbours are a pair in Cohere's, halves in the others')."""
    a = angles().repeat_interleave(2, -1) if family == "cohere" else angles().repeat(1, 2)
    places = (a.cos()[None], a.sin()[None])
    return places, lambda x: modeling.apply_rotary_pos_emb(x, x, *places, unsqueeze_dim=2)[0]


def _complex_rotation(modeling: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    places = torch.polar(torch.ones_like(angles()), angles())[None]
    return places, lambda x: modeling.apply_rotary_emb(x, x, places)[0]


# ---------------------------------------------------------------- timm


def timm(norm: str, norm_layer: Any) -> Reference:
    def make() -> Theirs:
        module = TimmAttention(DIM, HEADS, qkv_bias=True, qk_norm=True, norm_layer=norm_layer)
        return Theirs(module, module)

    return Reference(f"timm `Attention(qk_norm=True)` with {norm}", make)


def swin() -> Theirs:
    """Position bias constant, which softmax ignores; Swin's k has no bias."""
    side = int(TOKENS**0.5)
    module: Any = WindowAttention(DIM, (side, side), HEADS)
    nn.init.zeros_(module.cpb_mlp[2].weight)
    return Theirs(module, module, {"qkv.bias": ("q_bias", "", "v_bias")})


# ---------------------------------------------------------------- written out


class Cosines(nn.Module):
    """QKNorm as published, with PyTorch's ``normalize``: no package holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.logit_scale = nn.Parameter(torch.tensor([default_scale(TOKENS)]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        z = self.logit_scale * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT)
        return self.proj((z.softmax(-1) @ v).transpose(1, 2).flatten(2))


def written() -> Theirs:
    module = Cosines()
    return Theirs(module, module)


LAYER_NORM = functools.partial(nn.LayerNorm, eps=1e-6)
REFERENCES: dict[str, Reference] = {
    "henry2020": Reference("its formula with `F.normalize` (no package holds it)", written),
    "vit22b": timm("`LayerNorm(bias=False)`", functools.partial(LAYER_NORM, bias=False)),
    "vit22b_rms": timm("`RmsNorm`", functools.partial(RmsNorm, eps=1e-6)),
    "qwen3": transformers("qwen3", "Qwen3"),
    "gemma2": transformers("gemma2", "Gemma2", query_pre_attn_scalar=WIDTH),
    "gemma3": transformers("gemma3", "Gemma3", "Gemma3TextConfig", query_pre_attn_scalar=WIDTH),
    "command_r_plus": transformers("cohere", "Cohere", use_qk_norm=True),
    "olmo2": transformers("olmo2", "Olmo2"),
    "chameleon": transformers("chameleon", "Chameleon"),
    "sd3": timm("`RmsNorm`", functools.partial(RmsNorm, eps=1e-6)),
    "llama4": transformers("llama4", "Llama4Text"),
    "swin_v2": Reference("timm `WindowAttention` of Swin V2", swin),
    "timm": timm("`LayerNorm`", LAYER_NORM),
}
FAR_ABOVE = {"gemma2": 3.0}  # factor on W_q and W_k: a cap that is not reached would prove nothing


# ---------------------------------------------------------------- comparison


class Turn(nn.Module):
    """Their rotation in the place of ours."""

    def __init__(self, turn: Callable[[Tensor], Tensor]):
        super().__init__()
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(x)


@functools.cache
def attention_of(preset: str) -> AttentionConfig:
    """The checked keys of a preset, on the kernel of the CPU."""
    cfg = compose_sweep([f"attention={preset}", "attention.backend=explicit"], single=True).runs[0][1]
    return cfg.attention


def ours_beside(preset: str, theirs: Theirs) -> Attention:
    """Our attention with weights away from their start, which theirs is given too."""
    torch.manual_seed(1)
    turn = None if theirs.turn is None else Turn(theirs.turn)
    ours = Attention(DIM, HEADS, TOKENS, attention_of(preset), rotary=turn, qkv_bias=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        ours.get_parameter("qkv.weight")[: 2 * DIM].mul_(FAR_ABOVE.get(preset, 1.0))
        given = dict(theirs.module.named_parameters())
        for name, piece in _pieces(ours, theirs.names, lambda p: p):
            given[name].copy_(piece.view_as(given[name])) if name else piece.zero_()
    return ours


def largest_difference(preset: str) -> dict[str, float]:
    """Largest |ours − theirs| with the same weights in float32, of the ``output`` and of each ``gradient``.

    Where the largest entry of theirs is above 1, the difference is relative to it. Gradients are those of the
    input and of every parameter.
    """
    theirs = REFERENCES[preset].make()
    ours = ours_beside(preset, theirs)
    draw = torch.Generator().manual_seed(2)
    x, back = (torch.randn(IMAGES, TOKENS, DIM, generator=draw) for _ in range(2))
    results = []
    for call in (ours, theirs.call):
        given = x.clone().requires_grad_()
        output = call(given)
        (output * back).sum().backward()
        results.append((output.detach(), given.grad))
    (output, grad), (their_output, their_grad) = results
    gradients = [_distance(grad, their_grad)]
    grads: dict[str, Any] = {name: parameter.grad for name, parameter in theirs.module.named_parameters()}
    for name, piece in _pieces(ours, theirs.names, lambda p: p.grad):
        if name:
            gradients.append(_distance(piece, grads[name].view_as(piece)))
    return {"output": _distance(output, their_output), "gradient": max(gradients)}


def _pieces(ours: Attention, names: Names, of: Callable[[nn.Parameter], Any]) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of ours (or its gradient) as pieces, under their names."""
    for name, parameter in ours.named_parameters():
        targets = names.get(name, (name,))
        yield from zip(targets, of(parameter).chunk(len(targets)), strict=True)


def _distance(ours: Any, theirs: Any) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)).item()
