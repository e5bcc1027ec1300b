"""The block Hadamard rotation: spreads an outlier over its block of 2^k inputs.

Orthogonal and symmetric, so it is its own inverse: W x = (W H) (H x). It does not know weights from
activations.
"""

from __future__ import annotations

import numpy as np

from localrt.quant.formats.codec import Floats

__all__ = ["block_hadamard"]

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
