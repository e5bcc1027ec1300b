"""Where the blocks of a conversation are: the first line of each, counted or guessed.

A block's height is a guess until it has been laid out. Knows blocks and numbers, no widget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from localrt.tui.blocks import Block
from localrt.tui.looks import Looks

__all__ = ["Column"]

# Laid out and out of sight, for scrolling back and forth. A line is a dozen objects, which the
# garbage collector looks at again and again.
_KEPT_LINES = 500


class Column:
    """Blocks under one another in ``width`` columns; lines count from 0 at the top."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.width = 8
        self._tops = [0]  # the first line of each block, its gap included; then the end

    @property
    def height(self) -> int:
        """All lines."""
        return self._tops[-1]

    def measure(self, first: int = 0) -> None:
        """Heights from block ``first`` on may have changed."""
        first = min(first, len(self._tops) - 1)  # blocks may have come before the first measuring
        del self._tops[first + 1 :]
        top = self._tops[first]
        for block in self.blocks[first:]:
            top += block.gap + block.height(self.width)[0]
            self._tops.append(top)

    def span(self, place: int) -> tuple[int, int]:
        """First line of a block, its gap included, and the first below it."""
        if place >= len(self.blocks):
            return self.height, self.height
        return self._tops[place], self._tops[place + 1]

    def at(self, line: int) -> int:
        """The block at a line, by place; the last for lines below the end."""
        return max(min(bisect_right(self._tops, line), len(self.blocks)) - 1, 0)

    def row(self, line: int) -> tuple[Block | None, int]:
        """The block at a line and the row in it; None in a gap."""
        block = self.blocks[self.at(line)]
        row = line - self._tops[self.at(line)] - block.gap
        return (block, row) if row >= 0 else (None, 0)

    def between(self, first: int, end: int) -> Iterator[int]:
        """The places of blocks that have lines from ``first`` to before ``end``."""
        place = self.at(first)
        while place < len(self.blocks) and self._tops[place] < end:
            yield place
            place += 1

    def counted(self, place: int) -> bool:
        """Whether a block's height is more than a guess."""
        return self.blocks[place].height(self.width)[1]

    def lay_out(self, places: Iterable[int], looks: Looks) -> None:
        """Count the heights of some blocks."""
        places = list(places)
        for place in places:
            self.blocks[place].lines(self.width, looks)
        if places:
            self.measure(min(places))

    def forget(self, first: int, end: int) -> None:
        """Let lines go that are far from lines ``first`` to ``end``, when many are kept."""
        kept = [place for place, block in enumerate(self.blocks) if block.laid_out]
        lines = sum(self.blocks[place].height(self.width)[0] for place in kept)
        if lines <= 2 * _KEPT_LINES:
            return
        seen = set(self.between(first, end))
        for place in sorted(kept, key=lambda place: -abs(place - min(seen, default=0))):
            if lines <= _KEPT_LINES or place in seen:
                break
            lines -= self.blocks[place].height(self.width)[0]
            self.blocks[place].forget()
