"""Divides a product among a GPU's blocks and warps, by its shape and the number of processors.

Results do not depend on it. It does not launch anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from localrt.quant.cuda.formats import halves_steps

# Of linear_many.cu: tiles of a block, rows of records that blocks have at once in the GPU's cache.
_BLOCK_TILES, _CACHED_ROWS = 4, 512
# With four eights of rows their sums and scales need more registers than there are.
_NARROW = ("nvfp4", "q2_k", "q4_k", "iq3_xxs")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is divided.

    ``pairs`` of tiles for a warp; rows in ``groups`` of eight at once; ``parts`` blocks share the
    columns of the same rows.
    """

    pairs: int
    groups: int
    parts: int = 1


@cache  # a launch asks each time
def best_cut(format_: str, rows: int, tiles: int, processors: int) -> Cut:
    """The cut of a product of ``rows`` rows of records with ``tiles``: blocks enough for a GPU of
    so many ``processors``, and no more registers than it has.
    """
    # Two pairs share the activations that a warp loads, but need registers, and blocks enough.
    light = format_ == "nvfp4" and rows == 1 and tiles >= 16 * processors
    groups = min(2 if format_ in _NARROW else 4, groups_of(rows))
    blocks = -(-tiles // (4 if light else 2)) * -(-rows // (8 * groups))
    parts = 1 if blocks >= processors else 2 if 2 * blocks >= processors else 4
    return Cut(pairs=2 if light else 1, groups=groups, parts=parts)


def many_grid(format_: str, rows: int, tiles: int, processors: int) -> tuple[int, int, int] | None:
    """The blocks of a product of many rows of records, or None where it is one of few: up to 32
    rows, and up to 64 where blocks of 64 weight rows would leave processors idle.
    """
    each = 96 if halves_steps(format_) else 128  # ROWS of linear_many.cu
    along, across = -(-rows // each), -(-tiles // _BLOCK_TILES)
    if rows <= 32 or (rows <= 64 and along * across < processors):
        return None
    cached = min(along, _CACHED_ROWS // each)
    return cached, across, -(-along // cached)


def groups_of(rows: int) -> int:
    """Rows in eights that a warp multiplies at once, at most; records have room for so many."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4
