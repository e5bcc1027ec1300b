"""What a stored weight is: a format, a logical shape, and packed bytes in numpy.

This module knows how bytes are laid out in blocks along a row. It does not know where they came
from (checkpoints), nor how they are multiplied (``quant/ops``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Exactness", "Format", "PackedTensor"]

Exactness = Literal["exact", "approximate"]


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is packed: every ``block`` weights along a row take ``block_bytes`` bytes."""

    name: str
    block: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Storage per weight in bits, scales included."""
        return 8.0 * self.block_bytes / self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of ``columns`` weights.

        Raises:
            ValueError: ``columns`` is not a whole number of blocks.
        """
        if columns % self.block:
            raise ValueError(f"{self.name}: {columns} columns are not a multiple of {self.block}")
        return columns // self.block * self.block_bytes


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight, or consecutive rows of one, as packed bytes.

    ``shape`` is logical and row-major: ``(rows, columns)`` for a linear layer (out, in), ``(n,)``
    for a vector. ``data`` is ``uint8`` of shape ``(rows, row_bytes)``, a row being one step along
    the first axis; a vector has one row. ``scale`` multiplies every value (NVFP4's second level).
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Packed bytes."""
        return self.data.nbytes

    def take_rows(self, index: npt.NDArray[np.intp]) -> PackedTensor:
        """Rows in the order of ``index``: blocks run along a row, so no value changes."""
        return replace(self, shape=(len(index), *self.shape[1:]), data=self.data[index])
