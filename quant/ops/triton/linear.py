"""A matrix in tiles on a card."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localrt.quant.ops.triton.formats import TritonLayout

__all__ = ["Tiles"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """A matrix in tiles on the device: the same bytes under three types, and how to read them.

    ``factor`` (tiles,) multiplies the values of each tile; None is 1.
    """

    format: str
    layout: TritonLayout
    shape: tuple[int, int]
    w8: Tensor
    w16: Tensor
    w32: Tensor
    factor: Tensor | None = None

    @property
    def count(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.shape[0] // 16)
