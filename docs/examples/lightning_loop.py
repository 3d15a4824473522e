"""Lightning: a callback opens a step before the batch and closes it after (pip install lightning).

python docs/examples/lightning_loop.py
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning
import timm
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from qkexp import AttentionProbe


class ProbeCallback(lightning.Callback):
    """Logs each probed step's scalars with the module's own logger."""

    def __init__(self, every: int = 5):
        self.every = every

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.probe = AttentionProbe(module.model, every=self.every)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.open = ExitStack()
        self.open.enter_context(self.probe.step(trainer.global_step))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.open.close()
        if self.probe.frame is not None:
            module.log_dict(self.probe.frame.scalars())

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.open.__exit__(type(exception), exception, exception.__traceback__)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 10) -> AttentionProbe:
    data = TensorDataset(torch.randn(8 * steps, 3, 32, 32), torch.randint(10, (8 * steps,)))
    callback = ProbeCallback()
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=8))
    print(callback.probe.coverage)
    print({name: float(x) for name, x in trainer.callback_metrics.items() if name.endswith("entropy_mean")})
    return callback.probe


if __name__ == "__main__":
    main()
