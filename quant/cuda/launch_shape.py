"""Divides a product among a GPU's blocks and warps, by its shape and the number of processors.

Results do not depend on it. It does not launch anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from localrt.quant.cuda.formats import halves_steps

# For linear_many.cu: tiles per block, and rows of records that fit in the GPU's cache.
_BLOCK_TILES, _CACHED_ROWS = 4, 512
# Formats for which four groups of eight rows need more registers than a thread has.
_NARROW = ("nvfp4", "q2_k", "q4_k", "iq3_xxs")


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a product is divided: ``pairs`` of tiles per warp, ``groups`` of eight rows at once, and
    ``parts`` blocks that share the columns of the same rows.
    """

    pairs: int
    groups: int
    parts: int = 1


@cache  # called by every launch
def best_shape(format_: str, rows: int, tiles: int, processors: int) -> LaunchShape:
    """The launch shape for ``rows`` rows of records and ``tiles``: enough blocks to occupy the
    ``processors``, within each one's registers.
    """
    # Two pairs share the activations that a warp loads, but need more registers and enough blocks.
    light = format_ == "nvfp4" and rows == 1 and tiles >= 16 * processors
    groups = min(2 if format_ in _NARROW else 4, groups_of(rows))
    blocks = -(-tiles // (4 if light else 2)) * -(-rows // (8 * groups))
    parts = 1 if blocks >= processors else 2 if 2 * blocks >= processors else 4
    return LaunchShape(pairs=2 if light else 1, groups=groups, parts=parts)


def many_grid(format_: str, rows: int, tiles: int, processors: int) -> tuple[int, int, int] | None:
    """The grid of the kernel for many rows; None if the kernel for few rows is used: up to 32 rows,
    or up to 64 if blocks of 64 weight rows would leave processors idle.
    """
    each = 96 if halves_steps(format_) else 128  # ROWS of linear_many.cu
    along, across = -(-rows // each), -(-tiles // _BLOCK_TILES)
    if rows <= 32 or (rows <= 64 and along * across < processors):
        return None
    cached = min(along, _CACHED_ROWS // each)
    return cached, across, -(-along // cached)


def groups_of(rows: int) -> int:
    """The most groups of eight rows that a warp multiplies at once; records are padded to them."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4
