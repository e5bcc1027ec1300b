"""The blocks of a conversation on screen, which are laid out when they come into view.

A block knows its text and its lines at one width, or a cheap estimate of their number. It knows
neither the widget that shows it nor the other blocks. An answer is Markdown that may still grow;
its thinking is folded to one line once it has ended, and until then its last lines are shown.
Styles come from the component classes in ``app.tcss``, once per theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from localrt import Thinking, split_thinking
from localrt.common.formatting import format_seconds
from localrt.common.option_names import spelled
from localrt.tui.chat.markdown import (
    MarkdownLines,
    MarkdownStyles,
    breakable_text,
    code_blocks,
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


GUTTER = 3  # columns left of the text, including a margin
Kind = Literal["info", "error", "mark"]


class TurnBlock:
    """A part of the conversation. Subclasses say what it consists of.

    ``turn`` is its number in the history, None if it is not a turn. It is number ``branch`` of
    ``branches`` alternatives.
    """

    role = ""
    gap = 1  # empty lines above it

    def __init__(self) -> None:
        self.turn: int | None = None
        self.branch = self.branches = 1
        self.mark = ""  # how it ended, if that is worth showing
        self._unfolded = False
        self._width = -1
        self._styles: Styles | None = None
        self._lines: list[Strip] | None = None
        self._height: int | None = None

    def lines(self, width: int, styles: Styles) -> list[Strip]:
        """The lines in ``width`` columns, gutter excluded."""
        if self._lines is None or width != self._width or styles is not self._styles:
            self._width, self._styles = width, styles
            self._lines = self.lay_out(width, styles)
            self._height = len(self._lines)
        return self._lines

    def height(self, width: int) -> tuple[int, bool]:
        """The number of lines, and whether it is exact (not an estimate)."""
        if self._height is not None and width == self._width:
            return self._height, True
        return self.estimate(width), False

    @property
    def laid_out(self) -> bool:
        return self._lines is not None

    def forget(self) -> None:
        """Free the lines; their number is kept."""
        self._lines = None

    def changed(self) -> None:
        """Lay out again the next time it is shown."""
        self._lines = self._height = None

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
        """Roughly the text that the lines show, without folded parts."""
        return self.source

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        raise NotImplementedError

    def estimate(self, width: int) -> int:
        """A cheap estimate of the number of lines."""
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
        return "\n".join([self.shown().plain, *self._captions])

    def estimate(self, width: int) -> int:
        rows = sum(cells(each.picture, width - 1)[1] for each in self.thumbnails)
        return estimated(self.readable, width) + rows + bool(self.note)

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        lines = wrapped(self.shown(styles), width - 1, styles)
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


_TAIL = 3  # lines of thinking that are shown while it goes on


class AnswerBlock(TurnBlock):
    """``write`` pieces, then ``finish``; or a whole text from the start.

    An answer that only ``calls`` tools takes no lines: calls have their own blocks.
    """

    role = "assistant"

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self._pieces = [clean(source)] if source else []
        self._finished = bool(source)
        self._markdown: MarkdownLines | None = None
        self._drawn = 0  # characters of the answer that are in ``_markdown``
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
            if self.reopened:
                self.reopened = self._finished = False
                self._pieces.clear()
                self.changed()
            self._pieces.append(clean(text))
            self.grown()

    def grown(self) -> None:
        """Lay out new lines the next time it is shown; finished lines stay unchanged."""
        self._lines = None

    def finish(self) -> None:
        """Lay out the whole text as one document: no more pieces will come."""
        self._finished = True
        self.changed()

    def changed(self) -> None:
        """Lay out from the start the next time it is shown."""
        super().changed()
        self._markdown = None
        self.gap, self.role = (0, "") if self._is_nothing else (1, "assistant")

    @property
    def _is_nothing(self) -> bool:
        return self.calls and self._finished and not self.note and not self.source.strip()

    def forget(self) -> None:
        """Free the lines, unless the answer is still growing."""
        if self._finished:
            super().forget()
            self._markdown = None

    def height(self, width: int) -> tuple[int, bool]:
        """The height; that of an answer that has grown is computed again."""
        if self._lines is None and not self._finished:
            return max(self._height or 1, 1), False
        return super().height(width)

    def estimate(self, width: int) -> int:
        thought = split_thinking(self.source)
        return estimated(thought.answer, width) + 2 * _thinks(thought) + bool(self.note)

    def lay_out(self, width: int, styles: Styles) -> list[Strip]:
        if self._is_nothing:
            return []
        thought = split_thinking(self.source)
        lines: list[Strip] = []
        if _thinks(thought):
            lines += self._thinking_lines(thought.thinking, width, styles, open=thought.open)
            if thought.answer:
                lines.append(Strip([]))
        if thought.answer or not (lines or self.note):
            lines += self._markdown_lines(thought.answer, width, styles)
        return [*lines, *self.note_lines(width, styles)] or [Strip([])]

    def _thinking_lines(
        self, thinking: str, width: int, styles: Styles, *, open: bool
    ) -> list[Strip]:
        took = "" if self.thinking_s is None else f" {format_seconds(self.thinking_s)}"
        if open:
            head = f"▾ Thinking ...{took}"
        else:
            took = f" for{took}" if took else ""
            head = f"{'▾' if self._unfolded else '▸'} Thought{took}"
        lines = wrapped(Text(thinking, styles.thinking), width - 2, styles) if thinking else []
        if not self._unfolded:
            lines = lines[-_TAIL:] if open else []
        indent = Strip(Text("  ").render(styles.console))
        return [
            *wrapped(Text(head, styles.mark), width, styles),
            *(Strip.join([indent, line]) for line in lines),
        ]

    def _markdown_lines(self, text: str, width: int, styles: Styles) -> list[Strip]:
        lines = self._markdown
        shrunk = len(text) < self._drawn  # the earlier text turned out to be thinking
        if lines is None or shrunk or lines.width != width or lines.styles is not styles.markdown:
            self._markdown, self._drawn = MarkdownLines(styles.markdown, width), 0
        assert self._markdown is not None
        if len(text) > self._drawn:
            self._markdown.append(text[self._drawn :])
            self._drawn = len(text)
        if self._finished:
            self._markdown.finish()
        return self._markdown.lines


def _thinks(thought: Thinking) -> bool:
    return thought.open or bool(thought.thinking)
