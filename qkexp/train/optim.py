"""Weight decay, gradient statistics and the update: what happens after backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkexp.config import OptimConfig
from qkexp.model.parts import PARTS, Piece, pieces
from qkexp.train.schedule import learning_rate


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices of linear and patch layers only.

    Gains, biases, learned scales, class token and position embedding never decay, whatever their rank.
    """
    if name.endswith((".q_norm.weight", ".k_norm.weight", "logit_scale")):
        return False
    return name.endswith("weight") and parameter.dim() >= 2


def is_gain(name: str, parameter: Tensor) -> bool:
    """Whether ``optim.gain_decay`` applies: gains of QK norms (what is learned of them, γ or γ - 1)."""
    return name.endswith((".q_norm.weight", ".k_norm.weight"))


@dataclass(frozen=True)
class Update:
    """What a step did: the rate used, RMS of Δθ ÷ rate without decay, ‖θ‖₂ after it.

    ``moved`` is the share of parameters that changed at all; None where weights are float32.
    """

    lr: float
    rms: float
    param_norm: float
    moved: float | None


class Updater:
    """One optimiser step with its statistics, on all parameters as one flat vector.

    A micro model has sixty small tensors; copying, subtracting and measuring them one by one cost a
    tenth of its step. So parameters become views of one vector (their names, shapes and ``state_dict``
    stay), their gradients pieces of another, and each statistic is one operation.

    Decay is applied here and not by the optimiser, so that "independent" (θ ← θ − s_t·λ·θ, s_t the
    schedule in [0, 1]; Wortsman et al. 2023) and "coupled" (θ ← θ − lr_t·λ·θ, PyTorch's AdamW) differ
    in one factor and an update can be measured without it. ``adam`` is the classic one, whose decay is
    a gradient (λ·θ) and so goes through the moments.

    ``optim.qk_lr_scale`` multiplies the whole change of the Q and K projections, decay included: at 0 they
    keep their initial bits. ``optim.head_lr_scale`` does the same to the classifier.
    """

    def __init__(self, model: nn.Module, cfg: OptimConfig, steps: int):
        self.cfg, self.steps = cfg, steps
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.flat = _share_storage([p for _, p in self.named])
        self.grad = torch.zeros_like(self.flat)
        self._change = torch.empty_like(self.flat)
        self._pieces: dict[str, list[Piece]] = {name: [] for name, _ in self.named}
        for piece in pieces(model):
            if piece.parameter in self._pieces:
                self._pieces[piece.parameter].append(piece)
        for _, parameter, span in _spans(self.named):
            parameter.grad = self.grad[span].view(parameter.shape)
        self._measured, self._owners = self._partition()
        self._scaled = [
            (piece.of(self.flat[span].view(parameter.shape)), factor)
            for name, parameter, span in _spans(self.named)
            for piece in self._pieces[name]
            if (factor := self._factor(piece)) != 1.0
        ]
        self._one = torch.ones((), dtype=self.flat.dtype)  # factors are rounded as weights are; on the CPU to be read
        self._decays = [
            (
                strength,
                [self.flat[span] for span in _merged(s for n, p, s in _spans(self.named) if chosen(n, p))],
                torch.cat([p.new_full((p.numel(),), float(chosen(n, p))) for n, p in self.named]),
            )
            for strength, chosen in ((cfg.weight_decay, decays), (cfg.gain_decay, is_gain))
            if strength
        ]
        matrices, rest = self._split()
        self.optimizers = OPTIMIZERS[cfg.name](matrices, rest, cfg)

    def clear(self) -> None:
        """Set the gradient to zero: backward passes add to it."""
        self.grad.zero_()

    def measure(self, scaler: torch.amp.GradScaler | None = None) -> Sequence[Tensor]:
        """Undo the scaling of the loss, and measure the gradient.

        Returns the norm of each piece, float32, still on the device; :meth:`grad_norms` reads them.
        """
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        return torch._foreach_norm(self._measured, dtype=torch.float32)

    def grad_norms(self, pieces: Sequence[float]) -> dict[str, float]:
        """What :meth:`measure` returned, as numbers -> gradient norms before clipping: in all, and of each part."""
        squares = dict.fromkeys(PARTS, 0.0)
        for part, norm in zip(self._owners, pieces, strict=True):
            squares[part] += norm * norm
        total = math.sqrt(sum(squares.values()))
        return {"grad_norm": total, **{f"grad_norm_{part}": math.sqrt(square) for part, square in squares.items()}}

    def clip(self, largest: float, norm: float) -> None:
        """Scale the gradient, whose norm is ``norm``, so that it is at most ``largest``."""
        factor = largest / (norm + 1e-6)
        if factor < 1.0:
            self.grad *= factor

    @torch.no_grad()
    def step(self, step: int) -> Update:
        """Decay and update."""
        lr = learning_rate(step, self.steps, self.cfg)
        kept = [weights.clone() for weights, _ in self._scaled]
        for strength, spans, mask in self._decays:
            if self.cfg.name == "adam":
                self.grad.addcmul_(self.flat, mask, value=strength)
            else:
                factor = lr if self.cfg.decay == "coupled" else lr / self.cfg.lr
                torch._foreach_mul_(spans, float(1.0 - factor * strength * self._one))
        self._change.copy_(self.flat)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        for (weights, factor), before in zip(self._scaled, kept, strict=True):
            weights.copy_(torch.lerp(before, weights, factor))
        self._change -= self.flat
        measured = [_norm(self._change), _norm(self.flat)]
        if self.flat.dtype != torch.float32:
            measured.append(torch.count_nonzero(self._change).float())
        change, size, *moved = torch.stack(measured).tolist()
        count = self.flat.numel()
        return Update(lr, change / math.sqrt(count) / lr, size, moved[0] / count if moved else None)

    def groups(self) -> dict[str, dict[str, Any]]:
        """Which parameters decay, which do not, and which are frozen or slowed: name -> counts and names."""
        sizes = {n: p.numel() for n, p in self.named}
        found = {
            "decayed": [n for n, p in self.named if decays(n, p)],
            "not_decayed": [n for n, p in self.named if not decays(n, p)],
        }
        if self.cfg.gain_decay:
            found["gains_decayed"] = [n for n, p in self.named if is_gain(n, p)]
            found["not_decayed"] = [n for n in found["not_decayed"] if n not in found["gains_decayed"]]
        for (name, parameter), piece in ((n, p) for n in self.named for p in self._pieces[n[0]]):
            factor = self._factor(piece)
            if factor != 1.0:  # pieces of fused parameters
                label = f"{'q_k' if piece.projects_qk else 'head'}_rate_x_{factor:g}"
                found.setdefault(label, []).append(f"{name}[{piece.role}]")
                sizes[found[label][-1]] = piece.of(parameter).numel()
        return {
            label: {"tensors": len(names), "parameters": sum(sizes[n] for n in names), "names": names}
            for label, names in found.items()
        }

    def state_dtypes(self) -> str:
        """Types of the optimisers' averages, as they are."""
        tensors = [v for o in self.optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
        return ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.numel() > 1})) or "-"

    def spans(self) -> dict[str, slice]:
        """The place of each parameter in the vector."""
        return {name: span for name, _, span in _spans(self.named)}

    def kept(self) -> dict[str, Tensor]:
        """What the optimisers keep of each weight (averages, momentum), each kind as one vector; 0 where nothing."""
        found: dict[str, Tensor] = {}
        for parameter, state in (item for optimizer in self.optimizers for item in optimizer.state.items()):
            at = parameter.storage_offset()
            for kind, value in state.items():
                if value.dim():  # a number is Adam's count of steps
                    whole = found.setdefault(kind, torch.zeros_like(self.flat))
                    whole[at : at + value.numel()] = value.reshape(-1)
        return found

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def _factor(self, piece: Piece) -> float:
        """What the updates of a piece are multiplied by."""
        if piece.projects_qk:
            return self.cfg.qk_lr_scale
        return self.cfg.head_lr_scale if piece.parameter.startswith("head.") else 1.0

    def _split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Views of the vector for the optimiser: the blocks' matrices (q, k and v apart), and all between them."""
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        if self.cfg.name != "muon":
            return [], [self._view(slice(0, self.flat.numel()))]
        free = 0
        for name, parameter, span in _spans(self.named):
            if name.startswith("blocks.") and decays(name, parameter):
                if free < span.start:
                    rest.append(self._view(slice(free, span.start)))
                rows = [p.stop - p.start for p in self._pieces[name] if p.axis == 0] or [parameter.shape[0]]
                at = span.start
                for count in rows:
                    size = count * parameter[0].numel()
                    matrices.append(self._view(slice(at, at + size), (count, parameter.shape[1])))
                    at += size
                free = span.stop
        if free < self.flat.numel():
            rest.append(self._view(slice(free, self.flat.numel())))
        return matrices, rest

    def _view(self, span: slice, shape: Sequence[int] = (-1,)) -> nn.Parameter:
        """A parameter that is a piece of the vector, and its gradient the same piece of the gradient."""
        parameter = nn.Parameter(self.flat[span].view(*shape))
        parameter.grad = self.grad[span].view(*shape)
        return parameter

    def _partition(self) -> tuple[list[Tensor], list[str]]:
        """Views of the flat gradient, and the part that each belongs to."""
        views: list[Tensor] = []
        owners: list[str] = []
        at = run = 0  # neighbours of one part are one view, which ends at ``at`` and is ``run`` long
        for name, parameter, span in _spans(self.named):
            for piece in self._pieces[name]:
                view, owner = piece.of(self.grad[span].view(parameter.shape)), piece.part
                if piece.axis == 0:
                    grows = run and owners[-1] == owner
                    run = run + view.numel() if grows else view.numel()
                    at += view.numel()
                    view = self.grad[at - run : at]
                    if grows:
                        views[-1] = view
                        continue
                else:
                    at, run = span.stop, 0
                views.append(view)
                owners.append(owner)
        return views, owners


