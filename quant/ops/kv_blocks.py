"""Taking the bytes of a KV cache out and putting them back, in blocks of 256 tokens.

What a cache is saved with to a file, or moved with to another memory. A block holds all layers of
its tokens; a last, partial one is taken whole. Bytes only go back into a cache of the same layout.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.protocol import KVCache

__all__ = ["BLOCK_TOKENS", "BlockCache", "Bytes"]

Bytes = npt.NDArray[np.uint8]

BLOCK_TOKENS = 256


@runtime_checkable
class BlockCache(KVCache, Protocol):
    """One that can be taken out."""

    @property
    def kv_layout(self) -> str:
        """Names what the bytes mean: format, heads, widths. Empty: it cannot be taken out."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def take_blocks(self, first: int, count: int) -> Bytes:
        """Blocks ``first`` to ``first + count``, (count, block_bytes): to be read before the next
        pass. They must lie within what is allocated.
        """

    def put_blocks(self, first: int, blocks: Bytes) -> None:
        """Put them where room is reserved; ``advance`` makes their tokens count."""
