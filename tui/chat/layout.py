"""The lines of a conversation: where each block is, how a line is painted, where a search matches.

Blocks consist of sections, whose heights are estimates until they are laid out. While an answer
streams, nearly every visible line stays the same, so finished lines are cached while valid. What is
out of sight is searched as text, and laid out only when the user goes to a match there. Knows no
widget.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple
from unicodedata import normalize

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.selection import Selection
from textual.strip import Strip

from localrt.tui.chat.blocks import GUTTER, Section, Styles, TurnBlock
from localrt.tui.chat.markdown import pieces

# Lines outside the view that stay laid out, for scrolling. Each line is a dozen objects, which the
# garbage collector scans again and again.
_KEPT_LINES = 500
_PAINTED_LINES = 400  # finished lines in the cache


class TextPlace(NamedTuple):
    """A place in a section's text: its row (negative in the gap), and the letters above it."""

    section: int
    row: int
    letters: int


class BlockColumn:
    """Blocks stacked in ``width`` columns; lines count from 0 at the top.

    Places are those of sections, which are counted through all blocks.
    """

    def __init__(self) -> None:
        self.blocks: list[TurnBlock] = []
        self.width = 0  # not known yet
        self.sections: list[Section] = []
        self.owners: list[TurnBlock] = []  # the block of each section
        self._firsts = [0]  # the first section of each block; then the number of sections
        self._tops = [0]  # the first line of each section, its gap included; then the end

    @property
    def height(self) -> int:
        return self._tops[-1]

    def first(self, block: int) -> int:
        """The place of a block's first section."""
        return self._firsts[min(block, len(self._firsts) - 1)]

    def gather(self, first: int = 0) -> None:
        """Take the sections of the blocks from ``first`` on again, and compute their heights."""
        place = self.first(first)
        del self._firsts[first + 1 :], self.sections[place:], self.owners[place:]
        for block in self.blocks[len(self._firsts) - 1 :]:
            sections = block.sections
            self.sections += sections
            self.owners += [block] * len(sections)
            self._firsts.append(len(self.sections))
        self.measure(place)

    def measure(self, first: int = 0) -> None:
        """Compute the heights from section ``first`` on again."""
        del self._tops[first + 1 :]
        top = self._tops[first]
        for section in self.sections[first:]:
            top += section.gap + section.height(self.width)[0]
            self._tops.append(top)

    def span(self, place: int) -> tuple[int, int]:
        """The first line of a section (its gap included) and the first line below it."""
        if place >= len(self.sections):
            return self.height, self.height
        return self._tops[place], self._tops[place + 1]

    def block_span(self, block: int) -> tuple[int, int]:
        """The first line of a block and the first line below it."""
        return self._tops[self.first(block)], self._tops[self.first(block + 1)]

    def at(self, line: int) -> int:
        """The place of the section at a line; the last one for lines below the end."""
        return max(min(bisect_right(self._tops, line), len(self.sections)) - 1, 0)

    def row(self, line: int) -> tuple[int, int]:
        """The place of the section at a line and the row in it, negative in its gap."""
        place = self.at(line)
        return place, line - self._tops[place] - self.sections[place].gap

    def lines(self, place: int, styles: Styles) -> list[Strip]:
        return self.sections[place].lines(self.width, styles)

    def place_at(self, line: int, styles: Styles) -> TextPlace | None:
        """The place in the text where a line begins."""
        if not self.sections or not self.width:
            return None
        place, row = self.row(line)
        return TextPlace(place, row, sum(map(_letters, self.lines(place, styles)[: max(row, 0)])))

    def line_of(self, place: int, row: int, letters: int, styles: Styles) -> int:
        """The line that currently shows this place of the text."""
        if row > 0:
            row = -1
            for text in self.lines(place, styles):
                if letters < 0:
                    break
                letters -= _letters(text)
                row += 1
        return self._tops[place] + self.sections[place].gap + row

    def between(self, first: int, end: int) -> Iterator[int]:
        """Places of the sections with lines from ``first`` up to, but not including, ``end``."""
        place = self.at(first)
        while place < len(self.sections) and self._tops[place] < end:
            yield place
            place += 1

    def counted(self, place: int) -> bool:
        """Whether a section's height was counted, not estimated."""
        return self.sections[place].height(self.width)[1]

    def lay_out(self, places: Iterable[int], styles: Styles) -> None:
        places = list(places)
        for place in places:
            self.lines(place, styles)
        if places:
            self.measure(min(places))

    def forget(self, first: int, end: int) -> None:
        """If many lines are laid out, drop those far from lines ``first`` to ``end``."""
        laid_out = [place for place, section in enumerate(self.sections) if section.laid_out]
        lines = sum(self.sections[place].height(self.width)[0] for place in laid_out)
        if lines <= 2 * _KEPT_LINES:
            return
        seen = set(self.between(first, end))
        for place in sorted(laid_out, key=lambda place: -abs(place - min(seen, default=0))):
            if lines <= _KEPT_LINES or place in seen:
                break
            lines -= self.sections[place].height(self.width)[0]
            self.sections[place].forget()


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
        """The text of a selection; only its lines are laid out. A thread may call this."""
        column, lines = self._column, self._column.height
        first = 0 if selection.start is None else max(selection.start.y, 0)
        last = lines - 1 if selection.end is None else min(selection.end.y, lines - 1)
        places = list(column.between(first, last + 1))
        parts = []
        for place in places:
            section = column.sections[place]
            texts = [None] * section.gap + column.lines(place, styles)
            top = column.span(place)[0]
            begin = max(first - top, 0)
            end = last + 1 - top if place == places[-1] else len(texts)
            gutter = column.owners[place].gutter(styles, False)
            for row, text in enumerate(texts[begin:end], begin):
                # Heights may still be estimates in the middle, where lines are taken as a whole.
                y = top + row if place in (places[0], places[-1]) else (first + last) // 2
                span = selection.get_span(y) or (0, -1)
                line = _joined(text, None if row < section.gap else gutter).text
                start, stop = max(span[0], GUTTER), span[1]
                parts.append(line[start:] if stop < 0 else line[start:stop])
        return "\n".join(part.rstrip() for part in parts)

    def _parts(
        self, line: int, styles: Styles, marked: TurnBlock | None
    ) -> tuple[Strip | None, Segment | None, Style]:
        """A line's text, gutter and background; a gap has no text and no gutter."""
        place, row = self._column.row(line)
        if row < 0:
            return None, None, styles.base
        lines, block = self._column.lines(place, styles), self._column.owners[place]
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
    """Place ``number`` of a section, from 0."""

    section: Section
    number: int
    place: int = field(default=0, compare=False)  # of the section, as it was last


