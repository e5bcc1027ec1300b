"""The lines of a conversation as they go to the terminal, finished ones kept while they are good.

While an answer streams nearly every line in sight is as it was, and finishing a line costs more
than looking whether it still is the same. Knows columns and styles, no widget.
"""

from __future__ import annotations

from typing import NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from localrt.tui.blocks import Block
from localrt.tui.column import Column
from localrt.tui.looks import Looks
from localrt.tui.selecting import highlighted

__all__ = ["Painter"]

_MOST = 400  # lines that are kept


class _Kept(NamedTuple):
    """A finished line, and what it was made of: it is good while that is the same."""

    text: Strip | None
    gutter: Segment | None
    background: Style
    line: Strip


class Painter:
    """Paints lines of ``column``."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._kept: dict[int, _Kept] = {}

    def paint(
        self,
        line: int,
        width: int,
        looks: Looks,
        marked: Block | None,
        selected: tuple[int, int] | None,
        selection: Style | None,
    ) -> Strip:
        """A line ``width`` columns wide, characters ``selected`` in the style ``selection``."""
        if line >= self._column.height:
            return Strip.blank(width, looks.base)
        text, gutter, background = self._parts(line, looks, marked)
        if selected is not None and selection is not None:
            strip = highlighted(_joined(text, gutter), selected, selection)
            return _finished(strip, background, line, width)
        kept = self._kept.get(line)
        if (
            kept is None
            or kept.text is not text
            or kept.gutter != gutter
            or kept.background is not background
            or kept.line.cell_length != width
        ):
            if len(self._kept) > _MOST:
                self._kept.clear()
            finished = _finished(_joined(text, gutter), background, line, width)
            kept = self._kept[line] = _Kept(text, gutter, background, finished)
        return kept.line

    def text(self, line: int, looks: Looks) -> str:
        """The characters of a line, gutter included."""
        text, gutter, _ = self._parts(line, looks, None)
        return _joined(text, gutter).text

    def _parts(
        self, line: int, looks: Looks, marked: Block | None
    ) -> tuple[Strip | None, Segment | None, Style]:
        """A line's text, its gutter and what lies behind; neither text nor gutter in a gap."""
        block, row = self._column.row(line)
        if block is None:
            return None, None, looks.base
        lines = block.lines(self._column.width, looks)
        text = lines[row] if row < len(lines) else None
        return text, block.gutter(looks, block is marked), block.background(looks)


def _joined(text: Strip | None, gutter: Segment | None) -> Strip:
    """A line behind its margin and gutter."""
    parts = [Segment(" "), gutter or Segment("  ")]
    return Strip([*parts, *text] if text is not None else parts)


def _finished(strip: Strip, background: Style, line: int, width: int) -> Strip:
    strip = strip.apply_style(background).adjust_cell_length(width, background)
    return strip.apply_offsets(0, line)
