"""What several tests of the model look at: q̂, k̂ and scale as the core receives them."""

from __future__ import annotations

import pytest
import torch

from qkexp.model.vit import attention_layers


def captured(vit, images):
    """(q̂, k̂, scale) of every layer, by hooks of our own."""
    found = []
    handles = [
        m.core.register_forward_pre_hook(
            lambda _m, a: found.append([*(x.detach() for x in a[:2]), getattr(a[3], "data", a[3])])
        )
        for m in attention_layers(vit).values()
    ]
    with torch.no_grad():
        vit(images)
    for handle in handles:
        handle.remove()
    return found


def spreads(vit, images):
    """RMS deviation of a score from its row's mean, per layer, in float64."""
    out = []
    for q, k, scale in captured(vit, images):
        z = (float(scale) if isinstance(scale, float) else scale.double().view(-1, 1, 1)) * (
            q.double() @ k.double().transpose(-2, -1)
        )
        out.append((z - z.mean(-1, keepdim=True)).square().mean().sqrt())
    return torch.stack(out)


@pytest.fixture(name="captured")
def _captured():
    return captured


@pytest.fixture(name="spreads")
def _spreads():
    return spreads
