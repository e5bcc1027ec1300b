"""How torch keeps a GPU's memory: a model of its caching allocator, in bytes and without memory.

Up to 1 MiB comes from segments of 2 MiB, less than 10 MiB from segments of 20 MiB, and more from
segments of whole 2 MiB; each kind of request from segments of its own kind. The smallest free block
that suffices is taken, and split if enough stays. Freed blocks are joined with free neighbours and
kept: the driver counts them as taken until ``empty_cache`` or until memory runs out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

MIB = 1 << 20
_ROUND = 512
_SMALL = MIB
_SMALL_SEGMENT, _MIDDLE_SEGMENT, _LEAST_LARGE = 2 * MIB, 20 * MIB, 10 * MIB


@dataclass(eq=False)
class Block:
    """Part of a segment; ``asked`` is what was requested, None while it is free."""

    segment: Segment
    nbytes: int
    asked: int | None = None


@dataclass(eq=False)
class Segment:
    nbytes: int
    small: bool
    blocks: list[Block] = field(default_factory=list)  # in order

    @property
    def unused(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].asked is None


class TorchAllocator:
    """A GPU of ``total`` bytes, of which other programs have ``others``."""

    def __init__(self, total: int, others: int = 0) -> None:
        self.total, self.others = total, others
        self.segments: list[Segment] = []
        self.emptied = 0  # times that memory ran out and what was kept was given back

    @property
    def reserved(self) -> int:
        """See ``torch.cuda.memory_reserved``."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def allocated(self) -> int:
        """See ``torch.cuda.memory_allocated``: what was asked for, rounded."""
        return sum(block.nbytes for block in self._blocks() if block.asked is not None)

    @property
    def asked(self) -> int:
        """What was asked for."""
        return sum(block.asked or 0 for block in self._blocks())

    @property
    def free_nbytes(self) -> int:
        """See ``torch.cuda.mem_get_info``."""
        return max(0, self.total - self.others - self.reserved)

    def alloc(self, nbytes: int) -> Block:
        """See ``torch.empty``.

        Raises:
            torch.OutOfMemoryError: there is no room, even without what is kept.
        """
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        found = self._fitting(size, small=small)
        if found is None:
            found = self._new_segment(size, small=small)
        rest = found.nbytes - size
        if rest >= _ROUND if small else rest > _SMALL:
            blocks = found.segment.blocks
            blocks.insert(blocks.index(found) + 1, Block(found.segment, rest))
            found.nbytes = size
        found.asked = nbytes
        return found

    def free(self, block: Block) -> None:
        """Keep the memory for what is asked for next."""
        assert block.asked is not None, "freed twice"
        block.asked = None
        merged: list[Block] = []
        for each in block.segment.blocks:
            if merged and merged[-1].asked is None and each.asked is None:
                merged[-1].nbytes += each.nbytes
            else:
                merged.append(each)
        block.segment.blocks = merged

    def empty_cache(self) -> None:
        """Give segments without any block in use back to the driver."""
        self.segments = [segment for segment in self.segments if not segment.unused]

    def _blocks(self) -> list[Block]:
        return [block for segment in self.segments for block in segment.blocks]

    def _fitting(self, size: int, *, small: bool) -> Block | None:
        fitting = [
            block
            for block in self._blocks()
            if block.asked is None and block.segment.small is small and block.nbytes >= size
        ]
        return min(fitting, key=lambda block: block.nbytes, default=None)

    def _new_segment(self, size: int, *, small: bool) -> Block:
        nbytes = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if small:
            nbytes = _SMALL_SEGMENT
        elif size < _LEAST_LARGE:
            nbytes = _MIDDLE_SEGMENT
        if nbytes > self.free_nbytes:
            self.emptied += 1
            self.empty_cache()
        if nbytes > self.free_nbytes:
            raise torch.OutOfMemoryError
        segment = Segment(nbytes, small)
        segment.blocks.append(Block(segment, nbytes))
        self.segments.append(segment)
        return segment.blocks[0]
