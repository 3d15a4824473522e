"""torchvision's ViT, whose attention is nn.MultiheadAttention: training, and evaluation kept apart by its phase.

python docs/examples/torchvision_vit.py
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torchvision.models.vision_transformer import VisionTransformer

from qkexp import AttentionProbe

COLUMNS = ["phase", "layer", "module", "head", "max_abs_logit", "entropy_mean", "attn_max_mean"]


def main(steps: int = 10) -> AttentionProbe:
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = AttentionProbe(model, every=5)
    for step in range(steps):
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        with probe.step(step):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad(), probe.step(0, phase="val"):
        model(torch.randn(8, 3, 32, 32))
    assert probe.frame is not None
    print(probe.coverage)
    print(probe.frame.to_pandas()[COLUMNS].to_string(index=False))
    return probe


if __name__ == "__main__":
    main()
