"""A score on its way from q·k to the softmax, and its weights on theirs to v: what each torch function does to it.

Known are factors (numbers, or one a head), what is added, masks in their usual spellings, tanh soft-caps,
reshapes and casts. What no :class:`~qkexp.probe.adapters.base.Capture` can say is :class:`Lost`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkexp.model.core import Scale
from qkexp.probe.adapters.base import frozen
from qkexp.probe.rows import MASKED

TIMES = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"}
DIVIDED = {"div", "__truediv__", "div_", "__itruediv__", "true_divide", "divide"}
PLUS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
MINUS = {"sub", "__sub__", "sub_", "__isub__", "subtract"}
FILLED = {"masked_fill", "masked_fill_", "__setitem__"}
SAME = {
    "view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "clone",
    "to", "type", "type_as", "float", "half", "bfloat16",
}  # fmt: skip


class Lost(Exception):
    """Something was done to a score that cannot be told by scale, bias, mask and cap."""


@dataclass
class Score:
    """q, k, and what has been done to their product so far."""

    q: Tensor
    k: Tensor
    now: Tensor  # what the product has become
    hiding: float | None  # as :func:`split` takes it
    masks: set[int] = field(default_factory=set)  # storages of tensors that only hide
    factors: list[float | Tensor] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)
    shown: list[Tensor] = field(default_factory=list)  # bool, True where a key may be attended to
    cap: float | None = None
    squashed: bool = False  # between tanh and the factor that undoes its division
    weights: bool = False  # past the softmax
    dropout: bool = False

    def follow(self, name: str, place: int, args: Any, kwargs: Any, out: Any) -> bool:
        """A function was called with the score as argument ``place``: whether its output is now the score.

        A function that only looks, as ``amax``, leaves it where it is.
        """
        other = kwargs.get("other", args[1 - place] if len(args) > 1 and place < 2 else None)
        if name in SAME:
            followed = place == 0
        elif self.weights:
            followed = self._drop(args, kwargs) if name == "dropout" else False
        elif name == "softmax":
            followed = self._weigh(args, kwargs)
        elif name in TIMES | DIVIDED and other is not None:
            followed = self._multiply(other if name in TIMES else 1.0 / other, place, name)
        elif name in PLUS | MINUS and other is not None:
            followed = self._add(-other if name in MINUS else other, place, name, kwargs)
        elif name == "tanh":
            followed = self._squash()
        elif name in FILLED:
            followed = self._hide(_inverse(kwargs.get("mask", args[1])), kwargs.get("value", args[-1]))
        elif name == "where":
            show, value = (args[0], args[2]) if place == 1 else (args[1], args[2]) if place == 0 else (None, None)
            followed = self._hide(show, value)
        else:
            followed = False
        if followed and isinstance(out, Tensor):
            self.now = out
        return followed

    def scale(self) -> Scale:
        """All that multiplies q·k, as a number or (H,); a division that a cap undoes cancels."""
        product: float | Tensor = 1.0
        for factor in self.factors:
            product = product * (factor.flatten().float() if isinstance(factor, Tensor) else factor)
        return product

    @property
    def heads(self) -> int | None:
        """The number of heads, where the score has an axis for them."""
        return self.now.shape[-3] if self.now.dim() > 3 else None

    def _multiply(self, factor: float | Tensor, place: int, name: str) -> bool:
        if (name in DIVIDED and place == 1) or self.shown:
            raise Lost
        if isinstance(factor, Tensor) and factor.numel() > 1 and tuple(factor.shape[-3:]) != (self.now.shape[-3], 1, 1):
            raise Lost  # not one a head
        if self.squashed:
            if isinstance(factor, Tensor):
                raise Lost
            self.cap, self.squashed = float(factor), False
        elif self.cap is not None:
            raise Lost
        factor = frozen(factor) if isinstance(factor, Tensor) else factor
        self.biases = [b * factor for b in self.biases]
        self.factors.append(factor)
        return True

    def _add(self, other: float | Tensor, place: int, name: str, kwargs: Any) -> bool:
        if (name in MINUS and place == 1) or kwargs.get("alpha", 1) != 1:
            raise Lost
        if not isinstance(other, Tensor):
            other = torch.full((1, 1), float(other), device=self.now.device)
        elif other.dim() and other.shape[-1] == 1 < self.now.shape[-1]:
            return True  # the same for all keys of a row, as a subtracted maximum: softmax does not see it
        if other.untyped_storage().data_ptr() in self.masks:
            self.shown.append(flat(other > threshold(self.hiding), self.now))
            return True
        bias, shown = split(other.detach(), self.hiding)
        if bias is not None and (self.squashed or self.cap is not None):
            raise Lost  # a bias on a capped score
        self.biases += [] if bias is None else [flat(bias, self.now)]
        self.shown += [] if shown is None else [flat(shown, self.now)]
        return True

    def _squash(self) -> bool:
        if self.shown or self.cap is not None:
            raise Lost  # a cap on a masked score gives hidden keys weight
        self.squashed = True
        return True

    def _hide(self, show: Any, value: Any) -> bool:
        value = value.item() if isinstance(value, Tensor) and value.device.type == "cpu" and not value.dim() else value
        if not isinstance(show, Tensor) or not isinstance(value, float | int) or value > threshold(self.hiding):
            raise Lost
        self.shown.append(flat(show, self.now))
        return True

    def _weigh(self, args: Any, kwargs: Any) -> bool:
        if kwargs.get("dim", args[1] if len(args) > 1 else None) not in (-1, self.now.dim() - 1):
            raise Lost  # weights over something else than keys
        self.cap = 1.0 if self.squashed else self.cap
        self.weights = True
        return True

    def _drop(self, args: Any, kwargs: Any) -> bool:
        given = {"p": 0.5, "training": True} | dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
        self.dropout |= bool(given["training"] and given["p"] > 0)
        return True


def _inverse(hide: Any) -> Tensor | None:
    return ~hide if isinstance(hide, Tensor) and hide.dtype == torch.bool else None


def flat(x: Tensor, score: Tensor) -> Tensor:
    """What broadcasts to a score (..., H, N, M) -> to (B, H, N, M), with the leading axes as one."""
    x = x.detach().reshape((1,) * (score.dim() - x.dim()) + x.shape)
    if x.dim() <= 4:
        return x
    lead = score.shape[:-3] if any(n > 1 for n in x.shape[:-3]) else (1,) * (x.dim() - 3)
    return x.expand(*lead, *x.shape[-3:]).flatten(0, -4)


def threshold(hiding: float | None) -> float:
    """What is added to a pair, up to which it is hidden: half of ``hiding``, as a bias may stand on it."""
    return MASKED if hiding is None else hiding / 2


def split(additive: Tensor, hiding: float | None) -> tuple[Tensor | None, Tensor | None]:
    """What is added to a score -> the finite bias, and which keys are shown; None for nothing.

    ``hiding``: the number that a model adds to hide a pair, where it is small; None for -1e4 and below. That
    bias or mask are nothing is only known where looking does not wait for a device.
    """
    shown = additive > threshold(hiding)
    bias = additive.masked_fill(~shown, 0.0) if hiding is None else torch.where(shown, additive, additive - hiding)
    if additive.device.type != "cpu":
        return bias, shown
    return bias if bias.any() else None, None if shown.all() else shown


def as_product(equation: str, a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """An einsum as the matrix product (a, b, out) that it is: of q and k, bhnd,bhmd->bhnm, or of weights and v.

    Whatever the letters, and wherever heads stand in q, k, v and the output; None: it is neither.
    """
    inputs, _, c = equation.replace(" ", "").partition("->")
    x, _, y = inputs.partition(",")
    if len(set(x)) != len(x) or len({len(x), len(y), len(c)}) != 1 or len(c) < 3:
        return None
    shared = [letter for letter in c if letter in x and letter in y]
    summed, rows, columns = ({*x, *y} - {*c}, {*x} - {*y}, {*y} - {*x})
    if not (len(summed) == len(rows) == len(columns) == 1 and len(shared) == len(c) - 2):
        return None
    d, n, m = summed.pop(), rows.pop(), columns.pop()
    if c[-2:] == n + m and c[:-2] == "".join(shared):  # scores: heads before queries before keys
        lead = c[:-2]
        return _ordered(a, x, lead + n + d), _ordered(b, y, lead + m + d).transpose(-2, -1), out
    lead = x[:-2]
    if x == lead + n + d and {*lead} == {*shared}:  # weights, over the keys d, times v
        return a, _ordered(b, y, lead + d + m), _ordered(out, c, lead + n + m)
    return None


def _ordered(x: Tensor, letters: str, wanted: str) -> Tensor:
    return x if letters == wanted else x.permute([letters.index(letter) for letter in wanted])
