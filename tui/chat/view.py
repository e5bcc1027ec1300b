"""The scrolling conversation: one widget that draws visible sections and estimates the others.

A section is laid out when it comes into view; until then its height is an estimate, whose
correction does not move the visible text. So conversations and answers of any length open and
scroll equally fast. The view follows new text while it is at the bottom. Knows blocks and their
sections, not where they come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import ControlType, Segment
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from localrt.tui.chat.blocks import (
    COMPONENTS,
    GUTTER,
    AnswerBlock,
    Kind,
    Notice,
    Styles,
    TurnBlock,
    UserTurn,
    styles_of,
)
from localrt.tui.chat.layout import BlockColumn, Finder, LinePainter, Match, TextPlace
from localrt.tui.chat.thumbnails import Graphics

_WIDEST = 110  # columns of text
_BAR_STEPS = 2  # steps of the scroll bar per line


class ConversationView(ScrollView, can_focus=False):
    """Blocks, oldest first; one of them may be ``marked`` by keys or a click."""

    COMPONENT_CLASSES: ClassVar[set[str]] = set(COMPONENTS)

    @dataclass
    class Clicked(Message):
        """A click on a block."""

        block: TurnBlock

    def __init__(self, graphics: Graphics) -> None:
        super().__init__()
        self._graphics = graphics
        self.marked: TurnBlock | None = None
        self._copied: tuple[AnswerBlock | None, int] | None = None  # the code block copied last
        self._column = BlockColumn()
        self._painter = LinePainter(self._column)
        self._finder = Finder(self._column)
        self._follows = True
        self._read: tuple[TextPlace | None, int] = (None, 0)  # top text, its line
        self._settling = False
        self._styles_now: Styles | None = None
        self._bar_place = (0, 0)

    @property
    def blocks(self) -> list[TurnBlock]:
        """The shown blocks, oldest first; do not modify."""
        return self._column.blocks

    # -- content ---------------------------------------------------------------------------------

    def add_notice(self, text: str, kind: Kind = "info", *, after: TurnBlock | None = None) -> None:
        """Add a line of the app, below ``after`` or at the end; a repeated line is shown once."""
        notice, last = Notice(text, kind), self.blocks[-1] if self.blocks else None
        same = isinstance(last, Notice) and (last.text, last.kind) == (notice.text, kind)
        if after is None and isinstance(last, Notice) and same:
            last.repeat()
            self.changed(last)
        else:
            self.add(notice, after=after)

    def add_notices(self, *lines: str) -> None:
        self.add(*(Notice(line) for line in lines))

    def add(self, *blocks: TurnBlock, after: TurnBlock | None = None) -> None:
        """Put blocks at the end, or below ``after``."""
        place = len(self.blocks) if after is None else self.blocks.index(after) + 1
        self.blocks[place:place] = blocks
        self._refit(place)

    def prepare(self, blocks: Iterable[TurnBlock]) -> None:
        """Cut and measure blocks that will be added; for a thread."""
        for block in blocks:
            for section in block.sections:
                section.height(self._column.width)

    def drop(self, *blocks: TurnBlock) -> None:
        gone = {id(block) for block in blocks}
        places = [place for place, block in enumerate(self.blocks) if id(block) in gone]
        if places:
            self.blocks[:] = [block for block in self.blocks if id(block) not in gone]
            if id(self.marked) in gone:
                self.marked = None
            self._refit(places[0])

    def clear(self) -> None:
        self.blocks.clear()
        self.marked = None
        self._refit(0)
        self.follow()

    def changed(self, block: TurnBlock) -> None:
        self._finder.forget(block)
        if block in self.blocks:
            # New blocks and growing answers are at the end, so search from there.
            self._refit(len(self.blocks) - 1 - self.blocks[::-1].index(block))

    def turn(self, number: int) -> TurnBlock | None:
        return next((block for block in self.blocks if block.turn == number), None)

    @property
    def marked_turn(self) -> int | None:
        return None if self.marked is None else self.marked.turn

    def toggle_fold(self) -> bool:
        """Fold or unfold the marked or last foldable turn; returns whether there is one."""
        marked = self.marked if self.marked is not None and self.marked.foldable else None
        block = marked or next((b for b in reversed(self.blocks) if b.foldable), None)
        if block is not None:
            block.toggle()
            self.changed(block)
        return block is not None

    def text_to_copy(self) -> tuple[str, str] | None:
        """The marked turn or last answer as text, without its thinking, and a description."""
        block = self.marked or self._last_answer()
        if block is None:
            return None
        text = block.spoken if isinstance(block, AnswerBlock) else block.source
        if not text:
            return None
        what = "answer" if isinstance(block, AnswerBlock) else "message"
        return text, f"the {what}: {len(text):,} characters"

    def code_to_copy(self) -> tuple[str, str] | None:
        """The last code block of the marked or last answer and a description; each further call
        returns the block before.
        """
        marked = self.marked if isinstance(self.marked, AnswerBlock) else None
        block = marked or self._last_answer(with_code=True)
        code = block.code if block is not None else []
        if not code:
            return None
        before = self._copied[1] if self._copied and self._copied[0] is block else len(code)
        place = (before - 1) % len(code)
        self._copied = (block, place)
        language, text = code[place]
        of = f" {place + 1} of {len(code)}" if len(code) > 1 else ""
        lines = text.count("\n")
        size = f"{lines} line" if lines == 1 else f"{lines} lines"
        return text, f"code block{of}: {language or 'text'}, {size}"

    def _last_answer(self, *, with_code: bool = False) -> AnswerBlock | None:
        answers = (block for block in reversed(self.blocks) if isinstance(block, AnswerBlock))
        return next((answer for answer in answers if not with_code or answer.code), None)

    # -- places ----------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether the view is at the bottom, and so follows new text."""
        return self._follows

    def follow(self) -> None:
        """Go to the newest text and follow it."""
        self._follows = True
        self._to_end()

    def mark(self, block: TurnBlock | None) -> None:
        """Mark a block and bring it into view."""
        self.marked = block
        if block is not None and block in self.blocks:
            top, end = self._column.block_span(self.blocks.index(block))
            height = self.size.height
            if top < self.scroll_y or end - top >= height:
                self._go(top)
            elif end > self.scroll_y + height:
                self._go(end - height)
        self.refresh()

    def mark_next(self, step: int) -> None:
        """Mark the turn above (-1) or below (+1) the marked one; below the last, none."""
        turns = [block for block in self.blocks if block.role]
        place = step + (turns.index(self.marked) if self.marked in turns else len(turns))
        if 0 <= place < len(turns):
            self.mark(turns[place])
        elif place >= len(turns):
            self.mark(None)
            self.follow()

    # -- finding ---------------------------------------------------------------------------------

    async def find(self, query: str) -> None:
        """Highlight the matches, and bring the nearest into view."""
        self._finder.look_for(query)
        await asyncio.to_thread(self._finder.count)
        self._go_to(self._finder.nearest(self.scroll_offset.y, self._style()))

    def end_find(self) -> None:
        self._finder.look_for("")
        self.refresh()

    def find_next(self, step: int) -> None:
        self._go_to(self._finder.following(step, self._style()))

    @property
    def match_count(self) -> tuple[int, int]:
        """The current match's number and the number of matches."""
        return self._finder.match_count

    def _go_to(self, place: Match | None) -> None:
        self._finder.now = place
        self._fit_height()  # blocks may have been laid out
        if place is not None:
            line, height = self._finder.line(place, self._style()), self.size.height
            if not self.scroll_y <= line < self.scroll_y + height:
                self._follows = False
                self._go(max(line - height // 3, 0))
        self.refresh()

    # -- layout ----------------------------------------------------------------------------------

    def _refit(self, first: int) -> None:
        """Measure again from block ``first`` on, and keep the visible text in place."""
        if self._read[0] is not None and self._column.first(first) <= self._read[0].section:
            self._read = None, 0
        if not self._column.width:  # nothing is laid out before the first size is known
            return
        self._column.gather(first)
        self._finder.keep()
        self._fit_height()
        self._settle()
        if self._follows:
            self._to_end()
        self.refresh()

    def _fit_height(self) -> None:
        """Adopt the column's height; if only the scroll bar moves, without a new screen layout."""
        size = Size(self.scrollable_content_region.width, self._column.height)
        overflows = size.height > self.size.height
        if self.virtual_size != size and overflows != self.show_vertical_scrollbar:
            self.virtual_size = size
        else:
            self.set_reactive(Widget.virtual_size, size)
            self._move_bar()

    def _move_bar(self) -> None:
        """Move the scroll bar if it visibly changes: painting it costs as much as the text."""
        if not self.show_vertical_scrollbar:
            return
        steps = _BAR_STEPS * self.size.height / max(self.virtual_size.height, 1)
        place = (round(self.scroll_y * steps), round(self.size.height * steps))
        if place != self._bar_place:
            self._bar_place = place
            self.vertical_scrollbar.window_virtual_size = self.virtual_size.height
            self.vertical_scrollbar.position = self.scroll_y

    def _settle(self) -> None:
        """Lay out visible blocks; heights that change do not move the visible text."""
        if self._settling or not self._column.sections or not self.size:
            return
        self._settling = True
        try:
            rounds = 0
            while rounds < 8:  # each round may bring other blocks into view
                if self._follows:
                    self._to_end()
                if not self._settle_once():
                    break
                rounds += 1
            if rounds:
                scroll = self.scroll_offset.y
                self._column.forget(scroll, scroll + self.size.height)
        finally:
            self._settling = False

    def _settle_once(self) -> bool:
        column, scroll = self._column, self.scroll_offset.y
        places = list(column.between(scroll, scroll + self.size.height))
        guessed = [place for place in places if not column.counted(place)]
        if not guessed:
            return False
        anchor = next((place for place in places if place not in guessed), guessed[0])
        offset = column.span(anchor)[0] - scroll
        column.lay_out(guessed, self._style())
        self._fit_height()
        if not self._follows:
            self._go(column.span(anchor)[0] - offset)
        return True

    def _go(self, line: int) -> None:
        self.scroll_to(y=line, animate=False, force=True)

    def _to_end(self) -> None:
        if round(self.scroll_y) != self.max_scroll_y:
            self._go(self.max_scroll_y)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """The view was scrolled, by the reader or to follow new text."""
        self._move_bar()
        if round(old_value) != round(new_value):
            self.refresh()
        if not self._settling:
            self._follows = self.max_scroll_y - new_value < 1
            self._settle()

    def on_resize(self, event: Resize) -> None:
        """Wrap everything again; the text at the top stays there."""
        follows, place = self._follows, self._reading()
        # Without the gutter on the left and a free column on the right; longer lines are hard to
        # read.
        width = self.scrollable_content_region.width - GUTTER - 1
        self._column.width = max(min(width, _WIDEST), 8)
        self._finder.forget()
        self._column.gather()
        if place is not None and not follows:
            self._column.lay_out([place.section], self._style())
        self._settling = True  # a view that is briefly shorter scrolls by itself
        self._fit_height()
        self._settling, self._follows = False, follows
        if place is not None and not follows:
            self._go(self._column.line_of(*place, self._style()))
            self._read = place, self.scroll_offset.y
        self._settle()
        if self._follows:
            self._to_end()
        self.refresh()  # the new size was already painted with the old lines

    def _reading(self) -> TextPlace | None:
        """The text at the top; after a resize, the text that was there before, even if it is now
        within a line.
        """
        place, line = self._read
        if place is None or line != self.scroll_offset.y:
            place = self._column.place_at(self.scroll_offset.y, self._style())
        return place

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles_now = None

    def _style(self) -> Styles:
        if self._styles_now is None:
            self._styles_now = styles_of(self, self._graphics)
        return self._styles_now

    # -- drawing ---------------------------------------------------------------------------------

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines of a part of the view; there is no border to add."""
        filters, background = self.get_line_filters(), self.background_colors[1]
        strips = []
        for y in crop.line_range:
            strip = self.render_line(y)
            for line_filter in filters:
                strip = strip.apply_filter(line_filter, background)
            strips.append(strip)
        if self._graphics == "sixel" and self.screen.is_active:
            strips = [self._with_pixels(y, strip) for y, strip in enumerate(strips, crop.y)]
        if crop.column_span != (0, self.size.width):
            return [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def _with_pixels(self, y: int, strip: Strip) -> Strip:
        """A line of the view with a picture's pixels drawn over it."""
        line = self.scroll_offset.y + y
        place, row = self._column.row(line) if line < self._column.height else (-1, -1)
        section = self._column.sections[place] if row >= 0 else None
        pixels = section.escape(row) if isinstance(section, UserTurn) else ""
        if not pixels:
            return strip
        back = strip.cell_length - GUTTER
        escape = f"\x1b7\x1b[{back}D{pixels}\x1b8"
        return Strip([*strip, Segment(escape, None, [(ControlType.HOME,)])], strip.cell_length)

    def render_line(self, y: int) -> Strip:
        """A line of the view with the mouse selection."""
        line = self.scroll_offset.y + y
        styles, highlights = self._style(), []
        if self._finder.active and line < self._column.height:
            for start, end, now in self._finder.marked(line, styles):
                style = styles.match_now if now else styles.match
                highlights.append((start + GUTTER, end + GUTTER, style))
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(line)) is not None:
            style = self.screen.get_component_rich_style("screen--selection")
            highlights.append((*span, style))
        return self._painter.paint(line, self.size.width, styles, self.marked, highlights)

    # -- mouse -----------------------------------------------------------------------------------

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        if selection.start is None and selection.end is None:
            return "\n\n".join(block.source for block in self.blocks if block.role), "\n"
        return self._painter.selected_text(selection, self._style()), "\n"

    async def _on_click(self, event: Click) -> None:
        event.prevent_default()  # a second click would select the whole conversation
        line = self.scroll_offset.y + event.y
        if event.chain == 1 and line < self._column.height:
            place, row = self._column.row(line)
            block = self._column.owners[place]
            if row >= 0 and block.role:
                self.post_message(self.Clicked(block))
