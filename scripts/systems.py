"""The generated tables of docs/systems.md: what each published preset is, promises and equals.

    python scripts/systems.py            # rewrites the tables in place (half a minute)
    python scripts/systems.py --check    # exit 1 where they differ, measured ones left out

Statistics, gain, rotation, scale and what is the same are read from the presets' keys; the differences to the real
implementations and the entropy of the first step are measured.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import generated
import torch
from references import REFERENCES, attention_of, largest_difference

from qkexp import AttentionProbe
from qkexp.compose import compose_sweep, options
from qkexp.config import AttentionConfig, RunConfig, identity
from qkexp.model.vit import build_vit

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "systems.md"
SIZES = {"d = 16, N = 17": (16, 17, 4), "d = 64, N = 197": (64, 197, 6)}  # width, tokens, heads: micro, ViT-S/16

BLIND = "blind to the size of W_q and W_k"
NORMED = f"|z| ≤ √d · max|γ_q| · max|γ_k|; {BLIND}; heads apart"
OPEN = "γ may grow, and with it the bound; what entropy it leaves: below"
Q_K = "q and k"


@dataclass(frozen=True)
class System:
    """What a published system's attention acts on, guarantees and does not guarantee, and where that is read."""

    acts_on: str
    guarantees: str
    does_not: str
    source: str


SYSTEMS: dict[str, System] = {
    "henry2020": System(
        "q, k and the scale",
        f"|z| ≤ g; {BLIND}; heads apart",
        "g is free; queries of length near 0 (eps on the mean square, theirs clamps the length)",
        "Henry et al. 2020, arXiv 2010.04245; authors' code",
    ),
    "vit22b": System(Q_K, NORMED, OPEN, "Dehghani et al. 2023, arXiv 2302.05442, as Flax's `normalize_qk` reads it"),
    "vit22b_rms": System(
        Q_K, NORMED, OPEN, "Dehghani et al. 2023, arXiv 2302.05442, as its text words its norms: no bias, no mean"
    ),
    "qwen3": System(Q_K, NORMED, OPEN, "Qwen3; transformers' code"),
    "gemma2": System(
        "the score, before the mask",
        "|c| ≤ 50, which is what softmax sees; masked keys have weight 0",
        "z, ‖q‖ and ‖k‖ grow on; a capped score gets no gradient",
        "Gemma 2, arXiv 2408.00118; transformers' code",
    ),
    "gemma3": System(
        Q_K, NORMED.replace("γ", "1+w"), OPEN.replace("γ", "w"), "Gemma 3, arXiv 2503.19786; transformers' code"
    ),
    "command_r_plus": System(Q_K, NORMED, OPEN, "Command R+; transformers' code (`use_qk_norm`)"),
    "olmo2": System(
        Q_K,
        f"|z| ≤ H · √d · max|γ_q| · max|γ_k|; {BLIND}",
        "heads apart: a long head makes the others' scores small; " + OPEN,
        "OLMo 2, arXiv 2501.00656; transformers' code (InternVL's vision tower does the same)",
    ),
    "chameleon": System(
        Q_K,
        f"|z| ≤ (√d max|γ_q| + ‖β_q‖)(√d max|γ_k| + ‖β_k‖) / √d; {BLIND}; heads apart",
        "γ and β may grow, and with them the bound",
        "Chameleon, arXiv 2405.09818; transformers' code",
    ),
    "sd3": System(Q_K, NORMED, OPEN, "Stable Diffusion 3, arXiv 2403.03206; its code norms both streams"),
    "llama4": System(
        Q_K,
        f"|z| ≤ √d, always; {BLIND}; heads apart",
        "layers without RoPE, which have no norm there; entropy: below",
        "Llama 4 Scout; transformers' code",
    ),
    "swin_v2": System(
        "q, k and the scale",
        f"|z| ≤ 100 (without its position bias); the scale stays positive; {BLIND}; heads apart",
        "a scale at its bound gets no gradient and stays there (event `scale_bound`)",
        "Liu et al. 2021, arXiv 2111.09883; timm's code",
    ),
    "timm": System(
        Q_K,
        f"|z| ≤ (√d max|γ_q| + ‖β_q‖)(√d max|γ_k| + ‖β_k‖) / √d; {BLIND}; heads apart",
        "γ and β may grow; without RoPE β_k does nothing: it adds one number to a row",
        "timm's `qk_norm=True` in a plain ViT",
    ),
}


# ---------------------------------------------------------------- read from the keys


def formula(a: AttentionConfig) -> str:
    """q̂ (k̂ alike) or the score, in words of the keys."""
    if a.norm == "none":
        return f"c = {a.softcap:g} tanh(z / {a.softcap:g})" if a.softcap else "q̂ = q"
    x = "(q − mean q)" if a.center else "q"
    below = "RMS(q)" if a.norm == "rms" else "‖q‖₂"
    below = "RMS(q − mean q)" if a.center else below
    gain = {"none": "", "shared": " · γ", "per_head": " · γ_h"}[a.gain]
    gain = gain.replace("γ", "(1 + w)") if a.gain_offset else gain
    bias = " + β" + ("_h" if a.gain == "per_head" else "") if a.bias else ""
    return f"q̂ = {x} / {below}{gain}{bias}"


def gain(a: AttentionConfig) -> str:
    shape = {"none": "none", "shared": "(d,), shared", "per_head": "(H, d)"}[a.gain]
    shape = "(H·d,)" if a.axis == "all" and a.gain != "none" else shape
    return shape + (", from 0" if a.gain_offset else "") + (", bias" if a.bias else "")


