"""A checkpoint's tensors as the pieces that a store is written from, a few rows at a time.

No more than a block is ever held. It knows neither files nor quantizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np

from localrt.models.checkpoints.base import Checkpoint, WeightBlock
from localrt.quant.formats import F32, PackedTensor, unpack
from localrt.quant.formats.tiled import TiledTensor, whole_tiles
from localrt.quant.ops.native.ops import fast_tiler

__all__ = ["Tiler", "fast_tiler", "stored_pieces", "tiled_pieces"]

Tiler: TypeAlias = Callable[[PackedTensor], TiledTensor]
"""Rows of a matrix to tiles. Only the last rows of a matrix may be no whole tile."""


def stored_pieces(checkpoint: Checkpoint, name: str, tiler: Tiler) -> Iterator[WeightBlock]:
    """A tensor in its own format: a vector as float32 values, a matrix as tiles."""
    if len(checkpoint.tensors[name].shape) == 1:
        values = unpack(checkpoint.read(name)).reshape(-1)
        yield PackedTensor(name, F32, values.shape, values.view(np.uint8).reshape(1, -1))
    else:
        yield from tiled_pieces(checkpoint.blocks(name), tiler)


def tiled_pieces(blocks: Iterable[WeightBlock], tiler: Tiler) -> Iterator[TiledTensor]:
    """The blocks of one matrix in order, as tiles."""
    for piece in whole_tiles(blocks):
        yield piece if isinstance(piece, TiledTensor) else tiler(piece)
