"""How many rows attention splits over runs of keys at once, and the memory that its parts take.

Each run of keys gives a row's result and two numbers for each head, in float32; they are joined
afterwards. This module imports nothing heavy: what is allocated can be counted anywhere.
"""

from __future__ import annotations

RUN = 256
"""Keys of a run: RUN in quant/cuda/src/attention.cuh."""

_MOST_ROWS = 64  # that are split: MOST_ROWS of the products
_MOST_NBYTES = 32 << 20


def row_nbytes(runs: int, heads: int, value: int) -> int:
    """Of a row's results of ``value`` numbers."""
    return runs * heads * (value + 2) * 4


def rows_together(rows: int, nbytes: int) -> int:
    """Of ``rows`` rows with ``nbytes`` each, so many that they stay small."""
    return max(1, min(rows, _MOST_NBYTES // nbytes))


def scratch_nbytes(heads: int, value: int, longest: int) -> int:
    """The most that passes take over caches of up to ``longest`` tokens."""
    row = row_nbytes(-(-longest // RUN), heads, value)
    return row * rows_together(_MOST_ROWS, row)