class Finder:
    """Searches the turns of ``column``. Case is ignored; a space also matches the end of
    a line.
    """

    def __init__(self, column: BlockColumn) -> None:
        self._column = column
        self._pattern: re.Pattern[str] | None = None
        self._matches: dict[Section, list[_Spans]] = {}  # matches of sections that are laid out
        self._counts: dict[Section, int] = {}  # matches in the text of other sections
        self.now: Match | None = None  # the current match

    @property
    def active(self) -> bool:
        return self._pattern is not None

    def look_for(self, query: str) -> None:
        """Search for another text; an empty one ends the search. Call ``count`` next."""
        parts = ["\n?".join(map(_either, pieces(word))) for word in normalize("NFC", query).split()]
        self._pattern = re.compile(r"\s+".join(parts), re.IGNORECASE) if parts else None
        self.forget()

    def count(self) -> None:
        """Search all text, unless another is looked for meanwhile; takes a while, for a thread."""
        pattern, counts = self._pattern, dict[Section, int]()
        for section, block in zip(tuple(self._column.sections), self._column.owners, strict=False):
            if pattern is None or pattern is not self._pattern:
                return
            counts[section] = _count(pattern, section, block)
        self._counts |= counts

    def forget(self, block: TurnBlock | None = None) -> None:
        if block is not None:  # other sections are new ones when their text changes
            self._matches.pop(block, None)
            self._counts.pop(block, None)
            return
        self._matches.clear()
        self._counts.clear()
        if self._pattern is None:
            self.now = None

    def keep(self) -> None:
        """Called when sections have changed: one that has grown is another, in the same place."""
        sections, now = self._column.sections, self.now
        if now is not None and now.section in sections:
            self.now = replace(now, place=sections.index(now.section))
        elif now is not None and now.place < len(sections):
            self.now = replace(now, section=sections[now.place])

    @property
    def match_count(self) -> tuple[int, int]:
        """The current match's number and the number of matches, also outside the view."""
        number, total = 0, 0
        for place, section in enumerate(self._column.sections):
            if self.now is not None and section is self.now.section:
                number = total + self.now.number + 1
            total += self._count(place)
        return number, total

    def nearest(self, line: int, styles: Styles) -> Match | None:
        """The first match at or below ``line``, else the last one above it."""
        sections = self._column.sections
        first = self._column.at(line)
        for place in range(first, len(sections)):
            spans = self._spans(place, styles)
            top = self._column.span(place)[0] + sections[place].gap
            for number, match in enumerate(spans):
                if top + match[0][0] >= line:
                    return Match(sections[place], number, place)
        for place in range(min(first, len(sections) - 1), -1, -1):
            if spans := self._spans(place, styles):
                return Match(sections[place], len(spans) - 1, place)
        return None

    def following(self, step: int, styles: Styles) -> Match | None:
        """The next (+1) or previous (-1) match, wrapping around at the ends."""
        sections, now = self._column.sections, self.now
        if now is None or now.section not in sections:
            return self.nearest(0, styles)
        number, start = now.number + step, sections.index(now.section)
        if 0 <= number < len(self._spans(start, styles)):
            return Match(now.section, number, start)
        for away in range(1, len(sections) + 1):
            place = (start + step * away) % len(sections)
            if spans := self._spans(place, styles):
                return Match(sections[place], 0 if step > 0 else len(spans) - 1, place)
        return None

    def line(self, match: Match, styles: Styles) -> int:
        """The line where a match begins."""
        place = self._column.sections.index(match.section)
        row = self._spans(place, styles)[match.number][0][0]
        return self._column.span(place)[0] + match.section.gap + row

    def marked(self, line: int, styles: Styles) -> Iterator[tuple[int, int, bool]]:
        """The matches in a line: first character, end, whether it is the current one."""
        place, row = self._column.row(line)
        for number, match in enumerate(self._spans(place, styles)):
            for at, start, end in match:
                if at == row:
                    yield start, end, self.now == Match(self._column.sections[place], number)

    def _count(self, place: int) -> int:
        section = self._column.sections[place]
        if (matches := self._matches.get(section)) is not None:
            return len(matches)
        if section not in self._counts:
            block = self._column.owners[place]
            self._counts[section] = _count(self._pattern, section, block)
        return self._counts[section]

    def _spans(self, place: int, styles: Styles) -> list[_Spans]:
        """The matches of a section; it is laid out only if its text has any."""
        column, section = self._column, self._column.sections[place]
        if (matches := self._matches.get(section)) is not None:
            return matches
        if self._pattern is None or not column.owners[place].role:
            return []
        if not section.laid_out and not self._count(place):
            return []
        guessed = not column.counted(place)
        matches = _matches_in(self._pattern, column.lines(place, styles))
        self._matches[section] = matches
        if guessed:
            column.measure(place)
        return matches


def _count(pattern: re.Pattern[str] | None, section: Section, block: TurnBlock) -> int:
    """The number of matches in the text of a section."""
    text = section.readable if block.role and pattern is not None else ""
    if pattern is None or not text:
        return 0
    texts = text, _MARKS.sub("", text)  # code may show the marks, so both are searched
    return max(sum(1 for _ in pattern.finditer(each)) for each in texts)


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