def _norm(vector: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vector, dtype=torch.float32)


def _share_storage(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Make parameters views of one contiguous vector, and return it."""
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    at = 0
    for parameter in parameters:
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    return flat


def _spans(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, slice]]:
    """Each parameter with its name and its place in the vector."""
    at = 0
    for name, parameter in named:
        yield name, parameter, slice(at, at + parameter.numel())
        at += parameter.numel()


def _merged(spans: Iterable[slice]) -> list[slice]:
    """Neighbours as one."""
    found: list[slice] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            span = slice(found.pop().start, span.stop)
        found.append(span)
    return found


Optimizers = list[torch.optim.Optimizer]


def _adam(matrices: list[nn.Parameter], rest: list[nn.Parameter], cfg: OptimConfig) -> Optimizers:
    return [torch.optim.Adam(rest, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), eps=cfg.eps, fused=True)]


def _sgd(matrices: list[nn.Parameter], rest: list[nn.Parameter], cfg: OptimConfig) -> Optimizers:
    return [torch.optim.SGD(rest, lr=cfg.lr, momentum=cfg.momentum, fused=True)]


def _muon(matrices: list[nn.Parameter], rest: list[nn.Parameter], cfg: OptimConfig) -> Optimizers:
    """PyTorch's Muon on matrices, with updates of AdamW's size so that one rate serves both."""
    muon = torch.optim.Muon(
        matrices, lr=cfg.lr, weight_decay=0.0, momentum=cfg.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, *_adam([], rest, cfg)]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], list[nn.Parameter], OptimConfig], Optimizers]] = {
    "adam": _adam,
    "adamw": _adam,
    "sgd": _sgd,
    "muon": _muon,
}
