"""The attention layers of a model: by which adapter, under which name, and what they have shown in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from qkexp.probe.adapters import Adapter, Capture
from qkexp.probe.beside import Beside


@dataclass(frozen=True)
class Part:
    """What one forward pass showed: (metric, layer, head), of so many images and rows; ``seen`` as of a group."""

    values: Tensor
    images: int
    rows: int
    seen: Tensor | None


@dataclass(eq=False)
class Layer:
    """One attention layer, and what it has shown in this step."""

    name: str
    module: nn.Module
    adapter: type[Adapter] | Adapter | None  # None: discovered by a call of scaled_dot_product_attention
    captures: list[Capture] = field(default_factory=list)
    done: list[Part] = field(default_factory=list)  # measured at once
    checked: bool = False
    why_not: str = "it was not reached"
    parent: nn.Module | None = None  # that holds it
    beside: Beside | None = None  # of the last probed step, where a group of metrics wants it

    @property
    def fired(self) -> bool:
        return bool(self.captures or self.done)

    @property
    def tentative(self) -> bool:
        return getattr(self.adapter, "tentative", False)

    def ask(self, method: str) -> Any:
        """What an optional method of the adapter says of this layer; None where there is no such method."""
        answer = getattr(self.adapter, method, None)
        return None if answer is None else answer(self.module, self.parent)

    @property
    def in_graph(self) -> bool:
        return getattr(self.adapter, "in_graph", False)


def find_layers(model: nn.Module, adapters: Sequence[type[Adapter] | Adapter]) -> list[Layer]:
    """Each module by the first adapter that finds it; guesses neither around nor inside a known one."""
    found: dict[str, Layer] = {}
    for adapter in adapters:
        for raw, module in adapter.find(model):
            name = plain_name(raw)
            parent = model.get_submodule(raw.rpartition(".")[0]) if raw else None
            layer = Layer(name, module, adapter, parent=parent)
            if name not in found and not (layer.tentative and any(nested(name, n) for n in found)):
                found[name] = layer
    return list(found.values())


def nested(a: str, b: str) -> bool:
    """Whether one of two modules is inside the other, by their names."""
    return a.startswith(f"{b}.") or b.startswith(f"{a}.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that rename its modules.

    Raises:
        TypeError: DataParallel.
    """
    if any(isinstance(m, nn.DataParallel) for m in model.modules()):
        raise TypeError("nn.DataParallel's replicas share hooks: use DistributedDataParallel, one process a GPU")
    while True:
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel | AveragedModel)
        inner = model.module if wrapped else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """A module's name without what compiling, checkpointing or sharding a part of the model puts into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
