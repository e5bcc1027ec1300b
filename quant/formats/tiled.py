"""The canonical tiled layout of packed weights: the specification, in numpy.

A tile is 16 consecutive rows (the last tile is padded with zeros); tiles are stored one after
another. A tile is a sequence of spans of columns: the format's block, or two blocks if a block has
only 16 columns. A span holds, for its 16 rows:

    head    the scales: each field's 16 values side by side, fields in the order of
            ``Format.head``; in a span of two blocks, each field's first block, then its second
    steps   32 columns each:
            2 bits        two vectors: bits 2j and 2j + 1 of byte (h, row, i) are column
                          16h + 4j + i
            3 bits        the same for the low two, then eight 64-bit masks: bit 4 * row + i of mask
                          v is bit 2 of column 4v + i
            4 to 6 bits   four vectors of 64 bytes: byte (v, row, i) has column 4v + i in its low
                          nibble and column 16 + 4v + i in its high one
            5 bits        then eight 64-bit masks: bit 4 * row + i of mask v is bit 4 of column
                          4v + i
            6 bits        then two vectors: bits 2j of byte (h, row, i) are bits 4-5 of column
                          16h + 4j + i
            8 bits        eight vectors: byte (v, row, i) is column 4v + i

Codes are unsigned (Q8_0's plus 128). Codebook types have their own spans, in ``codebook.py``. A
tile is as large as its rows. f32, f16, bf16 and f8_e4m3 are tiles of single columns.
``quant/cpu/csrc`` does the same conversion, only faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.catalog import read_codes, write_codes
from localrt.quant.formats.codebook import CODEBOOKS, blocks_of_spans, spans_of_blocks
from localrt.quant.formats.packed import Format, PackedTensor, Ranges
from localrt.quant.formats.six_bits import SIX_BIT_FIELDS

TILE_ROWS = 16

# Always uint8; numpy's stubs lose the type in shifts.
Codes = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TiledTensor:
    """A whole matrix (rows, columns) in tiles, as in a store and as kernels read it.

    ``data`` is ``uint8``, one-dimensional. ``scale`` multiplies every value. If ``hadamard`` is n >
    0, the matrix is W H: its inputs need the Hadamard rotation in blocks of n.
    """

    name: str
    format: Format
    shape: tuple[int, int]
    data: npt.NDArray[np.uint8]
    scale: float = 1.0
    hadamard: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles."""
        return self.data.nbytes


def tile_span(format_: Format) -> int:
    """Columns of a span: a matrix in ``format_`` can be tiled if its columns are a multiple."""
    return format_.block if format_.block in (1, 256) else max(format_.block, 32)


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def tile_tensor(tensor: PackedTensor, *, hadamard: int = 0) -> TiledTensor:
    """Tile ``tensor``, a whole matrix. Raises ``ValueError`` as ``tile`` does."""
    shape = (tensor.shape[0], tensor.shape[1])
    return TiledTensor(tensor.name, tensor.format, shape, tile(tensor), tensor.scale, hadamard)


