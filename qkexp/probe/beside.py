"""One layer in one probed step, beside its scores: its weights, their gradient and change, and the block around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qkexp.probe.adapters.base import Capture, Hook
from qkexp.probe.gradients import score_gradient
from qkexp.probe.metrics import headless
from qkexp.probe.rows import CHUNK_BYTES, entropy_bound
from qkexp.probe.weights import Projections, head_norms, largest_gain, norm, product_norm, second_moment

# Groups that need hooks, which a compiled graph does not run: their steps run in eager mode.
HOOKED = {"spectral", "activations", "gradients"}
# Steps of the power iteration on an image's tokens are 2 to this: their first direction stands out.
SQUARINGS = 5


class Beside:
    """Fills ``values``, metric -> (H,), or a scalar where it has no heads; what cannot be measured is not in there.

    ``begin`` is called before the forward passes, ``end`` after forward and backward, ``updated`` after the optimiser.

    Args:
        projections: where the layer's W_q, W_k and W_v are; None: nobody knows.
        block: takes and gives the residual stream; None: nobody knows.
        take: keeps the measured images of an activation, detached.

    Attributes:
        spent: seconds that it took before and during the forward passes.
    """

    def __init__(
        self,
        groups: Sequence[str],
        projections: Projections | None,
        block: nn.Module | None,
        take: Callable[[Tensor], Tensor],
    ):
        known = projections is not None and all(  # a weight that is computed from others is not what an optimiser has
            isinstance(x.weight, nn.Parameter) for x in (projections.q, projections.k, projections.v)
        )
        self.groups, self.block, self.take = set(groups), block, take
        self.projections = projections if known else None
        self.spent = 0.0
        self.values: dict[str, Tensor] = {}
        self._before: list[Tensor] = []  # W_q and W_k that the step found
        self._versions = self._written()
        self._reached: dict[int, int] = {}  # weights that backward brought a gradient: its version then
        self._leaving: list[Tensor] = []  # of each forward pass, (RMS of the block's output)² and how many numbers
        self._sizes: list[Tensor] = []  # of each forward pass, ‖X Xᵀ‖₂ of each image (B,)
        self._tokens = 0
        self._growth: Tensor | None = None  # ‖W_qᵀ W_k‖₂ (H,), biases as a channel

    # ------------------------------------------------------------ before the forward pass

    @torch.no_grad()
    def begin(self) -> list[RemovableHandle]:
        """Look at the weights; hooks for what comes."""
        handles: list[RemovableHandle] = []
        p, block, wanted = self.projections, self.block, self.groups
        if block is not None and "activations" in wanted:
            handles.append(block.register_forward_pre_hook(Hook(self._timed(self._enter))))
            handles.append(block.register_forward_hook(Hook(self._timed(self._leave))))
        if p is not None:
            self._timed(self._look)(p)
            if self._growth is not None and p.source is not None:
                handles.append(p.source.register_forward_pre_hook(Hook(self._timed(self._tokens_of))))
            if "gradients" in wanted:
                weights = {id(x.weight): x.weight for x in (p.q, p.k, p.v) if x.weight.requires_grad}
                handles += [weight.register_post_accumulate_grad_hook(self._reach) for weight in weights.values()]
        return handles

    def _look(self, p: Projections) -> None:
        if "spectral" in self.groups:
            self.values["qk_spectral_norm"] = head_norms(*(x.of(x.weight) for x in (p.q, p.k)))
            if p.source is not None:
                self._growth = head_norms(p.q.affine(), p.k.affine())
        if "gains" in self.groups:
            found = {"q_gain_max": largest_gain(p.q_norm, p.q), "k_gain_max": largest_gain(p.k_norm, p.k)}
            self.values |= {name: gain for name, gain in found.items() if gain is not None}
        if "update" in self.groups:
            self._before = [x.of(x.weight).clone() for x in (p.q, p.k)]

    # ------------------------------------------------------------ hooks

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            began = time.perf_counter()
            call(*args)
            self.spent += time.perf_counter() - began

        return timed

    def _enter(self, _module: nn.Module, args: tuple[object, ...]) -> None:
        x = self._stream(args[0] if args else None)
        if x is not None:
            size = x.abs().flatten(1)
            largest = size.amax(1)
            self._raise("block_in_max", largest.amax())
            self._raise("block_in_peak", (largest / size.median(1).values).amax())

    def _leave(self, _module: nn.Module, _args: object, output: object) -> None:
        y = self._stream(output)
        if y is not None:
            self._leaving.append(torch.stack([y.square().mean(), y.new_full((), float(y.numel()))]))

    def _tokens_of(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert self.projections is not None
        x = self.take(args[0]).float()
        x = x if self.projections.q.bias is None else nn.functional.pad(x, (0, 1), value=1.0)
        self._tokens = x.shape[1]
        images = max(1, CHUNK_BYTES // (4 * self._tokens**2))
        self._sizes.append(torch.cat([product_norm(part, part, SQUARINGS) for part in x.split(images)]))

    def _reach(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self._reached[id(weight)] = weight.grad._version

    def _stream(self, x: object) -> Tensor | None:
        """The measured images of a residual stream, float32; None: it is none."""
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 3 and not x.is_nested:
            return self.take(x).float()
        return None

    # ------------------------------------------------------------ after backward

    @torch.no_grad()
    def end(self, captures: Sequence[Capture], score_scale: Tensor, loss_scale: float | Tensor) -> None:
        """After forward and backward; ``score_scale`` (H,), the loss was multiplied by ``loss_scale``."""
        if self._leaving:
            square, count = torch.stack(self._leaving).unbind(1)
            self.values["block_out_rms"] = ((square * count).sum() / count.sum()).sqrt()
        if self._sizes and self._growth is not None:
            sizes = torch.cat(self._sizes)
            self.values["input_spectral_norm"] = sizes.mean()
            S = score_scale.abs() * self._growth * sizes.unsqueeze(-1)  # (B, H)
            keys = torch.full_like(S, float(self._tokens))
            self.values["entropy_bound_spectral"] = torch.where(S.isfinite(), entropy_bound(S, keys), math.nan).mean(0)
        if "gradients" in self.groups:
            self._gradients(captures, loss_scale)

    def _gradients(self, captures: Sequence[Capture], loss_scale: float | Tensor) -> None:
        p = self.projections
        for name, rows in () if p is None else (("q", p.q), ("k", p.k), ("v", p.v)):
            grad, version = rows.weight.grad, self._reached.get(id(rows.weight))
            if grad is not None and version is not None:
                length = norm([rows.of(grad)])
                if grad._version != version:  # clipped, which is well, or cleared, which is no gradient of 0
                    length = torch.where(grad.count_nonzero() > 0, length, math.nan)
                self.values[f"w_{name}_grad_norm"] = length / loss_scale
        squares = [
            score_gradient(c.q, c.k, c.v, c.grad, c.scale, c.bias, c.mask, c.spec.cap)
            for c in captures
            if c.v is not None and c.grad is not None and not c.dropout
        ]
        if squares and len(squares) == len(captures):
            self.values["score_grad_norm"] = torch.stack(squares).sum(0).sqrt() / loss_scale

    # ------------------------------------------------------------ after the optimiser

    def has(self, weights: set[int]) -> bool:
        """Whether one of the parameters, by their ids, is a projection of this layer."""
        p = self.projections
        return p is not None and any(id(x.weight) in weights for x in (p.q, p.k, p.v))

    def was_updated(self) -> bool:
        """Whether something wrote into the weights since the step began."""
        return self._versions != self._written()

    @torch.no_grad()
    def updated(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """After the optimiser's step."""
        p = self.projections
        if p is None:
            return
        if self._before:
            now = [x.of(x.weight) for x in (p.q, p.k)]
            change = norm(a.float() - b.float() for a, b in zip(now, self._before, strict=True))
            self.values["qk_update_ratio"] = change / norm(self._before)
            self._before = []
        if "adam" in self.groups:
            for name, rows in (("q", p.q), ("k", p.k)):
                found = second_moment(optimizers, rows.weight)
                if found is not None:
                    v, eps = found
                    self.values[f"{name}_grad_rms_eps"] = rows.of(v).float().mean((1, 2)).sqrt() / eps

    def _written(self) -> list[int]:
        p = self.projections
        return [] if p is None else [x.weight._version for x in (p.q, p.k, p.v) if not x.weight.is_inference()]

    def _raise(self, name: str, value: Tensor) -> None:
        """The largest of all forward passes."""
        self.values[name] = torch.maximum(self.values[name], value) if name in self.values else value


def with_room(values: Tensor, metrics: Sequence[str]) -> Tensor:
    """(metric, layer, head) of the first of ``metrics`` -> of all of them, and of head -1 where one has no heads."""
    measured, layers, heads = values.shape
    out = values.new_full((len(metrics), layers, heads + headless(metrics)), math.nan)
    out[:measured, :, -heads:] = values
    return out


def write(values: Tensor, metrics: Sequence[str], found: Mapping[str, Tensor]) -> None:
    """Put what was found of a layer into its ``values`` (metric, head); what is not finite is absent."""
    for name, value in found.items():
        row = values[metrics.index(name)]
        row = row[:1] if value.dim() == 0 else row[-value.numel() :]
        row.copy_(torch.where(value.isfinite(), value, math.nan))
