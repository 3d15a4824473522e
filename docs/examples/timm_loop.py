"""A plain PyTorch loop around a timm model: three lines are the probe's.

python docs/examples/timm_loop.py
"""

from __future__ import annotations

import timm
import torch
from torch.nn import functional as F

from qkexp import AttentionProbe

COLUMNS = ["step", "layer", "module", "head", "max_abs_logit", "entropy_frac", "collapsed_rows", "q_norm_mean"]


def main(steps: int = 20, every: int = 5) -> AttentionProbe:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=10, qkv_bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = AttentionProbe(model, every=every)
    for step in range(steps):
        images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
        with probe.step(step):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if probe.frame is not None:
            sharpest = min(v for k, v in probe.frame.scalars().items() if k.endswith("entropy_frac"))
            print(f"step {step}: loss {loss.item():.3f}, smallest entropy of a layer {sharpest:.3f} of log n")
            last = probe.frame
    print(probe.coverage)
    print(last.to_pandas()[COLUMNS].to_string(index=False))
    return probe


if __name__ == "__main__":
    main()
