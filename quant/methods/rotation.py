"""The block Hadamard rotation, and the float32 values of a stored weight, whatever its rotation.

The rotation spreads an outlier over its block of 2^k inputs. It is orthogonal and symmetric, so it
is its own inverse: W x = (W H) (H x). Values are restored by taking tiles back to rows, unpacking
rows, and undoing a rotation: W = (W H) H. It does not know weights from activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from localrt.quant.formats import BF16, F8_E4M3, Format, PackedTensor, unpack
from localrt.quant.formats.packed import Floats
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor, untile

_PIECE = 1 << 16  # values rotated at a time: they stay in the cache


def block_hadamard(values: Floats, size: int) -> Floats:
    """Every ``size`` consecutive values of the last axis times the Hadamard matrix / sqrt(size).

    Fast Walsh-Hadamard transform, natural (Sylvester) order, float32: a new array.

    Raises:
        ValueError: ``size`` is not a power of two that divides the last axis.
    """
    if size < 1 or size & (size - 1) or values.shape[-1] % size:
        raise ValueError(
            f"a block Hadamard of {size} needs a power of two that divides {values.shape[-1]}"
        )
    out = values.reshape(-1, size).astype(np.float32, copy=True)
    step = max(1, _PIECE // size)
    for start in range(0, len(out), step):
        _rotate(out[start : start + step], size)
    return out.reshape(values.shape)


def _rotate(rows: Floats, size: int) -> None:
    """In place: rows (n, size)."""
    columns = np.ascontiguousarray(rows.T)  # long runs, however small the step
    half = 1
    while half < size:
        pairs = columns.reshape(size // (2 * half), 2, half, -1)
        low, high = pairs[:, 0], pairs[:, 1]
        difference = low - high
        low += high
        high[...] = difference
        half *= 2
    columns *= np.float32(size**-0.5)
    rows[...] = columns.T


_ROWS_AT_ONCE = 1 << 22  # values unpacked at a time


@dataclass(frozen=True, slots=True)
class Quantized:
    """A packed weight. With ``hadamard`` n > 0 it holds W H: its inputs need the same rotation.

    H is ``block_hadamard`` with blocks of n inputs.
    """

    tensor: PackedTensor
    hadamard: int = 0


def restore(block: PackedTensor | TiledTensor | Quantized) -> Floats:
    """All values of ``block``, in its shape."""
    if isinstance(block, Quantized):
        values = unpack(block.tensor)
        return block_hadamard(values, block.hadamard) if block.hadamard else values
    pieces = list(restored_rows(block))
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return whole.reshape(block.shape)


def restored_rows(block: PackedTensor | TiledTensor) -> Iterator[Floats]:
    """The values of consecutive rows, (n, columns), a few at a time."""
    if isinstance(block, PackedTensor):
        yield unpack(block)
        return
    rows, columns = block.shape
    tile_bytes = TILE_ROWS * block.format.row_bytes(columns)
    step = max(1, _ROWS_AT_ONCE // (TILE_ROWS * columns)) * TILE_ROWS
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        first, last = start // TILE_ROWS, -(-stop // TILE_ROWS)
        tiles = block.data[first * tile_bytes : last * tile_bytes]
        shape = (stop - start, columns)
        values = unpack(untile(TiledTensor(block.name, block.format, shape, tiles, block.scale)))
        yield block_hadamard(values, block.hadamard) if block.hadamard else values


def widened_format(format_: Format) -> Format:
    """What kernels that do not know E4M3 compute with in its place."""
    return BF16 if format_ == F8_E4M3 else format_


def widened(blocks: Iterable[PackedTensor | TiledTensor]) -> Iterator[PackedTensor | TiledTensor]:
    """E4M3 as bf16, which holds each of its values; other blocks as they are."""
    for block in blocks:
        if block.format != F8_E4M3:
            yield block
            continue
        for values in restored_rows(replace(block, scale=1.0)):
            halves = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
            yield PackedTensor(block.name, BF16, values.shape, halves, block.scale)
