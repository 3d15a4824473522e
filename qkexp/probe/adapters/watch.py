"""Follows a score through a module's own forward pass: from q·k over scale, bias, mask and cap to the output.

A :class:`Watch` sees the torch functions that are called while it is entered, and changes none of them. It
recognises a call of ``F.scaled_dot_product_attention``, and scores written out: a product of two activations,
what multiplies it, what is added to it, a softmax, and the product of the weights with v. What it does not
recognise it does not follow; then the layer did not fire, and is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from qkexp.model.core import Scale, ScoreSpec
from qkexp.probe.adapters.base import Capture, Hook, Listener, Sink, frozen
from qkexp.probe.rows import MASKED
from qkexp.probe.stats import vector_norms

PRODUCTS = {"matmul", "__matmul__", "bmm"}
TIMES = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"}
DIVIDED = {"div", "__truediv__", "div_", "__itruediv__", "true_divide", "divide"}
PLUS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
MINUS = {"sub", "__sub__", "sub_", "__isub__", "subtract"}
HIDING = {"masked_fill", "masked_fill_", "__setitem__", "where"}
SAME = {
    "view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "clone",
    "to", "type", "type_as", "float", "half", "bfloat16",
}  # fmt: skip


@dataclass
class Score:
    """A score on its way to the softmax, and its weights on theirs to v."""

    q: Tensor
    k: Tensor
    now: Tensor  # what the score has become
    factors: list[float | Tensor]
    biases: list[Tensor] = field(default_factory=list)
    shown: list[Tensor] = field(default_factory=list)  # bool, True where a key may be attended to
    cap: float | None = None
    squashed: bool = False  # between tanh and the factor that undoes its division
    weights: bool = False  # past the softmax
    dropout: bool = False


class Watch(TorchFunctionMode):
    """Hands each attention that is computed while it is entered to ``found``.

    ``masks`` are tensors that only hide: 0 shows a key, ``hidden`` and below hides it.
    """

    def __init__(self, found: Callable[..., None], hidden: float = MASKED, masks: Sequence[Tensor] = ()):
        super().__init__()
        self.found, self.hidden = found, hidden
        self.masks = {m.untyped_storage().data_ptr() for m in masks}
        self.scores: dict[int, Score] = {}
        # outputs of a function that a product may be made of -> (output, kept alive so that its id is its own; input)
        self.scaled: dict[int, tuple[Tensor, Tensor, float | Tensor]] = {}
        self.normalized: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            call = sdpa_call(self.hidden, out, *args, **kwargs)
            self.found(**call, **self._raw(call["q"], call["k"]))
        elif name in PRODUCTS:
            self._product(args[0], args[1], out)
        elif name == "normalize" and isinstance(out, Tensor):
            self.normalized[id(out)] = out, args[0]
        elif args and (place := next((i for i, a in enumerate(args[:3]) if id(a) in self.scores), None)) is not None:
            self._follow(name, place, args, kwargs, out)
        elif name in TIMES and isinstance(args[0], Tensor) and isinstance(args[1], float):
            self.scaled[id(out)] = out, args[0], args[1]
        return out

    def _product(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        score = self.scores.pop(id(a), None)
        if score is not None and score.weights:
            self.found(
                q=score.q,
                k=score.k,
                v=b,
                scale=_product_of(score.factors),
                biases=score.biases,
                shown=score.shown,
                cap=score.cap,
                output=out,
                dropout=score.dropout,
                heads=score.now.shape[-3] if score.now.dim() > 3 else None,
                **self._raw(score.q, score.k),
            )
        elif a.dim() >= 3 and b.dim() == a.dim():
            _, q, factor = self.scaled.get(id(a), (a, a, 1.0))
            k = b.transpose(-2, -1)
            base = self._transposed(b)
            self.scores[id(out)] = Score(q, k if base is None else base, out, [factor])

    def _transposed(self, b: Tensor) -> Tensor | None:
        """The normalised k of which b is the transpose, as the object that it was."""
        return next((o for o, _ in self.normalized.values() if _same_memory(o, b)), None)

    def _raw(self, q: Tensor, k: Tensor) -> dict[str, Tensor | None]:
        """What q and k were before ``F.normalize``."""
        return {"q_raw": self.normalized.get(id(q), (q, None))[1], "k_raw": self.normalized.get(id(k), (k, None))[1]}

    def _follow(self, name: str, place: int, args: Any, kwargs: Any, out: Any) -> None:
        """A function was called with a score; where it is known, the score has become its output."""
        score = self.scores[id(args[place])]
        other = args[1 - place] if len(args) > 1 and place < 2 else kwargs.get("other")
        if name in SAME and place == 0:
            pass
        elif score.weights and name == "dropout":
            given = {"p": 0.5, "training": True} | dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            score.dropout |= bool(given["training"] and given["p"] > 0)
        elif score.weights:
            return
        elif name == "softmax":
            score.weights = True
        elif name in TIMES and other is not None:
            self._scale(score, other)
        elif name in DIVIDED and place == 0 and other is not None:
            self._scale(score, 1.0 / other)
        elif name in PLUS | MINUS and other is not None and not kwargs.get("alpha"):
            if name in MINUS and place == 1:
                return
            self._add(score, -other if name in MINUS else other)
        elif name == "tanh" and not score.biases:
            score.squashed = True
        elif name in HIDING and not self._hide(score, name, args, kwargs):
            return
        if name == "__setitem__":  # in place, and returns nothing
            return
        if name in PLUS | MINUS | TIMES | DIVIDED | HIDING | SAME | {"softmax", "tanh", "dropout"}:
            del self.scores[id(score.now)]
            score.now = out
            self.scores[id(out)] = score

    def _scale(self, score: Score, factor: float | Tensor) -> None:
        if score.squashed:  # cap · tanh(z / cap): the division is undone
            assert not isinstance(factor, Tensor)
            score.cap, score.squashed = float(factor), False
        else:
            score.biases = [b * factor for b in score.biases]
        score.factors.append(factor)

    def _add(self, score: Score, other: float | Tensor) -> None:
        if not isinstance(other, Tensor):
            other = torch.full((1, 1), float(other), device=score.now.device)
        elif other.dim() and other.shape[-1] == 1 < score.now.shape[-1]:
            return  # the same for all keys of a row, as a subtracted maximum: softmax does not see it
        if other.untyped_storage().data_ptr() in self.masks:
            score.shown.append(flat(other > self.hidden, score.now))
            return
        bias, shown = split(other.detach(), self.hidden)
        score.biases += [] if bias is None else [flat(bias, score.now)]
        score.shown += [] if shown is None else [flat(shown, score.now)]

    def _hide(self, score: Score, name: str, args: Any, kwargs: Any) -> bool:
        """masked_fill(z, hide, value), z[hide] = value, where(show, z, value)."""
        if name == "where":
            show, value = args[0], args[2] if len(args) > 2 else None
        elif len(args) == 3:
            show, value = ~args[1] if isinstance(args[1], Tensor) and args[1].dtype == torch.bool else None, args[2]
        else:
            show, value = ~kwargs["mask"] if "mask" in kwargs else ~args[1], kwargs.get("value")
        value = value.item() if isinstance(value, Tensor) and value.device.type == "cpu" and not value.dim() else value
        if show is None or not isinstance(value, float | int) or value > self.hidden:
            return False
        score.shown.append(flat(show, score.now))
        return True


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def _product_of(factors: list[float | Tensor]) -> Scale:
    """All that multiplies q·k, as a number or (H,); what was squashed and undone cancels."""
    out: float | Tensor = 1.0
    for factor in factors:
        out = out * (frozen(factor).flatten().float() if isinstance(factor, Tensor) else factor)
    return out


def spread(x: Tensor, score: Tensor) -> Tensor:
    """A tensor that broadcasts to a score, with as many axes."""
    return x.detach().reshape((1,) * (score.dim() - x.dim()) + x.shape)


def flat(x: Tensor, score: Tensor) -> Tensor:
    """What broadcasts to a score (..., H, N, M) -> to (B, H, N, M), with the leading axes as one."""
    x = spread(x, score)
    if x.dim() <= 4:
        return x
    lead = score.shape[:-3] if any(n > 1 for n in x.shape[:-3]) else (1,) * (x.dim() - 3)
    return x.expand(*lead, *x.shape[-3:]).flatten(0, -4)


def split(additive: Tensor, hidden: float) -> tuple[Tensor | None, Tensor | None]:
    """What is added to a score -> the finite bias, and which keys are shown; None for nothing.

    That it is nothing is only known where looking does not wait for a device.
    """
    shown = additive > hidden
    bias = additive.masked_fill(~shown, 0.0)
    if additive.device.type != "cpu":
        return bias, shown
    return bias if bias.any() else None, None if shown.all() else shown


def sdpa_call(
    hidden: float,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """A call of ``F.scaled_dot_product_attention`` in the terms of :func:`report`."""
    biases, shown = [], []
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shown.append(flat(attn_mask, query))
    elif attn_mask is not None:
        bias, show = split(attn_mask.detach(), hidden)
        biases += [] if bias is None else [flat(bias, query)]
        shown += [] if show is None else [flat(show, query)]
    if is_causal:
        N, M = query.shape[-2], key.shape[-2]
        shown.append(torch.ones(N, M, dtype=torch.bool, device=query.device).tril())
    return {
        "q": query,
        "k": key,
        "v": value,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "biases": biases,
        "shown": shown,
        "cap": None,
        "output": output,
        "dropout": dropout_p > 0.0,
    }


def report(
    listener: Listener,
    sink: Sink,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Scale,
    biases: Sequence[Tensor] = (),
    shown: Sequence[Tensor] = (),
    cap: float | None = None,
    output: Tensor | None = None,
    dropout: bool = False,
    q_raw: Tensor | None = None,
    k_raw: Tensor | None = None,
    q_length: Tensor | None = None,
    k_length: Tensor | None = None,
    heads: int | None = None,
) -> None:
    """Make a :class:`Capture` of tensors as a module has them, and hand it to ``sink``.

    Activations are (..., H, N, d), or (B·H, N, d) where ``heads`` are given, else (B, N, d) of one head.
    """

    def cut(x: Tensor) -> Tensor:
        return listener.take(_four(frozen(x), heads))

    def join(parts: Sequence[Tensor], how: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
        if not parts:
            return None
        whole = parts[0]
        for part in parts[1:]:
            whole = how(whole, part)
        whole = _four_mask(whole, heads)
        return listener.take(whole) if whole.shape[0] > 1 else whole.detach()

    if q_length is None and q_raw is not None:
        q_length = vector_norms(cut(q_raw)).transpose(1, 2)
    if k_length is None and k_raw is not None:
        k_length = vector_norms(cut(k_raw)).transpose(1, 2)
    bias, mask = join(biases, torch.add), join(shown, torch.logical_and)
    capture = Capture(cut(q), cut(k), q_length, k_length, scale, ScoreSpec(cap), bias, mask, dropout=dropout)
    if listener.checking:
        capture.v = cut(v)
        capture.output = None if output is None else cut(output)
    sink(capture)


def heads_of(module: nn.Module | None) -> int | None:
    """The number of heads that a module says it has."""
    named = (getattr(module, name, None) for name in ("num_heads", "heads", "n_head", "num_attention_heads"))
    return next((n for n in named if isinstance(n, int)), None)


def _four(x: Tensor, heads: int | None) -> Tensor:
    """(B, H, N, d): heads stand before the rows, or, where windows stand there, after the images."""
    if x.dim() > 4 and heads == x.shape[1]:
        x = x.movedim(1, -3)
    if x.dim() == 3:
        return x.unflatten(0, (-1, heads)) if heads and x.shape[0] % heads == 0 else x.unsqueeze(1)
    return x[None, None] if x.dim() == 2 else x.flatten(0, -4)


def _four_mask(x: Tensor, heads: int | None) -> Tensor:
    if x.dim() == 3 and x.shape[0] > 1:
        return _four(x, heads)
    return x.reshape((1,) * (4 - x.dim()) + x.shape)


class Lengths:
    """‖q‖ or ‖k‖ of the projection, from the input of a norm that stands between: (B, N, H)."""

    def __init__(self, module: nn.Module, listener: Listener, heads_first: bool):
        self.kept: dict[str, Tensor] = {}
        self.handles = []
        for name in ("q", "k"):
            norm = getattr(module, f"{name}_norm", None)
            if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
                self.handles.append(norm.register_forward_pre_hook(Hook(self._measure(name, listener, heads_first))))

    def _measure(self, name: str, listener: Listener, heads_first: bool) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if listener.active:
                x = vector_norms(listener.take(args[0]))
                self.kept[f"{name}_length"] = x.transpose(1, 2) if heads_first else x

        return hook

    def pop(self) -> dict[str, Tensor]:
        kept, self.kept = self.kept, {}
        return {name: x for name, x in kept.items() if x.dim() == 3}


def watch(
    module: nn.Module,
    listener: Listener,
    sink: Sink,
    *,
    hidden: float = MASKED,
    masks: Sequence[str] = (),
    heads_first: bool = True,
) -> list[RemovableHandle]:
    """Watch each forward pass of a module; ``masks`` are names of arguments that only hide keys.

    ``heads_first``: its ``q_norm`` and ``k_norm`` receive (B, H, N, d), else (B, N, H, d).
    """
    lengths = Lengths(module, listener, heads_first)
    heads = heads_of(module)
    entered: list[Watch] = []

    def found(**seen: Any) -> None:
        seen["heads"] = heads or seen.get("heads")
        report(listener, sink, **seen | lengths.pop())

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if listener.active:
            given = [kwargs.get(name, args[1] if len(args) > 1 else None) for name in masks]
            entered.append(Watch(found, hidden, [m for m in given if isinstance(m, Tensor)]))
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    return [
        *lengths.handles,
        module.register_forward_pre_hook(Hook(enter), with_kwargs=True),
        module.register_forward_hook(Hook(leave), always_call=True),
    ]
