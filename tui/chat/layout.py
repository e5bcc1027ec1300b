"""The lines of a conversation: where each block is, how a line is painted, where a search matches.

A block's height is an estimate until it is laid out. While an answer streams, nearly every visible
line stays the same, so finished lines are cached while valid. Blocks out of sight are searched as
text, and laid out only when the user goes to a match in them. Knows no widget.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from unicodedata import normalize

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.selection import Selection
from textual.strip import Strip

from localrt.tui.chat.blocks import GUTTER, Styles, TurnBlock
from localrt.tui.chat.markdown import pieces

# Lines outside the view that stay laid out, for scrolling. Each line is a dozen objects, which the
# garbage collector scans again and again.
_KEPT_LINES = 500
_PAINTED_LINES = 400  # finished lines in the cache


class TextPlace(NamedTuple):
    """A place in a block's text: its row (negative in the gap), and the count of letters above."""

    block: int
    row: int
    letters: int


class BlockColumn:
    """Blocks stacked in ``width`` columns; lines count from 0 at the top."""

    def __init__(self) -> None:
        self.blocks: list[TurnBlock] = []
        self.width = 0  # not known yet
        self._tops = [0]  # the first line of each block, its gap included; then the end

    @property
    def height(self) -> int:
        return self._tops[-1]

    def measure(self, first: int = 0) -> None:
        """Compute the heights from block ``first`` on again."""
        first = min(first, len(self._tops) - 1)  # blocks may be added before the first measuring
        del self._tops[first + 1 :]
        top = self._tops[first]
        for block in self.blocks[first:]:
            top += block.gap + block.height(self.width)[0]
            self._tops.append(top)

    def span(self, place: int) -> tuple[int, int]:
        """The first line of a block (its gap included) and the first line below it."""
        if place >= len(self.blocks):
            return self.height, self.height
        return self._tops[place], self._tops[place + 1]

    def at(self, line: int) -> int:
        """The index of the block at a line; the last one for lines below the end."""
        return max(min(bisect_right(self._tops, line), len(self.blocks)) - 1, 0)

    def row(self, line: int) -> tuple[TurnBlock | None, int]:
        """The block at a line and the row in it; None in a gap."""
        block = self.blocks[self.at(line)]
        row = line - self._tops[self.at(line)] - block.gap
        return (block, row) if row >= 0 else (None, 0)

    def place_at(self, line: int, styles: Styles) -> TextPlace | None:
        """The place in the text where a line begins."""
        if not self.blocks or not self.width:
            return None
        place = self.at(line)
        row = line - self._tops[place] - self.blocks[place].gap
        rows = self.blocks[place].lines(self.width, styles)
        return TextPlace(place, row, sum(map(_letters, rows[: max(row, 0)])))

    def line_of(self, place: int, row: int, letters: int, styles: Styles) -> int:
        """The line that currently shows this place of the text."""
        if row > 0:
            row = -1
            for text in self.blocks[place].lines(self.width, styles):
                if letters < 0:
                    break
                letters -= _letters(text)
                row += 1
        return self._tops[place] + self.blocks[place].gap + row

    def between(self, first: int, end: int) -> Iterator[int]:
        """Indices of the blocks with lines from ``first`` up to, but not including, ``end``."""
        place = self.at(first)
        while place < len(self.blocks) and self._tops[place] < end:
            yield place
            place += 1

    def counted(self, place: int) -> bool:
        """Whether a block's height was counted, not estimated."""
        return self.blocks[place].height(self.width)[1]

    def lay_out(self, places: Iterable[int], styles: Styles) -> None:
        places = list(places)
        for place in places:
            self.blocks[place].lines(self.width, styles)
        if places:
            self.measure(min(places))

    def forget(self, first: int, end: int) -> None:
        """If many lines are laid out, drop those far from lines ``first`` to ``end``."""
        laid_out = [place for place, block in enumerate(self.blocks) if block.laid_out]
        lines = sum(self.blocks[place].height(self.width)[0] for place in laid_out)
        if lines <= 2 * _KEPT_LINES:
            return
        seen = set(self.between(first, end))
        for place in sorted(laid_out, key=lambda place: -abs(place - min(seen, default=0))):
            if lines <= _KEPT_LINES or place in seen:
                break
            lines -= self.blocks[place].height(self.width)[0]
            self.blocks[place].forget()


class _Painted(NamedTuple):
    """A finished line and its inputs; it is valid while these are unchanged."""

    text: Strip | None
    gutter: Segment | None
    background: Style
    line: Strip


