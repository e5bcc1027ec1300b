"""The canonical tiled layout of packed weights: the specification, in numpy.

A tile is 16 consecutive rows (the last one padded with zeros); tiles follow one another. Within a
tile, the format's blocks follow one another along the columns. A block holds, for its 16 rows:

    head    the scales: each field's 16 values side by side, in the order of ``_HEADS``
    steps   32 columns each:
            4 to 6 bits   four vectors of 64 bytes: byte (v, row, i) has column 4v + i in its low
                          nibble and column 16 + 4v + i in its high one
            5 bits        then eight 64-bit masks: bit 4 * row + i of mask v is bit 4 of column
                          4v + i
            6 bits        then two vectors: bits 2j of byte (h, row, i) are bits 4-5 of column
                          16h + 4j + i
            8 bits        eight vectors: byte (v, row, i) is column 4v + i

A tile is as large as its rows were. f32, f16 and bf16 are tiles of single columns. ``quant/csrc``
converts the same way, only faster; it knows nothing that is not said here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.packed import PackedTensor

__all__ = ["TILE_ROWS", "tile"]

TILE_ROWS = 16

# uint8 throughout; numpy's stubs lose that in shifts.
Bytes = npt.NDArray[Any]

# Byte ranges of the head's fields in a block as GGUF has it.
_HEADS: dict[str, tuple[tuple[int, int], ...]] = {
    "f32": ((0, 4),),
    "f16": ((0, 2),),
    "bf16": ((0, 2),),
    "q4_0": ((0, 2),),
    "q4_1": ((0, 2), (2, 4)),
    "q5_0": ((0, 2),),
    "q5_1": ((0, 2), (2, 4)),
    "q8_0": ((0, 2),),
    "q4_k": ((0, 2), (2, 4)),
    "q5_k": ((0, 2), (2, 4)),
    "q6_k": ((208, 210), *((192 + sub, 193 + sub) for sub in range(16))),
    "mxfp4": ((0, 1),),
}
_BITS = {"q5_0": 5, "q5_1": 5, "q5_k": 5, "q6_k": 6, "q8_0": 8}


def tile(tensor: PackedTensor) -> Bytes:
    """The tiles of a matrix in a GGUF format, one after another.

    Raises:
        ValueError: a format that has no tiled layout.
    """
    name = tensor.format.name
    if name not in _HEADS:
        raise ValueError(f"{tensor.name}: {name} has no tiled layout")
    rows, cols = tensor.shape
    blocks = cols // tensor.format.block
    padded = np.zeros((-(-rows // TILE_ROWS) * TILE_ROWS, tensor.data.shape[1]), np.uint8)
    padded[:rows] = tensor.data
    # (tiles, blocks, 16 rows, block bytes)
    source = padded.reshape(-1, TILE_ROWS, blocks, tensor.format.block_bytes).swapaxes(1, 2)
    lead = source.shape[:2]
    parts = [source[..., a:b].reshape(*lead, -1) for a, b in _HEADS[name]]
    if name in ("q4_k", "q5_k"):
        parts.append(_regrouped_scales(source[..., 4:16]).reshape(*lead, -1))
    if tensor.format.block > 1:
        codes = _codes(name, source)  # (tiles, blocks, 16, block)
        steps = codes.reshape(*lead, TILE_ROWS, -1, 32).swapaxes(2, 3)
        parts.append(_packed_steps(steps, _BITS.get(name, 4)).reshape(*lead, -1))
    whole: Bytes = np.concatenate(parts, axis=-1).reshape(-1)
    return whole


def _packed_steps(codes: Bytes, bits: int) -> Bytes:
    """(..., 16, 32) codes to (..., bytes of a step)."""
    lead = codes.shape[:-2]
    quads = np.moveaxis(codes.reshape(*lead, TILE_ROWS, 8, 4), -2, -3)  # (..., v, row, i)
    if bits == 8:
        eight: Bytes = quads.reshape(*lead, -1)
        return eight
    low = quads & 15
    parts: list[Bytes] = [(low[..., :4, :, :] | low[..., 4:, :, :] << 4).reshape(*lead, -1)]
    if bits == 5:
        fifth = (quads >> 4 & 1).reshape(*lead, -1)
        parts.append(np.packbits(fifth, axis=-1, bitorder="little"))
    if bits == 6:
        pairs = (quads >> 4).reshape(*lead, 2, 4, TILE_ROWS, 4)  # (..., h, j, row, i)
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None, None]
        parts.append(np.bitwise_or.reduce(pairs << shifts, axis=-3).reshape(*lead, -1))
    return np.concatenate(parts, axis=-1)


def _nibbles(packed: Bytes) -> Bytes:
    """(..., n) bytes to (..., 2n): all low nibbles, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _codes(name: str, block: Bytes) -> Bytes:
    """Unsigned codes (..., block) of GGUF blocks (..., bytes)."""
    if name == "q8_0":
        flipped: Bytes = block[..., 2:] ^ 0x80
        return flipped
    if name in ("q4_0", "q4_1", "mxfp4"):
        return _nibbles(block[..., -16:])
    if name in ("q5_0", "q5_1"):
        fifth = np.unpackbits(block[..., -20:-16], axis=-1, bitorder="little")
        five: Bytes = _nibbles(block[..., -16:]) | fifth << 4
        return five
    lead = block.shape[:-1]
    if name in ("q4_k", "q5_k"):
        codes: Bytes = _nibbles(block[..., -128:].reshape(*lead, 4, 32)).reshape(*lead, 256)
        if name == "q4_k":
            return codes
        bits = np.unpackbits(block[..., 16:48, None], axis=-1, bitorder="little")
        codes |= bits.swapaxes(-1, -2).reshape(*lead, 256) << 4
        return codes
    low = block[..., :128].reshape(*lead, 2, 2, 32)  # (..., half, column / 32 % 2, j)
    high = block[..., 128:192].reshape(*lead, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=-2)  # (..., half, 4, j)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    six: Bytes = (nibbles | (high >> shifts & 3) << 4).reshape(*lead, 256)
    return six


def _regrouped_scales(packed: Bytes) -> Bytes:
    """Q4_K's twelve bytes of 6-bit scales and minima (..., 16 rows, 12) as three words a row.

    Of the eight scales and eight minima in order, word w has numbers 5w to 5w + 4, lowest first;
    its top two bits are bits 2w and 2w + 1 of the last minimum. Its 16 values lie side by side.
    """
    first, second, third = (packed[..., i : i + 4] for i in (0, 4, 8))
    scales = [first & 63, (third & 15) | (first >> 6) << 4]
    minima = [second & 63, (third >> 4) | (second >> 6) << 4]
    six = np.concatenate([*scales, *minima], axis=-1).astype(np.uint32)
    shifts = np.arange(5, dtype=np.uint32) * 6
    words = [
        np.bitwise_or.reduce(six[..., 5 * w : 5 * w + 5] << shifts, axis=-1)
        | (six[..., 15] >> 2 * w & 3) << 30
        for w in range(3)
    ]
    return np.ascontiguousarray(np.stack(words, axis=-2), "<u4").view(np.uint8)
