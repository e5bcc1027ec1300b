"""One sequence's keys and values in RAM: what ``BlockFile`` has on the disk, without sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localrt.models.prefix import Tokens
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.kv import BlockCache, FillBlocks, held_blocks
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.states import SavedState, reachable

_PIECE = 16 << 20  # bytes taken at once: they are in RAM twice for a moment


@dataclass(frozen=True, slots=True, eq=False)
class RamCopy:
    """``tokens`` with their ``blocks`` (count, block_bytes), and the states of recurrent layers."""

    tokens: Tokens
    layout: str
    blocks: Bytes
    saved: Sequence[SavedState]

    @classmethod
    def of(cls, tokens: Tokens, layout: str, cache: BlockCache) -> RamCopy:
        """Copy ``cache``, which holds ``tokens``."""
        blocks = np.empty((-(-len(tokens) // BLOCK_TOKENS), cache.block_bytes), np.uint8)
        step = max(1, _PIECE // max(1, cache.block_bytes))
        for first in range(0, len(blocks), step):
            piece = blocks[first : first + step]
            piece[:] = cache.take_blocks(first, len(piece))
        return cls(tokens, layout, blocks, cache.saved_states())

    @property
    def nbytes(self) -> int:
        """Bytes of RAM."""
        return int(self.blocks.nbytes) + sum(state.data.nbytes for state in self.saved)

    def reach(self, length: int) -> int:
        """How many of the first ``length`` tokens can be restored."""
        return reachable(self.saved, length)

    def states(self, length: int) -> list[SavedState]:
        """The states of the first ``length`` tokens."""
        return [state for state in self.saved if state.position <= length]

    def take(self, first: int, count: int) -> Bytes:
        """Blocks ``first`` to ``first + count``."""
        return self.blocks[first : first + count]

    def read(self, length: int, fill: FillBlocks) -> int:
        """Fill a cache with the blocks of ``length`` tokens."""
        fill(0, -(-length // BLOCK_TOKENS), held_blocks(self.blocks))
        return length