class LinePainter:
    """Paints lines of ``column``."""

    def __init__(self, column: BlockColumn) -> None:
        self._column = column
        self._painted: dict[int, _Painted] = {}

    def paint(
        self,
        line: int,
        width: int,
        styles: Styles,
        marked: TurnBlock | None,
        highlights: Sequence[tuple[int, int, Style]] = (),
    ) -> Strip:
        """A line ``width`` columns wide; ``highlights`` are ranges of characters (end excluded, -1
        for the line's end) and their style.
        """
        if line >= self._column.height:
            return Strip.blank(width, styles.base)
        text, gutter, background = self._parts(line, styles, marked)
        if highlights:
            strip = _joined(text, gutter)
            for start, end, style in highlights:
                strip = _highlighted(strip, (start, end), style)
            return _finished(strip, background, line, width)
        painted = self._painted.get(line)
        if (
            painted is None
            or painted.text is not text
            or painted.gutter != gutter
            or painted.background is not background
            or painted.line.cell_length != width
        ):
            if len(self._painted) > _PAINTED_LINES:
                self._painted.clear()
            finished = _finished(_joined(text, gutter), background, line, width)
            painted = self._painted[line] = _Painted(text, gutter, background, finished)
        return painted.line

    def selected_text(self, selection: Selection, styles: Styles) -> str:
        """The text of a selection; only its lines are painted."""
        lines = self._column.height
        first = 0 if selection.start is None else max(selection.start.y, 0)
        last = lines - 1 if selection.end is None else min(selection.end.y, lines - 1)
        parts = []
        for y in range(first, last + 1):
            span = selection.get_span(y)
            if span is None:
                continue
            start, end = max(span[0], GUTTER), span[1]
            text, gutter, _ = self._parts(y, styles, None)
            line = _joined(text, gutter).text
            parts.append(line[start:] if end < 0 else line[start:end])
        return "\n".join(part.rstrip() for part in parts)

    def _parts(
        self, line: int, styles: Styles, marked: TurnBlock | None
    ) -> tuple[Strip | None, Segment | None, Style]:
        """A line's text, gutter and background; a gap has no text and no gutter."""
        block, row = self._column.row(line)
        if block is None:
            return None, None, styles.base
        lines = block.lines(self._column.width, styles)
        text = lines[row] if row < len(lines) else None
        return text, block.gutter(styles, block is marked), block.background(styles)


def _letters(line: Strip) -> int:
    return len("".join(line.text.split()))


def _joined(text: Strip | None, gutter: Segment | None) -> Strip:
    """A line with its margin and gutter."""
    parts = [Segment(" "), gutter or Segment("  ")]
    return Strip([*parts, *text] if text is not None else parts)


def _finished(strip: Strip, background: Style, line: int, width: int) -> Strip:
    strip = strip.apply_style(background).adjust_cell_length(width, background)
    return strip.apply_offsets(0, line)


def _highlighted(strip: Strip, span: tuple[int, int], style: Style) -> Strip:
    """The strip with characters ``span`` in ``style``; an end of -1 is the line's end."""
    text = strip.text
    start, end = max(span[0], GUTTER), span[1]
    left = cell_len(text[:start])
    right = strip.cell_length if end < 0 else cell_len(text[:end])
    if right <= left:
        return strip
    before, inside, after = strip.crop(0, left), strip.crop(left, right), strip.crop(right)
    marked = [Segment(part.text, (part.style or Style.null()) + style) for part in inside]
    return Strip.join([before, Strip(marked), after])


_MARKS = re.compile(r"[*`]+|(?<!\w)_+|_+(?!\w)")  # Markdown's marks, which are not shown
_Spans = tuple[tuple[int, int, int], ...]  # (row, first character, end) for each line of a match


@dataclass(frozen=True, slots=True)
class Match:
    """Place ``number`` of a block, from 0."""

    block: TurnBlock
    number: int


