"""PyTorch's ``nn.MultiheadAttention``: torchvision's ViT, ``nn.TransformerEncoder``, CLIP-style text towers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle

from qkexp.probe.adapters.base import Listener, Sink, kind
from qkexp.probe.weights import HeadRows, Projections, fused


class MultiheadAdapter:
    """q, k after the in-projections, ``bias_k`` and ``add_zero_attn`` among the keys; scale 1/√d; both masks as one.

    Nothing is attached: :class:`~qkexp.probe.adapters.kernels.Kernels` listens to the functions that the module
    calls. With ``need_weights=True`` and on the native fast paths these do not show q and k, and the one
    attention is computed again by PyTorch's own function, without gradients, on probed steps only.
    """

    by_kernel = True

    @staticmethod
    def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        wanted = {"torch.nn.modules.activation.MultiheadAttention"}
        return ((name, m) for name, m in model.named_modules() if kind(m) & wanted)

    @staticmethod
    def attach(module: nn.Module, listener: Listener, sink: Sink) -> list[RemovableHandle]:
        return []

    @staticmethod
    def projections(module: nn.Module, parent: nn.Module | None) -> Projections | None:
        """Rows of ``in_proj_weight``, or one matrix each where keys or values have another width."""
        assert isinstance(module, nn.MultiheadAttention)
        weight, bias, heads = module.in_proj_weight, module.in_proj_bias, module.num_heads
        if weight is not None:
            return Projections(*fused(weight, bias, heads))
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        q, k, v = (HeadRows(w, None, heads, module.head_dim) for w in weights)
        return Projections(q, k, v)

    @staticmethod
    def block(module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
        """PyTorch's encoder layer bears no hook: any would switch its native fast path off. Images must come first."""
        plain = getattr(module, "batch_first", False) and not isinstance(parent, nn.TransformerEncoderLayer)
        return parent if plain else None
