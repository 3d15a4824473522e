"""Which part of the network each piece of a parameter belongs to: fused projections hold several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from qkexp.model.blocks import BLOCK_TYPES

PARTS = ("qk", "vo", "mlp", "rest")
_PART_OF_ROLE = {"q": "qk", "k": "qk", "qk": "qk", "v": "vo", "o": "vo", "mlp": "mlp", "rest": "rest"}


@dataclass(frozen=True)
class Piece:
    """Rows (``axis`` 0) or columns (1) of a parameter; ``role`` as in :meth:`qkexp.model.blocks.Block.roles`."""

    parameter: str
    role: str
    axis: int
    start: int
    stop: int

    @property
    def part(self) -> str:
        """One of :data:`PARTS`."""
        return _PART_OF_ROLE[self.role]

    @property
    def projects_qk(self) -> bool:
        """Whether it is of W_q, W_k or their biases."""
        return self.role in ("q", "k")

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor that has the parameter's shape, as a view."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start)


def pieces(model: nn.Module) -> Iterator[Piece]:
    """Every parameter of a model, piece by piece, in the model's order."""
    blocks = {f"{name}." if name else "": m for name, m in model.named_modules() if isinstance(m, BLOCK_TYPES)}
    for name, parameter in model.named_parameters():
        owner = next((prefix for prefix in blocks if name.startswith(prefix)), None)
        axis, roles = (0, [("rest", None)]) if owner is None else blocks[owner].roles(name.removeprefix(owner))
        start = 0
        for role, count in roles:
            stop = start + (parameter.shape[axis] if count is None else count)
            yield Piece(name, role, axis, start, stop)
            start = stop
