"""The blocks of a conversation on screen, in sections that are laid out when they come into view.

A section knows its text, and its lines at one width or a cheap estimate of their number. Blocks
know neither the widget that shows them nor each other. An answer is Markdown that may still grow;
its thinking is folded to one line once it has ended, and until then its last lines are shown.
Styles come from the component classes in ``app.tcss``, once per theme.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from localrt import Thinking, split_thinking
from localrt.common.formatting import format_seconds
from localrt.common.markdown_parts import MarkdownCutter, Part, cut, definitions
from localrt.common.option_names import spelled
from localrt.tui.chat.markdown import (
    MarkdownStyles,
    breakable_text,
    code_blocks,
    lines_of,
    markdown_parser,
    widths_of,
    without_marks,
)
from localrt.tui.chat.thumbnails import Graphics, Thumbnail, cells
from localrt.tui.conversation.attachments import Fold
from localrt.tui.text import clean, in_app

if TYPE_CHECKING:
    from textual.widget import Widget

    from localrt import KeptPicture

_PLAIN = ("notice", "error", "mark", "thinking", "attachment", "bar", "waiting-bar", "marked-bar")
_MARKDOWN = ("heading", "code", "quote", "link", "muted")
_FULL = ("user", "waiting", "match", "match-now")  # styles with a background
COMPONENTS = frozenset(
    f"conversation--{part}" for part in (*_PLAIN, *_MARKDOWN, *_FULL, "code-block")
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Styles:
    """Styles by purpose. Only ``user``, ``waiting`` and search matches (``match``, ``match_now``)
    have a background.
    """

    console: Console
    markdown: MarkdownStyles
    base: Style
    user: Style
    waiting: Style
    match: Style
    match_now: Style
    bar: Style
    waiting_bar: Style
    marked_bar: Style
    notice: Style
    error: Style
    mark: Style
    thinking: Style
    attachment: Style
    graphics: Graphics
    colors: bool


def styles_of(widget: Widget, graphics: Graphics = "") -> Styles:
    """The styles of ``widget``'s component classes in the current theme."""

    def full(part: str) -> Style:
        return widget.get_component_rich_style(f"conversation--{part}")

    def ink(part: str) -> Style:
        style = full(part)
        return Style(
            color=style.color,
            bold=style.bold,
            italic=style.italic,
            underline=style.underline,
            dim=style.dim,
        )

    markdown = MarkdownStyles(
        dark=widget.app.current_theme.dark,
        code_block=Style(bgcolor=full("code-block").bgcolor),
        **{name: ink(name) for name in _MARKDOWN},
    )
    return Styles(
        console=markdown.console(),
        markdown=markdown,
        base=widget.visual_style.rich_style,
        graphics=graphics,
        colors=not widget.app.no_color,
        **{name.replace("-", "_"): full(name) for name in _FULL},
        **{name.replace("-", "_"): ink(name) for name in _PLAIN},
    )


_PIECE = 3000  # characters of a long text that are laid out at once: milliseconds
_SMALL = 800  # Markdown's blocks are laid out together up to this size
_SLICE = 1000  # characters of a block that grows
_TAIL = 3  # lines of thinking that are shown while it goes on
# Plain text is cut at the end of a line, or else of a word.
_PIECES = re.compile(
    rf"(?s:.{{{_PIECE}}})(?:[^\n]{{0,{_PIECE}}}\n|[^\n]{{0,{_PIECE}}} |[^\n]{{0,{_PIECE}}})|(?s:.+)"
)


GUTTER = 3  # columns left of the text, including a margin
Kind = Literal["info", "error", "mark"]


class Section:
    """Lines that are laid out together; ``gap`` is the number of empty lines above them."""

    gap = 0
    _laid_out: tuple[int, Styles, list[Strip]] | None = None
    _height: tuple[int, int, bool] | None = None  # the width; the number of lines, if it is exact

    def lines(self, width: int, styles: Styles) -> list[Strip]:
        """The lines in ``width`` columns, gutter excluded."""
        kept = self._laid_out  # replaced as a whole, since a thread may copy the text
        if kept is None or kept[0] != width or kept[1] is not styles:
            self._laid_out = kept = width, styles, self.lay_out(width, styles)
            self._height = width, len(kept[2]), True
        return kept[2]

    def height(self, width: int) -> tuple[int, bool]:
        """The number of lines, and whether it is exact (not an estimate)."""
        if self._height is None or self._height[0] != width:
            self._height = width, self.estimate(width), False
        return self._height[1:]

    @property
    def laid_out(self) -> bool:
        return self._laid_out is not None

    def forget(self) -> None:
        """Free the lines; their number is kept."""
        self._laid_out = None

    @property
    def readable(self) -> str:
        """Roughly the text that the lines show, without folded parts."""
        raise NotImplementedError

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        raise NotImplementedError

    def estimate(self, width: int) -> int:
        """A cheap estimate of the number of lines."""
        return estimated(self.readable, width)


