"""A matrix in tiles on a card, and how the grouped products of Triton cut their work."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from localrt.quant.ops.triton.formats import TritonLayout

__all__ = ["Tiles", "Tiling", "tiling"]

_CHAINS = 16
# What small GPUs have, less what the kernel needs beside its buffers.
_SHARED_BYTES = 84 << 10


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


@dataclass(frozen=True, slots=True)
class Tiling:
    """How work is cut. Results do not depend on it."""

    tiles: int = 2  # of 16 weight rows, per program
    columns: int = 8  # rows of activations, padded
    unroll: int = 1
    stages: int = 3


def tiling(
    tiles: int, rows: int, processors: int, *, bits: int, head: int = 0, paired: bool = False
) -> Tiling:
    """For ``tiles`` tiles of weights, ``rows`` rows of activations and a GPU of ``processors``.

    ``bits`` per code and ``head`` bytes of scales say what a step loads; ``paired`` tiles cannot be
    computed apart.
    """
    columns = min(32, max(8, triton.next_power_of_2(rows)))
    # Two tiles share the activations that a warp loads and make its loads wider, but every
    # processor should have a program.
    pair = 2 if paired or 10 * tiles >= 18 * processors else 1
    # Memory is far: a small product must have most of its weights on the way at once. Stages less
    # one are buffered, and 5- and 6-bit steps load more than their weights.
    loads = 2 if bits in (5, 6) else 1
    buffer = _CHAINS * (pair * (64 * bits * loads + head) + 64 * columns)
    stages = min(5, 1 + _SHARED_BYTES // buffer)
    return Tiling(tiles=pair, columns=columns, stages=stages)
