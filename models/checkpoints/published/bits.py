"""Codes out of the words that schemes pack them into: the first one in a word's lowest bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.stored_tensor import StoredTensor

__all__ = ["codes_in_rows", "read_columns"]

# uint8 throughout; numpy's stubs lose that in shifts.
Codes = npt.NDArray[Any]


def codes_in_rows(packed: Codes, bits: int) -> Codes:
    """Codes (rows, 8 n / bits) of 2 to 8 bits, one after another in bytes (rows, n)."""
    if bits == 8:
        return packed
    if bits == 4:
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    stream = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes: Codes = (stream * weights).sum(axis=-1, dtype=np.uint8)
    return codes


def read_columns(tensor: StoredTensor, first: int, last: int) -> Codes:
    """Columns ``first`` to ``last`` of a matrix (rows, columns), as bytes (rows, columns, each)."""
    rows, columns = tensor.info.shape
    each = tensor.info.format.block_bytes
    if last - first == columns:
        return tensor.read().data.reshape(rows, columns, each)
    size = (last - first) * each
    out = np.empty((rows, size), np.uint8)
    for row in range(rows):
        out[row] = tensor.file.read(tensor.offset + (row * columns + first) * each, size)
    return out.reshape(rows, -1, each)