class DrawnSection(Section):
    """A section of ``readable`` text that ``draw`` lays out."""

    def __init__(self, readable: str, draw: Callable[[int, Styles], list[Strip]]) -> None:
        self._text, self._draw = readable, draw

    @property
    def readable(self) -> str:
        return self._text

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        return self._draw(width, styles)


class TurnBlock(Section):
    """A part of the conversation; most are a single section.

    ``turn`` is its number in the history, None if it is not a turn. It is number ``branch`` of
    ``branches`` alternatives.
    """

    role = ""
    gap = 1

    def __init__(self) -> None:
        self.turn: int | None = None
        self.branch = self.branches = 1
        self.mark = ""  # how it ended, if that is worth showing
        self._unfolded = False

    @property
    def sections(self) -> Sequence[Section]:
        """What it consists of, from top to bottom."""
        return (self,)

    def changed(self) -> None:
        """Lay out again the next time it is shown."""
        self._laid_out = self._height = None

    def gutter(self, styles: Styles, marked: bool) -> Segment:
        """The columns on the left of every line."""
        return Segment("┃ ", styles.marked_bar) if marked else Segment("  ")

    def background(self, styles: Styles) -> Style:
        return styles.base

    @property
    def foldable(self) -> bool:
        """Whether ``toggle`` does anything."""
        return False

    def toggle(self) -> None:
        """Fold or unfold the block."""
        self._unfolded = not self._unfolded
        self.changed()

    @property
    def source(self) -> str:
        """The text as written, for copying."""
        raise NotImplementedError

    @property
    def readable(self) -> str:
        return self.source

    def estimate(self, width: int) -> int:
        return estimated(self.source, width) + bool(self.note)

    @property
    def note(self) -> str:
        """``2/3 · stopped``: the small line below; empty for none."""
        branch = f"{self.branch}/{self.branches}" if self.branches > 1 else ""
        return " · ".join(part for part in (branch, self.mark) if part)

    def note_lines(self, width: int, styles: Styles) -> list[Strip]:
        return wrapped(Text(self.note, styles.mark), width, styles) if self.note else []


