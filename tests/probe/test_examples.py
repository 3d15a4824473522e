"""docs/examples run as they stand, on models that this project did not write."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_an_example_shows_a_table(path, capsys):
    if path.stem == "lightning_loop":
        pytest.importorskip("lightning")
    probe = runpy.run_path(str(path))["main"](steps=6)
    layers = len(probe.names)
    assert layers >= 2
    assert f"{layers} found, {layers} attached, {layers} fired" in str(probe.coverage)
    assert "max_abs_logit" in capsys.readouterr().out or path.stem == "lightning_loop"


def test_the_adapter_of_the_documentation_runs():
    """The code block under "Writing your own" in docs/probe.md, on a module as it describes."""
    import torch
    from torch import nn

    from qkexp import AttentionProbe

    page = (EXAMPLES.parent / "probe.md").read_text()
    code = page.split("```python")[-1].split("```")[0]

    class MyAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_qkv = nn.Linear(32, 96)
            self.core = MyCore()

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
            return self.core(q, k, v).transpose(1, 2).flatten(2)

    class MyCore(nn.Module):
        def forward(self, q, k, v):
            p = (q @ k.transpose(-2, -1) / 4).exp()
            return p / p.sum(-1, keepdim=True) @ v

    names = {"MyAttention": MyAttention}
    exec(compile(code.split("probe = ")[0], "probe.md", "exec"), names)
    model = nn.Sequential(MyAttention(), MyAttention())
    probe = AttentionProbe(model, adapters=[names["MyAdapter"]])
    with probe.step(0):
        model(torch.randn(2, 9, 32))
    assert probe.coverage.checked == ("0", "1")
    body = code.split("class MyAdapter:")[1].split("probe = ")[0].strip().splitlines()
    assert len([line for line in body if line.strip() and not line.strip().startswith("@")]) <= 10
