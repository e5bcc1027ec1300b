"""A checkpoint's tensors as the pieces that a store is written from, a few rows at a time.

Tiles are 16 rows: what a checkpoint gives in blocks of any size is joined to whole tiles here, so
that no more than a block is ever held. It knows neither files nor quantizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from localrt.models.checkpoints.base import Checkpoint, WeightBlock
from localrt.quant.formats import F32, PackedTensor, unpack
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor, tile_tensor

__all__ = ["Tiler", "fast_tiler", "stored_pieces", "tiled_pieces"]

Tiler: TypeAlias = Callable[[PackedTensor], TiledTensor]
"""Rows of a matrix to tiles. Only the last rows of a matrix may be no whole tile."""


def fast_tiler() -> Tiler:
    """The compiled kernels' conversion where they are installed, else numpy's: the same bytes."""
    from localrt.errors import MissingExtraError
    from localrt.quant.ops.native_ops import NativeOps

    try:
        return NativeOps().tile
    except MissingExtraError:
        return tile_tensor


def stored_pieces(checkpoint: Checkpoint, name: str, tiler: Tiler) -> Iterator[WeightBlock]:
    """A tensor in its own format: a vector as float32 values, a matrix as tiles."""
    if len(checkpoint.tensors[name].shape) == 1:
        values = unpack(checkpoint.read(name)).reshape(-1)
        yield PackedTensor(name, F32, values.shape, values.view(np.uint8).reshape(1, -1))
    else:
        yield from tiled_pieces(checkpoint.blocks(name), tiler)


def tiled_pieces(blocks: Iterable[WeightBlock], tiler: Tiler) -> Iterator[TiledTensor]:
    """The blocks of one matrix in order, as tiles."""
    left: PackedTensor | None = None  # rows that do not fill a tile
    for block in blocks:
        if isinstance(block, TiledTensor):
            yield block
            continue
        rows = block if left is None else _joined(left, block)
        whole = rows.shape[0] // TILE_ROWS * TILE_ROWS
        if whole:
            yield tiler(_rows(rows, 0, whole))
        left = _rows(rows, whole, rows.shape[0]) if whole < rows.shape[0] else None
    if left is not None:
        yield tiler(left)


def _joined(first: PackedTensor, second: PackedTensor) -> PackedTensor:
    data = np.concatenate([first.data, second.data])
    return replace(second, shape=(len(data), *second.shape[1:]), data=data)


def _rows(tensor: PackedTensor, start: int, stop: int) -> PackedTensor:
    return replace(tensor, shape=(stop - start, *tensor.shape[1:]), data=tensor.data[start:stop])