class UserTurn(TurnBlock):
    """A user's message as written, followed by its pictures; ``waiting`` until it is sent."""

    role = "user"

    def __init__(
        self,
        text: str,
        *,
        waiting: bool = False,
        folds: Sequence[Fold] = (),
        pictures: Sequence[KeptPicture] = (),
        captions: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.message = text
        self.waiting = waiting
        self.folds = tuple(folds)
        self.thumbnails = [Thumbnail(picture) for picture in pictures]
        self._captions = captions
        self._escapes: dict[int, str] = {}
        self._start = 0  # of what is in the last section, with the pictures
        self._sections: list[Section] | None = None

    @property
    def source(self) -> str:
        return self.message

    @property
    def foldable(self) -> bool:
        return bool(self.folds)

    def gutter(self, styles: Styles, marked: bool) -> Segment:
        if marked:
            return Segment("┃ ", styles.user + styles.marked_bar)
        if self.waiting:
            return Segment("▌ ", styles.waiting + styles.waiting_bar)
        return Segment("▌ ", styles.user + styles.bar)

    def background(self, styles: Styles) -> Style:
        return styles.waiting if self.waiting else styles.user

    @property
    def sections(self) -> Sequence[Section]:
        if self._sections is None:
            text, start, self._sections = self.shown().plain, 0, []
            for piece in _PIECES.findall(text)[:-1]:
                draw = partial(self._piece, start, start + len(piece))
                self._sections.append(DrawnSection(piece, draw))
                start += len(piece)
            self._start = start
            self._sections.append(self)
            self.gap = 0
            self._sections[0].gap = 1
        return self._sections

    def _piece(self, start: int, end: int, width: int, styles: Styles) -> list[Strip]:
        text = self.shown(styles)[start:end]
        text.remove_suffix("\n")
        return wrapped(text, width - 1, styles)

    def changed(self) -> None:
        super().changed()
        self._sections = None

    def shown(self, styles: Styles | None = None) -> Text:
        """The message, with labels for folded parts and pictures."""
        text, place = Text(), 0
        folds = () if self._unfolded else self.folds
        labels = [(fold.start, fold.end, f"▸ {clean(fold.label)}") for fold in folds]
        pictures = [thumbnail.picture for thumbnail in self.thumbnails]
        labels += [(each.place, each.place, f"▣ {clean(each.name)}") for each in pictures]
        for start, end, label in sorted(labels):
            text.append(clean(self.message[place:start]))
            text.append(label, styles.attachment if styles else None)
            place = end
        return text.append(clean(self.message[place:]))

    @property
    def readable(self) -> str:
        return "\n".join([self.shown().plain[self._start :], *self._captions])

    def estimate(self, width: int) -> int:
        rows = sum(cells(each.picture, width - 1)[1] for each in self.thumbnails)
        return estimated(self.readable, width) + rows + bool(self.note)

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        lines = wrapped(self.shown(styles)[self._start :], width - 1, styles)
        self._escapes.clear()
        for thumbnail, line in zip(self.thumbnails, self._captions, strict=True):
            if styles.colors:
                drawn = thumbnail.lines(width - 1, styles.graphics)
                self._escapes |= enumerate(thumbnail.escapes, len(lines))
                lines += drawn
            lines += wrapped(Text(line, styles.mark), width - 1, styles)
        return [*lines, *self.note_lines(width, styles)]

    def escape(self, row: int) -> str:
        """The escape sequence that draws a picture's pixels over a row, from its first column."""
        return self._escapes.get(row, "")


class Notice(TurnBlock):
    """A line of the app itself: information, an error, or a mark below an answer."""

    def __init__(self, text: str, kind: Kind = "info") -> None:
        super().__init__()
        self.text = clean(spelled(text, in_app))
        self.kind = kind
        self.gap = 0 if kind == "mark" else 1
        self._times = 1

    @property
    def source(self) -> str:
        return self.text if self._times == 1 else f"{self.text} ({self._times} times)"

    def repeat(self) -> None:
        """Count a repetition of the same notice instead of showing it again."""
        self._times += 1
        self.changed()

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        style = {"info": styles.notice, "error": styles.error, "mark": styles.mark}[self.kind]
        return wrapped(Text(self.source, style), width, styles)


def wrapped(text: Text, width: int, styles: Styles) -> list[Strip]:
    """Text as lines of at most ``width`` columns; at least one."""
    text.expand_tabs(4)
    text.stylize_before(text.style)  # Rich would leave the text's own style to the printer
    lines = breakable_text(text).wrap(styles.console, max(width, 4), overflow="fold")
    rows = (without_marks(line.render(styles.console)) for line in lines)
    return [Strip([s for s in row if s.text]) for row in rows] or [Strip([])]


def estimated(text: str, width: int) -> int:
    """A cheap estimate of the lines that text takes."""
    width = max(width, 8)
    return max(sum(1 + len(line) // width for line in text.split("\n")), 1)


class MarkdownSection(Section):
    """A part of an answer."""

    def __init__(self, part: Part, links: dict[str, Any]) -> None:
        self.part, self._links = part, links
        self._below = False  # whether it is below another
        self._table: MarkdownSection | None = None  # where its table begins
        self._widths: tuple[int, Sequence[int]] = -1, ()

    def put_below(self, above: MarkdownSection | None) -> None:
        """Follow another section, or be the first."""
        self._below, self._table = above is not None, None
        if above is not None and "|" in self.part.before:
            same = self.part.before == above.part.before
            self._table = above._table if same else above

    @property
    def readable(self) -> str:
        return self.part.text

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        widths = self._table.widths(width, styles) if self._table else ()
        how = width, styles.markdown, styles.console
        lines = lines_of(self.part, self._links, *how, widths)
        return [Strip([]), *lines] if lines and self._below and not self.part.goes_on else lines

    def widths(self, width: int, styles: Styles) -> Sequence[int]:
        """The widths of the columns of the table that it ends in."""
        if self._widths[0] != width:
            how = width, styles.markdown, styles.console
            self._widths = width, widths_of(self.part, self._links, *how)
        return self._widths[1]


class AnswerBlock(TurnBlock):
    """``write`` pieces, then ``finish``; or a whole text from the start.

    An answer that only ``calls`` tools takes no lines: calls have their own blocks.
    """

    role = "assistant"

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self._pieces = [clean(source)] if source else []
        self._finished = bool(source)
        self._sections: list[Section] | None = None  # None: they are made again
        self._thoughts: dict[tuple[int, str], DrawnSection] = {}
        self._answer: list[MarkdownSection] = []
        self._links: dict[str, Any] = {}
        self._cutter = MarkdownCutter(markdown_parser(), least=_SMALL, most=_PIECE)
        self.thinking_s: float | None = None
        self.calls = self.reopened = False

    @property
    def source(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def spoken(self) -> str:
        """The answer without its thinking."""
        return split_thinking(self.source).answer

    @property
    def readable(self) -> str:
        return self.source if self._unfolded else self.spoken

    @property
    def thinking(self) -> bool:
        return split_thinking(self.source).open

    @property
    def code(self) -> list[tuple[str, str]]:
        """Language and text of the code blocks, first to last."""
        return [block for block in code_blocks(self.spoken) if block[1].strip()]

    @property
    def foldable(self) -> bool:
        return _thinks(split_thinking(self.source))

    def reopen(self) -> None:
        """From now on the next piece replaces the whole text."""
        self.reopened, self.mark = True, ""
        self.changed()

    def write(self, text: str) -> None:
        if text:
            text = clean(text)
            if self.reopened:
                self.reopened = self._finished = False
                if not text.startswith(self.source):
                    self._cutter.restart()
                self._pieces.clear()
                self.changed()
            self._pieces.append(text)
            self._sections = None

    def finish(self) -> None:
        """Called when no more pieces will come."""
        self._finished = True
        self.changed()

    def changed(self) -> None:
        """Look at the text again the next time it is shown; what is the same stays laid out."""
        super().changed()
        self._sections = None
        self.gap, self.role = (0, "") if self._is_nothing else (1, "assistant")

    @property
    def _is_nothing(self) -> bool:
        return self.calls and self._finished and not self.note and not self.source.strip()

    @property
    def sections(self) -> Sequence[Section]:
        if self._sections is None:
            thought = split_thinking(self.source)
            found: list[Section] = []
            if _thinks(thought):
                found += self._thinking_sections(thought)
            found += self._answer_sections(thought.answer)
            if self.note or not (found or self._is_nothing):
                found.append(DrawnSection("", self._last_lines))
            if found:
                found[0].gap = self.gap
            self._sections = found
        return self._sections

    def _last_lines(self, width: int, styles: Styles) -> list[Strip]:
        return self.note_lines(width, styles) or [Strip([])]

    def _thinking_sections(self, thought: Thinking) -> list[Section]:
        known, self._thoughts = self._thoughts, {}
        for key in enumerate(_PIECES.findall(thought.thinking) if self._unfolded else ()):
            draw = partial(_thinking_lines, key[1])
            self._thoughts[key] = known.get(key) or DrawnSection(key[1], draw)
        gap = [DrawnSection("", lambda *_: [Strip([])])] if thought.answer else []
        head = DrawnSection("", partial(self._head_lines, thought))
        return [head, *self._thoughts.values(), *gap]

    def _head_lines(self, thought: Thinking, width: int, styles: Styles) -> list[Strip]:
        took = "" if self.thinking_s is None else f" {format_seconds(self.thinking_s)}"
        if thought.open:
            head = f"▾ Thinking ...{took}"
        else:
            took = f" for{took}" if took else ""
            head = f"{'▾' if self._unfolded else '▸'} Thought{took}"
        lines = wrapped(Text(head, styles.mark), width, styles)
        if thought.open and thought.thinking and not self._unfolded:
            # Begins at the same character while little is added, so that lines break the same.
            begin = max(len(thought.thinking) // _PIECE - 1, 0) * _PIECE
            lines += _thinking_lines(thought.thinking[begin:], width, styles)[-_TAIL:]
        return lines

    def _answer_sections(self, answer: str) -> list[MarkdownSection]:
        cutter, parser, grows = self._cutter, markdown_parser(), not self._finished
        stay = cutter.take(answer, grows=grows)
        links = self._links if grows else definitions((*cutter.parts, cutter.last), parser)
        if links != self._links:
            stay, self._links, self._answer = 0, links, []
        last = cut(cutter.last, parser, least=_SMALL, most=_SLICE) if grows else [cutter.last]
        kept = self._answer[:stay]
        known = {each.part: each for each in self._answer[stay:]}
        for part in (*cutter.parts[stay:], *(part for part in last if part.text.strip())):
            section = known.pop(part, None) or MarkdownSection(part, links)
            section.put_below(kept[-1] if kept else None)
            kept.append(section)
        self._answer = kept
        return kept


def _thinking_lines(text: str, width: int, styles: Styles) -> list[Strip]:
    indent = Strip(Text("  ").render(styles.console))
    lines = wrapped(Text(text.removesuffix("\n"), styles.thinking), width - 2, styles)
    return [Strip.join([indent, line]) for line in lines]


def _thinks(thought: Thinking) -> bool:
    return thought.open or bool(thought.thinking)