class Finder:
    """Searches the turns of ``column``. Case is ignored; a space also matches the end of
    a line.
    """

    def __init__(self, column: BlockColumn) -> None:
        self._column = column
        self._pattern: re.Pattern[str] | None = None
        self._matches: dict[TurnBlock, list[_Spans]] = {}  # matches of blocks that are laid out
        self._counts: dict[TurnBlock, int] = {}  # matches in the text of other blocks
        self.now: Match | None = None  # the current match

    @property
    def active(self) -> bool:
        return self._pattern is not None

    def look_for(self, query: str) -> None:
        """Search for another text; an empty one ends the search."""
        parts = ["\n?".join(map(_either, pieces(word))) for word in normalize("NFC", query).split()]
        self._pattern = re.compile(r"\s+".join(parts), re.IGNORECASE) if parts else None
        self.forget()

    def forget(self, block: TurnBlock | None = None) -> None:
        if block is not None:
            self._matches.pop(block, None)
            self._counts.pop(block, None)
            return
        self._matches.clear()
        self._counts.clear()
        if self._pattern is None:
            self.now = None

    @property
    def match_count(self) -> tuple[int, int]:
        """The current match's number and the number of matches, also outside the view."""
        place, total = 0, 0
        for block in self._column.blocks:
            if self.now is not None and block is self.now.block:
                place = total + self.now.number + 1
            total += self._count(block)
        return place, total

    def nearest(self, line: int, styles: Styles) -> Match | None:
        """The first match at or below ``line``, else the last one above it."""
        blocks = self._column.blocks
        first = self._column.at(line) if blocks else 0
        for place in range(first, len(blocks)):
            spans = self._spans(blocks[place], styles)
            top = self._column.span(place)[0] + blocks[place].gap
            for number, match in enumerate(spans):
                if top + match[0][0] >= line:
                    return Match(blocks[place], number)
        for place in range(min(first, len(blocks) - 1), -1, -1):
            if spans := self._spans(blocks[place], styles):
                return Match(blocks[place], len(spans) - 1)
        return None

    def following(self, step: int, styles: Styles) -> Match | None:
        """The next (+1) or previous (-1) match, wrapping around at the ends."""
        blocks, now = self._column.blocks, self.now
        if now is None or now.block not in blocks:
            return self.nearest(0, styles)
        number = now.number + step
        if 0 <= number < len(self._spans(now.block, styles)):
            return Match(now.block, number)
        start = blocks.index(now.block)
        for away in range(1, len(blocks) + 1):
            block = blocks[(start + step * away) % len(blocks)]
            if spans := self._spans(block, styles):
                return Match(block, 0 if step > 0 else len(spans) - 1)
        return None

    def line(self, place: Match, styles: Styles) -> int:
        """The line where a match begins."""
        at = self._column.blocks.index(place.block)
        row = self._spans(place.block, styles)[place.number][0][0]
        return self._column.span(at)[0] + place.block.gap + row

    def marked(self, line: int, styles: Styles) -> Iterator[tuple[int, int, bool]]:
        """The matches in a line: first character, end, whether it is the current one."""
        block, row = self._column.row(line)
        if block is None or not block.role:
            return
        for number, match in enumerate(self._spans(block, styles)):
            for at, start, end in match:
                if at == row:
                    yield start, end, self.now == Match(block, number)

    def _count(self, block: TurnBlock) -> int:
        if (matches := self._matches.get(block)) is not None:
            return len(matches)
        if block not in self._counts:
            text = block.readable if block.role else ""
            shown = _MARKS.sub("", text)  # code may show the marks, so both are searched
            self._counts[block] = max(self._number(text), self._number(shown))
        return self._counts[block]

    def _number(self, text: str) -> int:
        return 0 if self._pattern is None else sum(1 for _ in self._pattern.finditer(text))

    def _spans(self, block: TurnBlock, styles: Styles) -> list[_Spans]:
        """The matches of a block; it is laid out only if its text has any."""
        if (matches := self._matches.get(block)) is not None:
            return matches
        if self._pattern is None or not block.role:
            return []
        if not block.laid_out and not self._count(block):
            return []
        column = self._column
        guessed = not column.counted(column.blocks.index(block))
        matches = _matches_in(self._pattern, block.lines(column.width, styles))
        self._matches[block] = matches
        if guessed:
            column.measure(column.blocks.index(block))
        return matches


def _either(text: str) -> str:
    """A pattern that matches a text with composed or decomposed accents."""
    forms = ({re.escape(c): 0, re.escape(normalize("NFD", c)): 0} for c in text)
    return "".join(f"(?:{'|'.join(form)})" if len(form) > 1 else "".join(form) for form in forms)


def _matches_in(pattern: re.Pattern[str], lines: Sequence[Strip]) -> list[_Spans]:
    """The matches in lines; a match may span several."""
    texts = [line.text.rstrip() for line in lines]
    starts = [0, *accumulate(len(text) + 1 for text in texts)]  # including the end
    matches: list[_Spans] = []
    row = 0
    for match in pattern.finditer("\n".join(texts)):
        while starts[row + 1] <= match.start():
            row += 1
        spans = []
        for at in range(row, len(texts)):
            if starts[at] >= match.end():
                break
            start = max(match.start() - starts[at], 0)
            spans.append((at, start, min(match.end() - starts[at], len(texts[at]))))
        matches.append(tuple(spans))
    return matches