def tile(tensor: PackedTensor) -> Codes:
    """The tiles of a matrix, one after another.

    Raises:
        ValueError: a format that has no tiled layout, or columns that are not whole spans.
    """
    spans, ranges = _plan(tensor.name, tensor.format, tensor.shape[1])
    rows, format_ = tensor.shape[0], tensor.format
    padded = np.zeros((padded_rows(rows), tensor.data.shape[1]), np.uint8)
    padded[:rows] = tensor.data
    # (tiles, spans, 16 rows, bytes of a span)
    source = padded.reshape(len(padded) // TILE_ROWS, TILE_ROWS, spans, -1).swapaxes(1, 2)
    lead = source.shape[:2]
    if format_.name in CODEBOOKS:
        entries: Codes = spans_of_blocks(format_.name, source.reshape(-1, *source.shape[2:]))
        return entries.reshape(-1)
    parts = [source[..., a:b] for a, b in ranges]
    for index, (regrouped, _) in SIX_BIT_FIELDS.get(format_.name, {}).items():
        parts[index] = regrouped(parts[index])
    parts = [part.reshape(*lead, -1) for part in parts]
    if format_.block > 1:
        codes = read_codes(format_.name, source.reshape(-1, format_.block_bytes))
        steps = codes.reshape(*lead, TILE_ROWS, -1, 32).swapaxes(2, 3)
        parts.append(_packed_steps(steps, format_.bits).reshape(*lead, -1))
    whole: Codes = np.concatenate(parts, axis=-1).reshape(-1)
    return whole


def untile(tensor: TiledTensor) -> PackedTensor:
    """The inverse of ``tile_tensor``: exactly the rows that were tiled; any rotation stays applied.

    Raises:
        ValueError: see ``tile``; or bytes that are not the shape's.
    """
    rows, cols = tensor.shape
    format_ = tensor.format
    spans, ranges = _plan(tensor.name, format_, cols)
    tiles, row_bytes = padded_rows(rows) // TILE_ROWS, format_.row_bytes(cols)
    if tensor.data.size != tiles * TILE_ROWS * row_bytes:
        raise ValueError(f"{tensor.name}: {tensor.data.size} bytes are not {rows} x {cols} tiled")
    source = tensor.data.reshape(tiles, spans, -1)
    if format_.name in CODEBOOKS:
        target = blocks_of_spans(format_.name, source.reshape(tiles * spans, -1))
        return _packed_rows(tensor, target.reshape(tiles, spans, TILE_ROWS, -1))
    target = np.empty((tiles, spans, TILE_ROWS, row_bytes // spans), np.uint8)
    at = 0
    six_bit = SIX_BIT_FIELDS.get(format_.name, {})
    for index, (a, b) in enumerate(ranges):
        size = TILE_ROWS * (b - a)
        field: Codes = source[..., at : at + size]
        if index in six_bit:
            target[..., a:b] = six_bit[index][1](field)
        else:
            target[..., a:b] = field.reshape(tiles, spans, TILE_ROWS, -1)
        at += size
    if format_.block > 1:
        steps = source[..., at:].reshape(tiles, spans, tile_span(format_) // 32, -1)
        codes = _unpacked_steps(steps, format_.bits)  # (..., steps, 16, 32)
        flat = codes.swapaxes(2, 3).reshape(-1, format_.block)
        write_codes(format_.name, flat, target.reshape(-1, format_.block_bytes))
    return _packed_rows(tensor, target)


def _packed_rows(tensor: TiledTensor, blocks: Codes) -> PackedTensor:
    """Blocks (tiles, spans, 16 rows, bytes) as the tensor's rows."""
    rows = blocks.swapaxes(1, 2).reshape(len(blocks) * TILE_ROWS, -1)[: tensor.shape[0]]
    data = np.ascontiguousarray(rows)
    return PackedTensor(tensor.name, tensor.format, tensor.shape, data, tensor.scale)


def whole_tiles(
    blocks: Iterable[PackedTensor | TiledTensor],
) -> Iterator[PackedTensor | TiledTensor]:
    """Regroup consecutive blocks of a matrix into whole tiles of rows, and a last partial one.

    Blocks may have any number of rows; only one is in memory at a time. Tiled blocks pass
    unchanged.
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


def _plan(name: str, format_: Format, cols: int) -> tuple[int, Ranges]:
    """The number of spans of a row, and the byte ranges of a span's head."""
    if not format_.head and format_.name not in CODEBOOKS:
        raise ValueError(f"{name}: {format_.name} has no tiled layout")
    span = tile_span(format_)
    if cols % span:
        raise ValueError(f"{name}: {cols} columns are not a multiple of {span}")
    starts = range(0, span // format_.block * format_.block_bytes, format_.block_bytes)
    return cols // span, tuple((s + a, s + b) for a, b in format_.head for s in starts)


def _packed_steps(codes: Codes, bits: int) -> Codes:
    """(..., 16, 32) codes to (..., bytes of a step)."""
    lead = codes.shape[:-2]
    quads = np.moveaxis(codes.reshape(*lead, TILE_ROWS, 8, 4), -2, -3)  # (..., v, row, i)
    if bits == 8:
        eight: Codes = quads.reshape(*lead, -1)
        return eight
    if bits < 4:
        pairs = (quads & 3).reshape(*lead, 2, 4, TILE_ROWS, 4)  # (..., h, j, row, i)
        both: Codes = np.bitwise_or.reduce(pairs << _PAIRS, axis=-3).reshape(*lead, -1)
        if bits == 2:
            return both
        third = np.packbits((quads >> 2).reshape(*lead, -1), axis=-1, bitorder="little")
        return np.concatenate([both, third], axis=-1)
    low = quads & 15
    parts: list[Codes] = [(low[..., :4, :, :] | low[..., 4:, :, :] << 4).reshape(*lead, -1)]
    if bits == 5:
        fifth = (quads >> 4 & 1).reshape(*lead, -1)
        parts.append(np.packbits(fifth, axis=-1, bitorder="little"))
    if bits == 6:
        pairs = (quads >> 4).reshape(*lead, 2, 4, TILE_ROWS, 4)  # (..., h, j, row, i)
        parts.append(np.bitwise_or.reduce(pairs << _PAIRS, axis=-3).reshape(*lead, -1))
    return np.concatenate(parts, axis=-1)


def _unpacked_steps(steps: Codes, bits: int) -> Codes:
    """The inverse of ``_packed_steps``: (..., bytes of a step) to (..., 16, 32)."""
    lead = steps.shape[:-1]
    if bits == 8:
        quads = steps.reshape(*lead, 8, TILE_ROWS, 4)
    elif bits < 4:
        both = steps[..., :128].reshape(*lead, 2, 1, TILE_ROWS, 4)
        quads = (both >> _PAIRS & 3).reshape(*lead, 8, TILE_ROWS, 4)
        if bits == 3:
            third = np.unpackbits(steps[..., 128:], axis=-1, bitorder="little")
            quads |= third.reshape(quads.shape) << 2
    else:
        low = steps[..., :256].reshape(*lead, 4, TILE_ROWS, 4)
        quads = np.concatenate([low & 15, low >> 4], axis=-3)
    if bits == 5:
        fifth = np.unpackbits(steps[..., 256:], axis=-1, bitorder="little")
        quads |= fifth.reshape(quads.shape) << 4
    if bits == 6:
        pairs = steps[..., 256:].reshape(*lead, 2, 1, TILE_ROWS, 4)
        quads |= (pairs >> _PAIRS & 3).reshape(quads.shape) << 4
    codes: Codes = np.moveaxis(quads, -3, -2).reshape(*lead, TILE_ROWS, 32)
    return codes


_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None, None]


def _joined(first: PackedTensor, second: PackedTensor) -> PackedTensor:
    data = np.concatenate([first.data, second.data])
    return replace(second, shape=(len(data), *second.shape[1:]), data=data)


def _rows(tensor: PackedTensor, start: int, stop: int) -> PackedTensor:
    return replace(tensor, shape=(stop - start, *tensor.shape[1:]), data=tensor.data[start:stop])
