"""What several folders of tests share: a checked configuration from overrides, and its model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qkexp.compose import compose_sweep
from qkexp.config import RunConfig
from qkexp.model.vit import build_vit

# presets that set different keys; ALIASES are published systems that set what another preset sets
VARIANTS = (
    "none", "layernorm", "rmsnorm", "l2", "softcap", "layernorm_softcap", "rmsnorm_softcap", "l2_softcap",
    "gemma3", "command_r_plus", "olmo2", "chameleon", "llama4", "swin_v2", "timm",
)  # fmt: skip
ALIASES = {
    "henry2020": "l2", "vit22b": "layernorm", "vit22b_rms": "rmsnorm", "qwen3": "rmsnorm", "sd3": "rmsnorm",
    "gemma2": "softcap",
}  # fmt: skip
NORMED = tuple(name for name in VARIANTS if name not in ("none", "softcap"))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each of the attention presets that set different keys."""
    return request.param


@pytest.fixture
def variants() -> tuple[str, ...]:
    """Their names."""
    return VARIANTS


@pytest.fixture
def aliases() -> dict[str, str]:
    """The other presets, and what each is the same as."""
    return ALIASES


@pytest.fixture(params=NORMED)
def normed(request: pytest.FixtureRequest) -> str:
    """Each of those that has a norm."""
    return request.param


@pytest.fixture(scope="session")
def make_config() -> Callable[..., RunConfig]:
    """Overrides -> one checked configuration, the backend resolved for the CPU."""
    made: dict[tuple[str, ...], RunConfig] = {}

    def make(*overrides: str) -> RunConfig:
        if overrides not in made:
            made[overrides] = compose_sweep(list(overrides), single=True).runs[0][1]
        cfg = copy.deepcopy(made[overrides])
        if cfg.attention.backend == "auto":
            cfg.attention.backend = "explicit"
        return cfg

    return make


@pytest.fixture(scope="session")
def make_vit(make_config: Callable[..., RunConfig]) -> Callable[..., nn.Module]:
    """Overrides -> the micro ViT on 8x8 grey images (17 tokens); ``like`` as :func:`build_vit` takes it."""

    def make(*overrides: str, like: torch.Tensor | None = None) -> nn.Module:
        return build_vit(make_config(*overrides), image_size=8, channels=1, classes=10, like=like)

    return make


@pytest.fixture
def images() -> torch.Tensor:
    """Eight grey 8x8 images, always the same."""
    return torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(7))
