"""Learning rate, weight decay, gradient statistics and the update: what happens after backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkexp.config import OptimConfig
from qkexp.model.attention import Attention
from qkexp.model.vit import attention_layers

PARTS = ("qk", "vo", "mlp", "rest")


def learning_rate(step: int, steps: int, cfg: OptimConfig) -> float:
    """The rate used at ``step`` (from 0): linear warm-up, then cosine towards 0 or constant.

    The largest rate is exactly ``cfg.lr``, at the last step of the warm-up (the first without one). A
    warm-up longer than the run is a ramp that stops on its way.
    """
    if step < cfg.warmup:
        return cfg.lr * ((step + 1) / cfg.warmup)
    if cfg.schedule == "constant":
        return cfg.lr
    peak = max(cfg.warmup - 1, 0)
    progress = (step - peak) / (steps - peak)
    return cfg.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices of linear and patch layers only.

    Gains, biases, learned scales, class token and position embedding never decay, whatever their rank.
    """
    if name.endswith((".q_norm.weight", ".k_norm.weight", "logit_scale")):
        return False
    return name.endswith("weight") and parameter.dim() >= 2


@dataclass(frozen=True)
class GradNorms:
    """Gradient norms before clipping: of everything, and of its parts (``PARTS``)."""

    total: Tensor  # ()
    parts: Tensor  # (4,)


class Updater:
    """One optimiser step with its statistics, on all parameters as one flat vector.

    A micro model has sixty small tensors; copying, subtracting and measuring them one by one cost a
    tenth of its step. So parameters become views of one vector (their names, shapes and ``state_dict``
    stay), gradients are gathered into another, and each statistic is one operation.

    Decay is applied here and not by the optimiser, so that "independent" (θ ← θ − s_t·λ·θ, s_t the
    schedule in [0, 1]; Wortsman et al. 2023) and "coupled" (θ ← θ − lr_t·λ·θ, PyTorch's AdamW) differ
    in one factor and an update can be measured without it.
    """

    def __init__(self, model: nn.Module, cfg: OptimConfig, steps: int):
        self.cfg, self.steps = cfg, steps
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.flat = _share_storage([p for _, p in self.named])
        self.grad = torch.zeros_like(self.flat)
        self._change = torch.empty_like(self.flat)
        self._pieces, self._membership = self._partition(attention_layers(model))
        self._decayed = torch.cat([p.new_full((p.numel(),), float(decays(n, p))) for n, p in self.named])
        self._parameter = nn.Parameter(self.flat)  # the same memory
        self._parameter.grad = self.grad
        self.optimizer = torch.optim.Adam(
            [self._parameter], lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), eps=cfg.eps, fused=True
        )

    def grad_norms(self) -> GradNorms:
        """Gather the gradients of the parameters, and measure them."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in self.named]
        torch.cat([g.reshape(-1) for g in grads], out=self.grad)
        squares = torch.stack(torch._foreach_norm(self._pieces)).double().square()
        return GradNorms(squares.sum().sqrt(), (squares @ self._membership).sqrt())

    def clip(self, largest: float, norm: Tensor) -> None:
        """Scale the gathered gradient so that its norm is at most ``largest``."""
        self.grad *= (largest / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, step: int) -> tuple[float, Tensor, Tensor]:
        """Decay and update. Returns the rate used, the RMS of Δθ ÷ rate without decay, and ‖θ‖₂ after."""
        lr = learning_rate(step, self.steps, self.cfg)
        self.optimizer.param_groups[0]["lr"] = lr
        if self.cfg.weight_decay:
            factor = lr if self.cfg.decay == "coupled" else lr / self.cfg.lr
            self.flat *= 1.0 - factor * self.cfg.weight_decay * self._decayed
        self._change.copy_(self.flat)
        self.optimizer.step()
        self._change -= self.flat
        update = torch.linalg.vector_norm(self._change) / math.sqrt(self.flat.numel()) / lr
        for _, parameter in self.named:
            parameter.grad = None
        return lr, update, torch.linalg.vector_norm(self.flat)

    def _partition(self, attention: dict[str, Attention]) -> tuple[list[Tensor], Tensor]:
        """Views of the flat gradient, and a matrix (pieces, 4) that says which part each belongs to."""
        sizes: list[int] = []
        owners: list[int] = []

        def add(size: int, part: str) -> None:
            if owners and owners[-1] == PARTS.index(part):
                sizes[-1] += size  # neighbours of one part are one piece
            else:
                sizes.append(size)
                owners.append(PARTS.index(part))

        for name, parameter in self.named:
            layer = next((layer for layer in attention if name.startswith(layer + ".")), None)
            if layer is not None and name.startswith(layer + ".qkv."):
                add(2 * parameter.numel() // 3, "qk")
                add(parameter.numel() // 3, "vo")
            elif layer is not None:
                add(parameter.numel(), "vo" if name.startswith(layer + ".proj.") else "qk")
            else:
                add(parameter.numel(), "mlp" if ".mlp." in name else "rest")
        membership = F.one_hot(torch.tensor(owners), len(PARTS)).double()
        return list(self.grad.split(sizes)), membership.to(self.flat.device)


def _share_storage(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Make parameters views of one contiguous vector, and return it."""
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    at = 0
    for parameter in parameters:
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    return flat
