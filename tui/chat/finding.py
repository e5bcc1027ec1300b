"""Finding words in a conversation: which blocks have them, and where in their lines they stand.

A conversation may be long and laying it out takes time: blocks that nobody has looked at are
searched as text, and their lines only once a match in them is gone to. Knows blocks and their
column, no widget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from textual.strip import Strip

from localrt.tui.chat.blocks import Block
from localrt.tui.chat.layout import BlockColumn
from localrt.tui.chat.markdown_rules import pieces
from localrt.tui.chat.styles import Styles

_MARKS = re.compile(r"[*`]+|(?<!\w)_+|_+(?!\w)")  # of Markdown, which are not shown
_Spans = tuple[tuple[int, int, int], ...]  # row, first character, end; one for each line of a match


@dataclass(frozen=True, slots=True)
class Place:
    """Match ``number`` of a block, from 0."""

    block: Block
    number: int


class Finder:
    """Looks for words in the turns of ``column``. Case does not matter; a space may be the end of
    a line.
    """

    def __init__(self, column: BlockColumn) -> None:
        self._column = column
        self._pattern: re.Pattern[str] | None = None
        self._matches: dict[Block, list[_Spans]] = {}  # of blocks that are laid out
        self._counts: dict[Block, int] = {}  # of the others, by their text
        self.now: Place | None = None  # the match that was gone to

    @property
    def active(self) -> bool:
        """Whether there are words to find."""
        return self._pattern is not None

    def look_for(self, words: str) -> None:
        """Begin with other words; none ends it."""
        parts = ["\n?".join(map(re.escape, pieces(word))) for word in words.split()]
        self._pattern = re.compile(r"\s+".join(parts), re.IGNORECASE) if parts else None
        self.forget()

    def forget(self, block: Block | None = None) -> None:
        """A block's lines have changed, or those of all."""
        if block is not None:
            self._matches.pop(block, None)
            self._counts.pop(block, None)
            return
        self._matches.clear()
        self._counts.clear()
        if self._pattern is None:
            self.now = None

    @property
    def counted(self) -> tuple[int, int]:
        """Which match of how many was gone to; blocks out of sight are counted by their text."""
        place, total = 0, 0
        for block in self._column.blocks:
            if self.now is not None and block is self.now.block:
                place = total + self.now.number + 1
            total += self._count(block)
        return place, total

    def nearest(self, line: int, styles: Styles) -> Place | None:
        """Go to the first match from ``line`` on, else to the last one above it."""
        blocks = self._column.blocks
        first = self._column.at(line) if blocks else 0
        for place in range(first, len(blocks)):
            spans = self._spans(blocks[place], styles)
            top = self._column.span(place)[0] + blocks[place].gap
            for number, match in enumerate(spans):
                if top + match[0][0] >= line:
                    self.now = Place(blocks[place], number)
                    return self.now
        for place in range(min(first, len(blocks) - 1), -1, -1):
            if spans := self._spans(blocks[place], styles):
                self.now = Place(blocks[place], len(spans) - 1)
                return self.now
        self.now = None
        return None

    def move(self, step: int, styles: Styles) -> Place | None:
        """Go to the next (+1) or previous (-1) match, round the ends."""
        blocks, now = self._column.blocks, self.now
        if now is None or now.block not in blocks:
            return self.nearest(0, styles)
        number = now.number + step
        if 0 <= number < len(self._spans(now.block, styles)):
            self.now = Place(now.block, number)
            return self.now
        here = blocks.index(now.block)
        for away in range(1, len(blocks) + 1):
            block = blocks[(here + step * away) % len(blocks)]
            if spans := self._spans(block, styles):
                self.now = Place(block, 0 if step > 0 else len(spans) - 1)
                return self.now
        self.now = None
        return None

    def line(self, place: Place, styles: Styles) -> int:
        """Where a match begins."""
        at = self._column.blocks.index(place.block)
        row = self._spans(place.block, styles)[place.number][0][0]
        return self._column.span(at)[0] + place.block.gap + row

    def marked(self, line: int, styles: Styles) -> Iterator[tuple[int, int, bool]]:
        """The matches in a line: first character, end, whether it is the one that was gone to."""
        block, row = self._column.row(line)
        if block is None or not block.role:
            return
        for number, match in enumerate(self._spans(block, styles)):
            for at, start, end in match:
                if at == row:
                    yield start, end, self.now == Place(block, number)

    def _count(self, block: Block) -> int:
        if (known := self._matches.get(block)) is not None:
            return len(known)
        if block not in self._counts:
            text = block.readable if block.role else ""
            shown = _MARKS.sub("", text)  # or as it is, in code
            self._counts[block] = max(self._number(text), self._number(shown))
        return self._counts[block]

    def _number(self, text: str) -> int:
        return 0 if self._pattern is None else sum(1 for _ in self._pattern.finditer(text))

    def _spans(self, block: Block, styles: Styles) -> list[_Spans]:
        """The matches of a block, which is laid out for it unless its text has none."""
        if (known := self._matches.get(block)) is not None:
            return known
        if self._pattern is None or not block.role:
            return []
        if not block.laid_out and not self._count(block):
            return []
        column = self._column
        guessed = not column.counted(column.blocks.index(block))
        found = _found(self._pattern, block.lines(column.width, styles))
        self._matches[block] = found
        if guessed:
            column.measure(column.blocks.index(block))
        return found


def _found(pattern: re.Pattern[str], lines: Sequence[Strip]) -> list[_Spans]:
    """The matches in lines; a match may begin in one and end in another."""
    texts = [line.text.rstrip() for line in lines]
    starts, length = [], 0
    for text in texts:
        starts.append(length)
        length += len(text) + 1
    matches: list[_Spans] = []
    row = 0
    for match in pattern.finditer("\n".join(texts)):
        while row + 1 < len(starts) and starts[row + 1] <= match.start():
            row += 1
        spans = []
        for at in range(row, len(starts)):
            if starts[at] >= match.end():
                break
            start = max(match.start() - starts[at], 0)
            spans.append((at, start, min(match.end() - starts[at], len(texts[at]))))
        matches.append(tuple(spans))
    return matches
