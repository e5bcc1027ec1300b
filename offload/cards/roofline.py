"""Seconds of a unit's kernels on a card, by its figures: what is planned with and charged.

The larger of bytes over bandwidth and operations over arithmetic. Kernels on packed weights take up
to 64 rows at once; for more a matrix is unpacked to bf16 first, which is another pass over it, and
multiplied by the vendor's library. An expert's long passes unpack on the way.
"""

from __future__ import annotations

__all__ = ["PACKED_ROWS", "kernel_seconds"]

PACKED_ROWS = 64
"""The most rows that products with packed weights take at once."""

_UNPACKED_NBYTES = 2  # of a weight in bf16


def kernel_seconds(
    nbytes: float, macs: float, rows: int, *, bytes_s: float, flops: float, unpacks: bool = True
) -> float:
    """Of ``rows`` rows with ``macs`` packed weights in ``nbytes``, without starting them.

    ``bytes_s`` and ``flops`` are what kernels reach of the card.
    """
    computing = 2 * macs * rows / flops
    if rows <= PACKED_ROWS or not unpacks:
        return max(nbytes / bytes_s, computing)
    dense = _UNPACKED_NBYTES * macs
    return (nbytes + dense) / bytes_s + max(dense / bytes_s, computing)