def scale(a: AttentionConfig) -> str:
    names = {"inv_sqrt_d": "1/√d", "one": "1", "learned": "learned, a layer", "learned_per_head": "learned, a head"}
    start = (
        "" if a.scale in ("inv_sqrt_d", "one") else f", from {a.scale_init:g}" if a.scale_init else ", from log₂(N²−N)"
    )
    bound = f", at most {a.scale_max:g}" if a.scale_max else ""
    return names[a.scale] + start + bound + (", as its logarithm" if a.scale_log else "")


def keys_table() -> str:
    rows = []
    for name in SYSTEMS:
        a = attention_of(name)
        over = "-" if a.norm == "none" else "d" if a.axis == "head" else "H·d"
        order = "-" if a.norm == "none" else {"norm_first": "norm, RoPE", "rope_first": "RoPE, norm"}[a.rope_order]
        eps = "-" if a.norm == "none" else f"{a.eps:g}"
        rows.append([f"`{name}`", formula(a), over, gain(a), order, scale(a), eps, same_as(name)])
    titles = ("preset", "formula", "statistics over", "gain", "order", "scale", "eps", "sets the same as")
    return generated.markdown(titles, rows)


@functools.cache
def identities() -> dict[str, str]:
    return {name: identity(config(f"attention={name}")) for name in options("attention")}


def same_as(name: str) -> str:
    """Other presets that set the same keys: the same run."""
    others = [o for o, other in identities().items() if o != name and other == identities()[name]]
    return ", ".join(f"`{o}`" for o in others) or "-"


def meaning_table() -> str:
    rows = [[f"`{name}`", s.acts_on, s.guarantees, s.does_not] for name, s in SYSTEMS.items()]
    return generated.markdown(("preset", "acts on", "guarantees", "does not guarantee"), rows)


def entropy_floor(bound: float, keys: int) -> float:
    """Least entropy, nats, of a row of ``keys`` scores that are at most ``bound`` in size; a row attains it.

    One score at +B and the others at -B: log(1 + (N-1) β) + 2 B (N-1) β / (1 + (N-1) β), β = exp(-2 B).
    """
    tail = (keys - 1) * math.exp(-2.0 * bound)
    return math.log1p(tail) + 2.0 * bound * tail / (1.0 + tail)


def bound(a: AttentionConfig, width: int, tokens: int, heads: int) -> float:
    """Most that a score may be at the starting gains (biases start at 0), or a scale's own bound."""
    if a.norm == "none":
        return a.softcap or math.inf
    factor = {"inv_sqrt_d": width**-0.5, "one": 1.0}.get(a.scale)
    if factor is None:
        factor = a.scale_max or a.scale_init or math.log2(tokens**2 - tokens)
    length = 1.0 if a.norm == "l2" else float(width)  # ‖q̂‖ · ‖k̂‖ at gain 1
    return factor * length * (heads if a.axis == "all" else 1)


def floor_table() -> str:
    titles = ["preset"]
    for size in SIZES:
        titles += [f"{size}: score at most", "entropy at least"]
    rows = []
    for name in SYSTEMS:
        row = [f"`{name}`"]
        for width, tokens, heads in SIZES.values():
            most = bound(attention_of(name), width, tokens, heads)
            row += [f"{most:.3g}", f"{entropy_floor(most, tokens):.2g}"]
        rows.append(row)
    return generated.markdown(titles, rows)


# ---------------------------------------------------------------- measured


def proof_table() -> str:
    rows = []
    for name, system in SYSTEMS.items():
        found = largest_difference(name)
        cells = [f"{found[part]:.1e}" for part in ("output", "gradient")]
        rows.append([f"`{name}`", system.source, REFERENCES[name].label, *cells])
    titles = ("preset", "source", "equal to", "largest difference: output", "gradient")
    return generated.markdown(titles, rows)


def start_table() -> str:
    titles = ["preset"]
    for size in SIZES:
        titles += [f"{size}: largest |z|", "entropy / log N"]
    rows = [
        [f"`{name}`", *(cell for size in ("micro", "vit_s") for cell in start(name, size))]
        for name in ("none", *SYSTEMS)
    ]
    return generated.markdown(titles, rows)


def start(preset: str, size: str) -> list[str]:
    """Largest |z| and mean entropy / log N of the first step, over layers and heads, on noise."""
    small = ("model=vit_small", "model.depth=2", "data=synthetic", "data.image_size=224")
    cfg = config(f"attention={preset}", *(small if size == "vit_s" else ()))
    side, channels, count = (224, 3, 2) if size == "vit_s" else (8, 1, 16)
    vit = build_vit(cfg, image_size=side, channels=channels, classes=10)
    images = torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(0))
    probe = AttentionProbe(vit)
    with probe.step(0), torch.no_grad():
        vit(images)
    table = probe.frame.to_pandas()  # type: ignore[union-attr]
    return [f"{table.max_abs_logit.max():.2g}", f"{table.entropy_frac.mean():.2f}"]


def config(*overrides: str) -> RunConfig:
    return compose_sweep([*overrides, "device=cpu"], single=True).runs[0][1]


TABLES = {"keys": keys_table, "meaning": meaning_table, "floor": floor_table}
MEASURED = {"proof": proof_table, "start": start_table}

if __name__ == "__main__":
    raise SystemExit(generated.main("systems.py", __doc__ or "", DOCUMENT, TABLES, MEASURED))
