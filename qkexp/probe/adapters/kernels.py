"""Listens to PyTorch's attention functions while a step is probed, and computes what it did without.

The functions are wrapped where loaded modules hold them, and put back when the step ends. So no hook stands on
``nn.MultiheadAttention`` or ``nn.TransformerEncoderLayer``, whose native fast path any hook would switch off.
A call belongs to the innermost module of the model that is being executed, which the call stack knows.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkexp.probe.adapters.base import Capture, Listener, Sink
from qkexp.probe.adapters.watch import heads_of, report, sdpa_call

MHA = F.multi_head_attention_forward
MHA_ARGUMENTS = inspect.signature(MHA)


class Kernels:
    """``sink_of(module, inside)`` says who wants what a module of the model shows; None: nobody does.

    ``inside``: the call was made by ``F.multi_head_attention_forward``, where a :class:`Watch` does not look.
    """

    referring = False  # a reference is being computed, by whichever probe: it is no attention of a model

    def __init__(self, listener: Listener, sink_of: Callable[[nn.Module, bool], Sink | None]):
        self.listener, self.sink_of = listener, sink_of
        self.calls = 0  # of scaled_dot_product_attention that were handed on
        self.inside = False
        self.instead: Sink | None = None  # takes what the reference computes
        self.heads: int | None = None  # of the module that is being executed, where it says
        self.wrappers: dict[Callable, Callable] = {
            F.scaled_dot_product_attention: self._sdpa,
            F.multi_head_attention_forward: self._mha,
            torch._native_multi_head_attention: self._native_mha,
            torch._transformer_encoder_layer_fwd: self._native_layer,
        }
        self.places = list(places(self.wrappers))  # now: within a step of another probe they hold its wrappers

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The functions are wrapped inside."""
        changed = []
        try:
            for holder, name, function in self.places:
                current = holder[name]
                changed.append((holder, name, current))
                holder[name] = functools.wraps(current)(functools.partial(self.wrappers[function], current))
            yield
        finally:
            for holder, name, current in reversed(changed):
                holder[name] = current

    def _wanted(self, inside: bool = False) -> Sink | None:
        """Who wants the running call; nobody where checkpointing recomputes it inside backward."""
        if torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling():
            return None
        module = executing()
        if isinstance(module, nn.TransformerEncoderLayer):
            module = module.self_attn
        self.heads = heads_of(module)
        return None if module is None else self.sink_of(module, inside or self.inside)

    def _sdpa(self, original: Callable, *args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        sink = self.instead if Kernels.referring else self._wanted() if self.listener.active else None
        if sink is not None and not out.is_nested:
            self.calls += 1
            report(self.listener, sink, heads=self.heads, **sdpa_call(None, out, *args, **kwargs))
        return out

    def _mha(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        calls, inside = self.calls, self.inside
        self.inside = True
        try:
            out = original(*args, **kwargs)
        finally:
            self.inside = inside
        if self.listener.active and not Kernels.referring and self.calls == calls:  # need_weights: scores written out
            sink = self._wanted(inside=True)
            if sink is not None:
                given = MHA_ARGUMENTS.bind(*args, **kwargs).arguments
                dropout = given["dropout_p"] > 0 and given.get("training", True)
                self._reference(given, sink, out[0], dropout)
        return out

    def _native_mha(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        sink = self._wanted() if self.listener.active and not kwargs else None
        if sink is not None:
            query, key, value, E, H, in_w, in_b, out_w, out_b, mask, *_ = args
            same = (query, key, value, in_w, in_b, out_w, out_b)
            self._reference(_mha_call(same, E, H, mask, args[12]), sink, out[0].transpose(0, 1))
        return out

    def _native_layer(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        sink = self._wanted() if self.listener.active and not kwargs else None
        if sink is not None:
            layer = EncoderLayer(*args)
            x, mask, kind = layer.inputs()
            same = (x, x, x, layer.in_w, layer.in_b, layer.out_w, layer.out_b)
            given = _mha_call(same, layer.E, layer.heads, mask, kind)
            produced = None if out.is_nested else out.transpose(0, 1)
            self._reference(given, sink, produced, then=layer.rest)
        return out

    @torch.no_grad()
    def _reference(
        self,
        given: dict[str, Any],
        sink: Sink,
        produced: Tensor | None,
        dropout: bool = False,
        then: Callable[[Tensor], Tensor] = lambda y: y,
    ) -> None:
        """Compute one attention again as PyTorch's own function does, to see its q̂, k̂ and mask.

        ``produced`` (L, B, E) is what the model got, after the output projection and ``then``.
        """
        given = {**given, "need_weights": False, "training": False}
        taken: list[Capture] = []
        self.instead, Kernels.referring = taken.append, True
        try:
            MHA(**given)
        finally:
            self.instead, Kernels.referring = None, False
        weight, bias = given["out_proj_weight"].clone(), given["out_proj_bias"]
        bias = None if bias is None else bias.clone()
        for capture in taken:
            if self.listener.checking:
                capture.output, capture.dropout = None, dropout
                if produced is not None:
                    produced = produced if produced.dim() == 3 else produced.unsqueeze(1)
                    capture.output = self.listener.take(produced.transpose(0, 1)).clone()
                    capture.finish = functools.partial(_project, weight, bias, then)
            sink(capture)


def _project(weight: Tensor, bias: Tensor | None, then: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """(B, H, N, d) -> (B, N, E), in float32."""
    y = y.transpose(1, 2).flatten(2)
    return then(F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype)))


def _mha_call(tensors: tuple[Any, ...], E: int, H: int, mask: Tensor | None, kind: int | None) -> dict[str, Any]:
    """The arguments of ``F.multi_head_attention_forward`` for a call of a native kernel, batch first.

    ``kind`` of the mask: 0 (L, L) over pairs, 1 (B, S) over keys, 2 (B, H, L, L) both.
    """
    query, key, value, in_w, in_b, out_w, out_b = tensors
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
    pairs = mask.flatten(0, 1) if mask is not None and kind == 2 else mask if kind == 0 else None
    return {
        "query": query,
        "key": key,
        "value": value,
        "embed_dim_to_check": E,
        "num_heads": H,
        "in_proj_weight": in_w,
        "in_proj_bias": in_b,
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": out_w,
        "out_proj_bias": out_b,
        "attn_mask": pairs,
        "key_padding_mask": mask if kind == 1 else None,
    }


class EncoderLayer:
    """The arguments of ``torch._transformer_encoder_layer_fwd``, and what it does around its attention."""

    def __init__(
        self, src: Tensor, E: int, heads: int, in_w: Tensor, in_b: Tensor, out_w: Tensor, out_b: Tensor,
        gelu: bool, norm_first: bool, eps: float, n1_w: Tensor, n1_b: Tensor, n2_w: Tensor, n2_b: Tensor,
        up_w: Tensor, up_b: Tensor, down_w: Tensor, down_b: Tensor,
        mask: Tensor | None = None, mask_type: int | None = None,
    ):  # fmt: skip
        self.src, self.E, self.heads, self.mask, self.mask_type = src, E, heads, mask, mask_type
        self.in_w, self.in_b, self.out_w, self.out_b = in_w, in_b, out_w, out_b
        self.gelu, self.norm_first, self.eps = gelu, norm_first, eps
        self.norms = (n1_w, n1_b), (n2_w, n2_b)
        self.mlp = (up_w, up_b), (down_w, down_b)

    def inputs(self) -> tuple[Tensor, Tensor | None, int | None]:
        """(B, N, E) that the projections see, and the mask: padding that a nested tensor left out is masked."""
        x = self._norm(0, self.src) if self.norm_first else self.src
        if not x.is_nested:
            return x, self.mask, self.mask_type
        lengths = torch.tensor([part.shape[0] for part in x.unbind()], device=x.device)
        x = torch.nested.to_padded_tensor(x, 0.0)
        gone = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]  # (B, N)
        pairs = (gone[:, None, :] | gone[:, :, None])[:, None].expand(-1, self.heads, -1, -1)
        return x, torch.zeros(pairs.shape, device=x.device).masked_fill(pairs, float("-inf")), 2

    def rest(self, y: Tensor) -> Tensor:
        """The layer's output from that of its attention, (B, N, E)."""
        x = self.src[: y.shape[0]].to(y.dtype) + y
        x = x if self.norm_first else self._norm(0, x)
        h = F.linear(self._norm(1, x) if self.norm_first else x, *(p.to(y.dtype) for p in self.mlp[0]))
        x = x + F.linear(F.gelu(h) if self.gelu else F.relu(h), *(p.to(y.dtype) for p in self.mlp[1]))
        return x if self.norm_first else self._norm(1, x)

    def _norm(self, which: int, x: Tensor) -> Tensor:
        weight, bias = (p if x.is_nested else p.to(x.dtype) for p in self.norms[which])
        return F.layer_norm(x, (self.E,), weight, bias, self.eps)


def places(functions: Iterable[Callable]) -> Iterator[tuple[dict[str, Any], str, Callable]]:
    """Where loaded modules hold the functions: (namespace, name, function).

    PyTorch's own modules are left alone, but for the public ones: models call ``F.x``, or import the name.
    """
    wanted = {id(function): function for function in functions}
    for key, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (not key.startswith("torch.") or key == "torch.nn.functional"):
            namespace = module.__dict__
            for name in [name for name, value in namespace.items() if id(value) in wanted]:
                yield namespace, name, wanted[id(namespace[name])]


def executing() -> nn.Module | None:
    """The innermost module on the call stack."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                return module
        frame = frame.f_back
    return None
