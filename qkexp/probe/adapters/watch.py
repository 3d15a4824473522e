"""Follows a score through a module's own forward pass: from q·k over scale, bias, mask and cap to the output.

A :class:`Watch` sees the torch functions that are called while it is entered, and changes none of them. It
recognises a call of ``F.scaled_dot_product_attention``, and scores written out (:mod:`.score`): a product of two
activations, what multiplies it, what is added to it, a softmax, and the product of the weights with v. What it
does not recognise it does not follow; then the layer did not fire, and is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from qkexp.model.core import Scale, ScoreSpec
from qkexp.probe.adapters.base import Capture, Hook, Listener, Sink, frozen
from qkexp.probe.adapters.score import DIVIDED, TIMES, Lost, Score, as_product, flat, split
from qkexp.probe.stats import vector_norms

PRODUCTS = {"matmul", "__matmul__", "bmm"}


class Watch(TorchFunctionMode):
    """Hands each attention that is computed while it is entered to ``found``.

    ``masks`` are tensors that only hide; ``hiding`` is what they add, where it is a small number.
    """

    def __init__(self, found: Callable[..., None], hiding: float | None = None, masks: Sequence[Tensor] = ()):
        super().__init__()
        self.found, self.hiding = found, hiding
        self.masks = {m.untyped_storage().data_ptr() for m in masks}
        self.scores: dict[int, Score] = {}  # by the id of what they have become, which they keep alive
        # what q and k were before they were scaled or normalised: id of the output -> (output, input, factor)
        # (or what has become of it since, by its version)
        self.scaled: dict[int, tuple[Tensor, Tensor, float, int]] = {}
        self.normalized: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._see(getattr(func, "__name__", ""), args, kwargs, out)
        return out

    def _see(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if name == "scaled_dot_product_attention":
            call = sdpa_call(self.hiding, out, *args, **kwargs)
            self.found(**call, **self._raw(call["q"], call["k"]))
        elif name in PRODUCTS and len(args) > 1:
            self._product(args[0], args[1], out)
        elif name == "einsum" and len(args) == 3 and isinstance(args[0], str):
            product = as_product(args[0], args[1], args[2], out)
            if product is not None:
                self._product(*product)
        elif name == "normalize" and args and isinstance(out, Tensor):
            self.normalized[id(out)] = out, args[0]
        elif (place := next((i for i, a in enumerate(args[:3]) if id(a) in self.scores), None)) is not None:
            self._follow(name, place, args, kwargs, out)
        elif name in TIMES | DIVIDED and len(args) > 1 and isinstance(args[1], float) and out is not args[0]:
            self.scaled[id(out)] = out, args[0], args[1] if name in TIMES else 1.0 / args[1], version(out)

    def _product(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        score = self.scores.pop(id(a), None)
        if score is not None and score.weights:
            self.found(
                q=score.q,
                k=score.k,
                v=b,
                scale=score.scale(),
                biases=score.biases,
                shown=score.shown,
                cap=score.cap,
                output=out,
                dropout=score.dropout,
                heads=score.heads,
                **self._raw(score.q, score.k),
            )
        elif a.dim() >= 3 and b.dim() == a.dim():
            _, q, factor, then = self.scaled.get(id(a), (a, a, 1.0, version(a)))
            q, factor = (q, factor) if version(a) == then else (a, 1.0)
            # the normalised k of which b is the transpose, as the object that it was
            k = next((k for k, _ in self.normalized.values() if _same_memory(k, b)), b.transpose(-2, -1))
            self.scores[id(out)] = Score(q, k, out, self.hiding, self.masks, [factor])

    def _raw(self, q: Tensor, k: Tensor) -> dict[str, Tensor | None]:
        """What q and k were before ``F.normalize``."""
        return {"q_raw": self.normalized.get(id(q), (q, None))[1], "k_raw": self.normalized.get(id(k), (k, None))[1]}

    def _follow(self, name: str, place: int, args: Any, kwargs: Any, out: Any) -> None:
        score = self.scores[id(args[place])]
        try:
            followed = score.follow(name, place, args, kwargs, out)
        except Lost:
            del self.scores[id(args[place])]
            return
        if followed and isinstance(out, Tensor):  # z[hide] = value returns nothing
            del self.scores[id(args[place])]
            self.scores[id(out)] = score


def version(x: Tensor) -> int:
    """Counts in-place operations, where PyTorch does."""
    return 0 if x.is_inference() else x._version


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def sdpa_call(
    hiding: float | None,
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
        bias, show = split(attn_mask.detach(), hiding)
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
    hiding: float | None = None,
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
    if listener.checking or listener.gradients:
        capture.v, capture.hiding = cut(v), hiding
    if listener.checking:  # copies: what follows may write into them
        capture.v = cut(v).clone()
        capture.output = None if output is None else cut(output).clone()
    if listener.gradients and output is not None:
        capture.await_gradient(output, cut)
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
    hiding: float | None = None,
    masks: Sequence[str] = (),
    heads_first: bool = True,
) -> list[RemovableHandle]:
    """Watch each forward pass of a module; ``masks`` are names of arguments that only hide keys, by ``hiding``.

    ``heads_first``: its ``q_norm`` and ``k_norm`` receive (B, H, N, d), else (B, N, H, d).
    """
    lengths = Lengths(module, listener, heads_first)
    heads = heads_of(module)
    entered: list[Watch] = []

    def found(**seen: Any) -> None:
        seen["heads"] = heads or seen.get("heads")
        report(listener, sink, hiding=hiding, **seen | lengths.pop())

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if listener.active:
            given = [kwargs.get(name, args[1] if len(args) > 1 else None) for name in masks]
            entered.append(Watch(found, hiding, [m for m in given if isinstance(m, Tensor)]))
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    return [
        *lengths.handles,
        module.register_forward_pre_hook(Hook(enter), with_kwargs=True),
        module.register_forward_hook(Hook(leave), always_call=True),
    ]
