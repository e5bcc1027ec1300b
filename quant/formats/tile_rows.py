"""Row blocks cut anew at tile boundaries, so that a matrix can be tiled as it is read.

A checkpoint gives blocks of any number of rows; no more than one of them is held here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from localrt.quant.formats.packed import PackedTensor
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor

__all__ = ["whole_tiles"]


def whole_tiles(
    blocks: Iterable[PackedTensor | TiledTensor],
) -> Iterator[PackedTensor | TiledTensor]:
    """The blocks of one matrix in order: whole tiles of rows, and at last what is left of them.

    Blocks that are tiles already pass as they are.
    """
    left: PackedTensor | None = None  # rows that do not fill a tile
    for block in blocks:
        if isinstance(block, TiledTensor):
            yield block
            continue
        rows = block if left is None else _joined(left, block)
        whole = rows.shape[0] // TILE_ROWS * TILE_ROWS
        if whole:
            yield _rows(rows, 0, whole)
        left = _rows(rows, whole, rows.shape[0]) if whole < rows.shape[0] else None
    if left is not None:
        yield left


def _joined(first: PackedTensor, second: PackedTensor) -> PackedTensor:
    data = np.concatenate([first.data, second.data])
    return replace(second, shape=(len(data), *second.shape[1:]), data=data)


def _rows(tensor: PackedTensor, start: int, stop: int) -> PackedTensor:
    return replace(tensor, shape=(stop - start, *tensor.shape[1:]), data=tensor.data[start:stop])
